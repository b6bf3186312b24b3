"""Sampler: the source of an epoch's indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._errors import GraphError, StateError
from penstock._node import Indices, Node, State, fields

if TYPE_CHECKING:
    from penstock._orders import Order


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
        self._n = len(order)
        self._epoch = 0
        self._position = 0
        self._ahead = Indices(0, np.empty(0, np.int64), np.empty(0, np.int64))

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        if initial_state is None:
            initial_state = self.start_of(self._epoch + (self._position > 0))
        self.check(initial_state)
        self._epoch = initial_state["epoch"]
        self._position = initial_state["position"]

    def next(self) -> Indices:
        if self._position >= self._n:
            raise StopIteration
        # An order computes 500 indices in the time of a few: they are read in blocks, which the state knows nothing of.
        place = self._position % BLOCK
        start = self._position - place
        if self._ahead.epoch != self._epoch or place >= len(self._ahead) or self._ahead.positions[place] != self._position:
            self._ahead = self._block(np.arange(start, min(start + BLOCK, self._n)))
        self._position += 1
        item: Indices = self._ahead[place]
        return item

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Indices:
        start, end = self._position, min(self._position + n * every, self._n)
        self._position = end
        return self._block(np.arange(start + first, end, every))

    def at(self, positions: np.ndarray) -> Indices:
        return self._block(np.asarray(positions, np.int64))

    def remaining(self, state: State | None = None) -> int:
        return self._n - (self._position if state is None else int(state["position"]))

    def batches_per_epoch(self) -> int:
        return self._n

    def settings(self) -> dict[str, Any]:
        return self.order.settings()

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
        within = positions % self._n if positions.size and positions.max() >= self._n else positions
        return Indices(self._epoch, positions, self.order.indices(self._epoch, within))


BLOCK = 512
