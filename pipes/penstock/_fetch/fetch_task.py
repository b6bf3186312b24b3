"""Work that loads samples by their indices, and makes a batch of them."""

from __future__ import annotations

from functools import cached_property, partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, final

from penstock._arguments import brief
from penstock._errors import GraphError, suppress_own
from penstock._fetch.columns import in_columns, in_rows
from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.error_policy import SKIP, PartialBatch, SampleFailure, annotate, describe, is_of_stream
from penstock._fetch.fetch import Fetch, IdentityDataset, ListBatch, are_samples, samples_in
from penstock._fetch.held_generators import NEW_EPOCH
from penstock._fetch.indices import Indices
from penstock._fetch.packing import PackView
from penstock._fetch.padding import Padded
from penstock._fetch.sample import SampleCursor, current
from penstock._fetch.task import Loaded, Part, Task
from penstock._fetch.told_parts import ToldParts
from penstock._fetch.torch_collate import has_registered
from penstock._memory.allocation import anywhere
from penstock._memory.modes import are_neutral, neutral_modes
from penstock._workers.meter import now
from penstock._workers.pool import IDLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableSequence, Sequence

    from penstock._fetch.collate import BatchBuilder
    from penstock._fetch.error_policy import OnError
    from penstock._memory.allocation import Allocate
    from penstock._workers.meter import Meter

    AnyBatch = BatchBuilder | ListBatch


@final
class FetchTask(Task):
    """`Work` that loads the samples of a batch, one by one unless the dataset loads many at once, and collates them.

    Args:
        fetch: The dataset and the collate function.
        seed: See `Task`.
        seed_global_rngs: See `Task`.
        on_error: What to do with a sample that raises an ``Exception``.
    """

    def __init__(
        self, fetch: Fetch, seed: int, seed_global_rngs: bool | Literal["always"], on_error: OnError = "raise"
    ) -> None:
        # A transform may have modified an item, so it must not receive it again; see `GlobalSeeding`.
        once = isinstance(fetch.dataset, IdentityDataset)
        self.fetch = fetch
        self.dataset, self._transform = None if once else fetch.dataset, fetch.transform
        if isinstance(fetch.dataset, PackView):
            self.dataset, self._transform = fetch.dataset.dataset, fetch.dataset.transform
        roots = {
            "dataset": self.dataset,
            "transform": self._transform,
            "collate_fn": fetch.collate_fn,
            "on_error": on_error,
        }
        super().__init__(seed, "always" if once and seed_global_rngs is True else seed_global_rngs, roots)
        if self.dataset is None:
            self.noun = "the item"
        elif fetch.facts.sets_worker_info:
            self.noun, self.slot_name = "item", getattr(self.dataset, "slot_name", None)
        self.on_error = on_error
        self._one_by_one = on_error == "raise" and not fetch.has_getitems and not fetch.is_arrays
        self.told_parts = ToldParts(fetch.dataset, fetch.facts.tops)

    def close(self) -> None:
        """Close what this process has open of shards and lanes: the user's generators, each with its ``finally``."""
        if self.fetch.facts.is_read_in_lanes and callable(close := getattr(self.dataset, "close", None)):
            close()

    def inline(self, task: Any, allocate: Allocate = anywhere) -> Any:
        """Most batches are plain: nothing is measured, no sample may be skipped, and no object holds a generator.

        Those take the fast path, `_batch`.
        """
        if are_neutral():  # nearly always; the context, or a decorator, would be two more calls for each batch
            return self._inline(task, allocate)
        with neutral_modes():
            return self._inline(task, allocate)

    def _inline(self, task: Any, allocate: Allocate) -> Any:
        meter = self.meter
        plain = self._one_by_one and meter.plain and self.generators.quiet and isinstance(task, Indices)
        if not plain or not (task.is_batch and len(task.positions)) or self.told_parts.lack(task.epoch, self.told):
            return super().inline(task, allocate)
        meter.plain -= 1
        return self._seeding.run(partial(self._batch, task, allocate), of_many=True, kept=True)

    @property
    def parts_that_may_draw(self) -> str:
        fetch, dataset, collate_fn, parts = self.fetch, self.dataset, self.fetch.collate_fn, []
        if dataset is not None and not fetch.is_arrays:
            parts.append(f"{brief(type(dataset))}.{'__getitems__' if fetch.has_getitems else '__getitem__'}")
        if self._transform is not None:
            parts.append(f"transform {brief(self._transform)}")
        if collate_fn is not None and type(collate_fn) is not Padded:
            parts.append(f"collate_fn {brief(collate_fn)}")
        return " or ".join(parts) or "a function that collates"

    @property
    def collates_itself(self) -> bool:
        return self.fetch.collate_fn is not None or has_registered()

    def _done(
        self, task: Any, current_row: MutableSequence[int], allocate: Allocate, inline: bool, meter: Meter | None
    ) -> Any:
        fetch, travels = self.fetch, False
        if isinstance(task, Part):
            travels = task.travels
            fetch, task = self._uncollated, task.indices
        if meter is not None:
            fetch = fetch.measured(meter)
        value = self._fetched(fetch, task, current_row, allocate, inline)
        return in_columns(value) if travels and type(value) is list else value

    # A batch that several workers load in parts.

    @cached_property
    def _uncollated(self) -> Fetch:
        return Fetch(self.fetch.facts, _samples, self.fetch.transform)

    def parts(self, task: Any, n: int, *, here: bool = True) -> list[Part]:
        """Split ``task`` into up to ``n`` parts; an empty list if it cannot be loaded sample by sample.

        ``here`` means that the workers are threads of this process. Otherwise a batch with the user's own
        ``collate_fn``, or with one registered with torch, is not split: it must run in the worker, because it may
        convert the samples into something picklable, or query the worker info.
        """
        fetch = self.fetch
        if fetch.has_getitems or fetch.is_arrays or not isinstance(task, Indices) or not task.is_batch:
            return []
        if not here and self.collates_itself:
            return []
        size = -(-len(task) // n)
        rows = range(len(task))
        return (
            [Part(task[start : start + size], rows[start : start + size], not here) for start in rows[::size]]
            if size < len(task)
            else []
        )

    def part(self, task: Indices, rows: Sequence[int], *, here: bool = True) -> Part:
        """Some rows of a batch whose values are an array."""
        own = Indices(task.epoch, task.positions[rows], task.values[rows])
        return Part(own, rows, not (here or self.collates_itself))

    def _together(self, fetch: Fetch, task: Loaded, allocate: Allocate) -> Any:
        """The batch, with its rows in order, however they were divided into parts."""
        failures: list[SampleFailure] = []
        samples: list[tuple[int, Any]] = []
        for part, value in zip(task.parts, task.values, strict=True):
            its, failed = (value.value, value.failures) if isinstance(value, PartialBatch) else (value, ())
            skipped = {failure.row for failure in failed if failure.skipped}
            failures += [failure._replace(row=part.rows[failure.row]) for failure in failed]
            kept = part.rows if not skipped else [row for place, row in enumerate(part.rows) if place not in skipped]
            samples += zip(kept, () if its is None else in_rows(its), strict=True)
        samples.sort(key=_row)
        failures.sort(key=_row)
        batch = fetch.begin(len(task.indices), allocate)
        began = now()
        batch.add([sample for _, sample in samples])
        return self._finished(fetch, task.indices, batch, failures, now() - began)

    # A task for one worker.

    def _fetched(
        self, fetch: Fetch, task: Any, current_row: MutableSequence[int], allocate: Allocate, inline: bool
    ) -> Any:
        if isinstance(task, Loaded):
            together = partial(self._together, fetch, task, allocate)
            return self._run(together, of_many=False, kept=inline and fetch.collate_fn is not None)
        if not isinstance(task, Indices):
            raise GraphError(
                f"Fetch loads samples by index, but received an item of type {type(task).__name__}. Put a Sampler at "
                f"the source, or map with a plain function."
            )
        if self.told_parts.lack(task.epoch, self.told):
            self.tell(task.epoch, inline=inline)
        if fetch.is_arrays and task.is_batch:
            try:
                batch = fetch.gathered(task, self.seed, allocate)
            except Exception:
                if self.on_error == "raise":
                    raise
                batch = None  # load sample by sample to find the one that failed
            if batch is not None:
                return batch
        one_by_one = task.is_batch and (fetch.facts.sets_worker_info or not fetch.has_getitems)
        many = inline or (one_by_one and len(task) >= _WATCHED)
        return self._run(lambda: self._loaded(fetch, task, current_row, allocate), of_many=many, kept=inline)

    def _loaded(self, fetch: Fetch, task: Indices, current_row: MutableSequence[int], allocate: Allocate) -> Any:
        if not task.is_batch:
            one = ListBatch(lambda samples: fetch.convert(samples[0]))
            return self._row_by_row(fetch, task, [task.positions], [task.values], one, fetch.load, [IDLE])
        positions, indices = task.positions.tolist(), task.plain()
        if not fetch.has_getitems or not indices:
            load = fetch.load
        else:
            loading = SampleCursor(self.seed, task.epoch, positions[:1], [indices], [IDLE])
            begin = partial(self._begin, loading, positions[0])
            begin()
            if self.generators.is_first and fetch.transform is None and not self._is_forward:
                with suppress_own():  # loaded alone, and for nothing else
                    self._compared(fetch.load_many, begin, indices[:1])
                begin()
            try:
                fetched = fetch.load_many(indices)
            except Exception as exc:
                if self.on_error == "raise" or is_of_stream(exc):
                    raise
                load = _load_one(fetch)  # load again, one by one, to find the sample that failed
            else:
                if fetch.transform is not None:
                    samples = samples_in(self.dataset, fetched, len(indices))
                    batch = fetch.begin(len(indices), allocate)
                    return self._row_by_row(
                        fetch, task, positions, indices, batch, fetch.transform, current_row, samples
                    )
                current.set(None)
                if fetch.meter is not None:
                    return self._finished(fetch, task, ListBatch(lambda _: fetch.batch_of(fetched, allocate)), [])
                self._seed_collate(fetch, task)
                return fetch.batch_of(fetched, allocate)
        return self._row_by_row(fetch, task, positions, indices, fetch.begin(len(indices), allocate), load, current_row)

    def _batch(self, task: Indices, allocate: Allocate) -> Any:
        """The result of `_loaded`, computed faster: samples are loaded one by one, and the first error is raised."""
        fetch, indices = self.fetch, task.plain()
        rows = iter(indices)
        loading = SampleCursor(self.seed, task.epoch, task.positions, indices, rows)
        token, current_row = current.set(loading), None
        try:
            if self._seeding.active:
                current_row = [IDLE]
                return self._loaded(fetch, task, current_row, allocate)
            load = fetch.load
            batch = None if fetch.collate_fn is not None else fetch.begin(len(indices), allocate)
            if batch is None or batch.step >= len(indices):
                samples = [load(index) for index in rows]
                if batch is not None:
                    batch.add(samples)
            else:
                # left by a break: Ctrl-C at the jump of a condition could skip the finally (python/cpython#130279)
                while True:
                    samples = [load(index) for index in islice(rows, batch.step)]
                    if not samples:
                        break
                    batch.add(samples)
            current_row = [IDLE]
            current.set(None)
            return fetch.collate(samples, allocate) if batch is None else batch.finish()
        except BaseException as exc:
            row = loading.row if current_row is None else current_row[0]
            annotate(exc, f"while loading {self.name(task, row)}")
            raise
        finally:
            current.reset(token)

    def _row_by_row(
        self,
        fetch: Fetch,
        task: Indices,
        positions: list[int],
        indices: list[Any],
        batch: AnyBatch,
        load: Callable[[Any], Any],
        current_row: MutableSequence[int],
        items: Sequence[Any] | None = None,
    ) -> Any:
        """``load`` is called with each of ``items``; default: the indices."""
        items = indices if items is None else items
        loading = SampleCursor(self.seed, task.epoch, positions, indices, current_row)
        current.set(loading)
        loading.reseed = self._reseed
        if self.generators.is_first:
            load = self._compares_first(fetch, load, loading, positions, items is indices and self._is_forward)
        failures: list[SampleFailure] = []
        begun, rows, added_ns = 0, len(indices), 0
        would_wait = None if fetch.has_getitems else fetch.facts.would_wait
        while begun < rows:
            samples: dict[int, Any] = {}
            some = range(begun, min(rows, begun + batch.step))
            for row in some if would_wait is None else _free_first(some, indices, would_wait):
                current_row[0] = row
                if loading.reseed is not None:
                    loading.reseed(task.epoch, positions[row])
                try:
                    samples[row] = load(items[row])
                except Exception as exc:
                    if self.on_error == "raise" or is_of_stream(exc):
                        raise
                    substitute = self._substitute(exc, loading)
                    failures.append(SampleFailure(row, self.name(task, row), describe(exc), substitute is SKIP))
                    if substitute is not SKIP:
                        samples[row] = substitute
            begun = some.stop
            asked = now()
            batch.add([sample for _, sample in sorted(samples.items(), key=_row)])
            added_ns += now() - asked
        current_row[0] = IDLE
        current.set(None)
        return self._finished(fetch, task, batch, sorted(failures, key=_row), added_ns)

    @property
    def _is_forward(self) -> bool:
        return DatasetFacts.of(self.dataset).is_read_in_lanes

    def _compares_first(
        self, fetch: Fetch, load: Callable[[Any], Any], loading: SampleCursor, positions: Sequence[int], forward: bool
    ) -> Callable[[Any], Any]:
        """``load``, which compares the first sample that it loads with the same one loaded again.

        Data that is read ``forward`` would be read again from its start, so only its transform is called again.
        """

        def compared(item: Any) -> Any:
            begin = partial(self._begin, loading, positions[loading.row])
            if forward:
                return self._compared(fetch.transform or _same, begin, fetch.dataset[item])
            return self._compared(load, begin, item)

        return compared

    def _finished(
        self, fetch: Fetch, task: Indices, batch: AnyBatch, failures: list[SampleFailure], added_ns: int = 0
    ) -> Any:
        if failures and not batch.added:
            return PartialBatch(None, failures, 0)
        self._seed_collate(fetch, task)
        began = now()
        value = batch.finish()
        if fetch.meter is not None:
            fetch.meter.collate.add(now() - began + added_ns)
        return PartialBatch(value, failures, batch.added) if failures else value

    def _seed_collate(self, fetch: Fetch, task: Indices) -> None:
        """Give ``collate_fn`` its own seed, so that its draws do not depend on what the samples drew."""
        if fetch.collate_fn is not None and fetch.collate_fn is not _samples and task.is_batch and len(task):
            self._seeding.seed_collate(task.epoch, int(task.positions[0]))
            self.generators.seed(task.epoch, ~int(task.positions[0]))

    def _substitute(self, exc: Exception, loading: SampleCursor) -> Any:
        if self.on_error == "skip":
            return SKIP
        assert callable(self.on_error)
        loading.restart()  # a substitute's random numbers must not depend on where the sample failed
        sample = loading.sample()
        if loading.reseed is not None:
            loading.reseed(sample.epoch, sample.position)
        return self.on_error(exc, sample.index, sample.epoch, sample.position)

    def tell(self, epoch: int, *, inline: bool) -> None:
        self.told = None
        self.generators.refresh()
        with self.generators.kept(inline):
            self.generators.seed(epoch, NEW_EPOCH)
            self.told_parts.tell(epoch, inline=inline)
        self.generators.expire()
        self.told = epoch


_WATCHED = 8
"""Samples in the smallest batch that a worker watches for draws instead of seeding each sample. In the consumer's
thread, restoring the generators costs more than watching.
"""


_row = itemgetter(0)


def _same(one: Any) -> Any:
    return one


def _free_first(rows: Sequence[int], indices: list[Any], would_wait: Callable[[Any], bool]) -> Iterator[int]:
    """``rows``, first those whose samples another thread does not hold up."""
    left = [*rows]
    while left:
        yield left.pop(next((number for number, row in enumerate(left) if not would_wait(indices[row])), 0))


def _samples(samples: Any) -> Any:
    """The ``collate_fn`` of a `Part`: returns the samples as a list, because a tuple would pass for their columns."""
    if not are_samples(samples):
        raise TypeError(
            f"several workers load the samples of each batch, because the dataset has lanes, but its __getitems__ "
            f"returned a whole batch, a {type(samples).__name__}. Return a list of samples."
        )
    return samples if type(samples) is list else [*samples]


def _load_one(fetch: Fetch) -> Callable[[Any], Any]:
    def load(index: Any) -> Any:
        sample = fetch.load_many([index])[0]
        return sample if fetch.transform is None else fetch.transform(sample)

    return load
