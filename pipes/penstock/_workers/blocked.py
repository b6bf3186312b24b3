"""Detects what changes while all threads between a training loop and its workers are waiting, so that only the workers
run.

Each of these threads has a `Place`: the one that reads the mapper and, if that is a reader thread, the loop's own and
those of other reader threads. They enter and leave without a lock: each entry and each exit begins a new turn before
the thread continues. The last one to enter looks, and the first one to leave looks again. If the turn is the same then,
none has left in between.
"""

from __future__ import annotations

import threading
from itertools import count
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

T = TypeVar("T")


@final
class Blocked:
    """The places of these threads. While all of them wait, a value is watched.

    Args:
        look: Returns the watched value.

    Attributes:
        changed: The values before and after all waited, if they differed; the last such pair.
        off: The watch has ended.
    """

    def __init__(self, look: Callable[[], Any]) -> None:
        self.changed: tuple[Any, Any] | None = None
        self.off = False
        self.look = look
        self.waits: list[bool] = []
        self.who: list[int] = []  # the thread that was last in each place
        self.turns = count(1)
        self.turn = 0
        self.since: tuple[int, Any] = -1, None  # the turn in which the last one entered, and the value then

    def place(self) -> Place:
        """A place for one more thread."""
        self.who.append(0)
        self.waits.append(False)
        return Place(self, len(self.waits) - 1)

    def others(self, workers: Collection[int]) -> list[str]:
        """The names of the program's threads except these and ``workers``."""
        known = {*workers, *self.who}
        return [thread.name for thread in threading.enumerate() if thread.ident not in known]


@final
class Place:
    """Where one thread waits."""

    def __init__(self, blocked: Blocked, number: int) -> None:
        self._blocked = blocked
        self._number = number

    def waiting(self, wait: Callable[..., T], *arguments: Any) -> T:
        """Return ``wait(*arguments)``, in which the thread waits, or does the workers' work.

        Inlined for speed, because every wait passes here.
        """
        blocked, number = self._blocked, self._number
        if blocked.off:
            return wait(*arguments)
        try:
            blocked.who[number] = get_ident()
            blocked.waits[number] = True
            blocked.turn = next(blocked.turns)
            turn = blocked.turn  # perhaps that of a thread that has entered since
            # The turn is read before the places: if a thread leaves in between, this turn is over, and no later look
            # counts.
            if all(blocked.waits):
                blocked.since = turn, blocked.look()
            return wait(*arguments)
        finally:
            # Look while this thread still counts as waiting, because its own draws, from the next line of the loop on,
            # are not a worker's.
            turn, before = blocked.since
            if (
                turn == blocked.turn
                and (after := blocked.look()) != before
                and turn == blocked.turn
                and not blocked.off
            ):
                blocked.changed = before, after
            blocked.turn = next(blocked.turns)
            blocked.waits[number] = False
