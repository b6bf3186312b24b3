"""Address: which samples a batch holds, on whatever rank it was."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np

from penstock._errors import StateError
from penstock._fetch.indices import Indices
from penstock._fetch.packing import PackIndex

if TYPE_CHECKING:
    from collections.abc import Iterable


@final
@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a sample or a batch is in the global sequence of an epoch.

    It does not depend on rank, world size or workers, and with the same order not on the batch size.

    Hashable. Two are equal if epoch and position are; the indices only show that an address belongs to another loader.

    Attributes:
        epoch: From 0, also of an ``infinite`` loader.
        position: Of a sample, from 0, before sharding. Of a batch, a tuple of its samples' positions. A pack has one
            position: its number in the epoch.
        indices: The dataset index of the sample, or a list of those of the batch; None if they are not known.
            `Loader.locate` looks them up. A pack has a list of its documents instead: named tuples of ``index``, and
            the ``start`` and ``length`` of the piece.
    """

    __module__ = "penstock"

    epoch: int
    position: int | tuple[int, ...]
    indices: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        given = self.position
        many = isinstance(given, tuple | list) or getattr(given, "ndim", 0) > 0
        position = tuple(map(index, given)) if many else index(given)  # type: ignore[arg-type]
        numbers = index(self.epoch), *(position if isinstance(position, tuple) else (position,))
        if min(numbers) < 0 or max(numbers) >= 2**62:
            raise ValueError(
                f"Address({self.epoch!r:.80}, {given!r:.80}): epochs and positions count from 0, and are below 2**62."
            )
        object.__setattr__(self, "epoch", index(self.epoch))
        object.__setattr__(self, "position", position)

    def json(self) -> list[Any]:
        """As JSON, without the indices."""
        return [self.epoch, self.position if isinstance(self.position, int) else as_runs(self.position)]

    @classmethod
    def from_json(cls, found: Any) -> Self:
        """The address of which `json` returned ``found``.

        Raises:
            StateError: It is damaged.
        """
        try:
            epoch, position = found
            return cls(epoch, position if isinstance(position, int) else tuple(of_runs(position)))
        except (TypeError, ValueError):
            raise StateError(
                f"{found!r:.80} is not the JSON of an Address. Save what address.json() returns."
            ) from None

    @classmethod
    def of(cls, item: Indices, *, with_indices: bool) -> Self:
        """The address of an item of the index level."""
        position = tuple(item.positions.tolist()) if item.is_batch else item.positions
        return cls(item.epoch, position, _readable(item.plain()) if with_indices else None)

    def items(self) -> list[Indices]:
        """Its samples, as the index level has them, if the indices are known."""
        values = self.indices if isinstance(self.position, tuple) else [self.indices]
        return [Indices(self.epoch, *pair) for pair in zip(self.positions.tolist(), values, strict=True)]

    @property
    def positions(self) -> np.ndarray:
        """The positions as an array: int64, shape ``(samples,)``."""
        return np.atleast_1d(np.array(self.position, np.int64))


def _readable(values: Any) -> Any:
    """Values of the index level; packs as lists of their documents."""
    if isinstance(values, list) and values and isinstance(values[0], PackIndex):
        return [pack.documents() for pack in values]
    return values.documents() if isinstance(values, PackIndex) else values


def as_lists(values: Any) -> Any:
    """Indices as JSON returns them: tuples as lists."""
    return list(map(as_lists, values)) if isinstance(values, list | tuple) else values


def as_runs(numbers: Iterable[int]) -> list[int]:
    """``numbers`` as pairs: the distance from the number after the last run, and how many follow each other."""
    pairs: list[int] = []
    behind = 0
    for number in numbers:
        if pairs and number == behind:
            pairs[-1] += 1
        else:
            pairs += [number - behind, 1]
        behind = number + 1
    return pairs


def of_runs(pairs: list[int]) -> list[int]:
    """The numbers of which `as_runs` returned ``pairs``.

    Raises:
        ValueError: They are damaged.
    """
    if not isinstance(pairs, list) or len(pairs) % 2 or not all(type(number) is int for number in pairs):
        raise ValueError
    found: list[int] = []
    behind = 0
    for distance, many in list(pairwise(pairs))[::2]:
        begin, behind = behind + distance, behind + distance + many
        if begin < 0 or not 0 < many <= _MOST - len(found):
            raise ValueError
        found += range(begin, behind)
    return found


_MOST = 2**24
"""The most numbers in a list that comes from a file."""
