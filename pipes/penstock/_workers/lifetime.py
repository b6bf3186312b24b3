"""Start threads, bound the time that a shutdown takes, and report threads that do not end."""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
import weakref
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, final

from penstock._workers.bell import Bell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@final
class _Process:
    """This process. Asking the kernel takes 0.2 us, and once caches are cold more, for every sample or batch.

    A fork in C that does not tell Python so is not seen.
    """

    def __init__(self) -> None:
        self.look()

    def look(self) -> None:
        self.id = os.getpid()


process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=process.look)


@final
class OneThread:
    """A context for one thread at a time. A second thread gets an error; it does not wait.

    A dict entry names the thread inside. A single ``dict.setdefault`` sets and reads it, which is atomic. Because the
    entry names the thread, an interrupt before ``__exit__`` cannot lock out the only thread that uses the loader: it
    may enter again.
    """

    __slots__ = ("_inside",)

    def __init__(self) -> None:
        self._inside: dict[None, int] = {}

    def __enter__(self) -> None:
        if self._inside.setdefault(None, me := threading.get_ident()) != me:
            raise RuntimeError(
                "two threads read from this loader at once, so each would get batches that the other misses. Read in "
                "one thread and pass the batches on (queue.Queue), or hold your own lock around next()."
            )

    def __exit__(self, *exc: object) -> None:
        self._inside.clear()


PATIENCE_S = 2.0
"""Seconds that a shutdown may take, unless `closing_within` sets another bound."""

told_to_end: ContextVar[Callable[[], bool]] = ContextVar("penstock_told_to_end", default=lambda: False)
"""In a worker thread: whether its pool has told it to end. Code that may wait long should check it regularly."""

_LOOK_S = 0.1


@final
class Closing:
    """Interrupts readers waiting to retry: a flag that is also set in the threads of a pool that is told to end.

    Not a ``threading.Event``, which has a lock that an interrupt may leave held; see `bell`.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Their results are no longer wanted."""
        self._set = True

    def clear(self) -> None:
        """They are wanted again."""
        self._set = False

    def is_set(self) -> bool:
        """Whether the thread's result is no longer wanted."""
        # Asked, not told: a pool does not know what its threads wait for.
        return self._set or told_to_end.get()()

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds. Return `is_set`."""
        deadline = time.monotonic() + timeout
        while not self.is_set() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
        return self.is_set()


_deadline: ContextVar[float | None] = ContextVar("penstock_deadline", default=None)


def closing_within(timeout: float, act: Callable[[], None]) -> None:
    """Give all calls of `Pool.shutdown` in ``act`` one shared deadline, ``timeout`` seconds from now.

    A call with its own ``timeout`` keeps that. The deadline is a context variable because ``shutdown`` of a node takes
    no arguments. C code leaves the context, so an interrupt cannot keep the deadline for later calls.
    """
    context = copy_context()
    context.run(_deadline.set, time.monotonic() + timeout)
    context.run(act)


def patience_s(timeout: float | None) -> float:
    """``timeout``, or else the seconds left until the deadline of `closing_within`."""
    if timeout is not None:
        return timeout
    deadline = _deadline.get()
    return PATIENCE_S if deadline is None else max(0.0, deadline - time.monotonic())


@contextmanager
def held_in_time(lock: Any) -> Iterator[bool]:
    """Hold ``lock`` in this context, if it is free in time. Another thread may be stuck with it in the user's code."""
    got = lock.acquire(timeout=patience_s(None))
    try:
        yield got
    finally:
        if got:
            lock.release()


_logger = logging.getLogger("penstock")


def undisturbed(act: Callable[[], None], lock: Any, timeout: float | None = None) -> bool:
    """Call ``act`` in a helper thread, and wait for it. Signal handlers never run there, so ``act`` always completes.

    If a handler raises here, in the wait, and `undisturbed` is called again, the next ``act`` begins when the previous
    one has ended.

    Args:
        act: Must not be left half done.
        lock: Held by the helper thread meanwhile.
        timeout: Seconds after which ``act`` is left to itself.

    Returns:
        Whether ``act`` has ended.

    Raises:
        RuntimeError: The system cannot start another thread. Otherwise any error of ``act``.
    """
    done = Bell()
    errors: list[BaseException] = []
    # A single C call. `Thread.start` would wait in Python code; see `start`. If a handler raises in `done.wait`, the
    # thread goes on, and holds the lock until ``act`` is complete; that is what the next call waits for.
    _thread.start_new_thread(_act, (act, lock, errors, done))
    ended = done.wait(timeout)
    if errors:
        try:
            raise errors.pop()
        finally:
            del errors  # the traceback refers to this frame: break the cycle
    return ended


def _act(act: Callable[[], None], lock: Any, errors: list[BaseException], done: Bell) -> None:
    try:
        with lock:
            act()
    except BaseException as exc:
        errors.append(exc)
    finally:
        done.ring()


def start(threads: Iterable[threading.Thread], lock: Any) -> None:
    """Start those of ``threads`` that have not been started, and return once they run.

    ``Thread.start`` waits in Python code, where a signal handler that raises would leave the thread half started.

    Args:
        threads: The same threads in each call with the same ``lock``.
        lock: An ``RLock``; see `undisturbed`.

    Raises:
        RuntimeError: The system cannot start another thread.
    """

    def act() -> None:
        for thread in threads:
            if thread.ident is None:
                thread.start()

    threads = list(threads)
    undisturbed(act, lock)


_WAKING_S = 0.1
"""Seconds that idle threads always get to end, all together."""


def when_abandoned(owner: object, act: Callable[[], None]) -> weakref.finalize[Any, Any]:
    """Call ``act`` when ``owner`` is collected, or as the program ends.

    A fork has no such threads, and may have inherited their locks locked: it does nothing.
    """
    return weakref.finalize(owner, _abandoned, act, os.getpid())


def _abandoned(act: Callable[[], None], pid: int) -> None:
    if os.getpid() == pid:
        act()


def join(threads: Iterable[threading.Thread], timeout: float) -> None:
    """Wait up to ``timeout`` seconds for threads that were told to end.

    One that is still busy is logged, and abandoned as a daemon.
    """
    # One deadline for all: with a tenth of a second for each, closing many threads took long.
    deadline = time.monotonic() + max(timeout, _WAKING_S)
    for thread in threads:
        # A finalizer runs in any thread, also in one that it ends, or one that Python has forgotten already: for that,
        # current_thread would remember a dummy for good.
        if not thread.is_alive() or thread.ident == threading.get_ident():
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _logger.warning(
                "thread %s is still busy and cannot be stopped; it is abandoned, and its result is dropped.",
                thread.name,
            )
