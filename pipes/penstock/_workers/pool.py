"""The interface between a node and its workers, whether threads or processes.

One consumer thread owns a pool: it submits, waits and collects. Workers never touch the graph. Other threads may call
only `Pool.interrupt`.
"""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Protocol

from penstock._errors import SampleError

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence, Sequence
    from multiprocessing.context import BaseContext

    from penstock._memory.allocation import Allocate
    from penstock._statistics import WorkerStatistics

    StartMethod = str | BaseContext


def why_not_sent(work: Any, multiprocessing_context: StartMethod | None) -> Exception | None:
    """The error of sending ``work`` to a new worker process; None if it can be sent, or is inherited by a fork."""
    context: Any = multiprocessing_context
    if context is None or isinstance(context, str):
        context = multiprocessing.get_context(context)
    if context.get_start_method() != "fork":
        try:
            ForkingPickler.dumps(work)
        except Exception as exc:
            return exc
    return None


def check_processes(multiprocessing_context: StartMethod | None) -> None:
    """Refuse a context that a pool of processes cannot use.

    Where there are no such pools, nothing of ``processes/`` can be imported.

    Raises:
        ValueError: It is neither a start method nor a context.
        RuntimeError: The platform has no Unix sockets that pass file descriptors (Windows).
    """
    if isinstance(multiprocessing_context, str):
        multiprocessing.get_context(multiprocessing_context)
    elif multiprocessing_context is not None and not hasattr(multiprocessing_context, "get_start_method"):
        raise ValueError(
            f"multiprocessing_context={multiprocessing_context!r:.80} is neither a start method, such as 'fork', nor a "
            f"context. Pass a name, or multiprocessing.get_context('fork')."
        )
    if not hasattr(socket, "send_fds"):
        raise RuntimeError(
            "worker processes need Unix sockets that pass file descriptors, which this platform does not have. Use "
            'method="thread".'
        )


IDLE = -1
"""The value of ``current_row`` of a worker while it loads no sample."""


class Work(Protocol):
    """The function that workers apply to tasks. Each worker gets it once, by fork or pickled."""

    def __call__(self, task: Any, current_row: MutableSequence[int], allocate: Allocate) -> Any:
        """Run ``task``. If it has rows, write the row being loaded (its index in the task) to ``current_row[0]``.

        A result in memory from ``allocate`` is not copied on its way to the consumer.
        """
        ...

    def name(self, task: Any, row: int) -> str:
        """Describe ``row`` of ``task`` for errors; with `IDLE`, the whole task."""
        ...


def named(work: Work, task: Any, row: int) -> str:
    """The name that ``work`` gives a row of a task. If naming fails, that must not hide the original error."""
    try:
        return work.name(task, row)
    except Exception:
        return f"a task that cannot be named, row {row}"


class Job:
    """A submitted task. Once ``done`` is true, it has a value or an error."""

    __slots__ = ("done", "error", "task", "value", "worker")

    def __init__(self, task: Any, error: BaseException | None = None) -> None:
        self.task = task
        self.done = error is not None
        self.value: Any = None
        self.error = error
        self.worker = IDLE

    @property
    def under_way(self) -> list[Job]:
        """The jobs to wait for: this one."""
        return [self]

    def result(self) -> Any:
        """Return the value, or raise the task's error.

        An exception that would end more than this batch in the consumer (``StopIteration``, ``SystemExit``) is raised
        as a `SampleError`.
        """
        if self.error is None:
            return self.value
        if isinstance(self.error, Exception) and not isinstance(self.error, StopIteration | StopAsyncIteration):
            raise self.error
        # As itself, a StopIteration would look like the end of the data, and a SystemExit would end the program.
        where = ", ".join(getattr(self.error, "__notes__", ()))
        raise SampleError(f"{type(self.error).__name__} was raised by user code {where}".rstrip()) from self.error

    def forget(self) -> None:
        """Drop the error after `result` has raised it.

        Its traceback refers to every frame on its way, and those refer to this job.
        """
        self.error = None


class SplitJob:
    """A batch that several workers load together. It has the interface of a `Job`."""

    worker = IDLE

    def __init__(self, task: Any, jobs: list[Job], together: Callable[[list[Any]], Any]) -> None:
        self.task = task
        self._jobs = jobs
        self._together = together

    @property
    def done(self) -> bool:
        """Whether all parts are done, so that an error leaves nothing in the workers' queues.

        After a part has timed out, the others are not awaited.
        """
        return all(job.done for job in self._jobs) or any(isinstance(job.error, TimeoutError) for job in self._jobs)

    @property
    def under_way(self) -> list[Job]:
        # never empty: a thread may have finished the last one just now
        return [job for job in self._jobs if not job.done] or self._jobs

    def result(self) -> Any:
        for job in self._jobs:  # the first error in the order of the rows, whichever worker was first
            if job.error is not None:
                job.result()
        return self._together([job.value for job in self._jobs])

    def forget(self) -> None:
        for job in self._jobs:
            job.forget()


class Pool(Protocol):
    """Workers that live as long as the pool. Threads and processes share this protocol.

    A pool may have more, and callers check for it: ``unpacked``, how long it took to rebuild results here; ``pids``,
    the processes of its workers; ``poll``, to take in their answers without a `wait`. A pool whose workers share this
    process has ``threads``, their identifiers.
    """

    def start(self) -> None:
        """Start the workers. Idempotent."""

    def submit(self, task: Any, to: int | None = None) -> Job:
        """Queue a task. Never waits for a worker.

        Args:
            task: Any worker can run it.
            to: The number of the preferred worker. The task waits for that worker or, if it dies, for its replacement.
                None: any worker.
        """
        ...

    def wait(self, jobs: Sequence[Job], timeout: float | None) -> None:
        """Wait until one of ``jobs`` is done.

        After ``timeout`` seconds, a job that a worker has begun ends with a `TimeoutError`, and the pool gives up on
        its worker. If no worker has begun any of ``jobs``, `wait` itself raises `TimeoutError`, and the jobs stay in
        flight.

        Raises:
            ClosedError: After `interrupt`.
        """

    def discard(self) -> None:
        """Drop every job in flight, after a jump. The workers stay, and finish or skip the tasks they have."""

    def interrupt(self) -> None:
        """Make `wait` raise `ClosedError` in the thread that waits. Thread-safe."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers within ``timeout`` seconds (see `closing_within`) and release all that they held.

        Idempotent.
        """

    @property
    def size(self) -> int:
        """The number of workers, without those that are leaving."""
        ...

    @property
    def all_ready(self) -> bool:
        """Whether every worker has started, which may take a process seconds."""
        ...

    def resize(self, num_workers: int) -> int:
        """Change the number of workers to ``num_workers``.

        Returns the actual number, which is lower if the system has no room for more.

        Only the consumer's thread may call it. It does not wait: new workers take tasks as soon as they have started,
        and leaving workers first finish what they have begun. No task is lost. After an interrupt, the next call does
        the rest.
        """
        ...

    def statistics(self) -> WorkerStatistics:
        """The pool's counters."""
        ...

    def counted(self) -> list[list[int]]:
        """The counts of each worker's meter, including workers that have ended; see `Totals`."""
        ...
