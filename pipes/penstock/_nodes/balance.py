"""Balance: which rank gets which samples of a round, so that all batches of the round cost about the same.

Each global batch keeps its samples, and each rank gets as many as without. Only integers are added and compared, so all
ranks find the same without communication, and nothing of it is in the state.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from penstock._arguments import checksum
from penstock._errors import GraphError
from penstock._fetch.indices import Indices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from penstock._fetch.packing import PackIndex
    from penstock._nodes.ranks import Ranks
    from penstock._random.grouping import Packs
    from penstock._random.permutation import Int64s

MOST_TOGETHER: Final = 64
"""The most ranks among which samples are exchanged."""
_MANY: Final = 128
"""Samples that are dealt together, at most, unless the fewest ranks that divide the number of ranks have more. It takes
0.15 us for each.
"""
_BITS: Final = 24
"""Costs are whole numbers below 2**24; larger or fractional ones are scaled by a power of two, which is exact on every
machine.
"""


@final
class Costs:
    """What samples cost.

    Args:
        given: One number for each index of the dataset: shape ``(n,)``. Or, for packs, a function of lengths: it
            receives all lengths from 0 to the capacity, int64 of shape ``(capacity + 1,)``, and returns as many costs.
        packs: The packs that are dealt, if packs are. A pack costs what its pieces cost; by index, a piece costs its
            part of the sequence.

    Attributes:
        of_lengths: They are those of lengths, not of indices.
        checksum: Of the costs. All ranks must have the same.

    Raises:
        ValueError: They are not numbers of that shape, or one is negative, not a number, or infinite; the message names
            its index.
    """

    def __init__(self, given: npt.ArrayLike | Callable[[Int64s], npt.ArrayLike], packs: Packs | None = None) -> None:
        self.of_lengths = callable(given)
        if not callable(given):
            costs, of, shape = np.asarray(given), "index of the dataset", None
        elif packs is not None:
            costs, of, shape = np.asarray(given(np.arange(packs.capacity + 1))), "length", (packs.capacity + 1,)
        else:
            raise ValueError(
                "balance is a function of lengths, but only Packs have any. Pass an array with the cost of each sample."
            )
        if costs.ndim != 1 or costs.dtype.kind not in "iuf" or costs.shape != (shape or costs.shape):
            raise ValueError(
                f"balance has shape {costs.shape} and dtype {costs.dtype}, but there must be one number for each {of}."
            )
        if (wrong := ~((costs >= 0) & (costs < np.inf))).any():
            first = int(wrong.argmax())
            raise ValueError(
                f"the cost of {of} {first} is {costs[first]}, but a cost must be a finite number of at least 0 "
                f"({int(wrong.sum())} are not). Correct it."
            )
        bits = int(np.frexp(float(costs.max(initial=0)))[1])
        scaled = (
            np.ldexp(costs.astype(float), _BITS - bits) if costs.dtype.kind == "f" else costs >> max(0, bits - _BITS)
        )
        self._costs = scaled.astype(np.int32)
        self.checksum = checksum(self._costs.astype("<i4").data)

    def __len__(self) -> int:
        return len(self._costs)

    def of(self, items: Sequence[Any]) -> Int64s:
        """The costs of single items of the index level."""
        if isinstance(items, Indices):
            if isinstance(items.values, np.ndarray):
                return self.at(items.values)
            raise GraphError(
                f"balance needs dataset indices, but the sampler yields {items.values[0]!r:.80}. Leave balance out."
            )
        packs: list[PackIndex] = [item.values for item in items]
        lengths = np.array([length for pack in packs for length in pack.lengths], np.int64)
        if self.of_lengths:
            each = self.at(lengths)
        else:
            wholes = np.array([whole for pack in packs for whole in pack.wholes], np.int64)
            each = (
                self.at(np.array([index for pack in packs for index in pack.indices]))
                * lengths
                // np.maximum(wholes, 1)
            )
        return np.add.reduceat(each, np.cumsum([0] + [len(pack.lengths) for pack in packs[:-1]]))

    def at(self, indices: Int64s) -> Int64s:
        """The costs of dataset indices."""
        return self._costs[indices].astype(np.int64)


@final
class DealtTo(NamedTuple):
    """To whom items are dealt: the ranks, and what samples cost if that is balanced."""

    ranks: Ranks
    costs: Costs | None


@lru_cache
def together(ranks: int, size: int) -> int:
    """Of how many ranks the samples are dealt together: a divisor of ``ranks``, at most 64.

    ``size`` is the number of samples in a batch of one rank.
    """
    divisors = [few for few in range(2, min(ranks, MOST_TOGETHER) + 1) if ranks % few == 0]
    return max((few for few in divisors if few * size <= _MANY), default=divisors[0] if divisors else 1)


def dealt(costs: Int64s, ranks: int, rank: int) -> Int64s:
    """The numbers of the items that ``rank`` gets, ascending.

    The most expensive item goes first, and each goes to the rank that has the least so far, among those that have room:
    the greedy rule of Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17 (1969), with equal
    numbers of items.

    Args:
        costs: Each below 2**45: shape ``(n * ranks,)``.
        ranks: Their number, at most 64.
        rank: From 0.
    """
    if ranks == 1 or len(costs) <= ranks:
        return np.arange(rank, len(costs), ranks)
    # Sorting values is much faster than sorting indices, so each cost carries the number of its item in its lowest
    # bits, and each sum that of its rank.
    bits = (len(costs) - 1).bit_length()
    ranked = ((costs.max() - costs) << bits) | np.arange(len(costs))
    ranked.sort()
    order = ranked & ((1 << bits) - 1)
    shifted = (costs[order] << 6).tolist()
    sums = [shifted[first] | first for first in range(ranks)]
    heapify(sums)
    room = [len(costs) // ranks - 1] * ranks
    mine = [rank]
    for number in range(ranks, len(shifted)):
        least = sums[0]
        taker = least & 63
        if taker == rank:
            mine.append(number)
        room[taker] = left = room[taker] - 1
        if left:
            heapreplace(sums, least + shifted[number])
        else:
            heappop(sums)
    return np.sort(order[mine])
