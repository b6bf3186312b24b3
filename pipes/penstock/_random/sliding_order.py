"""A shuffle within a sliding window: it mixes like a shuffle buffer, but has random access and no state."""

from __future__ import annotations

from typing import Final, final

import numpy as np
import numpy.typing as npt

from penstock._arguments import whole_number
from penstock._random.orders import PlainOrder, check_positions, checked_length, checked_seed
from penstock._random.permutation import SLID, Int64s, philox_words, splitmix64_stream

LARGEST: Final = 2**30
"""The largest window: keys have 64 bits, 32 of which are random."""


class SlidingPermutation:
    """A permutation of 0 … n-1 that moves no item by ``window`` places or more, for one epoch.

    Item j gets the key ``j + window * u``, with u uniform in [0, 1), and the items are sorted by key. Items more than a
    window away from a place always stay on their side of it, so sorting the keys around a place is enough to find its
    item. Keys do not depend on n, so shortening the data changes only the last ``window`` places.

    Args:
        epoch: The epoch.
        n: Number of items.
        window: In items; 0 and 1 leave them in order.
        keys: Two random words.
    """

    def __init__(self, epoch: int, n: int, window: int, keys: npt.NDArray[np.uint64]) -> None:
        self.epoch = epoch
        self._n = n
        self._window = window
        self._keys = keys
        self._block = max(1024, 4 * window)
        self._kept: tuple[int, Int64s] | None = None

    def __call__(self, positions: Int64s) -> Int64s:
        if self._window <= 1 or not len(positions):
            return positions.copy()
        blocks = positions // self._block
        first = int(blocks[0])
        if (blocks == first).all():
            return self._items(first)[positions - first * self._block]
        out = np.empty_like(positions)
        for block in sorted(set(blocks.tolist())):
            chosen = np.flatnonzero(blocks == block)
            out[chosen] = self._items(block)[positions[chosen] - block * self._block]
        return out

    def _items(self, block: int) -> Int64s:
        """The items at the places of ``block``. The most recent block is kept."""
        kept = self._kept  # read once, because another thread may request another block meanwhile
        if kept is not None and kept[0] == block:
            return kept[1]
        begin = block * self._block
        low, high = max(0, begin - self._window), min(self._n, begin + self._block + self._window)
        candidates = np.arange(low, high)
        words = splitmix64_stream(candidates.astype(np.uint64), *self._keys)
        keyed = (candidates - low << 32) + self._window * (words >> np.uint64(32)).astype(np.int64)
        ordered = candidates[np.argsort(keyed, kind="stable")]  # if keys are equal, the earlier item comes first
        items = ordered[begin - low : begin - low + self._block].copy()
        self._kept = block, items
        return items


@final
class SlidingOrder(PlainOrder):
    """A shuffle within a window, for data that is read fastest in its stored order.

    A permutation in every epoch, with random access in O(window) time and memory. Most items move by up to half the
    window, and none by the full window. A window of twice the size mixes about as well as a shuffle buffer, but there
    is no buffer to fill or to save.

    Args:
        n: Length of the dataset, from 0 to 2**56.
        window: In items, from 0 to 2**30; 0 and 1 leave the items in order.
        seed: From 0 to 2**63 - 1.
    """

    __module__ = "penstock.orders"

    def __init__(self, n: int, window: int, seed: int = 0) -> None:
        self._n = checked_length(n)
        self._window = checked_window(window)
        self._seed = checked_seed(seed)
        self._said = {"order": "sliding", "length": self._n, "window": self._window, "seed": self._seed}
        self._keyed = self._under(0)

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """See `Order.indices`."""
        check_positions(positions, self._n)
        keyed = self._keyed  # read once, as in `ShuffledOrder`
        if keyed.epoch != epoch:
            keyed = self._keyed = self._under(epoch)
        return keyed(positions)

    def _under(self, epoch: int) -> SlidingPermutation:
        return SlidingPermutation(epoch, self._n, self._window, philox_words(self._seed, epoch, SLID, 2))


def checked_window(window: int) -> int:
    """``window`` as an ``int``, checked to be within its bounds."""
    return whole_number("window", window, 0, LARGEST + 1, "It is in items; 0 leaves them in order.")
