"""Shards: a map-style dataset over files of many records each."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, final

import numpy as np
from torch.utils.data import Dataset, Subset

from penstock._arguments import Shown, whole_number
from penstock._random.orders import SequentialOrder, ShuffledOrder
from penstock._random.shard_order import usual_lanes
from penstock._streams.counted import IndexedRecords
from penstock._streams.from_copies import FromCopies
from penstock._streams.paths import Reach, kept_in, listed, reached
from penstock._streams.shard_names import names_of
from penstock._streams.tables import Pieces as PiecesOfFiles
from penstock._streams.uncounted import RecordStream
from penstock._streams.uncounted import ShardOptions as ShardOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from penstock._random.order import Order
    from penstock._random.orders import PlainOrder
    from penstock._statistics import CopyStatistics
    from penstock._streams.steps import Step


@final
class Shards(Shown, Dataset[Any]):
    """Data in shards, such as files with many records each. Pass it to `Loader.from_dataset` like any dataset.

    *Counted* (``counts=``): behaves like any map-style dataset, the concatenation of its shards. It has its own order, a `ShardOrder`: with ``shuffle=True`` the
    shards are shuffled in every epoch and read front to back, in lanes that take turns; without it, the records come in the order given. A shard that
    supports indexing is read by position. A shard that can only be iterated is read forward, and records that were passed over are buffered until they are requested: at
    most ``2 * window`` records plus a few batches per lane. The sequence is the same either way.

    *Not counted* (``epoch_size=``): an endless stream, for records that are filtered, split or joined on the way (``steps``), or whose number is unknown. Each
    of the ``lanes`` reads whole shards, one after another, pass after pass, and the lanes yield items in turn; see `InterleavedOrder`. Every record appears
    once per pass. The boundary between two passes depends on the lengths, so an epoch is a fixed number of items and continues where the previous epoch
    stopped. On resume, each lane rereads its current shard up to its position. Bookmarks record how many outputs earlier shards had, so that those are skipped;
    without bookmarks they are read as well.

    In both cases the sequence is the same with any number of workers and ranks, and after any resume.

    Each open shard is used by one thread at a time, so what ``open`` returns need not be thread-safe. The number of shards that a process has open is bounded: one per lane plus 4, or
    64 shards with indexing if that is more; but never more than half of the files that the process may open.

    Args:
        shards: One path, or any other value that ``open`` accepts, per shard; or the number of shards, which are then numbered 0, 1, 2, ….
        open: Called with one of ``shards``. Returns an object with ``__len__`` and ``__getitem__`` (and ``__getitems__``, if that is faster), or an iterable
            of records, always in the same order. If it has a parameter ``start``, it must return an iterable that begins with that record. If what it
            returns has a ``close`` method, that is called. Worker processes need an ``open`` that can be pickled, unless they are forked.
        counts: The number of records in each shard. Checked when a shard is opened or has been read to its end.
        lanes: Counted: see `ShardOrder`; without a shuffle the default is 1, and more interleave the records. Not counted: at most the number of shards; the default is that of `ShardOrder`, shuffled or
            not. For a large job choose a multiple of the number of ranks, and at least as many lanes per rank as it has workers, to keep them all busy.
        most_lanes: Upper limit for the default ``lanes``, for shards of which only so many should be open at a time.
        window: See `ShardOrder`. Ignored without a shuffle. Counted only; for uncounted shards use the step `Shuffle`.
        name: What error messages call a shard.
        settings: JSON that must match when a state is loaded, in addition to the counts or steps: anything else that determines which records there are.
        transform: Applied to each record where it is loaded: decoding, augmentation. Its random numbers are those of the sample (``penstock.sample().rng``).
        epoch_size: Items in an epoch, over all ranks, from 1 to 2**56. Not counted only.
        steps: Functions from an iterator to an iterator, applied to the records of a shard one after another: `Filter`, `Shuffle`, `Pack`, or your own generator
            functions. They must be deterministic. The iterator ends at the end of the shard. Not counted only.
        bookmarks: A folder that records how many outputs each shard had; True: a folder in the user's cache, unless the shards are numbers, which do not
            identify their contents; False: none. Ranks on several machines, and runs that are resumed elsewhere, need a shared folder, next to the checkpoints.
            Bookmarks affect only how long a resume takes. Not counted only.
        retries: How many times in a row to reopen a shard after an ``OSError``, with growing pauses. Not counted only.
        on_error: ``"skip"`` skips records that cannot be read, and the rest of a shard from its first error on (all of it, if it is missing), with a warning.
            Not counted only.
        storage_options: Passed to the fsspec file system that copies paths with ``://``: keys, an endpoint, headers. Not part of the state.
        cache_dir: Folder on a local disk for copies of shards that are files, shared by all processes of this host and kept for later runs. None: no copies.
            ``open`` is then called with the path of the copy, or with the shard itself if there is no room or its version cannot be determined. Not part of the state.
        max_cache_size: Limit for all copies in that folder together, in bytes or as a string such as ``"200GB"``.
        ahead: How many shards per lane to copy before they are read, if copies are kept.

    Raises:
        ValueError: Neither ``counts`` nor ``epoch_size`` was given, or arguments that belong to both; the number of counts differs from the number of shards; or an
            argument is out of bounds. On reading: a shard has more or fewer records than it should, or the steps yield nothing.
        TypeError: ``shards`` is a single path, or ``open`` is not callable. On reading: ``open`` returned something that has no records.
        StateMismatch: On reading: the number of outputs of a shard has changed.
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
            raise TypeError(f"shards={shards!r} is a single path, but must be a list of paths: [{shards!r}].")
        # An array without dimensions is a number.
        if isinstance(shards, Iterable) and not isinstance(shards, Sequence) and getattr(shards, "ndim", 1):
            shards = listed(shards)
        if callable(steps):
            raise TypeError(f"steps={steps!r:.80} is a single step, but must be a list of steps: steps=[…].")
        for what, function in (("open", open), *(() if transform is None else (("transform", transform),))):
            if not callable(function):
                raise TypeError(f"{what} must be a function, but {function!r:.80} is not callable.")
        if cache_dir is not None or max_cache_size is not None:
            if not isinstance(shards, Sequence) or not all(isinstance(shard, str | os.PathLike) for shard in shards):
                raise TypeError(f"cache_dir={cache_dir!r} keeps copies of files, so shards must be a list of paths, not {shards!r:.80}.")
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
                    f"{word} is for records of unknown number, but the number of these is known (counts=, an index, or the files' own metadata). Either drop epoch_size= and "
                    f"steps=: an epoch is then all records (transform= changes records one by one, and penstock.filtered selects some). Or drop counts= and "
                    f"index=, and pass epoch_size=: an epoch is then that many items of what the steps yield."
                )
            self._records = IndexedRecords(self.shards, open, counts, lanes, most_lanes, window, name, settings)
        else:
            if epoch_size is None:
                raise ValueError(
                    "counts=None: the order needs the number of records in each shard. Pass counts=; or write an index of the files once, with "
                    "python -m penstock index, and read them with penstock.formats; or pass epoch_size=, the number of items in an epoch, to read the shards without "
                    "counting them."
                )
            if window:
                raise ValueError(
                    f"window={window} needs counts=. Without them, shuffle within the shards: steps=[penstock.Shuffle({window})]."
                )
            if on_error not in ("raise", "skip"):
                raise ValueError(f"on_error={on_error!r} must be 'raise' or 'skip'.")
            lanes = usual_lanes(len(self.shards), most_lanes) if lanes is None else lanes
            options: ShardOptions = {"steps": steps, "bookmarks": bookmarks, "retries": retries, "on_error": on_error}
            self._records = RecordStream(self.shards, open, epoch_size, lanes, name, settings, options)
            self.forward_lanes = self._records.lanes  # tells the loader to give each lane to one worker
        if transform is not None or counts is None:
            self.__getitems__ = None  # type: ignore[method-assign,assignment]  # one by one, so that each sample has its own random numbers, and each error names its sample

    @classmethod
    def of(
        cls, dataset: Any, piece: int, *, lanes: int | None = None, pieces_seed: int | None = None, **options: Unpack[ShardOptions]
    ) -> Shards:
        """Cut a map-style dataset into shards, for ``steps`` that filter, split or join its samples.

        Args:
            dataset: Has ``__len__`` and ``__getitem__``, or ``__getitems__``.
            piece: Samples per shard. Steps end at the end of a shard, so it should be much larger than what they hold: a `Shuffle` window, a pack.
            lanes: See `Shards`.
            pieces_seed: Shuffle the dataset with this seed before cutting, the same way in every pass. None: adjacent samples form a shard.
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
        """The number of records in each shard: int64, shape ``(shards,)``; None if they are not counted."""
        return self._records.counts if isinstance(self._records, IndexedRecords) else None

    @property
    def shard_names(self) -> str | None:
        """A checksum of the shard names, in the order given; see `Fetch`. None if the shards are only numbers."""
        if isinstance(self.shards, range):
            return None
        return names_of(self.shards.files if isinstance(self.shards, PiecesOfFiles) else self.shards)

    def details(self) -> dict[str, Any]:
        records = self._records
        if isinstance(records, IndexedRecords):
            return {"shards": len(self.shards), "records": len(records), "lanes": records.cuts}
        return {"shards": len(self.shards), "epoch_size": len(records), "lanes": records.lanes}

    def copy_statistics(self) -> CopyStatistics | None:
        """Statistics about the copies of the files; None if there are no copies."""
        first = next(iter(self.shards), None)
        cache = kept_in(getattr(first, "path", first))
        return None if cache is None else cache.statistics()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        """Counted: record ``index`` over all shards; a negative index counts from the end. Not counted: item ``index`` of the stream."""
        record = self._records[index]
        return record if self._transform is None else self._transform(record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The records at several indices. Each shard is read once, front to back. None unless the shards are counted and there is no transform."""
        assert isinstance(self._records, IndexedRecords)
        return self._records.gathered(indices)

    def order(self, *, shuffle: bool, seed: int) -> PlainOrder:
        """The order of the records; see `OrderedDataset`. Uncounted shards can be read in only one order, because it determines what an index refers to."""
        if isinstance(self._records, RecordStream):
            return self._records.order(shuffle=shuffle, seed=seed)
        order = self._records.order(shuffle=shuffle, seed=seed)
        if self._records.reads_forward:
            self.forward_cuts: int | None = order.lanes  # tells the loader to give each lane to one worker
        return order

    def read_by_all(self) -> None:
        """Called by a loader that does not follow `order`, or has no fixed workers: then no lane belongs to a single worker."""
        if isinstance(self._records, IndexedRecords):
            self.forward_cuts = None
            self._records.read_by_all()

    def close(self) -> None:
        """Close the files that this process has open; garbage collection does the same. Idempotent. Reading opens them again."""
        self._records.close()


def close_shards(dataset: Any) -> None:
    """Close the files opened by a pass over ``dataset``, if it is `Shards` or a subset of them: the next reader may need only one shard, or be another process."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, Shards):
        dataset.close()


@final
class Pieces:
    """Opens a piece of a map-style dataset: ``piece`` consecutive samples of an order."""

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
"""Samples requested together from a dataset that can load many at once."""
