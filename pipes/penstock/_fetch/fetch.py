"""Fetch: loads the samples of a batch from a dataset and collates them."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch.utils.data import default_convert

from penstock._arguments import Shown
from penstock._fetch.array_dataset import gathered
from penstock._fetch.collate import BatchBuilder, Collator
from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.padding import Padded
from penstock._memory.allocation import anywhere
from penstock._workers.meter import now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._fetch.indices import Indices
    from penstock._memory.allocation import Allocate
    from penstock._workers.meter import Meter


@final
class Fetch(Shown):
    """Load the samples of a batch from a map-style dataset, and collate them: the ``map_fn`` of the canonical graph.

    Without a ``collate_fn`` each sample is written directly into its row of the batch, in recycled memory. A
    ``TensorDataset`` (also inside a ``Subset`` or a ``ConcatDataset``) is read with one index operation per tensor.

    `DatasetLike` lists what else a dataset may have.

    Args:
        dataset: Has ``__getitem__``, or ``__getitems__``. The latter gets a list of indices and returns either the list
            of their samples or the batch itself: a tensor, an array, or a dict or named tuple of them. Or
            ``DatasetFacts`` of one.
        collate_fn: Makes a batch from a list of samples; default: like ``torch.utils.data.default_collate``, but also
            for dataclasses. For a single index (no batching) it receives the sample itself, and the default is
            ``default_convert``.
        transform: Applied to each sample before collation: decoding, augmentation. Its random numbers are those of the
            sample.

    Raises:
        TypeError: ``transform`` is not callable. On loading: ``__getitems__`` returned a batch, which contains no
            samples to transform.
        ValueError: On loading: the number of samples from ``__getitems__`` differs from the number of indices.
    """

    __module__ = "penstock.nodes"

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of one sample, but {transform!r:.80} is not callable.")
        self.facts = facts = DatasetFacts.of(dataset)
        self.dataset = facts.dataset
        self.collate_fn = collate_fn
        self.transform = transform
        self.has_getitems = facts.has_getitems
        self.is_arrays = collate_fn is None and transform is None and facts.is_arrays
        self.meter: Meter | None = None  # set on a `measured` copy
        self._collator = Collator()

    def details(self) -> dict[str, Any]:
        given = {"collate_fn": self.collate_fn, "transform": self.transform}
        return {"dataset": self.dataset, **{name: one for name, one in given.items() if one is not None}}

    def __call__(self, indices: Any) -> Any:
        """The batch of a list of indices, or the sample of one index."""
        if not isinstance(indices, list):
            return self.convert(self.load(indices))
        if not self.has_getitems:
            return self.collate([self.load(index) for index in indices])
        fetched = self.load_many(indices)
        return self.batch_of(
            fetched
            if self.transform is None
            else list(map(self.transform, samples_in(self.dataset, fetched, len(indices))))
        )

    def measured(self, meter: Meter) -> Fetch:
        """A copy for one batch, whose work is recorded in ``meter``."""
        found = object.__new__(Fetch)
        vars(found).update(vars(self), meter=meter)  # not `copy`, which would make it relearn the schema of its batches
        found.transform = None if self.transform is None else meter.timed(self.transform, meter.transform)
        return found

    @property
    def load(self) -> Callable[[Any], Any]:
        """A function from an index to its sample."""
        load: Callable[[Any], Any] = self.dataset.__getitem__
        if self.meter is not None:
            load = self.meter.timed(load, self.meter.load)
        if (transform := self.transform) is None:
            return load
        return lambda index: transform(load(index))

    def load_many(self, indices: list[Any]) -> Any:
        """What the dataset's ``__getitems__`` returns."""
        return (
            self.dataset.__getitems__(indices) if self.meter is None else self._many(self.dataset.__getitems__, indices)
        )

    def _many(self, load: Callable[..., Any], indices: Any, *others: Any) -> Any:
        meter, began = self.meter, now()
        try:
            return load(indices, *others)
        finally:
            if meter is not None:
                meter.loaded_many(now() - began, len(indices))

    def gathered(self, indices: Indices, seed: int, allocate: Allocate) -> Any:
        """The batch, if the dataset is arrays; None if index operations are not enough."""
        if not isinstance(indices.values, np.ndarray) or not len(indices.values):
            return None
        load = partial(gathered, self.dataset)
        return load(indices, seed, allocate) if self.meter is None else self._many(load, indices, seed, allocate)

    def begin(self, rows: int, allocate: Allocate) -> BatchBuilder | ListBatch:
        """An empty batch for up to ``rows`` samples."""
        return (
            BatchBuilder(self._collator, rows, allocate) if self.collate_fn is None else ListBatch(self._into(allocate))
        )

    def collate(self, samples: Sequence[Any], allocate: Allocate = anywhere) -> Any:
        """The batch of ``samples``."""
        if (collate_fn := self.collate_fn) is None:
            return self._collator(samples, allocate)
        return collate_fn(samples) if type(collate_fn) is not Padded else collate_fn(samples, allocate=allocate)

    def _into(self, allocate: Allocate) -> Callable[[Any], Any]:
        """The user's ``collate_fn``, or ours, which writes its batch into memory from ``allocate``."""
        assert self.collate_fn is not None
        return partial(self.collate_fn, allocate=allocate) if type(self.collate_fn) is Padded else self.collate_fn

    def batch_of(self, fetched: Any, allocate: Allocate = anywhere) -> Any:
        """The batch made from what ``__getitems__`` returned."""
        if self.collate_fn is not None or are_samples(fetched):
            return self.collate(fetched, allocate)
        return default_convert(fetched)  # type: ignore[no-untyped-call]

    def convert(self, one: Any) -> Any:
        """A single sample, for loading without batches."""
        if self.collate_fn is not None:
            return self.collate_fn(one)
        return default_convert(one)  # type: ignore[no-untyped-call]

    def settings(self) -> dict[str, Any]:
        """The dataset's length and the names of its shards, if it has them, and which samples its subsets have."""
        if self.facts.grows:
            return {}  # its source says them
        length = None if self.facts.lanes else self.facts.length  # of a stream it is the length of an epoch
        return {**({} if length is None else {"dataset_length": length}), **self.facts.names}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_collator": Collator()}  # each worker learns the schema itself


# Pickling looks this class up by its public name. Had it to import it then, pickle would turn an interrupt into a
# PicklingError, and Ray's cloudpickle would send the class itself.
sys.modules["penstock"].nodes.Fetch = Fetch


@final
class IdentityDataset:
    """The dataset of items that were already read: an item is its own index.

    Used to transform the items of a stream in workers.
    """

    def __getitem__(self, item: Any) -> Any:
        return item


@final
class ListBatch:
    """A batch under construction for a user's ``collate_fn``; see `BatchBuilder`."""

    step = 2**16

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn
        self._samples: list[Any] = []
        self.add = self._samples.extend

    @property
    def added(self) -> int:
        """Samples added so far."""
        return len(self._samples)

    def finish(self) -> Any:
        """The batch of all samples added."""
        return self._collate_fn(self._samples)


def are_samples(fetched: Any) -> bool:
    """Whether the result of a ``__getitems__`` is separate samples: a named tuple is a batch."""
    return isinstance(fetched, list) or type(fetched) is tuple


def samples_in(
    dataset: Any, fetched: Any, n: int, remedy: str = "or transform the batch in collate_fn"
) -> Sequence[Any]:
    """The result of the ``__getitems__`` of ``dataset``, checked to be ``n`` samples."""
    if not are_samples(fetched):
        raise TypeError(
            f"individual samples are needed here, but {type(dataset).__name__}.__getitems__ returned a whole batch, a "
            f"{type(fetched).__name__}. Return a list of samples, {remedy}."
        )
    if len(fetched) != n:
        raise ValueError(
            f"{type(dataset).__name__}.__getitems__ returned {len(fetched)} samples for {n} indices, so samples and "
            f"indices cannot be matched."
        )
    samples: Sequence[Any] = fetched
    return samples
