"""A `Fetch` that measures: what it loads, transforms and collates is counted in a `Meter`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from penstock._workers.meter import now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._fetch.collate import BatchBuilder
    from penstock._fetch.fetch import Fetch, Listed
    from penstock._fetch.indices import Indices
    from penstock._memory.allocation import Allocate
    from penstock._workers.meter import Meter


@final
class MeasuredFetch:
    """``fetch`` for one batch, measured.

    Args:
        fetch: What loads.
        meter: Of the worker.
        cell: Has the row being loaded.
    """

    def __init__(self, fetch: Fetch, meter: Meter, cell: Sequence[int]) -> None:
        self._fetch = fetch
        self._meter = meter
        self._cell = cell
        self.dataset, self.collate_fn = fetch.dataset, fetch.collate_fn
        self.has_getitems, self.is_arrays = fetch.has_getitems, fetch.is_arrays
        self.samples_in = fetch.samples_in

    @cached_property
    def transform(self) -> Callable[[Any], Any] | None:
        """See `Fetch`."""
        transform = self._fetch.transform
        return None if transform is None else self._meter.timed(transform, self._meter.transform, self._cell)

    @cached_property
    def load(self) -> Callable[[Any], Any]:
        """See `Fetch`."""
        load, transform = self._meter.timed(self.dataset.__getitem__, self._meter.load, self._cell), self.transform
        return load if transform is None else lambda index: transform(load(index))

    def load_many(self, indices: list[Any]) -> Any:
        """See `Fetch`."""
        began = now()
        try:
            return self._fetch.load_many(indices)
        finally:
            self._meter.loaded_many(now() - began, len(indices))

    def gathered(self, indices: Indices, seed: int, allocate: Allocate) -> Any:
        """See `Fetch`."""
        began = now()
        try:
            return self._fetch.gathered(indices, seed, allocate)
        finally:
            self._meter.loaded_many(now() - began, len(indices))

    def begin(self, rows: int, allocate: Allocate) -> MeasuredBatch:
        """See `Fetch`."""
        return MeasuredBatch(self._fetch.begin(rows, allocate), self._meter)

    def batch_of(self, fetched: Any, allocate: Allocate) -> Any:
        """See `Fetch`."""
        began = now()
        try:
            return self._fetch.batch_of(fetched, allocate)
        finally:
            self._meter.collate.add(now() - began)

    def convert(self, one: Any) -> Any:
        """See `Fetch`."""
        began = now()
        try:
            return self._fetch.convert(one)
        finally:
            self._meter.collate.add(now() - began)


@final
class MeasuredBatch:
    """A `BatchBuilder` whose work is counted when it is finished."""

    def __init__(self, batch: BatchBuilder | Listed, meter: Meter) -> None:
        self._batch = batch
        self._meter = meter
        self._ns = 0

    @property
    def step(self) -> int:
        """See `BatchBuilder`."""
        return self._batch.step

    @property
    def added(self) -> int:
        """See `BatchBuilder`."""
        return self._batch.added

    def add(self, samples: Sequence[Any]) -> None:
        """See `BatchBuilder`."""
        began = now()
        self._batch.add(samples)
        self._ns += now() - began

    def finish(self) -> Any:
        """See `BatchBuilder`."""
        began = now()
        try:
            return self._batch.finish()
        finally:
            self._meter.collate.add(self._ns + now() - began)
