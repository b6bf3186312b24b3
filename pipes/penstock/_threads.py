"""Worker threads.

Who touches what: the consumer thread submits, waits and discards; each worker thread takes one job at a time from the inbox, writes
the job's outcome, then sets ``done`` under the condition. `interrupt` may come from any thread.

The threads hold the `_Core` and never the pool, so that an abandoned pool is collected and its finalizer ends them. They are
daemons only so that a thread stuck in user code cannot hold up the interpreter's exit.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from penstock._errors import ClosedError
from penstock._pool import IDLE, Job, Work

if TYPE_CHECKING:
    from collections.abc import Iterable

_logger = logging.getLogger("penstock")


@final
@dataclass(frozen=True, slots=True)
class ThreadStatistics:
    """What a `ThreadPool` has done: ``workers`` threads, ``tasks`` finished, ``waiting`` for a thread now."""

    workers: int
    tasks: int
    waiting: int


class _Core:
    """What the threads share."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.changed = threading.Condition()
        # All below is read and written under `changed` only.
        self.inbox: deque[Job] = deque()
        self.tasks = 0
        self.interrupted = False
        self.stopped = False

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.inbox.clear()
            self.changed.notify_all()

    def take(self) -> Job | None:
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.inbox)
            return None if self.stopped else self.inbox.popleft()

    def finish(self, job: Job) -> None:
        with self.changed:
            job.done = True
            self.tasks += 1
            self.changed.notify_all()


def _run(core: _Core, number: int, cells: list[list[int]]) -> None:
    while (job := core.take()) is not None:
        job.worker = number
        try:
            job.value = core.work(job.task, cells[number])
        except BaseException as exc:
            job.error = exc
        cells[number][0] = IDLE
        core.finish(job)
        del job  # This frame must not keep a batch alive while it waits for the next.


@final
class ThreadPool:
    """`Pool` of ``num_workers`` threads that do ``work``.

    Args:
        work: Called from every worker thread at once.
        num_workers: At least 1.
        name: Prefix of the threads' names.
    """

    def __init__(self, work: Work, num_workers: int, *, name: str = "penstock-map") -> None:
        self._core = _Core(work)
        self._cells = [[IDLE] for _ in range(num_workers)]
        self._threads = [
            threading.Thread(target=_run, args=(self._core, number, self._cells), name=f"{name}-{number}", daemon=True) for number in range(num_workers)
        ]
        self._started = False
        self._finalizer = weakref.finalize(self, _end, self._core, self._threads, 2.0)

    def start(self) -> None:
        if self._core.stopped:
            raise ClosedError("these worker threads have ended; build a new loader.")
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()

    def submit(self, task: Any) -> Job:
        job = Job(task)
        with self._core.changed:
            self._core.inbox.append(job)
            self._core.changed.notify_all()
        return job

    def wait(self, jobs: Iterable[Job], timeout: float | None) -> None:
        jobs = list(jobs)
        core = self._core

        def over() -> bool:
            return core.interrupted or core.stopped or any(job.done for job in jobs)

        with core.changed:
            in_time = core.changed.wait_for(over, timeout)
            if core.interrupted or core.stopped:
                raise ClosedError("the loader was closed, or moved elsewhere, while a batch was being waited for.")
        if not in_time:
            job = jobs[0]
            row = self._cells[job.worker][0] if job.worker != IDLE else IDLE
            where = f"in worker thread {job.worker}" if job.worker != IDLE else "which no worker thread has begun"
            raise TimeoutError(f"waited {timeout} s for {core.work.name(job.task, row)}, {where}.")

    def discard(self) -> None:
        with self._core.changed:
            self._core.inbox.clear()
            self._core.interrupted = False

    def interrupt(self) -> None:
        with self._core.changed:
            self._core.interrupted = True
            self._core.changed.notify_all()

    def shutdown(self, timeout: float = 2.0) -> None:
        self._finalizer.detach()
        _end(self._core, self._threads, timeout)

    def statistics(self) -> ThreadStatistics:
        with self._core.changed:
            return ThreadStatistics(workers=len(self._threads), tasks=self._core.tasks, waiting=len(self._core.inbox))


def _end(core: _Core, threads: list[threading.Thread], timeout: float) -> None:
    core.stop()
    deadline = time.monotonic() + timeout
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _logger.warning("thread %s is stuck in user code and cannot be stopped; it is left behind, and its result dropped.", thread.name)
