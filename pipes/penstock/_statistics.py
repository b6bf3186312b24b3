"""Frozen objects that say what each part of a loader has done and how long it took, so that a slow or failing run
explains itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of something repeated.

    Percentiles are exact to an eighth of their value, the maximum to the nanosecond.

    Attributes:
        count: Number of measurements.
        total_s: Their sum.
        p50_s: The median.
        p95_s: The 95th percentile.
        max_s: The longest.
        slowest: What took longest: the index of the sample, or of the first sample of the batch; None if unknown.
        counts: Measurements in each bin, from short to long, with four bins per octave.
    """

    count: int = 0
    total_s: float = 0.0
    p50_s: float = 0.0
    p95_s: float = 0.0
    max_s: float = 0.0
    slowest: Any = None
    counts: tuple[int, ...] = field(default=(), repr=False)

    @property
    def mean_s(self) -> float:
        """The mean; 0 if nothing was measured."""
        return self.total_s / self.count if self.count else 0.0

    @classmethod
    def of(cls, counts: Sequence[int], total_s: float, max_s: float, slowest: Any = None) -> Durations:
        """The durations that these ``counts`` describe."""
        count = sum(counts)
        if not count:
            return cls()
        last = max(number for number, n in enumerate(counts) if n)
        p50, p95 = (min(max_s, _percentile(counts, count * share)) for share in (0.5, 0.95))
        return cls(count, total_s, p50, p95, max_s, slowest, tuple(counts[: last + 1]))

    def since(self, earlier: Durations) -> Durations:
        """The measurements after ``earlier``.

        Unless one of them is the longest so far, the maximum is exact to a quarter, and `slowest` unknown.
        """
        before = (*earlier.counts, *[0] * len(self.counts))
        counts = [n - m for n, m in zip(self.counts, before, strict=False)]
        if self.max_s > earlier.max_s:
            return self.of(counts, self.total_s - earlier.total_s, self.max_s, self.slowest)
        last = max((number for number, n in enumerate(counts) if n), default=0)
        return self.of(
            counts, self.total_s - earlier.total_s, min(self.max_s, (5 + last % 4) * 2.0 ** (last // 4 + 1) / 1e9)
        )


@final
@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """What ``num_workers="auto"`` has chosen so far.

    Attributes:
        workers: Workers that run or are being started.
        most: Upper limit, from cores and memory; 0 before the first measurement.
        changes: How often the number has changed.
        settled: Whether the search has ended. It restarts if the loop or the data behave differently for a while.
        why: The reason for the last change, or for keeping the number.
    """

    workers: int
    most: int
    changes: int
    settled: bool
    why: str


@final
@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """What the workers of a `ParallelMapper` have done.

    Attributes:
        method: Where they run; ``"inline"`` means that the thread that reads the node does the work.
        workers: Live threads or processes.
        busy: Workers that have a task now.
        busy_share: The share of their time spent on tasks, from 0 to 1.
        wait_s: Seconds that the node has waited for workers.
        waiting: Tasks not yet given to a worker.
        tasks: Tasks finished.
        restarts: Worker processes that died and were replaced.
        stuck: Threads still in a task that exceeded ``timeout``.
        slots: Shared-memory slots of live workers that hold a result or are free for one.
        slot_bytes: Total size of these slots.
        choice: With ``num_workers="auto"``, its choice so far.
        draws: With threads, the warning about code that draws from the global generators, once issued.
    """

    method: Literal["inline", "thread", "process", "ray"]
    workers: int = 0
    busy: int = 0
    busy_share: float = 0.0
    wait_s: float = 0.0
    waiting: int = 0
    tasks: int = 0
    restarts: int = 0
    stuck: int = 0
    slots: int = 0
    slot_bytes: int = 0
    choice: WorkerChoice | None = None
    draws: str | None = None


@final
@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """What all processes of this host have done with the copies of a dataset's files (``cache_dir=``) since the dataset
    was built.

    Attributes:
        hits: Files opened from an existing copy, including copies fetched ahead.
        fetches: Copies made.
        fetched_bytes: Their size.
        misses: Files read remotely because there was no room for a copy.
        wait_s: Total seconds that readers have waited for a copy.
    """

    hits: int
    fetches: int
    fetched_bytes: int
    misses: int
    wait_s: float


@final
@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """What one node of the graph has done.

    A node without its own thread works only when the node downstream requests an item, so most of its time is
    ``consumer_wait_s``. The time of a node that overrides ``next`` counts as its source's.

    Attributes:
        name: The node's class.
        items: Items delivered downstream, not counting markers.
        items_per_s: Items per second since the node began.
        source_wait_s: Seconds spent waiting for its source, including the source's work if that has no thread.
        consumer_wait_s: Seconds spent waiting for a request. With workers or its own thread: seconds in which
            everything that it may read ahead was ready.
        work_s: Seconds of work, over all its workers.
        ready: Items ready now.
        ready_mean: Items ready when one was requested, on average.
        depth: The most items that it reads ahead; 0 if it does not read ahead.
        errors: Errors that it has raised, or that ``on_error`` has handled.
        workers: Its workers, if it is a `ParallelMapper`.
        failures: What ``on_error`` has handled, if set.
        pinned: What a `PinMemory` has done.
    """

    name: str
    items: int = 0
    items_per_s: float = 0.0
    source_wait_s: float = 0.0
    consumer_wait_s: float = 0.0
    work_s: float = 0.0
    ready: int = 0
    ready_mean: float = 0.0
    depth: int = 0
    errors: int = 0
    workers: WorkerStatistics | None = None
    failures: FailureStatistics | None = None
    pinned: PinStatistics | None = None

    def since(self, earlier: NodeStatistics, elapsed_s: float) -> NodeStatistics:
        """What the node has done in the ``elapsed_s`` after ``earlier``. `failures` and `pinned` keep their totals."""
        items, workers = self.items - earlier.items, self.workers
        work_s = self.work_s - earlier.work_s
        if workers is not None and earlier.workers is not None:
            available_s = max(1, workers.workers) * elapsed_s
            share = min(1.0, work_s / available_s) if available_s else 0.0
            workers = dataclasses.replace(
                workers, busy_share=share, **_less(workers, earlier.workers, "wait_s", "tasks", "restarts")
            )
        return dataclasses.replace(
            self,
            **_less(self, earlier, "items", "source_wait_s", "consumer_wait_s", "work_s", "errors"),
            items_per_s=items / elapsed_s if elapsed_s else 0.0,
            ready_mean=max(0.0, self.ready_mean * self.items - earlier.ready_mean * earlier.items) / items
            if items
            else 0.0,
            workers=workers,
        )


@final
@dataclass(frozen=True, slots=True)
class LoaderStatistics:
    """Where a loader's time went, from its first batch until now.

    ``load``, ``transform`` and ``collate`` are measured where the work is done, except in each worker's first batch,
    which opens files and imports modules. If samples take less than 100 µs, some batches are not measured: the shorter
    the samples, the more, up to 255 of 256.

    Attributes:
        nodes: One for each node, from the source to the root.
        batches: Batches delivered.
        samples: Samples in them, as far as known.
        epochs: Epochs whose end was reached.
        elapsed_s: Seconds since the first batch was requested.
        samples_per_s: Samples delivered per second, not counting the wait for the first batch.
        stall_share: The share of its time that the loop waited for batches, from 0 to 1; the rest is training steps.
            The wait for the very first batch and the loop's work between epochs do not count.
        first_wait_s: The wait for the very first batch, while workers start.
        waits: Waits for batches, except the first of an epoch.
        epoch_start_waits: Waits for the first batch of an epoch, except the very first.
        steps: The loop's work between two batches of an epoch.
        load: Per sample: ``__getitem__``, or the sample's share of ``__getitems__``. For a mapped function, each call.
        transform: Per sample: ``transform``.
        collate: Per batch: building it from its samples.
        pack: Per batch: moving it out of the worker process, measured there.
        transfer: Per batch: receiving it from the worker process, measured here.
        to_device: Per batch: pinning it, or starting its copy to the device.
        load_cpu_share: The share of ``load`` and ``transform`` in which the worker computed or waited for a free core,
            from 0 to 1. In the rest it waited for a disk, a network or a lock. None if the platform does not report it.
        lock_wait_share: How often a worker thread that wanted Python's lock found it taken, from 0 to 1; None without
            threads.
        copies: Use of the copies of the dataset's files; None if none are kept.
    """

    nodes: tuple[NodeStatistics, ...] = ()
    batches: int = 0
    samples: int = 0
    epochs: int = 0
    elapsed_s: float = 0.0
    samples_per_s: float = field(init=False, default=0.0)
    stall_share: float = field(init=False, default=0.0)
    first_wait_s: float = 0.0
    waits: Durations = Durations()
    epoch_start_waits: Durations = Durations()
    steps: Durations = Durations()
    load: Durations = Durations()
    transform: Durations = Durations()
    collate: Durations = Durations()
    pack: Durations = Durations()
    transfer: Durations = Durations()
    to_device: Durations = Durations()
    load_cpu_share: float | None = None
    lock_wait_share: float | None = None
    copies: CopyStatistics | None = None

    def __post_init__(self) -> None:
        wait_s = self.waits.total_s + self.epoch_start_waits.total_s
        stall_share = wait_s / (wait_s + self.steps.total_s) if wait_s else 0.0
        in_loop_s = self.elapsed_s - self.first_wait_s
        samples = self.samples * (1 - 1 / self.batches) if self.first_wait_s and self.batches else self.samples
        object.__setattr__(self, "stall_share", stall_share)
        object.__setattr__(self, "samples_per_s", samples / in_loop_s if in_loop_s else 0.0)

    def since(self, earlier: LoaderStatistics) -> LoaderStatistics:
        """What the same loader has done after ``earlier``, for example in the last minute.

        ``load_cpu_share`` and ``lock_wait_share`` are sampled too rarely for that, and keep the values of the whole
        run.
        """
        elapsed_s = self.elapsed_s - earlier.elapsed_s
        durations = [one.name for one in dataclasses.fields(self) if isinstance(one.default, Durations)]
        copies = self.copies
        if copies is not None and earlier.copies is not None:
            copies = CopyStatistics(**_less(copies, earlier.copies, *(one.name for one in dataclasses.fields(copies))))
        return dataclasses.replace(
            self,
            **_less(self, earlier, *durations, "batches", "samples", "epochs", "elapsed_s", "first_wait_s"),
            copies=copies,
            nodes=tuple(node.since(before, elapsed_s) for node, before in zip(self.nodes, earlier.nodes, strict=True)),
        )


@final
@dataclass(frozen=True, slots=True)
class FailureStatistics:
    """What ``on_error`` has handled, counted over the batches delivered so far.

    Attributes:
        samples: Samples requested.
        failed: Samples that raised.
        skipped: Failed samples that were left out; the others were replaced by a substitute.
        last: A description of the last failed sample; empty if there is none.
    """

    samples: int
    failed: int
    skipped: int
    last: str


@final
@dataclass(frozen=True, slots=True)
class PinStatistics:
    """What a `PinMemory` has done.

    Attributes:
        pinned: Batches copied to pinned memory.
        already: Batches that were pinned already or held nothing to pin.
    """

    pinned: int
    already: int


@final
@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """What the reader thread ``name`` has done.

    Attributes:
        name: The thread's name.
        depth: The most items it keeps ready.
        ready: Items ready now.
        items: Items read.
        wait_s: Total seconds that the consumer has waited.
        read_s: Total seconds that the thread has read its source.
        convert: Converting each item afterwards.
        ready_mean: Items ready when the consumer requested one, on average.
    """

    name: str
    depth: int
    ready: int = 0
    items: int = 0
    wait_s: float = 0.0
    read_s: float = 0.0
    convert: Durations = Durations()
    ready_mean: float = 0.0


def _less(later: Any, earlier: Any, *names: str) -> dict[str, Any]:
    """The increase of these fields between the two."""
    pairs = ((name, getattr(later, name), getattr(earlier, name)) for name in names)
    return {
        name: one.since(before) if isinstance(one, Durations) else max(0, one - before) for name, one, before in pairs
    }


def _percentile(counts: Sequence[int], rank: float) -> float:
    """The middle of the class that has the ``rank``-th shortest duration."""
    number = 0
    for number, n in enumerate(counts):  # noqa: B007  # used after the loop
        rank -= n
        if rank <= 0:
            break
    return (4.5 + number % 4) * 2.0 ** (number // 4 + 1) / 1e9


for _kind in (
    CopyStatistics,
    Durations,
    FailureStatistics,
    LoaderStatistics,
    NodeStatistics,
    PinStatistics,
    WorkerChoice,
    WorkerStatistics,
):
    _kind.__module__ = "penstock.statistics"  # not in the class: a dataclass looks for its module while it is made
