"""Checks watch a loader. They may warn or raise, and have what was loaded ahead loaded again; they never change an
item.

The graph's reader calls a list of them, and knows none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._fetch.indices import Indices
    from penstock._loader.positions import Positions
    from penstock._nodes.node import Node, State


class Check:
    """What a check is told, in the consumer's thread."""

    def began(self, state: State, *, jumped: bool) -> bool:
        """The loop asks for what follows ``state``, of which it has got nothing yet.

        With ``jumped`` it is the first time after the loader was built, or after a state was loaded. Returns whether
        what was loaded ahead still holds.
        """
        return True

    def delivered(self, state: State, address: Indices | None) -> None:
        """An item is about to be delivered; ``state`` is the position after it. An error takes its place."""

    def ended(self) -> None:
        """The epoch is over. An error takes the place of its end."""

    def closed(self) -> None:
        """The loader is closed."""


homes = ["penstock._loader.rank_notes", "penstock._loader.loop_changes"]
"""Modules with a function ``check(positions, nodes, infinite=...)``, which returns the check of a graph, or None. By
name, because they are imported when the first loader is built, and may use all that the reader of a graph uses.
"""


def checks_of(positions: Positions, nodes: Sequence[Node[Any]], *, infinite: bool) -> list[Check]:
    """The checks that watch a graph."""
    made = [importlib.import_module(home).check(positions, nodes, infinite=infinite) for home in homes]
    return [check for check in made if check is not None]
