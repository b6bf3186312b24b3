"""Worker threads.

Who touches what: the consumer thread submits, waits and discards; each worker thread takes one job at a time from the inbox, and
writes its outcome. All of that under one lock, with a condition for either side; `interrupt` may come from any thread.

A thread cannot be stopped. One that is in the middle of a job longer than ``timeout`` is given up: the job is done, with a
`TimeoutError`, and what comes of it after all is dropped. The thread itself takes jobs again if it ever comes back.

The threads hold the `_Core` and never the pool, so that an abandoned pool is collected and its finalizer ends them. They are
daemons only so that a thread stuck in user code cannot hold up the interpreter's exit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, final

from penstock._errors import ClosedError
from penstock._memory.allocation import afresh
from penstock._statistics import ThreadStatistics
from penstock._workers.lifetime import PATIENCE_S, join, patience_s
from penstock._workers.pool import IDLE, Job, Work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock._memory.allocation import Allocate


_logger = logging.getLogger("penstock")


class _Core:
    """What the threads share."""

    def __init__(self, work: Work, num_workers: int, allocate: Allocate) -> None:
        self.work = work
        self.allocate = allocate
        self.cells = [[IDLE] for _ in range(num_workers)]  # each written by its thread
        self.lock = threading.RLock()  # a signal's handler may close the loader while its thread holds it
        self.offered = threading.Condition(self.lock)  # to the threads
        self.finished = threading.Condition(self.lock)  # to the consumer
        # All below is read and written under `lock` only.
        self.inbox: deque[Job] = deque()
        self.doing: list[Job | None] = [None] * num_workers
        self.tasks = 0
        self.interrupted = False
        self.stopped = False

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            self.inbox.clear()
            self.offered.notify_all()
            self.finished.notify_all()

    def take(self, number: int) -> Job | None:
        with self.lock:
            while not self.inbox and not self.stopped:
                self.offered.wait()
            if self.stopped:
                return None
            job = self.doing[number] = self.inbox.popleft()
            job.worker = number
            return job

    def finish(self, number: int, job: Job, value: Any, error: BaseException | None) -> None:
        with self.lock:
            self.cells[number][0] = IDLE
            self.doing[number] = None
            if not job.done:  # or it was given up
                job.value, job.error = value, error
                job.done = True
                self.tasks += 1
            self.finished.notify_all()

    def give_up(self, jobs: list[Job], timeout: float | None) -> None:
        """End one of ``jobs`` that a thread has begun; call it under `lock`."""
        job = next((job for job in jobs if job.worker != IDLE), None)
        if job is not None:
            what = self.work.name(job.task, self.cells[job.worker][0])
            job.error = TimeoutError(
                f"waited {timeout} s for {what}, in worker thread {job.worker}, which cannot be stopped: it is left to itself, and its result dropped."
            )
            job.done = True
            self.tasks += 1
            return
        why = "which no worker thread has begun"
        if stuck := self.stuck():
            why += f"; {len(stuck)} of {len(self.doing)} are stuck: " + "; ".join(stuck)
        raise TimeoutError(f"waited {timeout} s for {self.work.name(jobs[0].task, IDLE)}, {why}.")

    def stuck(self) -> list[str]:
        """The threads that were given up, and what they are at; call it under `lock`."""
        return [
            f"worker thread {number} in {self.work.name(job.task, self.cells[number][0])}"
            for number, job in enumerate(self.doing)
            if job is not None and job.done
        ]


def _run(core: _Core, number: int) -> None:
    name = threading.current_thread().name
    while (job := core.take(number)) is not None:
        value, error = None, None
        try:
            value = core.work(job.task, core.cells[number], core.allocate)
        except BaseException as exc:
            with contextlib.suppress(Exception):  # an exception that is frozen bears no note
                exc.add_note(f"in worker thread {number} ({name})")
            error = exc
        core.finish(number, job, value, error)
        del job, value, error  # This frame must not keep a batch alive while it waits for the next.


@final
class ThreadPool:
    """`Pool` of ``num_workers`` threads that do ``work``.

    Args:
        work: Called from every worker thread at once.
        num_workers: At least 1.
        allocate: Memory for results; called from every worker thread at once.
        name: Prefix of the threads' names.
    """

    def __init__(self, work: Work, num_workers: int, *, allocate: Allocate = afresh, name: str = "penstock-map") -> None:
        self._core = _Core(work, num_workers, allocate)
        self._threads = [
            threading.Thread(target=_run, args=(self._core, number), name=f"{name}-{number}", daemon=True) for number in range(num_workers)
        ]
        self._started = False
        self._finalizer = weakref.finalize(self, _end, self._core, self._threads, PATIENCE_S)

    def start(self) -> None:
        if self._core.stopped:
            raise ClosedError("these worker threads have ended; build a new loader.")
        if not self._started:
            for thread in self._threads:
                if thread.ident is None:  # an interrupt may have come between two
                    thread.start()
            self._started = True

    def submit(self, task: Any) -> Job:
        job = Job(task)
        with self._core.lock:
            self._core.inbox.append(job)
            self._core.offered.notify()
        return job

    def wait(self, jobs: Iterable[Job], timeout: float | None) -> None:
        jobs = list(jobs)
        core = self._core

        def over() -> bool:
            return core.interrupted or core.stopped or any(job.done for job in jobs)

        with core.lock:
            in_time = core.finished.wait_for(over, timeout)
            if core.interrupted or core.stopped:
                raise ClosedError("the loader was closed, or moved elsewhere, while a batch was being waited for.")
            if not in_time:
                core.give_up(jobs, timeout)

    def discard(self) -> None:
        with self._core.lock:
            self._core.inbox.clear()
            self._core.interrupted = False

    def interrupt(self) -> None:
        with self._core.lock:
            self._core.interrupted = True
            self._core.finished.notify_all()

    def shutdown(self, timeout: float | None = None) -> None:
        """See `Pool.shutdown` and `join`."""
        self._finalizer.detach()
        if self._core.stopped:
            return
        _end(self._core, self._threads, patience_s(timeout))

    def statistics(self) -> ThreadStatistics:
        core = self._core
        with core.lock:
            return ThreadStatistics(workers=len(self._threads), tasks=core.tasks, waiting=len(core.inbox), stuck=len(core.stuck()))


def _end(core: _Core, threads: list[threading.Thread], timeout: float) -> None:
    core.stop()
    join(threads, timeout)
