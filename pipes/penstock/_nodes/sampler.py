"""Sampler: an order as the source of an epoch's indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._errors import GraphError, StateError
from penstock._fetch.indices import Indices
from penstock._nodes.index_node import Facts, FirstNode, check_positions
from penstock._nodes.node import State, is_count
from penstock._nodes.origins import checked_position, origin_of
from penstock._nodes.plan_source import PlanSource
from penstock._nodes.planned_epochs import PlannedEpochs
from penstock._random.changing import Changing
from penstock._random.order import ContinuingOrder, Order, PlannedOrder, ScheduledOrder
from penstock._random.orders import ForeignOrder, PlainOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 4096
"""The most indices computed at once. An order may ask for more by an attribute ``read_ahead``."""
Block = tuple[int, int, int, int, Indices]
"""Indices computed ahead: epoch, origin, first position, stride, and the indices."""
_NOTHING = Indices(-1, np.empty(0, np.int64), np.empty(0, np.int64))
_NOT_READ: Block = (-1, 0, 0, 1, _NOTHING)


@final
class Sampler(FirstNode[Indices]):
    """Walk through ``order``: one epoch of single `Indices`, then ``StopIteration``.

    The state is only the position in the epoch, so moving to a state costs nothing. ``reset()`` without a state begins
    the next epoch if part of this one has been read, and otherwise this one. The state of a `ContinuingOrder` also
    holds where the epoch began (``origin``) and, at its end, how many of its items no rank got (``left``); the next
    epoch begins with those.

    Args:
        order: Which index is at which position: `SequentialOrder`, `ShuffledOrder`, `WeightedOrder`, `TorchOrder`, or
            your own `Order`.

    Raises:
        GraphError: ``order`` is not an order.
    """

    __module__ = "penstock.nodes"

    told: Sequence[Any] = ()

    def __init__(self, order: Order) -> None:
        if not isinstance(order, Order):
            raise GraphError(
                f"an order has __len__, indices and settings, but {type(order).__name__} does not. Wrap a torch "
                f"sampler in SamplerWrapper."
            )
        self.order = order
        self._plain = plain = order if isinstance(order, PlainOrder) else ForeignOrder(len(order))
        self.run, self.begin_of, self.length_of = plain.run, plain.begin_of, plain.length_of
        self.changing = order if isinstance(order, Changing) else None
        self._block: int = getattr(order, "read_ahead", BLOCK)
        self._changed, self._read_as = False, None if self.changing is None else self.changing.state
        self._ahead = self._next = _NOT_READ  # `_next`: the first block of the epoch after that of `_ahead`
        self._marks, self.why_ranks_differ = plain.marks, plain.why_ranks_differ
        # Each protocol is asked once, because Python 3.11 takes 10 us to answer.
        self._scheduled = order if isinstance(order, ScheduledOrder) else None
        continuing = isinstance(order, ContinuingOrder)
        self._plans = PlanSource[Any]()
        self._planned = PlannedEpochs(order, self._plans) if isinstance(order, PlannedOrder) else None
        # Not for a user's order, which may change between epochs, nor for one that begins where the epoch was left, or
        # is planned as a whole.
        grain = 0 if self.changing is None else self.changing.grain
        self._looks_ahead = isinstance(order, PlainOrder) and not (grain or continuing or self._planned)
        settings = {name: value for name, value in order.settings().items() if name not in plain.compared}
        stages = {} if self._scheduled is None else {"all stages": settings}
        super().__init__(Facts(settings, stages, carries_over_epochs=continuing))

    def details(self) -> dict[str, Any]:
        return {"order": self.order}

    def start(self, epoch: int, after: State | None = None) -> State:
        start = {"epoch": epoch, "position": 0}
        return start | {"origin": origin_of(epoch, after, self._plain)} if self.facts.carries_over_epochs else start

    def left(self, place: State) -> int:
        if self.skipping is not None:
            return self.skipping.left(place)
        return self.length_of(place["epoch"]) - int(place["position"])

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Indices, State]:
        epoch, position, origin = place["epoch"], place["position"], place.get("origin", 0)
        if self.skipping is not None and self.skipping.touches(place, n * every):
            positions, behind = self.skipping.following(place, n * every)
            return self.indices_at(epoch, origin, positions[first::every]), behind
        start, end = position + first, min(position + n * every, length := self.length_of(epoch))
        behind = {**place, "position": end}
        count = max(0, -(-(end - start) // every))
        if not count and self._planned is None:  # orders keep one epoch, and may have begun the next one
            return Indices(epoch, _NOTHING.positions, _NOTHING.values), behind
        # An order computes 500 indices in the time of a few. So if reads continue with the same stride, we compute
        # ahead, twice as far each time. A block is one tuple, assigned at once, so an interrupt or another thread sees
        # either the old one or the new one.
        of_epoch, of_origin, begin, stride, ahead = self._ahead
        at, misfit = divmod(start - begin, every)
        there = len(ahead.positions)
        if misfit or every != stride or not 0 <= at <= there - count or of_epoch != epoch or of_origin != origin:
            more = max(count, min(self._block, 2 * there) if at == there and every == stride else 0)
            block = self._next
            if block[:4] != (epoch, origin, start, every) or len(block[4].positions) < count:
                block = self._computed(epoch, origin, start, more, every)
            self._ahead, at, ahead = block, 0, block[4]
            there = len(ahead.positions)
        if self._looks_ahead and at <= there // 2 < at + count and start + (there - at) * every >= length:
            # The middle of the epoch's last block. The next epoch would otherwise begin with a batch that takes several
            # times as long.
            self._next = self._computed(epoch + 1, origin, first, self._block, every)
        if count == there:
            return ahead, behind
        return Indices(epoch, ahead.positions[at : at + count], ahead.values[at : at + count]), behind

    def skip(self, place: State) -> State:
        end = {**place, "position": (length := self.length_of(place["epoch"]))}
        if not self.facts.carries_over_epochs:
            return end
        # what is skipped in front of the rest is not of it
        at = place["position"] if self.skipping is None else int(self.skipping.following(place, 1)[0][0])
        return {**end, "left": length - at}

    def peek(self, place: State, positions: np.ndarray) -> Indices:
        if self.facts.carries_over_epochs:
            raise GraphError(f"{type(self.order).__name__} can only be read forward, so it cannot be read by position")
        numbers = np.asarray(positions, np.int64)
        if self.skipping is not None:
            numbers = self.skipping.positions(place, numbers)
        return self.indices_at(place["epoch"], 0, numbers)

    def at(self, epoch: int, positions: np.ndarray, *, wraps: bool = False) -> Sequence[Indices]:
        nothing = self.peek(self.start(epoch), positions[:0])  # which says best why not
        check_positions(epoch, positions, self.length_of(epoch), wraps=wraps)
        return self.indices_at(epoch, 0, positions) if len(positions) else nothing

    @property
    def runs_ahead(self) -> bool:
        return not self._changed

    def begin(self, place: State) -> bool:
        """Whether the order has not been changed since this was read ahead; see `Node.begin`."""
        if self.changing is not None:
            self.changing.begins(place["epoch"], place["position"])
            now = self.changing.state
            self._changed, self._read_as = now is not self._read_as, now
        return not self._changed

    def passed(self, place: State) -> int:
        if self.facts.carries_over_epochs:
            return int(place["origin"] - place.get("left", 0) + place["position"])
        return int(self.begin_of(place["epoch"]) + place["position"])

    def choices(self) -> dict[str, Any]:
        stages = {} if self._scheduled is None else {"all stages": self._scheduled.settings()}
        return stages | super().choices()

    def check(self, state: Any) -> None:
        position = checked_position(state, self._plain, self.facts.carries_over_epochs)
        if position > (length := self.length_of(state["epoch"])):
            raise StateError(
                f"a state at position {position} is out of bounds: an epoch has {length} items. Was it saved with "
                f"another dataset?"
            )

    def settings_at(self, epoch: int, place: Any) -> dict[str, Any]:
        length = self.length_of(epoch)
        position = length if place is None else place.get("position")
        origin = place.get("origin") if self.facts.carries_over_epochs and place is not None else 0
        if not is_count(position) or not is_count(origin):
            return {}
        at = origin + min(position, length)
        stages = {} if self._scheduled is None else self._scheduled.settings_at(epoch, at)
        return stages if self.skipping is None else stages | self.skipping.settings_at(epoch, at)

    @property
    def has_notes(self) -> bool:
        return self._marks is not None

    def note(self, place: State, *, again: bool = False) -> tuple[int, ...]:
        return () if self._marks is None else self._marks(again=True) if again else self._marks()

    def take(self) -> None:
        """See `PlainOrder.take`."""
        self._plain.take()

    def recompute(self) -> None:
        self._ahead = self._next = _NOT_READ

    def seek(self, place: State) -> State:
        self.take()
        self.recompute()  # another thread may have computed them by what the order was
        self._plans.resume()
        return place

    def interrupt(self) -> None:
        self._plans.interrupt()

    def shutdown(self) -> None:
        self._plans.shutdown()

    def _computed(self, epoch: int, origin: int, start: int, count: int, every: int) -> Block:
        positions = np.arange(start, min(start + count * every, self.length_of(epoch)), every)
        return epoch, origin, start, every, self.indices_at(epoch, origin, positions)

    def indices_at(self, epoch: int, origin: int, positions: np.ndarray) -> Indices:
        """Those at ``positions`` of an epoch that begins at item ``origin`` of a `ContinuingOrder`. Positions past its
        end are dealt once more, from its start.
        """
        if self._planned is not None:
            self._planned.keep(epoch)
        if self.facts.carries_over_epochs:
            return Indices(epoch, positions, self.order.indices(epoch, origin + positions))
        length = self.length_of(epoch)
        within = positions % length if positions.size and positions.max() >= length else positions
        if within is not positions and self.skipping is not None:
            within = self.skipping.wrapped(epoch, positions)
        return Indices(epoch, positions, self.order.indices(epoch, within))
