"""A dataset with lanes is read by worker processes that each own some: parts by row. The batches are those that one
process would have made.

So are the first batches of any other dataset, which all workers load together: `test_split_first_batch`; here it is one
whose lanes are None.

The samples name themselves, and who read them.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from global_draws import generators
from rich_samples import rich
from torch.utils.data import get_worker_info

import penstock
from penstock import Loader
from penstock.nodes import Batcher, Cycler, Fetch, ParallelMapper, Sampler, Sharder
from penstock.orders import SequentialOrder
from penstock.testing import assert_resumes_everywhere, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

N = 48


class Lanes:
    """Sample i of epoch e is ``1000 * e + i``, with the pid and the number of the worker that read it, and whether its
    lane had moved forward by one there."""

    def __init__(self, lanes: Any, n: int = N, at: dict[int, Callable[[], Any]] | None = None) -> None:
        self.forward_lanes = lanes
        self.n = n
        self.at = at or {}  # what happens at some samples
        self.last: dict[int, int] = {}  # read of each lane, in this process

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.at:
            self.at[index]()
        lane = index % (self.forward_lanes or self.n)
        info: Any = get_worker_info()
        forward = lane not in self.last or (index - self.last[lane]) % self.n in (0, self.forward_lanes)
        self.last[lane] = index
        return {
            "value": 1000 * penstock.sample().epoch + index,
            "pid": os.getpid(),
            "worker": -1 if info is None else info.id,
            "forward": forward,
        }


def loading(dataset: Any, workers: int = 3, **options: Any) -> Loader[Any]:
    return Loader.from_dataset(
        dataset,
        num_workers=workers,
        **{"method": "process", "multiprocessing_context": "fork", "batch_size": 6, **options},
    )


def values(batches: Any) -> list[int]:
    return [value for batch in batches for value in batch["value"].tolist()]


def readers(batches: list[Any], lanes: int, field: str = "pid") -> dict[int, set[int]]:
    """Who has read each lane."""
    found: dict[int, set[int]] = {}
    for batch in batches:
        for value, reader in zip(batch["value"].tolist(), batch[field].tolist(), strict=True):
            found.setdefault(value % 1000 % lanes, set()).add(reader)
    return found


def of_epochs(*epochs: int, n: int = N) -> list[int]:
    return [1000 * epoch + index for epoch in epochs for index in range(n)]


# Who reads what.


@pytest.mark.parametrize(
    ("workers", "lanes", "batch_size", "busy"),
    [
        (3, 4, 5, 3),
        (7, 24, 5, 7),  # more lanes than rows
        (4, 1, 6, 1),  # all rows in one lane
        (7, 3, 8, 3),
    ],
)
def test_each_lane_is_read_by_one_worker_forward(workers: int, lanes: int, batch_size: int, busy: int) -> None:
    """Seen to fail: parts that are cut where the batch is; parts that anybody may take; parts collated one after the
    other."""
    with loading(Lanes(lanes), workers, batch_size=batch_size) as loader:
        batches = [batch for _ in range(2) for batch in loader]
    assert values(batches) == of_epochs(0, 1)
    found = readers(batches, lanes)
    assert [len(pids) for pids in found.values()] == [1] * lanes
    assert len(set().union(*found.values())) == busy
    assert all(batch["forward"].all() for batch in batches)


@pytest.mark.parametrize(("lanes", "batch_size"), [(24, 5), (1, 6), (48, 1)])
def test_the_smallest_window_makes_progress(lanes: int, batch_size: int) -> None:
    """One batch at a time, one task for each of seven workers. Seen to hang: owners that are not workers."""
    node = Batcher(Sharder(Cycler(Sampler(SequentialOrder(N)))), batch_size, drop_last=False)
    mapper = ParallelMapper(
        node,
        Fetch(Lanes(lanes)),
        7,
        method="process",
        multiprocessing_context="fork",
        max_concurrent=1,
        prefetch_factor=1,
    )
    with Loader(mapper) as loader:
        batches = [batch for _ in range(2) for batch in loader]
    assert values(batches) == of_epochs(0, 1)
    assert {len(pids) for pids in readers(batches, lanes).values()} == {1}


@pytest.mark.parametrize(("world_size", "lanes", "busy"), [(3, 8, 2), (4, 8, 2)])
def test_each_rank_divides_its_own_lanes(world_size: int, lanes: int, busy: int) -> None:
    """Seen to fail: owners of all lanes, whoever reads them (of 4 ranks, one worker of two was idle)."""
    for rank in (0, world_size - 1):
        with loading(Lanes(lanes), 2, batch_size=3, rank=rank, world_size=world_size) as loader:
            batches = list(loader)
        assert values(batches) == list(range(rank, N, world_size))
        found = readers(batches, lanes, "worker")
        assert {len(workers) for workers in found.values()} == {1}
        assert len(set().union(*found.values())) == busy


@pytest.mark.parametrize("lanes", [None, True, 0, -4, 2.0, "4", [1, 2]])
def test_what_is_no_number_of_lanes_is_ignored(lanes: Any) -> None:
    assert Fetch(Lanes(lanes)).facts.lanes is None


def test_threads_share_what_they_read_so_nothing_changes() -> None:
    """Each task but the first is a whole batch, collated in its thread. Seen to fail: parts by row with threads."""
    seen = []

    def collate(samples: list[Any]) -> Any:
        seen.append(threading.current_thread().name)
        return torch.tensor([sample["value"] for sample in samples])

    with loading(Lanes(8), 2, method="thread", multiprocessing_context=None, collate_fn=collate) as loader:
        assert torch.cat(list(loader)).tolist() == of_epochs(0)
    assert [name.startswith("penstock-map") for name in seen].count(False) <= 1


def collated_in(samples: list[Any]) -> int:
    return os.getpid()


# What comes out.


class Rich(Lanes):
    draws = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        return rich(index) | ({"globals": (random.random(), np.random.randn(), torch.rand(2))} if self.draws else {})


class RichWithoutDraws(Rich):
    draws = False


def jitter(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "jitter": (random.random() if "globals" in sample else 0.0, penstock.sample().rng.random())}


THREADS = {"method": "thread", "multiprocessing_context": None}
by_split = pytest.mark.parametrize(
    ("lanes", "options"), [(8, {}), (None, {}), (None, THREADS)], ids=["lanes", "processes", "threads"]
)


@pytest.mark.parametrize(
    ("lanes", "options", "batch_size"),
    [
        *((8, {}, size) for size in (1, 12)),
        *((None, {}, size) for size in (2, 5)),
        *((None, THREADS, size) for size in (1, 2, 5, 12)),
        *(pytest.param(8, {}, size, marks=pytest.mark.soak) for size in (2, 5)),
        *(pytest.param(None, {}, size, marks=pytest.mark.soak) for size in (1, 12)),
    ],
)
def test_every_batch_is_what_one_process_would_have_made(
    lanes: int | None, options: dict[str, Any], batch_size: int
) -> None:
    """With its transform, too. Seen to fail: rows in the order of the parts, or from the last part to the first; `Part`
    with the positions of the first rows."""
    dataset = RichWithoutDraws(lanes) if options else Rich(lanes)
    runs = []
    for workers in (0, 3):
        with loading(
            dataset, workers, batch_size=batch_size, shuffle=not lanes, transform=jitter, seed=3, **options
        ) as loader:
            runs.append([plain(batch) for _ in range(2) for batch in loader])
    assert runs[0] == runs[1]


def drawn(samples: list[Any]) -> list[Any]:
    return [(sample["value"], random.random(), np.random.randn(), torch.rand(()).item()) for sample in samples]


@pytest.mark.parametrize("lanes", [8, 1])
def test_a_collate_fn_runs_here_and_draws_as_anywhere(lanes: int) -> None:
    """Our generators stay as they are. Seen to fail: `Loaded` collated without ``kept``; a batch of one owner collated
    in the worker."""
    before = generators()
    runs = []
    for workers in (0, 1, 3):
        with loading(Lanes(lanes), workers, collate_fn=drawn, seed=5) as loader:
            runs.append([batch for _ in range(2) for batch in loader])
    assert runs[0] == runs[1] == runs[2]
    assert generators() == before
    with loading(Lanes(lanes), collate_fn=collated_in) as loader:
        assert set(loader) == {os.getpid()}


class Many(Lanes):
    def __getitems__(self, indices: list[int]) -> Any:
        samples = [self[index] for index in indices]
        return samples if self.n == N else {"value": torch.tensor([sample["value"] for sample in samples])}


def test_getitems_that_returns_a_batch_is_refused() -> None:
    with (
        loading(Many(8, 8), 2) as loader,
        pytest.raises(TypeError, match=r"the dataset has lanes, but its __getitems__ returned a whole batch, a dict"),
    ):
        next(iter(loader))


# Faults.


def once(flag: Path, fault: Callable[[], Any]) -> Callable[[], Any]:
    def act() -> None:
        if not flag.exists():
            flag.touch()
            fault()

    return act


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("a bad record")


@pytest.mark.parametrize(("lanes", "at", "in_order"), [(8, 0, False), (8, 8, True), (None, 5, True)])
def test_a_worker_that_dies_in_the_middle_of_a_part(
    tmp_path: Path, lanes: int | None, at: int, in_order: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its replacement goes on with its lanes. Seen to fail: `requeue` that forgets the owner (two workers read the same
    lane)."""
    with loading(Lanes(lanes, at={at: once(tmp_path / "flag", kill)}), in_order=in_order) as loader:
        batches = [batch for _ in range(2) for batch in loader]
        assert loader.root.statistics()[-1].workers.restarts == 1
    got = values(batches)
    assert (got if in_order else [*sorted(got[:N]), *sorted(got[N:])]) == of_epochs(0, 1)
    if lanes:
        assert {len(workers) for workers in readers(batches, lanes, "worker").values()} == {1}
    assert f"dataset index {at} (epoch 0, position {at})" in caplog.text


@by_split
@pytest.mark.parametrize("bad", [{5, 3, 10}, {0, 11}, {4, 5, 6, 7, 17}, set(range(12, 23))], ids=str)
def test_skipping(lanes: int | None, options: dict[str, Any], bad: set[int], caplog: pytest.LogCaptureFixture) -> None:
    """Also whole parts. They are logged and counted in the order of the batch. Seen to fail: failures in the order of
    the parts, with their rows there; `together` that drops the faults."""
    dataset = Lanes(lanes, at=dict.fromkeys(bad, fail))
    with loading(dataset, batch_size=12, on_error="skip", max_errors=0.9, **options) as loader:
        batches = list(loader)
        assert loader.root.statistics()[-1].failures.skipped == len(bad)
    assert [batch["value"].tolist() for batch in batches] == [
        [index for index in range(start, start + 12) if index not in bad] for start in range(0, N, 12)
    ]
    words = [record.getMessage() for record in caplog.records]
    for index, word in zip(sorted(bad), words, strict=True):
        assert word.startswith(f"skipped dataset index {index} (epoch 0, position {index})")


# Laws.


def test_the_resume_law() -> None:
    """Who reads differs after a resume, what is read does not."""
    assert_resumes_everywhere(lambda: loading(Lanes(2, 14), 3, batch_size=5, transform=value_of), steps=7)


def value_of(sample: dict[str, Any]) -> int:
    value: int = sample["value"]
    return value


def test_buckets_over_counted_shards_have_no_owners(tmp_path: Path) -> None:
    """They take records from all over, so the log says that every worker reads all. Seen to fail: a batch was split by
    what was no lane."""
    data = penstock.Shards(8, Logged(tmp_path, 10), counts=[10] * 8)
    with Loader.from_dataset(data, batch_size=4, shuffle=True):
        assert Fetch(data).facts.cuts == 2
    with Loader.from_dataset(data, shuffle=True, groups=penstock.Buckets([1] * 80, 8)):
        assert Fetch(data).facts.cuts is None


class Logged:
    """Shard k has the records ``1000 * k + i``; a file for each epoch says which process has opened which shard."""

    reads_forward = True

    def __init__(self, folder: Path, n: int) -> None:
        self.folder, self.n = folder, n

    def __call__(self, shard: int) -> Iterator[int]:
        with (self.folder / str(penstock.sample().epoch)).open("a") as log:
            log.write(f"{shard} {os.getpid()}\n")
        return iter(range(1000 * shard, 1000 * shard + self.n))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "workers", "window"),
    [
        (24, 2, 8),
        (24, 5, 0),
        (3, 2, 0),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [(24, 2, 0), (24, 5, 8), (3, 2, 8)]),
    ],
)
def test_counted_shards_that_are_read_forward_are_read_by_one_worker_each(
    files: int, workers: int, window: int, tmp_path: Path
) -> None:
    """The items stay. Seen to fail: without ``forward_cuts`` each shard was opened by every worker."""

    def read(workers: int, folder: Path) -> list[Any]:
        folder.mkdir()
        data = penstock.Shards(files, Logged(folder, 120), counts=[120] * files, window=window)
        with Loader.from_dataset(data, batch_size=16, shuffle=True, seed=3, num_workers=workers) as loader:
            return [batch.tolist() for _ in range(2) for batch in loader]

    assert read(workers, tmp_path / "there") == read(0, tmp_path / "here")
    for epoch in ("0", "1"):
        opened = (tmp_path / "there" / epoch).read_text().splitlines()
        assert sorted(int(line.split()[0]) for line in opened) == list(range(files))


@pytest.mark.parametrize(("lanes", "world_size", "idle"), [(1, 1, 2), (4, 2, 1), (3, 1, 0), (4, 3, 0)])
def test_workers_without_a_lane_are_said(caplog, lanes, world_size, idle):
    """Seen to fail: nothing said. A job of 3 workers over one file was as slow as one worker, without a word."""
    with Loader.from_dataset(Lanes(lanes), 4, num_workers=3, rank=0, world_size=world_size) as loader:
        next(iter(loader))
    said = [line for line in caplog.messages if "nothing to do" in line]
    share = 3 - idle
    assert said == (
        [
            f"{idle} of 3 workers have nothing to do: this rank reads {share} of the dataset's {lanes} lanes, and each "
            f"is read by one worker. Use num_workers={share}, or more lanes: pass lanes= to the dataset, up to the "
            f"number of its shards."
        ]
        if idle
        else []
    )
