"""Batcher: group items into batches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast, final

from penstock._arguments import whole_number
from penstock._errors import GraphError, Once
from penstock._fetch.indices import pack
from penstock._nodes.index_node import IndexNode
from penstock._nodes.node import place_of
from penstock._nodes.sharder import ranks_of
from penstock._nodes.tails import batches, share
from penstock._random.schedules import Ramp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.node import BaseNode, State

log = logging.getLogger("penstock")


@final
class Batcher(IndexNode[Any]):
    """Group the items of ``source`` into batches of ``batch_size``.

    A batch of `Indices` is one `Indices`; other items become a list.

    Args:
        source: Yields the items.
        batch_size: Items per batch, at least 1; or a `Ramp`, if the source is an order.
        drop_last: Drop the last batch of an epoch if it is not full.

    Raises:
        ValueError: ``batch_size`` is not a whole number of at least 1, or a `Ramp` that cuts the runs of a `Mix`.
        GraphError: It is a `Ramp`, and the source does not count the samples since the start of training.
    """

    __module__ = "penstock.nodes"

    def __init__(self, source: BaseNode[Any], batch_size: int | Ramp, drop_last: bool = False) -> None:
        self.ramp = batch_size if isinstance(batch_size, Ramp) else None
        self.batch_size = (
            batch_size.at(0)[1] if isinstance(batch_size, Ramp) else whole_number("batch_size", batch_size, 1)
        )
        self.drop_last = drop_last
        self._once = Once()
        sizes = self.batch_size if self.ramp is None else self.ramp.stages
        super().__init__(
            source, settings={"batches_of": "samples"}, rank_settings={"batch_size": sizes, "drop_last": drop_last}
        )
        if self.ramp is not None:
            if self.first.skips is None:
                raise GraphError(
                    f"batch_size={self.ramp} counts the samples since the start of training, but "
                    f"{type(self.first).__name__} does not. Use a dataset with an order."
                )
            self.ramp.check(self.first.skips.run)
        if drop_last and self.facts.rank_settings.get("dealt", {}).get("tail") == "exact":
            raise ValueError(
                "drop_last=True drops samples, but tail='exact' promises all of them. Use only one of the two."
            )
        self._leaves = (
            drop_last and self.facts.carries_over_epochs
        )  # a remainder that fills no batch belongs to the next epoch, so it must not be read

    def details(self) -> dict[str, Any]:
        return {"batch_size": self.ramp or self.batch_size, "drop_last": self.drop_last}

    def counted(self, items: int) -> int:
        return batches(items, self.batch_size, self.drop_last)

    def left(self, place: State) -> int | None:
        source = (place_of(place) or (0, None))[1]
        if self.ramp is None or source is None:
            return super().left(place)
        (rank, world_size), tail = ranks_of(self), self.facts.rank_settings.get("dealt", {}).get("tail", "drop")
        first: Any = self.first
        left, number, batches_left = first.left(source), first.skips.kept(first.passed(source)), 0
        while left:
            _, size, following = self.ramp.at(first.skips.at(number))
            rounds, rest = divmod(left, size * world_size)
            if following is not None:
                rounds = min(rounds, -(-(first.skips.kept(following) - number) // (size * world_size)))
            if not rounds:
                return batches_left + batches(share(rest, rank, world_size, tail), size, self.drop_last)
            left, number, batches_left = (
                left - rounds * size * world_size,
                number + rounds * size * world_size,
                batches_left + rounds,
            )
        return batches_left

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Any], State]:
        source, size, taken = self.upstream, self.batch_size, []
        following = None
        if self._leaves and n:
            place = self._without_rest(place)
        for k in range(n * every):
            if self.ramp is not None:
                _, size, following = self._stage(self.ramp, place)
            items, place = source.read(place, size)
            if self.ramp is not None:
                self._say_moved(following, place)
            if (came := len(items)) < size and (self.drop_last or not came):
                break
            if self.drop_last:
                place = self._without_rest(place)
            if k % every == first:
                taken.append(pack(items))
        return taken, place

    def peek(self, place: State, positions: Any) -> Sequence[Any]:
        raise ValueError(
            "batches cannot be padded. Use tail='drop' or tail='exact', or put the Batcher downstream of the node with "
            "tail='pad'."
        )

    def _items_read(self, items: int) -> int:
        return items * self.batch_size  # or a few less: the last batch of an epoch may be short

    def _without_rest(self, place: State) -> State:
        """``place`` moved past the items that fill no batch, so that the state after the last batch says that the epoch
        is over.
        """
        left = self.upstream.left(place)
        size = self.batch_size if self.ramp is None else self._stage(self.ramp, place)[1]
        return place if left is None or not 0 < left < size else self.upstream.skip(place)

    def _stage(self, ramp: Ramp, place: State) -> tuple[int, int, int | None]:
        """The samples before ``place``, the size of the batch that begins there, and the start of the next size."""
        epoch, source = cast("tuple[int, State]", place_of(place))
        first: Any = self.first
        at = first.passed(first.start(epoch + 1) if source is None else source)
        _, size, following = ramp.at(first.skips.at(first.skips.kept(at)))  # of the first sample that is not skipped
        return at, size, following

    def _say_moved(self, following: int | None, place: State) -> None:
        """Say so if the round that ends at ``place`` was not cut at the start of the next size."""
        assert self.ramp is not None
        if (
            following is not None
            and following < (at := self._stage(self.ramp, place)[0])
            and self._once(str(following))
        ):
            log.warning(
                f"batch_size={self.ramp.at(following)[1]} starts at sample {following}, inside a round, which is not "
                f"cut: it begins with the next round, at sample {at}."
            )
