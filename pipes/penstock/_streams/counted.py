"""Shards with known record counts: every record has a number, and an epoch contains all of them."""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._random.shard_order import ShardOrder, usual_lanes
from penstock._streams.open_shards import OpenShards, has_start
from penstock._streams.schedule import schedule_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt


@final
class IndexedRecords:
    """The records of `Shards` with counts. It takes the same arguments.

    Its ``lanes`` have the same name for users as those of a stream, but here they are `cuts`: parts of equal length of an epoch whose end is known; see `ShardOrder`.

    Raises:
        ValueError: See `Shards`.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        open: Callable[..., Any],
        counts: npt.ArrayLike,
        lanes: int | None,
        most_lanes: int | None,
        window: int,
        name: str,
        settings: dict[str, Any] | None,
    ) -> None:
        order = ShardOrder(counts, usual_lanes(len(shards), most_lanes) if lanes is None else lanes, window)
        self.counts = np.asarray(counts).astype(np.int64)
        if len(self.counts) != len(shards):
            raise ValueError(f"got {len(self.counts)} counts for {len(shards)} shards. Pass one count per shard.")
        self.cuts, self._cuts_unshuffled = order.lanes, lanes or 1
        self._shards = shards
        self._window = window
        self._settings = settings
        self._ends = np.cumsum(self.counts)
        self._starts = self._ends - self.counts
        self._open = OpenShards(shards, open, self.counts, self.cuts, window, name)
        self.reads_forward = getattr(open, "reads_forward", has_start(open) or inspect.isgeneratorfunction(open))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"index {index} is out of bounds for {len(self)} records")
        shard = int(np.searchsorted(self._ends, place, side="right"))
        return self._open.read(shard, [place - int(self._starts[shard])])[0]

    def gathered(self, indices: Sequence[int]) -> list[Any]:
        """The records at several indices. Each shard is read once, front to back."""
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

    def order(self, *, shuffle: bool, seed: int) -> ShardOrder:
        """See `Shards.order`."""
        self._open.owned = self.reads_forward
        if shuffle:
            order = ShardOrder(self.counts, self.cuts, self._window, seed)
        else:
            order = ShardOrder(self.counts, self._cuts_unshuffled, shuffle=False)
        if self._settings is not None:
            order.say(data=self._settings)
        self._open.schedule = schedule_of(self._shards, order.opens, order.lanes)
        return order

    def read_by_all(self) -> None:
        """See `Shards.read_by_all`."""
        self._open.owned = False

    def close(self) -> None:
        """See `Shards.close`."""
        self._open.close()
