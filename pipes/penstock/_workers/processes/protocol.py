"""What the consumer and its processes say to each other, and the memory that each worker shares with the consumer.

Messages are of fixed size, under 512 bytes, hence never torn. File descriptors travel with them.
"""

from __future__ import annotations

import socket
import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._workers.pool import Work


AT_ONCE = 5
"""Messages that are sent or read together, at most: together under 512 bytes."""
DROPS = 8
"""Slots that one task message can tell the worker to drop."""

HELLO = struct.Struct("<2q")  # bytes of the area, bytes of the pickled setup or 0; with their fds and the lifeline's
TASK = struct.Struct(
    f"<4q{DROPS}q"
)  # number, place, bytes (of a segment of its own, if an fd comes along), slot lent or NO_SLOT; slots to drop
ANSWER = struct.Struct(
    "<6q"
)  # task number, status, slot or NO_SLOT for the task's place, its size where it is new (with an fd), start, end
ORDER = struct.Struct("<2q")  # to the zygote: serial, worker; with the worker's end of its socket pair
REPORT = struct.Struct("<3q")  # from the zygote: serial, what, pid or exit code or errno

READY, REFUSED, VALUE, ERROR, SKIPPED = range(5)  # statuses of an ANSWER
BORN, ENDED, NOT_BORN, UP = range(4)  # what a REPORT says; the last of the zygote itself
NO_DESCRIPTORS = 117
"""Exit code of a worker that has run out of file descriptors: another one starts with none open."""

MOST_FDS = 128  # with a hello, and 3 with any other message; Linux passes 253
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)


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


class PassedFd:
    """A file descriptor inside the pickled setup, for instance of a ``multiprocessing.Queue``: its place among those of the hello."""

    received: ClassVar[list[int]] = []
    """What came with the hello, in the worker."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        """The descriptor, for `multiprocessing` to own."""
        return self.received[self.place]


def send(channel: socket.socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message, and file descriptors with it. Where the program has SIGPIPE end it, a dead receiver is still no more than an error.

    Raises:
        BrokenPipeError: Nobody will receive it; or `ConnectionResetError`.
    """
    # Not `socket.send_fds`: it drops its flags.
    channel.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else [], _NO_SIGPIPE)


def receive(channel: socket.socket, nbytes: int, flags: int = 0, most_fds: int = 3) -> tuple[bytes, list[int]]:
    """One message and the file descriptors that came with it; empty at end-of-file.

    Descriptors that find no room in this process's table do not come: the kernel drops them.

    Raises:
        BlockingIOError: ``flags`` say not to wait, and nothing is there.
    """
    # Not `socket.recv_fds`: it drops its flags (Python 3.11).
    try:
        data, ancillary, _, _ = channel.recvmsg(nbytes, socket.CMSG_LEN(most_fds * struct.calcsize("i")), flags | _CLOEXEC)
    except ConnectionResetError:
        return b"", []
    return data, [fd for _, _, fds in ancillary for fd in memoryview(fds).cast("i")]
