"""IterableSource: a dataset that can only be read from its beginning, in the sampler's place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

from penstock._errors import GraphError, StateError
from penstock._fetch.indices import Indices
from penstock._nodes.node import Node, State, fields, take_by_next

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np


@final
class IterableSource(Node[Indices]):
    """Read an iterable once an epoch, in the consumer's process; under a `Sharder`, on every rank.

    Where the iterable has ``set_epoch``, that is called before each epoch. Where it has ``state_dict`` and ``load_state_dict``, they
    are used to resume; elsewhere resuming reads it again up to where it was, and says so in a warning.

    Args:
        iterable: An ``IterableDataset``, or any iterable that can be read more than once.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        super().__init__()
        if isinstance(iterable, Iterator):
            raise GraphError(
                f"{type(iterable).__name__} is an iterator, which can be read only once; an epoch needs an iterable that can be read again."
            )
        self.iterable = iterable
        self._stateful = hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")
        self._pristine = copy.deepcopy(iterable.state_dict()) if self._stateful else None  # type: ignore[attr-defined]
        self._iterator: Iterator[Any] = iter(())
        self._epoch = 0
        self._position = 0
        self._ended = False

    def reset(self, initial_state: State | None = None) -> None:
        state = self._after_this() if initial_state is None else initial_state
        super().reset(state)
        abandoned = self._position > 0 and not self._ended
        self._epoch = state["epoch"]
        self._position = 0
        self._ended = state["ended"]
        if abandoned and self._stateful and state["iterable"] is None:
            self.iterable.load_state_dict(copy.deepcopy(self._pristine))  # type: ignore[attr-defined]  # or it might go on from there
        if hasattr(self.iterable, "set_epoch"):
            self.iterable.set_epoch(self._epoch)
        if self._stateful and state["iterable"] is not None:
            self.iterable.load_state_dict(copy.deepcopy(state["iterable"]))  # type: ignore[attr-defined]
            self._position = state["position"]
        if self._ended:
            self._position = state["position"]
            return
        self._iterator = iter(self.iterable)
        if self._position < state["position"]:
            self._read_again(state["position"])

    def next(self) -> Indices:
        if self._ended:
            raise StopIteration
        try:
            item = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        self._position += 1
        return Indices(self._epoch, self._position - 1, item)

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Sequence[Indices]:
        return take_by_next(self, n, every=every, first=first)

    def at(self, positions: np.ndarray) -> Sequence[Indices]:
        raise GraphError(
            f"{type(self.iterable).__name__} cannot be read by position, which tail='pad' needs. Use tail='drop' or tail='exact'."
        )

    def remaining(self, state: State | None = None) -> int | None:
        return 0 if (self._ended if state is None else state["ended"]) else None

    def items_per_epoch(self) -> int | None:
        return None

    def settings(self) -> dict[str, Any]:
        return {"source": type(self.iterable).__name__}

    def get_state(self) -> State:
        inner = copy.deepcopy(self.iterable.state_dict()) if self._stateful else None  # type: ignore[attr-defined]
        return {"epoch": self._epoch, "position": self._position, "ended": self._ended, "iterable": inner}

    def start_of(self, epoch: int) -> State:
        return {"epoch": epoch, "position": 0, "ended": False, "iterable": None}

    def check(self, state: Any) -> None:
        inner = fields(state, epoch=int, position=int, ended=bool, iterable=object)["iterable"]
        if inner is not None and not isinstance(inner, dict):
            raise StateError(f"the state of {type(self.iterable).__name__} must be a dict or null, and {inner!r:.80} came.")

    def _after_this(self) -> State:
        return self.start_of(self._epoch + 1 if self._position or self._ended else self._epoch)

    def _read_again(self, position: int) -> None:
        warnings.warn(
            f"{type(self.iterable).__name__} has no state_dict and load_state_dict, so resuming reads its first {position} items again. "
            f"Give it both, or index its data.",
            stacklevel=2,
        )
        while self._position < position:
            try:
                self.next()
            except StopIteration:
                raise StateError(
                    f"the state stands behind item {position} of epoch {self._epoch}, and {type(self.iterable).__name__} ended after {self._position}: it has changed."
                ) from None
