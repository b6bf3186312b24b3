"""A `Fetch` that measures: what it loads, transforms and collates is counted in a `Meter`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from penstock._workers.meter import now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._fetch.collate import BatchBuilder
    from penstock._fetch.fetch import Fetch, ListBatch
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

    @cached_property
    def transform(self) -> Callable[[Any], Any] | None:
        """See `Fetch`, as for all that follow."""
        transform = self._fetch.transform
        return None if transform is None else self._meter.timed(transform, self._meter.transform, self._cell)

    @cached_property
    def load(self) -> Callable[[Any], Any]:
        load, transform = self._meter.timed(self.dataset.__getitem__, self._meter.load, self._cell), self.transform
        return load if transform is None else lambda index: transform(load(index))

    def load_many(self, indices: list[Any]) -> Any:
        return self._loaded(len(indices), self._fetch.load_many, indices)

    def gathered(self, indices: Indices, seed: int, allocate: Allocate) -> Any:
        return self._loaded(len(indices), self._fetch.gathered, indices, seed, allocate)

    def begin(self, rows: int, allocate: Allocate) -> MeasuredBatch:
        return MeasuredBatch(self._fetch.begin(rows, allocate), self._meter)

    def batch_of(self, fetched: Any, allocate: Allocate) -> Any:
        return collated(self._meter, 0, self._fetch.batch_of, fetched, allocate)

    def convert(self, one: Any) -> Any:
        return collated(self._meter, 0, self._fetch.convert, one)

    def _loaded(self, rows: int, load: Callable[..., Any], *arguments: Any) -> Any:
        began = now()
        try:
            return load(*arguments)
        finally:
            self._meter.loaded_many(now() - began, rows)


@final
class MeasuredBatch:
    """A `BatchBuilder` whose work is counted when it is finished."""

    def __init__(self, batch: BatchBuilder | ListBatch, meter: Meter) -> None:
        self._batch = batch
        self._meter = meter
        self._ns = 0

    def __getattr__(self, name: str) -> Any:  # step and added
        return getattr(self._batch, name)

    def add(self, samples: Sequence[Any]) -> None:
        """See `BatchBuilder`."""
        began = now()
        self._batch.add(samples)
        self._ns += now() - began

    def finish(self) -> Any:
        """See `BatchBuilder`."""
        return collated(self._meter, self._ns, self._batch.finish)


def collated(meter: Meter, before_ns: int, collate: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``collate``, and count how long that took, with what was spent on the batch before."""
    began = now()
    try:
        return collate(*arguments)
    finally:
        meter.collate.add(before_ns + now() - began)
