"""NoteBoard: the notes that ranks leave for each other in the store of their process group, and the thread that writes
and reads them.

Nothing waits for a store here but the background thread. `RankNotes` decides what is noted, and under which name.

A store may outlive the process group, or hold what an earlier job has left. So each note has a time, and one that is
older than this process, or than the end of its last process group, is replaced.

Who touches what: the consumer thread counts the questions, and reads `Clerk.answered` and `Clerk.fault`, which the
background thread writes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from penstock._workers.bell import Bell

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableSequence, Sequence

    from penstock._memory.allocation import Allocate
    from penstock._workers.thread_pool import ThreadPool

    Marks = Sequence[int]

log = logging.getLogger("penstock")

AT_MOST_S: Final = 0.02
"""Seconds that the loop waits for an answer, which usually comes after 0.0003, and that it leaves between two looks."""
STORE_S: Final = 10.0
"""Seconds after which the background thread gives a store up."""
_CLOCKS_S: Final = 10.0
"""Seconds by which the clocks of two hosts may differ."""
KEPT: Final = 256
"""Notes of a process that stay in a store, and a quarter of those that it remembers. Older ones are dropped, because a
run may have millions of epochs.
"""

_HOST: Final = socket.gethostname()

said_here: dict[str, Marks] = {}  # what is in the notes of this process
given_up: dict[str, None] = {}  # names of loaders, by their alarms


@final
class Question(NamedTuple):
    """What the background thread does: look for an alarm, after it has written or compared a note if there is one."""

    board: Board
    alarm: str
    key: str | None = None
    marks: Marks = ()
    epoch: int = 0


@final
class Clerk:
    """The work of the background thread."""

    def __init__(self) -> None:
        self.asked = self.answered = 0
        self._in_vain = 0  # the last question whose answer did not come in time
        self.fault: dict[str, Any] | None = None
        self._bell = Bell()

    def __call__(self, task: Question, current_row: MutableSequence[int], allocate: Allocate) -> None:
        try:
            if not task.board.dead:
                self._answer(*task)
        except Exception as exc:
            task.board.dead = True  # also because a late answer would be taken for the next one
            log.debug("the ranks cannot compare what they read: %s: %s", type(exc).__name__, exc)
        self.answered += 1
        self._bell.ring()

    def name(self, task: Any, row: int) -> str:
        return "a note for the other ranks"

    def has_answered(self, *, wait: bool) -> bool:
        """Whether the last question was answered. ``wait`` for that, but not long, and only once for each question."""
        deadline = time.monotonic() + AT_MOST_S
        while wait and self.answered < self.asked and self._in_vain < self.asked:
            if not self._bell.wait(deadline - time.monotonic()):
                self._in_vain = self.asked
        return self.answered == self.asked

    def _answer(self, board: Board, alarm: str, key: str | None, marks: Marks, epoch: int) -> None:
        mine = _signed(marks=marks, rank=board.rank)
        if key is not None and not marks:
            board.put(key, mine)
        elif key is not None and not agree((theirs := board.first(key, mine))["marks"], marks):
            self.fault = _signed(
                key=key, marks=theirs["marks"], ranks=sorted([theirs["rank"], board.rank]), epoch=epoch
            )
            board.put(alarm, self.fault)
        elif (
            alarm not in given_up and (heard := board.read(alarm)) is not None and (said := said_here.get(heard["key"]))
        ):
            self.fault = heard if agree(said, heard["marks"]) else self.fault


@final
class Board:
    """The store of one process group."""

    def __init__(self, store: Any, rank: int) -> None:
        self.dead = False
        self.rank = rank
        self._original = store
        self._store: Any = None
        self._written: dict[str, None] = {}

    @classmethod
    def of_group(cls) -> Board | None:
        """The board of the present process group; None if there is none."""
        from torch.distributed import distributed_c10d as c10d

        world: Any = c10d.group.WORLD
        if world is None:
            _end_of_group(forget=False)  # a group that will be made is younger than all notes
            return None
        if world not in _boards:
            if _boards:  # something still holds the group before
                _end_of_group()
            _boards[world] = cls(c10d._get_default_store(), c10d.get_rank())
            weakref.finalize(world, _collected).atexit = False
        return _boards[world]

    def first(self, key: str, note: dict[str, Any]) -> dict[str, Any]:
        """The first note of this name: ``note``, unless there is one."""
        text = json.dumps(note)
        there = self._exchange(key, "", text)
        if _is_old(json.loads(there)):
            there = self._exchange(key, there, text)
        found: dict[str, Any] = json.loads(there)
        return found

    def read(self, key: str) -> dict[str, Any] | None:
        """The note of this name; None if there is none. Does not wait for one, as ``get`` of a store does."""
        there = self._exchange(key, "-", "-")
        found = None if there == "-" else json.loads(there)
        return None if found is None or _is_old(found) else found

    def put(self, key: str, note: dict[str, Any]) -> None:
        self._opened().set(key, json.dumps(note))
        self._remember(key)

    def _exchange(self, key: str, expected: str, desired: str) -> str:
        text: str = self._opened().compare_set(key, expected, desired).decode()
        if desired != "-":
            self._remember(key)
        return text

    def _remember(self, key: str) -> None:
        self._written[key] = None
        if len(self._written) > KEPT:
            del self._written[old := next(iter(self._written))]
            self._opened().delete_key(old)

    def _opened(self) -> Any:
        """Another connection to the same server, so that an operation that hangs does not block the job's own."""
        if self._store is None:
            inner = self._original
            while (below := getattr(inner, "underlying_store", None)) is not None:
                inner = below
            # it has no server, and the last of its copies to be closed deletes the file
            if type(inner).__name__ == "FileStore":
                self._store = self._original
            else:
                store = self._original.clone()
                store.set_timeout(timedelta(seconds=STORE_S))
                self._store = store
        return self._store


_boards: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()


def _end_of_group(*, forget: bool = True) -> None:
    """There is no process group now.

    Its store may live on, as that of torchrun does, so what was written there until now is old.
    """
    global since
    since = time.time()
    if forget:
        said_here.clear()
        given_up.clear()


def _collected() -> None:
    """A group was.

    If something had held it for long, `Board.of_group` has noticed its end already, and another group may live.
    """
    from torch.distributed import distributed_c10d as c10d

    if c10d.group.WORLD is None or c10d.group.WORLD not in _boards:
        _end_of_group()


def _forked() -> None:
    """This new process is no rank of its parent's group, and must not use the parent's connection, whose replies would
    cross.
    """
    with suppress(Exception):
        if "torch.distributed.distributed_c10d" in sys.modules:
            Board.of_group()
    for board in _boards.values():
        board.dead = True
    _end_of_group()


def drop_oldest(*tables: dict[str, Any]) -> None:
    for table in tables:
        while len(table) > 4 * KEPT:
            del table[next(iter(table))]


def started() -> tuple[Clerk, ThreadPool]:
    from penstock._workers.thread_pool import ThreadPool

    clerk = Clerk()
    pool = ThreadPool(clerk, 1, name="penstock-notes")
    pool.start()
    return clerk, pool


def end(clerk: Clerk, pool: ThreadPool) -> None:
    if clerk.has_answered(wait=True):
        pool.shutdown(0)
    else:
        pool.abandon()


def agree(one: Iterable[int], other: Iterable[int]) -> bool:
    """Whether two notes have a checksum in common, or one of them was given up."""
    return not one or not other or not {*one}.isdisjoint(other)


def _signed(**note: Any) -> dict[str, Any]:
    return {**note, "at": time.time(), "host": _HOST}


def _is_old(note: dict[str, Any]) -> bool:
    """Whether a note is from before this process or its process group."""
    return bool(note["at"] < since - (0.0 if note["host"] == _HOST else _CLOCKS_S))


def began() -> float:
    """When this process began, in seconds since 1970."""
    with suppress(Exception):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()


since = began()  # notes that are older belong to an earlier job
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
