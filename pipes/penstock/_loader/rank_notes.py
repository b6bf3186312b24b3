"""RankNotes: ranks compare what they are about to read, without waiting for each other.

A sampler that deals its indices to the ranks itself looks like any other, but the loader deals each share again, and
most of the data is lost in silence. Only the other ranks can tell. So the first rank that reads an epoch leaves a note
in the store of the process group: a few checksums. Every later rank compares its own. A rank that differs raises, and
leaves a second note, the *alarm*, at which the others look after 2, 4, 8, … batches and at the end of an epoch.

**Nothing depends on the store.** One background thread per loader talks to it, over a separate connection. The loop
waits for an answer twice in an epoch, after its note and at its end, for `AT_MOST_S` each, and not while an earlier
answer is missing. After an error this process writes no more notes in the store.

**A false alarm would be worse than a missed difference.** So two loaders are compared only if they were built at the
same place in the code, with the same settings but for seeds, and begin at the same position. If a process has two
loaders of the same name that may differ, it gives the name up: it replaces its note by an empty one, which agrees with
everything. A note that is older than this process, or than its last process group, was left by an earlier job, and is
replaced. One false alarm is accepted: two loaders of one place, equal in settings and lengths, that ranks read in a
different order.

All notes of a process are made in consumer threads; see `Clerk` for the background thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
import traceback
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, final

from penstock._errors import StateMismatch
from penstock._fetch.dataset_facts import length
from penstock._fetch.users_code import is_library_file
from penstock._loader.note_board import (
    AT_MOST_S,
    Board,
    Clerk,
    Question,
    agree,
    drop_oldest,
    end,
    given_up,
    said_here,
    started,
)
from penstock._loader.state_dict import SEEDS
from penstock._nodes.index_node import FirstNode, source_of
from penstock._nodes.node import place_of
from penstock._workers.lifetime import when_abandoned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._loader.note_board import Marks
    from penstock._loader.positions import Positions
    from penstock._nodes.node import State
    from penstock._nodes.sharder import Sharder
    from penstock._workers.thread_pool import ThreadPool

log = logging.getLogger("penstock")

FRAMES: Final = 3
"""Frames of the user's code that tell where a loader was built."""

_HERE: Final = str(Path(__file__).parents[1]) + os.sep

_built: dict[str, weakref.WeakSet[RankNotes]] = {}  # by the place in the code
_lengths: dict[str, set[int | None]] = {}  # of the sources of all loaders with the same place and settings


def dealt_twice(first: FirstNode[Any]) -> str:
    """Why ranks may get different items from ``first``, and what to do."""
    name = _name_of(first)
    if first.why_ranks_differ is not None:
        return first.why_ranks_differ
    if name == _STREAM:
        return (
            "Its dataset asks for its rank when it is read (RANK, torch.distributed.get_rank()), or is not seeded "
            "alike on every rank. Let it yield the same items on every rank: the loader deals them."
        )
    return (
        f"Either {name} deals its items to the ranks itself, and the loader deals each share again: pass split='own', "
        f"or build it for a single rank (num_replicas=1, world_size=1, …), so that it yields everything. Or it is not "
        f"seeded alike on every rank: give it the same seed everywhere, or no private generator, so that the loader "
        f"seeds it."
    )


def _name_of(first: FirstNode[Any]) -> str:
    source = source_of(first)
    return _STREAM if source is first and first.why_ranks_differ is None else type(source).__name__


_STREAM: Final = "A Stream"


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
        self._place = place_in_the_code()
        self._closed = self._given_up = False
        self._pool: ThreadPool | None = None
        self._clerk: Clerk | None = None
        self._asked = 0.0  # when the last question was asked
        self._batches = 0
        self._entered: tuple[int, Any] | None = None  # the epoch and the source's place where reading began
        self._name: str | None = None  # of this loader among the ranks, once the note of this epoch was sent
        self._register()

    @classmethod
    def of(cls, positions: Positions, sharder: Sharder[Any] | None) -> RankNotes | None:
        """The notes of a loader, if its ranks share a source that only other ranks can judge, and may come from a
        process group.
        """
        if sharder is None or not positions.first.has_notes or not sharder.may_have_members:
            return None
        return cls(positions, sharder)

    def start(self) -> None:
        """A new iterator starts."""
        self._register()  # again, because this loader may be a copy
        self._positions.first.compared = len(self._sharder.members()) > 1

    def delivered(self, began: State | None) -> None:
        """A batch is about to be delivered.

        ``began`` is the state before it if it is the first one after a jump or in an epoch, otherwise None.

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
        self._raise()
        self._entered = None

    def close(self) -> None:
        """End the thread. If the store does not answer, the thread is abandoned."""
        self._closed = True
        if self._clerk is not None and self._pool is not None:
            end(self._clerk, self._pool)

    def _is_free(self, *, wait: bool) -> bool:
        return self._clerk is None or self._clerk.has_answered(wait=wait)

    def _register(self) -> None:
        _built.setdefault(self._place, weakref.WeakSet()).add(self)
        with suppress(Exception):
            Board.of_group()  # now, so that this process learns when the group ends

    def _raise(self) -> None:
        if self._clerk is not None and self._clerk.fault is not None:
            fault, self._clerk.fault = self._clerk.fault, None
            if not self._is_comparable():
                return
            name, (one, other) = _name_of(self._positions.first), fault["ranks"]
            raise StateMismatch(
                (
                    f"{name} yields other items on rank {other} than on rank {one} in epoch {fault['epoch']}, so the "
                    f"ranks do not load parts of one sequence. "
                )
                + dealt_twice(self._positions.first)
            )

    def _is_comparable(self) -> bool:
        """Whether this rank's own data, begun a second time, is the same. Otherwise it is not compared from now on."""
        first, place = self._positions.first, cast("Any", self._entered and self._entered[1])
        try:
            began = () if place is None else first.note(place)
            self._given_up = not agree(began, began and first.note(place, again=True))
            why = "gives other items when it is begun again"
        except Exception as exc:
            self._given_up, why = True, f"cannot be begun again ({type(exc).__name__}: {exc})"
        if self._given_up:
            log.info("%s %s, so it is not compared with that of other ranks.", _name_of(first), why)
        return not self._given_up

    def _compare(self, *, last: bool = False) -> None:
        """Send this epoch's note, once there is one; after that, look for an alarm."""
        try:
            members = self._sharder.members()
            free = not self._given_up and self._is_free(wait=last or self._name is None)
            if len(members) > 1 and self._entered is not None and free:
                epoch, place = self._entered
                board = Board.of_group()
                if board is None or board.dead:
                    return
                if self._name is not None:
                    if last or time.monotonic() - self._asked > AT_MOST_S:
                        self._ask(Question(board, self._name), wait=last)
                elif place is not None and (marks := self._positions.first.note(place)):
                    self._ask(self._question(board, members, epoch, place["position"], marks), wait=True)
        except Exception as exc:
            self._entered = None
            log.debug("this loader is not compared with those of other ranks: %s: %s", type(exc).__name__, exc)

    def _question(self, board: Board, members: Sequence[int], epoch: int, position: int, marks: Marks) -> Question:
        """The note of this epoch."""
        settings = self._settings()
        peers = [
            one for one in list(_built[self._place]) if not one._closed and (one is self or one._settings() == settings)
        ]
        lengths = _lengths.setdefault(settings, set())
        if len(lengths) < 2:
            lengths.update(one._length() for one in peers)
        # Ranks that deal to themselves may have shares of different lengths, so the length names a loader only if there
        # are several.
        name = settings, list(members), self._length() if len(lengths) > 1 else None
        key, alarm = _digest(name, epoch, position), _digest(name)
        same = sum(one._length() == self._length() for one in peers) == 1 and agree(
            said_here.setdefault(key, marks), marks
        )
        if not same and alarm not in given_up:
            given_up[alarm] = None
            log.info(
                "two loaders that were built at %s may differ, so they are not compared with those of other ranks.",
                self._place,
            )
        drop_oldest(said_here, given_up, _lengths)
        self._name = alarm
        return Question(board, alarm, key, () if alarm in given_up else marks, epoch)

    def _settings(self) -> str:
        """What two loaders must have in common to be compared."""
        return _digest(self._place, _without_seeds(self._positions.settings()), self._positions.facts.rank_settings)

    def _length(self) -> int | None:
        return length(source_of(self._positions.first))

    def _ask(self, question: Question, *, wait: bool) -> None:
        if self._pool is None:
            clerk, pool = started()
            when_abandoned(self, partial(end, clerk, pool))  # before the pool's own, which has more patience
            self._clerk, self._pool = clerk, pool
        assert self._clerk is not None
        self._asked = time.monotonic()
        self._clerk.asked += 1
        self._pool.submit(question)
        self._clerk.has_answered(wait=wait)


def _digest(*what: Any) -> str:
    return "penstock/" + hashlib.blake2s(repr(what).encode(), digest_size=16).hexdigest()


def place_in_the_code() -> str:
    """The innermost frames of the user's code (if all code is installed, of any code but ours), without folders, which
    may differ between hosts.
    """
    frames = [one for one, _ in traceback.walk_stack(sys._getframe()) if not one.f_code.co_filename.startswith(_HERE)]
    users = [one for one in frames if not is_library_file(one.f_code.co_filename)]
    return ", ".join(
        f"{Path(one.f_code.co_filename).name}:{one.f_lineno} {one.f_code.co_name}" for one in (users or frames)[:FRAMES]
    )


def _without_seeds(settings: Any) -> Any:
    """Ranks that are seeded differently are to be compared: that may be the fault."""
    if isinstance(settings, dict):
        return {name: _without_seeds(value) for name, value in settings.items() if name not in ("seed", *SEEDS)}
    return [*map(_without_seeds, settings)] if isinstance(settings, list | tuple) else settings
