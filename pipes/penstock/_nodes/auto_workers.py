"""``num_workers="auto"``: measures the workers of a `ParallelMapper`, for the `Controller` that decides how many there
should be.

Everything runs in the thread that reads the node, between two batches.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Final, final

from penstock._statistics import WorkerChoice
from penstock._workers.auto import Controller, Measurement
from penstock._workers.limits import cores, free_memory, own_memory
from penstock._workers.meter import Totals, now

if TYPE_CHECKING:
    from penstock._workers.pool import Pool

_logger = logging.getLogger("penstock")

SHORTEST_NS: Final = 500_000_000
"""A measurement takes at least this long, and at least `_BATCHES` batches."""
_BATCHES: Final = 8
_ROUNDS: Final = 4
"""At least this many batches per worker, and the same number for each, because workers tend to finish together."""
_LONG_NS: Final = 5_000_000_000
"""After this long, half of that is enough."""
_PAUSE_NS: Final = 100_000_000
_PAUSES: Final = 10
"""A step this many times as long as the others, and longer than `_PAUSE_NS`, is a pause, such as a validation or a
checkpoint.
"""
COMPUTES: Final = 0.75
"""Work that computes for a larger share of its time gets no more workers than cores."""
_MOST_PER_CORE, _MOST_AT_LEAST = 4, 16
"""The limit for work that mostly waits."""


@final
class AutoWorkers:
    """Measures batch after batch.

    Args:
        most: Upper limit for the number of workers; default: from the cores of this machine.

    Attributes:
        most: Upper limit for the number of workers.
        ahead_bytes: Bytes of the items that one more worker loads ahead.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most or max(_MOST_AT_LEAST, _MOST_PER_CORE * math.ceil(cores()))
        self._history = [(0, 1)]  # when the number of workers changed, and to what
        self.ahead_bytes = 0
        self._controller = Controller()
        self._skip = 1  # batches to leave out, because they were loaded ahead in a pause, or by fewer workers
        self._fresh = True  # there is no last batch to measure from
        self._after_mark = False
        self._asked_ns = self._waited_ns = 0  # at the last batch
        self._begin_sums(Totals([]))

    @property
    def number(self) -> int:
        """How many workers there should be."""
        return self._controller.number

    @property
    def choice(self) -> WorkerChoice:
        """For the statistics."""
        controller = self._controller
        return WorkerChoice(controller.number, controller.most, controller.changes, controller.settled, controller.why)

    def mark(self) -> None:
        """An epoch ends: the loop's work from here to the next batch is not a step."""
        self._after_mark = True

    def restart(self) -> None:
        """The graph was reset: nothing is loaded ahead."""
        self._fresh, self._skip, self._batches = True, 1, 0

    def look(self, pool: Pool, waited_ns: int, depth: int) -> int:
        """A batch is requested. Returns how many workers there should be.

        Args:
            pool: The workers.
            waited_ns: How long the node has waited for them in total.
            depth: Batches that it loads ahead.
        """
        moment, asked_ns, waits_ns = now(), self._asked_ns, waited_ns - self._waited_ns
        self._asked_ns, self._waited_ns = moment, waited_ns
        self._delivered += 1
        if self._fresh or self._after_mark or moment - asked_ns - waits_ns > self._pause_ns():
            if moment - asked_ns > _PAUSE_NS:
                self._skip = max(self._skip, depth)
            self._fresh = self._after_mark = False
        elif self._skip:
            if pool.all_ready:
                self._skip -= 1
                if not self._skip and not self._batches:
                    self._begin_sums(Totals(pool.counted()))
        else:
            self._batches += 1
            self._elapsed_ns += moment - asked_ns
            self._stalled_ns += waits_ns
            if self._is_enough():
                self._decide(pool)
        return self._controller.number

    def resized(self, workers: int, wanted: int, depth: int) -> None:
        """The pool now has ``workers`` workers, and ``depth`` batches in progress."""
        if workers != wanted:
            self._controller.refused(workers)
        self._skip, self._batches = depth, 0
        self._history.append((now(), workers))

    def available_ns(self, first: int, last: int) -> int:
        """The time of all workers together between two moments."""
        ends = [moment for moment, _ in self._history[1:]] + [last]
        return sum(
            workers * max(0, min(end, last) - max(begin, first))
            for (begin, workers), end in zip(self._history, ends, strict=False)
        )

    def _pause_ns(self) -> int:
        steps = self._batches
        return max(_PAUSE_NS, _PAUSES * (self._elapsed_ns - self._stalled_ns) // steps) if steps else 2**62

    def _begin_sums(self, totals: Totals) -> None:
        self._batches = self._elapsed_ns = self._stalled_ns = self._delivered = 0
        self._totals = totals

    def _is_enough(self) -> bool:
        workers, batches, elapsed_ns = self._controller.number, self._batches, self._elapsed_ns
        if elapsed_ns < SHORTEST_NS or batches % workers:
            return False
        return batches * (2 if elapsed_ns >= _LONG_NS else 1) >= max(_BATCHES, _ROUNDS * workers)

    def _decide(self, pool: Pool) -> None:
        controller = self._controller
        before, self._totals, number = self._totals, Totals(pool.counted()), controller.number
        rate = self._batches / self._elapsed_ns * 1e9
        most, bound = self.bound(pool)
        found = Measurement(
            workers=number,
            rate=rate,
            stall=min(1.0, self._stalled_ns / self._elapsed_ns),
            busy=min(float(number), rate * (self._totals.busy_ns - before.busy_ns) / 1e9 / max(1, self._delivered)),
            most=most,
            bound=bound,
        )
        was_settled = controller.settled
        wanted = controller.decide(found)
        if wanted != number:
            _logger.info("num_workers='auto': from %d to %d workers: %s.", number, wanted, controller.why)
        elif controller.settled and not was_settled:
            _logger.info("num_workers='auto' stays at %d workers: %s.", number, controller.why)
        self._begin_sums(self._totals)

    def bound(self, pool: Any) -> tuple[int, str]:
        if hasattr(pool, "bound"):  # workers on other machines
            most, bound = pool.bound()
            return min(most, self.most), bound
        usable, totals = cores(), self._totals
        if totals.cpu_ns > COMPUTES * totals.wall_ns:
            most, bound = math.ceil(usable), f"a machine of {usable:g} cores, for work that computes,"
        else:
            most, bound = self.most, f"the bound of {self.most} workers"
        if most > self.number and (each := self._memory_each(pool)):
            free = free_memory()
            room = most if free is None else self.number + free // 2 // each
            if room < most:
                most, bound = room, "half of the free memory"
        return min(most, self.most), bound

    def _memory_each(self, pool: Any) -> int:
        """Bytes that one more worker needs."""
        return self.ahead_bytes + max((own_memory(pid) or 0 for pid in getattr(pool, "pids", ())), default=0)
