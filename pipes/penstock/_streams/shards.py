"""Shards: a map-style dataset over files of many records each, whose record counts are known."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, final

import numpy as np

from penstock._random.growth import Parts
from penstock._random.shard_order import ShardOrder, usual_lanes
from penstock._streams.open_shards import OpenShards, reads_forward
from penstock._streams.schedule import schedule_of
from penstock._streams.sharded import FileOptions, Sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt


@final
class Shards(Sharded):
    """Data in shards, such as files with many records each, whose number is known.

    Pass it to `Loader.from_dataset` like any dataset.

    Behaves like any map-style dataset, the concatenation of its shards. It has its own order, a `ShardOrder`: with
    ``shuffle=True`` the shards are shuffled in every epoch and read front to back, in lanes that take turns; without
    it, the records come in the order given. A shard that supports indexing is read by position. A shard that can only
    be iterated is read forward, and records that were passed over are buffered until they are requested: at most
    ``2 * window`` records plus a few batches per lane. The sequence is the same either way, with any number of workers
    and ranks, and after any resume.

    Records whose number is not known, or that are filtered, split or joined on the way, are a `Stream`.

    Each open shard is used by one thread at a time, so what ``open`` returns need not be thread-safe. The number of
    shards that a process has open is bounded: one per lane plus 4 (plus the number of threads that read, if that is
    more than 4), or 64 shards with indexing if that is more; but never more than half of the files that the process may
    open.

    Args:
        shards: One path, or any other value that ``open`` accepts, per shard; or the number of shards, which are then
            numbered 0, 1, 2, ….
        open: Called with one of ``shards``. Returns an object with ``__len__`` and ``__getitem__`` (and
            ``__getitems__``, if that is faster), or an iterable of records, always in the same order. If it has a
            parameter ``start``, it must return an iterable that begins with that record. If what it returns has a
            ``close`` method, that is called. Worker processes need an ``open`` that can be pickled, unless they are
            forked.
        counts: The number of records in each shard. Checked when a shard is opened or has been read to its end.
        lanes: See `ShardOrder`; without a shuffle the default is 1, and more interleave the records. For a large job
            choose a multiple of the number of ranks, and at least as many lanes per rank as it has workers, to keep
            them all busy.
        most_lanes: Upper limit for the default ``lanes``, for shards of which only so many should be open at a time.
        window: See `ShardOrder`. Ignored without a shuffle.
        name: What error messages call a shard.
        settings: JSON that must match when a state is loaded, in addition to the counts: anything else that determines
            which records there are.
        transform: Applied to each record where it is loaded: decoding, augmentation. Its random numbers are those of
            the sample (``penstock.sample().rng``).
        grow: A state that was saved when there were fewer shards loads, if they were the first of these. The epoch that
            had begun ends with those, and the next one has all. Requires ``lanes``.
        **files: How files are reached, none of which is part of the state. ``storage_options``: passed to the fsspec
            file system that reads or copies paths with ``://``: keys, an endpoint, headers. ``cache_dir``: a folder on
            a local disk for copies of shards that are files, shared by all processes of this host and kept for later
            runs; ``open`` is then called with the path of the copy, or with the shard itself if there is no room or its
            version cannot be determined. ``max_cache_size``: the limit for all copies in that folder together, in bytes
            or as a string such as ``"200GB"``. ``ahead``: how many shards per lane to copy before they are read, 1 by
            default.

    Raises:
        ValueError: ``counts`` are missing, or not one per shard; or an argument is out of bounds. On reading: a shard
            has more or fewer records than it should.
        TypeError: ``shards`` is a single path; ``open`` is not callable; or an argument is unknown, or one of a
            `Stream`. On reading: ``open`` returned something that has no records.
    """

    __module__ = "penstock"

    refused: ClassVar = dict.fromkeys(
        ("epoch_size", "steps", "bookmarks", "retries", "on_error"),
        "That is for a stream, whose records are not counted: penstock.Stream(shards, open, epoch_size=…, steps=[…]); "
        "or epoch_size= and no counts= or index=, if a function of penstock.formats made these Shards. For counted "
        "records drop it: transform= changes records one by one, and penstock.filtered selects some.",
    )

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
        grow: bool = False,
        **files: Unpack[FileOptions],
    ) -> None:
        super().__init__(shards, open, name, settings, transform, files)
        self.grows = self._check_grow(grow, lanes)
        if counts is None:
            raise ValueError(
                "counts=None: the order needs the number of records in each shard. Pass counts=; or write an index of "
                "the files once, with python -m penstock index, and read them with penstock.formats; or read the "
                "shards without counting them: penstock.Stream(shards, open, epoch_size=…), where epoch_size is the "
                "number of items in an epoch."
            )
        order = ShardOrder(counts, usual_lanes(len(self.shards), most_lanes) if lanes is None else lanes, window)
        self.counts: np.ndarray = np.asarray(counts).astype(np.int64)
        """The number of records in each shard: int64, shape ``(shards,)``."""
        if len(self.counts) != len(self.shards):
            raise ValueError(f"got {len(self.counts)} counts for {len(self.shards)} shards. Pass one count per shard.")
        self._cuts, self._cuts_unshuffled = order.cuts, lanes or 1
        self._window = window
        self._ends = np.cumsum(self.counts)
        self._starts = self._ends - self.counts
        self._open = OpenShards(self.shards, self._opener, self.counts, self._cuts, window, name)
        if transform is not None:
            # one by one, so that each sample has its own random numbers, and each error names its sample
            self.__getitems__ = None  # type: ignore[method-assign,assignment]

    def details(self) -> dict[str, Any]:
        return {"shards": len(self.shards), "records": len(self), "lanes": self._cuts}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        """Record ``index`` over all shards; a negative index counts from the end."""
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"index {index} is out of bounds for {len(self)} records")
        shard = int(np.searchsorted(self._ends, place, side="right"))
        return self._transformed(self._open.read(shard, [place - int(self._starts[shard])])[0])

    def where(self, index: int) -> str:
        """See `DatasetLike`."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return f"{self._name} {self.shards[shard]}, record {index - int(self._starts[shard])}"

    def would_wait(self, index: int) -> bool:
        """See `DatasetLike`."""
        return self._open.is_busy(int(np.searchsorted(self._ends, index, side="right")))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The records at several indices. Each shard is read once, front to back: first those that no other thread is
        reading, because threads that wait for shards in turn would all wait for the slowest. None if there is a
        transform.
        """
        places = np.array(indices, np.int64).reshape(-1)
        wrong = (places < -len(self)) | (places >= len(self))
        if wrong.any():
            raise IndexError(f"index {places[wrong][0]} is out of bounds for {len(self)} records")
        places[places < 0] += len(self)
        rows = np.argsort(places, kind="stable")
        places = places[rows]
        shards = np.searchsorted(self._ends, places, side="right")
        numbers = places - self._starts[shards]
        borders = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(rows)]
        records: list[Any] = [None] * len(rows)
        left = list(itertools.pairwise(borders if len(rows) else ()))
        while left:
            part = next((part for part in left if not self._open.is_busy(int(shards[part[0]]))), left[0])
            left.remove(part)
            begin, end = part
            found = self._open.read(int(shards[begin]), numbers[begin:end].tolist())
            for row, record in zip(rows[begin:end].tolist(), found, strict=True):
                records[row] = record
        return records

    def order(self, *, shuffle: bool, seed: int) -> ShardOrder:
        """The order of the records; see `DatasetLike`."""
        order = self._order_of(len(self.shards), shuffle=shuffle, seed=seed)
        self._open.schedule = schedule_of(self.shards, order.opens, order.cuts)
        self._open.owned = reads_forward(self._opener)
        if self._open.owned:
            # In lanes that `ShardOrder` cuts out of an epoch, whose end is known. Tells the loader to give each to one
            # worker.
            self.forward_cuts: int | None = order.cuts
        return order

    def _order_of(self, many: int, *, shuffle: bool, seed: int) -> ShardOrder:
        """The order of the records of the first ``many`` shards."""
        counts = self.counts[:many]
        cuts, window = (self._cuts, self._window) if shuffle else (self._cuts_unshuffled, 0)
        order = ShardOrder(counts, cuts, window, seed if shuffle else 0, shuffle=shuffle)
        if self._settings is not None:
            order.say(data=self._settings)
        return order

    def parts(self, *, shuffle: bool, seed: int) -> Parts:
        """Its shards, as what grows."""
        self.order(shuffle=shuffle, seed=seed)
        order = functools.partial(self._order_of, shuffle=shuffle, seed=seed)
        return Parts(len(self.shards), "shards", order, self._said, np.append(0, self._ends))

    def _said(self, many: int) -> dict[str, Any]:
        said = {**super()._said(many), "dataset_length": int(self.counts[:many].sum())}
        del said["shards"]
        return said

    def read_by_all(self) -> None:
        """Called by a loader that does not follow `order`, or has no fixed workers: then no lane belongs to a single
        worker.
        """
        self.forward_cuts = None
        self._open.owned = False

    def close(self) -> None:
        self._open.close()
