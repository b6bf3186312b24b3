"""A graph that was never started is a description, and can go anywhere; one that was started has threads, processes and a place of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock._nodes.node import Node


def unstarted(node: Node[Any]) -> dict[str, Any]:
    """``__getstate__`` of a node that may be pickled and copied until its first `reset`.

    Raises:
        TypeError: It was reset.
    """
    state: dict[str, Any] = vars(node)
    if state.get("_BaseNode__initialized"):  # torchdata's own word for it
        raise TypeError(
            f"a {type(node).__name__} that was started cannot be pickled or copied: its workers and what they are at would stay behind. Pickle or copy the graph "
            f"before its first item is asked for; or build another one there, and load the state that this one saves."
        )
    return state
