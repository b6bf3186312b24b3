"""Sampler: an order as the source of an epoch's indices."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from penstock._errors import GraphError, StateError
from penstock._fetch.indices import Indices
from penstock._nodes.node import Node, State, fields, is_count
from penstock._nodes.plan_source import Place, PlanRequest, PlanSource
from penstock._random.order import ContinuingOrder, Order, PlannedOrder, StagedOrder

BLOCK = 4096
"""Indices computed at once, at most. An order may want more at once, and says so by an attribute ``read_ahead``."""
_NOTHING = Indices(-1, np.empty(0, np.int64), np.empty(0, np.int64))


@final
class Sampler(Node[Indices]):
    """Walk through ``order``: one epoch of single `Indices`, then ``StopIteration``.

    The state is how far the epoch went and nothing else, so going to a state costs nothing. ``reset()`` without a state begins the next
    epoch if part of this one has been read, and else this one. The state of a `ContinuingOrder` also says where the epoch began (``origin``) and, at its
    end, how many of its items no rank got (``left``): the next epoch begins with those.

    Args:
        order: What stands at which position: `SequentialOrder`, `ShuffledOrder`, `WeightedOrder`, `TorchOrder`, or your own `Order`.

    Raises:
        GraphError: ``order`` is not an order.
    """

    __module__ = "penstock"

    def __init__(self, order: Order) -> None:
        super().__init__()
        if not isinstance(order, Order):
            raise GraphError(
                f"an order has __len__, indices and settings, and {type(order).__name__} has not. Wrap a torch sampler in SamplerWrapper."
            )
        self.order = order
        self._n = len(order)
        self._block: int = getattr(order, "read_ahead", BLOCK)
        self._continues = isinstance(order, ContinuingOrder)
        self._epoch = 0
        self._position = 0
        self._origin = 0  # what a continuing order calls position 0 of this epoch
        self._left = 0  # items at the end of this epoch that begin the next one
        self._ahead = _NOTHING  # indices computed ahead: their first position, and their stride
        self._ahead_from, self._ahead_every = 0, 1
        self._planned = order if isinstance(order, PlannedOrder) else None
        self._plans = PlanSource[Any](_OrderPlanner(order))

    def details(self) -> dict[str, Any]:
        return {"order": self.order}

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._plans.resume()
        if initial_state is None:
            initial_state = self.start_of(self._epoch + (self._position > 0), self.get_state())
        self.check(initial_state)
        self._epoch = initial_state["epoch"]
        self._position = initial_state["position"]
        self._origin = initial_state.get("origin", 0)
        self._left = initial_state.get("left", 0)
        self._ahead = _NOTHING  # `take` may have been interrupted between these indices and what it notes of them

    def next(self) -> Indices:
        if self._position >= self._n:
            raise StopIteration
        item: Indices = self.take(1)[0]
        return item

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Indices:
        start, end = self._position + first, min(self._position + n * every, self._n)
        self._position = end
        # An order computes 500 indices in the time of a few. So if reads continue with the same stride, we compute ahead, twice as far
        # each time. The state does not include them, because indices are a function of the position.
        count = max(0, -(-(end - start) // every))
        place, misfit = divmod(start - self._ahead_from, every)
        ahead, there = self._ahead, len(self._ahead.positions)
        if misfit or every != self._ahead_every or not 0 <= place <= there - count or ahead.epoch != self._epoch:
            reads_on = place == there and every == self._ahead_every
            more = max(count, min(self._block, 2 * there) if reads_on else 0)
            ahead = self._ahead = self._indices(np.arange(start, min(start + more * every, self._n), every))
            self._ahead_from, self._ahead_every, place, there = start, every, 0, len(ahead.positions)
        if count == there:
            return ahead
        return Indices(ahead.epoch, ahead.positions[place : place + count], ahead.values[place : place + count])

    def finish(self) -> None:
        self._left, self._position = self._n - self._position, self._n

    def at(self, positions: np.ndarray) -> Indices:
        if self.continues:
            raise GraphError(
                f"tail='pad' would show the start of an epoch again, and {type(self.order).__name__} only goes on. Use tail='drop': what it leaves out "
                f"begins the next epoch."
            )
        return self._indices(np.asarray(positions, np.int64))

    def remaining(self, state: State | None = None) -> int:
        return self._n - (self._position if state is None else int(state["position"]))

    def items_per_epoch(self) -> int:
        return self._n

    def settings(self) -> dict[str, Any]:
        return self.order.settings()

    def settings_at(self, epoch: int, state: Any) -> dict[str, Any]:
        position = self._n if state is None else state.get("position")
        if not isinstance(self.order, StagedOrder) or not is_count(position):
            return {}
        origin = state.get("origin") if self.continues and state is not None else 0
        return self.order.settings_at(epoch, origin + min(position, self._n)) if is_count(origin) else {}

    def choices(self) -> dict[str, Any]:
        return {"all stages": self.order.settings()} if isinstance(self.order, StagedOrder) else {}

    @property
    def continues(self) -> bool:
        return self._continues

    def interrupt(self) -> None:
        self._plans.interrupt()

    def shutdown(self) -> None:
        self._plans.shutdown()

    def get_state(self) -> State:
        state = {"epoch": self._epoch, "position": self._position}
        if self.continues:
            state["origin"] = self._origin
        if self._left:
            state["left"] = self._left
        return state

    def start_of(self, epoch: int, after: State | None = None) -> State:
        if not self.continues:
            return {"epoch": epoch, "position": 0}
        if after is None or epoch < after["epoch"]:
            origin = epoch * self._n
        elif epoch == after["epoch"]:
            origin = after["origin"]
        else:
            delivered = after["position"] - after.get("left", 0) or self._n  # an epoch that is passed over unread counts as a whole one
            origin = after["origin"] + delivered + (epoch - after["epoch"] - 1) * self._n
        return {"epoch": epoch, "position": 0, "origin": origin}

    def check(self, state: Any) -> None:
        left = {"left": int} if isinstance(state, dict) and "left" in state else {}
        position = fields(state, epoch=int, position=int, **({"origin": int, **left} if self.continues else {}))["position"]
        if isinstance(self.order, ContinuingOrder):
            most = -(-self._n // self.order.round) * self.order.round  # older states began an epoch at a multiple of the lanes
            if state["origin"] > state["epoch"] * most:
                raise StateError(
                    f"a state with the origin {state['origin']} is damaged: the {state['epoch']} epochs before have at most {most} items each."
                )
            if "left" in state and not 0 < state["left"] <= position == self._n:
                raise StateError(f"a state with {state['left']} items left at position {position} of {self._n} is damaged.")
        if position > self._n:
            raise StateError(
                f"a state at position {position} is out of bounds: an epoch has {self._n} items. Was it saved with another dataset?"
            )

    def _indices(self, positions: np.ndarray) -> Indices:
        planned = self._planned
        if planned is not None and not planned.keeps(self._epoch):
            planned.keep(self._epoch, self._plans.get(PlanRequest(self._epoch)))
            self._plans.order(PlanRequest(self._epoch + 1))
        if self.continues:
            return Indices(self._epoch, positions, self.order.indices(self._epoch, self._origin + positions))
        within = positions % self._n if positions.size and positions.max() >= self._n else positions
        return Indices(self._epoch, positions, self.order.indices(self._epoch, within))


@final
class _OrderPlanner:
    """Plans the epochs of a `PlannedOrder`, in a thread: it draws from a generator of its own."""

    place: Place = "thread"

    def __init__(self, order: Any) -> None:
        self._order = order

    def __call__(self, request: PlanRequest) -> Any:
        return self._order.plan(request.epoch)
