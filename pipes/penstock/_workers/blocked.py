"""Detects when all threads between a training loop and its workers are waiting, so that only the workers run.

Each of these threads has a `Place`: the one that reads the mapper and, if that is a reader thread, the loop's own and those of other reader
threads. They enter and leave without a lock: each entry and each exit begins a new turn before the thread continues. So if all are in their
places, and the turn is the same later, none has left in between.
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
    """The places of these threads. While the training loop waits in its place, a value is watched.

    Args:
        look: Returns the watched value.

    Attributes:
        changed: The values when the loop began and stopped waiting, if they differed; the last such pair.
        off: The watch has ended.
        direct: The loop itself waits for the workers, without a reader thread in between.
    """

    def __init__(self, look: Callable[[], Any]) -> None:
        self.changed: tuple[Any, Any] | None = None
        self.off = False
        self.direct = True
        self.look = look
        self.waits: list[bool] = []
        self.who: list[int] = []  # the thread that was last in each place
        self.turns = count(1)
        self.turn = 0
        self.loop = 0  # its place

    def place(self) -> Place:
        """A place for one more thread: first the one that reads the mapper, then the loop's, if different, then those in between."""
        number = len(self.waits)
        self.loop, self.direct = min(1, number), not number
        self.who.append(0)
        self.waits.append(False)
        return Place(self, number)

    def stamp(self) -> int | None:
        """A number if all wait, None otherwise. If the number is the same later, all have waited without a break."""
        # Read before the places: if a thread leaves and comes back in between, this number is outdated, and no later
        # stamp equals it.
        turn = self.turn
        return turn if all(self.waits) else None

    def alone(self, workers: Collection[int]) -> bool:
        """Whether the program has no threads except these and ``workers``, not counting penstock's reader threads."""
        known = {*workers, *self.who, get_ident()}
        return all(
            thread.ident in known or (thread.name.startswith("penstock-") and not thread.name.startswith("penstock-map"))
            for thread in threading.enumerate()
        )


@final
class Place:
    """Where one thread waits."""

    def __init__(self, blocked: Blocked, number: int) -> None:
        self._blocked = blocked
        self._number = number

    def waiting(self, wait: Callable[..., T], *arguments: Any) -> T:
        """Return ``wait(*arguments)``, in which the thread waits, or does the workers' work. Inlined for speed, because every wait passes here."""
        blocked, number = self._blocked, self._number
        if blocked.off:
            return wait(*arguments)
        before = None
        try:
            blocked.who[number] = get_ident()
            blocked.waits[number] = True
            blocked.turn = next(blocked.turns)
            if number == blocked.loop:
                before = blocked.look()
            return wait(*arguments)
        finally:
            # Look while this thread still counts as waiting, because its own draws, from the next line of the loop on,
            # are not a worker's.
            if before is not None and (after := blocked.look()) != before and not blocked.off:
                blocked.changed = before, after
            blocked.turn = next(blocked.turns)
            blocked.waits[number] = False
