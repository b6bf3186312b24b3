"""Refusals and warnings about graphs whose ranks would not share their items."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from penstock._errors import GraphError
from penstock._nodes.ranks import Ranks
from penstock._nodes.sharder import Sharder

if TYPE_CHECKING:
    from penstock._nodes.node import Node


def downstream_of_sharder(root: Node[Any]) -> list[Node[Any]]:
    """The nodes that get one rank's items; none if the graph has no `Sharder`."""
    nodes = list(root.chain())
    return nodes[: next((place for place, node in enumerate(nodes) if isinstance(node, Sharder)), 0)]


def users(nodes: list[Node[Any]], method: str) -> list[Node[Any]]:
    """Those of ``nodes`` whose ``method`` is not ours."""
    return [node for node in nodes if not getattr(type(node), method).__module__.startswith("penstock.")]


def refuse_uneven_ranks(root: Node[Any], sharder: Sharder[Any]) -> None:
    """Refuse, on several ranks, a user's node downstream of ``sharder`` for which nobody can know how many items it
    delivers.

    Raises:
        GraphError: The ranks would be at different positions after the same number of batches, and one state is loaded
            on all of them.
    """
    if sharder._split == "own":
        return  # each rank loads a state of its own
    world_size = sharder.ranks()[1]
    for node in users(downstream_of_sharder(root), "counted") if world_size > 1 else ():
        if node.counted(1) is None:
            raise GraphError(
                f"{type(node).__name__} delivers a number of items that depends on what they are (its counted returns "
                f"None), downstream of the Sharder. On {world_size} ranks, each would be at another position, and a "
                f"state of one would lose or repeat items on the others. Leave samples out before they are divided: "
                f"penstock.filtered(dataset, predicate), or the step Filter of a stream."
            )


def warn_if_all_read_everything(root: Node[Any]) -> None:
    """Warn about a graph of a job with several ranks in which nothing divides the items among them."""
    if any(
        isinstance(node, Sharder) or getattr(getattr(node, "facts", None), "sharded_by", None) == "own"
        for node in root.chain()
    ):
        return
    _, world_size = Ranks(None, None, None).now()
    if world_size > 1:
        warnings.warn(
            f"this graph has no Sharder, so each of the {world_size} ranks reads all items, and all train on the same "
            f"batches. Put a Sharder behind the Cycler, which divides the items: Sharder(Cycler(source)). If every "
            f"rank should read everything: Sharder(Cycler(source), rank=0, world_size=1).",
            stacklevel=5,
        )
