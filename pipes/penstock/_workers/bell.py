"""How one thread wakes another, so that nothing is lost if a signal's handler raises in the middle of it.

``threading.Condition`` is written in Python. An exception that a handler raises inside one leaves its lock held, or released twice, or swallows a
notification, and then somebody waits forever. A plain lock is taken and released by single calls in C, and so are the ``with`` statements over it.
"""

from __future__ import annotations

import threading
from typing import final


@final
class Bell:
    """Wakes one thread. A ring that nobody waits for is kept, but only one of them.

    Whoever waits looks first whether what he waits for has happened, and again after each ring; whoever makes it happen rings afterwards. Then a
    ring too many does no harm. One too few does: where an interrupt may come between the event and the ring, the other side has to ask again.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or the next one that would; from any thread, and from a signal's handler."""
        try:  # noqa: SIM105  # several times faster
            self._lock.release()
        except RuntimeError:  # it has been rung already
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a ring, at most ``timeout`` seconds (None: forever); whether there was one."""
        return self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
