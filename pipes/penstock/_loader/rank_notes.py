"""RankNotes: ranks compare what they begin to read, without waiting for each other.

A sampler that deals its indices to the ranks itself looks like any other, but the loader deals each share again, and
most of the data is lost in silence. Only the other ranks can tell. So at the first batch after a start, or after a
state was loaded, a rank leaves a note in the store of the process group: a few checksums. If there is a note of this
name already, the same `compare_set` returns it, and a rank whose checksums differ raises.

**Nothing depends on the store.** It is asked over a separate connection, for `PATIENCE_S` at most. After an error this
process asks it no more.

**A false alarm would be worse than a missed difference.** Two loaders are compared only if they have the same settings
but for seeds, share their data with the same ranks, and begin at the same position. A process that reads another thing
by a name that it has used gives the name up: it replaces the note by an empty one, which agrees with everything. If two
loaders of one name and length are open at once, neither is compared. A rank whose checksums differ does not raise if
the other loader is more than twice as long, or if its own data, begun a second time, differ too. A note that is older
than this process was left by an earlier job, and is replaced. One false alarm is accepted: two loaders of one name, and
of similar lengths, of which one rank reads this one first, and another that one, each closed before the next is built.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import socket
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch.distributed

from penstock._errors import StateMismatch
from penstock._fetch.dataset_facts import length
from penstock._loader.checks import Check
from penstock._loader.state_dict import SEEDS
from penstock._nodes.index_node import FirstNode, source_of
from penstock._nodes.node import place_of
from penstock._nodes.ranks import process_group
from penstock._nodes.sharder import Sharder
from penstock._workers.lifetime import undisturbed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock._loader.positions import Positions
    from penstock._nodes.node import Node, State

    Marks = Sequence[int]

log = logging.getLogger("penstock")

PATIENCE_S: Final = 1.0
"""Seconds that the loop waits for the store, which usually answers after 0.003."""
_CLOCKS_S: Final = 10.0
"""Seconds by which the clocks of two hosts may differ."""
MOST: Final = 1000
"""Notes of a process, because a run may load millions of states."""

_HOST: Final = socket.gethostname()
_STREAM: Final = "A Stream"

_open: weakref.WeakSet[RankNotes] = weakref.WeakSet()
_groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()
_numbers = itertools.count()  # of process groups, because a store may serve several, one after another


def dealt_twice(first: FirstNode[Any]) -> str:
    """Why ranks may get different items from ``first``, and what to do."""
    name = _name_of(first)
    why = (
        "Its dataset asks for its rank when it is read (RANK, torch.distributed.get_rank()), or is not seeded alike on "
        "every rank. Let it yield the same items on every rank: the loader deals them."
        if name == _STREAM
        else f"Either {name} deals its items to the ranks itself, and the loader deals each share again: pass "
        f"split='own', or build it for a single rank (num_replicas=1, world_size=1, …), so that it yields everything. "
        f"Or it is not seeded alike on every rank: give it the same seed everywhere, or no private generator, so that "
        f"the loader seeds it."
    )
    return first.why_ranks_differ or why


def _name_of(first: FirstNode[Any]) -> str:
    source = source_of(first)
    return _STREAM if source is first and first.why_ranks_differ is None else type(source).__name__


@final
class RankNotes(Check):
    """The notes of one loader, whose rank may come from a process group.

    Args:
        positions: Of the graph.
        sharder: Of the graph.
    """

    def __init__(self, positions: Positions, sharder: Sharder[Any]) -> None:
        self._positions = positions
        self._sharder = sharder
        self._due = True  # to be compared
        self._register()

    def began(self, state: State, *, jumped: bool) -> bool:
        self._register()  # again, because this loader may be a copy
        self._due |= jumped
        where, first = place_of(state), self._positions.first
        first.compared = where[1] if where and self._due and len(self._sharder.members()) > 1 else None
        return True

    def delivered(self, state: State, address: Any) -> None:
        """Raises `StateMismatch` if another rank reads something else."""
        if (place := self._positions.first.compared) is not None:
            self._compare(self._positions.first, place)

    def ended(self) -> None:
        self.delivered({}, None)
        self._positions.first.compared = None

    def closed(self) -> None:
        _open.discard(self)

    def _register(self) -> None:
        _open.add(self)
        _group()  # now, so that it has its number

    def _compare(self, first: FirstNode[Any], place: State) -> None:
        """Compare what is read from ``place`` on, once there is a note of it."""
        name, ranks = _name_of(first), None
        try:
            if not (marks := first.note(place)):
                return
            ranks = self._differing(marks, place)
            if ranks and not _agree(marks, first.note(place, again=True)):
                log.info("%s gives other items when begun again, so it is not compared with that of other ranks.", name)
                ranks = None
        except Exception as exc:
            log.info("%s is not compared with that of other ranks: %s: %s", name, type(exc).__name__, exc)
            ranks = None
        if ranks:
            raise StateMismatch(
                f"{name} yields other items on rank {max(ranks)} than on rank {min(ranks)} in epoch {place['epoch']}, "
                f"so the ranks do not load parts of one sequence. {dealt_twice(first)}"
            )
        self._due, first.compared = False, None

    def _differing(self, marks: Marks, place: State) -> tuple[int, int] | None:
        """A rank that reads something else, and this one; None if no such rank is known."""
        settings, mine, group = self._settings(), self._length(), _group()
        if group is None or group.dead or len(group.read) >= MOST:
            return None
        # Nobody knows which of two that are open the other ranks read first.
        others = {one._length() for one in list(_open) if one is not self and one._settings() == settings}
        if mine is not None and mine in others:
            log.info("two loaders with the same settings and lengths are open, so they are not compared among ranks.")
            return None
        # Ranks that deal to themselves may have shares of different lengths, so the length names a loader only if there
        # are several.
        lengths = group.lengths.setdefault(settings, set())
        lengths |= {mine, *others}
        what = settings, [*self._sharder.members()], place["epoch"], place["position"], len(lengths) > 1 and mine
        name = "penstock/" + hashlib.blake2s(repr((what, group.number)).encode(), digest_size=16).hexdigest()
        if not _agree(group.read.setdefault(name, marks), marks):
            group.read[name] = ()
        rank = torch.distributed.get_rank()
        theirs = group.first(
            name, {"marks": group.read[name], "length": mine, "rank": rank, "at": time.time(), "host": _HOST}
        )
        is_similar = mine is None or mine <= 2 * (theirs["length"] or 0) <= 4 * mine
        return (theirs["rank"], rank) if is_similar and not _agree(theirs["marks"], marks) else None

    def _settings(self) -> str:
        """What two loaders must have in common to be compared."""
        return repr(_without_seeds([self._positions.settings(), self._positions.facts.rank_settings]))

    def _length(self) -> int | None:
        return length(source_of(self._positions.first))


def check(positions: Positions, nodes: Sequence[Node[Any]], *, infinite: bool) -> RankNotes | None:
    """The notes of a loader, if its ranks share a source that only other ranks can judge, and may come from a process
    group.
    """
    sharder = next((node for node in nodes if isinstance(node, Sharder)), None)
    if sharder is None or not positions.first.has_notes or not sharder.may_have_members:
        return None
    return RankNotes(positions, sharder)


@final
class _Group:
    """What this process knows of a process group.

    Args:
        number: Of the groups that this process has seen.

    Attributes:
        read: What was read here, by name; empty if the name was given up.
        lengths: Of all loaders with the same settings.
        dead: The store is not asked any more.
    """

    def __init__(self, number: int) -> None:
        self.number, self.dead = number, False
        self.read: dict[str, Marks] = {}
        self.lengths: dict[str, set[int | None]] = {}

    def first(self, name: str, note: dict[str, Any]) -> dict[str, Any]:
        """The first note of this name: ``note``, unless there is one. An empty note replaces it.

        In a helper thread, because no time limit of a store holds while its server is stopped.
        """
        found: list[dict[str, Any]] = []

        def ask() -> None:
            store, mine = _connected(), json.dumps(note)
            there = store.compare_set(name, "", mine)
            if _is_old(json.loads(there)) or not note["marks"]:
                there = store.compare_set(name, there.decode(), mine)
            found.append(json.loads(there))

        try:
            if not undisturbed(ask, contextlib.nullcontext(), PATIENCE_S):
                raise TimeoutError(f"the store of the process group has not answered within {PATIENCE_S} s")
        except Exception:
            self.dead = True
            raise
        return found[0]


def _connected() -> Any:
    """Another connection to the group's store, so that an operation that hangs does not block the job's own."""
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    inner = store
    while (below := getattr(inner, "underlying_store", None)) is not None:
        inner = below
    # a file has no server, and the last of its copies to be closed deletes it
    return store if type(inner).__name__ == "FileStore" else store.clone()


def _group() -> _Group | None:
    """The present process group, if there is one."""
    if process_group() is None:
        return None
    world: Any = torch.distributed.group.WORLD
    if world not in _groups:
        _groups[world] = _Group(next(_numbers))
    return _groups[world]


def _is_old(note: dict[str, Any]) -> bool:
    """Whether a note is from before this process."""
    return bool(note["at"] < _since - (0.0 if note["host"] == _HOST else _CLOCKS_S))


def _agree(one: Iterable[int], other: Iterable[int]) -> bool:
    """Whether two notes have a checksum in common, or one of them was given up."""
    return not one or not other or not {*one}.isdisjoint(other)


def _without_seeds(settings: Any) -> Any:
    """Ranks that are seeded differently are to be compared: that may be the fault."""
    if isinstance(settings, dict):
        return {name: _without_seeds(value) for name, value in settings.items() if name not in ("seed", *SEEDS)}
    return [*map(_without_seeds, settings)] if isinstance(settings, list | tuple) else settings


def began() -> float:
    """When this process began, in seconds since 1970."""
    with contextlib.suppress(Exception):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()


def _forked() -> None:
    """This new process is no rank of its parent's group."""
    global _since
    _since = time.time()
    if (group := _group()) is not None:
        group.dead = True


_since = began()  # notes that are older belong to an earlier job
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
