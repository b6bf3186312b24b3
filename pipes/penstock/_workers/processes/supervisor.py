"""The crew of a pool of processes: who is alive. It starts workers, hears of their deaths, and ends them; of tasks it knows nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import socket
import time
import weakref
from typing import TYPE_CHECKING, Any

from penstock._memory.slots import KeptBatches
from penstock._workers.processes.launchers import ByContext, ByZygote, Launcher
from penstock._workers.processes.main_module import check_not_importing
from penstock._workers.processes.worker_handle import WorkerHandle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.context import BaseContext

    from penstock._workers.processes.protocol import Setup


class Supervisor:
    """The workers of one pool.

    Args:
        setup: What every worker is given.
        places: Tasks that a worker may hold.
        context: A start method or context; None: multiprocessing's for the platform.

    Attributes:
        seats: By the channel's file descriptor.
        poller: Every channel, every death, and `wake`.
    """

    def __init__(self, setup: Setup, places: int, context: str | BaseContext | None) -> None:
        self.seats: dict[int, WorkerHandle] = {}
        self.poller = select.poll()
        self._setup = setup
        self._places = places
        self._context = context
        self._serial = 0
        self._kept_batches = KeptBatches()
        self._launcher: Launcher | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None  # read here, written by `wake`

    def start(self) -> None:
        """Start all workers, or none."""
        check_not_importing()
        if multiprocessing.current_process().daemon:
            raise RuntimeError('a daemonic process cannot have worker processes of its own. Use method="thread" or num_workers=0 here.')
        context: Any = (
            multiprocessing.get_context(self._context) if self._context is None or isinstance(self._context, str) else self._context
        )
        method = context.get_start_method()
        self._launcher = ByZygote(self._setup, self.poller) if method == "fork" else ByContext(self._setup, context, self.poller)
        _crews.add(self)
        try:
            self._wake = socket.socketpair()
            for end in self._wake:
                end.setblocking(False)
            self.poller.register(self._wake[0], select.POLLIN)
            for worker in range(self._setup.num_workers):
                self.launch(worker)
        except BaseException:
            self.stop(time.monotonic())
            raise

    @property
    def working(self) -> bool:
        """Whether it was started, and not stopped."""
        return self._launcher is not None

    def launch(self, worker: int) -> None:
        """Start one worker.

        Raises:
            OSError: No process, memory or file descriptor for it.
            WorkerDied: The zygote has died.
        """
        assert self._launcher is not None
        self._serial += 1
        with WorkerHandle.taken(self._serial, worker, self._places, self._kept_batches, *self._launcher.greeting()) as (seat, theirs):
            seat.pid = self._launcher.launch(seat.serial, worker, theirs)
            self.seats[seat.channel.fileno()] = seat
            self.poller.register(seat.channel, select.POLLIN)

    def remove(self, seat: WorkerHandle) -> None:
        """End a worker, if it has not ended, and forget it."""
        self.deafen(seat)
        del self.seats[seat.channel.fileno()]
        seat.close()
        seat.kill()

    def deafen(self, seat: WorkerHandle) -> None:
        """Hear no more of a worker but its death."""
        with contextlib.suppress(KeyError):
            self.poller.unregister(seat.channel)

    @property
    def late(self) -> bool:
        """Whether there are deaths that the poller does not show again."""
        return self._launcher is not None and bool(self._launcher.late)

    def deaths(self) -> Iterator[tuple[WorkerHandle, int]]:
        """Workers that have died, with their exit codes; negative for a signal.

        Raises:
            WorkerDied: The zygote has died.
        """
        assert self._launcher is not None
        for serial, code in self._launcher.deaths():
            for seat in list(self.seats.values()):
                if seat.serial == serial:
                    yield seat, code

    def wake(self) -> None:
        """Make the poller show something; from any thread."""
        if self._wake is not None:
            with contextlib.suppress(OSError):  # closed, or full: then it wakes anyway
                self._wake[1].send(b"!")

    def is_wake(self, fd: int) -> bool:
        """Whether ``fd``, which the poller shows, is that of `wake`."""
        return self._wake is not None and fd == self._wake[0].fileno()

    def drain_wake(self) -> None:
        """Take back every `wake` so far."""
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):
                self._wake[0].recv(65536)

    def stop(self, deadline: float) -> None:
        """End all workers: by end-of-file, and after a quarter of the time left by force."""
        seats = list(self.seats.values())
        for seat in seats:
            self.deafen(seat)
            seat.close()
        if self._launcher is not None:
            patience = max(0.0, deadline - time.monotonic())
            ended = self._launcher.join(patience / 4)
            for seat in seats:
                seat.kill()
            if not ended and not self._launcher.join(patience / 2):
                self._launcher.kill()
        self._launcher = None
        self.seats.clear()
        for end in self._wake or ():
            end.close()
        self._wake = None
        _crews.discard(self)

    def disown(self) -> None:
        """In a forked child: close the copies of what belongs to the parent."""
        for seat in list(self.seats.values()):
            seat.close()
            seat.kill()  # closes this copy of the lifeline; the parent's holds
        self.seats.clear()  # and unmaps the slots
        if self._launcher is not None:
            self._launcher.disown()
        for end in self._wake or ():
            end.close()


# A fork of this process would keep the workers' pipes open, and so keep the workers from ending with this process.
_crews: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _disown_all() -> None:
    for crew in list(_crews):
        with contextlib.suppress(Exception):
            crew.disown()
    _crews.clear()


def _retire_all() -> None:
    for crew in list(_crews):
        for seat in list(crew.seats.values()):
            seat.slots.retire_viewed()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_retire_all, after_in_child=_disown_all)
