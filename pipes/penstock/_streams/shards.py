"""Shards: a map-style dataset over files of many records each."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, final

import numpy as np
from torch.utils.data import Dataset, Subset

from penstock._arguments import Shown, brief, whole_number
from penstock._random.draws import trying
from penstock._random.orders import SequentialOrder, ShuffledOrder
from penstock._random.shard_order import usual_lanes
from penstock._streams.counted import IndexedRecords
from penstock._streams.from_copies import FromCopies
from penstock._streams.paths import Reach, kept_in, reached
from penstock._streams.shard_names import names_of
from penstock._streams.tables import Pieces as PiecesOfFiles
from penstock._streams.uncounted import RecordStream
from penstock._streams.uncounted import ShardOptions as ShardOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from penstock._random.order import Order
    from penstock._statistics import CopyStatistics
    from penstock._streams.steps import Step


@final
class Shards(Shown, Dataset[Any]):
    """Data in shards, such as files of many records each. Pass it to `Loader.from_dataset` like any dataset.

    *Counted* (``counts=``): a dataset like any other, the concatenation of its shards. It brings its own order, a `ShardOrder`: with ``shuffle=True`` the
    shards are shuffled in every epoch and read front to back, in lanes that take turns; without it, the records come in the order given. A shard that can
    be indexed is read by position. One that can only be iterated is read forward, and records that are passed over are kept until they are asked for: at
    most ``2 * window`` of them and a few batches, for each lane. The sequence is the same either way.

    *Not counted* (``epoch_size=``): a stream without end, for records that are filtered, split or joined on the way (``steps``), or that nobody has counted. Each
    of the ``lanes`` reads whole shards, one after another, pass after pass, and the items of the lanes come in turn; see `InterleavedOrder`. Every record comes
    once in a pass. Where one pass ends and the next begins depends on the lengths, so an epoch is a number of items, and goes on where the one before was
    left. To resume, a shard is read again in each lane, up to where the lane was: whole shards before it are passed over if bookmarks say how many outputs
    they had, and otherwise read, too.

    Either way the sequence is the same with any number of workers and ranks, and after any resume.

    Each open shard is used by one thread at a time, so what ``open`` returns need not be thread-safe. A process has a bounded number of shards open: those of the lanes and 4 more, or
    64 that can be indexed if that is more; never more than half of the files it may open.

    Args:
        shards: One path, or anything else that ``open`` accepts, for each shard; or the number of shards, which are then called 0, 1, 2, ….
        open: Called with one of ``shards``. Returns an object with ``__len__`` and ``__getitem__`` (and ``__getitems__``, if that is faster), or an iterable
            of records, always in the same order. If it has an argument ``start``, it must return an iterable that begins with that record. What it
            returns is closed by its ``close``, if it has one. Worker processes need an ``open`` that can be pickled, unless they are forked.
        counts: How many records each shard has. Checked when a shard is opened, or has been read to its end.
        lanes: Counted: see `ShardOrder`; without a shuffle the default is 1. Not counted: at most the shards; default as in `ShardOrder`, shuffled or not. For
            a large job choose a multiple of the ranks; its workers are kept busy by as many lanes as there are workers, or more.
        most_lanes: Bound of the default of ``lanes``, for shards of which only so many should be open at a time.
        window: See `ShardOrder`. Means nothing without a shuffle. Counted only; otherwise there is the step `Shuffle`.
        name: What messages call a shard.
        settings: JSON that a saved state must agree with, in addition to the counts or steps: what else decides which records there are.
        transform: Applied to each record by whoever loads it: decoding, augmentation. Its random numbers are the sample's (``penstock.sample().rng``).
        epoch_size: Items in an epoch, of all ranks together, from 1 to 2**56. Not counted only.
        steps: Functions from an iterator to an iterator, applied to the records of a shard one after another: `Filter`, `Shuffle`, `Pack`, or generator functions
            of yours. They must be deterministic. A shard's end is the end of the iterator. Not counted only.
        bookmarks: A folder that keeps how many outputs each shard had; True: one in the user's cache, unless the shards are numbers, which do not say
            what is in them; False: none. Ranks on several machines, and runs
            that are resumed elsewhere, need a shared one, next to the checkpoints. It changes only how long a resume takes. Not counted only.
        retries: How often in a row to open a shard again after an ``OSError``, with growing pauses. Not counted only.
        on_error: ``"skip"`` leaves out, with a warning, records that cannot be read, and a shard from the first error on (all of it, if it is missing).
            Not counted only.
        storage_options: For the file system of fsspec that fetches copies from paths with ``://``: keys, an endpoint, headers. Not part of the state.
        cache_dir: A folder on a disk of this host in which copies of shards that are files are kept, for all of its processes and for later runs; None: none are.
            ``open`` is then called with the path of the copy; and with the shard itself if there is no room, or its version cannot be known. Not part of the state.
        max_cache_size: What all copies in that folder may take: bytes, or a text such as ``"200GB"``.
        ahead: How many shards of each lane are copied before they are read, where copies are kept.

    Raises:
        ValueError: Neither ``counts`` nor ``epoch_size``, or arguments of both; counts of another number than the shards, or an argument out of bounds. On
            reading: a shard has more or fewer records than it should, or nothing comes out of the steps.
        TypeError: ``shards`` is a single path, or ``open`` cannot be called. On reading: it returned something that has no records.
        StateMismatch: On reading: a shard has given another number of outputs than before.
    """

    __module__ = "penstock"

    def __init__(
        self,
        shards: Sequence[Any] | int,
        open: Callable[..., Any],
        *,
        counts: npt.ArrayLike | None = None,
        lanes: int | None = None,
        most_lanes: int | None = None,
        window: int = 0,
        name: str = "shard",
        settings: dict[str, Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        epoch_size: int | None = None,
        steps: Sequence[Step] = (),
        bookmarks: str | os.PathLike[str] | bool = True,
        retries: int = 3,
        on_error: Literal["raise", "skip"] = "raise",
        storage_options: Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        max_cache_size: int | str | None = None,
        ahead: int = 1,
    ) -> None:
        if isinstance(shards, str | bytes | os.PathLike):
            raise TypeError(f"shards={shards!r} is one path, and a list of paths was expected: [{shards!r}].")
        if callable(steps):
            raise TypeError(f"steps={steps!r:.80} is one step, and a list of steps was expected: steps=[…].")
        for what, function in (("open", open), *(() if transform is None else (("transform", transform),))):
            if not callable(function):
                raise TypeError(f"{what} must be a function, and {function!r:.80} cannot be called.")
        if cache_dir is not None or max_cache_size is not None:
            if not isinstance(shards, Sequence) or not all(isinstance(shard, str | os.PathLike) for shard in shards):
                raise TypeError(
                    f"cache_dir={cache_dir!r} keeps copies of files, so shards must be a list of paths, and {shards!r:.80} came."
                )
            reach = Reach(storage_options, cache_dir, max_cache_size, ahead)
            shards, open = reach.of([reached(os.fspath(shard), storage_options) for shard in shards]), FromCopies(open)
        self.shards: Sequence[Any] = shards if isinstance(shards, Sequence) else range(whole_number("shards", shards, 0))
        settings = copy.deepcopy(settings)
        self._transform = transform
        self._records: IndexedRecords | RecordStream
        if counts is not None:
            if epoch_size is not None or len(steps):
                word = "epoch_size=" if epoch_size is not None else "steps="
                raise ValueError(
                    f"{word} is for records that nobody has counted, and the number of these is known (counts=, an index, or what their files say). There are two ways: "
                    f"drop epoch_size= and steps=, and an epoch is all the records (transform= changes them one by one, penstock.filtered leaves some out); or drop counts= and "
                    f"index=, say epoch_size=, and an epoch is so many items of what the steps make."
                )
            self._records = IndexedRecords(self.shards, open, counts, lanes, most_lanes, window, name, settings)
        else:
            if epoch_size is None:
                raise ValueError(
                    "counts=None: the order is made of the number of records in each shard. Pass them as counts=, or write an index of the files once, with "
                    "python -m penstock index, and read them with penstock.formats. Or have the shards read without being counted, and say how many items make an epoch: "
                    "epoch_size=."
                )
            if window:
                raise ValueError(
                    f"window={window} needs counts=. Without them, shuffle inside the shards: steps=[penstock.Shuffle({window})]."
                )
            if on_error not in ("raise", "skip"):
                raise ValueError(f"on_error={on_error!r} is neither 'raise' nor 'skip'.")
            lanes = usual_lanes(len(self.shards), most_lanes) if lanes is None else lanes
            options: ShardOptions = {"steps": steps, "bookmarks": bookmarks, "retries": retries, "on_error": on_error}
            self._records = RecordStream(self.shards, open, epoch_size, lanes, name, settings, options)
            self.forward_lanes = self._records.lanes  # tells the loader to leave each lane to one worker
        if transform is not None or counts is None:
            self.__getitems__ = None  # type: ignore[method-assign,assignment]  # one by one, so that each has its own random numbers, and an error its own address

    @classmethod
    def of(
        cls, dataset: Any, piece: int, *, lanes: int | None = None, pieces_seed: int | None = None, **options: Unpack[ShardOptions]
    ) -> Shards:
        """Pieces of a map-style dataset as shards, for ``steps`` that filter, split or join its samples.

        Args:
            dataset: Has ``__len__`` and ``__getitem__``, or ``__getitems__``.
            piece: Samples in a shard; steps end at its end. It should be much larger than what they hold: a `Shuffle` window, a pack.
            lanes: See `Shards`.
            pieces_seed: Cut a shuffled order into pieces, the same in every pass. None: neighbours make a piece.
            **options: ``transform``, ``epoch_size``, ``steps``, ``bookmarks``, ``retries``, ``on_error``: see `Shards`.

        Raises:
            ValueError: See `Shards`.
        """
        length = len(dataset)
        order = SequentialOrder(length) if pieces_seed is None else ShuffledOrder(length, pieces_seed)
        open = Pieces(dataset, whole_number("piece", piece, 1), order)
        return cls(-(-length // piece), open, lanes=lanes, name="piece", settings={**order.settings(), "piece": piece}, **options)

    @property
    def counts(self) -> np.ndarray | None:
        """How many records each shard has: int64, shape ``(shards,)``; None if they are not counted."""
        return self._records.counts if isinstance(self._records, IndexedRecords) else None

    @property
    def shard_names(self) -> str | None:
        """A checksum of the shards' names, in the order given; see `Fetch`. None if they are just numbers."""
        if isinstance(self.shards, range):
            return None
        return names_of(self.shards.files if isinstance(self.shards, PiecesOfFiles) else self.shards)

    def details(self) -> dict[str, Any]:
        records = self._records
        if isinstance(records, IndexedRecords):
            return {"shards": len(self.shards), "records": len(records), "lanes": records.cuts}
        return {"shards": len(self.shards), "epoch_size": len(records), "lanes": records.lanes}

    def copy_statistics(self) -> CopyStatistics | None:
        """What was done with the copies of the files; None if none are kept."""
        first = next(iter(self.shards), None)
        cache = kept_in(getattr(first, "path", first))
        return None if cache is None else cache.statistics()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        """Counted: record ``index`` of all shards together; a negative index counts from the end. Not counted: the item that comes as number ``index``."""
        record, transform = self._records[index], self._transform
        if transform is not None and (trial := trying.get()) is not None:
            transform = trial.watched(transform, f"transform {brief(transform)}")
        return record if transform is None else transform(record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The records of many indices. Each shard is read once, front to back. None unless the shards are counted and there is no transform."""
        assert isinstance(self._records, IndexedRecords)
        return self._records.gathered(indices)

    def order(self, *, shuffle: bool, seed: int) -> Order:
        """The order of the records; see `OrderedDataset`. Shards that are not counted can have one only, because it decides what an index means."""
        if isinstance(self._records, RecordStream):
            return self._records.order(shuffle=shuffle, seed=seed)
        order = self._records.order(shuffle=shuffle, seed=seed)
        if self._records.reads_forward:
            self.forward_cuts: int | None = order.lanes  # tells the loader to leave each lane to one worker
        return order

    def read_by_all(self) -> None:
        """For a loader that takes the records in another order than `order`, or has no fixed workers: no lane has a worker of its own."""
        if isinstance(self._records, IndexedRecords):
            self.forward_cuts = None
            self._records.read_by_all()

    def close(self) -> None:
        """Close the files that are open in this process; garbage collection does the same. Idempotent. Reading opens them again."""
        self._records.close()


def close_shards(dataset: Any) -> None:
    """Close what was opened to read all of ``dataset``, if it is `Shards` or a subset of them: whoever reads it next may want one shard, or another process."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, Shards):
        dataset.close()


@final
class Pieces:
    """Opens a piece of a map-style dataset: ``piece`` samples that stand together in an order."""

    def __init__(self, dataset: Any, piece: int, order: Order) -> None:
        self._dataset = dataset
        self._piece = piece
        self._order = order

    def __call__(self, shard: int) -> Iterator[Any]:
        """The samples of a piece."""
        places = np.arange(shard * self._piece, min((shard + 1) * self._piece, len(self._order)))
        indices: list[int] = self._order.indices(0, places).tolist()
        many = getattr(self._dataset, "__getitems__", None)
        if not callable(many):
            yield from map(self._dataset.__getitem__, indices)
            return
        for begin in range(0, len(indices), _AT_ONCE):
            yield from many(indices[begin : begin + _AT_ONCE])


_AT_ONCE: Final = 64
"""Samples asked for together, of a dataset that can load many."""
