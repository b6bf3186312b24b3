"""What the tests of samplers share: a node that wraps one is read as a `Cycler` reads it."""

from __future__ import annotations

import json
from typing import Any


def plain(items: Any) -> list[Any]:
    return [item.plain() for item in items]


def following(node: Any, count: int) -> tuple[list[Any], list[Any]]:
    """The next ``count`` items with the states after them, over the ends of epochs."""
    items: list[Any] = []
    states: list[Any] = []
    while len(items) < count:
        try:
            items.append(next(node))
        except StopIteration:
            node.reset(node.start_of(node.get_state()["epoch"] + 1))
        else:
            states.append(json.loads(json.dumps(node.get_state())))
    return items, states
