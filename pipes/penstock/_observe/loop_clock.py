"""How long the training loop waits for its batches, and how long it works on them."""

from __future__ import annotations

import dataclasses
import weakref
from array import array
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from penstock._workers.meter import Histogram, now, traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._statistics import LoaderStatistics


@final
class LoopClock:
    """Looked at whenever the loop asks for a batch, and whenever it gets one.

    What the loop does between two epochs is neither a wait nor a step. The iterator itself writes down most moments, without a call; what they say is worked
    out later.

    Args:
        root: The last node of the graph.

    Attributes:
        read: Gives the next item of the graph.
        moments: When it got a batch, asked for the next, got it, asked, got, …
        at: The place of the last batch in there; when it asks for the next is written behind it.
        until: Up to that place of the last batch, the moment of the next is only written down. `give` gets the others.
        look_ns: After that moment, `give` gets the next in any case; while somebody traces, each.
        clocks: Those that there are.
        due: Whether it is time for a report; whoever makes it says so here.
    """

    clocks: ClassVar[weakref.WeakSet[LoopClock]] = weakref.WeakSet()

    def __init__(self, root: Any) -> None:
        self._root = root
        self.read: Callable[[], Any] = root.next
        self._batches = self._epochs = self._first_ns = 0  # the batches without those in `moments`
        self._waits, self._boundary_waits, self._steps = Histogram(), Histogram(), Histogram()
        self.moments = array("q", bytes(8 * (_MOMENTS + 1)))
        self.at = 0
        self.until = _BOUNDARY  # the next batch is the first of its epoch
        self._in_step = False  # a step precedes it
        self._every_ns = 0
        self._report_ns = self.look_ns = _NEVER
        self.due = False
        self._end_ns = 0  # how long it took to find the end of the epoch before it
        self.clocks.add(self)

    def begin(self) -> None:
        """That batch is the first of an iterator."""
        self._epochs += self._in_step  # nobody saw the end
        self.until, self._in_step = _BOUNDARY, False

    def mark(self) -> None:
        """An epoch has ended while the loop waits."""
        self.until = _BOUNDARY
        self._epochs += 1

    def end(self, loader: Any) -> None:
        """The loop gets the end of the epoch instead."""
        asked = self.moments[self.at + 1]
        for one in traced:
            one.ended(loader, asked, f"end of an epoch; next: {loader.epoch}")
        if self._in_step:
            self._steps.add(asked - self.moments[self.at])
        self._in_step, self._end_ns = False, now() - asked
        self.mark()

    def give(self, moment: int, loader: Any) -> None:
        """The loop gets a batch, and there is more to do than to write that down."""
        for one in traced:
            one.delivered(loader, self.moments[self.at + 1], moment)
        if self.until == _BOUNDARY:
            self._give_first(moment)
        else:
            at = self.at + 2
            self.moments[at] = moment
            if at == _MOMENTS:
                self._work_out(at)  # an interrupt in there costs one batch's moments, not the room for the next
            else:
                self.at = at
            if moment > self._report_ns:
                self._report_ns, self.due = moment + self._every_ns, True
        self.look_ns = 0 if traced else self._report_ns

    def report_every(self, every_s: float) -> None:
        """A report is due every so many seconds; 0: never."""
        self._every_ns = int(every_s * 1e9)
        self._report_ns = now() + self._every_ns if every_s else _NEVER
        self.look_ns = 0 if traced else self._report_ns

    def statistics(self) -> LoaderStatistics:
        """What the loop and the graph have done so far. Any thread may ask, at any time."""
        from penstock._statistics import Durations, LoaderStatistics

        batches = self._batches + self.at // 2
        waits, steps = self._worked_out(self._waits.copy(), self._steps.copy(), self.at)
        first_s, step_s = self._first_ns / 1e9, steps.words[0] / 1e9
        wait_s = (waits.words[0] + self._boundary_waits.words[0]) / 1e9
        elapsed_s, root = first_s + wait_s + step_s, self._root
        root._was_read(int(1e9 * (first_s + wait_s)))
        found = LoaderStatistics(
            nodes=root.statistics(elapsed_s, batches),
            batches=batches,
            samples=batches,
            epochs=self._epochs,
            elapsed_s=elapsed_s,
            stall_share=wait_s / (wait_s + step_s) if wait_s else 0.0,
            first_wait_s=first_s,
            waits=waits.durations(),
            boundary_waits=self._boundary_waits.durations(),
            steps=steps.durations(),
            to_device=next((node.converted() for node in root.chain() if hasattr(node, "converted")), Durations()),
        )
        mapper = next((node for node in root.chain() if hasattr(node, "totals")), None)
        if mapper is not None:
            totals = mapper.totals()
            stages: dict[str, Any] = totals.stages
            found = dataclasses.replace(
                found,
                samples=mapper.samples,
                **stages,
                transfer=mapper.unpacked(),
                load_cpu_share=min(1.0, totals.cpu_ns / totals.wall_ns) if totals.wall_ns else None,
                lock_wait_share=totals.waits / totals.looks if totals.looks and mapper.method == "thread" else None,
            )
        in_loop_s = elapsed_s - first_s
        return dataclasses.replace(found, samples_per_s=found.samples * (1 - 1 / found.batches) / in_loop_s if in_loop_s else 0.0)

    def _give_first(self, moment: int) -> None:
        asked = self.moments[self.at + 1]
        if self._in_step:
            self._steps.add(asked - self.moments[self.at])
        if self._batches + self.at:
            self._boundary_waits.add(moment - asked + self._end_ns)
        else:
            self._first_ns = moment - asked
        self._work_out(self.at)
        self._batches += 1
        self.moments[0] = moment
        self.until, self._in_step, self._end_ns = _MOMENTS - 4, True, 0

    def _work_out(self, at: int) -> None:
        self._worked_out(self._waits, self._steps, at)
        self._batches += at // 2
        self.at = 0
        self.moments[0] = self.moments[at]

    def _worked_out(self, waits: Histogram, steps: Histogram, at: int) -> tuple[Histogram, Histogram]:
        ns = np.diff(np.array(self.moments[: at + 1]))
        steps.add_many(ns[0::2])
        waits.add_many(ns[1::2])
        return waits, steps


_NEVER = 2**63
_BOUNDARY = -1
_MOMENTS = 1024
"""How many moments are written down before they are worked out."""
