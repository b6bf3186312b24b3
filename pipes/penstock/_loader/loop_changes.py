"""LoopChanges: sees what the user's loop has changed in the data before an epoch. A ``DataLoader`` gives its workers
the dataset anew for each.

Compared are plain attributes of the dataset, ``transform`` and ``collate_fn``, and of what these hold: numbers, short
texts, None. What has a ``set_epoch`` is left out: `ToldEpochs` looks at its number.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, final

from penstock._errors import Once
from penstock._fetch.plain_values import differing, plain_values
from penstock._loader.checks import Check
from penstock._nodes.node import epoch_of
from penstock._nodes.parallel_mapper import ParallelMapper
from penstock._nodes.reader_node import ReaderNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._loader.positions import Positions
    from penstock._nodes.node import Node, State

log = logging.getLogger("penstock")


@final
class LoopChanges(Check):
    """The plain values of the user's objects, compared when an epoch begins.

    Args:
        positions: Of the graph.
        mapper: With the workers, and what they were given.
        own: The objects that are read in this process, by the first words of their paths.
        infinite: Only say what has changed.
    """

    def __init__(
        self, positions: Positions, mapper: ParallelMapper[Any], own: dict[str, Any], *, infinite: bool
    ) -> None:
        self._positions, self._mapper, self._own, self._infinite = positions, mapper, own, infinite
        self._seen: dict[str, Any] = {}  # of its own, when the last epoch began; of an iterable, when it ended
        self._loading: set[str] = set()  # paths that change while only loading runs, such as a counter
        self._begins = False  # no item was delivered since
        self._last: str | None = None  # the path that the loop had changed before the last epoch
        self._once = Once()

    def began(self, state: State, *, jumped: bool) -> bool:
        epoch, executor = epoch_of(state), self._mapper.executor
        if state != self._positions.start_of(epoch, state):
            return True
        given = differing(executor.given, plain_values(executor.roots)) if executor.given else []
        before, self._seen, self._begins = self._seen, plain_values(self._own), True
        changed = [path for path in differing(before, self._seen) if path not in self._loading]
        path = next(iter((*given, *changed)), None)
        again, self._last = path == self._last, path
        if path is None:
            return True
        if self._infinite:
            self._say(
                "%s has changed, but with infinite=True the workers keep what they have. Call loader.refresh() after "
                "such a change.",
                path,
            )
            return True
        if given and (why := executor.why_not_sent()) is not None:
            self._say(
                "%s was changed, but the dataset can no longer be sent to worker processes (%s: %s), so they keep what "
                "they have.",
                *(path, type(why).__name__, why),
            )
            return True
        self._say(
            "%s was changed before epoch %d began, so what was loaded ahead is dropped%s, as with a DataLoader.",
            *(path, epoch, ", and the workers get the dataset anew" * bool(given)),
        )
        if again:
            self._mapper.passes_ends = False
            self._say(
                "%s was changed before two epochs in a row, so from now on nothing of an epoch is loaded before you "
                "ask for it, and each epoch begins with a wait. To load ahead, let the dataset take the epoch from "
                "penstock.sample().epoch or from its set_epoch(epoch).",
                path,
            )
        if given:
            executor.refresh()
        return False

    def delivered(self, state: State, address: Any) -> None:
        """What has changed since an epoch began, while the loop waited, is loading's doing."""
        if self._begins:
            self._begins, now = False, plain_values(self._own)
            self._loading.update((*differing(self._seen, now), *(now.keys() - self._seen.keys())))

    def ended(self) -> None:
        """Of an iterable only what changes between two epochs counts: what it changes itself while it is read, such as
        a count of its passes, could not be told from what the loop changes.
        """
        if "iterable" in self._own:
            self._seen = plain_values(self._own)

    def _say(self, text: str, *words: object) -> None:
        if self._once(text):
            log.warning(text, *words)


def check(positions: Positions, nodes: Sequence[Node[Any]], *, infinite: bool) -> LoopChanges | None:
    """That of a graph; None if nothing is loaded before the loop asks for it."""
    mapper = next((node for node in nodes if isinstance(node, ParallelMapper)), None)
    if mapper is None:
        return None
    copies, iterable = mapper.executor.copies, getattr(nodes[-1], "iterable", None)
    own = {**({} if copies else mapper.executor.roots), **({} if iterable is None else {"iterable": iterable})}
    ahead = mapper.num_workers or any(isinstance(node, ReaderNode) and node.ahead for node in nodes)
    return LoopChanges(positions, mapper, own, infinite=infinite) if copies or ahead else None
