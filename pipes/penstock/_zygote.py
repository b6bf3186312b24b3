"""What runs in the child processes: a worker's loop, and the zygote that forks workers.

Each worker talks to the consumer over one socket pair of its own, in messages of fixed size (under 512 bytes, hence never torn),
and shares one `Area` with it: tasks, small answers and the row being loaded lie there, large answers in slots (`_segments`).
Nothing is shared that a killed process could hold: no lock, no queue.

Who ends whom. End-of-file on its socket tells an idle worker to leave. A worker in the middle of a task is ended by its
*lifeline*: a pipe on which nothing is ever sent and whose other end only the consumer's process holds; when that end closes, be
it by `shutdown` or because the process was killed, the kernel sends SIGKILL. (``PR_SET_PDEATHSIG`` would not do: it follows the
thread that forked, and does not exist for grandchildren.)

The zygote is forked from the consumer's process once, at the start, holds the work, has one thread and runs no user code; so a
replacement is a fork of a process without threads, and sees the dataset as it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import pickle
import random
import select
import signal
import socket
import struct
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from penstock._errors import SampleError
from penstock._pool import IDLE, Work
from penstock._segments import NO_SLOT, Failure, Parcel, SlotMaker, attach, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

DROPS = 8
"""Slots that one task message can tell the worker to drop."""

HELLO = struct.Struct("<2q")  # bytes of the area, bytes of the pickled setup or 0; with their fds and the lifeline's
TASK = struct.Struct(
    f"<4q{DROPS}q"
)  # number, place, bytes (of a segment of its own, if an fd comes along), slot lent or NO_SLOT; slots to drop
ANSWER = struct.Struct("<4q")  # task number, status, a new slot's size (with an fd); or NO_SLOT, bytes in the task's place
ORDER = struct.Struct("<2q")  # to the zygote: serial, worker; with the worker's end of its socket pair
REPORT = struct.Struct("<3q")  # from the zygote: serial, what, pid or exit code or errno

READY, REFUSED, VALUE, ERROR, SKIPPED = range(5)  # statuses of an ANSWER
BORN, ENDED, NOT_BORN = range(3)  # what a REPORT says
_FDS_ROOM = socket.CMSG_LEN(3 * struct.calcsize("i"))
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass(frozen=True)
class Setup:
    """What every worker is given once."""

    work: Work
    num_workers: int
    seed: int
    worker_init_fn: Callable[[int], None] | None
    name: str


class Area:
    """Memory that one worker shares with the consumer: three cells, and a place for each task that the worker can hold.

    The consumer writes a task into a free place; the worker writes its answer there too, if it is small.

    Attributes:
        row: The first cell, as a `Work` gets it.
        cells: int64. ``ROW``: the row being loaded, or `IDLE`. ``DOING``: number of the task being done, or -1; both are read after
            a death. ``WANTED``: the consumer no longer wants tasks of lower numbers.
    """

    ROW, DOING, WANTED = range(3)
    PLACE = 65536  # bytes
    HEAD = 64

    def __init__(self, memory: memoryview) -> None:
        self.cells = memory[: self.HEAD].cast("q")
        self.row: Any = self.cells[self.ROW : self.ROW + 1]
        self.places = [memory[start : start + self.PLACE] for start in range(self.HEAD, len(memory), self.PLACE)]

    @classmethod
    def size(cls, places: int) -> int:
        """Bytes of an area with that many places."""
        return cls.HEAD + places * cls.PLACE


def receive(channel: socket.socket, nbytes: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """One message and the file descriptors (up to 3) that came with it; empty at end-of-file.

    Raises:
        BlockingIOError: ``flags`` say not to wait, and nothing is there.
    """
    # Not `socket.recv_fds`: it drops its flags (Python 3.11).
    try:
        data, ancillary, _, _ = channel.recvmsg(nbytes, _FDS_ROOM, flags | _CLOEXEC)
    except ConnectionResetError:
        return b"", []
    return data, [fd for _, _, fds in ancillary for fd in memoryview(fds).cast("i")]


# The worker.


def worker_main(worker: int, channel: socket.socket, setup: Setup | None = None) -> None:
    """Answer tasks until end-of-file. ``setup`` comes by fork, or else over the channel, pickled."""
    _set_signals()
    hello, fds = receive(channel, HELLO.size)
    if not hello:
        return
    area_bytes, setup_bytes = HELLO.unpack(hello)
    area = Area(attach(fds[0], area_bytes))
    os.close(fds[0])
    _end_with(fds[1])
    server = _Server(worker, channel, area)
    try:
        if setup is None:
            setup = _load(fds[2], setup_bytes)
        _prepare(setup, worker)
    except BaseException as error:  # user code: the consumer must see whatever it raises
        server.refuse(error)
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        server.serve(setup.work)


def _load(fd: int, nbytes: int) -> Setup:
    """The setup, its NumPy arrays as private (copy-on-write) views of memory that all workers share."""
    memory = attach(fd, nbytes, private=True)
    os.close(fd)
    setup: Setup = unpack(np.frombuffer(memory, np.uint8))
    return setup


def _prepare(setup: Setup, worker: int) -> None:
    """What `DataLoader` does in a new worker: one thread, seeds of its own, the worker info, the user's function."""
    torch.set_num_threads(1)
    seed = (setup.seed + worker) % 2**63
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(np.random.SeedSequence([setup.seed % 2**63, worker]).generate_state(4))
    dataset = getattr(setup.work, "dataset", None)
    info: Any = torch_worker.WorkerInfo  # by keyword, because its fields differ between versions of torch
    torch_worker._worker_info = info(id=worker, num_workers=setup.num_workers, seed=seed, dataset=dataset)
    if setup.worker_init_fn is not None:
        setup.worker_init_fn(worker)


class _Server:
    """A worker's side of its channel."""

    def __init__(self, worker: int, channel: socket.socket, area: Area) -> None:
        self._where = f"worker process {worker} (pid {os.getpid()})"
        self._channel = channel
        self._area = area
        self._slots = SlotMaker()

    def serve(self, work: Work) -> None:
        """Answer tasks, in the order in which they come, until end-of-file."""
        cells = self._area.cells
        self._channel.sendall(ANSWER.pack(0, READY, NO_SLOT, 0))
        while True:
            message, fds = receive(self._channel, TASK.size)
            if not message:
                return
            number, place, nbytes, lent, *drops = TASK.unpack(message)
            self._slots.drop(drops)
            if number < cells[Area.WANTED]:
                for fd in fds:
                    os.close(fd)
                self._channel.sendall(ANSWER.pack(number, SKIPPED, NO_SLOT, 0))
                continue
            cells[Area.DOING] = number
            body = attach(fds[0], nbytes) if fds else self._area.places[place][:nbytes]
            for fd in fds:
                os.close(fd)
            status, parcel = self._do(work, body)
            del body
            self._answer(number, status, parcel, place, lent)
            del parcel  # This frame must not keep a result alive while it waits for the next task.
            cells[Area.DOING] = -1

    def refuse(self, error: BaseException) -> None:
        """Tell the consumer why this worker cannot work."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._answer(0, REFUSED, _failure(error), 0, NO_SLOT)

    def _do(self, work: Work, body: memoryview) -> tuple[int, Parcel]:
        try:
            value = work(pickle.loads(body), self._area.row)
        except BaseException as error:  # SystemExit and the like are errors of user code too
            return ERROR, _failure(error)
        finally:
            self._area.row[0] = IDLE
        try:
            return VALUE, Parcel(value)
        except BaseException as error:  # a user's __reduce__ may raise anything
            kind = type(value)
            refused = SampleError(
                f"the result, a {kind.__module__}.{kind.__qualname__}, cannot be pickled, so it cannot leave {self._where}: {type(error).__name__}: "
                f'{error}. Return tensors, arrays or plain Python objects, or use method="thread".'
            )
            refused.__cause__ = error
            return ERROR, _failure(refused)

    def _answer(self, number: int, status: int, parcel: Parcel, place: int, lent: int) -> None:
        if parcel.nbytes <= Area.PLACE:
            parcel.write(self._area.places[place])
            self._channel.sendall(ANSWER.pack(number, status, NO_SLOT, parcel.nbytes))
            return
        try:
            slot, memory, fd = self._slots.take(parcel.nbytes, lent)
        except MemoryError as error:
            self._answer(number, ERROR, _failure(error, Area.PLACE), place, NO_SLOT)
            return
        parcel.write(memory)
        if fd is None:
            self._channel.sendall(ANSWER.pack(number, status, slot, 0))
        else:
            socket.send_fds(self._channel, [ANSWER.pack(number, status, slot, len(memory))], [fd])
            os.close(fd)


def _failure(error: BaseException, room: int | None = None) -> Parcel:
    failure = Failure.of(error)
    return Parcel(tuple(failure if room is None else failure.short(room)))


def _set_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the consumer decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


@contextlib.contextmanager
def no_ctrl_c() -> Iterator[None]:
    """Hold Ctrl-C back, here and in processes started meanwhile, until `_set_signals` has told them to ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(lifeline: int) -> None:
    """End this process as soon as nobody holds the other end of ``lifeline``."""
    try:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined,unused-ignore]
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except (AttributeError, OSError):  # not Linux
        threading.Thread(target=_end_after, args=(lifeline,), name="penstock-lifeline", daemon=True).start()
        return
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    if poller.poll(0):  # it ended before the signal was armed
        os._exit(1)


def _end_after(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


# The zygote.


def watch(process: BaseProcess, *, owned: bool = True) -> int:
    """A file descriptor that becomes readable when ``process`` dies.

    A pidfd where there is one: the sentinel of `multiprocessing` is a pipe that a helper process of the user's dataset inherits
    and keeps open. For a child that is not ``owned`` (a fork server reaps it) the sentinel is the server's own report.
    """
    if owned:
        with contextlib.suppress(AttributeError, OSError):
            return os.pidfd_open(process.pid or 0)
    return process.sentinel


def buried(process: BaseProcess, watched: int) -> int:
    """Reap ``process``, which has ended; its exit code, negative for a signal."""
    if watched != process.sentinel:
        os.close(watched)
    process.join()
    code = process.exitcode
    process.close()
    return code if code is not None else -signal.SIGKILL


def zygote_main(control: socket.socket, setup: Setup) -> None:
    """Fork workers to order and report their ends, until end-of-file and the last worker's end."""
    _set_signals()
    gc.freeze()  # collections in the workers then touch no page of the dataset
    children: dict[int, tuple[int, BaseProcess]] = {}
    poller = select.poll()
    poller.register(control, select.POLLIN)
    open_for_orders = True
    while open_for_orders or children:
        for fd, _ in poller.poll():
            if fd != control.fileno():
                serial, process = children.pop(fd)
                poller.unregister(fd)
                _report(control, serial, ENDED, buried(process, fd))
                continue
            message, fds = receive(control, ORDER.size)
            if message:
                _fork_worker(control, message, fds[0], setup, children, poller)
            else:
                poller.unregister(control)
                open_for_orders = False


def _fork_worker(
    control: socket.socket, message: bytes, channel_fd: int, setup: Setup, children: dict[int, tuple[int, BaseProcess]], poller: select.poll
) -> None:
    serial, worker = ORDER.unpack(message)
    channel = socket.socket(fileno=channel_fd)
    process = multiprocessing.get_context("fork").Process(
        target=_born, args=(worker, channel, setup, [control.fileno(), *children]), name=f"{setup.name}-{worker}"
    )
    try:
        process.start()
    except OSError as error:
        _report(control, serial, NOT_BORN, error.errno or 0)
        return
    finally:
        channel.close()  # or this process would keep the worker's end open, and its death would be no end-of-file
    watched = watch(process)
    children[watched] = (serial, process)
    poller.register(watched, select.POLLIN)
    _report(control, serial, BORN, process.pid or 0)


def _born(worker: int, channel: socket.socket, setup: Setup, inherited: list[int]) -> None:
    for fd in inherited:  # the zygote's own, and those of elder siblings
        os.close(fd)
    worker_main(worker, channel, setup)


def _report(control: socket.socket, serial: int, what: int, value: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(REPORT.pack(serial, what, value))


def fork_zygote(setup: Setup) -> tuple[int, socket.socket]:
    """Fork the zygote: its pid, and the socket for orders and reports."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ours.close()
            zygote_main(theirs, setup)
            code = 0
        except BaseException:  # nothing may return into a copy of the consumer's stack
            traceback.print_exc()
        finally:
            os._exit(code)
    theirs.close()
    return pid, ours
