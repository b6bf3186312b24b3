"""Batcher: items into batches."""

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
    """Put ``batch_size`` items of ``source`` into each batch: `Indices` into one, anything else into a list.

    Args:
        source: The items.
        batch_size: Items in a batch, at least 1.
        drop_last: Leave out the batch at the end of an epoch that is not full.

    Raises:
        ValueError: ``batch_size`` is not a whole number of at least 1.
    """

    def __init__(self, source: BaseNode[Any], batch_size: int, drop_last: bool = False) -> None:
        super().__init__(source)
        if drop_last and self.source.choices().get("tail") == "exact":
            raise ValueError("drop_last=True leaves samples out, and tail='exact' promises all of them. Drop one of them.")
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.drop_last = drop_last

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

    def _batch(self) -> Any:
        """The next batch, or None where the epoch has no more."""
        block = self.source.take(self.batch_size)
        if len(block) == 0 or (self.drop_last and len(block) < self.batch_size):
            return None
        left = self.source.remaining() if self.drop_last else None
        if left is not None and left < self.batch_size:
            self.source.take(left)  # What drop_last leaves over is passed now: after its last batch an epoch is over.
        return pack(block)
