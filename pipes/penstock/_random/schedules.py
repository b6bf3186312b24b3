"""What is scheduled in samples since the start of training, over all ranks: ranges to skip, and batch sizes.

Absolute, so that a resume changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._arguments import Shown, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@final
class Ramp(Shown):
    """Batch sizes that change during training: ``batch_size=penstock.Ramp([(0, 32), (1_000_000, 64)])``.

    Each stage has a start, in samples since the start of training over all ranks, and the number of samples in a batch
    of each rank from there on. A round (one batch for each rank) is never cut: a stage that starts inside one begins
    with the next round, and the log says so.

    Args:
        stages: Pairs of a start and a batch size. The first starts at 0.

    Raises:
        ValueError: A number is out of bounds, or the starts do not ascend from 0.
    """

    __module__ = "penstock"

    def __init__(self, stages: Sequence[tuple[int, int]]) -> None:
        self.stages = [(whole_number("start", start, 0), whole_number("batch_size", size, 1)) for start, size in stages]
        self._starts = [start for start, _ in self.stages]
        if self._starts[:1] != [0] or any(following <= start for start, following in pairwise(self._starts)):
            raise ValueError(
                f"the batch sizes start at the samples {self._starts}. The first must start at 0, and each later one "
                f"after the one before it."
            )

    def details(self) -> dict[str, Any]:
        return {"stages": self.stages}

    def check(self, run: int) -> None:
        """Refuse stages that cut a run of so many samples, which come from one source of a mix."""
        if cuts := [start for start in self._starts if start % run]:
            raise ValueError(
                f"batch_size={self.stages[self._starts.index(cuts[0])][1]} starts at sample {cuts[0]}, which is not a "
                f"multiple of run={run}: every batch from there on would mix sources. Make it "
                f"{-(-cuts[0] // run) * run}."
            )

    def at(self, position: int) -> tuple[int, int, int | None]:
        """The stage of a sample: its start, its batch size, and the start of the next stage, if there is one."""
        number = bisect_right(self._starts, position)
        return *self.stages[number - 1], self._starts[number] if number < len(self._starts) else None


@final
class Skips:
    """Ranges of samples that are passed over.

    Sample k of those that are kept is ``at(k)``, and ``kept(p)`` of them come before sample p.

    Args:
        ranges: Pairs: the first sample of a range, and the one after its last.
        run: Of a mix: so many consecutive samples come from one source, and stay together.

    Attributes:
        run: As given.

    Raises:
        ValueError: A range is empty, is not a pair of whole numbers, cuts a run, or overlaps another one.
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = (), run: int = 1) -> None:
        self.run = run
        given = [[whole_number("skip", end, 0) for end in pair] for pair in ranges]
        for pair in given:
            if len(pair) != 2 or pair[0] >= pair[1]:
                raise ValueError(
                    f"skip={pair}: a range is its first sample and the one after its last, such as (81_920, 90_112)."
                )
            if pair[0] % run or pair[1] % run:
                raise ValueError(
                    f"skip={pair} cuts a run of samples from one source, so every batch behind it would mix sources: "
                    f"both ends must be a multiple of run={run}. Make it "
                    f"{(pair[0] // run * run, -(-pair[1] // run) * run)}."
                )
        self.ranges = sorted(given)
        for one, other in pairwise(self.ranges):
            if other[0] < one[1]:
                raise ValueError(
                    f"the ranges {one} and {other} of skip overlap. Join them into {[one[0], max(one[1], other[1])]}."
                )
        self._begins = [begin for begin, _ in self.ranges]
        # samples skipped before each range, and in all
        self._gone = np.cumsum([0, *(end - begin for begin, end in self.ranges)])
        self._joints = np.array(self._begins, np.int64) - self._gone[:-1]

    def touch(self, begin: int, end: int) -> bool:
        """Whether a range has samples from ``begin`` up to but not including ``end``."""
        number = bisect_right(self._begins, begin)
        return (number > 0 and begin < self.ranges[number - 1][1]) or (
            number < len(self.ranges) and self._begins[number] < end
        )

    def begun(self, position: int) -> list[list[int]]:
        """The ranges that begin before ``position``."""
        return [pair for pair in self.ranges if pair[0] < position]

    def kept(self, position: int) -> int:
        """How many samples before ``position`` are kept."""
        if not (number := bisect_right(self._begins, position)):
            return position
        begin, end = self.ranges[number - 1]
        return position - int(self._gone[number - 1]) - (min(position, end) - begin)

    def at(self, numbers: Any) -> Any:
        """The positions of kept samples, by number: one, or an array."""
        return numbers + self._gone[np.searchsorted(self._joints, numbers, side="right")]
