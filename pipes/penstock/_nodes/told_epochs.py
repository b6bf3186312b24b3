"""ToldEpochs: keeps the ``set_epoch`` of the user's own objects in step with the loop.

Samplers are told which epoch comes next at the end of an epoch, when a state is loaded, and when an epoch is requested
of the loader; not when an epoch begins. So what the user then tells them is the last word, and nobody has to hear it.
If an object keeps the number in an attribute ``epoch``, another number there than we have told it is a request, like
`Loader.set_epoch`. The user's data is told at the end of an epoch too, a requested epoch when that begins, and in each
worker with its tasks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, final

from penstock._errors import Once, suppress_own
from penstock._fetch.epoch_attribute import answer, asked, follows, keeps, number_of
from penstock._memory.modes import neutral_modes
from penstock._nodes.sampler_traits import tell, told_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.node import Node

log = logging.getLogger("penstock")


@final
class ToldEpochs:
    """The objects of a graph that are told epochs.

    Args:
        nodes: Of the graph.
    """

    def __init__(self, nodes: Sequence[Node[Any]]) -> None:
        self._nodes = nodes
        self._samplers = [sampler for node in nodes for sampler in node.told]
        self._objects = [one for sampler in self._samplers for one in told_by(sampler)]
        self._objects += [data for node in nodes for data in node.watched]
        self._told: list[int | None] = [0] * len(self._samplers)  # last; None: to be told when the next epoch begins
        self._is_due = False  # the data is still to be told an epoch that was asked of the loader
        self._once = Once()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.answer()  # the copies keep what their originals were told

    def asked(self) -> int | None:
        """The epoch that the user has set on an object, and that was not answered; None if there is none."""
        return next((epoch for each in self._objects if (epoch := asked(each)) is not None), None)

    def answer(self) -> None:
        """What the objects keep now is no request, or no longer one."""
        for one in self._objects:
            answer(one)

    def tell(self, epoch: int) -> None:
        """An epoch is over: tell the samplers that ``epoch`` comes next, but for those that the user has told another
        one since. What the user then tells them counts. One that raises is told again if that epoch begins.
        """
        for k, sampler in enumerate(self._samplers):
            self._told[k] = None
            with suppress_own():  # perhaps there is no such epoch
                if not _is_asked(sampler):
                    tell(sampler, epoch)
                self._told[k] = epoch
        self._tell_data(epoch)

    def demand(self, epoch: int, *, is_read: bool) -> None:
        """``epoch`` was asked of the loader, or a state in it was loaded: tell all samplers, which answers the user's
        earlier calls.

        What may be read for another epoch now is told when that one begins: the data, and if one ``is_read`` in blocks,
        the samplers.
        """
        for sampler in self._samplers if not is_read else ():
            tell(sampler, epoch)
        self.answer()
        self._told, self._is_due = [None if is_read else epoch] * len(self._samplers), True

    def begin(self, epoch: int) -> bool:
        """``epoch`` begins: tell the samplers that keep another number that was told by a loader, after a loop that was
        left early, or because two loaders share one.

        Returns whether what was loaded ahead holds; see `Node.settle`.
        """
        for k, sampler in enumerate(self._samplers):
            objects, last = told_by(sampler), self._told[k]
            if (last is None and not _is_asked(sampler)) or any(
                follows(each) and number_of(each) != epoch for each in objects
            ):
                tell(sampler, epoch)
            elif last != epoch != 0 and objects and not any(map(keeps, objects)) and self._once(type(sampler)):
                log.info(
                    "%s was not told that epoch %d begins: the loop left the epoch before it early, and without an "
                    "attribute epoch nobody can see whether you have told it. Call its set_epoch before such an epoch, "
                    "or keep the number as epoch.",
                    type(sampler).__name__,
                    epoch,
                )
            self._told[k] = epoch
        if self._is_due:
            self._tell_data(epoch)
        holds = [node.settle(epoch) for node in self._nodes]
        return all(holds)

    def _tell_data(self, epoch: int) -> None:
        with neutral_modes():
            for node in self._nodes:
                with suppress_own():
                    node.tell(epoch)
        self._is_due = False


def _is_asked(sampler: Any) -> bool:
    return any(asked(each) is not None for each in told_by(sampler))
