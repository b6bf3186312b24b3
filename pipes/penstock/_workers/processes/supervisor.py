"""Tracks the live workers in a pool of processes: starts them, detects their deaths, and ends them.

Independent of tasks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import socket
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock._errors import ANEW, ClosedError, WorkerDied
from penstock._memory.slots import KeptBatches
from penstock._workers.lifetime import PATIENCE_S, undisturbed
from penstock._workers.processes.launchers import ByContext, Launcher
from penstock._workers.processes.main_module import check_not_importing
from penstock._workers.processes.worker_handle import WorkerHandle
from penstock._workers.processes.zygote import ByZygote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.context import BaseContext

    from penstock._workers.processes.protocol import Setup


_TRIES = 9
"""Attempts to start one worker by multiprocessing's fork server, which may die meanwhile. The pauses in between double,
up to 5 s in total.
"""

_ALL = 2**63 - 1
"""Above the number of any task."""

ENDED = f"these worker processes have ended. {ANEW}"


class Supervisor:
    """The workers of one pool.

    Args:
        setup: Sent to every worker.
        places: Tasks that a worker may hold.
        context: A start method or context; None: multiprocessing's own for the platform.

    Attributes:
        workers: By the file descriptor of its channel. Changed by the consumer's thread; others look at copies.
        leaving: Workers that were told to end, by serial, until their death is known.
        poller: Shows every channel, every death, and `wake`.
    """

    def __init__(self, setup: Setup, places: int, context: str | BaseContext | None) -> None:
        self.workers: dict[int, WorkerHandle] = {}
        self.leaving: dict[int, WorkerHandle] = {}
        self.poller = select.poll()
        self._setup = setup
        self._places = places
        self._context = context
        self._counted: dict[int, list[int]] = {}  # by serial: the counts of workers that have ended
        self._serial = 0
        self._stopping = False
        self._launching = threading.Lock()  # held by the helper thread that starts a worker, and by `stop` for good
        self._settled = False
        # each worker may have a part of every batch in work
        self._kept_batches = KeptBatches(places * setup.num_workers)
        self._launcher: Launcher | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None  # read here, written by `wake`

    def start(self, workers: int) -> None:
        """Start this many workers, or raise and start none."""
        check_not_importing()
        if multiprocessing.current_process().daemon:
            raise RuntimeError(
                'a daemonic process cannot start worker processes. Use method="thread" or num_workers=0 here.'
            )
        context: Any = (
            multiprocessing.get_context(self._context)
            if self._context is None or isinstance(self._context, str)
            else self._context
        )
        method = context.get_start_method()
        self.stop(time.monotonic() + PATIENCE_S)  # what is left of a start that was interrupted
        # A new lock, because `stop` never releases the old one: a late helper thread must not find it free.
        self._stopping, self._settled, self._launching = False, False, threading.Lock()
        try:
            self._launcher = (
                ByZygote(self._setup, self.poller) if method == "fork" else ByContext(self._setup, context, self.poller)
            )
            _supervisors.add(self)
            self._launcher.start()
            undisturbed(self._make_wake, self._launching)
            for worker in range(workers):
                self.launch(worker)
        except BaseException:
            self.stop(time.monotonic() + PATIENCE_S)
            raise

    def _make_wake(self) -> None:
        """Not where a handler may raise: `socket.socketpair` is Python code, which then loses a descriptor."""
        self._wake = socket.socketpair()
        for end in self._wake:
            end.setblocking(False)
        self.poller.register(self._wake[0], select.POLLIN)

    @property
    def working(self) -> bool:
        """Whether it was started, and not stopped."""
        return self._launcher is not None

    def launch(self, worker: int) -> None:
        """Start one worker.

        Raises:
            OSError: No process, memory or file descriptor is left for it.
            RuntimeError: No thread is left to start it.
            WorkerDied: The zygote has died.
            ClosedError: `stop` came first.
        """
        if self._launcher is None:
            raise ClosedError(ENDED)
        # In a helper thread, where no signal handler runs: an interrupt between the fork and the entry in `workers`
        # would leak a process.
        undisturbed(partial(self._launch, self._launcher, worker), self._launching)

    def _launch(self, launcher: Launcher, worker: int) -> None:
        for number in range(_TRIES):
            self._serial += 1
            try:
                with WorkerHandle.connected(
                    self._serial, worker, self._places, self._kept_batches, *launcher.greeting()
                ) as (
                    handle,
                    theirs,
                ):
                    handle.pid = launcher.launch(handle.serial, worker, theirs)
                    if self._launcher is not launcher:  # `stop` did not wait this long; the process ends by itself
                        raise ClosedError(ENDED)
                    self.workers[handle.channel.fileno()] = handle
                    self.poller.register(handle.channel, select.POLLIN)
            except ConnectionError:  # the fork server has died, such as from a signal to the whole group
                if self._stopping:
                    break
                # A dying server refuses connections for a moment, and multiprocessing replaces it only when it is gone.
                time.sleep(0.01 * 2**number)
            else:
                return
        raise WorkerDied(
            f"multiprocessing's fork server could not start worker process {worker}: it died, or refused, {_TRIES} "
            f"times. What it printed says why. It imports your script, so the code of the script belongs under `if "
            f'__name__ == "__main__":`.'
        )

    def replace_all(self, workers: int) -> None:
        """Kill all workers, and start this many new ones."""
        # an interrupt may have ended the wait for the helper thread, which is still starting a worker
        with self._launching:
            pass
        for handle in list(self.workers.values()):
            self.remove(handle)
        for worker in range(workers):
            self.launch(worker)

    def remove(self, handle: WorkerHandle) -> None:
        """Kill a worker if it is alive, and forget it."""
        self._forget(handle)
        handle.close()
        handle.kill()

    def dismiss(self, number: int) -> None:
        """Ask the workers from ``number`` on to end, and forget them, once they hold no task."""
        for handle in list(self.workers.values()):
            if handle.worker >= number and not handle.held:
                self.leaving[handle.serial] = handle
                self._forget(handle)
                handle.close()

    def _forget(self, handle: WorkerHandle) -> None:
        """Look the worker up by identity, because an interrupt at the end of `launch` may have closed its channel,
        which then has no number.
        """
        self._counted[handle.serial] = handle.area.meter.counted(ended=True)
        for fd in [fd for fd, known in self.workers.items() if known is handle]:
            with contextlib.suppress(KeyError):  # `stop_reading`, or an interrupt, was first
                self.poller.unregister(fd)
            del self.workers[fd]

    def stop_reading(self, handle: WorkerHandle) -> None:
        """Make the poller report only the death of a worker from now on."""
        with contextlib.suppress(KeyError, ValueError):  # it was unregistered, or closed
            self.poller.unregister(handle.channel)

    @property
    def hears_ctrl_c(self) -> bool:
        """See `Launcher`."""
        return self._launcher is not None and self._launcher.hears_ctrl_c

    @property
    def missed_deaths(self) -> bool:
        """Whether `deaths` has some that the poller will not show."""
        return self._launcher is not None and bool(self._launcher.missed_deaths)

    def deaths(self) -> Iterator[tuple[WorkerHandle, int]]:
        """The workers that have died, with their exit codes (negative: a signal).

        Raises:
            WorkerDied: The zygote has died.
        """
        assert self._launcher is not None
        for serial, code in self._launcher.deaths():
            if (left := self.leaving.pop(serial, None)) is not None:
                left.kill()  # closes its lifeline
            for handle in list(self.workers.values()):
                if handle.serial == serial:
                    yield handle, code

    def counted(self) -> list[list[int]]:
        """The counts of each worker's meter, including workers that have ended."""
        working = {handle.serial: handle.area.meter.counted() for handle in list(self.workers.values())}
        return list({**working, **self._counted}.values())

    def skip_below(self, number: int) -> None:
        """Make the workers skip every task with a lower number that they have not begun."""
        for handle in self.workers.values():
            handle.skip_below(number)

    def wake(self) -> None:
        """Wake the thread that waits on the poller. Thread-safe."""
        if self._wake is not None:
            with contextlib.suppress(OSError):  # closed; or full, and then it wakes anyway
                self._wake[1].send(b"!")

    def is_wake(self, fd: int) -> bool:
        """Whether ``fd``, which the poller has shown, is that of `wake`."""
        return self._wake is not None and fd == self._wake[0].fileno()

    def drain_wake(self) -> None:
        """Take back every `wake` so far."""
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):
                self._wake[0].recv(65536)

    def stop(self, deadline: float) -> None:
        """End all workers: ask by end-of-file, and after a quarter of the time left, kill. Idempotent.

        An interrupt may come anywhere. Every step can be repeated, and the state is cleared only when all are done, so
        the next call does the rest.
        """
        self._stopping = True
        if not self._settled:
            self._settled = self._launching.acquire(timeout=max(0.0, deadline - time.monotonic()))
        self.skip_below(_ALL)
        self._counted |= {handle.serial: handle.area.meter.counted(ended=True) for handle in self.workers.values()}
        workers = [*self.leaving.values(), *self.workers.values()]
        for handle in workers:
            self.stop_reading(handle)
            handle.close()
        if self._launcher is not None:
            patience = max(0.0, deadline - time.monotonic())
            ended = self._launcher.join(patience / 4)
            for handle in workers:
                handle.kill()
            if not ended and not self._launcher.join(patience / 2):
                self._launcher.kill()
        self.workers.clear()
        self.leaving.clear()
        for end in self._wake or ():
            end.close()
        self.poller = select.poll()
        self._wake = self._launcher = None
        _supervisors.discard(self)

    def disown(self) -> None:
        """In a forked child: close the copies of what belongs to the parent."""
        for handle in [*self.leaving.values(), *self.workers.values()]:
            handle.close()
            handle.kill()  # closes this copy of the lifeline; the parent's holds
        self.workers.clear()  # and unmaps the slots
        if self._launcher is not None:
            self._launcher.disown()
        for end in self._wake or ():
            end.close()


# A fork of this process has copies of the workers' channels and lifelines. If it kept them open, the workers would
# outlive this process.
_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _disown_all() -> None:
    for supervisor in list(_supervisors):
        with contextlib.suppress(Exception):
            supervisor.disown()
    _supervisors.clear()


def _retire_all() -> None:
    """Retire the slots that are viewed now, because the fork may keep viewing them in shared memory."""
    for supervisor in list(_supervisors):
        for handle in list(supervisor.workers.values()):
            handle.slots.retire_viewed()


os.register_at_fork(before=_retire_all, after_in_child=_disown_all)
