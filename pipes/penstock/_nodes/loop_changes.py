"""LoopChanges: sees what the user's loop has changed in the data before an epoch. A ``DataLoader`` gives its workers
the dataset anew for each.

Compared are plain attributes of the dataset, ``transform`` and ``collate_fn``, and of what these hold: numbers, short
texts, None. What has a ``set_epoch`` is left out: `ToldEpochs` looks at its number.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from penstock._errors import Once, suppress_own
from penstock._fetch.epoch_attribute import is_told
from penstock._fetch.held import held
from penstock._fetch.told_parts import is_data
from penstock._nodes.parallel_mapper import ParallelMapper
from penstock._nodes.reader_node import ReaderNode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock._nodes.node import Node

log = logging.getLogger("penstock")

_ITEMS: Final = 64
"""Items of a container that are compared."""
_LONG: Final = 1024
"""Characters of the longest text that is compared."""
_PLAIN_STATE: Final = getattr(object, "__getstate__", None)
_PLAIN: Final = (bool, int, float, type(None), np.generic)


@final
class LoopChanges:
    """The plain attributes of the user's objects, compared when an epoch begins.

    Args:
        mapper: With the workers.
        own: The objects that are read in this process, by the first words of their paths.
        given: Those of which workers have copies.
    """

    def __init__(self, mapper: ParallelMapper[Any], own: dict[str, Any], given: dict[str, Any]) -> None:
        self._mapper, self._own, self._given = mapper, own, given
        self._known: dict[str, Any] | None = None  # what the workers were given; None: nothing yet
        self._seen: dict[str, Any] = {}  # in this process, when the last epoch began; of an iterable, when it ended
        self._loading: set[str] = set()  # paths that change while only loading runs, such as a counter
        self._begins = False  # no item was delivered since
        self._last: str | None = None  # the path that the loop had changed before the last epoch
        self._forward = "iterable" in own
        self._once = Once()

    @classmethod
    def of(cls, nodes: Sequence[Node[Any]]) -> LoopChanges | None:
        """Those of a graph; None if nothing is loaded before the loop asks for it."""
        mapper = next((node for node in nodes if isinstance(node, ParallelMapper)), None)
        if mapper is None:
            return None
        iterable, roots = getattr(nodes[-1], "iterable", None), mapper.executor.roots
        reads_ahead = mapper.num_workers or any(isinstance(node, ReaderNode) and node.ahead for node in nodes)
        if mapper.executor.copies:  # worker processes, or lanes
            return cls(mapper, {} if iterable is None else {"iterable": iterable}, roots)
        own = roots if iterable is None else {**roots, "iterable": iterable}
        return cls(mapper, own, {}) if reads_ahead else None

    def renewed(self) -> None:
        """The workers get the objects anew, at the next reset."""
        self._known = None

    def was_reset(self) -> None:
        """The graph was reset, and workers without a copy have got one."""
        if self._known is None and self._given:
            self._known = plain_values(self._given)

    def delivered(self) -> None:
        """An item was delivered. What has changed since an epoch began, while the loop waited, is loading's doing."""
        if self._begins:
            self._begins = False
            now = plain_values(self._own)
            self._loading.update((*_differing(self._seen, now), *(now.keys() - self._seen.keys())))

    def ended(self) -> None:
        """An epoch is over. Of an iterable only what changes between two epochs counts: what it changes itself while it
        is read, such as a count of its passes, could not be told from what the loop changes.
        """
        if self._forward:
            self._seen = plain_values(self._own)

    def hold(self, epoch: int, *, acts: bool) -> bool:
        """``epoch`` begins. Whether what was loaded ahead still holds; otherwise the workers get the objects anew.

        Args:
            epoch: From 0.
            acts: False only says what has changed.
        """
        now = plain_values(self._own) if self._own else {}
        changed = [path for path in _differing(self._seen, now) if path not in self._loading] if self._seen else []
        given = _differing(self._known, plain_values(self._given)) if self._known is not None else []
        self._seen, self._begins = now, bool(self._own)
        path = next(iter((*given, *changed)), None)
        if path is None or not acts:
            if path is not None and self._once("infinite"):
                log.warning(
                    "%s has changed, but with infinite=True the workers keep what they have. Call loader.refresh() "
                    "after such a change.",
                    path,
                )
            self._last = None
            return True
        if given and not self._can_be_given(path):
            return True
        if self._once("changed"):
            log.warning(
                "%s was changed before epoch %d began, so what was loaded ahead is dropped%s, as with a DataLoader.",
                *(path, epoch, ", and the workers get the dataset anew" * bool(given)),
            )
        if path == self._last and self._mapper.passes_ends:
            self._mapper.passes_ends = False
            log.warning(
                "%s was changed before two epochs in a row, so from now on nothing of an epoch is loaded before you "
                "ask for it, and each epoch begins with a wait. To load ahead, let the dataset take the epoch from "
                "penstock.sample().epoch or from its set_epoch(epoch).",
                path,
            )
        self._last = path
        if given:
            self._mapper.executor.refresh()
            self._known = None
        return False

    def _can_be_given(self, path: str) -> bool:
        why = self._mapper.executor.why_not_sent()
        if why is not None and self._once("not sent"):
            log.warning(
                "%s was changed, but the dataset can no longer be sent to worker processes (%s: %s), so they keep what "
                "they have.",
                *(path, type(why).__name__, why),
            )
        return why is None


def plain_values(roots: dict[str, Any]) -> dict[str, Any]:
    """The plain values that ``roots`` hold, by their paths."""
    found: dict[str, Any] = {}
    for one in held(roots, enters=_enters):
        if _enters(one.value) and not type(one.value).__module__.startswith("penstock."):
            with suppress_own():  # another thread changes it
                found.update((one.path + name, value) for name, value in _plain_in(one.value))
    return found


def _enters(value: Any) -> bool:
    return is_data(value) and not is_told(value)


def _plain_in(value: Any) -> Iterator[tuple[str, Any]]:
    yield from _items_in("", value)
    attributes = getattr(value, "__dict__", {})
    if attributes and getattr(type(value), "__getstate__", None) is not _PLAIN_STATE:
        with suppress_own():
            attributes = {name: attributes[name] for name in value.__getstate__() if name in attributes}
    for name, item in list(attributes.items()):
        if _is_plain(item):
            yield f".{name}", item
        else:
            yield from _items_in(f".{name}", item)


def _items_in(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Also of a container that holds nothing else, which a walk leaves out."""
    if isinstance(value, list | tuple | dict):
        for key, item in list(islice(value.items() if isinstance(value, dict) else enumerate(value), _ITEMS)):
            if _is_plain(item):
                yield f"{path}[{key!r}]", item


def _is_plain(item: Any) -> bool:
    return isinstance(item, _PLAIN) or (isinstance(item, str) and len(item) <= _LONG)


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [path for path, value in now.items() if path in before and not _same(value, before[path])]


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other or (value != value and other != other))
