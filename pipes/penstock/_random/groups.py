"""Groups the items of a block by length: packs that fill a capacity, and buckets of similar items. Pure functions of the lengths.

A block is a stretch of an order, such as 1024 or 8192 items. All ranks plan the same blocks, so they agree on every group without communication.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import numpy as np

if TYPE_CHECKING:
    from penstock._random.permutation import Int64s, UInt64s


@final
class Pieces(NamedTuple):
    """The items of a block, or parts of them.

    Attributes:
        items: The item of the block that each piece comes from, shape ``(pieces,)``.
        starts: Where in the item it starts, shape ``(pieces,)``.
        lengths: Its length, shape ``(pieces,)``.
    """

    items: Int64s
    starts: Int64s
    lengths: Int64s


@final
@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a block.

    Attributes:
        members: The items of the first group, then those of the second, …: shape ``(members,)``.
        splits: Group g is ``members[splits[g] : splits[g + 1]]``: shape ``(groups + 1,)``.
        pieces: For each member its item, where it starts in the item, and its length, if members may be parts of items.
    """

    members: Int64s
    splits: Int64s
    pieces: Pieces | None = None

    def __len__(self) -> int:
        return len(self.splits) - 1


def pieces_of(lengths: Int64s, capacity: int, oversize: Literal["split", "truncate", "error"]) -> Pieces:
    """Limit every item to ``capacity``: cut it into several pieces, keep only the first piece, or refuse it. An empty item has no pieces.

    Raises:
        ValueError: ``oversize="error"``, and an item is longer than the capacity.
    """
    longest = int(lengths.max(initial=0))
    if oversize == "error" and longest > capacity:
        raise ValueError(
            f"item {int(lengths.argmax())} has length {longest}, but the capacity is {capacity}. Raise the capacity, or use oversize='split' or 'truncate'."
        )
    counts = -(-lengths // capacity) if oversize == "split" else (lengths > 0).astype(np.int64)
    items = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)) * capacity
    return Pieces(items, starts, np.minimum(lengths[items] - starts, capacity))


def packed(lengths: Int64s, capacity: int) -> Groups:
    """Put items into as few groups as best-fit decreasing finds, each of at most ``capacity``.

    The longest item goes first, and each goes into the group with the least room that still fits it. With lognormal lengths and a block of 1024, that fills
    99.6 %. Groups come in the order of their first items, and so do the items within a group: packing preserves the shuffle of the block.

    Args:
        lengths: Lengths of the items, shape ``(n,)``, each from 0 to ``capacity``.
        capacity: Capacity of a group.
    """
    group_of = [0] * len(lengths)
    rooms: list[tuple[int, int]] = []  # the room in each group, sorted
    groups = 0
    sizes = lengths.tolist()
    for item in np.argsort(-lengths, kind="stable").tolist():
        found = bisect_left(rooms, (sizes[item], -1))
        if found < len(rooms):
            room, group = rooms.pop(found)
        else:
            room, group, groups = capacity, groups, groups + 1
        group_of[item] = group
        insort(rooms, (room - sizes[item], group))
    return _grouped(np.array(group_of, np.int64), groups)


def bucketed(lengths: Int64s, budget: float, most: int, alike: int, words: UInt64s) -> Groups:
    """Cut the items, sorted by length, into batches whose padded size is at most ``budget``, and shuffle them in runs of ``alike`` batches.

    If ranks take batches in turn and ``alike`` is a multiple of their number, they work on similar batches at the same time, so that no rank waits for one
    long batch. The number of batches is a multiple of ``alike``, unless there are too few items for a full run.

    Args:
        lengths: Lengths of the items, shape ``(n,)``; none exceeds the budget.
        budget: Limit for the padded size: the longest length in a batch times its number of items.
        most: Maximum number of items in a batch.
        alike: Number of batches in a run.
        words: Random words, at least one per run; they determine the order of the runs.
    """
    by_length = np.argsort(lengths, kind="stable")
    ordered = lengths[by_length]
    ends = _cut(ordered, 0, budget, most)
    needed = -(-len(ends) // alike) * alike
    if len(ends) < needed <= len(ordered):
        # The remainder that does not fill a run is cut again, into a whole run. If it has too few items, earlier runs are cut again with it.
        kept = next(k for k in range(needed - alike, -1, -alike) if len(ordered) - (ends[k - 1] if k else 0) >= needed - k)
        ends = ends[:kept] + _cut_evenly(ordered, ends[kept - 1] if kept else 0, needed - kept, budget, most)
    bounds = np.array([0, *ends])
    runs = np.argsort(words[: -(-len(ends) // alike)], kind="stable")
    batches = (runs[:, None] * alike + np.arange(alike)).ravel()
    batches = batches[batches < len(ends)]
    sizes = np.diff(bounds)[batches]
    splits = np.cumsum([0, *sizes.tolist()])
    members = np.repeat(bounds[:-1][batches] - splits[:-1], sizes) + np.arange(len(ordered))
    return Groups(by_length[members], splits)


def _cut(ordered: Int64s, begin: int, budget: float, most: int) -> list[int]:
    """The ends of batches over ``ordered[begin:]``, each batch as large as possible."""
    ends = []
    numbers = np.arange(1, most + 1)
    while begin < len(ordered):
        ahead = ordered[begin : begin + most]
        begin += max(1, int(np.searchsorted(ahead * numbers[: len(ahead)], budget, side="right")))
        ends.append(begin)
    return ends


def _cut_evenly(ordered: Int64s, begin: int, n: int, budget: float, most: int) -> list[int]:
    """The ends of ``n`` batches over ``ordered[begin:]``, with the largest batch as small as possible."""
    low, high = 0.0, budget
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_cut(ordered, begin, middle, most)) <= n else (middle, high)
    ends = _cut(ordered, begin, high, most)
    while len(ends) < n:  # several batches have the same size: halve one of those with the most items
        bounds = [begin, *ends]
        sizes = np.diff(bounds)
        largest = int(sizes.argmax())
        ends.insert(largest, bounds[largest] + int(sizes[largest]) // 2)
    return ends


def _grouped(group_of: Int64s, groups: int) -> Groups:
    """Items by group; groups in the order of their first items."""
    first = np.full(groups, len(group_of))
    np.minimum.at(first, group_of, np.arange(len(group_of)))
    place = np.empty(groups, np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(groups)
    at = place[group_of]
    return Groups(np.argsort(at, kind="stable"), np.cumsum([0, *np.bincount(at, minlength=groups).tolist()]))
