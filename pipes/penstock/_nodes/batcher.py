"""Batcher: group items into batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from penstock._arguments import whole_number
from penstock._fetch.indices import pack
from penstock._nodes.node import Node, State
from penstock._nodes.tails import batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.node import BaseNode


@final
class Batcher(Node[Any]):
    """Group the items of ``source`` into batches of ``batch_size``. A batch of `Indices` is one `Indices`; other items become a list.

    Args:
        source: The items.
        batch_size: Items per batch, at least 1.
        drop_last: Drop the last batch of an epoch if it is not full.

    Raises:
        ValueError: ``batch_size`` is not a whole number of at least 1.
    """

    __module__ = "penstock"

    def __init__(self, source: BaseNode[Any], batch_size: int, drop_last: bool = False) -> None:
        super().__init__(source)
        if drop_last and self.source.choices().get("tail") == "exact":
            raise ValueError("drop_last=True drops samples, but tail='exact' promises all of them. Use only one of the two.")
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.drop_last = drop_last
        self._leaves = drop_last and self.continues  # what fills no batch is left to the next epoch, so it must not be read first

    def details(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "drop_last": self.drop_last}

    def next(self) -> Any:
        batch = self._batch()
        return next(self.source) if batch is None else batch

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Sequence[Any]:
        taken: list[Any] = []
        for k in range(n * every):
            batch = self._batch()
            if batch is None:
                break
            if k % every == first:
                taken.append(batch)
        return taken

    def at(self, positions: Any) -> Sequence[Any]:
        raise ValueError("batches cannot be padded. Put the Sharder upstream of the Batcher, or use tail='drop' or tail='exact'.")

    def remaining(self, state: State | None = None) -> int | None:
        items = self.source.remaining(state)
        return None if items is None else batches(items, self.batch_size, self.drop_last)

    def items_per_epoch(self) -> int | None:
        items = self.source.items_per_epoch()
        return None if items is None else batches(items, self.batch_size, self.drop_last)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "batches_of": "samples"}

    def choices(self) -> dict[str, Any]:
        return {**super().choices(), "batch_size": self.batch_size, "drop_last": self.drop_last}

    def _items_read(self, items: int) -> int:
        return items * self.batch_size  # or a few less: the last batch of an epoch may be short

    def _batch(self) -> Any:
        """The next batch, or None at the end of the epoch."""
        if self._leaves:
            self._drop()
        block = self.source.take(self.batch_size)
        size = len(block)
        if not size or (self.drop_last and size < self.batch_size):
            return None
        self._drop()
        return pack(block)

    def _drop(self) -> None:
        """Skip the items that do not fill a batch, so that the state after the last batch says that the epoch is over."""
        left = self.source.remaining() if self.drop_last else None
        if left is not None and 0 < left < self.batch_size:
            if self.continues:
                self.source.finish()
            else:
                self.source.take(left)
