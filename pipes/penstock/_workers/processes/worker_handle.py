"""The pool's side of one worker process: its channel, the tasks it holds, and the memory that it shares with the
consumer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock._errors import SampleError, is_own_error
from penstock._memory.modes import neutral_modes
from penstock._memory.parcel import unpack
from penstock._memory.shared_memory import attach, create
from penstock._memory.slots import NO_SLOT, KeptBatches, SlotTable
from penstock._workers.pool import IDLE, Job
from penstock._workers.processes.protocol import ANSWER, AT_ONCE, DROPS, HELLO, TASK, VALUE, Area, receive, send
from penstock._workers.processes.remote_error import RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock._workers.processes.task_table import PendingTask


MOST_HELD = 64
"""Tasks that a worker may hold: their messages must fit its socket's buffer, so that a send never blocks."""

_NO_DROPS = (NO_SLOT,) * DROPS


class Answer(NamedTuple):
    """A worker's message; ``trouble`` is the error from mapping its slot here."""

    number: int
    status: int
    slot: int
    start: int
    end: int
    trouble: OSError | None


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker process.

    Attributes:
        serial: Distinguishes it from the worker that it replaces; both have the same number, ``worker``.
        held: Its unanswered tasks, oldest first; it does them in this order.
        ready: Whether it has started.
        stuck: Why it was killed, if it was.
        answered: When it last did, in nanoseconds of the meter's clock; 0: not yet.
    """

    serial: int
    worker: int
    channel: socket.socket
    area: Area
    slots: SlotTable
    _lifeline: Any
    _places: list[int]  # that are free
    pid: int = 0
    ready: bool = False
    stuck: str = ""
    answered: int = 0
    held: deque[PendingTask] = field(default_factory=deque)
    _lent: deque[tuple[int, int]] = field(default_factory=deque)  # the place and the slot of each task in `held`
    _unsent: bytes = b""  # messages of tasks in `held` that it has not heard of

    @classmethod
    @contextlib.contextmanager
    def connected(
        cls, serial: int, worker: int, places: int, kept_batches: KeptBatches, setup_bytes: int, setup_fds: list[int]
    ) -> Iterator[tuple[WorkerHandle, socket.socket]]:
        """A handle with the hello sent to its channel, and the worker's end of that channel, which the body passes to
        the worker it starts.
        """
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
            area.words[Area.ROW], area.words[Area.DOING] = IDLE, -1
            handle = cls(serial, worker, ours, area, SlotTable(kept_batches), lifeline, list(range(places)))
            send(ours, HELLO.pack(nbytes, setup_bytes), [memory, end, *setup_fds])
            yield handle, theirs
            # Not before: after an error or an interrupt in the body, our ends close, and a worker that was started
            # ends.
            undo.pop_all()

    @property
    def where(self) -> str:
        """A description of the worker."""
        return f"worker process {self.worker} (pid {self.pid})"

    def doing(self) -> PendingTask | None:
        """The task that the worker is doing; for a dead worker, the task in which it died."""
        number = self.area.words[Area.DOING]
        return next((task for task in self.held if task.number == number), None)

    @property
    def row(self) -> int:
        """The row of that task that it is loading, or `IDLE`."""
        return self.area.words[Area.ROW]

    def skip_below(self, number: int) -> None:
        """Make the worker skip tasks with lower numbers, except one that it has begun."""
        self.area.words[Area.WANTED] = number

    def hand(self, task: PendingTask) -> None:
        """Queue a task for the worker; `flush` sends it.

        Raises:
            OSError: A large task, and no memory or file descriptor for it. The worker does not hold it.
        """
        fds = []
        # A task's body lies in the shared area, and only its address goes over the socket: so messages have one size,
        # and `MOST_HELD` of them fit the buffer. A larger body gets memory of its own, before anything else: if there
        # is none, this worker must not count as its holder.
        if len(task.body) > Area.PLACE:
            fds.append(create(len(task.body)))
            attach(fds[0], len(task.body))[:] = task.body
        place, slot = self._places.pop(), self.slots.lend()
        self.held.append(task)
        self._lent.append((place, slot))
        task.job.worker = self.worker
        if not fds:
            self.area.places[place][: len(task.body)] = task.body
        drops = self.slots.dropped(DROPS)
        self._unsent += TASK.pack(task.number, place, len(task.body), slot, *drops, *_NO_DROPS[len(drops) :])
        # A descriptor is sent at once, so that of the messages that arrive together at most one has brought one.
        if fds or len(self._unsent) >= TASK.size * AT_ONCE:
            self.flush(fds)
        for fd in fds:
            os.close(fd)

    def flush(self, fds: list[int] | None = None) -> None:
        """Send all unsent messages at once; never blocks."""
        if not self._unsent:
            return
        # Cleared before sending, because a task sent twice would be done and answered twice. If Ctrl-C comes in
        # between, it is not sent at all, and the rollback replaces the worker.
        message, self._unsent = self._unsent, b""
        # it is dead, and its death brings the tasks back
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(self.channel, message, fds or ())

    def answers(self) -> list[Answer]:
        """Some of the worker's messages; empty if there are none left."""
        try:
            message, fds = receive(self.channel, ANSWER.size * AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        answers = []
        try:
            for number, status, slot, size, start, end in ANSWER.iter_unpack(message):
                trouble = (
                    self._map(slot, fds, size) if size else None
                )  # a new slot; of the answers that come together, at most one brings a descriptor
                answers.append(Answer(number, status, slot, start, end, trouble))
        finally:
            for fd in fds:
                os.close(fd)
        return answers

    def _map(self, slot: int, fds: list[int], size: int) -> OSError | None:
        """Map a slot that the worker has made.

        Where that fails, the worker is told to drop it, and the error is returned.
        """
        memory, trouble = None, None
        if fds:
            try:
                memory = attach(fds[0], size)
            except OSError as error:
                trouble = error
        else:  # the kernel drops descriptors that find no room
            trouble = OSError(
                errno.EMFILE,
                "too many open files in this process, so no result can be received. Close some, or raise the limit "
                "(ulimit -n)",
            )
        self.slots.add(slot, memory)
        return trouble

    def take_answer(self, answer: Answer, named: Callable[[Job], str]) -> tuple[PendingTask, Any, BaseException | None]:
        """The task that ``answer`` is about, with its value or its error; its place and its slot are free again.

        Args:
            answer: Of the oldest task in `held`.
            named: Describes a job, for errors.
        """
        task, (place, lent) = self.held.popleft(), self._lent.popleft()
        assert task.number == answer.number, "a worker answers in the order in which it was asked"
        self._places.append(place)
        # It used a different slot, because the lent one was too small, or none, because it needed none. The lent slot
        # is then free again, and worth keeping only in the second case: when every returned slot was kept, memory
        # filled up with slots too small for any result.
        if answer.slot != lent:
            self.slots.give_back(lent, useful=answer.slot == NO_SLOT)
        if answer.trouble is not None:
            return task, None, answer.trouble
        if task.job.done:  # discarded or given up: the worker has skipped it, or done it in vain
            self.slots.give_back(answer.slot)
            return task, None, None
        try:
            value = self.value(place, answer)
        except BaseException as error:
            if not is_own_error(error):
                raise
            lost = SampleError(
                f"{named(task.job)}: the result could not be rebuilt here: {type(error).__name__}: {error}"
            )
            lost.__cause__ = error
            return task, None, lost
        if answer.status == VALUE:
            return task, value, None
        return task, None, RemoteError(*value).rebuilt(self.where, named(task.job))

    def refusal(self, answer: Answer) -> Callable[[], BaseException]:
        """Makes the error that says why the worker cannot start."""
        if answer.trouble is not None:
            return partial(type(answer.trouble), *answer.trouble.args)
        return partial(RemoteError(*self.value(0, answer)).rebuilt, self.where, "starting the worker")

    def value(self, place: int, answer: Answer) -> Any:
        """The content of the answer, as a view of its slot, or of a copy of its place, which the next task
        overwrites.
        """
        with neutral_modes():
            if answer.slot != NO_SLOT:
                return unpack(self.slots.view(answer.slot), answer.start)
            return unpack(np.frombuffer(self.area.places[place][: answer.end], np.uint8).copy(), answer.start)

    def close(self) -> None:
        """Send the worker end-of-file."""
        self.channel.close()

    def kill(self) -> None:
        """SIGKILL from the kernel, which cannot hit another process that has since received the same pid."""
        self._lifeline.close()
