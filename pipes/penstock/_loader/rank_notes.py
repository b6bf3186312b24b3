"""RankNotes: ranks compare what they are about to read, without waiting for each other.

A sampler that deals its indices to the ranks itself looks like any other, but the loader deals each share again, and most of the data is
lost in silence. Only the other ranks can tell. So the first rank that reads an epoch leaves a note in the store of the process group: a few
checksums. Every later rank compares its own. A rank that differs raises, and leaves a second note, the *alarm*, at which the others look
after 2, 4, 8, … batches and at the end of an epoch.

**Nothing depends on the store.** One background thread per loader talks to it, over a separate connection. The loop waits for an answer
twice in an epoch, after its note and at its end, for `_AT_MOST_S` each, and not while an earlier answer is missing. After an error this process writes no more notes.

**A false alarm would be worse than a missed difference.** So two loaders are compared only if they were built at the same place in the code,
with the same settings, and begin at the same position. If a process has two loaders of the same name that may differ, it gives the name up: it
replaces its note by an empty one, which agrees with everything. A note that is older than this process, or than its last process group, was
left by an earlier job, and is replaced.

Who touches what: the consumer thread counts the questions, and reads `_Clerk.answered` and `_Clerk.fault`, which the background thread writes. All notes of a process
are made in consumer threads.
"""

from __future__ import annotations

import hashlib
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

from penstock._errors import StateMismatch
from penstock._nodes.index_node import FirstNode
from penstock._nodes.node import place_of
from penstock._nodes.sampler_traits import length
from penstock._workers.bell import Bell

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableSequence, Sequence

    from penstock._loader.positions import Positions
    from penstock._memory.allocation import Allocate
    from penstock._nodes.node import State
    from penstock._nodes.sharder import Sharder
    from penstock._workers.thread_pool import ThreadPool

    Marks = Sequence[int]

log = logging.getLogger("penstock")

_AT_MOST_S: Final = 0.02
"""Seconds that the loop waits for an answer, which usually comes after 0.0003, and that it leaves between two looks."""
_STORE_S: Final = 10.0
"""Seconds after which the background thread gives a store up."""
_CLOCKS_S: Final = 10.0
"""Seconds by which the clocks of two hosts may differ."""
_FRAMES: Final = 3
"""Frames of the user's code that tell where a loader was built."""
_KEPT: Final = 256
"""Notes of a process that stay in a store. Older ones are deleted, because a run may have millions of epochs."""

_HOST: Final = socket.gethostname()
_HERE: Final = str(Path(__file__).parents[1]) + os.sep

_built: dict[str, weakref.WeakSet[RankNotes]] = {}  # by the place in the code
_lengths: dict[str, set[int | None]] = {}  # of the sources of all loaders with the same place and settings
_said: dict[str, Marks] = {}  # what is in the notes of this process
_given_up: set[str] = set()  # names of loaders, by their alarms


def dealt_twice(first: FirstNode[Any]) -> str:
    """Why ranks may get different items from ``first``, and what to do."""
    name = type(_source(first)).__name__
    return (
        f"Either {name} deals its items to the ranks itself, and the loader deals each share again: pass split='own', or build it for a single rank "
        f"(num_replicas=1, world_size=1, …), so that it yields everything. Or it is not seeded alike on every rank: give it the same seed everywhere, or no "
        f"private generator, so that the loader seeds it."
    )


@final
class RankNotes:
    """The notes of one loader, whose rank may come from a process group.

    Args:
        positions: Of the graph.
        sharder: Of the graph.
    """

    def __init__(self, positions: Positions, sharder: Sharder[Any]) -> None:
        self._positions = positions
        self._sharder = sharder
        self._place = _place_in_the_code()
        self._closed = False
        self._pool: ThreadPool | None = None
        self._clerk: _Clerk | None = None
        self._asked = 0.0  # when the last question was asked
        self._batches = 0
        self._entered: tuple[int, Any] | None = None  # the epoch and the source's place where reading began
        self._name: str | None = None  # of this loader among the ranks, once the note of this epoch was sent
        self._register()

    @classmethod
    def of(cls, positions: Positions, sharder: Sharder[Any] | None) -> RankNotes | None:
        """The notes of a loader, if its ranks share a source that only other ranks can judge, and may come from a process group."""
        if sharder is None or type(positions.first).note is FirstNode.note or not sharder.may_have_members:
            return None
        return cls(positions, sharder)

    def start(self) -> None:
        """A new iterator starts."""
        self._register()  # again, because this loader may be a copy
        self._positions.first.compared = len(self._sharder.members()) > 1

    def delivered(self, began: State | None) -> None:
        """A batch is about to be delivered. ``began`` is the state before it if it is the first one after a jump or in an epoch, otherwise None.

        Raises:
            StateMismatch: A rank reads something else.
        """
        if began is not None:
            self._batches, self._name, self._entered = 0, None, place_of(began)
        self._batches += 1
        if not self._batches & (self._batches - 1):  # 1, 2, 4, 8, …
            self._compare()
        self._raise()

    def ended(self) -> None:
        """The epoch is over.

        Raises:
            StateMismatch: A rank has read something else.
        """
        if self._entered is not None:
            self._compare(last=True)
            self._entered = None
        self._raise()

    def close(self) -> None:
        """End the thread. If the store does not answer, the thread is abandoned."""
        self._closed = True
        if self._clerk is not None and self._pool is not None:
            _end(self._clerk, self._pool, os.getpid())

    def _is_free(self, *, wait: bool) -> bool:
        return self._clerk is None or self._clerk.has_answered(wait=wait)

    def _register(self) -> None:
        _built.setdefault(self._place, weakref.WeakSet()).add(self)
        with suppress(Exception):
            _Board.of_group()  # now, so that this process learns when the group ends

    def _raise(self) -> None:
        if self._clerk is not None and self._clerk.fault is not None:
            fault, self._clerk.fault = self._clerk.fault, None
            name, (one, other) = type(_source(self._positions.first)).__name__, fault["ranks"]
            raise StateMismatch(
                f"{name} yields other items on rank {other} than on rank {one} in epoch {fault['epoch']}, so the ranks do not load parts of one sequence. "
                + dealt_twice(self._positions.first)
            )

    def _compare(self, *, last: bool = False) -> None:
        """Send this epoch's note, once there is one; after that, look for an alarm."""
        try:
            members = self._sharder.members()
            if len(members) > 1 and self._entered is not None and self._is_free(wait=last or self._name is None):
                epoch, place = self._entered
                board = _Board.of_group()
                if board is None or board.dead:
                    return
                if self._name is not None:
                    if last or time.monotonic() - self._asked > _AT_MOST_S:
                        self._ask(_Question(board, self._name), wait=last)
                elif place is not None and (marks := self._positions.first.note(place)):
                    self._ask(self._question(board, members, epoch, place["position"], marks), wait=True)
        except Exception as exc:
            self._entered = None
            log.debug("this loader is not compared with those of other ranks: %s: %s", type(exc).__name__, exc)

    def _question(self, board: _Board, members: Sequence[int], epoch: int, position: int, marks: Marks) -> _Question:
        """The note of this epoch."""
        settings = self._settings()
        peers = [one for one in list(_built[self._place]) if not one._closed and (one is self or one._settings() == settings)]
        lengths = _lengths.setdefault(settings, set())
        lengths.update(one._length() for one in peers)
        # Ranks that deal to themselves may have shares of different lengths, so the length names a loader only if there are several.
        name = settings, list(members), self._length() if len(lengths) > 1 else None
        key, alarm = _digest(name, epoch, position), _digest(name)
        same = sum(one._length() == self._length() for one in peers) == 1 and _said.setdefault(key, marks) == marks
        if not same and alarm not in _given_up:
            _given_up.add(alarm)
            log.info("two loaders that were built at %s may differ, so they are not compared with those of other ranks.", self._place)
        if len(_said) > 4 * _KEPT:
            del _said[next(iter(_said))]
        self._name = alarm
        return _Question(board, alarm, key, () if alarm in _given_up else marks, epoch)

    def _settings(self) -> str:
        """What two loaders must have in common to be compared."""
        return _digest(self._place, self._positions.settings(), self._positions.facts.rank_settings)

    def _length(self) -> int | None:
        return length(_source(self._positions.first))

    def _ask(self, question: _Question, *, wait: bool) -> None:
        if self._pool is None:
            clerk, pool = _started()
            weakref.finalize(self, _end, clerk, pool, os.getpid())  # before the pool's own, which has more patience
            self._clerk, self._pool = clerk, pool
        assert self._clerk is not None
        self._asked = time.monotonic()
        self._clerk.asked += 1
        self._pool.submit(question)
        self._clerk.has_answered(wait=wait)


class _Question(NamedTuple):
    """What the background thread does: look for an alarm, after it has written or compared a note if there is one."""

    board: _Board
    alarm: str
    key: str | None = None
    marks: Marks = ()
    epoch: int = 0


class _Clerk:
    """The work of the background thread."""

    def __init__(self) -> None:
        self.asked = self.answered = 0
        self._in_vain = 0  # the last question whose answer did not come in time
        self.fault: dict[str, Any] | None = None
        self._bell = Bell()

    def __call__(self, task: _Question, current_row: MutableSequence[int], allocate: Allocate) -> None:
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
        deadline = time.monotonic() + _AT_MOST_S
        while wait and self.answered < self.asked and self._in_vain < self.asked:
            if not self._bell.wait(deadline - time.monotonic()):
                self._in_vain = self.asked
        return self.answered == self.asked

    def _answer(self, board: _Board, alarm: str, key: str | None, marks: Marks, epoch: int) -> None:
        mine = _signed(marks=marks, rank=board.rank)
        if key is not None and not marks:
            board.put(key, mine)
        elif key is not None and not _agree((theirs := board.first(key, mine))["marks"], marks):
            self.fault = _signed(key=key, marks=theirs["marks"], ranks=sorted([theirs["rank"], board.rank]), epoch=epoch)
            board.put(alarm, self.fault)
        elif alarm not in _given_up and (heard := board.read(alarm)) is not None and (said := _said.get(heard["key"])):
            self.fault = heard if _agree(said, heard["marks"]) else self.fault


class _Board:
    """The store of one process group."""

    def __init__(self, store: Any, rank: int) -> None:
        self.dead = False
        self.rank = rank
        self._original = store
        self._store: Any = None
        self._written: dict[str, None] = {}

    @classmethod
    def of_group(cls) -> _Board | None:
        """The board of the present process group; None if there is none."""
        from torch.distributed import distributed_c10d as c10d

        world: Any = c10d.group.WORLD
        if world is None:
            _end_of_group(forget=False)  # a group that will be made is younger than all notes
            return None
        if world not in _boards:
            _boards[world] = cls(c10d._get_default_store(), c10d.get_rank())
            weakref.finalize(world, _end_of_group).atexit = False
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
        if len(self._written) > _KEPT:
            del self._written[old := next(iter(self._written))]
            self._opened().delete_key(old)

    def _opened(self) -> Any:
        """Another connection to the same server, so that an operation that hangs does not block the job's own."""
        if self._store is None:
            inner = self._original
            while (below := getattr(inner, "underlying_store", None)) is not None:
                inner = below
            if type(inner).__name__ == "FileStore":  # it has no server, and the last of its copies to be closed deletes the file
                self._store = self._original
            else:
                store = self._original.clone()
                store.set_timeout(timedelta(seconds=_STORE_S))
                self._store = store
        return self._store


_boards: weakref.WeakKeyDictionary[Any, _Board] = weakref.WeakKeyDictionary()


def _end_of_group(*, forget: bool = True) -> None:
    """There is no process group now. Its store may live on, as that of torchrun does, so what was written there until now is old."""
    global _since
    _since = time.time()
    if forget:
        _said.clear()
        _given_up.clear()


def _source(first: Any) -> Any:
    return getattr(first, "sampler", getattr(first, "iterable", first))


def _started() -> tuple[_Clerk, ThreadPool]:
    from penstock._workers.thread_pool import ThreadPool

    clerk = _Clerk()
    pool = ThreadPool(clerk, 1, name="penstock-notes")
    pool.start()
    return clerk, pool


def _end(clerk: _Clerk, pool: ThreadPool, pid: int) -> None:
    if os.getpid() != pid:  # a fork has no such thread
        return
    if clerk.has_answered(wait=True):
        pool.shutdown(0)
    else:
        pool.abandon()


def _agree(one: Iterable[int], other: Iterable[int]) -> bool:
    """Whether two notes have a checksum in common, or one of them was given up."""
    return not one or not other or not {*one}.isdisjoint(other)


def _signed(**note: Any) -> dict[str, Any]:
    return {**note, "at": time.time(), "host": _HOST}


def _is_old(note: dict[str, Any]) -> bool:
    """Whether a note is from before this process or its process group."""
    return bool(note["at"] < _since - (0.0 if note["host"] == _HOST else _CLOCKS_S))


def _began() -> float:
    """When this process began, in seconds since 1970."""
    with suppress(Exception):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()


_since = _began()  # notes that are older belong to an earlier job


def _digest(*what: Any) -> str:
    return "penstock/" + hashlib.blake2s(repr(what).encode(), digest_size=16).hexdigest()


def _place_in_the_code() -> str:
    """The innermost frames of the user's code, without folders, which may differ between hosts."""
    frame, found = sys._getframe(), list[str]()
    while (frame := frame.f_back) is not None and len(found) < _FRAMES:  # type: ignore[assignment]
        file = frame.f_code.co_filename
        if not (file.startswith(_HERE) or "site-packages" in file or "dist-packages" in file):
            found.append(f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}")
    return ", ".join(found)
