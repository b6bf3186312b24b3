"""ToldEpochs: keeps the ``set_epoch`` of the user's own objects in step with the loop.

When the loop asks for an epoch, the loader first looks whether somebody has set another one on an object of the graph:
that is a request, like `Loader.set_epoch`. Then it tells the samplers which epoch begins. Data is told where it is
read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from penstock._fetch.epoch_calls import is_told, listen
from penstock._fetch.held import found_in as held
from penstock._memory.modes import neutral_modes
from penstock._nodes.sampler_traits import tell, told_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.node import Node

_LOOKED_AT = 500
"""Objects among which those with a ``set_epoch`` are looked for."""


@final
class ToldEpochs:
    """The calls of ``set_epoch`` on the user's objects in a graph, and on what they hold.

    Args:
        nodes: Of the graph.

    Attributes:
        first: The calls that count as answered before the first epoch.
    """

    def __init__(self, nodes: Sequence[Node[Any]]) -> None:
        self._samplers = [sampler for node in nodes for sampler in node.told]
        objects = [one for sampler in self._samplers for one in told_by(sampler)]
        for one in (*self._samplers, *(data for node in nodes for data in node.watched)):
            objects += [inner.value for inner in held({"": one}, _LOOKED_AT)[0] if is_told(inner.value)]
        self._objects = list({id(one): one for one in objects}.values())
        self.first = tuple(heard.calls - heard.is_users for heard in map(listen, self._objects))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.calls()  # listens to the copies

    def asked(self, answered: tuple[int, ...]) -> int | None:
        """The epoch that the user has set since there were ``answered`` calls on each object; None if there is no new
        call.
        """
        for one, before in zip(self._objects, answered, strict=True):
            heard = listen(one)
            heard.look(one)
            if heard.calls > before:
                return heard.asked
        return None

    def calls(self) -> tuple[int, ...]:
        """How many calls the user has made on each object."""
        return tuple(listen(one).calls for one in self._objects)

    def begin(self, epoch: int) -> None:
        """Tell the samplers that ``epoch`` begins."""
        with neutral_modes():
            for sampler in self._samplers:
                tell(sampler, epoch, seeded=True)
