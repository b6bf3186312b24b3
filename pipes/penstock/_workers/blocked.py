"""Blocked: sees what changes while all threads between a training loop and its workers wait, so that only the workers
run.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

T = TypeVar("T")


class Blocked:
    """Each thread that waits for the workers, or for one that does, has a place: the one that reads the mapper has the
    first, and if that is a reader thread, the loop's own and those of other reader threads have more.

    The last one that begins to wait looks, and the first one that ends looks again.

    Args:
        look: Returns the watched value.

    Attributes:
        look: The same.
        changed: The values before and after all waited, if they differed; the last such pair.
        off: The watch has ended.
    """

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look = look
        self.changed: tuple[Any, Any] | None = None
        self.off = False
        self._lock = threading.RLock()  # a signal handler may read the loader, too
        self._threads = [0]  # in each place, the one that was there last
        self._waits = [False]  # in each place, whether it waits
        self._before: Any = None  # the value when the last one began to

    def place(self) -> Callable[..., Any]:
        """A place for one more thread: `waiting` in it."""
        self._threads.append(0)
        self._waits.append(False)
        return partial(self.waiting, len(self._waits) - 1)

    def waiting(self, number: int, wait: Callable[..., T], *arguments: Any) -> T:
        """Return ``wait(*arguments)``, in which the thread waits, or does the workers' work."""
        if self.off:
            return wait(*arguments)
        try:
            with self._lock:
                self._threads[number], self._waits[number] = threading.get_ident(), True
                if all(self._waits):
                    self._before = self.look()
            return wait(*arguments)
        finally:
            # Look while this thread still counts as waiting, because its own draws, from the next line of the loop on,
            # are not a worker's.
            with self._lock:
                if all(self._waits) and (after := self.look()) != self._before:
                    self.changed = self._before, after
                self._waits[number] = False

    def others(self, workers: Collection[int]) -> list[str]:
        """The names of the program's threads except these and ``workers``."""
        known = {*workers, *self._threads}
        return [thread.name for thread in threading.enumerate() if thread.ident not in known]
