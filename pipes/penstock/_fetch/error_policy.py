"""Handling of samples that fail to load under ``on_error``.

The worker skips such a sample, or substitutes what ``on_error`` returned, and sends the batch as a `PartialBatch`. The
consumer logs, counts and checks the budget, in the order of delivery. So a batch that is loaded but never delivered is
not counted, and no count is part of the state.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

from penstock._arguments import whole_number
from penstock._errors import SampleError

if TYPE_CHECKING:
    from penstock._statistics import FailureStatistics

_logger = logging.getLogger("penstock")

WINDOW = 1000
"""Number of samples over which an error rate is measured."""


@final
class _Skip:
    """Returned by an ``on_error`` function to skip the sample."""

    def __repr__(self) -> str:
        return "penstock.SKIP"

    def __reduce__(self) -> str:
        return "SKIP"  # unpickles to the same object in every process


SKIP = _Skip()

OnError = Literal["raise", "skip"] | Callable[[Exception, Any, int, int], Any]
"""A function of the exception, the dataset index, the epoch and the position that returns a substitute or `SKIP`."""


class SampleFailure(NamedTuple):
    """A sample that failed: its row in the batch, its description, and its error as text."""

    row: int
    sample: str
    error: str
    skipped: bool


class PartialBatch(NamedTuple):
    """A batch in which samples failed. ``left`` is the number of samples remaining; if it is 0, ``value`` is None."""

    value: Any
    failures: list[SampleFailure]
    left: int


def check_policy(on_error: Any, max_errors: Any) -> None:
    """Refuse invalid arguments.

    Raises:
        ValueError: Names the argument and the remedy.
    """
    if on_error not in ("raise", "skip") and not callable(on_error):
        raise ValueError(
            f"on_error={on_error!r} must be 'raise', 'skip' or a function of (exception, index, epoch, position)."
        )
    if max_errors is None:
        return
    if on_error == "raise":
        raise ValueError(
            f"max_errors={max_errors!r} needs on_error='skip' or a function, because by default every error is raised."
        )
    if not (isinstance(max_errors, float) and 0 < max_errors < 1):
        whole_number(
            "max_errors", max_errors, 0, remedy=f"Or pass a fraction of the last {WINDOW} samples, between 0.0 and 1.0."
        )


@final
class ErrorBudget:
    """Counts failed samples, in the consumer.

    Args:
        max_errors: An ``int``: how many samples may fail in total. A ``float``: the fraction of any `WINDOW`
            consecutive samples that may fail. None: no limit.
    """

    def __init__(self, max_errors: float | None) -> None:
        self._max_errors = max_errors
        self._samples = self._failed = self._skipped = 0
        # numbers of the failed samples, counted from the first sample; used only for a rate
        self._recent: deque[int] = deque()
        self._last = ""
        # the state before the last batch, and the counts at that time
        self._counted: tuple[Any, ...] = None, 0, 0, 0, self._recent, ""

    def passed(self, samples: int, value: Any, worker: str, state: Any) -> Any:
        """Count the next batch, of ``samples`` samples, and return its value.

        ``state`` is the graph's state before this batch is delivered. If the last batch came from the same state,
        either an interrupt kept it from the consumer or the state was loaded again, so this batch is counted in its
        place.

        Raises:
            SampleError: More samples failed than ``max_errors`` allows, or the batch is empty because all of its
                samples failed.
        """
        if state == self._counted[0]:
            _, self._samples, self._failed, self._skipped, self._recent, self._last = self._counted
        self._counted = state, self._samples, self._failed, self._skipped, self._recent, self._last
        before, self._samples = self._samples, self._samples + samples
        if type(value) is not PartialBatch:
            return value
        exceeded, self._recent = False, self._recent.copy()
        for failure in value.failures:
            exceeded = self._count(before, failure, worker) or exceeded
        failure = value.failures[-1]
        if exceeded:
            raise SampleError(
                f"more samples failed than max_errors={self._max_errors} allows: {self._failed} of {self._samples} so "
                f"far. The last was {failure.sample}: {failure.error}"
            )
        if not value.left:
            raise SampleError(
                f"all {len(value.failures)} samples of a batch failed and were skipped, so nothing is left of it. The "
                f"last was {failure.sample}: {failure.error}"
            )
        return value.value

    def statistics(self) -> FailureStatistics:
        """The counts so far."""
        from penstock._statistics import FailureStatistics

        return FailureStatistics(self._samples, self._failed, self._skipped, self._last)

    def _count(self, before: int, failure: SampleFailure, worker: str) -> bool:
        """Count one failure; whether it exceeds the limit."""
        self._failed += 1
        self._skipped += failure.skipped
        self._last = failure.sample
        what = "skipped" if failure.skipped else "replaced"
        _logger.warning(
            "%s %s%s, failure %d in %d samples: %s",
            what,
            failure.sample,
            worker,
            self._failed,
            self._samples,
            failure.error,
        )
        if not isinstance(self._max_errors, float):
            return self._max_errors is not None and self._failed > self._max_errors
        number = before + failure.row
        self._recent.append(number)
        while self._recent[0] <= number - WINDOW:
            self._recent.popleft()
        return len(self._recent) > self._max_errors * WINDOW


_NOTES = 16


def stopped_early(dataset: Any) -> SampleError:
    """What to raise for a ``StopIteration`` before the first item, which would pass for the end."""
    return SampleError(
        f"{type(dataset).__name__} raised StopIteration before its first item. Catch it there; to yield no items, "
        f"return an empty iterator from __iter__."
    )


def annotate(exc: BaseException, note: str) -> None:
    """Add a note once, if the exception accepts notes (a frozen dataclass does not).

    Keeps only the last few, for an exception that is raised repeatedly.
    """
    with contextlib.suppress(Exception):
        if note not in getattr(exc, "__notes__", ()):
            exc.add_note(note)
            del exc.__notes__[:-_NOTES]


def mark_of_stream(exc: Exception) -> None:
    """Record that ``exc`` is not about a single sample: nothing after it in a stream can be read either."""
    with contextlib.suppress(Exception):
        exc._penstock_of_stream = True  # type: ignore[attr-defined]


def is_of_stream(exc: Exception) -> bool:
    """Whether ``exc`` was marked by `mark_of_stream`.

    Adds the remedy, because the caller is about to raise it although ``on_error`` was given.
    """
    if not getattr(exc, "_penstock_of_stream", False):
        return False
    annotate(
        exc,
        "raised although the loader has on_error=, which skips single samples: nothing after this position in the "
        'stream can be read. The stream itself decides what may be skipped: Stream(…, on_error="skip") skips the rest '
        "of a shard",
    )
    return True


def describe(exc: BaseException) -> str:
    """Type and message of ``exc``, even if its ``__str__`` raises."""
    try:
        return f"{type(exc).__name__}: {exc}"
    except Exception:
        return f"{type(exc).__name__}, whose message cannot be displayed"
