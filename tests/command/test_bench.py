"""``python -m penstock bench``: loaders that are slow in a known way are measured; what cannot be measured is refused in words."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resumable import Resumable
from torch.utils.data import DataLoader

import penstock
from penstock.__main__ import main
from penstock._command.bench import Measured, Reader, rows_of, text_of, verdict
from penstock._command.compare import Candidate, recommended
from penstock._command.compare import text_of as comparison
from penstock._command.memory import memory_of_processes
from penstock._command.target import TargetError, with_workers
from penstock._statistics import Durations, LoaderStatistics

names = map("bench_target_{}".format, itertools.count())

SOURCE = """
import time
import numpy as np
from torch.utils.data import DataLoader
import penstock

class Slow:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.002)
        return {"x": np.full(4, index, np.float32)}

def ours():
    return penstock.Loader.from_dataset(Slow(), 8, True)

def threads():
    return penstock.Loader.from_dataset(Slow(), 8, True, num_workers=2, method="thread")

def torchs():
    return DataLoader(Slow(), 8, True, num_workers=2)

def dataset():
    return Slow()

def generator():
    return ([1, 2, 3] for _ in range(40))

def nothing():
    return []

def fails():
    raise RuntimeError("no disk")

class Space:
    some = [[1, 2], [3, 4]]

number = 5
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file, under a name of its own; the path of imports is put back."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    file = tmp_path / f"{next(names)}.py"
    file.write_text(textwrap.dedent(SOURCE))
    return file


def bench(target: str, *words: str) -> int:
    return main(["bench", target, "--seconds", "0.2", *words])


class Paced:
    """Two epochs of batches, each of which takes a while; the first of an epoch takes longer."""

    def __init__(self, wait_s: float, first_s: float, batches: int = 4) -> None:
        self.wait_s, self.first_s, self.batches = wait_s, first_s, batches

    def __iter__(self):
        time.sleep(self.first_s)
        for _ in range(self.batches):
            time.sleep(self.wait_s)
            yield torch.zeros(5, 2)


def test_waits_steps_and_boundaries_are_told_apart() -> None:
    """Seen to fail: the step counted as a wait; the boundary noted one batch late."""
    reader = Reader(Paced(0.002, 0.03))
    assert reader.first_s >= 0.03
    loop = reader.run(1.0, 0.004)
    reader.close()
    starts = loop.epoch_start_waits.count
    assert loop.samples == 5 * loop.batches
    assert loop.steps.total_s >= 0.004 * loop.steps.count
    assert loop.waits.total_s >= 0.002 * loop.waits.count
    assert starts
    assert loop.epochs in (starts, starts + 1)  # the very first wait is told apart, and may be at an epoch's start
    assert loop.epoch_start_waits.total_s >= 0.032 * starts
    assert loop.waits.count + starts == loop.steps.count == loop.batches - 1
    assert 3 * (loop.epochs - 1) <= loop.waits.count <= 3 * (loop.epochs + 1)
    waited_s = loop.waits.total_s + loop.epoch_start_waits.total_s
    assert loop.stall_share == pytest.approx(waited_s / (waited_s + loop.steps.total_s))


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(8, 3), 8),
        (np.zeros(8), 8),
        ({"x": torch.zeros(8, 3), "y": torch.zeros(8)}, 8),
        ([torch.zeros(8, 3), torch.zeros(8)], 8),
        ((torch.zeros(8, 3), ["a"] * 8), 8),
        ([torch.zeros(3), torch.zeros(4), torch.zeros(5)], 3),
        ({"text": ["a"] * 8}, 8),
        (["a"] * 8, 8),
        ({"a": {"x": torch.zeros(8)}}, 8),
        (torch.tensor(3.0), 1),
        ("text", 1),
        (5, 1),
        ([], 1),
    ],
)
def test_samples_of_a_batch_are_counted(batch: Any, rows: int) -> None:
    assert rows_of(batch) == rows


def loop_of(wait: float, step: float) -> LoaderStatistics:
    waits, steps = (Durations(10, 10 * one, one, one, one) for one in (wait, step))
    return LoaderStatistics(batches=11, samples=88, elapsed_s=10 * (wait + step) + 0.1, first_wait_s=0.1, waits=waits, steps=steps)


def measured(wait: float, step: float, *, report: str = "") -> Measured:
    stepped = loop_of(wait, step) if step else None
    return Measured("X", 0.1, 0.2, loop_of(wait + step, 0.0), stepped, step, (10**9, 3), 10**8, False, report)


def test_headspace_is_how_much_faster_the_loop_would_be_without_waits() -> None:
    """Seen to fail: the stall divided by the headspace's share."""
    text = text_of(measured(0.03, 0.01))
    assert re.search(r"stall +75% of the time", text)
    assert re.search(r"headspace +4.00 x", text)
    assert re.search(r"speed +25.0 steps/s; if data were free, 100.0", text)
    assert re.search(r"memory +1,000 MB in 3 processes, 100 MB of it before", text)


def test_the_verdict_says_who_waits() -> None:
    assert verdict(measured(0.03, 0.01)).startswith("data: the training step waits 75% of the time.")
    assert verdict(measured(0.0001, 0.01)).startswith("training step: ")
    assert verdict(measured(0.03, 0.0)).startswith("It keeps up with training steps of 30 ms or longer.")
    assert verdict(measured(0.03, 0.01, report="data: says the loader")) == "data: says the loader"


@pytest.mark.parametrize(
    ("factory", "kind"),
    [("ours", "penstock.Loader of Slow"), ("dataset", "penstock.Loader of Slow"), ("generator", "generator"), ("Space.some", "list")],
)
def test_any_iterable_is_measured(factory: str, kind: str, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a dataset, in batches. Seen to fail: "a Slow, which cannot be iterated"."""
    assert bench(f"{target}:{factory}", "--step-ms", "1") == 0
    out = capsys.readouterr().out
    assert out.startswith(kind)
    for line in ("built in", "first batch", "throughput", "epoch boundary", "stall", "headspace"):
        assert f"\n{line} " in out
    assert f"\n{'data' if factory in ('ours', 'dataset') else 'training step'}:" in out
    assert factory != "dataset" or "batches/s of 32 " in out


def test_what_cannot_be_measured_is_refused(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in [
        ("nothing", "yields nothing"),
        ("number", "returned an object of type int, which is not iterable"),
        ("nowhere", "has no 'nowhere'"),
        ("Space.nowhere", "has no 'Space.nowhere'"),
    ]:
        assert bench(f"{target}:{name}") == 2
        assert message in capsys.readouterr().err
    for text, message in [("x", "must be module:factory"), ("no.such.module:f", "no module"), ("no/file.py:f", "there is no file")]:
        assert bench(text) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="no disk"):
        bench(f"{target}:fails")


def test_a_file_that_workers_could_not_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Seen to fail: the module of that name measured instead."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "random.py").write_text("loader = [1]")
    assert bench(f"{tmp_path / 'random.py'}:loader") == 2
    assert "Rename it" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell")
def test_memory_is_that_of_all_processes() -> None:
    before = memory_of_processes()
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; x = b'1' * 50_000_000; print(flush=True); sys.stdin.read()"], stdin=-1, stdout=-1
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        after = memory_of_processes()
    finally:
        child.communicate()
    assert before is not None
    assert after is not None
    assert after[1] == before[1] + 1
    assert after[0] - before[0] > 40_000_000


def candidate(method: str, *rates: float, error: str = "") -> Candidate:
    return Candidate(method, 2, method, error, 0.1, list(rates), [0.5] * len(rates), 10**8)


def test_the_simplest_of_the_fastest_is_recommended() -> None:
    """Seen to fail: the fastest, by whatever little."""
    inline, thread, process = candidate("inline", 100), candidate("thread", 98, 300, 97), candidate("process", 102, 101, 103)
    assert recommended([inline, thread, process]) is inline
    assert recommended([candidate("inline", 50), thread, process]) is thread
    assert recommended([candidate("inline", 50), candidate("thread", 60), process]) is process
    assert recommended([candidate("given", 500), inline]) is inline
    assert recommended([candidate("inline", error="RuntimeError: x")]) is None
    text = comparison([candidate("given", 50), inline, candidate("thread", error="RuntimeError: x")], 0.0)
    assert text.endswith("Use penstock with num_workers=0.\nIt is 2.00 times as fast as given.")
    assert "RuntimeError: x" in text
    assert "Nothing could be measured." in comparison([candidate("inline", error="x")], 0.1)


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "bench", *words], cwd=cwd, capture_output=True, text=True, check=False, timeout=400
    )


@pytest.mark.soak
def test_a_module_whose_classes_worker_processes_must_find_is_measured(target: Path) -> None:
    target.write_text(target.read_text().replace('num_workers=2, method="thread"', 'num_workers=1, multiprocessing_context="spawn"'))
    ended = run(f"{target.stem}:threads", "--seconds", "0.3", "--step-ms", "1", cwd=target.parent)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("penstock.Loader of Slow, 1 worker process")


@pytest.mark.soak
def test_candidates_are_compared(target: Path) -> None:
    """One of them is refused, and what the user's code prints does not get between the answers."""
    target.write_text(f"{target.read_text()}\nprint('hello')\nSlow.set_epoch = lambda self, epoch: None\n")
    ended = run(f"{target}:torchs", "--seconds", "0.5", "--compare", "--step-ms", "1", cwd=target.parent)
    assert ended.returncode == 0, ended.stderr
    assert "hello" not in ended.stdout
    assert [re.split("  +", line)[0] for line in ended.stdout.splitlines()[1:5]] == [
        "DataLoader as given, 2 processes",
        "penstock, no workers",
        "penstock, 2 threads",
        "penstock, 2 processes",
    ]
    assert re.search(r"penstock, 2 threads +ValueError: Slow.set_epoch would be called", ended.stdout)
    assert re.search(r"Use penstock with num_workers=\d", ended.stdout)


class Negated(penstock.nodes.Node[Any]):
    def transform(self, item: torch.Tensor) -> torch.Tensor:
        return -item


def test_the_same_data_gets_other_workers() -> None:
    """In the same order and the same batches. Seen to fail: a `DataLoader`'s ``drop_last`` forgotten; what a graph does behind its mapper left out."""
    data = list(range(10))
    for given, batches in [
        (DataLoader(data, 3, drop_last=True), [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        (DataLoader(data, batch_sampler=[[1, 2], [5]]), [[1, 2], [5]]),
        (DataLoader(data, 2, sampler=[7, 8, 9]), [[7, 8], [9]]),
        (DataLoader(data, 4, collate_fn=torch.tensor), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (penstock.Loader.from_dataset(data, 6), [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]),
        (
            penstock.Loader(penstock.nodes.Prefetcher(Negated(penstock.Loader.from_dataset(data, 6).root))),
            [[0, -1, -2, -3, -4, -5], [-6, -7, -8, -9]],
        ),
    ]:
        with with_workers(given, 2, "thread", 1) as loader:
            assert [batch.tolist() for batch in loader] == batches
    shuffled = DataLoader(data, 5, shuffle=True)
    with with_workers(shuffled, 0, "thread", 1) as loader:
        assert sorted(index for batch in loader for index in batch.tolist()) == data
        assert isinstance(next(iter(loader.root.chain())), penstock.nodes.ParallelMapper)
    with with_workers(data, 0, "thread", 4) as loader:
        assert len(loader) == 3


def test_what_cannot_be_compared_is_refused() -> None:
    for given, message in [
        (DataLoader(Resumable(3)), "Resumable is an IterableDataset"),
        (penstock.Loader(penstock.nodes.Sampler(penstock.orders.SequentialOrder(3))), "no ParallelMapper"),
        (5, "object of type int"),
    ]:
        with pytest.raises(TargetError, match=message):
            with_workers(given, 0, "thread", 1)
