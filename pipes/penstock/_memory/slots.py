"""Recycled memory: who holds what.

What a loader pays for is page faults, not copying, so large batches lie in memory that is used again and again. Invariant: memory
is lent to at most one task, and only while no array or tensor views it. Nobody waits for memory to come back: there is always more.
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
"""How many batches a user may keep before it is worth a warning."""


class SlotView(np.ndarray):
    """The one array from which every array and tensor over a slot descends; gone when the last of them is.

    A subclass made straight over a buffer, because NumPy shortens the chain of bases across arrays of the same type, and
    would leave this one out.
    """


class SlotTable:
    """Who holds which of a number of slots: the user (by views), a task (lent), or nobody (idle).

    One thread at a time calls the methods other than `count`. A view may die in any thread, under any lock, or in a forked child: all that
    happens then is one ``deque.append``, in C, on that process's own deque.

    Idle slots that `_PERIOD` tasks in a row could do without are dropped, so that a burst of kept batches is given back.
    """

    _PERIOD = 16

    def __init__(self, kept_batches: KeptBatches) -> None:
        self._kept_batches = kept_batches
        self._retired: set[int] = set()  # seen by a fork of this process, so they are not used again
        self._spare = 0  # the fewest slots that were idle since the last look
        self._until_look = self._PERIOD
        self._mapped: dict[int, memoryview] = {}
        self._watches: dict[int, weakref.KeyedRef[int, SlotView]] = {}
        self._freed: deque[weakref.KeyedRef[int, SlotView]] = deque()
        self._idle: list[int] = []
        self._dropped: deque[int] = deque()

    def add(self, number: int, memory: memoryview | None) -> None:
        """A new slot; None where it cannot be mapped here, and is to be dropped."""
        if memory is None:
            self._dropped.append(number)
        else:
            self._mapped[number] = memory

    def view(self, number: int) -> SlotView:
        """The slot's memory (uint8), held until the last view of it is gone."""
        memory = self._mapped[number]
        base = np.ndarray.__new__(SlotView, (len(memory),), np.dtype(np.uint8), cast("Any", memory))
        self._watches[number] = weakref.KeyedRef(base, self._freed.append, number)
        if len(self._watches) - len(self._freed) > self._kept_batches.limit:
            self._kept_batches.warn()
        return base

    def lend(self) -> int:
        """An idle slot for the next task, the most recently used; `NO_SLOT` where there is none."""
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
            self._spare, self._until_look = len(self._idle), self._PERIOD
        return lent

    def give_back(self, number: int, *, useful: bool = True) -> None:
        """A slot that was lent and holds nothing; not ``useful`` where it was too small."""
        if number == NO_SLOT:
            return
        self._idle.append(number)
        if not useful:
            self._drop(number)

    def retire_viewed(self) -> None:
        """Use what is viewed now no more, once it is not: a fork of this process may go on viewing it, and the memory is shared."""
        self._retired |= self._watches.keys()

    def size(self, number: int) -> int:
        """Bytes of a slot."""
        return len(self._mapped[number])

    def dropped(self, at_most: int | None = None) -> list[int]:
        """Slots that are no longer mapped here; each is told once."""
        return [self._dropped.popleft() for _ in range(len(self._dropped) if at_most is None else min(at_most, len(self._dropped)))]

    def count(self) -> tuple[int, int]:
        """Slots and bytes that are mapped here for this worker; from any thread."""
        mapped = list(self._mapped.values())
        return len(mapped), sum(map(len, mapped))

    def _drop(self, number: int) -> None:
        self._idle.remove(number)
        del self._mapped[number]
        self._dropped.append(number)


@final
class KeptBatches:
    """Says once, for all the slots of a pool, that many batches are kept: more than `KEPT` besides those ``in_work``."""

    def __init__(self, in_work: int = 0) -> None:
        self.limit = KEPT + in_work
        self._warned = False

    def warn(self) -> None:
        """Say it, unless it was said."""
        if self._warned:
            return
        self._warned = True
        _logger.warning(
            "more than %d batches are still in use, so memory cannot be recycled and new memory is taken for each batch, which is slower. If they "
            "are kept on purpose that is fine; else keep copies (tensor.clone()) or less of each.",
            self.limit,
        )
