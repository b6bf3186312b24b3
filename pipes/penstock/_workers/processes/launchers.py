"""Starts worker processes and detects their deaths: what a launcher is, and the one for multiprocessing's other start
methods; see also `zygote`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from functools import partial
from io import FileIO
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch.multiprocessing

from penstock._errors import is_own_error
from penstock._memory.parcel import Parcel, Reducers
from penstock._memory.shared_memory import attach, create
from penstock._workers.lifetime import undisturbed
from penstock._workers.processes.deaths import Watched
from penstock._workers.processes.main_module import check_importable
from penstock._workers.processes.protocol import MOST_FDS, PassedFd, Setup
from penstock._workers.processes.signals import signals_held
from penstock._workers.processes.worker_main import worker_main

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess

_logger = logging.getLogger("penstock")

_sharing: Any = torch.multiprocessing  # torch has no types for it

_MOST_TENSORS: Final = MOST_FDS // 2
"""Descriptors of tensors that are passed. The others are for queues and values."""


class Launcher(Protocol):
    """Starts workers; the poller that it was made with shows when one has died.

    A signal handler may raise in the middle of any call but `launch`, which runs in a helper thread. `join` and `kill`
    end whatever there is by then. If they are interrupted themselves, the next call does the rest.

    Attributes:
        missed_deaths: Reported while something else was awaited, so the poller will not show them.
        hears_ctrl_c: Whether Ctrl-C may end a worker in its start. Workers of the fork server hear it: they have the
            signals of the whole program.
    """

    missed_deaths: list[tuple[int, int]]
    hears_ctrl_c: bool

    def start(self) -> None:
        """Create the resources that all workers need."""

    def greeting(self) -> tuple[int, list[int]]:
        """For the hello: bytes of the pickled setup, or 0, and the descriptors that it needs."""
        ...

    def launch(self, serial: int, worker: int, channel: socket.socket) -> int:
        """Start a worker with its end of a channel; its pid.

        Raises:
            OSError: No process or file descriptor for it.
            WorkerDied: The zygote has died.
            ConnectionError: The fork server has died. It may have forked a process before that, and that has this
                channel.
        """
        ...

    def deaths(self) -> Iterator[tuple[int, int]]:
        """Serials of the workers that have died, with their exit codes."""
        ...

    def join(self, timeout: float) -> bool:
        """Wait until all workers have ended. Returns whether they have."""
        ...

    def kill(self) -> None:
        """End the workers left by `join` by force."""

    def disown(self) -> None:
        """In a forked child: close the copies of what belongs to the parent."""


class ByContext:
    """Workers started by multiprocessing's forkserver or spawn. The setup is pickled once, for all of them."""

    def __init__(self, setup: Setup, context: Any, poller: select.poll) -> None:
        self.missed_deaths: list[tuple[int, int]] = []
        self._setup = setup
        self._context = context
        self._method = context.get_start_method()
        self.hears_ctrl_c = self._method == "forkserver"
        self._poller = poller
        # by the descriptor that shows the death: the serial, and the process
        self._watched: dict[int, tuple[int, Watched]] = {}
        self._passing = _Passing()
        self._pickled: FileIO | None = None  # shared memory with the pickled setup, which every worker maps
        self._nbytes = 0

    def start(self) -> None:
        try:
            with self._passing:
                parcel = Parcel(self._setup, reducers=_reducers(self._passing))
        except Exception as error:
            if not is_own_error(error):
                raise
            raise TypeError(
                f"the dataset (or map_fn, collate_fn, worker_init_fn, on_error) cannot be pickled, which worker "
                f'processes started by {self._method!r} need: {type(error).__name__}: {error}. Use method="thread" or '
                f'multiprocessing_context="fork", or make it picklable: functions and classes at the top of a module, '
                f"files and locks opened in the worker."
            ) from error
        check_importable(self._method, parcel.body)
        if self._passing.left_over:
            _logger.warning(
                "%d tensors in shared memory are copied for each worker process, because no more than %d descriptors "
                "of tensors can be passed to one started by %r. What your loop writes to them is not seen there, nor "
                'the other way round. Call torch.multiprocessing.set_sharing_strategy("file_system"), or pass '
                'multiprocessing_context="fork".',
                len(self._passing.left_over),
                _MOST_TENSORS,
                self._method,
            )
        if self._method == "forkserver":
            _preload(self._setup)
        # an interrupt would lose the descriptor of the memory
        undisturbed(partial(self._store, parcel), threading.Lock())

    def _store(self, parcel: Parcel) -> None:
        self._nbytes = parcel.end()
        self._pickled = FileIO(create(self._nbytes))
        parcel.write(attach(self._pickled.fileno(), self._nbytes))

    def greeting(self) -> tuple[int, list[int]]:
        assert self._pickled is not None
        return self._nbytes, [self._pickled.fileno(), *self._passing.fds]

    def launch(self, serial: int, worker: int, channel: socket.socket) -> int:
        process: BaseProcess = self._context.Process(
            target=worker_main, args=(worker, channel), name=f"{self._setup.name}-{worker}", daemon=True
        )
        if self._method == "forkserver":
            # The server serves the whole program. If there is none, or it has just died, this starts it, so no signal
            # may be held here: it inherits the mask, and so does every process that it forks for others. With SIGCHLD
            # blocked it would never learn of their deaths.
            try:
                process.start()
            except EOFError as error:
                raise ConnectionResetError("multiprocessing's fork server has died") from error
            except ChildProcessError as error:
                _forget_server()
                raise ConnectionResetError(
                    "multiprocessing's fork server belongs to another process, or was reaped by other code"
                ) from error
        else:
            # Starting multiprocessing's tracker unblocks Ctrl-C, which must not reach the worker in its start. So it
            # comes first; it ends with this process, and needs no signals.
            with signals_held():
                resource_tracker.ensure_running()
            with signals_held():
                process.start()
        watched = Watched(process)
        self._watched[watched.fd] = (serial, watched)
        self._poller.register(watched.fd, select.POLLIN)
        return int(process.pid or 0)

    def deaths(self) -> Iterator[tuple[int, int]]:
        for fd in self._ended(0.0):
            # Reaped before it is forgotten: after an interrupt in between, the next call reaps again, which changes
            # nothing.
            serial, watched = self._watched[fd]
            code = watched.reap()
            self._forget(fd)
            yield serial, code

    def join(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self._watched and (ended := self._ended(max(0.0, deadline - time.monotonic()))):
            for fd in ended:
                # A fork server that was stopped has the exit codes and does not tell them: no longer than this call may
                # take.
                self._watched[fd][1].reap(max(0.0, deadline - time.monotonic()))
                self._forget(fd)
        if self._watched:
            return False
        self._passing.close()
        if self._pickled is not None:
            self._pickled.close()
        return True

    def kill(self) -> None:
        for _, watched in list(self._watched.values()):
            watched.kill()
        self.join(1.0)  # not forever: a process that is stuck in the kernel ends when the kernel lets it

    def disown(self) -> None:
        for _, watched in self._watched.values():
            watched.disown()
        self._passing.close()
        if self._pickled is not None:
            self._pickled.close()

    def _forget(self, fd: int) -> None:
        """After the death of a process, close its resources. If an interrupt loses it here, it closes itself."""
        with contextlib.suppress(KeyError):
            self._poller.unregister(fd)
        _, watched = self._watched.pop(fd)
        watched.close()

    def _ended(self, timeout: float) -> list[int]:
        poller = select.poll()
        for fd in list(self._watched):
            poller.register(fd, select.POLLIN)
        return [fd for fd, _ in poller.poll(timeout * 1000)]


class _Passing:
    """Poses as the process that multiprocessing is starting, so that its locks, queues and values, and tensors in
    shared memory, can be pickled; keeps their descriptors.

    Attributes:
        fds: The descriptors.
        left_over: Memory of tensors for which there was no room among them.
    """

    DupFd = PassedFd

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._passed: set[int] = set()
        self.left_over: set[int] = set()

    def __enter__(self) -> None:
        set_spawning_popen(self)  # type: ignore[arg-type,unused-ignore]

    def __exit__(self, *_: object) -> None:
        set_spawning_popen(None)

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a copy of ``fd``. Returns its place among the descriptors of the hello."""
        if len(self.fds) == MOST_FDS - 3:
            raise ValueError(f"more than {len(self.fds)} file descriptors in queues and values")
        self.fds.extend(map(os.dup, [fd]))  # one call in C, so that no interrupt loses the copy
        return len(self.fds) - 1

    def reduce_typed(self, storage: Any) -> Any:
        """The memory of a tensor, with its dtype: passed, or as bytes."""
        passed = self._passes(storage._untyped_storage)
        return _sharing.reductions.reduce_typed_storage(storage) if passed else storage.__reduce__()

    def reduce_untyped(self, storage: Any) -> Any:
        """Like torch's own, which moves all memory into shared memory, and which counts memory with a name for one
        process only.
        """
        if not self._passes(storage):
            return storage.__reduce__()
        if _sharing.get_sharing_strategy() == "file_system":
            return torch.UntypedStorage._new_shared_filename_cpu, storage._share_filename_cpu_()
        fd, nbytes = storage._share_fd_cpu_()
        return _sharing.reductions.rebuild_storage_fd, (torch.UntypedStorage, DupFd(fd), nbytes)

    def _passes(self, storage: Any) -> bool:
        """Whether this memory is shared, and can be passed."""
        # a file may be another one by the time that a worker opens it
        if storage.device.type != "cpu" or not storage.is_shared() or not storage.nbytes() or storage.filename:
            return False
        if _sharing.get_sharing_strategy() == "file_system":
            return True
        if storage._share_fd_cpu_()[0] < 0:  # a private view of a file
            return False
        if storage._cdata not in self._passed:
            (self._passed if len(self.fds) < _MOST_TENSORS else self.left_over).add(storage._cdata)
        return storage._cdata in self._passed

    def close(self) -> None:
        """Close the copies. No worker can be started after that."""
        while self.fds:
            os.close(self.fds.pop())


def _reducers(passing: _Passing) -> dict[type, Any]:
    """Pickle as multiprocessing does for a process that it starts, except that tensors which are not in shared memory
    yet go by value, into memory that all workers map.
    """
    more = getattr(ForkingPickler, "_extra_reducers", {})
    own = {kind: how for kind, how in more.items() if not how.__module__.startswith("torch")}
    return Reducers(
        {**own, torch.storage.TypedStorage: passing.reduce_typed, torch.UntypedStorage: passing.reduce_untyped}
    )


def _preload(setup: Setup) -> None:
    """Have the fork server import torch, `worker_main` and the kind of work once, for all workers, unless the user
    chose what it imports.
    """
    # There is no public way to ask what was chosen. If the names change, workers import by themselves, which only takes
    # longer.
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        forkserver.set_forkserver_preload(
            ["__main__", "torch", "penstock._workers.processes.worker_main", type(setup.work).__module__]
        )


def _forget_server() -> None:
    """Have multiprocessing start another fork server.

    In each call it asks the kernel whether the one that it knows has ended. That fails forever if this process is a
    fork of the one that started it, or if other code has reaped it.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined,unused-ignore]
    os.close(server._forkserver_alive_fd)
    server._forkserver_pid = None
