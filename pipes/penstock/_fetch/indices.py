"""The input of a task: what to load, with its address. Every item at the index level is an `Indices`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from penstock._arguments import Shown


@final
class Indices(Shown, Sequence[Any]):
    """The indices to load, with their address: one item, or a batch.

    Attributes:
        epoch: The epoch that the items belong to, counted from 0.
        positions: The items' positions in the epoch's global sequence, before sharding: an ``int`` for one item, an
            int64 array of shape ``(batch,)`` for a batch. Items that are dealt again have unique positions past the end
            of the epoch.
        values: The dataset indices. For one item an ``int``, or whatever the sampler yields (a list or an array, for
            example); for a batch an int64 array of shape ``(batch,)``, or a list if they are not all integers.
    """

    __module__ = "penstock.nodes"

    __slots__ = ("epoch", "positions", "values")

    def __init__(self, epoch: int, positions: Any, values: Any) -> None:
        self.epoch = epoch
        self.positions = positions
        self.values = values

    @property
    def is_batch(self) -> bool:
        """Whether this is a batch (of any size) rather than one item."""
        return isinstance(self.positions, np.ndarray)

    def with_values(self, values: Any) -> Indices:
        """The same address with other values."""
        return Indices(self.epoch, self.positions, values)

    def plain(self) -> Any:
        """The values without their address, as passed to a user's function: one value, or a list."""
        values, positions = self.values, self.positions
        return values.tolist() if isinstance(values, np.ndarray) and isinstance(positions, np.ndarray) else values

    def __len__(self) -> int:
        try:
            return len(self.positions)
        except TypeError:
            raise TypeError("one item of the index level has no length") from None

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice | np.ndarray):
            return Indices(self.epoch, self.positions[place], self.values[place])
        value = self.values[place]
        return Indices(self.epoch, int(self.positions[place]), int(value) if isinstance(value, np.integer) else value)

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Indices)
            and self.epoch == other.epoch
            and self.is_batch == other.is_batch
            and np.array_equal(self.positions, other.positions)
            and self.plain() == other.plain()
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        if self.is_batch and isinstance(self.values, np.ndarray):  # pickling the arrays takes three times as long
            return _unpickled, (self.epoch, self.positions.tobytes(), self.values.tobytes())
        return Indices, (self.epoch, self.positions, self.values)

    def details(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "positions": self.positions.tolist() if self.is_batch else self.positions,
            "values": self.plain(),
        }


def _unpickled(epoch: int, positions: bytes, values: bytes) -> Indices:
    return Indices(epoch, np.frombuffer(positions, np.int64).copy(), np.frombuffer(values, np.int64).copy())


def pack(items: Sequence[Any]) -> Any:
    """Combine single `Indices` into one batch; anything else into a list."""
    if isinstance(items, Indices):
        return items
    if not items or not all(isinstance(item, Indices) and not item.is_batch for item in items):
        return list(items)
    values = [item.values for item in items]
    integers = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    return Indices(
        items[0].epoch,
        np.array([item.positions for item in items], dtype=np.int64),
        np.array(values, dtype=np.int64) if integers else values,
    )


def joined(items: Sequence[Any], more: Sequence[Any]) -> Sequence[Any]:
    """Items of the index level, and ``more`` behind them."""
    if not len(more):
        return items
    if isinstance(items, Indices) and isinstance(more, Indices):
        values = [*items.plain(), *more.plain()]
        return Indices(
            items.epoch,
            np.append(items.positions, more.positions),
            np.array(values) if isinstance(items.values, np.ndarray) else values,
        )
    return [*items, *more]


@final
class Nothing:
    """The value of an index at which the worker found nothing: its source could not know that the epoch ends before it.

    See `FirstNode.absent`.
    """

    __slots__ = ("epoch", "slot")

    def __init__(self, epoch: int, slot: int) -> None:
        self.epoch = epoch
        self.slot = slot
