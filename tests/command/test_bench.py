"""``python -m penstock bench``: loaders that are slow in a known way are measured; what cannot be measured is refused
in words."""

from __future__ import annotations

import itertools
import multiprocessing
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
from by_worker import Split
from resumable import Resumable
from torch.utils.data import DataLoader

import penstock
from penstock.__main__ import main
from penstock._command.bench import Reader, Row, Turn, advice, memory_of_processes, recommended, rows_of, table
from penstock._command.target import TargetError, built, with_workers

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
    loop = reader.loop(1.0, 0.004)
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


def row(method: str, *rates: float, stall: float = 0.5, error: str = "", report: str = "") -> Row:
    made = Row(method)
    made.num_workers, made.first_s, made.error = 2, 0.1, error
    made.turns = [
        Turn(rate, 0.03, stall, 0.005 if number else None, 10**9, report) for number, rate in enumerate(rates)
    ]
    return made


def test_a_row_tells_what_a_loop_of_this_kind_would_see() -> None:
    """Seen to fail: the mean of the turns; the wait at an epoch's start taken from a turn without one."""
    head, line, broken = table(
        [row("thread", 30, 1000, 20), row("process", error="RuntimeError: x")], 0.01
    ).splitlines()
    assert head.split("  ")[-1].strip() == "memory"
    assert re.split("  +", line) == ["thread", "30", "20-1,000", "50%", "100 ms", "5 ms", "1.0 GB"]
    assert re.split("  +", broken) == ["process", "RuntimeError: x"]
    assert " - " in table([row("given", 30)], 0.0)  # without a step there is no stall


def test_the_advice_says_who_waits() -> None:
    """Seen to fail: the stall divided by the share of the step."""
    assert advice(row("given", 5, stall=0.75), 0.01).endswith(
        "waits 75% of the time for data; without that it would run 4.00 times as fast."
    )
    assert "waits only 1.0% of the time" in advice(row("given", 5, stall=0.01), 0.01)
    assert advice(row("given", 5), 0.0).startswith("It keeps up with training steps of 30 ms or longer.")
    assert advice(row("given", 5, report="data: says the loader"), 0.01) == "data: says the loader"
    assert advice(row("inline", 5, stall=0.01, report="data: of several turns"), 0.01).startswith(
        "Use penstock with num_workers=0.\nThe training step waits only"
    )
    assert advice(row("thread", 5), 0.01).startswith('Use penstock with num_workers=2, method="thread".\n')
    assert "penstock.sample().rng" in advice(row("thread", 5), 0.01)


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        ("ours", "penstock.Loader of Slow"),
        ("dataset", "penstock.Loader of Slow"),
        ("generator", "generator"),
        ("Space.some", "penstock.Loader of list"),
    ],
)
def test_any_iterable_is_measured(factory: str, kind: str, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a dataset, in batches. Seen to fail: "a Slow, which cannot be iterated"; a generator read in five turns, of
    which the last found its end."""
    assert bench(f"{target}:{factory}", "--step-ms", "1") == 0
    head, line, empty, *said = capsys.readouterr().out.splitlines()
    assert re.split("  +", head.strip()) == ["samples/s", "from-to", "stall", "first batch", "next epoch", "memory"]
    assert line.startswith(kind)
    assert empty == ""
    assert said[0].startswith("data: " if "Slow" in kind else ("The training step", "data: ", "training step: "))


def test_what_cannot_be_measured_is_refused(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in [
        (f"{target}:nothing", "yields nothing"),
        (f"{target}:number", "TypeError: 'int' object is not iterable"),
        (f"{target}:Space.nowhere", "has no attribute 'nowhere'"),
        (f"{target}:fails", "RuntimeError: no disk"),
        ("x", "must be module:factory"),
        ("no.such.module:f", "No module named"),
    ]:
        assert bench(name) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_loader_that_ends_too_soon_is_no_result(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target.write_text(f"{target.read_text()}\ndef short(): return iter([[1, 2], [3, 4]])\n")
    assert bench(f"{target}:short") == 1
    out = capsys.readouterr().out
    assert "it can be read only once, and ended too soon." in out
    assert out.endswith("Nothing could be measured.\n")


def test_a_file_that_workers_could_not_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the module of that name measured instead."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "random.py").write_text("loader = [1]")
    with pytest.raises(TargetError, match="Rename it"):
        built(f"{tmp_path / 'random.py'}:loader")


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell")
def test_memory_is_that_of_all_processes() -> None:
    before = memory_of_processes()
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; x = b'1' * 50_000_000; print(flush=True); sys.stdin.read()"],
        stdin=-1,
        stdout=-1,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        after = memory_of_processes()
    finally:
        child.communicate()
    assert 40_000_000 < after - before < 400_000_000


def test_the_simplest_of_the_fastest_is_recommended() -> None:
    """Seen to fail: the fastest, by whatever little."""
    inline, thread, process = row("inline", 100), row("thread", 98, 300, 97), row("process", 102, 101, 103)
    assert recommended([inline, thread, process]) is inline
    assert recommended([row("inline", 50), thread, process]) is thread
    assert recommended([row("inline", 50), row("thread", 60), process]) is process
    assert recommended([row("given", 500), inline]) is inline
    assert recommended([row("inline", error="RuntimeError: x")]) is None


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "bench", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


@pytest.mark.soak
def test_a_module_whose_classes_worker_processes_must_find_is_measured(target: Path) -> None:
    target.write_text(
        target.read_text().replace('num_workers=2, method="thread"', 'num_workers=1, multiprocessing_context="spawn"')
    )
    ended = run(f"{target.stem}:threads", "--seconds", "0.3", "--step-ms", "1", cwd=target.parent)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[1].startswith("penstock.Loader of Slow, 1 worker process")


@pytest.mark.soak
def test_candidates_are_compared(target: Path) -> None:
    """One of them is refused, and what the user's code prints does not get into the table. Workers start as in the
    user's script.

    Seen to fail: in a process that is spawned, a ``DataLoader`` spawns its workers, too, and seemed a hundred times
    slower than it is.
    """
    method = "import multiprocessing, sys\nprint('started by', multiprocessing.get_start_method(), file=sys.stderr)"
    target.write_text(f"{target.read_text()}\nprint('hello')\nSlow.set_epoch = lambda self, epoch: None\n{method}\n")
    ended = run(f"{target}:torchs", "--seconds", "0.5", "--compare", "--step-ms", "1", cwd=target.parent)
    assert ended.returncode == 0, ended.stderr
    assert "hello" not in ended.stdout
    assert {line for line in ended.stderr.splitlines() if line.startswith("started by")} == {
        f"started by {multiprocessing.get_start_method()}"
    }
    assert [re.split("  +", line)[0] for line in ended.stdout.splitlines()[1:5]] == [
        "torch DataLoader of Slow, num_workers=2",
        "penstock.Loader of Slow, no workers",
        "thread",
        "penstock.Loader of Slow, 2 worker processes",
    ]
    assert re.search(r"thread +ValueError: Slow.set_epoch would be called", ended.stdout)
    assert re.search(r"Use penstock with num_workers=\d", ended.stdout)


class Negated(penstock.nodes.Node[Any]):
    def transform(self, item: torch.Tensor) -> torch.Tensor:
        return -item


def test_the_same_data_gets_other_workers() -> None:
    """In the same order and the same batches. Seen to fail: a `DataLoader`'s ``drop_last`` forgotten; what a graph does
    behind its mapper left out."""
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
    # one that cannot be shuffled
    with with_workers(penstock.Stream(Split([9, 9]), lanes=2, epoch_size=12), 0, "process", 4) as loader:
        assert len(list(loader)) == 3


def test_what_cannot_be_compared_is_refused() -> None:
    for given, message in [
        (DataLoader(Resumable(3)), "Resumable is an IterableDataset"),
        (penstock.Loader(penstock.nodes.Sampler(penstock.orders.SequentialOrder(3))), "no ParallelMapper"),
        (5, "not an object of type int"),
    ]:
        with pytest.raises(TargetError, match=message):
            with_workers(given, 0, "thread", 1)
