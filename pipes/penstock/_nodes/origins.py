"""Where the epochs of an endless order begin: each where the one before it was left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock._errors import StateError
from penstock._nodes.node import fields

if TYPE_CHECKING:
    from penstock._nodes.node import State
    from penstock._random.orders import PlainOrder


def origin_of(epoch: int, after: State | None, order: PlainOrder) -> int:
    """The item at which ``epoch`` of ``order`` begins.

    Args:
        epoch: From 0.
        after: Where the run is now, in this epoch or an earlier one. None: it has left no epoch early.
        order: Without an end.
    """
    if after is None or epoch < after["epoch"]:
        return order.begin_of(epoch)
    origin: int = after["origin"]
    if epoch == after["epoch"]:
        return origin
    # an epoch that is skipped unread counts as a whole one
    delivered = after["position"] - after.get("left", 0) or order.length_of(after["epoch"])
    return int(origin + delivered + order.begin_of(epoch) - order.begin_of(after["epoch"] + 1))


def checked_position(state: Any, order: PlainOrder, endless: bool) -> int:
    """The position in a state of ``order``.

    Raises:
        StateError: It is damaged.
    """
    if not endless:
        return int(fields(state, epoch=int, position=int)["position"])
    left = {"left": int} if isinstance(state, dict) and "left" in state else {}
    position: int = fields(state, epoch=int, position=int, origin=int, **left)["position"]
    length = order.length_of(state["epoch"])
    if state["origin"] > order.begin_of(state["epoch"]):
        raise StateError(
            f"a state of epoch {state['epoch']} says that this epoch starts at item {state['origin']} of the stream, "
            f"but an epoch has {length} items: the state is damaged. Load an older one."
        )
    if left and not 0 < state["left"] <= position == length:
        raise StateError(
            f"a state with {state['left']} items left at position {position} of {length} is damaged. Load an older one."
        )
    return position
