"""Shards: a map-style dataset over files of many records each."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch.utils.data import Dataset

from penstock._arguments import whole_number
from penstock._random.shard_order import LANE_NUMBERS, ShardOrder
from penstock._streams.open_shards import OpenShards

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from penstock._random.order import Order
    from penstock._random.permutation import Int64s


@final
class Shards(Dataset[Any]):
    """Data in shards, such as files of many records each. Pass it to `Loader.from_dataset` like any dataset.

    As a dataset it is the concatenation of its shards. It brings its own order, a `ShardOrder`: with ``shuffle=True`` the shards are shuffled in every
    epoch and read front to back, in lanes that take turns; without it, the records come in the order given.

    A shard that can be indexed is read by position. One that can only be iterated is read forward, and records that are passed over are kept until they
    are asked for: at most ``2 * window`` of them and a few batches, for each lane. The sequence is the same either way, with any number of workers and
    ranks, and after any resume; a jump into a shard that is read forward reads what lies before.

    Each open shard is used by one thread at a time, so what ``open`` returns need not be thread-safe. A process has a bounded number of shards open: those of the lanes and 4 more, or
    64 that can be indexed if that is more; never more than half of the files it may open.

    Args:
        shards: One path, or anything else that ``open`` accepts, for each shard; or the number of shards, which are then called 0, 1, 2, ….
        open: Called with one of ``shards``. Returns an object with ``__len__`` and ``__getitem__`` (and ``__getitems__``, if that is faster), or an iterable
            of records, always in the same order. If it has an argument ``start``, it must return an iterable that begins with that record. What it
            returns is closed by its ``close``, if it has one. Worker processes need an ``open`` that can be pickled, unless they are forked.
        counts: How many records each shard has. Checked when a shard is opened, or has been read to its end.
        lanes: See `ShardOrder`. Without a shuffle the default is 1.
        most_lanes: Bound of the default of ``lanes``, for shards of which only so many should be open at a time.
        window: See `ShardOrder`. Means nothing without a shuffle.
        name: What messages call a shard.
        settings: JSON that a saved state must agree with, in addition to the counts: what else decides which records there are.

    Raises:
        ValueError: ``counts`` are missing or of another number than the shards, or an argument is out of bounds. On reading: a shard has more or fewer
            records than it should.
        TypeError: ``shards`` is a single path, or ``open`` cannot be called. On reading: it returned something that has no records.
    """

    def __init__(
        self,
        shards: Sequence[Any] | int,
        open: Callable[..., Any],
        *,
        counts: npt.ArrayLike | None,
        lanes: int | None = None,
        most_lanes: int | None = None,
        window: int = 0,
        name: str = "shard",
        settings: dict[str, Any] | None = None,
    ) -> None:
        if isinstance(shards, str | bytes | os.PathLike):
            raise TypeError(f"shards={shards!r} is one path, and a list of paths was expected: [{shards!r}].")
        if not callable(open):
            raise TypeError(f"open must be a function of a shard, and {open!r:.80} cannot be called.")
        self.shards: Sequence[Any] = shards if isinstance(shards, Sequence) else range(whole_number("shards", shards, 0))
        if counts is None:
            raise ValueError(
                "counts=None: the order is made of the number of records in each shard. Pass them as counts=, or write an index of the files once, with "
                "python -m penstock index, and read them with penstock.formats. Data that nobody can count can be read as an IterableDataset."
            )
        order = ShardOrder(counts, lanes, window)
        if lanes is None and most_lanes is not None and order.lanes > most_lanes:
            order = ShardOrder(counts, max((number for number in LANE_NUMBERS if number <= most_lanes), default=1), window)
        self.counts = np.asarray(counts).astype(np.int64)
        if len(self.counts) != len(self.shards):
            raise ValueError(f"there are {len(self.counts)} counts for {len(self.shards)} shards. Each shard needs its count.")
        self._lanes, self._lanes_unshuffled = order.lanes, lanes or 1
        self._window = window
        self._settings = copy.deepcopy(settings)
        self._ends = np.cumsum(self.counts)
        self._starts = self._ends - self.counts
        self._open = OpenShards(self.shards, open, self.counts, order.lanes, window, name)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        """Record ``index`` of all shards together; a negative index counts from the end."""
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"index {index} is out of bounds for {len(self)} records")
        shard = int(np.searchsorted(self._ends, place, side="right"))
        return self._open.read(shard, [place - int(self._starts[shard])])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The records of many indices. Each shard is read once, front to back."""
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
        for begin, end in itertools.pairwise(borders):
            if begin < end:
                found = self._open.read(int(shards[begin]), numbers[begin:end].tolist())
                for row, record in zip(rows[begin:end].tolist(), found, strict=True):
                    records[row] = record
        return records

    def order(self, *, shuffle: bool, seed: int) -> Order:
        """The order of the records; see `OrderedDataset`."""
        if shuffle:
            order = ShardOrder(self.counts, self._lanes, self._window, seed)
        else:
            order = ShardOrder(self.counts, self._lanes_unshuffled, shuffle=False)
        return order if self._settings is None else _WithSettings(order, self._settings)

    def close(self) -> None:
        """Close the files that are open in this process; garbage collection does the same. Idempotent. Reading opens them again."""
        self._open.close()


class _WithSettings:
    """An order over data that has settings of its own."""

    def __init__(self, order: Order, settings: dict[str, Any]) -> None:
        self._order = order
        self._said = {**order.settings(), "data": settings}

    def __len__(self) -> int:
        return len(self._order)

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """See `Order.indices`."""
        return self._order.indices(epoch, positions)

    def settings(self) -> dict[str, Any]:
        """See `Order.settings`."""
        return dict(self._said)
