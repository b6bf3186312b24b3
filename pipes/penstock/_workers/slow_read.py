"""SlowRead: says so if a thread waits long for a source, which itself cannot say it."""

from __future__ import annotations

import logging
import threading
from typing import Final, final

from penstock._workers.bell import Bell
from penstock._workers.lifetime import join, patience_s, start, when_abandoned
from penstock._workers.meter import now

AFTER_S: Final = 10.0
"""Seconds after which a read is said to be slow; at most twice as many."""

_logger = logging.getLogger("penstock")


@final
class SlowRead:
    """Watches the reads of one thread, until `end`. Logs ``text`` once, as a warning.

    Attributes:
        reads: When the read began that is under way, by `now`; empty: none is.
    """

    def __init__(self, text: str) -> None:
        self.reads: list[int] = []
        self._ended = Bell()
        when_abandoned(self, self._ended.ring)
        watch = (self.reads, self._ended, text)
        self._thread = threading.Thread(target=_watch, args=watch, name="penstock-slow-read", daemon=True)
        start([self._thread], threading.RLock())

    def end(self) -> None:
        """End the watch. Idempotent."""
        self._ended.ring()
        join([self._thread], patience_s(None))


def _watch(reads: list[int], ended: Bell, text: str) -> None:
    while not ended.wait(AFTER_S):
        if any(now() - began > AFTER_S * 1e9 for began in list(reads)):
            _logger.warning(text)
            return
