"""A pool of worker processes: one event loop in the consumer's thread, which waits on every channel and every death at
once.

Results and deaths both wake it, so it needs no helper thread, and it shares no lock with a worker. It decides what to
do. The parts are in ``processes/``: the place of each task (`task_table`), the set of live workers (`supervisor`), our
side of one worker (`worker_handle`), ways to start workers (`launchers`, `zygote`), the code inside a worker
(`worker_main`, `slot_maker`), and the messages in between (`protocol`, `remote_error`). Results travel in shared memory
(`penstock._memory`).

A task is a pure function of its address, so after a death it is done again. The dead worker's `Area` says which task
and which row to blame. If the same row kills twice, the job gets a `SampleError` instead of a third worker.

Who touches what. The consumer thread: everything, under the lock. Any thread: `ProcessPool.interrupt`, without the
lock; `pids` and `statistics`, which read copies; and `shutdown`, which interrupts first, so that the holder of the lock
releases it. A forked child of the consumer's process closes its copies of our descriptors (`Supervisor.disown`), and is
refused everything else.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from functools import partial
from multiprocessing.util import Finalize
from operator import attrgetter
from typing import TYPE_CHECKING, Any, final

from penstock._errors import ANEW, ClosedError, SampleError, WorkerDied
from penstock._memory.parcel import pickled
from penstock._workers.asleep import HangWatch
from penstock._workers.lifetime import PATIENCE_S, patience_s
from penstock._workers.meter import Histogram, now
from penstock._workers.pool import IDLE, Job, check_processes, named
from penstock._workers.processes.deaths import cause_of
from penstock._workers.processes.protocol import READY, REFUSED, Setup
from penstock._workers.processes.supervisor import ENDED, Supervisor
from penstock._workers.processes.task_table import PendingTask, TaskTable
from penstock._workers.processes.transaction import Transaction
from penstock._workers.processes.worker_handle import MOST_HELD, WorkerHandle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.context import BaseContext

    from penstock._statistics import Durations, WorkerStatistics


_logger = logging.getLogger("penstock")


@final
class ProcessPool:
    """`Pool` of processes.

    Args:
        setup: What each worker receives.
        num_workers: Workers at first; default: ``setup.num_workers``, which is the upper limit for `resize`.
        queue_size: Tasks that a worker may hold, including the one in progress. Values above 64 act as 64.
        refill_at: A worker gets new tasks once it holds this many or fewer, and then several at once, because waking it
            is most of the cost of a small task. Default: as soon as it has room.
        max_restarts: Workers that may be replaced over the life of the pool, in total. This is not a rate: a job that
            runs for weeks should end with a reason rather than lose a worker a day unnoticed.
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
        for what, number, least in (
            ("num_workers", num_workers, 1),
            ("queue_size", queue_size, 1),
            ("max_restarts", max_restarts, 0),
        ):
            if number < least:
                raise ValueError(f"{what}={number} must be at least {least}.")
        check_processes(multiprocessing_context)
        self.size = num_workers  # workers of higher numbers get no task, and end once they hold none
        self._work = setup.work
        self._lock = threading.RLock()  # re-entrant, because a signal handler may shut down in the middle of a wait
        self._ending = threading.RLock()  # held by the thread that ends the workers
        self._owner = os.getpid()
        self._started = self._interrupted = self._closed = False
        self._ended = False  # all steps after `_closed` are done
        self._resized = False
        self._at_exit: Finalize | None = None
        self._queue_size = min(queue_size, MOST_HELD)
        self._refill_at = self._queue_size - 1 if refill_at is None else min(refill_at, self._queue_size - 1)
        self._max_restarts = max_restarts
        self._restarts = 0
        self._unpacked = Histogram()
        self._ended_in_start: set[int] = set()  # workers that did so last time
        self._tasks = TaskTable()
        self._supervisor = Supervisor(setup, self._queue_size, multiprocessing_context)
        self._transaction = Transaction()  # of `_tasks`, `_supervisor` and the workers' handles, which must agree

    # Start and end.

    def start(self) -> None:
        """Start the workers. Idempotent.

        Raises:
            TypeError: The start method pickles ``work``, and it cannot be pickled.
            ClosedError: After `shutdown`, or in a fork of the process that made the pool.
        """
        self._check_usable()
        with self._lock:
            if self._started:
                return
            self._owner = os.getpid()
            # At exit multiprocessing sends SIGTERM to the processes that it has started and waits for them; before that
            # it calls its finalizers.
            self._at_exit = Finalize(self, _abandoned, (weakref.ref(self), self._supervisor), exitpriority=0)
            self._supervisor.start(self.size)
            self._started = True
            if self._closed:  # meanwhile, by a `shutdown` that had less time than this took
                self.shutdown(PATIENCE_S)
                raise ClosedError("the loader was closed while its worker processes were starting.")

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers within ``timeout`` seconds, by force after a quarter of that.

        Thread-safe and idempotent; after an interrupt, the next call does the rest.
        """
        if self._ended or os.getpid() != self._owner:
            return
        self.interrupt()
        timeout = patience_s(timeout)
        deadline = time.monotonic() + timeout
        # its holder was interrupted, and lets go unless it is stuck in user code
        got = self._lock.acquire(timeout=timeout)
        try:
            self._closed = True
            # The lock is held by a thread that is starting the workers, which takes longer than this call may. It
            # checks `_closed` when they have started, and ends them.
            if not got and not self._started:
                return
            if self._ending.acquire(timeout=max(0.0, deadline - time.monotonic())):  # otherwise another thread is at it
                try:
                    self._supervisor.stop(deadline)
                    self._tasks.fail(partial(ClosedError, "the loader was closed while this was being loaded."))
                    if self._at_exit is not None:
                        self._at_exit.cancel()
                    # last: an interrupt may come anywhere before, and then the next call begins again
                    self._ended = True
                finally:
                    self._ending.release()
        finally:
            if got:
                self._lock.release()

    def _check_usable(self) -> None:
        if self._started and os.getpid() != self._owner:
            raise ClosedError(
                f"these workers belong to process {self._owner}, and this process is a fork of it. {ANEW}"
            )
        if self._closed:
            raise ClosedError(ENDED)

    # What the consumer calls.

    def submit(self, task: Any, to: int | None = None) -> Job:
        """Queue a task, for worker ``to`` or for any worker.

        Never waits for a worker. Errors from pickling ``task`` propagate.
        """
        self._check_usable()
        assert to is None or 0 <= to < self.size, f"there is no worker {to}"
        job, body = Job(task), pickled(task)
        with self._lock, self._transaction.begin(self._roll_back):
            self._tasks.add(job, body, to)
            self._dispatch()
        return job

    def wait(self, jobs: Sequence[Job], timeout: float | None) -> None:
        """Wait until one of ``jobs`` is done.

        After ``timeout`` seconds, the worker that holds one of them is killed and replaced, which counts as a restart.
        If it was in the middle of that job, the job ends with a `TimeoutError`.

        Raises:
            TimeoutError: ``timeout`` seconds have passed, and no worker has begun any of them. They stay in flight.
            ClosedError: After `interrupt` (until `discard`), after `shutdown`, or in a fork.
            ValueError: None of them is in flight.
        """
        self._check_usable()
        assert self._started
        at = time.monotonic()
        deadline, hangs, patience = math.inf if timeout is None else at + timeout, HangWatch(at), 0.0
        with self._lock:
            while True:
                self._run_once(patience)
                if any(job.done for job in jobs):
                    return
                if not self._tasks:
                    raise ValueError("none of these jobs is in flight in this pool, so there is nothing to wait for.")
                if (at := time.monotonic()) >= deadline:
                    self._on_timeout(jobs, timeout)
                    return
                for pid in hangs.found((worker.pid for worker in self._supervisor.workers.values()), at):
                    self._end_hung(pid)
                patience = min(deadline, hangs.due) - at

    def poll(self) -> None:
        """Take the answers that have come."""
        with self._lock:
            self._run_once(0)

    def discard(self) -> None:
        """Clear any interrupt, and drop every job that is not done.

        A thread that still waits for such a job gets an error.
        """
        self._check_usable()
        with self._lock, self._transaction.begin(self._roll_back):
            self._interrupted = False
            self._supervisor.drain_wake()
            self._tasks.discard(partial(ClosedError, "this was discarded after a jump."))
            self._supervisor.skip_below(self._tasks.next_number)

    def resize(self, num_workers: int) -> int:
        """See `Pool.resize`."""
        self._check_usable()
        assert self._started
        with self._lock, self._transaction.begin(self._roll_back):
            self._resized = True
            there = {worker.worker for worker in self._supervisor.workers.values()}
            missing = [number for number in range(num_workers) if number not in there]
            self.size = num_workers
            try:
                while missing:
                    self._supervisor.launch(missing[0])
                    del missing[0]
            except (OSError, RuntimeError) as error:  # a dead zygote is dealt with by the next wait
                self.size = missing[0]
                _logger.warning("no more than %d worker processes: %s", self.size, error)
            self._supervisor.dismiss(self.size)
            self._dispatch()
        return self.size

    def interrupt(self) -> None:
        """Make the current `wait`, and every later one until `discard`, raise `ClosedError`. Thread-safe."""
        self._interrupted = True  # first, because the woken thread checks it
        self._supervisor.wake()

    @property
    def all_ready(self) -> bool:
        """See `Pool.all_ready`."""
        return all(worker.ready for worker in list(self._supervisor.workers.values()) if worker.worker < self.size)

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids, by worker number."""
        return tuple(worker.pid for worker in sorted(self._supervisor.workers.values(), key=attrgetter("worker")))

    def statistics(self) -> WorkerStatistics:
        """The pool's counters: its work so far, and what it holds now."""
        from penstock._statistics import WorkerStatistics

        workers = list(self._supervisor.workers.values())
        counts = [worker.slots.count() for worker in workers]
        return WorkerStatistics(
            "process",
            workers=len(workers),
            busy=sum(bool(worker.held) for worker in workers),
            waiting=self._tasks.waiting,
            tasks=self._tasks.finished,
            restarts=self._restarts,
            slots=sum(slots for slots, _ in counts),
            slot_bytes=sum(nbytes for _, nbytes in counts),
        )

    def unpacked(self) -> Durations:
        """How long it took to rebuild each result here."""
        return self._unpacked.durations()

    def counted(self) -> list[list[int]]:
        """See `Pool.counted`."""
        return self._supervisor.counted()

    # The event loop.

    def _run_once(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for events, and handle all of them."""
        # before the wait, because after half a change there may be no worker to wake us
        self._transaction.settle(self._roll_back)
        supervisor = self._supervisor
        death = supervisor.missed_deaths
        # An interrupt sets its flag, then sends a byte. The byte wakes the wait, but may be drained with an older one,
        # so look at the flag first.
        ready = supervisor.poller.poll(0 if death or self._interrupted else patience * 1000)
        self._check_usable()
        if self._interrupted:
            raise ClosedError("the loader was closed, or moved to another position, while it waited for a batch.")
        if not ready and not death:
            return
        with self._transaction.begin(self._roll_back):
            for fd, _ in ready:
                worker = supervisor.workers.get(fd)
                if supervisor.is_wake(fd):
                    supervisor.drain_wake()  # of an interrupt whose byte came after the `discard` that ended it
                elif worker is None:
                    death = True
                elif not self._receive(worker):
                    supervisor.stop_reading(worker)  # end-of-file, which the poller would show until the death is known
            if death and self._tasks.failure is None:
                try:
                    for worker, code in supervisor.deaths():
                        self._replace(worker, code)
                except (OSError, RuntimeError) as error:  # `WorkerDied` is one
                    self._tasks.fail(partial(type(error), *error.args))
            if self._resized:
                supervisor.dismiss(self.size)
            self._dispatch()

    def _dispatch(self) -> None:
        """Give tasks to their owners, and other tasks to the least loaded workers, while there are both.

        A worker gets its own tasks in order, regardless of the others. So the oldest task can always be done, and
        nothing waits forever.

        While the first workers are still starting, each gets one task, so that the first to be ready does not get all
        of them.
        """
        if not self._tasks.waiting:
            return
        workers = self._supervisor.workers.values()
        most, refill_at = (
            (self._queue_size, self._refill_at)
            if self._restarts or self._resized or all(worker.ready for worker in workers)
            else (1, 0)
        )
        able = [
            worker
            for worker in workers
            if len(worker.held) < most and worker.ready and not worker.stuck and worker.worker < self.size
        ]
        if not any(len(worker.held) <= refill_at for worker in able):
            return
        # First the tasks with an owner, for every worker with room: a worker whose queue is full, or that needs no
        # refill yet, must not keep the others from theirs.
        if self._tasks.owned:
            for worker in able:
                while len(worker.held) < most and (task := self._tasks.take(worker.worker)) is not None:
                    self._hand(worker, task)
        # Of equally loaded workers, the one that answered last has just begun its oldest task, so it would begin a new
        # one last. Without this, where 32 workers finish together, an earlier batch was put behind a later one, and 31
        # finished batches waited for it.
        able.sort(key=_answered)
        while able:
            # Choose the least loaded worker again for each task. When only the worker to be refilled got tasks, it got
            # four in a row, and the second of them took twice as long.
            worker = min(able, key=_load) if len(able) > 1 else able[0]
            if len(worker.held) >= most or (task := self._tasks.take()) is None:
                break
            self._hand(worker, task)
        for worker in able:
            worker.flush()

    def _hand(self, worker: WorkerHandle, task: PendingTask) -> None:
        try:
            worker.hand(task)
        except OSError as error:
            self._tasks.finish(task, error=error)

    def _receive(self, worker: WorkerHandle) -> bool:
        """Handle what a worker has sent. Returns False if there is nothing (more)."""
        answers = worker.answers()
        for answer in answers:
            if answer.status == READY:
                worker.ready = True
                self._ended_in_start.discard(worker.worker)
            elif answer.status == REFUSED:
                self._tasks.fail(worker.refusal(answer))
            else:
                worker.answered = came = now()
                self._tasks.finish(*worker.take_answer(answer, self._named))
                self._unpacked.add(now() - came)
        return bool(answers)

    # Deaths.

    def _replace(self, worker: WorkerHandle, code: int) -> None:
        # Repeatedly, because a worker may have sent more answers than one read takes.
        while self._receive(worker):  # its death may be known before its last answers are read, which are still valid
            pass
        self._supervisor.remove(worker)
        if self._tasks.failure is not None:  # an answer said that it cannot start
            return
        needed = worker.worker < self.size  # otherwise it was leaving anyway
        blamed, row, how = worker.doing(), worker.row, cause_of(code)
        name = "" if blamed is None else self._named(blamed.job, row)
        doing = (
            "while it started"
            if not worker.ready
            else f"while loading {name}"
            if blamed is not None
            else "while it was idle"
        )
        what = f"{worker.where} {worker.stuck} {doing}" if worker.stuck else f"{worker.where} died {doing}: {how}"
        why = ""
        spent = needed and self._restarts >= self._max_restarts
        # otherwise it may have been Ctrl-C
        again = worker.worker in self._ended_in_start or not self._supervisor.hears_ctrl_c
        if not worker.ready and code >= 0 and (again or spent):  # it would do so again, every time
            why = "See its stderr output for details; a script that spawns workers needs `if __name__ == '__main__':`."
        elif spent:
            why = f"Workers were replaced {self._restarts} times, and max_restarts={self._max_restarts} allows no more."
        if why:
            self._tasks.fail(partial(WorkerDied, f"{what}. {why}"))
            return
        if not worker.ready:
            self._ended_in_start.add(worker.worker)
        if needed:
            self._restarts += 1
            _logger.warning(
                "%s. It is replaced, and its unfinished work is done again (%d of %d).",
                what,
                self._restarts,
                self._max_restarts,
            )
        if blamed is not None and self._tasks.blame(blamed, row):
            self._tasks.finish(blamed, error=SampleError(f"{name} has killed two workers; the last of them: {how}"))
        # After `blame`, so that a task whose row has killed twice is finished by now, and is not put back.
        self._tasks.requeue(worker.held)
        if needed:
            self._supervisor.launch(worker.worker)

    def _roll_back(self) -> None:
        """After an exception in the middle of a change (Ctrl-C at a bad moment), start new workers, and repeat all
        unfinished tasks.
        """
        if not self._supervisor.working or self._tasks.failure is not None:
            return
        # No half-made state is used. Every live worker goes, and the table is rebuilt from the jobs alone. That is
        # slow, but correct for any interrupted line.
        self._supervisor.replace_all(self.size)
        self._tasks.restart()

    def _on_timeout(self, jobs: Sequence[Job], timeout: float | None) -> None:
        """Kill the worker that one of ``jobs`` has been waiting for.

        The job fails, if the worker was in the middle of it.
        """
        workers = self._supervisor.workers.values()
        held = [(worker, task) for job in jobs for worker in workers for task in worker.held if task.job is job]
        if not held:
            starting = [worker.where for worker in workers if not worker.ready]
            why = f"; {', '.join(starting)} has not finished its start" if starting else ""
            raise TimeoutError(
                f"waited {timeout} s for {self._named(jobs[0])}, which no worker process has begun{why}."
            )
        worker, task = next(((worker, task) for worker, task in held if worker.doing() is task), held[0])
        with self._transaction.begin(self._roll_back):
            begun = worker.doing() is task
            what = self._named(task.job, worker.row if begun else IDLE)
            behind = "" if begun else ", where it has not begun"
            late = TimeoutError(
                f"waited {timeout} s for {what}, in {worker.where}{behind}. That worker is killed and replaced."
            )
            worker.stuck = f"did not answer in time (timeout={timeout}) and was killed"
            worker.kill()  # its death brings back what else it held
            if begun:
                self._tasks.finish(task, error=late)
        if not begun:
            raise late

    def _end_hung(self, pid: int) -> None:
        worker = next(worker for worker in self._supervisor.workers.values() if worker.pid == pid)
        task = worker.doing()
        what = (
            "its start"
            if not worker.ready
            else "the end of a task"
            if task is None
            else self._named(task.job, worker.row)
        )
        why = (
            f"{what} hangs in {worker.where}: each of its threads waits for a lock or for another thread, without a "
            f"time limit, and none is left to wake them. A forked worker has the locks of this process, but not its "
            f"threads, so a thread pool that was used here (polars, OpenMP, a ThreadPoolExecutor) never answers there. "
            f'Pass multiprocessing_context="spawn" or "forkserver", or method="thread", or have each worker make its '
            f"own pool, in worker_init_fn or at first use. If the worker was not forked, that code waits for itself."
        )
        with self._transaction.begin(self._roll_back):
            worker.stuck = "hung and was killed"
            worker.kill()
            if not worker.ready:
                self._tasks.fail(partial(WorkerDied, why))
            elif task is not None:
                self._tasks.finish(task, error=SampleError(why))

    def _named(self, job: Job, row: int = IDLE) -> str:
        return named(self._work, job.task, row)


_answered = attrgetter("answered")


def _load(worker: WorkerHandle) -> int:
    return len(worker.held)


def _abandoned(pool: weakref.ref[ProcessPool], supervisor: Supervisor) -> None:
    """The program ends, or the pool was collected, and then nobody waits for its jobs. A fork is not asked."""
    if (there := pool()) is not None:
        there.shutdown(PATIENCE_S)
    else:
        supervisor.stop(time.monotonic() + PATIENCE_S)
