"""ToldEpochs: keeps the ``set_epoch`` of the user's own objects in step with the loop.

A script that resumes by the number of an epoch calls ``sampler.set_epoch(3)``, and nothing of the loader. So when the loop asks for an epoch, the loader
first looks whether somebody has set another one: that is a request, like `Loader.set_epoch`. Then it tells the objects which epoch begins.

`epoch_cells` finds where an object keeps its epoch by telling a copy. A `Told` number there is the loader's own, so that a call is seen even if it
sets the number that the object already holds.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, final

from torch.utils.data import IterableDataset

from penstock._fetch.fetch import Told
from penstock._memory.modes import neutral_modes
from penstock._nodes.sampler_traits import copied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.node import Node

_NAMES = ("epoch", "_epoch")
"""Where an object that cannot be copied keeps its epoch."""


@final
class ToldEpochs:
    """The epochs that the user's objects in a graph hold.

    Args:
        nodes: Of the graph.
    """

    def __init__(self, nodes: Sequence[Node[Any]]) -> None:
        self._objects = [one for node in nodes for one in node.told]
        watched = [one for node in nodes for one in node.watched]
        self._cells = [(one, name) for one in (*self._objects, *watched) for name in epoch_cells(one)]
        for one, name in self._cells:
            if getattr(one, name) == 0:  # nobody has set it yet; another number is a request
                setattr(one, name, Told(0))
        values = (getattr(one, name) for one, name in self._cells)
        self._known: list[Any] = [value if isinstance(value, Told) else None for value in values]

    def asked(self) -> int | None:
        """The epoch that somebody else has set; None if nobody has."""
        for (one, name), known in zip(self._cells, self._known, strict=True):
            now: Any = getattr(one, name, None)
            if _is_epoch(now) and not isinstance(now, Told) and (now != known or isinstance(known, Told)):
                return int(now)
        return None

    def seen(self) -> None:
        """Regard what the objects hold now as known."""
        self._known = [getattr(one, name, None) for one, name in self._cells]

    def tell(self, epoch: int) -> None:
        """Tell the objects that ``epoch`` begins."""
        with neutral_modes():
            for one in self._objects:
                one.set_epoch(Told(epoch))
        self.seen()


def epoch_cells(one: Any) -> list[str]:
    """The attributes in which ``one`` keeps its epoch as a whole number."""
    before = {name for name in _names_of(one) if _is_epoch(getattr(one, name, None))}
    if not before:
        return []
    is_data = isinstance(one, IterableDataset) or hasattr(one, "__getitem__")
    try:
        other, found = copy.copy(one) if is_data else copied(one), []  # data may be large, and a sampler may tell others
        for epoch in (1, 2):
            with neutral_modes():
                other.set_epoch(epoch)
            found.append({name for name in _names_of(other) if _is_epoch(value := getattr(other, name, None)) and value == epoch})
        return sorted(found[0] & found[1])
    except Exception:
        return [name for name in _NAMES if name in before]


def _names_of(one: Any) -> set[str]:
    """Its attributes and those of its classes."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(one).__mro__)
    ours = {name for kind in type(one).__mro__ for name, value in vars(kind).items() if isinstance(value, int)}
    return {*getattr(one, "__dict__", ()), *ours, *(name for names in slots for name in ((names,) if isinstance(names, str) else names))}


def _is_epoch(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
