"""Worker threads.

Who touches what: the consumer thread submits, waits and discards. Each worker thread takes one job at a time from the
inbox and writes its result. A lock guards results, because the consumer may give up on a job in the moment in which it
finishes. Any thread may call `interrupt`.

A user's signal handler may raise in the consumer thread at any moment. So the consumer runs no code that such an
exception would leave half done: the inbox is a ``SimpleQueue``, whose calls are single C calls, and a `Bell` wakes the
consumer.

The pool may grow and shrink while it works (`ThreadPool.resize`). To shrink it, the consumer sets how many threads
should leave, and any of them do: each checks after every job, and a None in the inbox wakes an idle one. If an
interrupt loses a None, that only delays a thread.

A thread cannot be stopped. If a job takes longer than ``timeout``, the pool gives up on it: the job ends with a
`TimeoutError`, and if the thread finishes it after all, the result is dropped. The thread then takes jobs again.

The threads hold the `_Core` and never the pool, so an abandoned pool is collected, and its finalizer ends them. They
are daemons only so that a thread stuck in user code cannot delay the interpreter's exit.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, final

from penstock._errors import ANEW, ClosedError
from penstock._memory.allocation import anywhere
from penstock._workers.bell import Bell
from penstock._workers.lifetime import PATIENCE_S, join, patience_s, start, told_to_end, when_abandoned
from penstock._workers.meter import Meter, measuring, traced
from penstock._workers.pool import IDLE, Job, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._memory.allocation import Allocate
    from penstock._statistics import WorkerStatistics

_logger = logging.getLogger("penstock")


class _Core:
    """The state that the threads share."""

    def __init__(self, work: Work, most: int, allocate: Allocate) -> None:
        self.work = work
        self.allocate = allocate
        self.current_rows = [[IDLE] for _ in range(most)]  # each thread writes its own
        self.meters = [Meter(tries_lock=True) for _ in range(most)]  # each thread writes its own
        self.doing: list[Job | None] = [None] * most  # each thread writes its own
        self.threads: dict[int, threading.Thread] = {}  # by number; a thread that leaves takes itself out
        # a None wakes an idle thread, which leaves if it should
        self.inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.finished = Bell()  # wakes the consumer
        # Guards results and who leaves. Re-entrant: a signal handler may close the loader while its own thread holds
        # it.
        self.lock = threading.RLock()
        self.leaving = 0  # threads that are to leave
        self.tasks = 0
        self.interrupted = False
        self.stopped = False
        self.ended = False  # every thread was told

    def stop(self) -> None:
        self.stopped = True
        self.clear()
        # Wake idle threads, and the consumer, in case it waits in a thread other than the one that closes.
        self.wake(len(self.current_rows))
        self.finished.ring()

    def clear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get_nowait()

    def wake(self, threads: int) -> None:
        for _ in range(threads):
            self.inbox.put(None)

    def take(self, number: int) -> Job | None:
        while not self.may_leave(number):
            job = self.inbox.get()
            if self.stopped:
                return None
            # A None that came too late, or for another thread, is no harm: whoever takes it looks whether it may leave.
            if job is not None:
                self.doing[number] = job
                job.worker = number
                return job
        return None

    def may_leave(self, number: int) -> bool:
        if not self.leaving:  # without the lock, because this is asked before each job
            return False
        with self.lock:
            if not self.leaving:  # others have left since
                return False
            del self.threads[number]
            self.leaving -= 1
            return True

    def finish(self, number: int, job: Job, value: Any, error: BaseException | None) -> None:
        self.current_rows[number][0] = IDLE
        self.doing[number] = None
        with self.lock:
            if not job.done:  # otherwise the consumer has given up on it
                job.value, job.error = value, error
                job.done = True
                self.tasks += 1
        self.finished.ring()

    def give_up(self, jobs: Sequence[Job], timeout: float | None) -> None:
        """End one of ``jobs`` that a thread has begun with a `TimeoutError`, unless one of them is done by now."""
        with self.lock:  # or a thread might finish the job that is given up, and its value would stay behind the error
            if any(job.done for job in jobs):
                return
            job = next((job for job in jobs if job.worker != IDLE), None)
            if job is not None:
                what = self.work.name(job.task, self.current_rows[job.worker][0])
                job.error = TimeoutError(
                    f"waited {timeout} s for {what}, in worker thread {job.worker}, which cannot be stopped: it is "
                    f"abandoned, and its result is dropped."
                )
                job.done = True
                self.tasks += 1
                return
        why = "which no worker thread has begun"
        if stuck := self.stuck():
            why += f"; {len(stuck)} of {self.size} are stuck: " + "; ".join(stuck)
        raise TimeoutError(f"waited {timeout} s for {self.work.name(jobs[0].task, IDLE)}, {why}.")

    @property
    def size(self) -> int:
        """Threads that are to stay."""
        with self.lock:
            return len(self.threads) - self.leaving

    def stuck(self) -> list[str]:
        """The threads that the pool gave up on, each with its current task, for errors."""
        return [
            f"worker thread {number} in {self.work.name(job.task, self.current_rows[number][0])}"
            for number, job in enumerate(self.doing)
            if job is not None and job.done
        ]


def _run(core: _Core, number: int) -> None:
    name, meter = threading.current_thread().name, core.meters[number]
    measuring.set(meter)
    told_to_end.set(lambda: core.stopped)
    while (job := core.take(number)) is not None:
        value, error = None, None
        since = meter.begin()
        try:
            value = core.work(job.task, core.current_rows[number], core.allocate)
        # Also a SystemExit from user code, which would end this thread and leave the job undone.
        except BaseException as exc:
            with contextlib.suppress(Exception):  # a frozen exception takes no note
                exc.add_note(f"in worker thread {number} ({name})")
            error = exc
        ended = meter.end()
        for one in traced:
            one.task(job.task, since, ended)
        core.finish(number, job, value, error)
        del job, value, error  # This frame must not keep a batch alive while it waits for the next.


@final
class ThreadPool:
    """`Pool` of ``num_workers`` threads that run ``work``.

    Args:
        work: Called from all worker threads concurrently.
        num_workers: At least 1.
        most: Upper limit for `resize`; None: ``num_workers``.
        allocate: Memory for results. Called from all worker threads concurrently.
        name: Prefix of the threads' names.

    Attributes:
        watched: Calls the function that waits for the threads, with its arguments; see `DrawWatch.waiting`.
    """

    def __init__(
        self,
        work: Work,
        num_workers: int,
        *,
        most: int | None = None,
        allocate: Allocate = anywhere,
        name: str = "penstock-map",
    ) -> None:
        self._core = _Core(work, most or num_workers, allocate)
        self._num_workers = num_workers  # to begin with
        self._name = name
        self.watched: Callable[..., Any] | None = None
        self._started = False

    def start(self) -> None:
        if self._core.stopped:
            raise ClosedError(f"these worker threads have ended. {ANEW}")
        if not self._core.threads:
            when_abandoned(self, partial(_end, self._core, PATIENCE_S))
            self._core.threads = {number: self._thread(number) for number in range(self._num_workers)}
        self._start_threads()

    def _start_threads(self) -> None:
        if not self._started:
            start(list(self._core.threads.values()), self._core.lock)
            self._started = True

    def _thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=_run, args=(self._core, number), name=f"{self._name}-{number}", daemon=True)

    @property
    def size(self) -> int:
        """See `Pool.size`."""
        return self._core.size

    @property
    def threads(self) -> list[int]:
        """The identifiers of its threads."""
        return [thread.ident or 0 for thread in list(self._core.threads.values())]

    @property
    def all_ready(self) -> bool:
        """See `Pool.all_ready`. A thread starts at once."""
        return True

    def resize(self, num_workers: int) -> int:
        """See `Pool.resize`. If the system cannot start a thread, the running ones stay."""
        core = self._core
        if core.stopped:
            return core.size
        with core.lock:
            missing = num_workers - core.size
            stay = min(core.leaving, max(0, missing))
            core.leaving += max(0, -missing) - stay
            # Without a loop: from Python 3.12 on, Ctrl-C at a loop's conditional jump can leave a lock held
            # (python/cpython#130279).
            numbers = sorted(set(range(len(core.current_rows))).difference(core.threads))[: max(0, missing - stay)]
        core.wake(core.leaving)
        for number in numbers:
            self._started = False  # first: after an interrupt, the next call starts those that are listed
            # `threads` is the only record of the numbers in use. With two records, an interrupt at the wrong line left
            # a number in only one of them.
            core.threads[number] = self._thread(number)
        try:
            self._start_threads()
        except RuntimeError as error:
            _logger.warning("no more worker threads: %s", error)
            core.threads = {number: thread for number, thread in core.threads.items() if thread.ident is not None}
            self._started = True
        return core.size

    def submit(self, task: Any, to: int | None = None) -> Job:
        """Queue a task. ``to`` has no effect, because threads share what they have read."""
        job = Job(task)
        self._core.inbox.put(job)
        return job

    def wait(self, jobs: Sequence[Job], timeout: float | None) -> None:
        if self.watched is None:
            self._wait(jobs, timeout)
        else:
            self.watched(self._wait, jobs, timeout)

    def _wait(self, jobs: Sequence[Job], timeout: float | None) -> None:
        core = self._core
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if core.interrupted or core.stopped:
                raise ClosedError("the loader was closed, or moved to another position, while it waited for a batch.")
            if any(job.done for job in jobs):
                return
            if not core.finished.wait(None if deadline is None else deadline - time.monotonic()):
                core.give_up(jobs, timeout)

    def discard(self) -> None:
        core = self._core
        core.clear()
        core.wake(len(core.current_rows) if core.stopped else core.leaving)  # again, because these were in there too
        core.interrupted = False

    def interrupt(self) -> None:
        self._core.interrupted = True
        self._core.finished.ring()

    def shutdown(self, timeout: float | None = None) -> None:
        """See `Pool.shutdown` and `join`."""
        _end(self._core, patience_s(timeout))

    def abandon(self) -> None:
        """Tell the threads to end, and do not wait for them. For work that may hang, and that nobody needs."""
        self._core.stop()
        self._core.ended = True

    def statistics(self) -> WorkerStatistics:
        from penstock._statistics import WorkerStatistics

        core = self._core
        busy = sum(job is not None for job in core.doing)
        return WorkerStatistics(
            "thread",
            workers=core.size,
            busy=busy,
            tasks=core.tasks,
            waiting=core.inbox.qsize(),
            stuck=len(core.stuck()),
        )

    def counted(self) -> list[list[int]]:
        return [meter.counted() for meter in self._core.meters if meter.words[Meter.FIRST]]


def _end(core: _Core, timeout: float) -> None:
    if not core.ended:
        core.stop()
        # not before: after an interrupt, the next call tells the rest, which would otherwise wait forever
        core.ended = True
        join(list(core.threads.values()), timeout)
