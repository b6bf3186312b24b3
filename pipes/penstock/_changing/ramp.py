"""Batch sizes that change during training, at samples counted from its start over all ranks.

Absolute, so that a resume changes nothing.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast, final

from penstock._arguments import Shown, whole_number
from penstock._errors import GraphError, Once
from penstock._fetch.indices import pack
from penstock._nodes.batcher import Batcher
from penstock._nodes.node import place_of
from penstock._nodes.sharder import ranks_of
from penstock._nodes.tails import batches, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.node import BaseNode, State

log = logging.getLogger("penstock")


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

    def batched(self, source: BaseNode[Any], drop_last: bool = False) -> RampBatcher:
        """A node that groups the samples of ``source`` into batches of these sizes, as a `Batcher` does, for a graph
        built by hand.

        Raises:
            ValueError: A stage cuts a run of a `Mix`.
            GraphError: The source does not count the samples since the start of training.
        """
        return RampBatcher(source, self, drop_last)

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
class RampBatcher(Batcher):
    """Group the items of ``source`` into batches whose size changes during training.

    Args:
        source: Samples in an order.
        ramp: The sizes.
        drop_last: See `Batcher`.

    Raises:
        ValueError: ``ramp`` cuts the runs of a `Mix`.
        GraphError: The source does not count the samples since the start of training.
    """

    def __init__(self, source: BaseNode[Any], ramp: Ramp, drop_last: bool = False) -> None:
        self.ramp = ramp
        self._once = Once()
        super().__init__(source, ramp.at(0)[1], drop_last)
        self.facts.rank_settings["batch_size"] = ramp.stages
        if self.first.run is None:
            raise GraphError(
                f"batch_size={ramp} counts the samples since the start of training, but {type(self.first).__name__} "
                f"does not. Use a dataset with an order."
            )
        ramp.check(self.first.run)

    def details(self) -> dict[str, Any]:
        return {"batch_size": self.ramp, "drop_last": self.drop_last}

    def left(self, place: State) -> int | None:
        source = (place_of(place) or (0, None))[1]
        if source is None:
            return super().left(place)
        (rank, world_size), tail = ranks_of(self), self.facts.rank_settings.get("dealt", {}).get("tail", "drop")
        left, number, batches_left = self.first.left(source) or 0, self._kept(self.first.passed(source)), 0
        while left:
            _, size, following = self.ramp.at(self._sample(number))
            rounds, rest = divmod(left, size * world_size)
            if following is not None:
                rounds = min(rounds, -(-(self._kept(following) - number) // (size * world_size)))
            if not rounds:
                return batches_left + batches(share(rest, rank, world_size, tail), size, self.drop_last)
            left, number = left - rounds * size * world_size, number + rounds * size * world_size
            batches_left += rounds
        return batches_left

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Any], State]:
        taken: list[Any] = []
        if n and self._leaves:
            place = self._without_rest(place, self._stage(place)[1])
        for k in range(n * every):
            _, size, following = self._stage(place)
            items, place = self.upstream.read(place, size)
            at, following_size, _ = self._stage(place)
            # whether the round that ends here was not cut at the start of the next size
            if following is not None and following < at and self._once(str(following)):
                log.warning(
                    f"batch_size={self.ramp.at(following)[1]} starts at sample {following}, inside a round, which is "
                    f"not cut: it begins with the next round, at sample {at}."
                )
            if not len(items) or (self.drop_last and len(items) < size):
                break
            if self.drop_last:
                place = self._without_rest(place, following_size)
            if k % every == first:
                taken.append(pack(items))
        return taken, place

    def _stage(self, place: State) -> tuple[int, int, int | None]:
        """The samples before ``place``, the size of the batch that begins there, and the start of the next size."""
        epoch, source = cast("tuple[int, State]", place_of(place))
        at = self.first.passed(self.first.start(epoch + 1) if source is None else source)
        _, size, following = self.ramp.at(self._sample(self._kept(at)))  # of the first sample that is not skipped
        return at, size, following

    def _kept(self, sample: int) -> int:
        skipping = self.first.skipping
        return sample if skipping is None else int(skipping.skips.kept(sample))

    def _sample(self, number: int) -> int:
        skipping = self.first.skipping
        return number if skipping is None else int(skipping.skips.at(number))
