"""ToldEpochs: keeps the ``set_epoch`` of the user's own objects in step with the loop.

A script that resumes by the number of an epoch calls ``sampler.set_epoch(3)``, and nothing of the loader. So when the loop asks for an epoch, the loader
first looks whether somebody has set another one: that is a request, like `Loader.set_epoch`. Then it tells the objects which epoch begins.

`epoch_cells` finds where an object keeps its epoch by telling a copy. A `Told` number there is the loader's own, so that a call is seen even if it
sets the number that the object already holds.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, final

from penstock._fetch.fetch import Told
from penstock._memory.modes import neutral_modes
from penstock._nodes.sampler_content import content
from penstock._nodes.sampler_traits import copied, tell, told_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.node import Node

_NAMES = ("epoch", "_epoch")
"""Where an object keeps its epoch that is too large to be copied, or cannot be."""


@final
class ToldEpochs:
    """The epochs that the user's objects in a graph hold.

    Args:
        nodes: Of the graph.
    """

    def __init__(self, nodes: Sequence[Node[Any]]) -> None:
        self._samplers = [sampler for node in nodes for sampler in node.told]
        objects = [one for sampler in self._samplers for one in told_by(sampler)] + [one for node in nodes for one in node.watched]
        self._cells = [(one, name, keeps) for one in objects for name, keeps in epoch_cells(one)]
        self._known: list[Any] = [0] * len(self._cells)  # numbers that are no request: of the epoch that began last, or refused
        for one, name, keeps in self._cells:
            if keeps and getattr(one, name) == 0:  # nobody has set it yet; another number is a request
                setattr(one, name, Told(0))

    def asked(self) -> int | None:
        """The epoch that somebody else has set; None if nobody has."""
        for (one, name, keeps), known in zip(self._cells, self._known, strict=True):
            now: Any = getattr(one, name, None)
            if _is_epoch(now) and not isinstance(now, Told) and (keeps or now != known):
                return int(now)
        return None

    def begin(self, epoch: int) -> None:
        """Tell the samplers that ``epoch`` begins. Data is told where it is read."""
        with neutral_modes():
            for sampler in self._samplers:
                tell(sampler, epoch, seeded=True)
        self.seen()
        self._known = [epoch] * len(self._cells)

    def seen(self) -> None:
        """Regard what the objects hold now as known."""
        for place, (one, name, keeps) in enumerate(self._cells):
            now: Any = getattr(one, name, None)
            self._known[place] = now
            if keeps and _is_epoch(now) and not isinstance(now, Told):
                setattr(one, name, Told(now))


def epoch_cells(one: Any) -> list[tuple[str, bool]]:
    """The attributes in which ``one`` keeps its epoch as a whole number, and whether it keeps the very object that it is told."""
    before = [name for name in _names_of(one) if _is_epoch(getattr(one, name, None))]
    if not before:
        return []
    try:
        content(one)  # raises if it is large
        other, found = copied(one, whole=True), []
        for epoch in (1, 2):
            with neutral_modes():
                tell(other, epoch, seeded=True)
            found.append({name for name in _names_of(other) if _is_epoch(value := getattr(other, name, None)) and value == epoch})
        return [(name, isinstance(getattr(other, name), Told)) for name in sorted(found[0] & found[1])]
    except Exception:
        return [(name, True) for name in _NAMES if name in before]


def _names_of(one: Any) -> set[str]:
    """The attributes of ``one`` that are stored: in its own dict, in a slot, or as a number in its class."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(one).__mro__)
    of_classes = (name for kind in type(one).__mro__ for name in vars(kind) if isinstance(inspect.getattr_static(one, name), int))
    return {
        *getattr(one, "__dict__", ()),
        *of_classes,
        *(name for names in slots for name in ((names,) if isinstance(names, str) else names)),
    }


def _is_epoch(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
