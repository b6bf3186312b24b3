"""The zygote: a process that forks workers.

It is forked from the consumer's process once, at the start, with the work in it. It has one thread and runs no user
code. So even a replacement is forked from a process that holds no lock, and sees the dataset as it was.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.popen_fork  # before the fork, or each zygote would import it
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any

from penstock._errors import ANEW, WorkerDied
from penstock._workers.forking import come_up, fork, until_up
from penstock._workers.processes.deaths import UNKNOWN, Watched, cause_of
from penstock._workers.processes.own_offsets import own_offsets
from penstock._workers.processes.protocol import BORN, ENDED, NOT_BORN, ORDER, REPORT, UP, Setup, receive, send
from penstock._workers.processes.signals import set_signals, signals_held
from penstock._workers.processes.worker_main import worker_main

if TYPE_CHECKING:
    from collections.abc import Iterator


def zygote_main(control: socket.socket, setup: Setup) -> None:
    """Fork workers to order and report their deaths, until end-of-file and then until the last worker has ended."""
    set_signals()
    come_up()
    own_offsets(anew=True)  # before the consumer reads on; each worker does it again, because they are siblings
    _report(control, 0, UP, 0)
    gc.freeze()  # so that garbage collection in the workers copies no page of the dataset
    children: dict[int, tuple[int, Watched]] = {}
    poller = select.poll()
    poller.register(control, select.POLLIN)
    open_for_orders = True
    while open_for_orders or children:
        for fd, _ in poller.poll():
            # a worker has died; its report is sent after it was reaped, so its pid is free by then
            if fd != control.fileno():
                serial, ended = children.pop(fd)
                poller.unregister(fd)
                _report(control, serial, ENDED, ended.reap())
                ended.close()
                continue
            message, fds = receive(control, ORDER.size)
            if message:
                _fork_worker(control, message, fds[0], setup, children, poller)
            else:
                poller.unregister(control)
                open_for_orders = False


def _fork_worker(
    control: socket.socket,
    message: bytes,
    channel_fd: int,
    setup: Setup,
    children: dict[int, tuple[int, Watched]],
    poller: select.poll,
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
        # with a copy of the worker's end open here, its death would not be end-of-file for the consumer
        channel.close()
    watched = Watched(process)
    children[watched.fd] = (serial, watched)
    poller.register(watched.fd, select.POLLIN)
    _report(control, serial, BORN, process.pid or 0)


def _born(worker: int, channel: socket.socket, setup: Setup, inherited: list[int]) -> None:
    for fd in inherited:  # the zygote's own, and those by which it watches the workers forked earlier
        os.close(fd)
    worker_main(worker, channel, setup)


def _report(control: socket.socket, serial: int, what: int, value: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(REPORT.pack(serial, what, value))


class ByZygote:
    """A `Launcher`: workers forked by a process that has no other threads, the zygote."""

    def __init__(self, setup: Setup, poller: select.poll) -> None:
        self.missed_deaths: list[tuple[int, int]] = []
        self.hears_ctrl_c = False
        self._setup = setup
        self._poller = poller
        self._pids: list[int] = []  # of the zygote, until it is reaped
        self._pid = 0
        self._code = UNKNOWN
        self._control: Any = None  # the socket for orders and reports

    def start(self) -> None:
        for stream in (sys.stdout, sys.stderr):  # or the child would write what is buffered, too
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.flush()
        # Threads of this process hold no lock that the child needs, or else it is seen to hang and is forked again.
        with warnings.catch_warnings():  # Python 3.12 warns if this process has threads; see `forking`
            warnings.simplefilter("ignore", DeprecationWarning)
            until_up(self._fork, self.kill)
        self._poller.register(self._control, select.POLLIN)

    def _fork(self) -> tuple[int, int]:
        # Signals are held from before the fork until this process knows the pid, and in the child until it has dropped
        # the program's handlers. Otherwise a handler that raises here leaks a process, later a zombie, and a handler
        # that raises in the child ends the child.
        self._control, theirs = socket.socketpair()
        with theirs, signals_held():
            self._pid = fork(self._pids)
            if self._pid == 0:
                code = 1
                try:
                    self._control.close()
                    zygote_main(theirs, self._setup)
                    code = 0
                except BaseException:  # nothing may return to the consumer's stack, of which this process has a copy
                    traceback.print_exc()
                finally:
                    os._exit(code)
        return self._pid, self._control.fileno()

    def greeting(self) -> tuple[int, list[int]]:
        return 0, []

    def launch(self, serial: int, worker: int, channel: socket.socket) -> int:
        try:
            send(self._control, ORDER.pack(serial, worker), [channel.fileno()])
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost() from None
        while True:
            # Deaths that were reported before the answer came. The poller will not show them again, so they are kept
            # for `deaths`.
            which, what, value = self._reported(0)
            if what == ENDED:
                self.missed_deaths.append((which, value))
            elif which != serial:  # of the zygote itself
                continue
            elif what == BORN:
                return value
            elif what == NOT_BORN:
                raise OSError(value, f"worker process {worker} could not be forked: {os.strerror(value)}")

    def deaths(self) -> Iterator[tuple[int, int]]:
        with contextlib.suppress(BlockingIOError):
            while True:
                serial, what, code = self._reported(socket.MSG_DONTWAIT)
                if what == ENDED:
                    self.missed_deaths.append((serial, code))
        while self.missed_deaths:
            yield self.missed_deaths.pop(0)

    def join(self, timeout: float) -> bool:
        if not self._pids:  # there is no zygote yet, or no longer
            self._reap()
            return True
        # Only our half: the zygote takes no more orders, but continues to report until it ends after its last worker.
        # Its end-of-file means that all have ended.
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
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # another waitpid(-1) was faster
                os.kill(pid, signal.SIGKILL)
        self._reap()

    def disown(self) -> None:
        if self._control is not None:
            self._control.close()

    def _reported(self, flags: int) -> tuple[int, int, int]:
        message, _ = receive(self._control, REPORT.size, flags)
        if not message:
            raise self._lost()
        serial, what, value = REPORT.unpack(message)
        return serial, what, value

    def _lost(self) -> WorkerDied:
        how = cause_of(self._exit_code())
        return WorkerDied(f"the process that forks the workers (pid {self._pid}) has died: {how}. {ANEW}")

    def _reap(self) -> None:
        """Wait for the end of the zygote, and close its socket. Idempotent."""
        self._exit_code()
        self.disown()

    def _exit_code(self) -> int:
        """Wait for the end of the zygote. Returns its exit code (negative: a signal), or `UNKNOWN`."""
        for pid in self._pids:
            try:
                self._code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            except ChildProcessError:
                self._code = UNKNOWN
        self._pids.clear()  # not before: an interrupted wait must be made again
        return self._code
