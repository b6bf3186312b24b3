"""What becomes of samples that cannot be loaded, where they are not to be raised.

A worker leaves them out, or puts what ``on_error`` returned in their place, and sends the batch as a `Marred` one; the consumer logs,
counts and keeps the budget, in the order of delivery. So nothing is counted that was loaded in vain, and nothing of it is state.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, final

from penstock._errors import SampleError
from penstock._statistics import SampleStatistics

_logger = logging.getLogger("penstock")

WINDOW = 1000
"""Samples over which a rate is taken."""


@final
class _Skip:
    """What an ``on_error`` function returns to leave the sample out of its batch."""

    def __repr__(self) -> str:
        return "penstock.SKIP"

    def __reduce__(self) -> str:
        return "SKIP"  # the one object, in every process


SKIP = _Skip()

OnError = Literal["raise", "skip"] | Callable[[Exception, Any, int, int], Any]
"""A function is called with the exception, the dataset index, the epoch and the position."""


class SampleFailure(NamedTuple):
    """One sample that failed: its row in the batch, itself and its error in words."""

    row: int
    sample: str
    error: str
    skipped: bool


class PartialBatch(NamedTuple):
    """A batch in which samples have failed; ``left`` of 0: nothing of it is left, and ``value`` is None."""

    value: Any
    faults: list[SampleFailure]
    left: int


def check_policy(on_error: Any, max_errors: Any) -> None:
    """Refuse what makes no sense.

    Raises:
        ValueError: Says what came and what to do.
    """
    if on_error not in ("raise", "skip") and not callable(on_error):
        raise ValueError(f"on_error={on_error!r} is neither 'raise' nor 'skip' nor a function of (exception, index, epoch, position).")
    if max_errors is None:
        return
    if on_error == "raise":
        raise ValueError(f"max_errors={max_errors!r} needs on_error='skip' or a function: by default every error is raised.")
    count = isinstance(max_errors, int) and not isinstance(max_errors, bool) and max_errors >= 0
    if not count and not (isinstance(max_errors, float) and 0 < max_errors < 1):
        raise ValueError(
            f"max_errors={max_errors!r} must be a whole number of samples from 0, or between 0.0 and 1.0 the share of the last {WINDOW} samples."
        )


@final
class ErrorBudget:
    """The consumer's account of failed samples.

    Args:
        max_errors: An ``int``: as many samples may fail in all. A ``float``: that share of any `WINDOW` samples in a row. None: any number.
    """

    def __init__(self, max_errors: float | None) -> None:
        self._max_errors = max_errors
        self._samples = self._failed = self._skipped = 0
        self._recent: deque[int] = deque()  # which samples have failed, counted from the first; only for a rate
        self._last = ""

    def passed(self, samples: int, value: Any, worker: str) -> Any:
        """Account for the next batch, of ``samples`` samples; its value, if it may be handed out.

        Raises:
            SampleError: More have failed than may, or nothing is left of the batch.
        """
        before, self._samples = self._samples, self._samples + samples
        if type(value) is not PartialBatch:
            return value
        exceeded = False
        for fault in value.faults:
            exceeded = self._count(before, fault, worker) or exceeded
        fault = value.faults[-1]
        if exceeded:
            raise SampleError(
                f"more samples failed than max_errors={self._max_errors} allows: {self._failed} of {self._samples} so far. "
                f"The last was {fault.sample}: {fault.error}"
            )
        if not value.left:
            raise SampleError(
                f"nothing is left of a batch: all {len(value.faults)} samples of it failed or were skipped. The last was {fault.sample}: {fault.error}"
            )
        return value.value

    def statistics(self) -> SampleStatistics:
        """The account so far."""
        return SampleStatistics(self._samples, self._failed, self._skipped, self._last)

    def _count(self, before: int, fault: SampleFailure, worker: str) -> bool:
        """Whether this one is too many."""
        self._failed += 1
        self._skipped += fault.skipped
        self._last = fault.sample
        what = "skipped" if fault.skipped else "put a substitute in the place of"
        _logger.warning("%s %s%s, the %dth failure in %d samples: %s", what, fault.sample, worker, self._failed, self._samples, fault.error)
        if not isinstance(self._max_errors, float):
            return self._max_errors is not None and self._failed > self._max_errors
        here = before + fault.row
        self._recent.append(here)
        while self._recent[0] <= here - WINDOW:
            self._recent.popleft()
        return len(self._recent) > self._max_errors * WINDOW
