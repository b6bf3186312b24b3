"""How long a loop waits for its batches, and how long it works on them."""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._workers.meter import Histogram, now, traced

if TYPE_CHECKING:
    from penstock._statistics import LoaderStatistics

_logger = logging.getLogger("penstock")


@final
class LoopClock:
    """Records when a loop requested and received each batch, or received none (`end`).

    The loop's work between two epochs is neither a wait nor a step. For most batches, timestamps are only recorded, and
    aggregated later, because aggregation would cost too much for a tiny batch. An iterator may record them itself.

    Args:
        root: The last node of the graph that is read; None without a graph.

    Attributes:
        moments: Timestamps: batch received, next one requested, received, requested, received, …
        at: The index of the last batch in ``moments``.
        until: From this index on, a batch is not only recorded: it is the first of an epoch, or ``moments`` is full.
        report_ns: The time when the next report is due.
    """

    def __init__(self, root: Any = None) -> None:
        self._root = root
        self._batches = self._epochs = self._first_ns = 0  # the batches without those in `moments`
        self._waits, self._epoch_start_waits, self._steps = Histogram(), Histogram(), Histogram()
        self.moments = array("q", bytes(8 * (_MOMENTS + 1)))
        self.at = 0
        self.until = _FIRST
        # of the first batch of each epoch in `moments`: `at` before it, `_end_ns`, `_in_step`
        self._starts: dict[int, tuple[int, bool]] = {}
        self._in_step = False  # the end of the last batch's epoch was not seen
        self._end_ns = 0  # how long it took to find the end of the previous epoch
        self._every_ns, self.report_ns = 0, _NEVER
        self._reported: Any = None  # the statistics at the last report

    def begin(self) -> None:
        """The requested batch is the first of an iterator."""
        self._epochs += self._in_step
        self.until, self._in_step = _FIRST, False

    def mark(self) -> None:
        """An epoch has ended while the loop waits."""
        self._epochs += 1
        self.until = _FIRST

    def end(self, loader: Any, asked: int, exc: Exception) -> None:
        """The loop gets no batch: the epoch has ended, or there was an error."""
        over = isinstance(exc, StopIteration)
        for one in traced:
            one.ended(loader, asked, f"end of an epoch; next: {loader.epoch}" if over else type(exc).__name__)
        if over:
            if self._in_step:
                self._steps.add(asked - self.moments[self.at])
            self._in_step, self._end_ns = False, now() - asked
            self.mark()

    def got(self, loader: Any, asked: int, moment: int) -> None:
        """The loop receives the requested batch at ``moment``."""
        if self.at >= _MOMENTS:
            self._aggregate()
        if self.until != _FIRST or self._batches:
            if self.until == _FIRST:
                self._starts[self.at] = self._end_ns, self._in_step
            self.moments[self.at + 1], self.moments[self.at + 2] = asked, moment
            self.at += 2
        else:
            self._first_ns, self.moments[0], self._batches = moment - asked, moment, 1
        self.until, self._in_step, self._end_ns = _MOMENTS, True, 0
        for one in traced:
            one.delivered(loader, asked, moment)
        if moment > self.report_ns:
            self.report_ns = moment + self._every_ns
            self._log()

    def report_every(self, every_s: float) -> None:
        """Log a report every ``every_s`` seconds; 0: never."""
        self._every_ns, self._reported = int(every_s * 1e9), self.statistics()
        self.report_ns = now() + self._every_ns if every_s else _NEVER

    def statistics(self) -> LoaderStatistics:
        """What the loop and the graph have done so far. Thread-safe, at any time."""
        from penstock._statistics import LoaderStatistics

        batches, root = self._batches + self.at // 2, self._root
        waits, starts, steps = self._added_to(self._waits.copy(), self._epoch_start_waits.copy(), self._steps.copy())
        read_ns = self._first_ns + waits.words[0] + starts.words[0]
        elapsed_s = (read_ns + steps.words[0]) / 1e9
        of_graph: dict[str, Any] = {}
        if root is not None:
            root._was_read(read_ns)
            of_graph["nodes"] = root.statistics(elapsed_s, batches)
            for node in root.chain():
                of_graph |= node._stages()  # of several mappers the first one loads
        return LoaderStatistics(
            batches=batches,
            epochs=self._epochs,
            elapsed_s=elapsed_s,
            first_wait_s=self._first_ns / 1e9,
            waits=waits.durations(),
            epoch_start_waits=starts.durations(),
            steps=steps.durations(),
            **{"samples": batches, **of_graph},
        )

    def _aggregate(self) -> None:
        """Make room for more timestamps. An interrupt here may count those that are there twice."""
        self._added_to(self._waits, self._epoch_start_waits, self._steps)
        self._batches += self.at // 2
        self.moments[0], self.at, self._starts = self.moments[self.at], 0, {}

    def _added_to(
        self, waits: Histogram, starts: Histogram, steps: Histogram
    ) -> tuple[Histogram, Histogram, Histogram]:
        """The histograms, to which the recorded batches were added."""
        at = self.at
        ns = np.diff(np.array(self.moments[: at + 1]))
        begun = {place // 2: facts for place, facts in self._starts.copy().items() if place < at}
        for row, (end_ns, _) in begun.items():
            starts.add(int(ns[2 * row + 1]) + end_ns)
        steps.add_many(np.delete(ns[0::2], [row for row, (_, in_step) in begun.items() if not in_step]))
        waits.add_many(np.delete(ns[1::2], list(begun)))
        return waits, starts, steps

    def _log(self) -> None:
        """Log what held the loop up since the last report."""
        try:
            from penstock._observe.report import Names, report

            before, self._reported = self._reported, self.statistics()
            verdict = report(self._reported.since(before), Names.of(self._root)).partition("\n")[0]
        except Exception:  # from a user's object; it must not cost the loop its batch
            _logger.warning("the report failed", exc_info=True)
        else:
            _logger.log(logging.INFO if _logger.isEnabledFor(logging.INFO) else logging.WARNING, "%s", verdict)


_NEVER = 2**63
_FIRST = -1
_MOMENTS = 1024
"""How many timestamps are recorded before they are aggregated."""
