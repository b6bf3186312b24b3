"""The items in flight between a source and the consumer: the order of delivery, and the state that goes with it.

Pure: it starts nothing, waits for nothing, and reads only whether a job is done. An entry goes through three steps::

    push ──► waits for its job ──► deliver ──► settle, which drops it and moves the state past it

`settle` drops entries from the front only. An entry delivered out of order stays until every older entry is delivered.
Until then the state lists it by its distance from the oldest entry.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn, final

from penstock._nodes.node import is_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@final
class Entry:
    """One item of the source, and the source's ``state`` after it.

    Args:
        value: A marker or the source's error, which need no worker.
        address: See `Node.address`.
        job: The job of a worker. If both are None, the item was delivered before the state was saved.
    """

    __slots__ = ("address", "delivered", "job", "state", "value")

    def __init__(self, value: Any, job: Any, state: Any, address: Any = None) -> None:
        self.address = address
        self.value = value
        self.job = job
        self.state = state
        self.delivered = value is None and job is None

    def raise_value(self) -> NoReturn:
        """Raise the error and drop it.

        Its traceback refers to every frame on its way, and so to the graph that holds this entry.
        """
        error = self.value
        try:
            raise error
        finally:
            del error


@final
class DeliveryWindow:
    """Entries in the order of the source; decides which one is delivered next.

    Args:
        in_order: Deliver only the oldest entry. If False, deliver whichever is done first, but never pass a marker or
            an error.

    Attributes:
        base: The source's state before the oldest undelivered entry.
        ahead: The later entries that are already delivered, as distances from the oldest; always empty in order.
        under_way: Number of jobs not yet delivered.
        comes_delivered: Whether the next item was delivered before the state was saved, so that it needs no job.
        unsettled: An entry has failed since the last `settle`.
    """

    def __init__(self, in_order: bool) -> None:
        self.in_order = in_order
        self.restart({})

    def restart(self, base: Any, delivered: Iterable[int] = ()) -> None:
        """Start over at the source's state ``base``.

        The items at the distances ``delivered`` from there have been delivered already.
        """
        self._entries: deque[Entry] = deque()
        self._pulled = 0  # entries pushed so far
        self._skip = frozenset(delivered)  # which of them were delivered before the state was saved
        self._exhausted = False
        self.under_way = 0
        self.comes_delivered = 0 in self._skip
        self.unsettled = False
        self.base = base
        self._count_ahead()

    @property
    def is_clear(self) -> bool:
        """Whether the next item may be delivered without an entry.

        The caller then sets ``base`` to the state after it.
        """
        return not (self._entries or self._skip or self._exhausted or self.unsettled)

    @property
    def place(self) -> Any:
        """The source's state after the newest entry, where the next item comes from."""
        return self._entries[-1].state if self._entries else self.base

    def has_room(self, most: int, may_pass: Callable[[], bool]) -> bool:
        """Whether one more item may be pulled.

        Args:
            most: Bound on the jobs under way. Out of order, four times as many entries may wait for an older one.
            may_pass: Says whether items of the next epoch may be pulled before the marker of this one is delivered.
        """
        if self._exhausted or self.under_way >= most or len(self._entries) >= 4 * most + 4:
            return False
        if not self._entries:
            return True
        last = self._entries[-1]
        if self.holds_error:
            return False  # the source can continue only after the consumer has seen this error
        if not is_marker(last.value):
            return True
        empty_epoch = len(self._entries) > 1 and is_marker(
            self._entries[-2].value
        )  # stop here, because a source without items would be pulled forever
        return not empty_epoch and may_pass()

    @property
    def holds_error(self) -> bool:
        """Whether the source has raised an error that the consumer has not seen yet."""
        return bool(self._entries) and isinstance(self._entries[-1].value, BaseException)

    def push(self, entry: Entry) -> None:
        """Add the item that was just pulled."""
        self._entries.append(entry)
        if entry.job is not None:
            self.under_way += 1
        self._pulled += 1
        if self._skip:
            self.comes_delivered = self._pulled in self._skip
        if self._entries[0].delivered:
            self.settle()  # otherwise items delivered by a run with a wider window could fill this window

    def exhaust(self) -> None:
        """Note that the source has ended."""
        self._exhausted = True

    def candidates(self) -> list[Entry]:
        """The entries that may be delivered next: the first that is ready will be.

        Empty if the source has ended and all is delivered.
        """
        entries = self._entries
        if self.in_order or not entries:
            # never a delivered one: those are dropped as soon as they are the oldest
            return [entries[0]] if entries else []
        found: list[Entry] = []
        for entry in entries:
            if entry.delivered:
                continue
            if entry.job is None:
                return found or [entry]
            found.append(entry)
        return found

    def ready(self) -> int:
        """Jobs that are done and not delivered. Thread-safe."""
        return sum(entry.job is not None and not entry.delivered and entry.job.done for entry in list(self._entries))

    def deliver(self, entry: Entry) -> None:
        """Record that ``entry`` is delivered, and move the state past it."""
        entry.delivered = True
        if entry.job is not None:
            self.under_way -= 1
        self.settle()

    def fail(self, entry: Entry) -> None:
        """Record that ``entry`` has raised.

        The state moves past it at the next `settle`; until then, a state loaded again retries the item.
        """
        entry.delivered = self.unsettled = True
        # last: if Ctrl-C comes first, the error is raised again. The error refers to the graph, so it must not be kept
        entry.value = None
        if entry.job is not None:
            self.under_way -= 1
            entry.job.forget()

    def settle(self) -> None:
        """Drop delivered entries from the front, and update the state."""
        entries = self._entries
        while entries and entries[0].delivered:
            self.base = entries.popleft().state
        if self._skip or not self.in_order:
            self._count_ahead()
        self.unsettled = False

    def _count_ahead(self) -> None:
        oldest = self._pulled - len(self._entries)
        self.ahead: list[int] = [place for place, entry in enumerate(self._entries) if entry.delivered]
        self.ahead += [place - oldest for place in sorted(self._skip) if place >= self._pulled]
