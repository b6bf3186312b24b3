"""Epochs planned ahead, so that a slow sampler makes no gap: the thread and the process that make plans.

Where a sampler may run is decided by whose random numbers it draws. One that owns its generator runs in a thread of this
process. One that may draw from the global generators must not run beside the user's threads, which draw from them too: it
runs in a helper process.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from penstock._errors import ClosedError
from penstock._workers.bell import Bell
from penstock._workers.lifetime import join, patience_s, start

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


P = TypeVar("P")


class _Desk(Generic[P]):
    """What the thread and the planner share. The thread must not hold the planner, or an abandoned one would never end."""

    def __init__(self, make: Callable[[Any], P]) -> None:
        self.make = make
        self.lock = threading.RLock()  # re-entrant: a signal's handler may close the loader while its thread holds it
        self.ordered = Bell()  # to the thread
        self.made = Bell()  # to the consumer
        # All below is read and written under `lock` only. One order at a time: a newer one takes the place of the older,
        # which is still carried out, because a sampler cannot be stopped, but then thrown away.
        self.key: Hashable = None
        self.task: Any = None
        self.answer: tuple[P | None, BaseException | None] | None = None
        self.interrupted = False
        self.stopped = False

    def run(self) -> None:
        while True:
            with self.lock:
                if self.stopped:
                    del self.make  # and with it a helper's open files, although the planner may be kept
                    return
                key, task, idle = self.key, self.task, self.key is None or self.answer is not None
            if idle:
                del key, task
                self.ordered.wait()
                continue
            answer: tuple[P | None, BaseException | None]
            try:
                answer = self.make(task), None
            except BaseException as exc:
                answer = None, exc
            with self.lock:
                if self.key == key and self.task is task and not self.stopped:
                    self.answer = answer
            del answer
            self.made.ring()

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            self.answer = None
        self.ordered.ring()
        self.made.ring()


@final
class AheadThread(Generic[P]):
    """Make one plan ahead of the consumer, in one background thread that lives as long as the planner.

    Args:
        make: Makes a plan; called from the background thread only.
        end: Called when the planner ends, and before its thread is waited for: it makes a ``make`` that waits return.
    """

    def __init__(self, make: Callable[[Any], P], end: Callable[[], None] | None = None) -> None:
        self._desk = _Desk(make)
        self._thread = threading.Thread(target=self._desk.run, name="penstock-plan", daemon=True)
        self._finalizer = weakref.finalize(self, _end, self._desk, end, os.getpid())
        start([self._thread], self._desk.lock)

    def order(self, key: Hashable, task: Any) -> None:
        """Have ``task`` made, known as ``key`` (such as an epoch); nothing happens where it is in the making, or made, already."""
        with self._desk.lock:
            if self._desk.stopped:
                raise ClosedError("the planner has ended; build a new loader.")
            if self._desk.key != key:
                self._desk.key, self._desk.task, self._desk.answer = key, task, None
        self._desk.ordered.ring()  # also for a ring that an interrupt has kept from the thread before

    def get(self, key: Hashable, task: Any) -> P:
        """The plan ``key``, ordered as ``task`` if it was not yet; waits for it, and raises what came of it.

        Raises:
            ClosedError: `interrupt` or `shutdown` was called meanwhile.
        """
        desk = self._desk
        self.order(key, task)
        while True:
            with desk.lock:
                if desk.answer is not None:
                    plan, error = desk.answer
                    desk.key = desk.task = desk.answer = None
                    break
                if desk.interrupted or desk.stopped:
                    desk.interrupted = False
                    raise ClosedError("the wait for the next epoch's plan was interrupted.")
            desk.made.wait()
        if error is None:
            return plan  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # which knows this frame: neither should keep the other

    def resume(self) -> None:
        """Forget an `interrupt` that came while nobody waited."""
        with self._desk.lock:
            self._desk.interrupted = False

    def interrupt(self) -> None:
        """Wake whoever waits in `get` with `ClosedError`, or the next who would; until `resume`; from any thread."""
        with self._desk.lock:
            self._desk.interrupted = True
        self._desk.made.ring()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread; again, does nothing. See `Pool.shutdown` and `join`."""
        if not self._desk.stopped:
            self._finalizer()
            join([self._thread], patience_s(timeout))


def _end(desk: _Desk[Any], end: Callable[[], None] | None, pid: int) -> None:
    if os.getpid() == pid:  # In a user's forked child there is no thread, and the helper process is another's.
        desk.stop()
        if end is not None:
            end()
