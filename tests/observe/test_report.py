"""``loader.report()`` names what holds a loop up, and the remedy.

On every change of figures that are given; in the soak of ten situations that are built and measured. These differ by
factors of 5 or more, and a ``sleep`` in there is work: it stands for a disk, a device, or a training step.
"""

from __future__ import annotations

import logging
import pickle
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import IterableDataset

from penstock import Loader
from penstock._nodes.reader_node import ReaderNode
from penstock._observe.report import Names, report
from penstock._statistics import Durations, LoaderStatistics, NodeStatistics, WorkerChoice, WorkerStatistics
from penstock._workers.meter import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator


def compute(seconds: float) -> None:
    """Keep a core, and Python's lock, for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Samples:
    """``n`` samples; ``load`` is what one costs."""

    def __init__(self, n: int = 64, load: Any = None) -> None:
        self.n, self.load = n, load

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if self.load is not None:
            self.load(index)
        return index


def computes(_: Any) -> None:
    compute(0.005)


def reads(_: Any) -> None:
    time.sleep(0.02)


def straggles(index: int) -> None:
    time.sleep(0.5 if index == 37 else 0.002)


def copies(sample: int) -> int:
    compute(0.01)
    return sample


def collates(samples: list[int]) -> Any:
    compute(0.08)
    return torch.tensor(samples)


class Slow(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for k in range(64):
            time.sleep(0.01)
            yield k


class SlowSampler(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        for k in range(48):
            time.sleep(0.01)
            yield k

    def __len__(self) -> int:
        return 48


NAMES = Names("Mine.__getitem__", "transform", "collates", "MySampler (Sampler)")


def took(*each_ms: float, times: int = 50, slowest: Any = None) -> Durations:
    """What took so long, each ``times`` times."""
    histogram = Histogram()
    for ms in each_ms:
        for _ in range(times if ms == each_ms[0] else 1):
            histogram.add(int(ms * 1e6))
    return histogram.durations(slowest)


def of(
    workers: WorkerStatistics, *others: NodeStatistics, source_wait_s: float = 0.0, depth: int = 4, **more: Any
) -> LoaderStatistics:
    """Of 50 batches of 4 samples that the loop did little with: `more` says what else took its time."""
    mapper = NodeStatistics("ParallelMapper", workers=workers, source_wait_s=source_wait_s, depth=depth)
    figures = {"waits": took(20), "steps": took(0.1), "load": took(1, times=200), "collate": took(0.1), **more}
    return LoaderStatistics((NodeStatistics("Sampler", work_s=source_wait_s), mapper, *others), 50, 200, **figures)


INLINE, THREADS, PROCESSES = (
    WorkerStatistics("inline", wait_s=1),
    *[WorkerStatistics(kind, 1, 1, 0.9, wait_s=1) for kind in ("thread", "process")],
)


@pytest.mark.parametrize(
    ("statistics", "says"),
    [
        (of(THREADS, source_wait_s=2), "are spent reading MySampler (Sampler) one item at a time"),
        (
            of(INLINE, transform=took(9, times=200)),
            "there are no workers: 9 ms of 10 ms a sample are in transform: num_workers=2 or more",
        ),
        (
            of(PROCESSES, transform=took(9, times=200)),
            "the one worker is 90% busy: 9 ms of 10 ms a sample are in transform: more workers",
        ),
        (of(PROCESSES, collate=took(80)), "20 ms of 21 ms a sample are in collates: more workers"),
        (
            of(THREADS, load=took(9, times=200), lock_wait_share=0.7),
            "Python's lock was taken 70% of the times that Mine.__getitem__ wanted it: use method='process'",
        ),
        (
            of(THREADS, load=took(9, times=200), load_cpu_share=0.2),
            "in Mine.__getitem__, which waits 80% of that for a disk or a network",
        ),
        (
            of(PROCESSES, load=took(9, times=200), load_cpu_share=0.9),
            "9 ms of 9.03 ms a sample are in Mine.__getitem__: more workers",
        ),
        (
            of(PROCESSES, load=took(0.01, *[100] * 20, times=180)),
            "10 ms of 10 ms a sample are in Mine.__getitem__: more workers",
        ),  # in bursts
        (of(PROCESSES, load=took(0.01, times=200)), "as much: use num_workers=0, or larger batches."),
        (
            of(PROCESSES, load=took(2, 50, times=200, slowest=37), waits=took(0.1, 50)),
            "a few slow samples: index 37 took 50 ms in Mine.__getitem__",
        ),
        (
            of(PROCESSES, load=took(2, 6, times=200, slowest=37), waits=took(0.1, 6)),
            "a sample are in Mine.__getitem__: more workers",
        ),
        (of(THREADS, load=took(9, times=200), lock_wait_share=0.2), "a sample are in Mine.__getitem__: more workers"),
        (
            of(PROCESSES, transfer=took(15)),
            "15 ms per batch are spent rebuilding it from the worker process: return tensors",
        ),
        (
            of(replace(PROCESSES, busy_share=0.4)),
            (
                "only 40% busy: too little is loaded ahead for steps or samples that vary this much. Use a larger "
                "prefetch_factor"
            ),
        ),
        (
            of(THREADS, NodeStatistics("ToDevice", work_s=2), to_device=took(30)),
            "30 ms per batch are spent in ToDevice, copying to the device: copy less",
        ),
        (of(INLINE, load=took(0.01, times=200)), "speed up: larger batches, or Mine.__getitems__."),
        (of(replace(PROCESSES, workers=999), depth=9999), "cheaper work there, because"),
        (
            of(replace(PROCESSES, choice=WorkerChoice(1, 2, 1, True, "no gain"))),
            "num_workers='auto' adds no workers: no gain",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_the_verdict_over_such_figures(statistics: LoaderStatistics, says: str) -> None:
    """Seen to fail: each of the bounds and shares of the module a tenth or ten times as large."""
    first = report(statistics, NAMES).partition("\n")[0]
    assert first.startswith("data: the training step waited ")
    assert says in first


def test_the_verdict_over_a_slow_step() -> None:
    first = report(of(replace(THREADS, busy_share=0.1), waits=took(2), steps=took(40)), NAMES).partition("\n")[0]
    assert first.startswith(
        "training step: the loop waited 5% of the time for data, and a step takes 37.7 ms: make the step faster."
    )
    assert first.endswith("The workers are 10% busy: fewer are enough.")


# The same, measured.


class ToDevice(ReaderNode[Any]):
    """A device that every machine has: the copy takes its time, in the thread of the real node."""

    def __init__(self, source: Any) -> None:
        super().__init__(source, 2, "penstock-device")

    def _converter(self) -> Any:
        return _copied


def _copied(item: Any) -> Any:
    time.sleep(0.03)
    return item


def over(dataset: Any = None, batch_size: int = 4, **words: Any) -> Loader[Any]:
    return Loader.from_dataset(Samples() if dataset is None else dataset, batch_size, **words)


def verdict(loader: Loader[Any], step_s: float = 0.0) -> str:
    with loader:
        for _ in loader:
            if step_s:  # a sleep of 0 would leave the core to the workers
                time.sleep(step_s)
        return loader.report().partition("\n")[0]


THREAD: dict[str, Any] = {"num_workers": 1, "method": "thread"}
TWO: dict[str, Any] = {"num_workers": 2, "method": "thread"}
SITUATIONS: dict[str, tuple[Any, float, list[str]]] = {
    # it has no __getitem__
    "a slow iterable": (lambda: over(Slow(), **TWO), 0, ["reading Slow", "its work into transform, which"]),
    "a slow sampler": (lambda: over(sampler=SlowSampler(), plan_ahead=False, **TWO), 0, ["reading SlowSampler"]),
    "a slow transform, inline": (
        lambda: over(transform=copies),
        0,
        ["a sample are in copies: ", "num_workers=2 or more"],
    ),
    "a slow transform": (lambda: over(transform=copies, num_workers=1), 0, ["a sample are in copies: ", "worker"]),
    "a slow collate_fn, inline": (lambda: over(collate_fn=collates), 0, ["a sample are in collates"]),
    "a slow collate_fn": (lambda: over(collate_fn=collates, num_workers=1), 0, ["a sample are in collates"]),
    "a fight for the lock": (
        lambda: over(Samples(192, computes), num_workers=4, method="thread"),
        0,
        ["method='process'"],
    ),
    "tiny work, threads": (lambda: over(Samples(12_000), 16, **TWO), 0, ["num_workers=0"]),
    "tiny work, processes": (lambda: over(Samples(12_000), 16, num_workers=2), 0, ["num_workers=0"]),
    "a slow disk, threads": (lambda: over(Samples(64, reads), **TWO), 0, ["Samples.__getitem__, which waits", "disk"]),
    "a slow disk, processes": (
        lambda: over(Samples(64, reads), num_workers=2),
        0,
        ["Samples.__getitem__, which waits", "disk"],
    ),
    "slow computing": (lambda: over(Samples(96, computes), num_workers=2), 0, ["a sample are in Samples.__getitem__"]),
    "a straggler, thread": (lambda: over(Samples(64, straggles), **THREAD), 0.02, ["index 37 took"]),
    "a straggler, process": (lambda: over(Samples(64, straggles), num_workers=1), 0.02, ["index 37 took"]),
    "a slow copy to the device": (
        lambda: Loader(ToDevice(over(None, 2, **THREAD).root)),
        0,
        ["in ToDevice, copying to the device"],
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", SITUATIONS)
def test_what_is_slow_is_named(name: str) -> None:
    build, step_s, says = SITUATIONS[name]
    first = verdict(build(), step_s)
    assert first.startswith("data:")
    assert [words for words in says if words not in first] == [], first
    assert ("disk" in first) == ("disk" in name)


@pytest.mark.soak
def test_a_slow_training_step_is_named() -> None:
    first = verdict(over(**THREAD), 0.04)
    assert first.startswith("training step:")
    assert "__getitem__" not in first
    assert "fewer are enough" in first


def test_before_the_first_batch_there_is_nothing_to_say() -> None:
    loader = Loader.from_dataset(Samples(), batch_size=4)
    assert loader.report().startswith("data: there is nothing to report")
    assert loader.statistics() == pickle.loads(pickle.dumps(loader)).statistics()


def test_a_report_is_logged_every_so_often(caplog: pytest.LogCaptureFixture) -> None:
    """Seen to fail: the time of the next report not moved on, so that each batch made one."""
    loader = Loader.from_dataset(Samples(64), batch_size=1)
    loader.report_every(0.02)
    began = time.perf_counter()
    with caplog.at_level(logging.INFO, "penstock"), loader:
        for _ in loader:
            time.sleep(0.002)
    took_s = time.perf_counter() - began
    lines = [record.message for record in caplog.records if record.message.startswith(("training step: ", "data: "))]
    assert 1 <= len(lines) <= took_s / 0.02 + 1
    with pytest.raises(ValueError, match="every_s"):
        loader.report_every(-1)


class Unnamed:
    """A transform that answers no question."""

    def __call__(self, sample: int) -> int:
        return sample

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


def test_objects_that_answer_nothing_end_neither_the_report_nor_the_loop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: __qualname__ asked for without a net; a report that fails took a batch of the training with it."""
    with (
        Loader.from_dataset(Samples(64), batch_size=1, transform=Unnamed()) as loader,
        caplog.at_level(logging.INFO, "penstock"),
    ):
        loader.report_every(1e-6)
        assert [int(batch) for batch in loader] == list(range(64))
        assert loader.report().startswith(("data: ", "training step: "))
        monkeypatch.setattr(Names, "of", lambda root: Unnamed().names)
        assert [int(batch) for batch in loader] == list(range(64))
    assert {record.message for record in caplog.records if record.levelname == "WARNING"} == {"the report failed"}


def test_stages_of_one_name_are_told_apart() -> None:
    """Seen to fail: stages kept in a dict by name, so that the collate_fn, a lambda, hid the transform, another one."""
    with Loader.from_dataset(
        Samples(64),
        batch_size=4,
        transform=lambda sample: (reads(sample), sample)[1],
        collate_fn=lambda samples: samples,
    ) as loader:
        seconds = float(verdict(loader).partition("workers: ")[2].split(" ms")[0])
    assert seconds >= 15


def test_an_index_with_a_line_break_stays_on_its_line() -> None:
    """Seen to fail: it was printed as it is."""
    data = {f"a\n{k}": k for k in range(64)}
    with Loader.from_dataset(data, 8, sampler=list(data)) as loader:
        for _ in loader:
            pass
        assert all(
            line.split(":")[0] in ("data", "batches", "waits", "steps", "load", "collate")
            for line in loader.report().splitlines()
        )
