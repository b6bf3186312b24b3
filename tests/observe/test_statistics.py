"""``loader.statistics()``: what it counts, where, and that it keeps nothing alive and is no part of the state."""

from __future__ import annotations

import gc
import random
import signal
import time
import weakref
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Loader
from penstock._workers.meter import Histogram, Meter, active_ns
from penstock.nodes import Mapper, Sampler
from penstock.orders import SequentialOrder
from penstock.statistics import Durations, LoaderStatistics

SLOW_S = 1.0  # longer than a busy machine holds up any other sample
METHODS: list[dict[str, Any]] = [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 2, "method": "process"}]
methods = pytest.mark.parametrize("workers", METHODS, ids=["inline", "threads", "processes"])


class Samples:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        time.sleep(SLOW_S if index == 37 and penstock.sample().epoch == 0 else 0.0005)
        return index


@methods
def test_it_counts_what_was_done(workers: dict[str, Any]) -> None:
    """Seen to fail: the batches of the first epoch only; the worker's meter not shared."""
    with Loader.from_dataset(Samples(), batch_size=4, **workers) as loader:
        for _ in range(3):
            assert len(list(loader)) == 16
    found = loader.statistics()
    assert isinstance(found, LoaderStatistics)
    assert (found.batches, found.samples, found.epochs) == (48, 192, 3)
    assert (found.waits.count, found.epoch_start_waits.count, found.steps.count) == (45, 2, 48)
    assert [node.name for node in found.nodes] == ["Sampler", "Cycler", "Sharder", "Batcher", "ParallelMapper"]
    mapper = found.nodes[-1]
    assert (mapper.items, mapper.errors) == (48, 0)
    assert found.nodes[0].items >= 192
    assert mapper.workers is not None
    assert mapper.workers.method == workers.get("method", "inline")
    assert 0 < mapper.workers.busy_share <= 1
    assert found.load.count > 100
    assert found.load.p50_s >= 0.0005
    assert found.load.max_s >= SLOW_S
    assert found.load.slowest == 37
    assert found.load.p50_s <= found.load.p95_s <= found.load.max_s <= found.load.total_s
    assert found.collate.count > 30
    assert (found.transfer.count > 0) == (workers.get("method") == "process")
    assert 0 < found.stall_share <= 1


def test_restarts_keep_what_the_dead_have_counted() -> None:
    """Seen to fail: a removed worker's meter forgotten."""
    with Loader.from_dataset(Samples(), batch_size=4, num_workers=1) as loader:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        before = loader.statistics().load.count
        loader.refresh()
        next(batches)
        assert loader.statistics().load.count >= before > 0


def test_it_keeps_no_batch_and_no_sample() -> None:
    """Seen to fail: the slowest sample kept instead of its index."""

    class Kept:
        pass

    class Objects:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Kept:
            time.sleep(0.0002)
            return Kept()

    loader = Loader.from_dataset(Objects(), batch_size=2, collate_fn=list)
    seen = [weakref.ref(sample) for batch in loader for sample in batch]
    loader.statistics()
    gc.collect()
    assert [ref() for ref in seen[:-2]] == [None] * 6


def test_the_time_of_a_users_node_is_its_own() -> None:
    """Seen to fail: nodes inside a read not watched."""

    def slow(index: int) -> int:
        time.sleep(0.001)
        return index

    loader = Loader(Mapper(Sampler(SequentialOrder(50)), slow))
    list(loader)
    sampler, mapper, cycler = loader.statistics().nodes
    assert (sampler.name, mapper.name, cycler.name) == ("Sampler", "Mapper", "Cycler")
    assert mapper.work_s > 0.04
    assert sampler.work_s < mapper.work_s / 5
    assert cycler.source_wait_s >= mapper.work_s


def test_a_histogram_is_exact_to_an_eighth() -> None:
    """One at a time and many at once. Seen to fail: the classes of an octave counted from its end."""
    draw = random.Random(0)
    lengths = [draw.randrange(8, 10 ** draw.randrange(1, 12)) for _ in range(2000)]
    one, many = Histogram(), Histogram()
    for ns in lengths:
        one.add(ns)
    many.add_many(np.array(lengths))
    assert one.words == many.words
    found = one.durations()
    ordered = sorted(lengths)
    assert found.p50_s == pytest.approx(ordered[999] / 1e9, rel=0.13)
    assert found.p95_s == pytest.approx(ordered[1899] / 1e9, rel=0.13)
    assert (found.count, found.max_s, found.total_s) == (2000, max(lengths) / 1e9, pytest.approx(sum(lengths) / 1e9))
    assert Histogram().durations() == Durations()


def test_short_samples_are_measured_less_often() -> None:
    meter = Meter()
    for ns, plain in [(1000, 100), (1_000_000, 0)]:
        meter.plain = 0
        meter.measure([0])
        meter.load.add(ns, 10)
        meter.measured(10, str)
        assert meter.plain == plain


@methods
def test_what_came_since_earlier_statistics(workers: dict[str, Any]) -> None:
    """Seen to fail: the earlier counts not taken away, and the longest of all time taken for that of the interval."""
    with Loader.from_dataset(Samples(), batch_size=4, **workers) as loader:
        list(loader)
        earlier = loader.statistics()
        list(loader)
        later = loader.statistics()
    found = later.since(earlier)
    assert (found.batches, found.samples, found.epochs) == (16, 64, 1)
    assert (found.waits.count, found.epoch_start_waits.count, found.steps.count) == (15, 1, 16)
    assert found.first_wait_s == 0
    assert found.elapsed_s == pytest.approx(later.elapsed_s - earlier.elapsed_s)
    assert found.nodes[-1].items == 16
    assert 0 < found.load.count < later.load.count
    nothing = later.since(later)
    assert (nothing.batches, nothing.samples_per_s, nothing.stall_share, nothing.waits, nothing.load) == (
        0,
        0.0,
        0.0,
        Durations(),
        Durations(),
    )


def test_durations_since_earlier_ones() -> None:
    """Seen to fail: the slowest sample of long ago named again."""
    histogram = Histogram()
    histogram.add(80_000_000)
    histogram.add(1_000_000, 5)
    earlier = histogram.durations("old")
    histogram.add(2_000_000, 3)
    later = histogram.durations("old").since(earlier)
    assert (later.count, later.total_s, later.slowest) == (3, pytest.approx(0.006), None)
    assert 0.002 <= later.max_s <= 0.0025
    assert later.p50_s == pytest.approx(0.002, rel=1 / 8)
    histogram.add(90_000_000)
    longest = histogram.durations("new").since(earlier)
    assert (longest.count, longest.max_s, longest.slowest) == (4, 0.09, "new")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers on this platform")
def test_an_interrupt_in_a_look_at_the_processor_stays_an_interrupt() -> None:
    """Seen to fail: one of 14 was a SystemError of NumPy's, so that Ctrl-C was an error of the sample."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    interrupts = 0
    try:
        while interrupts < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + interrupts % 10 * 1e-5)
                while True:
                    active_ns()
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.signal(signal.SIGALRM, before)
