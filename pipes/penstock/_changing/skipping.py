"""Samples that no rank gets: ranges of them, counted from the start of training over all ranks.

Absolute, so that a resume changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._arguments import whole_number
from penstock._random.changing import Changing, Fixed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock._nodes.node import State
    from penstock._nodes.sampler import Sampler
    from penstock._random.permutation import Int64s


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


def skip(sampler: Sampler, ranges: Iterable[Sequence[int]]) -> Sampler:
    """Have ``sampler`` pass over ``ranges`` of samples, counted from the start of training over all ranks. They count
    as passed.

    Args:
        sampler: Not used yet.
        ranges: Pairs: the first sample of a range, and the one after its last.

    Returns:
        The sampler.

    Raises:
        ValueError: A range is empty, is not a pair of whole numbers, cuts a run of a mix, or overlaps another one.
    """
    Skipping(sampler, ranges)
    return sampler


skip.__module__ = "penstock.nodes"


@final
class Skipping(Changing):
    """A sampler passes over ranges: those that it was built with, and those that a state has brought.

    It reads around them by position. They count as passed, so all other samples stay where they are, and are what they
    would be without.

    Args:
        sampler: Has not been read yet, or no rank has got a sample behind the begin of a range.
        ranges: See `Skips`.

    Raises:
        ValueError: See `Skips`.
    """

    def __init__(self, sampler: Sampler, ranges: Iterable[Sequence[int]] = ()) -> None:
        of_order = sampler.changing
        self._of_order = Fixed(dict, f"a {type(sampler.order).__name__} has none") if of_order is None else of_order
        self.grain = self._of_order.grain
        self._continues = sampler.facts.carries_over_epochs
        # not the sampler, which would then stay until garbage is collected, and the user's data with it
        self._begin_of, self._length_of = sampler.begin_of, sampler.length_of
        self.skips = self._given = Skips(ranges, sampler.run or 1)
        self._adopted: list[list[int]] = []
        sampler.changing, sampler.skipping = self, self

    def changes(self) -> dict[str, Any]:
        """See `Changing.changes`."""
        return {**({"skip": self._adopted} if self._adopted else {}), **self._of_order.changes()}

    def adopt(self, changes: dict[str, Any]) -> None:
        """See `Changing.adopt`."""
        ranges = changes.get("skip", [])
        more = (pair for pair in ranges if pair not in self._given.ranges)
        skips = Skips([*self._given.ranges, *more], self._given.run)
        self._of_order.adopt({name: value for name, value in changes.items() if name != "skip"})
        self._adopted, self.skips = ranges, skips

    def presumed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """See `Changing.presumed`."""
        return self._of_order.presumed(settings)

    def resume_at(self, epoch: int, position: int, sample: int) -> None:
        """See `Changing.resume_at`."""
        self._of_order.resume_at(epoch, position, sample)

    def choices(self) -> dict[str, Any]:
        """See `Changing.choices`."""
        return {"skip": self.skips.ranges, **self._of_order.choices()}

    @property
    def state(self) -> Any:
        """See `Changing.state`."""
        return self._of_order.state

    def begins(self, epoch: int, position: int) -> None:
        """See `Changing.begins`."""
        self._of_order.begins(epoch, position)

    # What the sampler asks.

    def left(self, place: State) -> int:
        """Samples from ``place`` to the end of its epoch."""
        at = self._begin(place) + place["position"]
        return self.skips.kept(at + self._length(place) - place["position"]) - self.skips.kept(at)

    def touches(self, place: State, many: int) -> bool:
        """Whether one of the next ``many`` positions of the epoch is skipped."""
        at = self._begin(place) + place["position"]
        return self.skips.touch(at, at + min(many, self._length(place) - place["position"]))

    def following(self, place: State, many: int) -> tuple[Int64s, State]:
        """The positions of the next ``many`` samples, and the place behind them."""
        begin, left = self._begin(place), self.left(place)
        number = self.skips.kept(begin + place["position"])
        positions = self.skips.at(np.arange(min(many, left)) + number) - begin
        end = self._length(place) if many > left else int(positions[-1]) + 1 if many else place["position"]
        return positions, {**place, "position": end}

    def positions(self, place: State, numbers: Any) -> Any:
        """The positions of the samples ``numbers`` of the epoch of ``place``; those past its end stay past it."""
        begin = self._begin_of(place["epoch"])
        kept = self._kept_of(place["epoch"])
        past = numbers >= kept
        found = numbers + (self._length(place) - kept)
        found[~past] = self.skips.at(numbers[~past] + self.skips.kept(begin)) - begin
        return found

    def wrapped(self, epoch: int, positions: Any) -> Any:
        """The positions in ``epoch`` of samples, of which those past its end are dealt once more."""
        begin, length = self._begin_of(epoch), self._length_of(epoch)
        past, within = positions >= length, positions % length
        numbers = (positions[past] - length) % max(1, self._kept_of(epoch))
        within[past] = self.skips.at(numbers + self.skips.kept(begin)) - begin
        return within

    def settings_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The setting of the ranges that begin before a position, which counts as that of a `ScheduledOrder`."""
        begun = self.skips.begun(position if self._continues else self._begin_of(epoch) + position)
        return {"skip": begun} if begun else {}

    def _kept_of(self, epoch: int) -> int:
        begin = self._begin_of(epoch)
        return self.skips.kept(begin + self._length_of(epoch)) - self.skips.kept(begin)

    def _begin(self, place: State) -> int:
        """The samples of training before the epoch of ``place``."""
        return int(place["origin"] - place.get("left", 0)) if self._continues else self._begin_of(place["epoch"])

    def _length(self, place: State) -> int:
        return self._length_of(place["epoch"])
