"""A bell by which one thread wakes another. No ring is lost, even if a signal handler raises in the middle.

``threading.Condition`` is written in Python. If a handler raises inside it, its lock stays held, or is released twice,
or a notification is lost, and some thread waits forever. A plain lock is acquired and released by single C calls, and
so is a ``with`` on it.
"""

from __future__ import annotations

import threading
from typing import final


@final
class Bell:
    """Wakes one thread. If no thread is waiting, the bell remembers one ring, and only one.

    The waiting thread checks its condition first, and again after each ring; the other thread changes the condition,
    then rings. So an extra ring does no harm. A missing ring does: if an interrupt can come between the change and the
    ring, the waiting side must ask again.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the waiting thread, or let the next `wait` return at once.

        May be called from any thread and from a signal handler.
        """
        try:  # noqa: SIM105  # several times faster
            self._lock.release()
        except RuntimeError:  # already rung
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a ring, at most ``timeout`` seconds (None: forever). Return whether it rang."""
        return self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
