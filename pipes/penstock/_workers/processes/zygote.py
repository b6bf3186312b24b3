"""The zygote: a process that forks workers.

It is forked from the consumer's process once, at the start, with the work in it. It has one thread and runs no user code. So even a
replacement is forked from a process that holds no lock, and sees the dataset as it was.
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
import traceback

from penstock._workers.forking import come_up, fork, until_up
from penstock._workers.processes.deaths import UNKNOWN, Watched
from penstock._workers.processes.own_offsets import own_offsets
from penstock._workers.processes.protocol import BORN, ENDED, NOT_BORN, ORDER, REPORT, UP, Setup, receive
from penstock._workers.processes.signals import set_signals, signals_held
from penstock._workers.processes.worker_main import worker_main


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
    control: socket.socket, message: bytes, channel_fd: int, setup: Setup, children: dict[int, tuple[int, Watched]], poller: select.poll
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
        channel.close()  # with a copy of the worker's end open here, its death would not be end-of-file for the consumer
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


class Zygote:
    """The consumer's view of the forked process, which takes orders once `start` has returned.

    Attributes:
        control: The socket for orders and reports; None before the first fork.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pids: list[int] = []  # of the process, until it is reaped
        self._code = UNKNOWN
        self.pid = 0
        self.control: socket.socket | None = None

    def start(self) -> None:
        """Fork it. After an interrupt, `kill` undoes what was done.

        Raises:
            WorkerDied: See `until_up`.
        """
        until_up(self._fork, self.kill)

    def _fork(self) -> tuple[int, int]:
        # Signals are held from before the fork until this process knows the pid, and in the child until it has dropped
        # the program's handlers. Otherwise a handler that raises here leaks a process, later a zombie, and a handler that
        # raises in the child ends the child.
        self.control, theirs = socket.socketpair()
        with theirs, signals_held():
            self.pid = fork(self._pids)
            if self.pid == 0:
                code = 1
                try:
                    self.control.close()
                    zygote_main(theirs, self._setup)
                    code = 0
                except BaseException:  # nothing may return to the consumer's stack, of which this process has a copy
                    traceback.print_exc()
                finally:
                    os._exit(code)
        return self.pid, self.control.fileno()

    @property
    def is_over(self) -> bool:
        """Whether the process does not exist, or no longer does."""
        return not self._pids

    def kill(self) -> None:
        """End it by force. Idempotent."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # another waitpid(-1) was faster
                os.kill(pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        """Wait for the end of the process, and close its socket. Idempotent."""
        self.exit_code()
        if self.control is not None:
            self.control.close()

    def exit_code(self) -> int:
        """Wait for the end of the process. Returns its exit code (negative: a signal), or `UNKNOWN`."""
        for pid in self._pids:
            try:
                self._code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            except ChildProcessError:
                self._code = UNKNOWN
        self._pids.clear()  # not before: an interrupted wait must be made again
        return self._code
