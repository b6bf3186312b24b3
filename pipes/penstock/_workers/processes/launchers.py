"""How worker processes are started, and their deaths learned: by a zygote of our own, or by multiprocessing."""

from __future__ import annotations

import contextlib
import copyreg
import os
import select
import signal
import socket
import sys
import time
import warnings
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Protocol

from penstock._errors import WorkerDied
from penstock._memory.parcel import Parcel
from penstock._memory.shared_memory import attach, create
from penstock._workers.processes.deaths import buried, cause_of, watch
from penstock._workers.processes.main_module import check_importable
from penstock._workers.processes.protocol import BORN, ENDED, MOST_FDS, NOT_BORN, ORDER, REPORT, PassedFd, Setup, receive, send
from penstock._workers.processes.signals import signals_held
from penstock._workers.processes.worker_main import worker_main
from penstock._workers.processes.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess


_TRIES = 9
"""To start one worker by multiprocessing's fork server, which may die meanwhile. The pauses in between double, and add up to 5 s."""


class Launcher(Protocol):
    """Starts workers; the poller that it was made with shows when one has died.

    Attributes:
        missed_deaths: Reported while something else was awaited, so the poller will not show them.
    """

    missed_deaths: list[tuple[int, int]]

    def greeting(self) -> tuple[int, list[int]]:
        """For the hello: bytes of the pickled setup, or 0, and the descriptors that it needs."""
        ...

    def launch(self, serial: int, worker: int, channel: socket.socket) -> int:
        """Start a worker with its end of a channel; its pid."""
        ...

    def deaths(self) -> Iterator[tuple[int, int]]:
        """Serials of the workers that have died, with their exit codes."""
        ...

    def join(self, timeout: float) -> bool:
        """Wait until all have ended; whether they have."""
        ...

    def kill(self) -> None:
        """End by force whatever `join` left."""

    def disown(self) -> None:
        """In a forked child: close the copies of what belongs to the parent."""


class ByZygote:
    """Workers forked by a process that has no other threads."""

    def __init__(self, setup: Setup, poller: select.poll) -> None:
        self.missed_deaths: list[tuple[int, int]] = []
        for stream in (sys.stdout, sys.stderr):  # or the child would write what is buffered, too
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.flush()
        with warnings.catch_warnings():  # Python 3.12 warns if this process has threads; see `forking`
            warnings.simplefilter("ignore", DeprecationWarning)
            self._zygote = Zygote(setup)
        poller.register(self._zygote.control, select.POLLIN)

    def greeting(self) -> tuple[int, list[int]]:
        return 0, []

    def launch(self, serial: int, worker: int, channel: socket.socket) -> int:
        with signals_held():
            try:
                send(self._zygote.control, ORDER.pack(serial, worker), [channel.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                raise self._lost() from None
            while True:
                which, what, value = self._report(0)
                if what == ENDED:
                    self.missed_deaths.append((which, value))
                elif which != serial:  # of the zygote itself, or of a start that was interrupted and given up
                    continue
                elif what == BORN:
                    return value
                elif what == NOT_BORN:
                    raise OSError(value, f"worker process {worker} could not be forked: {os.strerror(value)}")

    def deaths(self) -> Iterator[tuple[int, int]]:
        with contextlib.suppress(BlockingIOError):
            while True:
                serial, what, code = self._report(socket.MSG_DONTWAIT)
                if what == ENDED:
                    self.missed_deaths.append((serial, code))
        while self.missed_deaths:
            yield self.missed_deaths.pop(0)

    def join(self, timeout: float) -> bool:
        with contextlib.suppress(OSError):
            self._zygote.control.shutdown(socket.SHUT_WR)
        poller = select.poll()
        poller.register(self._zygote.control, select.POLLIN)
        deadline = time.monotonic() + timeout
        while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if not receive(self._zygote.control, REPORT.size)[0]:
                self._zygote.reap()
                return True
        return False

    def kill(self) -> None:
        self._zygote.kill()

    def disown(self) -> None:
        self._zygote.control.close()

    def _report(self, flags: int) -> tuple[int, int, int]:
        message, _ = receive(self._zygote.control, REPORT.size, flags)
        if not message:
            raise self._lost()
        serial, what, value = REPORT.unpack(message)
        return serial, what, value

    def _lost(self) -> WorkerDied:
        how = cause_of(self._zygote.exit_code())
        return WorkerDied(f"the process that forks the workers (pid {self._zygote.pid}) has died: {how}. Build a new loader.")


class ByContext:
    """Workers started by multiprocessing's forkserver or spawn. The setup is pickled once, for all of them."""

    def __init__(self, setup: Setup, context: Any, poller: select.poll) -> None:
        method = context.get_start_method()
        passing = _Passing()
        try:
            with passing:
                parcel = Parcel(setup, reducers=_reducers())
        except Exception as error:
            passing.close()
            raise TypeError(
                f"the dataset (or map_fn, collate_fn, worker_init_fn, on_error) cannot be pickled, which worker processes started by "
                f'{method!r} need: {type(error).__name__}: {error}. Use method="thread" or multiprocessing_context="fork", or '
                f"make it picklable: functions and classes at the top of a module, files and locks opened in the worker."
            ) from error
        try:
            check_importable(method, parcel.body)
        except Exception:
            passing.close()
            raise
        from multiprocessing import resource_tracker

        with signals_held():  # the tracker ends with this process, and needs no signals
            resource_tracker.ensure_running()  # now, because starting it unblocks Ctrl-C, which must not come in the middle of a worker's start
        self._by_server = method == "forkserver"
        if self._by_server:
            _preload(setup)
        self.missed_deaths: list[tuple[int, int]] = []
        self._context = context
        self._poller = poller
        self._name = setup.name
        self._processes: dict[int, tuple[int, BaseProcess]] = {}
        self._nbytes = parcel.end()
        self._passing = passing
        self._fd = create(self._nbytes)
        parcel.write(attach(self._fd, self._nbytes))

    def greeting(self) -> tuple[int, list[int]]:
        return self._nbytes, [self._fd, *self._passing.fds]

    def launch(self, serial: int, worker: int, channel: socket.socket) -> int:
        process = self._started(worker, channel)
        watched = watch(process)
        self._processes[watched] = (serial, process)
        self._poller.register(watched, select.POLLIN)
        return int(process.pid or 0)

    def _started(self, worker: int, channel: socket.socket) -> BaseProcess:
        from multiprocessing import forkserver

        for number in range(_TRIES):
            process: BaseProcess = self._context.Process(
                target=worker_main, args=(worker, channel), name=f"{self._name}-{worker}", daemon=True
            )
            try:
                if self._by_server:
                    with signals_held(signal.SIGINT):  # nothing else: the server serves others too. It soon ignores Ctrl-C by itself
                        forkserver.ensure_running()
                with signals_held():
                    process.start()
            except (ConnectionError, EOFError):  # the server has died, for instance of a signal to the whole group
                time.sleep(0.01 * 2**number)  # for a moment it is still there and refuses connections, so that nobody replaces it
                continue
            return process
        raise WorkerDied(f"multiprocessing's fork server could not start worker process {worker}: it died, or refused, {_TRIES} times.")

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
        self._passing.close()
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
        self._passing.close()
        os.close(self._fd)

    def _ended(self, timeout: float) -> list[int]:
        poller = select.poll()
        for watched in self._processes:
            poller.register(watched, select.POLLIN)
        return [watched for watched, _ in poller.poll(timeout * 1000)]


class _Passing:
    """Poses as the process that multiprocessing is starting, so that its locks, queues and values can be pickled; keeps their descriptors."""

    DupFd = PassedFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def __enter__(self) -> None:
        set_spawning_popen(self)  # type: ignore[arg-type,unused-ignore]

    def __exit__(self, *_: object) -> None:
        set_spawning_popen(None)

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a copy of ``fd``; its place among those of the hello."""
        if len(self.fds) == MOST_FDS - 3:
            raise ValueError(f"more than {len(self.fds)} file descriptors in queues and values")
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1

    def close(self) -> None:
        """Close the copies. No worker can be started after that."""
        while self.fds:
            os.close(self.fds.pop())


def _reducers() -> dict[type, Any]:
    """Pickle as multiprocessing does for a process that it starts, except that tensors go by value, into memory that all workers map."""
    more = getattr(ForkingPickler, "_extra_reducers", {})
    return {**copyreg.dispatch_table, **{kind: how for kind, how in more.items() if not how.__module__.startswith("torch")}}


def _preload(setup: Setup) -> None:
    """Have the fork server import torch, `worker_main` and the kind of work once, for all workers, unless the user chose what it imports."""
    from multiprocessing import forkserver

    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        forkserver.set_forkserver_preload(["__main__", "torch", "penstock._workers.processes.worker_main", type(setup.work).__module__])
