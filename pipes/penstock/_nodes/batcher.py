"""Batcher: group items into batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock._arguments import whole_number
from penstock._fetch.indices import pack
from penstock._nodes.index_node import IndexNode
from penstock._nodes.tails import batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.node import BaseNode, State


class Batcher(IndexNode[Any]):
    """Group the items of ``source`` into batches of ``batch_size``.

    A batch of `Indices` is one `Indices`; other items become a list.

    Args:
        source: Yields the items.
        batch_size: Items per batch, at least 1. For sizes that change, see `Ramp.batched`.
        drop_last: Drop the last batch of an epoch if it is not full.

    Raises:
        ValueError: ``batch_size`` is not a whole number of at least 1.
    """

    __module__ = "penstock.nodes"

    def __init__(self, source: BaseNode[Any], batch_size: int, drop_last: bool = False) -> None:
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.drop_last = drop_last
        super().__init__(
            source,
            settings={"batches_of": "samples"},
            rank_settings={"batch_size": self.batch_size, "drop_last": drop_last},
        )
        self._leaves = drop_last and self.facts.carries_over_epochs
        if drop_last and self.facts.rank_settings.get("dealt", {}).get("tail") == "exact":
            raise ValueError(
                "drop_last=True drops samples, but tail='exact' promises all of them. Use only one of the two."
            )

    def details(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "drop_last": self.drop_last}

    def counted(self, items: int) -> int:
        return batches(items, self.batch_size, self.drop_last)

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Any], State]:
        source, size, taken = self.upstream, self.batch_size, []
        if n and self._leaves:
            place = self._without_rest(place, size)  # which belongs to the next epoch, so it must not be read
        for k in range(n * every):
            items, place = source.read(place, size)
            if (came := len(items)) < size and (self.drop_last or not came):
                break
            if self.drop_last:
                place = self._without_rest(place, size)
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

    def _without_rest(self, place: State, size: int) -> State:
        """``place`` moved past the items that fill no batch, so that the state after the last batch says that the epoch
        is over.
        """
        left = self.upstream.left(place)
        return place if left is None or not 0 < left < size else self.upstream.skip(place)
