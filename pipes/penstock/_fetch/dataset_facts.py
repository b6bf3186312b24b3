"""DatasetFacts: what a loader needs to know about a dataset, determined once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, final

from torch.utils.data import IterableDataset

from penstock._fetch.array_dataset import ArrayDataset


@final
@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """What a loader needs to know about a dataset before it can read it.

    Attributes:
        name: Name of its class.
        read: ``"by index"``; or ``"forward"``, from its beginning, for an ``IterableDataset``. Anything else is ``"once"``, an iterator; ``"as it comes"``,
            another iterable; or ``"never"``.
        length: Number of samples, if it is read by index and has a length. The length that a stream claims is ignored.
        in_memory: Its samples are rows of arrays, so that there is nothing to load.
        unsized: The error of its ``__len__``, if that raised one.
    """

    name: str
    read: Literal["by index", "forward", "once", "as it comes", "never"]
    length: int | None
    in_memory: bool
    unsized: Exception | None = None

    @classmethod
    def of(cls, dataset: Any) -> DatasetFacts:
        """Inspects ``dataset`` without loading a sample."""
        name = type(dataset).__name__
        if isinstance(dataset, IterableDataset):
            return cls(name, "forward", None, False)
        if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
            return cls(
                name, "once" if isinstance(dataset, Iterator) else "as it comes" if hasattr(dataset, "__iter__") else "never", None, False
            )
        length, unsized = measured(dataset)
        return cls(name, "by index", length, isinstance(dataset, ArrayDataset), unsized)

    def samples(self) -> int:
        """`length`.

        Raises:
            TypeError: The dataset has no length.
        """
        if self.length is None:
            raise TypeError(
                f"{self.name} has no length, which its order requires. Give it a __len__, or pass a sampler; "
                f"a dataset that can only be iterated should be a torch.utils.data.IterableDataset."
            ) from self.unsized
        return self.length


def measured(sized: Any) -> tuple[int, None] | tuple[None, Exception]:
    """``len(sized)``; or, if it has none, the error of its ``__len__``: any error means that."""
    try:
        return len(sized), None
    except Exception as exc:
        return None, exc


def length(sized: Any) -> int | None:
    """``len(sized)``; None if it has none."""
    return measured(sized)[0]
