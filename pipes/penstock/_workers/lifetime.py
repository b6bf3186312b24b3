"""How threads begin; how long their end may take, and what is said of one that does not end."""

from __future__ import annotations

import _thread
import contextlib
import logging
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

from penstock._workers.bell import Bell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@final
class OneThread:
    """A context that one thread at a time may be in; another one is refused, and nobody waits.

    Who is inside is one entry of a dict, set and read by one ``dict.setdefault``, which is atomic. It is the thread that is noted, so an
    interrupt at a bad moment locks nobody out of a thing that only one thread uses.
    """

    __slots__ = ("_inside",)

    def __init__(self) -> None:
        self._inside: dict[None, int] = {}

    def __enter__(self) -> None:
        if self._inside.setdefault(None, threading.get_ident()) != threading.get_ident():
            raise RuntimeError(
                "two threads read from this loader at once, so each would get batches that the other misses. Let one thread read and hand the batches "
                "on (queue.Queue), or hold a lock of yours around next()."
            )

    def __exit__(self, *exc: object) -> None:
        self._inside.clear()


PATIENCE_S = 2.0
"""How long a shutdown may take, unless `closing_within` says otherwise."""

_deadline: ContextVar[float | None] = ContextVar("penstock_deadline", default=None)


@contextlib.contextmanager
def closing_within(timeout: float) -> Iterator[None]:
    """Let all `Pool.shutdown` in the body together take ``timeout`` seconds, unless one is told a time of its own; nodes hand no arguments down."""
    token = _deadline.set(time.monotonic() + timeout)
    try:
        yield
    finally:
        _deadline.reset(token)


def patience_s(timeout: float | None) -> float:
    """``timeout``, or what is left of the time of `closing_within`."""
    if timeout is not None:
        return timeout
    deadline = _deadline.get()
    return PATIENCE_S if deadline is None else max(0.0, deadline - time.monotonic())


_logger = logging.getLogger("penstock")


def start(threads: Iterable[threading.Thread], lock: Any) -> None:
    """Start those of ``threads`` that were not started yet, and return when they run.

    ``Thread.start`` waits in Python code, where an exception of a signal's handler leaves a thread half started. So it is called in another thread,
    where no handler runs, and the wait for that can be interrupted and done again.

    Args:
        threads: Always the same for one ``lock``.
        lock: An ``RLock``, held meanwhile by that other thread.

    Raises:
        RuntimeError: The system has no thread for it.
    """
    done = Bell()
    errors: list[BaseException] = []
    _thread.start_new_thread(_start, (list(threads), lock, errors, done))
    done.wait()
    if errors:
        raise errors[0]


def _start(threads: list[threading.Thread], lock: Any, errors: list[BaseException], done: Bell) -> None:
    try:
        with lock:
            for thread in threads:
                if thread.ident is None:
                    thread.start()
    except BaseException as exc:
        errors.append(exc)
    finally:
        done.ring()


_WAKING_S = 0.1
"""However little time is left, idle threads are given this to end, all together."""


def join(threads: Iterable[threading.Thread], timeout: float) -> None:
    """Wait ``timeout`` seconds for threads that were told to end. One that is at work and does not is named in the log and left behind, as a daemon."""
    deadline = time.monotonic() + max(timeout, _WAKING_S)
    for thread in threads:
        if not thread.is_alive() or thread is threading.current_thread():
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _logger.warning("thread %s is still at work and cannot be stopped; it is left behind, and its result dropped.", thread.name)
