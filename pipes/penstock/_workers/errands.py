"""What can be done beforehand, in a thread of its own that lives only as long as there is something to do."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, final

from penstock._workers.lifetime import join, start

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_JOIN_S = 2.0


@final
class Errands:
    """Does errands one after another, the most urgent first. Any number of threads may call it. A fork has none.

    Args:
        do: Does the errand of a number; gets a function that says whether it is still wanted. Its errors are dropped: whoever needs the result will see for himself.
        name: Of the thread.
    """

    def __init__(self, do: Callable[[int, Callable[[], bool]], None], name: str) -> None:
        self._do = do
        self._name = name
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._starting = threading.RLock()
        self._wanted: dict[int, float] = {}
        self._thread: threading.Thread | None = None
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
            if self._wanted and self._thread is None:
                self._stopped = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stopped,), name=self._name, daemon=True)
            thread = self._thread
        if thread is not None and thread.ident is None:
            start([thread], self._starting)

    def close(self) -> None:
        """Do nothing more, and wait for a moment for what is being done. Idempotent; `want` begins again."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._wanted, thread = {}, self._thread
            self._stopped.set()
        if thread is not None and thread.ident is not None:
            join([thread], _JOIN_S)

    def _run(self, stopped: threading.Event) -> None:
        while (errand := self._next(stopped)) is not None:
            with contextlib.suppress(Exception):
                self._do(errand, stopped.is_set)

    def _next(self, stopped: threading.Event) -> int | None:
        with self._lock:
            if stopped.is_set() or not self._wanted:
                self._thread = None
                return None
            errand = min(self._wanted, key=self._wanted.__getitem__)
            del self._wanted[errand]
        return errand
