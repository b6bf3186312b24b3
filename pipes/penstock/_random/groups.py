"""Groups the items of a block by length: packs that fill a capacity. Pure functions of the lengths.

A block is a stretch of an order, such as 1024 or 8192 items. All ranks plan the same blocks, so they agree on every group without communication.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import gt, sub
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._random.permutation import Int64s


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


def packed_within(lengths: Int64s, capacity: int, budgets: Sequence[tuple[Int64s, int]]) -> Groups:
    """The same with further budgets. The item that takes the largest part of any of them goes first; each goes into the group with the least room that fits it.

    Args:
        lengths: See `packed`.
        capacity: See `packed`.
        budgets: What the items take of each, shape ``(n,)``, from 0 to its limit; and the limit, at least 1.
    """
    group_of = [0] * len(lengths)
    rooms: list[tuple[int, int]] = []
    spaces: list[list[int]] = []  # what is left of the budgets in each group
    sizes, takes = lengths.tolist(), np.stack([counts for counts, _ in budgets], 1).tolist()
    shares = np.max([lengths, *(counts * (capacity / limit) for counts, limit in budgets)], axis=0)
    for item in np.argsort(-shares, kind="stable").tolist():
        found = bisect_left(rooms, (sizes[item], -1))
        while found < len(rooms) and any(map(gt, takes[item], spaces[rooms[found][1]])):
            found += 1
        room, group = rooms.pop(found) if found < len(rooms) else (capacity, len(spaces))
        if group == len(spaces):
            spaces.append([limit for _, limit in budgets])
        group_of[item] = group
        insort(rooms, (room - sizes[item], group))
        spaces[group] = list(map(sub, spaces[group], takes[item]))
    return _grouped(np.array(group_of, np.int64), len(spaces))


def _grouped(group_of: Int64s, groups: int) -> Groups:
    """Items by group; groups in the order of their first items."""
    first = np.full(groups, len(group_of))
    np.minimum.at(first, group_of, np.arange(len(group_of)))
    place = np.empty(groups, np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(groups)
    at = place[group_of]
    return Groups(np.argsort(at, kind="stable"), np.cumsum([0, *np.bincount(at, minlength=groups).tolist()]))
