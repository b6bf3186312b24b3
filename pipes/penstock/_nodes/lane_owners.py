"""Assigns each lane to one worker, which reads it forward.

Pure. It affects speed only, because any worker can read any lane.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from penstock._fetch.indices import Indices


@final
class LaneOwners:
    """Divides the lanes of one rank among its workers. A lane never changes its owner.

    In a round robin over ``lanes``, a rank that gets every ``world_size``-th item sees
    ``lanes / gcd(lanes, world_size)`` lanes, in turn. In their order of appearance, they are cut into contiguous pieces
    that are dealt to the workers, the same number to each. A piece is as long as a batch, or up to twice as long, if
    there are enough lanes. So one or two workers load a small batch, others load the next ones, and all of them load a
    large batch.

    Args:
        lanes: Index ``i`` belongs to lane ``i mod lanes``.
        by_position: Use the position in the epoch instead of the index.
        world_size: Number of ranks.
        workers: Number of workers of this rank.

    Attributes:
        share: How many lanes this rank reads.
    """

    def __init__(self, lanes: int, world_size: int, workers: int, *, by_position: bool = False) -> None:
        self._lanes = lanes
        self._by_position = by_position
        self._workers = workers
        self.share = lanes // math.gcd(lanes, world_size)
        self._pieces = 0  # decided by the first batch
        # of each lane seen so far, in the order of appearance; after a jump there may be more than this rank's share
        self._places: dict[int, int] = {}

    def rows(self, task: Indices) -> dict[int, list[int]]:
        """The rows of a batch by owner, in ascending order; a single index is row 0.

        Empty if the values are not whole numbers.
        """
        values = task.plain() if task.is_batch else [task.values]
        numbers = values if not self._by_position else np.asarray(task.positions).reshape(-1).tolist()
        if not self._pieces:
            self._pieces = self._workers * max(1, self.share // (self._workers * max(1, len(values))))
        rows: dict[int, list[int]] = {}
        for row, (index, number) in enumerate(zip(values, numbers, strict=True)):
            if not isinstance(index, int):
                return {}
            place = self._places.setdefault(number % self._lanes, len(self._places))
            rows.setdefault(place * self._pieces // self.share % self._workers, []).append(row)
        return rows
