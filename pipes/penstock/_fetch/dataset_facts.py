"""DatasetFacts: what a loader must know of a dataset, asked once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, final

from torch.utils.data import IterableDataset

from penstock._fetch.array_dataset import ArrayDataset


@final
@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """What a loader must know of a dataset before it can read it.

    Attributes:
        name: Its class.
        read: ``"by index"``; or ``"forward"``, from its beginning, as an ``IterableDataset``. What is neither is ``"once"``, an iterator; ``"as it comes"``,
            another iterable; or ``"never"``.
        length: Its samples, if it is read by index and has a length. What a stream claims to have is no fact.
        in_memory: Its samples are rows of arrays, so that there is nothing to load.
    """

    name: str
    read: Literal["by index", "forward", "once", "as it comes", "never"]
    length: int | None
    in_memory: bool

    @classmethod
    def of(cls, dataset: Any) -> DatasetFacts:
        """Asks ``dataset`` for no sample."""
        name = type(dataset).__name__
        if isinstance(dataset, IterableDataset):
            return cls(name, "forward", None, False)
        if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
            return cls(
                name, "once" if isinstance(dataset, Iterator) else "as it comes" if hasattr(dataset, "__iter__") else "never", None, False
            )
        try:
            length = len(dataset)
        except (TypeError, NotImplementedError):
            length = None
        return cls(name, "by index", length, isinstance(dataset, ArrayDataset))

    def samples(self) -> int:
        """`length`.

        Raises:
            TypeError: There is none.
        """
        if self.length is None:
            raise TypeError(
                f"{self.name} has no length, which its order is made of. Give it a __len__, or pass a sampler; "
                f"a dataset that can only be iterated should be a torch.utils.data.IterableDataset."
            )
        return self.length
