"""How many workers there should be, decided from measurements. Pure: no worker, no clock.

::

    growing ──► (bisecting │ trimming) ──► settled ──► growing, if the measurements have changed for long enough

The number grows while the loop waits, as long as growing makes it faster. Growth that helps less than half as much as
it could is cut back to the smallest number that is as fast; growth that does not help is undone. If the loop does not
wait, all idle workers but one are removed. Then the number stays, until the loop or the data behave differently for
several measurements in a row, twice as many each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

TARGET: Final = 0.05
"""The share of its time that a loop may wait."""
_AS_FAST: Final = 0.95
"""A rate of at least this fraction of another counts as equal."""
_GAIN: Final = 0.1
"""The gain required of a large step. A small step must gain half of what it could."""
_CHANGED: Final = 1.5
_PATIENCE: Final = 3


@final
@dataclass(frozen=True, slots=True)
class Measurement:
    """The performance of a number of workers over some time.

    Attributes:
        workers: The number of workers.
        rate: Batches delivered per second.
        stall: The share of its time that the loop waited for them, from 0 to 1.
        busy: Workers that were busy, on average.
        most: Upper limit for the number of workers.
        bound: What sets ``most``, in words.
    """

    workers: int
    rate: float
    stall: float
    busy: float
    most: int
    bound: str = "the bound"

    @property
    def need(self) -> int:
        """The number of busy workers, plus one spare."""
        return max(1, math.ceil(self.busy - 0.05)) + 1


@final
class Controller:
    """Decides on the number of workers, measurement by measurement.

    Attributes:
        number: How many workers there should be now.
        why: The reason.
        changes: How often the number has changed.
        most: Upper limit, as far as known; 0 before the first measurement.
    """

    def __init__(self) -> None:
        self.number = 1
        self.why = "one to begin with"
        self.changes = 0
        self.most = 0
        self._phase = "growing"
        self._seen: dict[int, Measurement] = {}  # since the growing began
        self._before = 0  # the number before the last growth; 0 if there was none
        self._doubted = False  # the last change seems to have been bad: measure again before undoing it
        self._low = self._high = 0  # too few, and enough
        self._best = 0.0  # the rate to keep up with
        self._settled_at: Measurement | None = None
        self._bounded = False  # only a limit prevents more workers
        self._odd = 0  # measurements in a row that differ from `_settled_at`
        self._patience = _PATIENCE

    @property
    def settled(self) -> bool:
        """Whether it has found a number that it keeps."""
        return self._phase == "settled"

    def decide(self, found: Measurement) -> int:
        """The number from now on. ``found`` must have been measured with the `number` so far."""
        self.most = found.most
        self._seen[found.workers] = found
        if found.most < self.number:
            self._settle(None, f"{found.bound} allows no more", bounded=True)
            return self._go_to(found.most, self.why)
        return {
            "growing": self._growing,
            "bisecting": self._bisecting,
            "trimming": self._trimming,
            "settled": self._watching,
        }[self._phase](found)

    def refused(self, number: int) -> None:
        """The system has room for only ``number`` workers."""
        self.number = number
        self._settle(None, "the system has no room for more", bounded=True)

    def _growing(self, found: Measurement) -> int:
        stalled = found.stall > TARGET
        if self._before and stalled:
            before = self._seen[self._before]
            gain, ideal = found.rate / max(before.rate, 1e-9) - 1, found.workers / before.workers - 1
            if gain < min(_GAIN, ideal / 2):
                if self._is_doubtful():
                    return self.number
                why = (
                    f"{found.workers} were {gain:+.0%} as fast: more does not help"
                    if gain < 0
                    else f"{found.workers} gained only {gain:.0%}"
                )
                self._settle(before, why)
                return self._go_to(before.workers, why)
            if gain < ideal / 2 and found.workers - before.workers > 2:
                self._phase, self._low, self._high, self._best = "bisecting", before.workers, found.workers, found.rate
                return self._halve(found)
        self._doubted = False
        if not stalled:
            return self._trim(found)
        step = max(
            found.workers // 4,
            math.ceil(min(2 * found.workers, found.workers / (1 - min(found.stall, 0.9)))) - found.workers,
            1,
        )
        number = min(found.workers + step, found.most)
        if number == found.workers:
            return self._settle(found, f"{found.bound} allows no more", bounded=True)
        self._before = found.workers
        return self._go_to(number, f"the loop waited {found.stall:.0%} of the time for {found.workers}")

    def _bisecting(self, found: Measurement) -> int:
        if found.stall <= TARGET or found.rate >= _AS_FAST * self._best:
            self._high = found.workers
        else:
            self._low = found.workers
        return self._halve(found)

    def _halve(self, found: Measurement) -> int:
        if self._high - self._low > 2:
            return self._go_to((self._low + self._high) // 2, f"{self._high} gained less than they cost")
        why = f"more than {self._high} gain nothing, and {self._low} are slower"
        self._settle(self._seen[self._high], why)
        return self._go_to(self._high, why)

    def _trim(self, found: Measurement) -> int:
        # Never back to a number that was seen to be too small.
        number = max(found.need, self._before + 1)
        if number >= found.workers:
            return self._settle(found, f"the loop waits {found.stall:.0%} of the time")
        self._phase, self._high = "trimming", found.workers
        return self._go_to(number, f"{found.busy:.1f} of {found.workers} are at work")

    def _trimming(self, found: Measurement) -> int:
        before = self._seen[self._high]
        if found.stall > 2 * TARGET or found.rate < _AS_FAST * before.rate:
            if self._is_doubtful():
                return self.number
            why = f"with {found.workers} the loop waited {found.stall:.0%} of the time"
            self._settle(before, why)
            return self._go_to(self._high, why)
        return self._settle(found, f"the loop waits {found.stall:.0%} of the time")

    def _watching(self, found: Measurement) -> int:
        base = self._settled_at
        if base is None:
            self._settled_at = found
            return self.number
        slower = found.stall > 2 * TARGET >= base.stall
        other = base.stall > TARGET and not base.rate / _CHANGED <= found.rate <= base.rate * _CHANGED
        # Shrink only if the loop has changed since the number was settled. Otherwise idle workers were removed, missed
        # and brought back again and again, although nothing had changed.
        fewer = found.stall <= TARGET and found.need < self.number and (base.stall > TARGET or found.need < base.need)
        room = found.stall > 2 * TARGET and found.most > self.number and self._bounded
        self._odd = self._odd + 1 if slower or other or fewer or room else 0
        if self._odd < self._patience:
            return self.number
        # A loop that changes all the time would otherwise have workers started and ended forever.
        self._patience *= 2
        self._phase, self._before, self._seen = "growing", 0, {found.workers: found}
        return self._growing(found)

    def _is_doubtful(self) -> bool:
        self._doubted = not self._doubted
        return self._doubted

    def _settle(self, found: Measurement | None, why: str, *, bounded: bool = False) -> int:
        self._phase, self._settled_at, self._odd, self._doubted = "settled", found, 0, False
        self._bounded, self.why = bounded, why
        return self.number

    def _go_to(self, number: int, why: str) -> int:
        if number != self.number:
            self.changes += 1
            self.number = number
        self.why = why
        return number
