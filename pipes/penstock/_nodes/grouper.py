"""Grouper: an order, grouped by length, as the source of an epoch's indices."""

from __future__ import annotations

import copy
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._errors import ANEW, ClosedError, GraphError, StateError
from penstock._fetch.indices import Indices
from penstock._fetch.packing import PackIndex
from penstock._nodes.index_node import Facts, FirstNode
from penstock._nodes.node import State, fields, is_count
from penstock._nodes.plan_source import Place, PlanRequest, PlanSource
from penstock._nodes.sampler import Sampler
from penstock._random.buckets import Buckets
from penstock._random.changing import Fixed, begins_block
from penstock._random.grouping import Packs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._random.groups import Groups
    from penstock._random.order import Order
    from penstock._random.permutation import Int64s

_KEYS = ("epoch", "block", "taken", "position")


@final
class Grouper(FirstNode[Indices]):
    """Walk through ``order`` in groups: one epoch of packs or batches, then ``StopIteration``.

    With `Packs` each item is one index, a `PackIndex`; with `Buckets` it is a batch of indices, with their positions in
    the order. The order is cut into blocks, and the groups of a block depend on that block only. So the state is a
    block, the number of its groups already taken, and the number of groups in the epoch so far; moving to a state plans
    one block. Ranks get whole groups. An epoch cannot be padded.

    Args:
        order: Which index is at which position; see `Sampler`.
        groups: `Packs` or `Buckets`.

    Raises:
        GraphError: ``order`` is not an order, or ``groups`` is neither. While reading: the order has an index without a
            length.
    """

    __module__ = "penstock.nodes"

    def __init__(self, order: Order, groups: Packs | Buckets) -> None:
        if not isinstance(groups, Packs | Buckets):
            raise GraphError(f"groups must be penstock.Packs or penstock.Buckets, not {type(groups).__name__}.")
        if isinstance(groups, Buckets) and groups.keys is not None:
            raise GraphError("a Grouper needs Packs, or Buckets by length. For Buckets with keys, use a KeyGrouper.")
        self.order = order
        self.groups = groups
        self._indices = Sampler(order)
        self._planned_by = None if (changing := self._indices.changing) is None else changing.state
        self.changing = self._indices.changing
        if self.changing is not None and groups.count:
            self.changing = Fixed(self.changing.choices, "count=True counts the groups of whole epochs in advance")
        self._blocks = -(-len(order) // groups.block)
        self._last: _Block | None = None  # the block that was read last
        self._ends: tuple[int, list[int]] = -1, []  # see `_ends_of`
        # An epoch is counted by planning it. A thread counts the next epoch with its own order, because an order may
        # cache what it computes.
        self._counts: dict[int, int] = {}
        self._counter = _Counter(copy.deepcopy(order) if groups.count else order, groups, self._counts)
        self._counting: PlanSource[int] = PlanSource()
        facts = self._indices.facts
        super().__init__(Facts(facts.settings | groups.settings(), facts.rank_settings | {"count": groups.count}))

    def details(self) -> dict[str, Any]:
        return {"order": self.order, "groups": self.groups}

    def start(self, epoch: int, after: State | None = None) -> State:
        return {"epoch": epoch, "block": 0, "taken": 0, "position": 0}

    def left(self, place: State) -> int | None:
        if not self.groups.count:
            return None
        return max(0, _counted(self.order, self.groups, place["epoch"], self._counts) - int(place["position"]))

    def sized(self) -> bool:
        return self.groups.count  # without counting

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Indices], State]:
        epoch, block, taken, position = (place[key] for key in _KEYS)
        if self.groups.count and epoch not in self._counts:
            self._counting.get(self._counter, PlanRequest(epoch))
        begin, target = position + first, position + n * every
        items: list[Indices] = []
        while position < target and block < self._blocks:
            groups = self._block(epoch, block)
            if taken and taken >= len(groups):  # a block of empty sequences has no groups
                raise StateError(
                    f"a state at group {taken} of block {block} is out of bounds: the block has {len(groups)} groups. "
                    f"It is damaged."
                )
            origin = position - taken  # the position of the block's first group
            end = min(target, origin + len(groups))
            items += [groups.item(at - origin, at) for at in range(begin + len(items) * every, end, every)]
            block, taken = (block, end - origin) if end < origin + len(groups) else (block + 1, 0)
            position = end
        if self.groups.count and (
            position > self._counts[epoch] or (block == self._blocks and position < self._counts[epoch])
        ):
            raise StateError(
                f"a state claims that {place['position']} groups come before group {place['taken']} of block "
                f"{place['block']}, but epoch {epoch} has {self._counts[epoch]} groups, and reading ended at "
                f"{position}. It is damaged."
            )
        if self.groups.count and items:
            self._counting.order(self._counter, PlanRequest(epoch + 1))
        return items, dict(zip(_KEYS, (epoch, block, taken, position), strict=True))

    def peek(self, place: State, positions: Int64s) -> Sequence[Indices]:
        raise GraphError("groups cannot be read by position")

    def at(self, epoch: int, positions: np.ndarray, *, wraps: bool = False) -> Sequence[Indices]:
        if isinstance(self.groups, Buckets):
            return self._indices.at(epoch, positions)  # of its samples, in the order
        last, found = self._last, []
        for position in positions.tolist():
            block = 0 if position < 0 else bisect_right(self._ends_of(epoch), position)
            if position < 0 or block == self._blocks:
                raise IndexError(
                    f"pack {position} is not in epoch {epoch}, which has "
                    f"{self._ends_of(epoch)[-1] if self._blocks else 0} packs."
                )
            found.append(
                self._block(epoch, block).item(position - (self._ends_of(epoch)[block - 1] if block else 0), position)
            )
        self._last = last
        return found

    def _ends_of(self, epoch: int) -> list[int]:
        """The packs of ``epoch`` up to the end of each block; planned as a whole, once."""
        if self._ends[0] != epoch:
            self._ends = epoch, list(accumulate(len(self._block(epoch, block)) for block in range(self._blocks)))
        return self._ends[1]

    def check(self, state: Any) -> None:
        fields(state, epoch=int, block=int, taken=int, position=int)
        block, taken, position = state["block"], state["taken"], state["position"]
        most = min(block * self.groups.block, len(self.order)) * self.groups.groups_per_item  # in the blocks before
        if block > self._blocks or (block == self._blocks and taken) or not 0 <= position - taken <= most:
            raise StateError(
                f"a state at group {taken} of block {block}, with {position} groups before it, is out of bounds: an "
                f"epoch has {self._blocks} blocks. Was it saved with another dataset?"
            )

    def settings_at(self, epoch: int, place: Any) -> dict[str, Any]:
        if place is not None:
            block, taken = place.get("block"), place.get("taken")
            # A block is always planned as a whole.
            place = {
                "position": (block + (taken > 0)) * self.groups.block if is_count(block) and is_count(taken) else None
            }
        return self._indices.settings_at(epoch, place)

    def recompute(self) -> None:
        self._indices.recompute()
        self._ends = -1, []

    def begin(self, place: State) -> bool:
        begins_block(self._indices.changing, self._planned_by, place["epoch"], place["block"] + (place["taken"] > 0))
        return True

    def passed(self, place: State) -> int:
        planned = (place["block"] + (place["taken"] > 0)) * self.groups.block  # a block is always planned as a whole
        return int(place["epoch"] * len(self.order) + min(planned, len(self.order)))

    def choices(self) -> dict[str, Any]:
        return self._indices.choices()

    def seek(self, place: State) -> State:
        self._counting.resume()
        self._indices.seek(place)
        return place

    def interrupt(self) -> None:
        self._counting.interrupt()
        self._indices.interrupt()

    def shutdown(self) -> None:
        self._counter.closed = True
        self._counting.shutdown()
        self._indices.shutdown()

    def _block(self, epoch: int, block: int) -> _Block:
        last = self._last
        if last is None or (last.epoch, last.block) != (epoch, block):
            positions = _positions(block * self.groups.block, self.groups, self.order)
            indices: Any = self._indices.peek({"epoch": epoch}, positions)
            last = self._last = _Block(epoch, block, positions, indices.values, self.groups)
        return last


@final
class _Block:
    """The groups of a block of an epoch, as items of the index level."""

    def __init__(self, epoch: int, block: int, positions: Int64s, indices: Int64s, groups: Packs | Buckets) -> None:
        self.epoch = epoch
        self.block = block
        plan = _plan(groups, indices)
        self._splits = plan.splits.tolist()
        self._indices, self._positions = indices[plan.members], positions[plan.members]
        self._packs: list[list[Any]] | None = None  # the columns of a `PackIndex`
        if plan.pieces is not None and isinstance(groups, Packs):
            columns = (
                self._indices,
                self._positions,
                groups.lengths[self._indices],
                plan.pieces.starts,
                plan.pieces.lengths,
            )
            also = [np.stack([counts[self._indices] for counts, _ in groups.also.values()], 1)] if groups.also else []
            self._packs = [column.tolist() for column in (*columns, *also)]

    def __len__(self) -> int:
        return len(self._splits) - 1

    def item(self, group: int, position: int) -> Indices:
        """Group ``group`` of the block, which is group ``position`` of the epoch."""
        begin, end = self._splits[group], self._splits[group + 1]
        if self._packs is None:
            return Indices(self.epoch, self._positions[begin:end], self._indices[begin:end])
        return Indices(self.epoch, position, PackIndex(*(column[begin:end] for column in self._packs)))


@final
class _Counter:
    """Counts the groups of epochs, in a thread."""

    place: Place = "thread"

    def __init__(self, order: Order, groups: Packs | Buckets, counts: dict[int, int]) -> None:
        self._order = order
        self._groups = groups
        self._counts = counts
        self.closed = False

    def __call__(self, request: PlanRequest) -> int:
        return _counted(self._order, self._groups, request.epoch, self._counts, self)


def _counted(
    order: Order, groups: Packs | Buckets, epoch: int, counts: dict[int, int], counter: _Counter | None = None
) -> int:
    """Groups in ``epoch``. If two threads count the same epoch, the first to finish ends the other's count, too."""
    count = 0
    for begin in range(0, len(order), groups.block):
        if epoch in counts:
            return counts[epoch]
        if counter is not None and counter.closed:
            raise ClosedError(f"this loader was closed. {ANEW}")
        count += len(_plan(groups, order.indices(epoch, _positions(begin, groups, order))))
    counts[epoch] = count
    return count


def _plan(groups: Packs | Buckets, indices: Int64s) -> Groups:
    if len(indices) and int(indices.max()) >= len(groups.lengths):
        raise GraphError(
            f"the order has index {int(indices.max())}, but there are {len(groups.lengths)} lengths. Pass one length "
            f"for each index of the dataset."
        )
    return groups.plan(indices)


def _positions(begin: int, groups: Packs | Buckets, order: Order) -> Int64s:
    """The positions in the order of the block that begins at ``begin``."""
    return np.arange(begin, min(begin + groups.block, len(order)))
