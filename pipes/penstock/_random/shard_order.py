"""The order for data in shards of known lengths: the shards are shuffled and read front to back in several lanes."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from penstock._arguments import checksum, whole_number
from penstock._random.orders import LONGEST, PlainOrder, SequentialOrder, ShuffledOrder, check_positions, checked_seed
from penstock._random.permutation import LANES, Int64s, by_group, philox_words
from penstock._random.sliding_order import SlidingPermutation, checked_window

LANE_NUMBERS: Final = (1, 2, 4, 8, 24, 48, 96)
"""The defaults. 12 is excluded, because eight ranks would read every lane twice."""


class Opens(NamedTuple):
    """Which shards are opened in one pass over all of them, one row per opening, in chronological order.

    Attributes:
        shards: Their numbers: int64, shape ``(n,)``.
        lanes: The lane that reads the shard, of the same shape.
        times: When it is opened, in passes since the beginning of training: float64. Assumes that all lanes advance at
            the same speed.
    """

    shards: Int64s
    lanes: Int64s
    times: npt.NDArray[np.float64]


def usual_lanes(shards: int, most: int | None = None) -> int:
    """The default: the largest value that leaves at least 4 shards to each lane and does not exceed ``most``."""
    return max(
        (number for number in LANE_NUMBERS if 4 * number <= shards and (most is None or number <= most)), default=1
    )


@final
class ShardOrder(PlainOrder):
    """A new order of the shards in every epoch; their records are read front to back, in several lanes that take turns.

    The records of all shards, in the epoch's order, are cut into ``lanes`` pieces of equal length (within 1), through
    the middle of a shard if necessary. Position p of the epoch is record ``p div lanes`` of lane ``p mod lanes``. So
    every record comes exactly once, each lane only moves forward, and neighbours come from different shards. If the
    world size W divides ``lanes``, rank r reads the lanes r, r + W, …; otherwise ``W / gcd(W, lanes)`` ranks read each
    lane, which is equally exact but reads more.

    Args:
        counts: Records in each shard, shape ``(shards,)``. The index of record i of a shard is i plus the counts of the
            shards given before it. Takes 8 bytes per shard, and 16 more for the current epoch.
        lanes: From 1 to 65536. Default: the largest of 1, 2, 4, 8, 24, 48 and 96 that leaves at least 4 shards to each
            lane. For a large job choose a multiple of the number of ranks.
        window: Shuffle the records of a lane within this window; see `SlidingOrder`. 0 leaves them in order.
        seed: From 0 to 2**63 - 1.
        shuffle: False keeps the shards in the order given, in every epoch, and excludes ``window``. With more than one
            lane that still differs from the order of the indices.

    Raises:
        ValueError: A count is negative or not a whole number, or an argument is out of bounds.
    """

    __module__ = "penstock.orders"

    def __init__(
        self, counts: npt.ArrayLike, lanes: int | None = None, window: int = 0, seed: int = 0, *, shuffle: bool = True
    ) -> None:
        self._counts = _checked_counts(counts)
        self._n = int(self._counts.sum())
        self._starts = np.cumsum(self._counts) - self._counts
        # Not `lanes`, which tells a `ContinuingOrder`: these are cut out of an epoch whose end is known.
        self.cuts = usual_lanes(len(self._counts)) if lanes is None else whole_number("lanes", lanes, 1, 2**16 + 1)
        self._window = checked_window(window)
        self._seed = checked_seed(seed)
        if self._window and not shuffle:
            raise ValueError(
                f"window={window} shuffles the records, but shuffle=False keeps them in order. Drop one of them."
            )
        self._shards = ShuffledOrder(len(self._counts), self._seed) if shuffle else SequentialOrder(len(self._counts))
        self._laid: _Epoch | None = None
        self._said = {
            "order": "shards" if shuffle else "shards in order",
            "length": self._n,
            "counts": checksum(self._counts.astype("<i8").tobytes()),
            "lanes": self.cuts,
            "window": self._window,
            "seed": self._seed,
        }

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """See `Order.indices`."""
        check_positions(positions, self._n)
        laid = self._laid  # read once, as in `ShuffledOrder`
        if laid is None or laid.epoch != epoch:
            laid = self._laid = _Epoch(epoch, self)
        place = laid.placed(positions)
        shard = np.searchsorted(laid.ends, place, side="right")
        return place + laid.moved[shard]

    def opens(self, epoch: int) -> Opens:
        """The shards of an epoch; a shard that is cut is opened by two or more lanes."""
        return _Epoch(epoch, self).opens()

    def details(self) -> dict[str, Any]:
        return {
            "shards": len(self._counts),
            "records": self._n,
            "lanes": self.cuts,
            "window": self._window,
            "seed": self._seed,
        }


class _Epoch:
    """The shards in the order of one epoch: where each ends in the concatenation, and the offset from its records'
    places to their indices.
    """

    def __init__(self, epoch: int, order: ShardOrder) -> None:
        self.epoch = epoch
        self._shards = shards = order._shards.indices(epoch, np.arange(len(order._counts)))
        counts = order._counts[shards]
        self.ends = np.cumsum(counts)
        self.moved = order._starts[shards] - (self.ends - counts)
        self._lanes = order.cuts
        self._length, self._longer = divmod(order._n, order.cuts)
        self._windows: dict[int, SlidingPermutation] = {}
        self._window = order._window
        self._keys = philox_words(order._seed, epoch, LANES, 2 * order.cuts) if order._window > 1 else None

    def placed(self, positions: Int64s) -> Int64s:
        """The places of ``positions`` in the concatenation."""
        item, lane = np.divmod(positions, self._lanes)
        if self._keys is not None:
            for one, chosen in by_group(lane):
                item[chosen] = self._within(one)(item[chosen])
        return lane * self._length + np.minimum(lane, self._longer) + item

    def opens(self) -> Opens:
        lanes = np.arange(self._lanes)
        cuts = lanes * self._length + np.minimum(lanes, self._longer)
        places = np.unique(np.concatenate([cuts, np.concatenate([[0], self.ends])[:-1]]))
        places = places[places < self.ends[-1:].sum()]
        lane = np.searchsorted(cuts, places, side="right") - 1
        times = self.epoch + (places - cuts[lane]) / (self._length + 1)
        rows = np.argsort(times, kind="stable")
        return Opens(self._shards[np.searchsorted(self.ends, places, side="right")][rows], lane[rows], times[rows])

    def _within(self, lane: int) -> SlidingPermutation:
        assert self._keys is not None
        if lane not in self._windows:
            n = self._length + (lane < self._longer)
            self._windows[lane] = SlidingPermutation(self.epoch, n, self._window, self._keys[2 * lane : 2 * lane + 2])
        return self._windows[lane]


def _checked_counts(counts: npt.ArrayLike) -> Int64s:
    given = np.asarray(counts)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"counts must be integers, one per shard, but have dtype {given.dtype} and shape {given.shape}."
        )
    wrong = np.flatnonzero((given < 0) | (given > LONGEST))
    if wrong.size:
        raise ValueError(
            f"counts[{wrong[0]}] is {given[wrong[0]]}, but a count cannot be negative. Drop shards that cannot be read."
        )
    if sum(given.tolist()) > LONGEST:
        raise ValueError(f"the counts add up to {sum(given.tolist())}, but an epoch has at most {LONGEST} items.")
    return given.astype(np.int64)
