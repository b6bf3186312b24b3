"""Sampler: an order as the source of an epoch's indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._errors import GraphError, StateError
from penstock._fetch.indices import Indices
from penstock._nodes.node import Node, State, fields
from penstock._random.orders import Order, PlannedOrder
from penstock._workers.ahead_thread import AheadThread

if TYPE_CHECKING:
    from penstock._random.orders import Order


BLOCK = 4096
"""Indices that are computed at once, at most."""
_NOTHING = Indices(-1, np.empty(0, np.int64), np.empty(0, np.int64))


@final
class Sampler(Node[Indices]):
    """Walk through ``order``: one epoch of single `Indices`, then ``StopIteration``.

    Nothing is kept of an epoch but how far it went, so standing at a state costs nothing. ``reset()`` without a state begins the
    next epoch where a part of this one has been read, and else this one.

    Args:
        order: What stands at which position: `SequentialOrder`, `ShuffledOrder`, `WeightedOrder`, `TorchOrder`, or one's own.

    Raises:
        GraphError: ``order`` is none.
    """

    def __init__(self, order: Order) -> None:
        super().__init__()
        if not (hasattr(order, "indices") and hasattr(order, "settings") and hasattr(order, "__len__")):
            raise GraphError(
                f"an order has __len__, indices and settings, and {type(order).__name__} has not. Wrap a torch sampler in SamplerWrapper."
            )
        self.order = order
        self._plans = isinstance(order, PlannedOrder)
        self._n = len(order)
        self._epoch = 0
        self._position = 0
        self._ahead = _NOTHING  # a block of an epoch: from where on, and every how many
        self._ahead_from, self._ahead_every = 0, 1
        self._planner: AheadThread[Any] | None = None

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        if self._planner is not None:
            self._planner.resume()
        if initial_state is None:
            initial_state = self.start_of(self._epoch + (self._position > 0))
        self.check(initial_state)
        self._epoch = initial_state["epoch"]
        self._position = initial_state["position"]
        self._ahead = _NOTHING  # an interrupt may have come between the block and what is known of it

    def next(self) -> Indices:
        if self._position >= self._n:
            raise StopIteration
        item: Indices = self.take(1)[0]
        return item

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Indices:
        start, end = self._position + first, min(self._position + n * every, self._n)
        self._position = end
        # An order computes 500 indices in the time of a few, so more of them are read than are asked for. The state knows nothing of it.
        begin = start - self._ahead_from
        place, misfit = divmod(begin, every)
        count = max(0, -(-(end - start) // every))
        if misfit or every != self._ahead_every or not 0 <= place <= len(self._ahead) - count or self._ahead.epoch != self._epoch:
            going_on = place == len(self._ahead) and every == self._ahead_every
            ahead = max(count, min(BLOCK, 2 * len(self._ahead)) if going_on else 0)
            self._ahead = self._block(np.arange(start, min(start + ahead * every, self._n), every))
            self._ahead_from, self._ahead_every, place = start, every, 0
        return self._ahead if count == len(self._ahead) else self._ahead[place : place + count]

    def at(self, positions: np.ndarray) -> Indices:
        return self._block(np.asarray(positions, np.int64))

    def remaining(self, state: State | None = None) -> int:
        return self._n - (self._position if state is None else int(state["position"]))

    def items_per_epoch(self) -> int:
        return self._n

    def settings(self) -> dict[str, Any]:
        return self.order.settings()

    def interrupt(self) -> None:
        if self._planner is not None:
            self._planner.interrupt()

    def shutdown(self) -> None:
        if self._planner is not None:
            self._planner.shutdown()

    def get_state(self) -> State:
        return {"epoch": self._epoch, "position": self._position}

    def start_of(self, epoch: int) -> State:
        return {"epoch": epoch, "position": 0}

    def check(self, state: Any) -> None:
        position = fields(state, epoch=int, position=int)["position"]
        if position > self._n:
            raise StateError(
                f"a state at position {position} is out of bounds: an epoch has {self._n} items. Was it saved with another dataset?"
            )

    def _block(self, positions: np.ndarray) -> Indices:
        if self._plans:
            self._have_plan()
        within = positions % self._n if positions.size and positions.max() >= self._n else positions
        return Indices(self._epoch, positions, self.order.indices(self._epoch, within))

    def _have_plan(self) -> None:
        """Have the permutation of this epoch, and the next one made meanwhile: its generator is its own, so by a thread."""
        order: Any = self.order
        if not order.keeps(self._epoch):
            if self._planner is None:
                self._planner = AheadThread(order.plan)
            order.keep(self._epoch, self._planner.get(self._epoch, self._epoch))
            self._planner.order(self._epoch + 1, self._epoch + 1)
