"""Groups the items of a block by length: packs that fill a capacity. Pure functions of the lengths.

A block is a stretch of an order, such as 1024 or 8192 items. All ranks plan the same blocks, so they agree on every
group without communication.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import numpy as np

if TYPE_CHECKING:
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
    """Limit every item to ``capacity``: cut it into several pieces, keep only the first piece, or refuse it.

    An empty item has no pieces.

    Raises:
        ValueError: ``oversize="error"``, and an item is longer than the capacity.
    """
    longest = int(lengths.max(initial=0))
    if oversize == "error" and longest > capacity:
        raise ValueError(
            f"item {int(lengths.argmax())} has length {longest}, but the capacity is {capacity}. Raise the capacity, "
            f"or use oversize='split' or 'truncate'."
        )
    counts = -(-lengths // capacity) if oversize == "split" else (lengths > 0).astype(np.int64)
    items = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)) * capacity
    return Pieces(items, starts, np.minimum(lengths[items] - starts, capacity))


def packed(lengths: Int64s, capacity: int) -> Groups:
    """Put items into as few groups as best-fit decreasing finds, each of at most ``capacity``.

    The longest item goes first, and each goes into the group with the least room that still fits it. With lognormal
    lengths and a block of 1024, that fills 99.6 %. Groups come in the order of their first items, and so do the items
    within a group: packing preserves the shuffle of the block.

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


def packed_within(takes: Int64s, limits: Int64s) -> Groups:
    """Put items into few groups within several budgets: the item that takes most of what is scarce goes first, with its
    `companions`.

    Args:
        takes: What each item takes of each budget, shape ``(n, budgets)``, from 0 to its limit.
        limits: Of each budget, at least 1, shape ``(budgets,)``.
    """
    group_of, groups = np.zeros(len(takes), np.int64), 0
    scarcity = takes.sum(0) / limits
    rest = np.argsort(-sum((takes / limits * scarcity).T), kind="stable")
    while len(rest):
        members = companions(takes[rest], limits, 0)
        group_of[rest[members]] = groups
        rest, groups = np.delete(rest, members), groups + 1
    return _grouped(group_of, groups)


def companions(takes: Int64s, limits: Int64s, first: int) -> list[int]:
    """The items of a group that begins with ``first``: the next is always the one that leaves least of the budgets, of
    the scarce ones above all.

    Measured by the squares of what is left, weighted by how many groups each budget needs ("norm-based greedy" of
    Panigrahy et al., Heuristics for Vector Bin Packing, 2011). Each number is computed on its own, so that all
    processors agree on the last bit.
    """
    scarcity = takes.sum(0) / limits
    space, left, members = limits - takes[first], np.delete(np.arange(len(takes)), first), [first]
    while True:
        left = left[(takes[left] <= space).all(1)]
        if not len(left):
            return members
        after = ((space - takes[left]) / limits) ** 2 * scarcity
        best = int(sum(after.T).argmin())
        members.append(int(left[best]))
        space = space - takes[members[-1]]
        left = np.delete(left, best)


def _grouped(group_of: Int64s, groups: int) -> Groups:
    """Items by group; groups in the order of their first items."""
    first = np.full(groups, len(group_of))
    np.minimum.at(first, group_of, np.arange(len(group_of)))
    place = np.empty(groups, np.int64)
    place[np.argsort(first)] = np.arange(groups)
    at = place[group_of]
    return Groups(np.argsort(at, kind="stable"), np.cumsum([0, *np.bincount(at, minlength=groups).tolist()]))
