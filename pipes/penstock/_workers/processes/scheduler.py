"""The engine of a pool of processes: which worker has which task, who has died, who is replaced.

One engine, in the consumer's thread, waits on every channel and every death at once, so a result and a death wake it equally. It
needs no helper thread, and shares no lock with a worker.

Where a task is, from `submit` to its result::

    backlog (here) ──► held by one worker, at most queue_size, oldest first ──► done
       ▲                            │ the worker dies
       └──────── at the front ──────┘

A task is a pure function of its address, so doing it again after a death is right. Which task to blame, and which of its rows,
the dead worker's `Area` says: if it is the same row twice, the job gets a `SampleError` instead of a third worker.

Who touches what: the consumer thread everything, under ``Engine.lock``; any thread `interrupt`, without it; `shutdown`, from
any thread, interrupts first and then takes the lock. A forked child of the consumer's process closes its copies and nothing more.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections import deque
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from penstock._errors import ClosedError, SampleError, WorkerDied
from penstock._memory.slots import NO_SLOT
from penstock._statistics import ProcessStatistics
from penstock._workers.lifetime import PATIENCE_S
from penstock._workers.pool import IDLE, Job
from penstock._workers.processes.deaths import cause_of
from penstock._workers.processes.protocol import READY, REFUSED, SKIPPED, VALUE, Area, Setup
from penstock._workers.processes.remote_error import RemoteError
from penstock._workers.processes.supervisor import Supervisor
from penstock._workers.processes.worker_handle import MOST_HELD, PendingTask, WorkerHandle

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import BaseContext

    from penstock._workers.processes.worker_handle import Answer


_logger = logging.getLogger("penstock")


class Scheduler:
    """All of a `ProcessPool` but its handle, so that a handle that is dropped can be cleaned up after."""

    def __init__(self, setup: Setup, queue_size: int, refill_at: int, max_restarts: int, context: str | BaseContext | None) -> None:
        self.setup = setup
        self.lock = threading.RLock()  # re-entrant, because a signal handler may shut down in the middle of a wait
        self.owner = os.getpid()
        self.closed = False
        self.interrupted = False
        self.started = False
        self._at_exit: Finalize | None = None
        self._queue_size = min(queue_size, MOST_HELD)
        self._refill_at = min(refill_at, self._queue_size - 1)
        self._supervisor = Supervisor(setup, self._queue_size, context)
        self._max_restarts = max_restarts
        self._entries: dict[int, PendingTask] = {}  # by number, which grows: all that is neither done nor discarded
        self._backlog: deque[PendingTask] = deque()
        self._failure: Callable[[], BaseException] | None = None  # why no job can be done any more
        self._torn = False  # an exception (Ctrl-C) came out of the middle of a change to the above
        self._next_number = 0
        self._tasks = 0
        self._restarts = 0

    # Start and end.

    def start(self) -> None:
        if self.started:
            return
        self.owner = os.getpid()
        self._supervisor.start()
        # At exit multiprocessing sends SIGTERM to the processes that it has started and waits for them; before that it calls its finalizers.
        self._at_exit = Finalize(None, self.shutdown, (PATIENCE_S,), exitpriority=0)
        self.started = True

    def shutdown(self, timeout: float) -> None:
        if self.closed or os.getpid() != self.owner:
            return
        self.interrupt()
        deadline = time.monotonic() + timeout
        got = self.lock.acquire(timeout=timeout)  # whoever holds it was interrupted, and is stuck in user code if it does not let go
        try:
            if self.closed:
                return
            self.closed = True
            self._forget()
            self._supervisor.stop(deadline)
            if self._at_exit is not None:
                self._at_exit.cancel()
            self._fail(lambda: ClosedError("the loader was closed while this was being loaded."))
        finally:
            if got:
                self.lock.release()

    def check_usable(self) -> None:
        if self.started and os.getpid() != self.owner:
            raise ClosedError(f"these workers belong to process {self.owner}, of which this one is a fork. Build a new loader here.")
        if self.closed:
            raise ClosedError("these worker processes have ended; build a new loader.")

    # What the consumer calls.

    def submit(self, task: Any) -> Job:
        job = Job(task)
        if self._failure is not None:
            job.error, job.done = self._failure(), True
            return job
        entry = PendingTask(job, self._next_number, pickle.dumps(task, 5))
        with self._changing():
            self._next_number += 1
            self._entries[entry.number] = entry
            self._backlog.append(entry)
            self._feed()
        return job

    def wait(self, jobs: list[Job], timeout: float | None) -> None:
        if not self.started:
            raise RuntimeError("these workers have not been started.")
        deadline = None if timeout is None else time.monotonic() + timeout
        patience: float | None = 0.0
        while True:
            self._turn(patience)
            if any(job.done for job in jobs):
                return
            if not self._entries:
                raise ValueError("none of these jobs is on its way in this pool, so there is nothing to wait for.")
            patience = None if deadline is None else deadline - time.monotonic()
            if patience is not None and patience <= 0:
                self._give_up(jobs, timeout)
                return

    def discard(self) -> None:
        self.interrupted = False
        with self._changing():
            self._supervisor.drain_wake()
            self._fail_jobs(lambda: ClosedError("this was discarded after a jump."))
            self._forget()

    def _forget(self) -> None:
        """Have the workers skip what they hold."""
        for seat in self._supervisor.seats.values():
            seat.area.cells[Area.WANTED] = self._next_number

    def interrupt(self) -> None:
        self.interrupted = True
        self._supervisor.wake()

    def pids(self) -> tuple[int, ...]:
        return tuple(seat.pid for seat in sorted(self._supervisor.seats.values(), key=lambda seat: seat.worker))

    def statistics(self) -> ProcessStatistics:
        seats = list(self._supervisor.seats.values())
        counts = [seat.slots.count() for seat in seats]
        return ProcessStatistics(
            workers=len(seats),
            busy=sum(bool(seat.held) for seat in seats),
            waiting=len(self._backlog),
            tasks=self._tasks,
            restarts=self._restarts,
            slots=sum(slots for slots, _ in counts),
            slot_bytes=sum(nbytes for _, nbytes in counts),
        )

    # The event loop.

    def _changing(self) -> Scheduler:
        """For a ``with`` statement around every change: what an exception (Ctrl-C) came out of the middle of is mended before the next one."""
        if self._torn:
            self._mend()
        self._torn = True
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._torn = kind is not None

    def _turn(self, patience: float | None) -> None:
        """Wait up to ``patience`` seconds (None: for ever) for anything to happen, and deal with all that has."""
        if self._torn:
            self._mend()
        late = self._supervisor.late
        ready = self._supervisor.poller.poll(0 if late else None if patience is None else max(0.0, patience) * 1000)
        self.check_usable()
        if self.interrupted:
            raise ClosedError("the loader was closed, or moved elsewhere, while a batch was being waited for.")
        if not ready and not late:
            return
        with self._changing():
            for fd, _ in ready:
                seat = self._supervisor.seats.get(fd)
                if self._supervisor.is_wake(fd):
                    self._supervisor.drain_wake()  # of an interrupt that a `discard` has overtaken
                elif seat is None:
                    late = True
                elif not self._receive(seat):
                    self._supervisor.deafen(seat)  # its death is on the way
            if late and self._failure is None:
                self._bury()
            self._feed()

    def _feed(self) -> None:
        """Hand tasks to the least loaded workers, as long as both are there.

        While the crew is still starting, each gets one task: the one that is ready first must not be given all there is.
        """
        if not self._backlog:
            return
        seats = self._supervisor.seats.values()
        most, refill_at = (self._queue_size, self._refill_at) if self._restarts or all(seat.ready for seat in seats) else (1, 0)
        open_to = [seat for seat in seats if len(seat.held) <= refill_at and seat.ready and not seat.stuck]
        while self._backlog and open_to:
            seat = min(open_to, key=_load) if len(open_to) > 1 else open_to[0]
            if len(seat.held) >= most:
                break
            entry = self._backlog.popleft()
            try:
                seat.hand(entry)
            except OSError as error:  # no descriptor, or no memory, for a large task
                self._finish(entry, error=error)
        for seat in open_to:
            if seat.unsent:
                seat.flush()

    def _receive(self, seat: WorkerHandle) -> bool:
        """Deal with what a worker has sent; False where there is nothing (any more)."""
        answers = seat.answers()
        for answer in answers:
            if answer.status == READY:
                seat.ready = True
            elif answer.status == REFUSED and answer.trouble is not None:
                self._fail(_again(answer.trouble))
            elif answer.status == REFUSED:
                self._fail(_refusal(RemoteError(*seat.value(0, answer)), seat.where))
            else:
                entry = seat.held.popleft()
                assert entry.number == answer.number, "a worker answers in the order in which it was asked"
                self._settle(seat, entry, answer)
        return bool(answers)

    def _settle(self, seat: WorkerHandle, entry: PendingTask, answer: Answer) -> None:
        """Take in the answer to ``entry``, and with it the place and the slot that were lent."""
        seat.places.append(entry.place)
        if answer.slot != entry.lent:
            seat.slots.give_back(entry.lent, useful=answer.slot == NO_SLOT)
        job = entry.job
        if answer.trouble is not None:
            self._finish(entry, error=answer.trouble)
        elif job is None or answer.status == SKIPPED:
            seat.slots.give_back(answer.slot)
        else:
            try:
                value = seat.value(entry.place, answer)
            except Exception as error:
                lost = SampleError(f"{self._named(entry, IDLE)}: the result could not be rebuilt here: {type(error).__name__}: {error}")
                lost.__cause__ = error
                self._finish(entry, error=lost)
            else:
                if answer.status == VALUE:
                    self._finish(entry, value)
                else:
                    self._finish(entry, error=RemoteError(*value).rebuilt(seat.where, self._named(entry, IDLE)))

    def _finish(self, entry: PendingTask, value: Any = None, error: BaseException | None = None) -> None:
        """The outcome of a task, unless nobody wants it any more."""
        job = entry.job
        if job is not None:
            job.value, job.error = value, error
            job.done = True
            del self._entries[entry.number]
            self._tasks += 1

    # Deaths.

    def _bury(self) -> None:
        try:
            for seat, code in self._supervisor.deaths():
                self._replace(seat, code)
        except (WorkerDied, OSError) as error:
            self._fail(_again(error))

    def _replace(self, seat: WorkerHandle, code: int) -> None:
        while self._receive(seat):  # what it had sent is as good as ever
            pass
        self._supervisor.remove(seat)
        if self._failure is not None:  # it refused to start
            return
        blamed = seat.doing()
        row = seat.area.cells[Area.ROW]
        how = cause_of(code)
        doing = (
            "while it started" if not seat.ready else "while it was idle" if blamed is None else f"while loading {self._named(blamed, row)}"
        )
        what = f"{seat.where} {seat.stuck} {doing}" if seat.stuck else f"{seat.where} died {doing}: {how}"
        if not seat.ready and code >= 0:
            self._fail(
                lambda: WorkerDied(
                    f"{what}. What it wrote to stderr says more; a script that spawns workers needs `if __name__ == '__main__':`."
                )
            )
            return
        if self._restarts >= self._max_restarts:
            self._fail(
                lambda: WorkerDied(
                    f"{what}. Workers were replaced {self._restarts} times, and max_restarts={self._max_restarts} allows no more."
                )
            )
            return
        self._restarts += 1
        _logger.warning(
            "%s. It is replaced, and what it had not finished is done again (%d of %d).", what, self._restarts, self._max_restarts
        )
        unfinished = [entry for entry in seat.held if entry.job is not None]
        if blamed is not None and blamed.job is not None:
            if row in blamed.fatal_rows:
                unfinished.remove(blamed)
                self._finish(blamed, error=SampleError(f"{self._named(blamed, row)} has killed two workers; the last of them: {how}"))
            blamed.fatal_rows.add(row)
        self._backlog.extendleft(reversed(unfinished))
        self._supervisor.launch(seat.worker)

    def _mend(self) -> None:
        """After an exception came out of the middle of a change (Ctrl-C at a bad moment): new workers, and everything once more."""
        if not self._supervisor.working or self._failure is not None:
            self._torn = False
            return
        for seat in list(self._supervisor.seats.values()):
            self._supervisor.remove(seat)
        for worker in range(self.setup.num_workers):
            self._supervisor.launch(worker)
        self._entries = {number: entry for number, entry in self._entries.items() if entry.job is not None and not entry.job.done}
        self._backlog = deque(self._entries.values())
        self._torn = False  # and not before: what interrupts this leaves it to be done again

    # Failures.

    def _fail(self, why: Callable[[], BaseException]) -> None:
        """From now on, every job fails."""
        self._failure = why
        self._fail_jobs(why)

    def _fail_jobs(self, why: Callable[[], BaseException]) -> None:
        for entry in self._entries.values():
            if entry.job is not None:
                entry.job.error, entry.job.done = why(), True
                entry.job = None
        self._entries.clear()
        self._backlog.clear()

    def _give_up(self, jobs: list[Job], timeout: float | None) -> None:
        """Kill the worker that one of ``jobs`` has been waiting for. The job fails, if the worker was in the middle of it."""
        held = [(seat, entry) for job in jobs for seat in self._supervisor.seats.values() for entry in seat.held if entry.job is job]
        seat, entry = next((one for one in held if one[0].doing() is one[1]), held[0] if held else (None, None))
        if seat is None or entry is None:
            waiting = next((entry for entry in self._backlog if entry.job is jobs[0]), None)
            what = "a job" if waiting is None else self._named(waiting, IDLE)
            starting = [seat.where for seat in self._supervisor.seats.values() if not seat.ready]
            why = f"; {', '.join(starting)} has not finished its start" if starting else ""
            raise TimeoutError(f"waited {timeout} s for {what}, which no worker process has begun{why}.")
        with self._changing():
            begun = seat.doing()
            what = self._named(entry, seat.area.cells[Area.ROW] if begun is entry else IDLE)
            behind = "" if begun is entry else ", where it has not begun"
            late = TimeoutError(f"waited {timeout} s for {what}, in {seat.where}{behind}. That worker is killed and replaced.")
            seat.stuck = f"did not answer in time (timeout={timeout}) and was killed"
            seat.kill()
            if begun is entry:
                self._finish(entry, error=late)
                entry.job = None
        if begun is not entry:
            raise late

    def _named(self, entry: PendingTask, row: int) -> str:
        try:
            return self.setup.work.name(entry.job.task if entry.job is not None else pickle.loads(entry.body), row)
        except Exception:  # a name that cannot be made must not hide what happened
            return f"task {entry.number}, row {row}"


def _again(error: BaseException) -> Callable[[], BaseException]:
    return lambda: type(error)(*error.args)


def _refusal(failure: RemoteError, where: str) -> Callable[[], BaseException]:
    return lambda: failure.rebuilt(where, "starting the worker")


def _load(seat: WorkerHandle) -> int:
    return len(seat.held)
