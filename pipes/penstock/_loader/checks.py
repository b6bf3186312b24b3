"""Checks watch a loader, and may warn or raise; they never change an item.

The graph's reader calls a list of them, and knows none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._fetch.indices import Indices
    from penstock._loader.positions import Positions
    from penstock._nodes.node import Node, State


class Check(Protocol):
    """What a check is told, in the consumer's thread."""

    def began(self, state: State, *, jumped: bool) -> None:
        """The loop asks for what follows ``state``, of which nothing was read yet.

        With ``jumped`` it is the first time after the loader was built, or after a state was loaded.
        """

    def delivered(self, state: State, address: Indices | None) -> None:
        """An item is about to be delivered; ``state`` is the position after it. An error takes its place."""

    def ended(self) -> None:
        """The epoch is over. An error takes the place of its end."""

    def closed(self) -> None:
        """The loader is closed."""


homes = ["penstock._loader.rank_notes"]
"""Modules with a function ``check(positions, nodes)``, which returns the check of a graph, or None. By name, because
they are imported when the first loader is built, and may use all that the reader of a graph uses.
"""


def checks_of(positions: Positions, nodes: Sequence[Node[Any]]) -> list[Check]:
    """The checks that watch a graph."""
    made = [importlib.import_module(home).check(positions, nodes) for home in homes]
    return [check for check in made if check is not None]
