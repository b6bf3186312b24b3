"""The messages between the consumer and its worker processes, and the memory that each worker shares with the consumer.

Messages have a fixed size, and those sent together stay under 512 bytes, so none arrives in pieces. File descriptors
travel with them.
"""

from __future__ import annotations

import socket
import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from penstock._workers.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._workers.pool import Work


AT_ONCE = 5
"""The most messages that are sent or read together."""
DROPS = 8
"""Slots that one task message can tell the worker to drop."""

# bytes of the area, bytes of the pickled setup or 0; with both their fds and the lifeline's
HELLO = struct.Struct("<2q")
# Number, place, bytes (with an fd: of a segment of its own), slot lent or NO_SLOT; slots to drop.
TASK = struct.Struct(f"<4q{DROPS}q")
# Task number, status, slot (NO_SLOT: in the task's place), the slot's size if it is new (with its fd), start, end.
ANSWER = struct.Struct("<6q")
ORDER = struct.Struct("<2q")  # to the zygote: serial, worker; with the worker's end of its socket pair
REPORT = struct.Struct("<3q")  # from the zygote: serial, what, pid or exit code or errno

READY, REFUSED, VALUE, ERROR, SKIPPED = range(5)  # statuses of an ANSWER
BORN, ENDED, NOT_BORN, UP = range(4)  # what a REPORT says; UP is about the zygote itself
NO_DESCRIPTORS = 117
"""Exit code of a worker that ran out of file descriptors; its replacement starts with none open."""

MOST_FDS = 128  # with a hello; 3 with any other message. Linux passes up to 253
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)


@dataclass(frozen=True)
class Setup:
    """The setup that every worker receives once.

    Attributes:
        work: By fork or pickled.
        num_workers: The most workers that there may be, which is the number that each of them sees.
        seed: Together with its number, seeds a worker's own generators.
        worker_init_fn: Called with the worker's number as each worker starts, after seeding.
        name: Prefix of the processes' names.
    """

    work: Work
    num_workers: int
    seed: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    name: str = "penstock-map"


class Area:
    """Memory that one worker shares with the consumer: three words, its meter, and a place for each task that the
    worker may hold.

    The consumer writes a task into a free place; a small answer to it is written over it by the worker.

    Attributes:
        row: The first word: ``current_row`` of a `Work`.
        words: int64, each with one writer. By the worker, and read after its death: ``ROW``, the row being loaded, or
            `IDLE`, and ``DOING``, the number of the task being done, or -1. By the consumer: ``WANTED``, below which no
            task is still wanted.
        meter: How the worker has spent its time; the worker is its only writer.
    """

    ROW, DOING, WANTED = range(3)
    PLACE = 65536  # bytes
    METER = 64
    HEAD = 8192  # all before the first place

    def __init__(self, memory: memoryview) -> None:
        self.words = memory[: self.METER].cast("q")
        self.row: Any = self.words[self.ROW : self.ROW + 1]
        self.meter = Meter(memory[self.METER : self.METER + 8 * Meter.WORDS].cast("q"))
        self.places = [memory[start : start + self.PLACE] for start in range(self.HEAD, len(memory), self.PLACE)]

    @classmethod
    def size(cls, places: int) -> int:
        """Bytes of an area with this many places."""
        return cls.HEAD + places * cls.PLACE


class PassedFd:
    """A file descriptor in the pickled setup, such as that of a ``multiprocessing.Queue``: its place among those that
    come with the hello.
    """

    received: ClassVar[list[int]] = []
    """In the worker: those that came."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        """The descriptor, for `multiprocessing` to own."""
        return self.received[self.place]


def send(channel: socket.socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message, and file descriptors with it.

    A dead receiver is an error even where the program lets SIGPIPE kill it.

    Raises:
        BrokenPipeError: The receiver is gone. Or a `ConnectionResetError`, for the same reason.
    """
    # Not `socket.send_fds`, which drops its flags.
    channel.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else [], _NO_SIGPIPE)


def receive(channel: socket.socket, nbytes: int, flags: int = 0, most_fds: int = 3) -> tuple[bytes, list[int]]:
    """Messages of up to ``nbytes`` and the file descriptors that came with them; empty at end-of-file.

    The kernel drops descriptors for which this process's table has no room.

    Raises:
        BlockingIOError: ``flags`` say not to wait, and nothing is there.
    """
    # Not `socket.recv_fds`, which drops its flags (Python 3.11).
    try:
        data, ancillary, _, _ = channel.recvmsg(
            nbytes, socket.CMSG_LEN(most_fds * struct.calcsize("i")), flags | _CLOEXEC
        )
    except ConnectionResetError:
        return b"", []
    return data, [fd for _, _, fds in ancillary for fd in memoryview(fds).cast("i")]
