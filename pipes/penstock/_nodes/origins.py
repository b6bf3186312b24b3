"""Where the epochs of an endless order begin: each where the one before it was left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock._errors import StateError
from penstock._nodes.node import fields

if TYPE_CHECKING:
    from penstock._nodes.node import State


def origin_of(epoch: int, after: State | None, length: int) -> int:
    """The item at which ``epoch`` begins, of an order with epochs of ``length`` items.

    Args:
        epoch: From 0.
        after: Where the run is now, in this epoch or an earlier one. None: it has left no epoch early.
        length: Of an epoch.
    """
    if after is None or epoch < after["epoch"]:
        return epoch * length
    origin: int = after["origin"]
    if epoch == after["epoch"]:
        return origin
    delivered = after["position"] - after.get("left", 0) or length  # an epoch that is skipped unread counts as a whole
    return int(origin + delivered + (epoch - after["epoch"] - 1) * length)


def checked_position(state: Any, length: int) -> int:
    """The position in a state of an endless order with epochs of ``length`` items.

    Raises:
        StateError: It is damaged.
    """
    left = {"left": int} if isinstance(state, dict) and "left" in state else {}
    position: int = fields(state, epoch=int, position=int, origin=int, **left)["position"]
    if state["origin"] > state["epoch"] * length:
        raise StateError(
            f"a state of epoch {state['epoch']} says that this epoch starts at item {state['origin']} of the stream, "
            f"but an epoch has {length} items: the state is damaged. Load an older one."
        )
    if left and not 0 < state["left"] <= position == length:
        raise StateError(
            f"a state with {state['left']} items left at position {position} of {length} is damaged. Load an older one."
        )
    return position
