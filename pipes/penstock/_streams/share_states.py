"""ShareStates: what a dataset's own ``state_dict`` is used for. It saves time when a share is read again, and nothing else.

A mark says: after n items of a share, the dataset was in this state, and the items with these checksums came next. So it is a fact that can be checked whenever
it is used, and a state that leaves something out (a shuffle buffer, a half-filled pack) can never lead to other items: it is dropped, and
the share is read again from its beginning. The first mark in a process is loaded into a copy at once, so that a useless state is said early.

A worker's marks are one small file, replaced as a whole by whichever process reads the worker. The last writer wins, and what is lost costs only time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from penstock._errors import StateError, is_own_error
from penstock._fetch.encoding import encoded
from penstock._files.own_files import write_own

if TYPE_CHECKING:
    from penstock._streams.share_reader import ShareReader

_logger = logging.getLogger("penstock")

CHECKED: Final = 4
"""Items whose checksums a mark holds."""
LEAST_S: Final = 1.0
"""Seconds between two marks of a share, at least."""
SHARE_OF_TIME: Final = 0.01
"""The part of the time of a share that its marks may take."""
KEPT: Final = 12
"""Marks of a worker: the newest, and ever sparser older ones."""
LARGEST: Final = 2**22
"""Characters of the largest state that is kept, as JSON."""


class Mark(NamedTuple):
    """A fact about a share; see the top of this file."""

    pass_: int
    n: int
    state: str
    sums: list[str]


@final
class ShareStates:
    """The marks of all workers of a dataset.

    Args:
        folder: Where their files are.
        binding: JSON that identifies the dataset and its workers.
    """

    def __init__(self, folder: str, binding: Any) -> None:
        bound = hashlib.sha256(json.dumps(binding, sort_keys=True).encode()).hexdigest()[:32]
        self._folder = os.path.join(folder, bound)
        self.used = True  # until a state proves wrong
        self.proved = False  # in this process

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "proved": False}

    def before(self, worker: int, pass_: int, n: int) -> list[Mark]:
        """The marks of a share up to item ``n``, the nearest one first."""
        return [mark for mark in reversed(self._read(worker)) if mark.pass_ == pass_ and 0 < mark.n <= n] if self.used else []

    def add(self, worker: int, mark: Mark) -> None:
        """Keep ``mark``."""
        marks = sorted({(one.pass_, one.n): one for one in [*self._read(worker), mark]}.values())
        while len(marks) > KEPT:
            del marks[_least_useful(marks)]
        lines = [json.dumps(mark) for mark in marks]
        try:
            write_own(self._path(worker), *(f"{_sum(line)} {line}\n".encode() for line in lines))
        except OSError as exc:
            self.used = False
            _logger.warning("%s. No states of the dataset are kept, which costs only time.", exc)

    def _read(self, worker: int) -> list[Mark]:
        try:
            with open(self._path(worker), encoding="utf-8", errors="replace") as file:
                lines = [line.rstrip("\n").partition(" ") for line in file]
        except OSError:
            return []
        return [Mark(*json.loads(line)) for check, _, line in lines if check == _sum(line)]

    def _path(self, worker: int) -> str:
        return os.path.join(self._folder, f"worker-{worker}.jsonl")


@final
class StateTaker:
    """Takes marks of a share while it is read, as often as that pays.

    Args:
        reader: Reads the share.
        states: Where they go.
    """

    def __init__(self, reader: ShareReader, states: ShareStates) -> None:
        self._reader = reader
        self._states = states
        self._taken: tuple[int, str] | None = None  # waits for the checksums of the next items
        self._sums: list[str] = []
        self._due = time.perf_counter() + LEAST_S

    def after(self, item: Any) -> None:
        """``item`` was read."""
        if self._taken is not None:
            began = time.perf_counter()
            self._sums.append(checksum(item))
            if len(self._sums) == CHECKED:
                self._keep(Mark(self._reader.share.pass_, *self._taken, self._sums))
                self._taken, self._sums = None, []
            self._due += (time.perf_counter() - began) / SHARE_OF_TIME
        elif self._states.used and time.perf_counter() >= self._due:
            self._take()

    def _take(self) -> None:
        began = time.perf_counter()
        try:
            state = self._reader.state()
            text = None if state is None else json.dumps(encoded(state, "state"))
        except Exception as exc:
            if not is_own_error(exc):
                raise
            text = None
            self._reader.say("no state", f"its state_dict is of no use ({type(exc).__name__}: {exc})")
        if text is not None and len(text) > LARGEST:
            self._reader.say("large state", f"its state_dict has {len(text) / 2**20:.0f} MiB as JSON, which is too much to keep")
            text = None
        if text is None:
            self._states.used = False
            return
        self._taken = self._reader.n, text
        self._due = time.perf_counter() + max(LEAST_S, (time.perf_counter() - began) / SHARE_OF_TIME)

    def _keep(self, mark: Mark) -> None:
        if not self._states.proved:
            self._states.proved = True
            if self._reader.again(mark) is None:
                self._states.used = False
                self._reader.say("false state", "its state_dict, loaded into a copy, did not lead to the same next items")
                return
        self._states.add(self._reader.share.worker, mark)


def checksum(item: Any) -> str:
    """A checksum of the content of ``item``."""
    try:
        content = json.dumps(encoded(item, "item")).encode()
    except StateError:  # a picture, a class of the user's
        try:
            content = pickle.dumps(item)
        except Exception as exc:
            if not is_own_error(exc):
                raise
            content = type(item).__qualname__.encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _least_useful(marks: list[Mark]) -> int:
    """Which of ``marks``, in order, to drop: one of an earlier pass, or that with the smallest gap around it for its distance from the last one."""
    last = marks[-1]
    if marks[0].pass_ != last.pass_:
        return 0
    gaps = [(right.n - left.n) / (last.n - middle.n) for (left, middle), (_, right) in pairwise(pairwise(marks))]
    return 1 + gaps.index(min(gaps))


def _sum(line: str) -> str:
    return hashlib.blake2b(line.encode(), digest_size=8).hexdigest()
