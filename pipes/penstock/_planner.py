"""Epochs planned ahead, so that a slow sampler makes no gap: the thread and the process that make plans.

Where a sampler may run is decided by whose random numbers it draws. One that owns its generator runs in a thread of this
process. One that may draw from the global generators must not run beside the user's threads, which draw from them too: it
runs in a helper process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import select
import signal
import threading
import traceback
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import torch

from penstock._errors import ClosedError, WorkerDied
from penstock._fork import come_up, until_up
from penstock._pool import patience_s
from penstock._threads import join

if TYPE_CHECKING:
    from collections.abc import Callable

P = TypeVar("P")


class _Desk(Generic[P]):
    """What the thread and the planner share. The thread must not hold the planner, or an abandoned one would never end."""

    def __init__(self, make: Callable[[Any], P]) -> None:
        self.make = make
        self.changed = threading.Condition()
        # All below is read and written under `changed` only. One order at a time: a newer one takes the place of the older,
        # which is still carried out, because a sampler cannot be stopped, but then thrown away.
        self.key: int | None = None
        self.task: Any = None
        self.answer: tuple[P | None, BaseException | None] | None = None
        self.interrupted = False
        self.stopped = False

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.stopped or (self.key is not None and self.answer is None))
                if self.stopped:
                    del self.make  # and with it a helper's open files, although the planner may be kept
                    return
                key, task = self.key, self.task
            answer: tuple[P | None, BaseException | None]
            try:
                answer = self.make(task), None
            except BaseException as exc:
                answer = None, exc
            with self.changed:
                if self.key == key and self.task is task and not self.stopped:
                    self.answer = answer
                self.changed.notify_all()
            del answer

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.answer = None
            self.changed.notify_all()


@final
class Planner(Generic[P]):
    """Make one plan ahead of the consumer, in one background thread that lives as long as the planner.

    Args:
        make: Makes a plan; called from the background thread only.
        end: Called when the planner ends, and before its thread is waited for: it makes a ``make`` that waits return.
    """

    def __init__(self, make: Callable[[Any], P], end: Callable[[], None] | None = None) -> None:
        self._desk = _Desk(make)
        self._thread = threading.Thread(target=self._desk.run, name="penstock-plan", daemon=True)
        self._finalizer = weakref.finalize(self, _end, self._desk, end, os.getpid())
        self._thread.start()

    def order(self, key: int, task: Any) -> None:
        """Have ``task`` made, known as ``key`` (an epoch); nothing happens where it is in the making, or made, already."""
        with self._desk.changed:
            if self._desk.stopped:
                raise ClosedError("the planner has ended; build a new loader.")
            if self._desk.key != key:
                self._desk.key, self._desk.task, self._desk.answer = key, task, None
                self._desk.changed.notify_all()

    def get(self, key: int, task: Any) -> P:
        """The plan ``key``, ordered as ``task`` if it was not yet; waits for it, and raises what came of it.

        Raises:
            ClosedError: `interrupt` or `shutdown` was called meanwhile.
        """
        desk = self._desk
        self.order(key, task)
        with desk.changed:
            desk.changed.wait_for(lambda: desk.answer is not None or desk.interrupted or desk.stopped)
            if desk.answer is None:
                desk.interrupted = False
                raise ClosedError("the wait for the next epoch's plan was interrupted.")
            plan, error = desk.answer
            desk.key = desk.task = desk.answer = None
        if error is not None:
            raise error
        return plan  # type: ignore[return-value]

    def resume(self) -> None:
        """Forget an `interrupt` that came while nobody waited."""
        with self._desk.changed:
            self._desk.interrupted = False

    def interrupt(self) -> None:
        """Wake whoever waits in `get` with `ClosedError`, or the next who would; until `resume`; from any thread."""
        with self._desk.changed:
            self._desk.interrupted = True
            self._desk.changed.notify_all()

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


@final
class Helper:
    """Run ``make`` in a process of its own, named ``penstock-plan``, which dies with this one.

    One thread calls it; any thread may `end` it. The process starts at once, as multiprocessing's default for the platform has
    it: under fork it has the sampler as it is, else it is sent a pickle.

    Raises:
        WorkerDied: From a call: the process is gone. At once: see `until_up`.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context()

        def start(make: Any) -> tuple[int, int]:
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, make, os.getpid()), name="penstock-plan", daemon=True)
            self._process.start()
            theirs.close()
            return self._process.pid or 0, self._pipe.fileno()

        if context.get_start_method() == "fork":
            until_up(lambda: start(make), self._kill)
        else:
            start(pickle.dumps(make))
        # Other processes may hold copies of a pipe's or a sentinel's end; nobody can hold up a pidfd.
        self._death = self._process.sentinel
        with contextlib.suppress(AttributeError, ProcessLookupError):  # not Linux; dead already, and reaped by someone else
            self._death = os.pidfd_open(self._process.pid or 0)
            weakref.finalize(self, os.close, self._death)

    def __call__(self, task: Any) -> Any:
        """``make(task)``."""
        try:
            self._pipe.send(task)
            said = None
            while said is None:  # which says that the process is up
                if self._pipe not in multiprocessing.connection.wait([self._pipe, self._death]):
                    raise EOFError
                said = self._pipe.recv()
            answer, error = said
        except (EOFError, OSError) as exc:
            self._process.join(1.0)
            raise WorkerDied(
                f"the helper process that plans epochs is gone (exit code {self._process.exitcode}). If the sampler cannot run in another "
                f"process, use plan_ahead=False: it then runs in this one, between two epochs."
            ) from exc
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """Kill the process and wait for it; whoever waits in a call is told `WorkerDied`."""
        self._process.kill()
        self._process.join()

    def _kill(self) -> None:
        self.end()
        self._pipe.close()


def _serve(pipe: multiprocessing.connection.Connection, make: Any, parent: int) -> None:
    """The helper process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    threading.Thread(target=_die_with, args=(parent,), name="penstock-parent", daemon=True).start()
    torch.set_num_threads(1)
    if isinstance(make, bytes):
        make = pickle.loads(make)
    else:
        come_up()
        pipe.send(None)
    while True:
        task = pipe.recv()
        try:
            answer = pickle.dumps((make(task), None))
        except Exception as exc:
            answer = _pickled(exc)
        pipe.send_bytes(answer)


def _pickled(exc: Exception) -> bytes:
    exc.add_note(f"in the helper process:\n{''.join(traceback.format_tb(exc.__traceback__))}")
    try:
        answer = pickle.dumps((None, exc))
        pickle.loads(answer)  # Not every exception that can be pickled can be unpickled.
    except Exception:
        notes = "\n".join(exc.__notes__)
        return pickle.dumps((None, RuntimeError(f"{type(exc).__name__}: {exc}\n{notes}")))
    return answer


def _die_with(parent: int) -> None:
    """End this process when ``parent`` has: its pipe would not tell, because the parent's other children hold copies of it."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        fd = os.pidfd_open(parent)
        select.select([fd], [], [])
    except ProcessLookupError:
        pass  # it has already
    os._exit(1)
