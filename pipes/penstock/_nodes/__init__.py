"""The contract of a node, and one file per node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock._nodes.node import Node

if TYPE_CHECKING:
    from penstock._nodes.node import BaseNode


def _adapted(source: BaseNode[Any]) -> Node[Any]:
    from penstock._nodes.iterable_source import IterableSource

    return IterableSource(source)


Node._adapter = _adapted
