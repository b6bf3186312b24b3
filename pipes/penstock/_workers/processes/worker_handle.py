"""One worker process, as the engine sees it, and the tasks that it holds."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock._memory.modes import neutral_modes
from penstock._memory.parcel import unpack
from penstock._memory.shared_memory import attach, create
from penstock._memory.slots import NO_SLOT, KeptBatches, SlotTable
from penstock._workers.pool import IDLE, Job
from penstock._workers.processes.protocol import ANSWER, AT_ONCE, DROPS, HELLO, TASK, Area, receive, send

if TYPE_CHECKING:
    from collections.abc import Iterator


MOST_HELD = 64
"""Tasks that a worker may hold: their messages must fit the buffer of its socket, so that a send never blocks."""

_NO_DROPS = (NO_SLOT,) * DROPS


class Answer(NamedTuple):
    """A worker's message; ``trouble`` is what has kept its slot from being mapped here."""

    number: int
    status: int
    slot: int
    start: int
    end: int
    trouble: OSError | None


@dataclass(slots=True, eq=False)
class PendingTask:
    """A task on its way. ``job`` is None once it was discarded; ``fatal_rows`` are those on which a worker died."""

    job: Job | None
    number: int
    body: bytes
    place: int = 0
    lent: int = NO_SLOT
    fatal_rows: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker process, as the engine sees it."""

    serial: int
    worker: int
    channel: socket.socket
    lifeline: Any
    area: Area
    slots: SlotTable
    places: list[int]
    pid: int = 0
    ready: bool = False
    held: deque[PendingTask] = field(default_factory=deque)
    unsent: bytes = b""  # tasks that it holds and has not heard of
    stuck: str = ""  # why the engine has killed it

    @classmethod
    @contextlib.contextmanager
    def taken(
        cls, serial: int, worker: int, places: int, kept_batches: KeptBatches, setup_bytes: int, setup_fds: list[int]
    ) -> Iterator[tuple[WorkerHandle, socket.socket]]:
        """A seat for a new worker, with the greeting in its channel, and the worker's end of that, to be passed on in the body."""
        nbytes = Area.size(places)
        with contextlib.ExitStack() as passing, contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            passing.enter_context(theirs)
            undo.enter_context(ours)
            end, other = os.pipe()
            passing.callback(os.close, end)
            lifeline = undo.enter_context(os.fdopen(other, "wb", buffering=0))
            memory = create(nbytes)
            passing.callback(os.close, memory)
            area = Area(attach(memory, nbytes))
            area.cells[Area.ROW], area.cells[Area.DOING] = IDLE, -1
            seat = cls(serial, worker, ours, lifeline, area, SlotTable(kept_batches), list(range(places)))
            send(ours, HELLO.pack(nbytes, setup_bytes), [memory, end, *setup_fds])
            yield seat, theirs
            undo.pop_all()

    @property
    def where(self) -> str:
        """The worker in words."""
        return f"worker process {self.worker} (pid {self.pid})"

    def doing(self) -> PendingTask | None:
        """The task that the worker is in the middle of."""
        number = self.area.cells[Area.DOING]
        return next((entry for entry in self.held if entry.number == number), None)

    def hand(self, entry: PendingTask) -> None:
        """Give the worker a task; it learns of it by `flush`."""
        fds = []
        if len(entry.body) > Area.PLACE:
            fds.append(create(len(entry.body)))
            attach(fds[0], len(entry.body))[:] = entry.body
        entry.place, entry.lent = self.places.pop(), self.slots.lend()
        self.held.append(entry)
        if entry.job is not None:
            entry.job.worker = self.worker
        if not fds:
            self.area.places[entry.place][: len(entry.body)] = entry.body
        drops = self.slots.dropped(DROPS)
        self.unsent += TASK.pack(entry.number, entry.place, len(entry.body), entry.lent, *drops, *_NO_DROPS[len(drops) :])
        if fds or len(self.unsent) >= TASK.size * AT_ONCE:
            self.flush(fds)
        for fd in fds:
            os.close(fd)

    def flush(self, fds: list[int] | None = None) -> None:
        """Send what was not sent, all at once; never blocks."""
        message, self.unsent = self.unsent, b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: its death brings the tasks back
            send(self.channel, message, fds or ())

    def answers(self) -> list[Answer]:
        """What the worker has sent, some of it at least; none where there is nothing."""
        try:
            message, fds = receive(self.channel, ANSWER.size * AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        answers = []
        for number, status, slot, size, start, end in ANSWER.iter_unpack(message):
            trouble = None
            if size:  # a new one; at most one of those that come together has brought its descriptor
                try:
                    self._map(slot, fds, size)
                except OSError as error:
                    trouble = error
            answers.append(Answer(number, status, slot, start, end, trouble))
        for fd in fds:
            os.close(fd)
        return answers

    def _map(self, slot: int, fds: list[int], size: int) -> None:
        """Map a slot that the worker has made; where that fails, the worker is told to drop it.

        Raises:
            OSError: No memory, or no file descriptor: then ``fds`` may be empty, because the kernel drops those that find no place.
        """
        memory = None
        try:
            if not fds:
                raise OSError(
                    errno.EMFILE,
                    "too many open files in this process, so no result can come in. Close some, or raise the limit (ulimit -n)",
                )
            memory = attach(fds[0], size)
        finally:
            self.slots.add(slot, memory)

    def value(self, place: int, answer: Answer) -> Any:
        """What the answer holds, over the slot itself, or over a copy of the place, which the next task needs."""
        with neutral_modes():
            if answer.slot != NO_SLOT:
                return unpack(self.slots.view(answer.slot), answer.start)
            return unpack(np.frombuffer(self.area.places[place][: answer.end], np.uint8).copy(), answer.start)

    def close(self) -> None:
        """End-of-file for the worker."""
        self.channel.close()

    def kill(self) -> None:
        """SIGKILL from the kernel, which cannot hit a process that has come to bear the same pid."""
        self.lifeline.close()
