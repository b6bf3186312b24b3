"""ToldEpochs: keeps the ``set_epoch`` of the user's own objects in step with the loop.

A script that resumes by the number of an epoch calls ``sampler.set_epoch(3)``, and nothing of the loader. So when the loop asks for an epoch, the loader
first looks whether somebody has set another one: that is a request, like `Loader.set_epoch`. Then it tells the samplers which epoch begins.

What counts is the number that an object holds. A call with the number of the epoch that has just run cannot be told from no call, so the next epoch begins.
(To mark our own numbers with a subclass of ``int`` was tried. A checkpoint that contains such a number cannot be loaded with ``weights_only=True``.)
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, final

from penstock._memory.modes import neutral_modes
from penstock._nodes.sampler_content import content
from penstock._nodes.sampler_traits import copied, tell, told_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.node import Node

log = logging.getLogger("penstock")

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
        objects = [one for sampler in self._samplers for one in told_by(sampler)]
        objects += [one for node in nodes for one in node.watched]
        copied_to_workers = [one for node in nodes for one in node.watched if not node.tells_here]
        self._cells = [(one, name, any(one is other for other in copied_to_workers)) for one in objects for name in epoch_cells(one)]
        self._known = [0] * len(self._cells)  # numbers that are no request
        self._warned = False

    def asked(self) -> int | None:
        """The epoch that somebody else has set; None if nobody has."""
        for (one, name, _), known in zip(self._cells, self._known, strict=True):
            now: Any = getattr(one, name, None)
            if _is_epoch(now) and now != known:
                if now < max(self._known) and not self._warned:
                    self._warned = True
                    log.warning(
                        "%s was set to epoch %d after epoch %d had begun, so the loader goes back. A call with the number of the epoch that has just run "
                        "is not seen; to repeat an epoch, call loader.set_epoch.",
                        *(type(one).__name__, now, max(self._known)),
                    )
                return int(now)
        return None

    def begin(self, epoch: int) -> None:
        """Tell the samplers that ``epoch`` begins. Data is told where it is read."""
        with neutral_modes():
            for sampler in self._samplers:
                tell(sampler, epoch, seeded=True)
        self.seen()
        self._known = [known if is_copied else epoch for known, (_, _, is_copied) in zip(self._known, self._cells, strict=True)]

    def seen(self) -> None:
        """Regard what the objects hold now as known."""
        self._known = [getattr(one, name, None) or 0 for one, name, _ in self._cells]


def epoch_cells(one: Any) -> list[str]:
    """The attributes in which ``one`` keeps its epoch as a whole number, found by telling a copy."""
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
        return sorted(found[0] & found[1])
    except Exception:
        return [name for name in _NAMES if name in before]


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
