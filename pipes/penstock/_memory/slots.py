"""Recycled memory: tracks which slots are in use.

Page faults cost a loader more than copying, so large batches go into memory that is reused. Invariant: a slot is lent
to at most one task, and only while no array or tensor views it. No task waits for a slot to return: a task without one
gets new memory.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from typing import Any, cast, final

import numpy as np

_logger = logging.getLogger("penstock")

NO_SLOT = -1
KEPT = 64
"""How many batches a user may keep before we warn."""


class SlotView(np.ndarray):
    """The base of every array and tensor over a slot; it is collected after the last of them.

    It must be a subclass, created directly over the buffer, because NumPy shortens the chain of bases across arrays of
    the same type, and would bypass a plain array.
    """


class SlotTable:
    """Tracks the holder of each slot: the user (through views), a task (lent), or none (idle).

    Only one thread at a time may call the methods, except `count`, which any thread may. A view may die in any thread,
    under any lock, or in a forked child. All its finalizer does is one ``deque.append``, in C, on that process's own
    deque.

    Idle slots that were not needed for `PERIOD` tasks in a row are dropped, which gives back the memory of a burst of
    kept batches.
    """

    PERIOD = 16

    def __init__(self, kept_batches: KeptBatches) -> None:
        self._kept_batches = kept_batches
        self._retired: set[int] = set()  # a forked child may view them, so they are never lent again
        self._spare = 0  # the fewest slots idle at once since the last check
        self._until_look = self.PERIOD
        self._mapped: dict[int, memoryview] = {}
        self._watches: dict[int, weakref.KeyedRef[int, SlotView]] = {}
        self._freed: deque[weakref.KeyedRef[int, SlotView]] = deque()
        self._idle: list[int] = []
        self._dropped: deque[int] = deque()

    def add(self, number: int, memory: memoryview | None) -> None:
        """Add a new slot; with ``memory=None`` (it could not be mapped) drop it at once."""
        if memory is None:
            self._dropped.append(number)
        else:
            self._mapped[number] = memory

    def view(self, number: int) -> SlotView:
        """The slot's memory (uint8). The user holds the slot until the last view of it is gone."""
        memory = self._mapped[number]
        base = np.ndarray.__new__(SlotView, (len(memory),), np.dtype(np.uint8), cast("Any", memory))
        self._watches[number] = weakref.KeyedRef(base, self._freed.append, number)
        if len(self._watches) - len(self._freed) > self._kept_batches.limit:
            self._kept_batches.warn()
        return base

    def lend(self) -> int:
        """The most recently used idle slot, for the next task; `NO_SLOT` if none is idle."""
        while self._freed:
            number = self._freed.popleft().key
            del self._watches[number]
            self._idle.append(number)
            if number in self._retired:
                self._retired.remove(number)
                self._drop(number)
        lent = self._idle.pop() if self._idle else NO_SLOT
        self._spare = min(self._spare, len(self._idle))
        self._until_look -= 1
        if not self._until_look:
            for number in self._idle[: self._spare]:
                self._drop(number)
            self._spare, self._until_look = len(self._idle), self.PERIOD
        return lent

    def give_back(self, number: int, *, useful: bool = True) -> None:
        """Take back a slot that was lent and not filled; with ``useful=False`` (it was too small) drop it."""
        if number == NO_SLOT:
            return
        self._idle.append(number)
        if not useful:
            self._drop(number)

    def retire_viewed(self) -> None:
        """Never recycle the slots viewed right now: a forked child may keep viewing the same shared pages."""
        self._retired |= self._watches.keys()

    def size(self, number: int) -> int:
        """Bytes of a slot that is mapped here."""
        return len(self._mapped[number])

    def dropped(self, at_most: int | None = None) -> list[int]:
        """Slots that are no longer mapped here; each is reported once."""
        return [
            self._dropped.popleft()
            for _ in range(len(self._dropped) if at_most is None else min(at_most, len(self._dropped)))
        ]

    def count(self) -> tuple[int, int]:
        """How many slots are mapped here, and their bytes; safe from any thread."""
        mapped = list(self._mapped.values())
        return len(mapped), sum(map(len, mapped))

    def _drop(self, number: int) -> None:
        self._idle.remove(number)
        del self._mapped[number]
        self._dropped.append(number)


@final
class KeptBatches:
    """Warns once per pool when the user keeps more than `KEPT` batches, besides those ``in_work``."""

    def __init__(self, in_work: int = 0) -> None:
        self.limit = KEPT + in_work
        self._warned = False

    def warn(self) -> None:
        """Warn, the first time."""
        if self._warned:
            return
        self._warned = True
        _logger.warning(
            "more than %d batches are still in use, so their memory cannot be recycled and every new batch takes new "
            "memory, which is slower. If you keep them on purpose, ignore this; otherwise keep copies "
            "(tensor.clone()), or only the part of each batch that you need.",
            self.limit,
        )
