"""Sees what happens while all threads between a training loop and its workers wait: only the workers can have done it.

Each of these threads has a `Place`: the one that reads the mapper, and, if that is a reader thread, those downstream of it up to the loop's own. They enter and leave
in any order, without a lock:

- Whoever finds all places taken takes a look, and keeps it with the turn that began when it entered. Each entry and each leave begins another turn.
- Whoever leaves looks again *first*. Then, if the turn is still the one of the kept look, nobody has left in between, and so nobody but the workers ran.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

T = TypeVar("T")


@final
class Blocked:
    """Compares two looks, taken when the last of all threads has begun to wait and before the first of them stops.

    Args:
        look: Returns what is compared.
        changed: Called with both looks, if they differ, by the thread that stops to wait.

    Attributes:
        off: Nothing is compared any more.
    """

    def __init__(self, look: Callable[[], Any], changed: Callable[[Any, Any], None]) -> None:
        self.off = False
        self._look = look
        self._changed = changed
        self._waits: list[bool] = []
        self._who: list[int] = []  # the thread that was in a place last
        self._turns = count(1)
        self._turn = 0
        self._before: tuple[int, Any] = (0, None)

    def place(self) -> Place:
        """A place for one more thread."""
        self._waits.append(False)
        self._who.append(0)
        return Place(self, len(self._waits) - 1)

    def stamp(self) -> int | None:
        """A number if all wait: they have waited without a break, if it is the same later. None if one does not."""
        turn = self._turn
        return turn if all(self._waits) else None

    def alone(self, workers: Collection[int]) -> bool:
        """Whether the program has no other threads than these and ``workers``; those of penstock that only read, and draw nothing, do not count."""
        known = {*workers, *self._who, threading.get_ident()}
        return all(
            thread.ident in known or (thread.name.startswith("penstock-") and not thread.name.startswith("penstock-map"))
            for thread in threading.enumerate()
        )

    def enter(self, number: int) -> None:
        """The calling thread begins to wait in its place."""
        if self.off:
            return
        self._who[number] = threading.get_ident()
        self._waits[number] = True
        turn = self._turn = next(self._turns)
        if all(self._waits):
            self._before = turn, self._look()

    def leave(self, number: int) -> None:
        """It stops to wait. Idempotent."""
        if self._waits[number]:
            after = self._look()
            turn, before = self._before
            if turn == self._turn and after != before and all(self._waits):
                self._changed(before, after)
            self._turn = next(self._turns)
            self._waits[number] = False


@final
class Place:
    """Where one thread waits."""

    def __init__(self, blocked: Blocked, number: int) -> None:
        self._blocked = blocked
        self._number = number

    def waiting(self, wait: Callable[..., T], *arguments: Any) -> T:
        """Return ``wait(*arguments)``, in which the thread waits, or does what counts as the workers' work."""
        try:
            self._blocked.enter(self._number)
            return wait(*arguments)
        finally:
            self._blocked.leave(self._number)
