"""Items of a block put into groups by their lengths: packs that fill a capacity, and buckets of similar items. Pure functions of the lengths.

A block is a stretch of an order, say 1024 or 8192 items. All ranks plan the same blocks, so they agree on every group without talking.
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
        items: Which item of the block each piece is of, shape ``(pieces,)``.
        starts: Where in the item it starts, shape ``(pieces,)``.
        lengths: Its length, shape ``(pieces,)``.
    """

    items: Int64s
    starts: Int64s
    lengths: Int64s


@final
@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a block.

    Attributes:
        members: The items of the first group, then those of the second, …: shape ``(members,)``.
        splits: Group g is ``members[splits[g] : splits[g + 1]]``: shape ``(groups + 1,)``.
        pieces: Of which item each member is, where it starts in it, and how long it is, if members may be parts of items.
    """

    members: Int64s
    splits: Int64s
    pieces: Pieces | None = None

    def __len__(self) -> int:
        return len(self.splits) - 1


def pieces_of(lengths: Int64s, capacity: int, oversize: Literal["split", "truncate", "error"]) -> Pieces:
    """Bring every item down to ``capacity``: in several pieces, by its first piece only, or not at all. An empty item has none.

    Raises:
        ValueError: ``oversize="error"``, and an item is longer than the capacity.
    """
    longest = int(lengths.max(initial=0))
    if oversize == "error" and longest > capacity:
        raise ValueError(
            f"item {int(lengths.argmax())} has the length {longest}, but the capacity is {capacity}. Raise the capacity, or use oversize='split' or 'truncate'."
        )
    counts = -(-lengths // capacity) if oversize == "split" else (lengths > 0).astype(np.int64)
    items = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)) * capacity
    return Pieces(items, starts, np.minimum(lengths[items] - starts, capacity))


def packed(lengths: Int64s, capacity: int) -> Groups:
    """Put items into as few groups as best-fit decreasing finds, each of at most ``capacity``.

    The longest item goes first, and each goes into the group with the least room that still takes it. On lognormal lengths that fills 99.6 % at a
    block of 1024. Groups come in the order of their first items, and so do the items of a group: packing keeps the shuffle of the block.

    Args:
        lengths: Of the items, shape ``(n,)``, each from 0 to ``capacity``.
        capacity: Of a group.
    """
    group_of = [0] * len(lengths)
    rooms: list[tuple[int, int]] = []  # of each group, sorted
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

    If the ranks take turns at the batches and ``alike`` is a multiple of their number, they work on similar batches at the same time: nobody waits for one
    long batch. The number of batches is a multiple of ``alike``, unless there are too few items for another batch each.

    Args:
        lengths: Of the items, shape ``(n,)``; none is beyond the budget.
        budget: Bound of the padded size: the longest length of a batch times its number of items.
        most: Items in a batch, at most.
        alike: Batches in a run.
        words: Random, at least one for each run; they decide the order of the runs.
    """
    by_length = np.argsort(lengths, kind="stable")
    ordered = lengths[by_length]
    ends = _cut(ordered, 0, budget, most)
    needed = -(-len(ends) // alike) * alike
    if len(ends) < needed <= len(ordered):
        # What does not fill a run is cut again, into a whole run. If it has too few items for that, the runs before are cut again with it.
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
    """The ends of batches over ``ordered[begin:]``, each as large as it may be."""
    ends = []
    numbers = np.arange(1, most + 1)
    while begin < len(ordered):
        ahead = ordered[begin : begin + most]
        begin += max(1, int(np.searchsorted(ahead * numbers[: len(ahead)], budget, side="right")))
        ends.append(begin)
    return ends


def _cut_evenly(ordered: Int64s, begin: int, n: int, budget: float, most: int) -> list[int]:
    """The ends of ``n`` batches over ``ordered[begin:]``, the largest of them as small as it can be."""
    low, high = 0.0, budget
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_cut(ordered, begin, middle, most)) <= n else (middle, high)
    ends = _cut(ordered, begin, high, most)
    while len(ends) < n:  # several batches of one size: halve one with the most items
        bounds = [begin, *ends]
        sizes = np.diff(bounds)
        largest = int(sizes.argmax())
        ends.insert(largest, bounds[largest] + int(sizes[largest]) // 2)
    return ends


def _grouped(group_of: Int64s, groups: int) -> Groups:
    """Items by group; groups by their first item."""
    first = np.full(groups, len(group_of))
    np.minimum.at(first, group_of, np.arange(len(group_of)))
    place = np.empty(groups, np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(groups)
    at = place[group_of]
    return Groups(np.argsort(at, kind="stable"), np.cumsum([0, *np.bincount(at, minlength=groups).tolist()]))
