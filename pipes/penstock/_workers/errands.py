"""Runs work ahead of time, in threads that live only as long as there is work."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING, final

from penstock._workers.lifetime import Closing, join, start

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_JOIN_S = 2.0


@final
class Errands:
    """Runs errands, the most urgent first. Any number of threads may call it. A fork has none.

    Args:
        do: Runs the errand with a number; also gets a function that says whether the errand is no longer wanted. Its
            errors are dropped, because whatever needs the result later will raise them again.
        name: Of the threads.
        most: How many errands run at the same time.
    """

    def __init__(self, do: Callable[[int, Callable[[], bool]], None], name: str, most: int) -> None:
        self._do = do
        self._name = name
        self._most = most
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._starting = threading.RLock()
        self._wanted: dict[int, float] = {}
        self._threads: list[threading.Thread] = []  # running, or about to be started
        self._stopped = Closing()

    def want(self, errands: Mapping[int, float], done: int) -> None:
        """Add errands.

        Args:
            errands: Their numbers, each with its priority; the lowest runs first.
            done: An errand that is no longer needed.
        """
        if self._pid != os.getpid():  # a fork has none of the threads, and may have inherited the lock locked
            self._start()
        with self._lock:
            self._wanted.pop(done, None)
            self._wanted |= errands
            if self._stopped.is_set():
                self._stopped = Closing()
            # A thread takes itself off the list in the moment in which it finds nothing to do, under the same lock. So
            # each listed thread will look once more, and none is missing.
            new = min(len(self._wanted), self._most) - len(self._threads)
            run = functools.partial(self._run, self._stopped)
            self._threads += [threading.Thread(target=run, name=self._name, daemon=True) for _ in range(new)]
            threads = [*self._threads]
        start(threads, self._starting)

    def close(self) -> None:
        """Drop all errands, and wait briefly for those in progress. Idempotent; `want` restarts."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._wanted, threads = {}, [*self._threads]
            self._stopped.set()
        # One that another thread is about to start finds itself stopped.
        join([thread for thread in threads if thread.ident is not None], _JOIN_S)

    def _run(self, stopped: Closing) -> None:
        while True:
            with self._lock:
                if stopped.is_set() or not self._wanted:
                    self._threads.remove(threading.current_thread())
                    return
                errand = min(self._wanted, key=self._wanted.__getitem__)
                del self._wanted[errand]
            with contextlib.suppress(Exception):
                self._do(errand, stopped.is_set)
