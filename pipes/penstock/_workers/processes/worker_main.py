"""A worker process: its loop, and how it begins and ends.

A worker talks to the consumer over a socket pair of its own, and shares an `Area` with it, which has the tasks, the
small answers and the row being loaded. Large answers are in slots (`slot_maker`). Nothing is shared that a killed
process could hold: no lock, no queue.

How a worker ends. End-of-file on its socket tells an idle worker to leave. A worker in the middle of a task is ended by
its *lifeline*, a pipe on which nothing is ever sent, and whose other end only the consumer's process holds. When that
end closes, because of `shutdown` or because the process was killed, the kernel sends SIGKILL. (``PR_SET_PDEATHSIG``
would not work: it fires when the thread that forked ends, and does not reach grandchildren.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
from time import thread_time_ns
from typing import Any

import numpy as np
import numpy.random  # before the fork, or each worker would import it
import torch
from torch.utils.data._utils import worker as torch_worker

from penstock._errors import SampleError
from penstock._memory.modes import in_neutral_modes
from penstock._memory.parcel import Parcel, unpack
from penstock._memory.shared_memory import attach
from penstock._memory.slots import NO_SLOT
from penstock._workers.meter import Meter, active_ns, measuring, now, traced
from penstock._workers.pool import IDLE, Work
from penstock._workers.processes.main_module import explained
from penstock._workers.processes.own_offsets import own_offsets
from penstock._workers.processes.protocol import (
    ANSWER,
    AT_ONCE,
    ERROR,
    HELLO,
    MOST_FDS,
    NO_DESCRIPTORS,
    READY,
    REFUSED,
    SKIPPED,
    TASK,
    VALUE,
    Area,
    PassedFd,
    Setup,
    receive,
)
from penstock._workers.processes.remote_error import RemoteError
from penstock._workers.processes.signals import let_forks_be_terminated, set_signals
from penstock._workers.processes.slot_maker import WorkerSlots


@in_neutral_modes  # a fork inherits the consumer's modes
def worker_main(worker: int, channel: socket.socket, setup: Setup | None = None) -> None:
    """Answer tasks until end-of-file. ``setup`` is inherited by fork; None: it comes over the channel, pickled."""
    set_signals()
    let_forks_be_terminated()
    hello, fds = receive(channel, HELLO.size, most_fds=MOST_FDS)
    if not hello:
        return
    area_bytes, setup_bytes = HELLO.unpack(hello)
    area = Area(attach(fds[0], area_bytes))
    os.close(fds[0])
    _end_with(fds[1])
    server = _Server(worker, channel, area)
    try:
        if setup is None:
            PassedFd.received = fds[3:]
            setup = _load(fds[2], setup_bytes)
        else:
            own_offsets()
        prepare(setup, worker)
    except BaseException as error:  # from user code, and the consumer must see whatever that raises
        server.refuse(error)
        return
    try:
        server.serve(setup.work)
    except (BrokenPipeError, ConnectionResetError):  # the consumer has gone
        return
    except OSError as error:
        # user code left too many open; a new worker does the task again
        if error.errno in (errno.EMFILE, errno.ENFILE):
            os._exit(NO_DESCRIPTORS)
        raise
    finally:
        if callable(close := getattr(setup.work, "close", None)):
            with contextlib.suppress(Exception):
                close()


def _load(fd: int, nbytes: int) -> Setup:
    """The setup; its NumPy arrays are private (copy-on-write) views of memory that all workers share."""
    memory = attach(fd, nbytes, private=True)
    os.close(fd)
    try:
        setup: Setup = unpack(np.frombuffer(memory, np.uint8))
    except AttributeError as error:
        raise explained(error) from None
    return setup


def prepare(setup: Setup, worker: int) -> None:
    """Set up a new worker as `DataLoader` does: one thread, its own seeds, the worker info, the user's function."""
    torch.set_num_threads(1)
    traced.clear()  # a fork has the consumer's
    seed = (setup.seed + worker) % 2**63
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(np.random.SeedSequence([setup.seed % 2**63, worker]).generate_state(4))
    dataset = getattr(setup.work, "dataset", None)
    info: Any = torch_worker.WorkerInfo  # Any, because its fields differ between versions of torch
    torch_worker._worker_info = info(id=worker, num_workers=setup.num_workers, seed=seed, dataset=dataset)
    if setup.worker_init_fn is not None:
        try:
            setup.worker_init_fn(worker)
        except Exception as exc:
            if dataset is None:
                with contextlib.suppress(Exception):  # a frozen exception takes no note
                    exc.add_note(
                        "in worker_init_fn: no dataset is read in this process. An IterableDataset without lanes= is "
                        "read in the consumer's; with lanes=, worker_init_fn is called for each lane, and sees its copy"
                    )
            raise


def parcel_of(value: Any, where: str) -> Parcel:
    """A worker's result, ready to be sent.

    Raises:
        SampleError: It cannot be pickled.
    """
    try:
        return Parcel(value)
    except BaseException as error:  # a user's __reduce__ may raise anything
        kind = type(value[0] if type(value).__module__.startswith("penstock.") else value)  # a wrapper of ours
        raise SampleError(
            f"the result, a {kind.__module__}.{kind.__qualname__}, cannot be pickled, so it cannot leave {where}: "
            f"{type(error).__name__}: {error}. Return tensors, arrays or plain Python objects; or read a map-style "
            f'dataset by threads (method="thread").'
        ) from error


_FIRST, _LOOK = 16, 64
"""What a worker waits for is looked at after each of so many first tasks, then after every 64th: a look takes 16 us."""


class _Server:
    """A worker's side of its channel."""

    def __init__(self, worker: int, channel: socket.socket, area: Area) -> None:
        self._where = f"worker process {worker} (pid {os.getpid()})"
        self._channel = channel
        self._area = area
        self._slots = WorkerSlots()
        self._tasks = 0
        self._keeps_policy = not _let_the_consumer_run(mostly_waits=False)  # the user chose another
        self._looked = 0, active_ns(), thread_time_ns()
        self._done = 0  # when the task's value was there
        measuring.set(area.meter)
        # what the consumer was handling when it forked; Python takes it for the context of every error here
        self._inherited = sys.exc_info()[1]

    def serve(self, work: Work) -> None:
        """Answer tasks, in the order in which they arrive, until end-of-file."""
        words = self._area.words
        self._channel.sendall(ANSWER.pack(0, READY, NO_SLOT, 0, 0, 0))
        while True:
            message, fds = receive(self._channel, TASK.size * AT_ONCE)
            if not message:
                return
            for number, place, nbytes, lent, *drops in TASK.iter_unpack(message):
                self._slots.drop(drops)
                if number < words[Area.WANTED]:
                    self._channel.sendall(ANSWER.pack(number, SKIPPED, NO_SLOT, 0, 0, 0))
                    continue
                # Before the work: if the task kills this process, the consumer reads here which task it was.
                words[Area.DOING] = number
                if nbytes > Area.PLACE and not fds:
                    raise OSError(errno.EMFILE, "no room for the task's file descriptor")
                body = attach(fds[0], nbytes) if nbytes > Area.PLACE else self._area.places[place][:nbytes]
                self._slots.begin(self._area.places[place], lent)
                self._area.meter.begin()
                status, parcel = self._do(work, body)
                del body
                self._answer(number, status, parcel)
                self._area.meter.end()
                self._look_at_waits()
                del parcel  # or this frame would keep the result alive while it waits for the next task
                words[Area.DOING] = -1
            for fd in fds:
                os.close(fd)

    def _look_at_waits(self) -> None:
        self._tasks += 1
        if not self._keeps_policy and (self._tasks < _FIRST or self._tasks % _LOOK == 0):
            before, self._looked = self._looked, (self._area.meter.words[Meter.BUSY], active_ns(), thread_time_ns())
            busy, active, computed = (after - then for after, then in zip(self._looked, before, strict=True))
            _let_the_consumer_run(mostly_waits=busy - active > computed)  # what it waits for a free core does not count

    def refuse(self, error: BaseException) -> None:
        """Tell the consumer why this worker cannot work."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._slots.begin(self._area.places[0], NO_SLOT)
            self._answer(0, REFUSED, self._failure(error))

    def _do(self, work: Work, body: memoryview) -> tuple[int, Parcel]:
        task = None
        try:
            task = pickle.loads(body)
            value = work(task, self._area.row, self._slots.allocate)
        except BaseException as error:  # from user code, SystemExit and the like are errors too
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                # this closes the files that user code left open; a new worker does the task again
                os._exit(NO_DESCRIPTORS)
            with contextlib.suppress(Exception):  # a frozen exception takes no note
                error.add_note(f"in {self._where}")
                if "process group has not been initialized" in str(error):
                    error.add_note(
                        "worker processes belong to no process group: ask for the rank in your training process, and "
                        "give it to the dataset as an argument. (The loader splits data by rank: the dataset must not.)"
                    )
            return ERROR, self._failure(error)
        finally:
            self._area.row[0] = IDLE
            self._done = now()
            for one in traced:
                one.task(task, self._area.meter.words[Meter.SINCE], self._done)
        try:
            return VALUE, parcel_of(value, self._where)
        except SampleError as refused:
            refused.add_note(f"while loading {work.name(task, IDLE)}")
            return ERROR, self._failure(refused)

    def _answer(self, number: int, status: int, parcel: Parcel) -> None:
        try:
            slot, size, start, end, fd = self._slots.send(parcel)
        except MemoryError as error:
            # Short enough for the task's place, because there is no memory for a slot.
            self._answer(number, ERROR, self._failure(error, Area.PLACE))
            return
        message = ANSWER.pack(number, status, slot, size, start, end)
        if status == VALUE:
            self._area.meter.pack.add(now() - self._done)
        if fd is None:
            self._channel.sendall(message)
        else:
            socket.send_fds(self._channel, [message], [fd])
            os.close(fd)

    def _failure(self, error: BaseException, room: int | None = None) -> Parcel:
        failure = RemoteError.of(error, self._inherited)
        return Parcel(tuple(failure if room is None else failure.short(room)))


def _let_the_consumer_run(*, mostly_waits: bool) -> bool:
    """Tell Linux's scheduler that this process must not take the consumer's core when a task wakes it, unless its tasks
    mostly wait for something else.

    Without it, on 2 cores, each of the tasks that a training loop sent now and then cost that loop 1 to 2 ms: the
    worker woke up on the loop's core and did the task there. The demo's training loop waited 0.24 ms for a batch on
    average, and 0.10 with it. A worker that wakes up after each read of a disk or a network, however, then waits for a
    free core each time: on a busy machine, samples that sleep 1 ms came 0.4 times as fast as without it. Returns
    whether the policy was changed.
    """
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or forbidden
        before, after = (os.SCHED_BATCH, os.SCHED_OTHER) if mostly_waits else (os.SCHED_OTHER, os.SCHED_BATCH)
        if os.sched_getscheduler(0) == before:
            os.sched_setscheduler(0, after, os.sched_param(0))
            return True
    return False


def _end_with(lifeline: int) -> None:
    """Make the kernel kill this process once no process holds the other end of ``lifeline``."""
    try:
        import fcntl

        # A pipe becomes readable when its other end closes. With O_ASYNC the kernel notifies the owner by a signal, and
        # F_SETSIG selects a signal that nothing in this process can block.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined,unused-ignore]
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except (ImportError, AttributeError, OSError):  # not Linux
        end = threading.Thread(
            target=lambda: (os.read(lifeline, 1), os._exit(1)), name="penstock-lifeline", daemon=True
        )
        end.start()
        return
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    if poller.poll(0):  # it was closed before the signal was armed, so none will come
        os._exit(1)
