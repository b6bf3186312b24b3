"""How long the training loop waits for its batches, and how long it works on them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._nodes.watch import Watch
from penstock._workers.meter import Histogram, now

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._nodes.node import Node
    from penstock._statistics import LoaderStatistics


@final
class LoopClock:
    """Looked at whenever the loop asks for a batch, and whenever it gets one.

    What the loop does between two epochs is neither a wait nor a step. Most looks only write down the time; what they say is worked out later.

    Args:
        root: The last node of the graph.

    Attributes:
        read: Gives the next item of the graph.
        due: Whether it is time for a report; whoever makes it says so here.
    """

    def __init__(self, root: Node[Any]) -> None:
        self._root = root
        self._watch = watch = Watch(root)
        self.read: Callable[[], Any] = root.next if watch.is_alone else watch.__next__
        self._batches = self._epochs = self._first_ns = 0
        self._waits, self._boundary_waits, self._steps = Histogram(), Histogram(), Histogram()
        self._moments = [0] * (_MOMENTS + 1)  # when it got a batch, asked for the next, got it, asked, got, …
        self._at = 0  # the place of the last batch in there
        self._boundary = True  # the next batch is the first of its epoch
        self._in_step = False  # a step precedes it
        self._report_ns, self._report_at = 0, _NEVER
        self.due = False
        self._end_ns = 0  # how long it took to find the end of the epoch before it

    def ask(self) -> None:
        """The loop asks for a batch."""
        self._moments[self._at + 1] = now()

    def begin(self) -> None:
        """That batch is the first of an iterator."""
        self._epochs += self._in_step  # nobody saw the end
        self._boundary, self._in_step = True, False

    def mark(self) -> None:
        """An epoch has ended while the loop waits."""
        self._boundary = True
        self._epochs += 1
        self._watch.soon()

    def end(self) -> None:
        """The loop gets the end of the epoch instead."""
        asked = self._moments[self._at + 1]
        if self._in_step:
            self._steps.add(asked - self._moments[self._at])
        self._in_step, self._end_ns = False, now() - asked
        self.mark()

    def give(self) -> None:
        """The loop gets a batch."""
        if self._boundary:
            self._give_first()
        else:
            at = self._at + 2
            moment = self._moments[at] = now()
            if at == _MOMENTS:
                self._work_out(at)  # an interrupt in there costs one batch's moments, not the room for the next
            else:
                self._at = at
            if moment > self._report_at:
                self._report_at, self.due = moment + self._report_ns, True
        self._batches += 1

    def report_every(self, every_s: float) -> None:
        """A report is due every so many seconds; 0: never."""
        self._report_ns = int(every_s * 1e9)
        self._report_at = now() + self._report_ns if every_s else _NEVER

    def statistics(self) -> LoaderStatistics:
        """What the loop and the graph have done so far. Any thread may ask, at any time."""
        from penstock._nodes.parallel_mapper import ParallelMapper
        from penstock._statistics import Durations, LoaderStatistics

        waits, steps = self._worked_out(self._waits.copy(), self._steps.copy(), self._at)
        first_s, step_s = self._first_ns / 1e9, steps.words[0] / 1e9
        wait_s = (waits.words[0] + self._boundary_waits.words[0]) / 1e9
        elapsed_s, root = first_s + wait_s + step_s, self._root
        self._watch.share_out()
        root._read_ns = int(1e9 * (first_s + wait_s))
        found = LoaderStatistics(
            nodes=root.statistics(elapsed_s, self._batches),
            batches=self._batches,
            samples=self._batches,
            epochs=self._epochs,
            elapsed_s=elapsed_s,
            stall_share=wait_s / (wait_s + step_s) if wait_s else 0.0,
            first_wait_s=first_s,
            waits=waits.durations(),
            boundary_waits=self._boundary_waits.durations(),
            steps=steps.durations(),
            to_device=next((node.converted() for node in root.chain() if hasattr(node, "converted")), Durations()),
        )
        mapper = next((node for node in root.chain() if isinstance(node, ParallelMapper)), None)
        if mapper is not None:
            totals = mapper.counted()
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

    def _give_first(self) -> None:
        moment, asked = now(), self._moments[self._at + 1]
        if self._in_step:
            self._steps.add(asked - self._moments[self._at])
        if self._batches:
            self._boundary_waits.add(moment - asked + self._end_ns)
        else:
            self._first_ns = moment - asked
        self._work_out(self._at)
        self._moments[0] = moment
        self._boundary, self._in_step, self._end_ns = False, True, 0

    def _work_out(self, at: int) -> None:
        self._worked_out(self._waits, self._steps, at)
        self._at = 0
        self._moments[0] = self._moments[at]

    def _worked_out(self, waits: Histogram, steps: Histogram, at: int) -> tuple[Histogram, Histogram]:
        ns = np.diff(np.array(self._moments[: at + 1], np.int64))
        steps.add_many(ns[0::2])
        waits.add_many(ns[1::2])
        return waits, steps


_NEVER = 2**63
_MOMENTS = 1024
"""How many moments are written down before they are worked out."""
