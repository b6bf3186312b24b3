"""Worker processes: start, watch, replace, end.

One engine, in the consumer's thread, waits on every channel and every death at once, so a result and a death wake it equally. It
needs no helper thread, and shares no lock with a worker (`_zygote` tells what the workers do, `_segments` how results travel).

Where a task is, from `submit` to its result::

    backlog (here) ──► held by one worker, at most queue_size, oldest first ──► done
       ▲                            │ the worker dies
       └──────── at the front ──────┘

A task is a pure function of its address, so doing it again after a death is right. Which task to blame, and which of its rows,
the dead worker's `Area` says: if it is the same row twice, the job gets a `SampleError` instead of a third worker.

Who touches what: the consumer thread everything, under ``_Engine.lock``; any thread `interrupt`, without it; `shutdown`, from
any thread, interrupts first and then takes the lock. A forked child of the consumer's process closes its copies and nothing more.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from penstock._errors import ClosedError, SampleError, WorkerDied
from penstock._pool import IDLE, Job, Work
from penstock._segments import NO_SLOT, Failure, Parcel, Slots, attach, create, unpack
from penstock._zygote import (
    ANSWER,
    BORN,
    DROPS,
    ENDED,
    HELLO,
    ORDER,
    READY,
    REFUSED,
    REPORT,
    SKIPPED,
    TASK,
    VALUE,
    Area,
    Setup,
    buried,
    fork_zygote,
    no_ctrl_c,
    receive,
    watch,
    worker_main,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

_logger = logging.getLogger("penstock")

_MOST_HELD = 64  # tasks a worker may hold: their messages must fit the buffer of its socket, so that a send never blocks
_LIKELY = {
    signal.SIGKILL: "possibly out of memory (the kernel's OOM killer; see dmesg), or killed by hand",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "memory or a mapped file that is not there, for instance a full disk or a truncated file",
    signal.SIGFPE: "a crash in native code",
    signal.SIGILL: "native code built for another processor",
    signal.SIGTERM: "it was asked to end, for instance by a job scheduler",
}


@final
@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """What a `ProcessPool` has done.

    Attributes:
        workers: Worker processes alive.
        busy: Of these, how many have a task.
        waiting: Tasks that no worker has yet.
        tasks: Tasks finished.
        restarts: Workers that died and were replaced.
        slots: Shared-memory slots that hold a result or wait for one, and that workers alive have made.
        slot_bytes: Their size.
    """

    workers: int
    busy: int
    waiting: int
    tasks: int
    restarts: int
    slots: int
    slot_bytes: int


@dataclass(slots=True, eq=False)
class _Entry:
    """A task on its way. ``job`` is None once it was discarded; ``fatal_rows`` are those on which a worker died."""

    job: Job | None
    number: int
    body: bytes
    place: int = 0
    lent: int = NO_SLOT
    fatal_rows: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Seat:
    """One worker process, as the engine sees it."""

    serial: int
    worker: int
    channel: socket.socket
    lifeline: Any
    area: Area
    slots: Slots
    places: list[int]
    pid: int = 0
    ready: bool = False
    held: deque[_Entry] = field(default_factory=deque)

    def close(self) -> None:
        """End-of-file for the worker."""
        self.channel.close()

    def kill(self) -> None:
        """SIGKILL from the kernel, which cannot hit a process that has come to bear the same pid."""
        self.lifeline.close()


# Starting processes and hearing of their deaths: by a zygote of our own, or by multiprocessing.


class _Launcher(Protocol):
    late: list[tuple[int, int]]  # deaths that came while a start was awaited; the poller does not show them again

    def launch(self, seat: _Seat, channel: socket.socket) -> int: ...
    def greeting(self) -> tuple[int, list[int]]: ...
    def deaths(self) -> Iterator[tuple[int, int]]: ...
    def join(self, timeout: float) -> bool: ...
    def kill(self) -> None: ...
    def disown(self) -> None: ...


class _ByZygote:
    """Workers by fork, from a process without threads."""

    def __init__(self, setup: Setup, poller: select.poll) -> None:
        for stream in (sys.stdout, sys.stderr):  # or the child would write what is buffered once more
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.flush()
        with warnings.catch_warnings():  # Python 3.12 warns of threads in this process; the zygote touches nothing that they may hold
            warnings.simplefilter("ignore", DeprecationWarning)
            with no_ctrl_c():
                self._pid, self._control = fork_zygote(setup)
        self.late: list[tuple[int, int]] = []
        poller.register(self._control, select.POLLIN)

    def greeting(self) -> tuple[int, list[int]]:
        return 0, []

    def launch(self, seat: _Seat, channel: socket.socket) -> int:
        try:
            socket.send_fds(self._control, [ORDER.pack(seat.serial, seat.worker)], [channel.fileno()])
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost() from None
        while True:
            serial, what, value = self._report(0)
            if what == ENDED:
                self.late.append((serial, value))
            elif serial == seat.serial and what == BORN:
                return value
            elif serial == seat.serial:
                raise OSError(value, f"worker process {seat.worker} could not be forked: {os.strerror(value)}")

    def deaths(self) -> Iterator[tuple[int, int]]:
        with contextlib.suppress(BlockingIOError):
            while True:
                serial, what, code = self._report(socket.MSG_DONTWAIT)
                if what == ENDED:
                    self.late.append((serial, code))
        while self.late:
            yield self.late.pop(0)

    def join(self, timeout: float) -> bool:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        deadline = time.monotonic() + timeout
        while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if not receive(self._control, REPORT.size)[0]:
                self._reap()
                return True
        return False

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._reap()

    def disown(self) -> None:
        self._control.close()

    def _reap(self) -> None:
        self._control.close()
        with contextlib.suppress(ChildProcessError):  # someone else's waitpid(-1) was quicker
            os.waitpid(self._pid, 0)

    def _report(self, flags: int) -> tuple[int, int, int]:
        message, _ = receive(self._control, REPORT.size, flags)
        if not message:
            raise self._lost()
        serial, what, value = REPORT.unpack(message)
        return serial, what, value

    def _lost(self) -> WorkerDied:
        return WorkerDied(f"the process that forks the workers (pid {self._pid}) has died, {_LIKELY[signal.SIGKILL]}. Build a new loader.")


class _ByContext:
    """Workers by ``multiprocessing``'s forkserver or spawn, which get the setup pickled, once for all of them."""

    def __init__(self, setup: Setup, context: Any, poller: select.poll) -> None:
        try:
            parcel = Parcel(setup, tensors=False)
        except Exception as error:
            raise TypeError(
                f"the dataset (or map_fn, collate_fn, worker_init_fn) cannot be pickled, which worker processes started by "
                f'{context.get_start_method()!r} need: {type(error).__name__}: {error}. Use method="thread" or multiprocessing_context="fork", or '
                f"make it picklable: functions and classes at the top of a module, files and locks opened in the worker."
            ) from error
        self.late: list[tuple[int, int]] = []
        self._context = context
        self._poller = poller
        self._name = setup.name
        self._processes: dict[int, tuple[int, BaseProcess]] = {}
        self._nbytes = parcel.nbytes
        self._fd = create(parcel.nbytes)
        parcel.write(attach(self._fd, parcel.nbytes))

    def greeting(self) -> tuple[int, list[int]]:
        return self._nbytes, [self._fd]

    def launch(self, seat: _Seat, channel: socket.socket) -> int:
        process = self._context.Process(target=worker_main, args=(seat.worker, channel), name=f"{self._name}-{seat.worker}", daemon=True)
        process.start()
        watched = watch(process, owned=self._context.get_start_method() != "forkserver")
        self._processes[watched] = (seat.serial, process)
        self._poller.register(watched, select.POLLIN)
        return int(process.pid)

    def deaths(self) -> Iterator[tuple[int, int]]:
        for watched in self._ended(0.0):
            self._poller.unregister(watched)
            serial, process = self._processes.pop(watched)
            yield serial, buried(process, watched)

    def join(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self._processes and (ended := self._ended(max(0.0, deadline - time.monotonic()))):
            for watched in ended:
                buried(self._processes.pop(watched)[1], watched)
        if self._processes:
            return False
        os.close(self._fd)
        return True

    def kill(self) -> None:
        for _, process in self._processes.values():
            process.kill()
        self.join(1.0)

    def disown(self) -> None:
        for watched, (_, process) in self._processes.items():
            if watched != process.sentinel:
                os.close(watched)
        os.close(self._fd)

    def _ended(self, timeout: float) -> list[int]:
        poller = select.poll()
        for watched in self._processes:
            poller.register(watched, select.POLLIN)
        return [watched for watched, _ in poller.poll(timeout * 1000)]


# The engine.


class _Engine:
    """All of a `ProcessPool` but its handle, so that a handle that is dropped can be cleaned up after."""

    def __init__(self, setup: Setup, queue_size: int, max_restarts: int, context: str | BaseContext | None) -> None:
        self.setup = setup
        self.lock = threading.RLock()  # re-entrant, because a signal handler may shut down in the middle of a wait
        self.owner = os.getpid()
        self.closed = False
        self.interrupted = False
        self.started = False
        self._queue_size = min(queue_size, _MOST_HELD)
        self._max_restarts = max_restarts
        self._context = context
        self._seats: dict[int, _Seat] = {}  # by the channel's file descriptor
        self._entries: dict[int, _Entry] = {}  # by number, which grows: all that is neither done nor discarded
        self._backlog: deque[_Entry] = deque()
        self._failure: Callable[[], BaseException] | None = None  # why no job can be done any more
        self._torn = False  # an exception (Ctrl-C) came out of the middle of a change to the above
        self._next_number = 0
        self._next_serial = 0
        self._tasks = 0
        self._restarts = 0
        self._poller = select.poll()
        self._launcher: _Launcher | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None  # read here, written by `interrupt`

    # Start and end.

    def start(self) -> None:
        if self.started:
            return
        if multiprocessing.current_process().daemon:
            raise RuntimeError('a daemonic process cannot have worker processes of its own. Use method="thread" or num_workers=0 here.')
        context: Any = (
            multiprocessing.get_context(self._context) if self._context is None or isinstance(self._context, str) else self._context
        )
        method = context.get_start_method()
        if method == "forkserver":
            _preload()
        self._launcher = _ByZygote(self.setup, self._poller) if method == "fork" else _ByContext(self.setup, context, self._poller)
        _engines.add(self)
        try:
            self._wake = socket.socketpair()
            for end in self._wake:
                end.setblocking(False)
            self._poller.register(self._wake[0], select.POLLIN)
            for worker in range(self.setup.num_workers):
                self._launch(worker)
        except BaseException:
            self._stop_workers(time.monotonic())
            raise
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
            self._stop_workers(deadline)
            self._fail(lambda: ClosedError("the loader was closed while this was being loaded."))
        finally:
            if got:
                self.lock.release()

    def _stop_workers(self, deadline: float) -> None:
        """By end-of-file; in the second half of the time left, by force."""
        seats = list(self._seats.values())
        for seat in seats:
            seat.area.cells[Area.WANTED] = self._next_number
            with contextlib.suppress(KeyError):
                self._poller.unregister(seat.channel)
            seat.close()
        if self._launcher is not None:
            patience = max(0.0, deadline - time.monotonic())
            ended = self._launcher.join(patience / 2)
            for seat in seats:
                seat.kill()
            if not ended and not self._launcher.join(patience / 2):
                self._launcher.kill()
        self._launcher = None
        self._seats.clear()
        for end in self._wake or ():
            end.close()
        _engines.discard(self)

    def disown(self) -> None:
        """In a forked child: close the copies of what belongs to the parent."""
        for seat in list(self._seats.values()):
            seat.close()
            seat.kill()  # closes this copy of the lifeline; the parent's holds
        self._seats.clear()  # and unmaps the slots
        if self._launcher is not None:
            self._launcher.disown()
        for end in self._wake or ():
            end.close()

    def check_usable(self) -> None:
        if os.getpid() != self.owner:
            raise ClosedError(f"these workers belong to process {self.owner}, of which this one is a fork. Build a new loader here.")
        if self.closed:
            raise ClosedError("these worker processes have ended; build a new loader.")

    # What the consumer calls.

    def submit(self, task: Any) -> Job:
        job = Job(task)
        if self._failure is not None:
            job.error, job.done = self._failure(), True
            return job
        entry = _Entry(job, self._next_number, pickle.dumps(task, 5))
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
                raise self._too_late(jobs[0], timeout)

    def discard(self) -> None:
        self.interrupted = False
        with self._changing():
            self._drain_wake()
            self._fail_jobs(lambda: ClosedError("this was discarded after a jump."))
            for seat in self._seats.values():
                seat.area.cells[Area.WANTED] = self._next_number

    def interrupt(self) -> None:
        self.interrupted = True
        if self._wake is not None:
            with contextlib.suppress(OSError):  # closed, or full: then it wakes anyway
                self._wake[1].send(b"!")

    def _drain_wake(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):
                self._wake[0].recv(65536)

    def pids(self) -> tuple[int, ...]:
        return tuple(seat.pid for seat in sorted(self._seats.values(), key=lambda seat: seat.worker))

    def statistics(self) -> ProcessStatistics:
        seats = list(self._seats.values())
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

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        if self._torn:
            self._mend()
        self._torn = True
        yield
        self._torn = False

    def _turn(self, patience: float | None) -> None:
        """Wait up to ``patience`` seconds (None: for ever) for anything to happen, and deal with all that has."""
        if self._torn:
            self._mend()
        late = self._launcher is not None and bool(self._launcher.late)
        ready = self._poller.poll(0 if late else None if patience is None else max(0.0, patience) * 1000)
        self.check_usable()
        if self.interrupted:
            raise ClosedError("the loader was closed, or moved elsewhere, while a batch was being waited for.")
        if not ready and not late:
            return
        with self._changing():
            for fd, _ in ready:
                seat = self._seats.get(fd)
                if self._wake is not None and fd == self._wake[0].fileno():
                    self._drain_wake()  # of an interrupt that a `discard` has overtaken
                elif seat is None:
                    late = True
                elif not self._receive(seat):
                    self._poller.unregister(fd)  # its death is on the way
            if late and self._failure is None:
                self._bury()
            self._feed()

    def _feed(self) -> None:
        """Hand tasks to the least loaded workers, as long as both are there."""
        while self._backlog:
            free = [seat for seat in self._seats.values() if seat.ready and len(seat.held) < self._queue_size]
            if not free:
                return
            self._hand(min(free, key=lambda seat: len(seat.held)), self._backlog.popleft())

    def _hand(self, seat: _Seat, entry: _Entry) -> None:
        entry.place, entry.lent = seat.places.pop(), seat.slots.lend()
        seat.held.append(entry)
        if entry.job is not None:
            entry.job.worker = seat.worker
        drops = seat.slots.dropped(DROPS)
        message = TASK.pack(entry.number, entry.place, len(entry.body), entry.lent, *drops, *[NO_SLOT] * (DROPS - len(drops)))
        fds = []
        if len(entry.body) <= Area.PLACE:
            seat.area.places[entry.place][: len(entry.body)] = entry.body
        else:
            fds.append(create(len(entry.body)))
            attach(fds[0], len(entry.body))[:] = entry.body
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: its death brings the task back
            if fds:
                socket.send_fds(seat.channel, [message], fds)
            else:
                seat.channel.sendall(message)
        for fd in fds:
            os.close(fd)

    def _receive(self, seat: _Seat) -> bool:
        """Deal with one message of a worker; False where there is none (any more)."""
        try:
            message, fds = receive(seat.channel, ANSWER.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not message:
            return False
        number, status, slot, nbytes = ANSWER.unpack(message)
        for fd in fds:
            seat.slots.add(slot, fd, nbytes)
            os.close(fd)
        if status == READY:
            seat.ready = True
        elif status == REFUSED:
            failure = Failure(*unpack(self._memory(seat, 0, slot, nbytes)))
            where = self._where(seat)
            self._fail(lambda: failure.rebuilt(where, "starting the worker"))
        else:
            entry = seat.held.popleft()
            assert entry.number == number, "a worker answers in the order in which it was asked"
            self._settle(seat, entry, status, slot, nbytes)
        return True

    def _settle(self, seat: _Seat, entry: _Entry, status: int, slot: int, nbytes: int) -> None:
        """Take in the answer to ``entry``, and with it the place and the slot that were lent."""
        seat.places.append(entry.place)
        if slot != entry.lent:
            seat.slots.give_back(entry.lent, useful=slot == NO_SLOT)
        job = entry.job
        if job is None or status == SKIPPED:
            seat.slots.give_back(slot)
            return
        try:
            value = unpack(self._memory(seat, entry.place, slot, nbytes))
        except Exception as error:
            job.error = SampleError(f"{self._named(entry, IDLE)}: the result could not be rebuilt here: {type(error).__name__}: {error}")
            job.error.__cause__ = error
        else:
            if status == VALUE:
                job.value = value
            else:
                job.error = Failure(*value).rebuilt(self._where(seat), self._named(entry, IDLE))
        job.done = True
        del self._entries[entry.number]
        self._tasks += 1

    def _memory(self, seat: _Seat, place: int, slot: int, nbytes: int) -> np.ndarray:
        """Where an answer lies: the slot itself, or a copy of the place, which the next task needs."""
        if slot != NO_SLOT:
            return seat.slots.view(slot)
        return np.frombuffer(seat.area.places[place][:nbytes], np.uint8).copy()

    # Deaths.

    def _bury(self) -> None:
        assert self._launcher is not None
        try:
            for serial, code in self._launcher.deaths():
                for seat in list(self._seats.values()):
                    if seat.serial == serial:
                        self._replace(seat, code)
        except (WorkerDied, OSError) as error:
            self._fail(_again(error))

    def _replace(self, seat: _Seat, code: int) -> None:
        while self._receive(seat):  # what it had sent is as good as ever
            pass
        self._remove(seat)
        if self._failure is not None:  # it refused to start
            return
        blamed = next((entry for entry in seat.held if entry.number == seat.area.cells[Area.DOING]), None)
        row = seat.area.cells[Area.ROW]
        how = _cause(code)
        doing = (
            "while it started" if not seat.ready else "while it was idle" if blamed is None else f"while loading {self._named(blamed, row)}"
        )
        what = f"{self._where(seat)} died {doing}: {how}"
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
                del self._entries[blamed.number]
                blamed.job.error = SampleError(f"{self._named(blamed, row)} has killed two workers; the last of them: {how}")
                blamed.job.done = True
            blamed.fatal_rows.add(row)
        self._backlog.extendleft(reversed(unfinished))
        self._launch(seat.worker)

    def _launch(self, worker: int) -> None:
        assert self._launcher is not None
        nbytes = Area.size(self._queue_size)
        self._next_serial += 1
        setup_bytes, setup_fds = self._launcher.greeting()
        with contextlib.ExitStack() as passing:  # what is passed on to the worker and closed here
            ours, theirs = socket.socketpair()
            passing.enter_context(theirs)
            end, lifeline = os.pipe()
            passing.callback(os.close, end)
            memory = create(nbytes)
            passing.callback(os.close, memory)
            area = Area(attach(memory, nbytes))
            area.cells[Area.ROW], area.cells[Area.DOING] = IDLE, -1
            seat = _Seat(
                serial=self._next_serial,
                worker=worker,
                channel=ours,
                lifeline=os.fdopen(lifeline, "wb", buffering=0),
                area=area,
                slots=Slots(),
                places=list(range(self._queue_size)),
            )
            self._seats[ours.fileno()] = seat
            socket.send_fds(ours, [HELLO.pack(nbytes, setup_bytes)], [memory, end, *setup_fds])
            with no_ctrl_c():
                seat.pid = self._launcher.launch(seat, theirs)
            self._poller.register(ours, select.POLLIN)

    def _remove(self, seat: _Seat) -> None:
        fd = seat.channel.fileno()
        with contextlib.suppress(KeyError):
            self._poller.unregister(fd)
        del self._seats[fd]
        seat.close()
        seat.kill()

    def _mend(self) -> None:
        """After an exception came out of the middle of a change (Ctrl-C at a bad moment): new workers, and everything once more."""
        self._torn = False
        if self._launcher is None or self._failure is not None:
            return
        for seat in list(self._seats.values()):
            self._remove(seat)
        for worker in range(self.setup.num_workers):
            self._launch(worker)
        self._entries = {number: entry for number, entry in self._entries.items() if entry.job is not None and not entry.job.done}
        self._backlog = deque(self._entries.values())

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

    def _too_late(self, job: Job, timeout: float | None) -> TimeoutError:
        for seat in self._seats.values():
            for entry in seat.held:
                if entry.job is job:
                    doing = entry.number == seat.area.cells[Area.DOING]
                    row = seat.area.cells[Area.ROW] if doing else IDLE
                    line = "" if doing else ", where it has not begun"
                    return TimeoutError(f"waited {timeout} s for {self._named(entry, row)}, in {self._where(seat)}{line}.")
        waiting = next((entry for entry in self._backlog if entry.job is job), None)
        return TimeoutError(
            f"waited {timeout} s for {'a job' if waiting is None else self._named(waiting, IDLE)}, which no worker process has begun."
        )

    def _named(self, entry: _Entry, row: int) -> str:
        try:
            return self.setup.work.name(entry.job.task if entry.job is not None else pickle.loads(entry.body), row)
        except Exception:  # a name that cannot be made must not hide what happened
            return f"task {entry.number}, row {row}"

    def _where(self, seat: _Seat) -> str:
        return f"worker process {seat.worker} (pid {seat.pid})"


def _again(error: BaseException) -> Callable[[], BaseException]:
    return lambda: type(error)(*error.args)


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}, so it ended itself (os._exit, or native code that calls exit)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"signal {name}, {_LIKELY.get(signal.Signals(-code), 'sent by another process or by itself')}"


def _preload() -> None:
    """Have the fork server import torch and the worker's code once, unless the user has chosen what it imports."""
    from multiprocessing import forkserver

    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        forkserver.set_forkserver_preload(["__main__", "torch", __name__])


# A fork of this process would keep the workers' pipes open, and so keep the workers from ending with this process.
_engines: weakref.WeakSet[_Engine] = weakref.WeakSet()


def _disown_all() -> None:
    for engine in list(_engines):
        with contextlib.suppress(Exception):
            engine.disown()
    _engines.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


@final
class ProcessPool:
    """`Pool` of ``num_workers`` processes that do ``work``.

    Args:
        work: Reaches each worker once: by fork, or pickled.
        num_workers: At least 1.
        queue_size: Tasks that a worker may hold, the one it does included; 64 at most are used.
        max_restarts: How many workers may be replaced in the pool's life, all together. Not a rate: a job that runs for weeks
            should end with a reason rather than lose a worker a day unseen.
        multiprocessing_context: A start method or context; default: multiprocessing's for the platform.
        worker_init_fn: Called with the worker's number in each worker as it starts, after seeding.
        seed: What the workers' own generators are seeded from, together with their numbers.
        name: Prefix of the processes' names.

    Raises:
        ValueError: An argument makes no sense.
        RuntimeError: The platform has no Unix sockets that pass file descriptors (Windows).
    """

    def __init__(
        self,
        work: Work,
        num_workers: int,
        *,
        queue_size: int = 2,
        max_restarts: int = 8,
        multiprocessing_context: str | BaseContext | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        seed: int = 0,
        name: str = "penstock-map",
    ) -> None:
        for what, number, least in (("num_workers", num_workers, 1), ("queue_size", queue_size, 1), ("max_restarts", max_restarts, 0)):
            if number < least:
                raise ValueError(f"{what}={number} must be at least {least}.")
        if isinstance(multiprocessing_context, str):
            multiprocessing.get_context(multiprocessing_context)  # refuses a name that it does not know
        if not hasattr(socket, "send_fds"):
            raise RuntimeError(
                'worker processes need Unix sockets that pass file descriptors, which this platform has not. Use method="thread".'
            )
        setup = Setup(work, num_workers, seed, worker_init_fn, name)
        self._engine = _Engine(setup, queue_size, max_restarts, multiprocessing_context)
        self._finalizer = weakref.finalize(self, self._engine.shutdown, 2.0)

    def start(self) -> None:
        """Start the workers; again, does nothing.

        Raises:
            TypeError: The start method pickles ``work``, and it cannot be pickled.
            ClosedError: After `shutdown`, or in a fork of the process that made the pool.
        """
        self._engine.check_usable()
        with self._engine.lock:
            self._engine.start()

    def submit(self, task: Any) -> Job:
        """Hand over a task; never blocks on a worker. Raises what pickling ``task`` raises."""
        self._engine.check_usable()
        with self._engine.lock:
            return self._engine.submit(task)

    def wait(self, jobs: Iterable[Job], timeout: float | None) -> None:
        """Until one of ``jobs`` is done.

        Raises:
            TimeoutError: ``timeout`` seconds are over; says what the first of ``jobs`` is, and where.
            ClosedError: After `interrupt` (until `discard`), after `shutdown`, or in a fork.
            ValueError: None of them is on its way.
        """
        self._engine.check_usable()
        with self._engine.lock:
            self._engine.wait(list(jobs), timeout)

    def discard(self) -> None:
        """Forget every job in flight, and any interrupt; jobs that are not done fail, for whoever still waits for them."""
        self._engine.check_usable()
        with self._engine.lock:
            self._engine.discard()

    def interrupt(self) -> None:
        """Make the `wait` that is going on, and every one up to `discard`, raise `ClosedError`; from any thread."""
        self._engine.interrupt()

    def shutdown(self, timeout: float = 2.0) -> None:
        """End the workers within ``timeout`` seconds, by force in the second half; again, does nothing. From any thread."""
        self._finalizer.detach()
        self._engine.shutdown(timeout)

    def statistics(self) -> ProcessStatistics:
        """What the pool has done so far, and holds now."""
        return self._engine.statistics()

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids, by worker number."""
        return self._engine.pids()
