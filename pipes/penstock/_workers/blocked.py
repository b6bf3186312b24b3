"""Knows when all threads between a training loop and its workers wait, so that only the workers run.

Each of these threads has a `Place`: the one that reads the mapper, and, if that is a reader thread, the loop's own and those of other reader threads. They enter and leave
without a lock: each entry and each leave begins another turn, before the thread goes on. So if all are in their places, and later the turn is still the same, none has left.
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
    """The places of these threads. While the training loop is in its own, something is watched.

    Args:
        look: Returns what is watched.

    Attributes:
        changed: What was seen when the loop began to wait, and when it stopped, if they differed; the last such pair.
        off: Nothing is watched any more.
        direct: The loop itself waits for the workers: there is no reader thread in between.
    """

    def __init__(self, look: Callable[[], Any]) -> None:
        self.changed: tuple[Any, Any] | None = None
        self.off = False
        self.direct = True
        self._look = look
        self._waits: list[bool] = []
        self._who: list[int] = []  # the thread that was in a place last
        self._turns = count(1)
        self._turn = 0
        self._loop = 0  # its place
        self._before: Any = None

    def place(self) -> Place:
        """A place for one more thread: first the one that reads the mapper, then the loop's own, if it is another, then those between them."""
        number = len(self._waits)
        self._loop, self.direct = min(1, number), not number
        self._who.append(0)
        self._waits.append(False)
        return Place(self, number)

    def stamp(self) -> int | None:
        """A number if all wait: if it is the same later, they have waited without a break. None if one does not."""
        turn = self._turn
        return turn if all(self._waits) else None

    def alone(self, workers: Collection[int]) -> bool:
        """Whether the program has no other threads than these and ``workers``; those of penstock that only read do not count."""
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
        self._turn = next(self._turns)
        if number == self._loop:
            self._before = self._look()

    def leave(self, number: int) -> None:
        """It stops to wait. Idempotent."""
        if self._waits[number]:
            if number == self._loop and (after := self._look()) != self._before and not self.off:
                self.changed = self._before, after
            self._turn = next(self._turns)
            self._waits[number] = False


@final
class Place:
    """Where one thread waits."""

    def __init__(self, blocked: Blocked, number: int) -> None:
        self._blocked = blocked
        self._number = number

    def waiting(self, wait: Callable[..., T], *arguments: Any) -> T:
        """Return ``wait(*arguments)``, in which the thread waits, or does work of the workers."""
        try:
            self._blocked.enter(self._number)
            return wait(*arguments)
        finally:
            self._blocked.leave(self._number)
