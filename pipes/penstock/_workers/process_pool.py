"""A pool of worker processes: the public side.

The parts are in ``processes/``: the event loop (`scheduler`), the place of each task (`task_table`), the set of live workers (`supervisor`),
our side of one worker (`worker_handle`), ways to start workers (`launchers`, `zygote`), the code inside a worker (`worker_main`,
`slot_maker`), and the messages in between (`protocol`, `remote_error`). Results travel in shared memory (`penstock._memory`).
"""

from __future__ import annotations

import multiprocessing
import socket
import weakref
from typing import TYPE_CHECKING, Any, final

from penstock._workers.lifetime import PATIENCE_S, patience_s
from penstock._workers.processes.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.context import BaseContext

    from penstock._statistics import Durations, WorkerStatistics
    from penstock._workers.pool import Job
    from penstock._workers.processes.protocol import Setup


def check_processes(multiprocessing_context: str | BaseContext | None) -> None:
    """Refuse a context that a pool cannot use.

    Raises:
        ValueError: It is neither a start method nor a context.
        RuntimeError: The platform has no Unix sockets that pass file descriptors (Windows).
    """
    if isinstance(multiprocessing_context, str):
        multiprocessing.get_context(multiprocessing_context)
    elif multiprocessing_context is not None and not hasattr(multiprocessing_context, "get_start_method"):
        raise ValueError(
            f"multiprocessing_context={multiprocessing_context!r:.80} is neither a start method, such as 'fork', nor a context. "
            f"Pass a name, or multiprocessing.get_context('fork')."
        )
    if not hasattr(socket, "send_fds"):
        raise RuntimeError(
            'worker processes need Unix sockets that pass file descriptors, which this platform does not have. Use method="thread".'
        )


@final
class ProcessPool:
    """`Pool` of processes.

    Args:
        setup: What each worker receives.
        num_workers: Workers at first; default: ``setup.num_workers``, which is the upper limit for `resize`.
        queue_size: Tasks that a worker may hold, including the one in progress. Values above 64 act as 64.
        refill_at: A worker gets new tasks once it holds this many or fewer, and then several at once, because waking it is most of the cost
            of a small task. Default: as soon as it has room.
        max_restarts: Workers that may be replaced over the life of the pool, in total. This is not a rate: a job that runs for weeks should
            end with a reason rather than lose a worker a day unnoticed.
        multiprocessing_context: A start method or context; default: multiprocessing's own for the platform.

    Raises:
        ValueError: A number is out of bounds, or see `check_processes`.
        RuntimeError: The platform has no Unix sockets that pass file descriptors (Windows).
    """

    def __init__(
        self,
        setup: Setup,
        num_workers: int | None = None,
        *,
        queue_size: int = 2,
        refill_at: int | None = None,
        max_restarts: int = 8,
        multiprocessing_context: str | BaseContext | None = None,
    ) -> None:
        num_workers = setup.num_workers if num_workers is None else num_workers
        for what, number, least in (("num_workers", num_workers, 1), ("queue_size", queue_size, 1), ("max_restarts", max_restarts, 0)):
            if number < least:
                raise ValueError(f"{what}={number} must be at least {least}.")
        check_processes(multiprocessing_context)
        self._scheduler = Scheduler(
            setup, num_workers, queue_size, queue_size - 1 if refill_at is None else refill_at, max_restarts, multiprocessing_context
        )
        self._finalizer = weakref.finalize(self, self._scheduler.shutdown, PATIENCE_S)

    def start(self) -> None:
        """Start the workers. Idempotent.

        Raises:
            TypeError: The start method pickles ``work``, and it cannot be pickled.
            ClosedError: After `shutdown`, or in a fork of the process that made the pool.
        """
        self._scheduler.check_usable()
        with self._scheduler.lock:
            self._scheduler.start()

    def submit(self, task: Any, to: int | None = None) -> Job:
        """Queue a task, for worker ``to`` or for any worker. Never waits for a worker. Errors from pickling ``task`` propagate."""
        self._scheduler.check_usable()
        with self._scheduler.lock:
            return self._scheduler.submit(task, to)

    def wait(self, jobs: Iterable[Job], timeout: float | None) -> None:
        """Wait until one of ``jobs`` is done.

        After ``timeout`` seconds, the worker that holds one of them is killed and replaced, which counts as a restart. If it was in the
        middle of that job, the job ends with a `TimeoutError`.

        Raises:
            TimeoutError: ``timeout`` seconds have passed, and no worker has begun any of them. They stay in flight.
            ClosedError: After `interrupt` (until `discard`), after `shutdown`, or in a fork.
            ValueError: None of them is in flight.
        """
        self._scheduler.check_usable()
        with self._scheduler.lock:
            self._scheduler.wait(list(jobs), timeout)

    @property
    def size(self) -> int:
        """See `Pool.size`."""
        return self._scheduler.size

    @property
    def all_ready(self) -> bool:
        """See `Pool.all_ready`."""
        return self._scheduler.all_ready

    def resize(self, num_workers: int) -> int:
        """See `Pool.resize`."""
        self._scheduler.check_usable()
        with self._scheduler.lock:
            return self._scheduler.resize(num_workers)

    def discard(self) -> None:
        """Clear any interrupt, and drop every job that is not done. A thread that still waits for such a job gets an error."""
        self._scheduler.check_usable()
        with self._scheduler.lock:
            self._scheduler.discard()

    def interrupt(self) -> None:
        """Make the current `wait`, and every later one until `discard`, raise `ClosedError`. Thread-safe."""
        self._scheduler.interrupt()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers within ``timeout`` seconds, by force after a quarter of that. Thread-safe and idempotent; after an interrupt, the next call does the rest."""
        self._scheduler.shutdown(patience_s(timeout))
        self._finalizer.detach()  # not before: if an interrupt comes first, the finalizer ends the rest

    def statistics(self) -> WorkerStatistics:
        """The pool's counters: its work so far, and what it holds now."""
        return self._scheduler.statistics()

    def unpacked(self) -> Durations:
        """How long it took to rebuild each result here."""
        return self._scheduler.unpacked.durations()

    def counted(self) -> list[list[int]]:
        """See `Pool.counted`."""
        return self._scheduler.counted()

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids, by worker number."""
        return self._scheduler.pids()
