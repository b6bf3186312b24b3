"""What can be done beforehand, in threads of its own that live only as long as there is something to do."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING, final

from penstock._workers.lifetime import join, start

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_JOIN_S = 2.0


@final
class Errands:
    """Does errands, the most urgent first. Any number of threads may call it. A fork has none.

    Args:
        do: Does the errand of a number; gets a function that says whether it is no longer wanted. Its errors are dropped: whoever needs the result will see for himself.
        name: Of the threads.
        most: How many are done at the same time.
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
        self._threads: list[threading.Thread] = []  # those that run, and those that are to be started
        self._stopped = threading.Event()

    def want(self, errands: Mapping[int, float], done: int) -> None:
        """Have more done.

        Args:
            errands: Their numbers, and how urgent each is: the least first.
            done: One that need not be done any more.
        """
        if self._pid != os.getpid():
            self._start()
        with self._lock:
            self._wanted.pop(done, None)
            self._wanted |= errands
            if self._stopped.is_set():
                self._stopped = threading.Event()
            new = min(len(self._wanted), self._most) - len(self._threads)
            run = functools.partial(self._run, self._stopped)
            self._threads += [threading.Thread(target=run, name=self._name, daemon=True) for _ in range(new)]
            threads = [*self._threads]
        start(threads, self._starting)

    def close(self) -> None:
        """Do nothing more, and wait for a moment for what is being done. Idempotent; `want` begins again."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._wanted, threads = {}, [*self._threads]
            self._stopped.set()
        join([thread for thread in threads if thread.ident is not None], _JOIN_S)

    def _run(self, stopped: threading.Event) -> None:
        while (errand := self._next(stopped)) is not None:
            with contextlib.suppress(Exception):
                self._do(errand, stopped.is_set)

    def _next(self, stopped: threading.Event) -> int | None:
        with self._lock:
            if stopped.is_set() or not self._wanted:
                self._threads.remove(threading.current_thread())
                return None
            errand = min(self._wanted, key=self._wanted.__getitem__)
            del self._wanted[errand]
        return errand
