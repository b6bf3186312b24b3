"""``num_workers="auto"``: the same samples, in the same order, with the same states, whatever it does; and what it does
on real workloads."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from worker_pids import worker_pids

import penstock
from penstock import Loader
from penstock._nodes import auto_workers
from penstock._nodes.auto_workers import AutoWorkers
from penstock._workers.auto import Controller, Measurement
from penstock.nodes import ParallelMapper
from penstock.statistics import WorkerChoice
from penstock.testing import assert_resumes_everywhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

METHODS = ["thread", "fork"]
N, BATCH = 60, 3


class Draws:
    """Sample i of epoch e is 1000 e + i, and random numbers of each kind that a worker may draw from."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        own = penstock.sample()
        return torch.tensor([1000.0 * own.epoch + index, own.rng.random()], dtype=torch.float64)


class DrawsGlobally(Draws):
    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])
        return torch.cat([super().__getitem__(index), drawn])


class Waits(Draws):
    """Samples that wait 20 ms."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


class Dictated:
    """Numbers of workers, one after the other, instead of what is measured; each stays until the pool has it."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._numbers = itertools.cycle(numbers)
        self.number, self.changes, self._is_there = 1, 0, True

    def look(self, pool: Any, waited_ns: int, depth: int) -> int:
        if self._is_there:
            self.number, self._is_there = next(self._numbers), False
        return self.number

    def resized(self, workers: int, wanted: int, depth: int) -> None:
        assert workers == wanted
        self.changes += 1
        self._is_there = True


@pytest.fixture
def dictate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dictated]:
    """Have all loaders from now on change the number of their workers as told, before each batch. Neighbours in
    ``numbers`` must differ."""

    def dictate(*numbers: int) -> Dictated:
        told = Dictated(numbers)
        monkeypatch.setattr(AutoWorkers, "look", lambda auto, *words: told.look(*words))
        monkeypatch.setattr(AutoWorkers, "resized", lambda auto, *words: told.resized(*words))
        return told

    return dictate


def words(method: str) -> dict[str, Any]:
    return {"method": "thread"} if method == "thread" else {"method": "process", "multiprocessing_context": method}


def loader(dataset: Any = None, method: str = "thread", **options: Any) -> Loader[Any]:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 5, "num_workers": "auto", **words(method), **options}
    return Loader.from_dataset(Draws() if dataset is None else dataset, **options)


def epochs(of: Loader[Any], number: int) -> list[Any]:
    """What it delivers in so many epochs, and its state after each batch."""
    return [(batch.tolist(), of.state_dict()) for _ in range(number) for batch in of]


@pytest.mark.parametrize("method", METHODS)
def test_the_number_changes_nothing_else(method: str, dictate: Any) -> None:
    """Values, order and states over two epochs, growing and shrinking at each batch. Seen to fail: a change that
    discarded what was in flight; the number in the state."""
    dataset = Draws() if method == "thread" else DrawsGlobally()
    with loader(dataset, method, num_workers=2) as fixed:
        expected = epochs(fixed, 2)
    told = dictate(2, 4, 1, 3)
    with loader(dataset, method) as auto:
        assert epochs(auto, 2) == expected
    assert told.changes > 40


def test_it_resumes_at_every_step_while_it_grows_and_shrinks(dictate: Any) -> None:
    """Seen to fail: a change that discarded what was in flight."""
    dictate(3, 1, 4, 2)
    assert_resumes_everywhere(lambda: loader(method="thread").root, steps=45)


def test_workers_that_are_killed_while_it_grows_are_replaced(dictate: Any) -> None:
    """SIGKILL to the newest worker after each change. Seen to fail: `_replace` that launches nobody."""
    with loader(DrawsGlobally(), num_workers=0) as inline:
        expected = epochs(inline, 2)
    dictate(2, 4, 2, 3)
    with loader(DrawsGlobally(), "fork") as auto:
        found = []
        for _ in range(2):
            for batch in auto:
                found.append((batch.tolist(), auto.state_dict()))
                if len(found) in (3, 4, 9, 21):
                    with contextlib.suppress(ProcessLookupError):  # it was killed before, and nobody has noticed
                        os.kill(worker_pids()[-1], signal.SIGKILL)
        assert found == expected
        os.kill(worker_pids()[0], signal.SIGKILL)
        for _ in itertools.chain.from_iterable(itertools.repeat(auto)):  # a death is noticed once the loop has to wait
            if auto.statistics().nodes[-1].workers.restarts:
                break


def test_what_is_loaded_ahead_follows_the_number_of_workers(dictate: Any) -> None:
    """Seen to fail: a depth that stayed what it was for one worker."""
    for options, each in (({}, 8), ({"prefetch_factor": 3}, 3)):
        dictate(4, 2)
        with loader(**options) as auto:
            batches = iter(auto)
            for _ in range(4):
                next(batches)
            assert (auto.num_workers, auto.statistics().nodes[-1].depth) == (2, 2 * each)
            next(batches)
            assert (auto.num_workers, auto.statistics().nodes[-1].depth) == (4, 4 * each)


def test_it_adds_workers_for_samples_that_wait_and_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than cores, because they wait. The machine may be busy: how many exactly is not asked. Seen to fail: bounded
    by cores."""
    monkeypatch.setattr(auto_workers, "cores", lambda: 1.0)
    monkeypatch.setattr(auto_workers, "SHORTEST_NS", 100_000_000)
    monkeypatch.setattr(auto_workers, "COMPUTES", 2.0)  # a busy machine makes waiting look like computing
    caplog.set_level(logging.INFO)
    with loader(Waits(), shuffle=False, batch_size=1) as auto:
        assert auto.num_workers == 1
        for expected, batch in enumerate(auto):
            assert batch.tolist() == [expected]
            if auto.num_workers > 1 or expected == 1000:
                break
        statistics, shown = auto.statistics(), repr(auto)
        workers = statistics.nodes[-1].workers
        assert workers is not None
        choice = workers.choice
        assert isinstance(choice, WorkerChoice)
        assert choice.workers == workers.workers == auto.num_workers == 2
        assert (choice.most, choice.changes, choice.settled) == (16, 1, False)
        assert "2 worker threads (auto)" in shown
        assert f"workers: 2, by num_workers='auto', which still tries: {choice.why}" in auto.report()
        assert "auto=True" in repr(auto.root)
    assert f"num_workers='auto': from 1 to 2 workers: {choice.why}." in caplog.messages
    assert choice.why.startswith("the loop waited")
    assert 0 <= workers.busy_share <= 1


class Clock:
    """Stands for the time, the pool and the waits of a made-up run."""

    size, all_ready = 1, True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = self.waited_ns = 0
        self.found: list[Measurement] = []
        monkeypatch.setattr(auto_workers, "now", lambda: self.ns)
        monkeypatch.setattr(AutoWorkers, "bound", lambda auto, pool: (16, "the bound"))
        really = Controller.decide

        def decide(controller: Controller, found: Measurement) -> int:
            self.found.append(found)
            return really(controller, found)

        monkeypatch.setattr(Controller, "decide", decide)

    def counted(self) -> list[list[int]]:
        return []

    def batches(self, auto: AutoWorkers, number: int, wait_s: float, step_s: float) -> None:
        for _ in range(number):
            self.ns += int((wait_s + step_s) * 1e9)
            self.waited_ns += int(wait_s * 1e9)
            auto.look(self, self.waited_ns, 4)  # type: ignore[arg-type]


def test_pauses_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations between epochs and checkpoints in the middle, and what is loaded ahead meanwhile. Seen to fail: the
    rate of a loop that never pauses."""
    clock, auto = Clock(monkeypatch), AutoWorkers()
    clock.batches(auto, 2, 0.0, 5.0)  # the first ones: nothing is known
    for _ in range(30):
        clock.batches(auto, 9, 0.03, 0.07)
        auto.mark()
        clock.batches(auto, 1, 0.0, 60.0)  # a validation
        clock.batches(auto, 4, 0.0, 0.01)  # which were ready
        clock.batches(auto, 9, 0.03, 0.07)
        clock.batches(auto, 1, 0.0, 30.0)  # a checkpoint
        clock.batches(auto, 4, 0.0, 0.01)
    assert clock.found
    for found in clock.found:
        assert found.rate == pytest.approx(10.0, rel=0.01)
        assert found.stall == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize(
    ("words", "free", "workers"),
    [({}, 90 * 10**6, 3), ({"prefetch_factor": 8}, 170 * 10**6, 2), ({}, 2**20, 1), ({}, 0, 1)],
    ids=["two each", "eight each", "little is free", "nothing is free"],
)
def test_memory_bounds_it(words: dict[str, int], free: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two items of 10 MB for each worker in a half of 90 MB; or eight of them. Seen to fail: bounded by what processes
    take alone, which threads do not; no bound where nothing was free."""
    monkeypatch.setattr(auto_workers, "free_memory", lambda: free)
    monkeypatch.setattr(auto_workers, "cores", lambda: 16.0)
    with Loader(ParallelMapper(loader().root.source, ten_megabytes, "auto", **words)) as auto:
        some(iter(auto), 2)
        assert auto.root.executor.crew.auto.bound(auto.root.executor._pool) == (workers, "half of the free memory")


def ten_megabytes(values: list[int]) -> torch.Tensor:
    return torch.zeros(10**7, dtype=torch.uint8)


def test_words_that_it_does_not_go_with_are_refused() -> None:
    with pytest.raises(
        ValueError, match="num_workers='many', a str, must be a whole number of at least 0. Or pass \"auto\"."
    ):
        loader(num_workers="many")
    with pytest.raises(ValueError, match="num_workers='auto': a Resident dataset is in memory"):
        loader(penstock.Resident(torch.utils.data.TensorDataset(torch.zeros(4))))


class InLanes(Draws):
    forward_lanes = 4


def test_lanes_have_owners_so_their_number_must_be_given() -> None:
    """The message names both ways out, and both work."""
    with pytest.raises(
        ValueError, match=r'InLanes is read in lanes.*Pass a number \(num_workers=2\), or use method="thread"'
    ):
        loader(InLanes(), "fork")
    expected = None
    for options in ({"num_workers": 2, "method": "fork"}, {"method": "thread"}):
        with loader(InLanes(), **options) as one:
            found = [batch.tolist() for batch in one]
            assert expected in (None, found)
            expected = found


@pytest.mark.parametrize("method", ["thread", "fork"])
def test_a_closed_one_leaves_nothing_in_the_middle_of_a_change(method: str, dictate: Any) -> None:
    """The fixture of all tests counts threads, processes and files."""
    for stop in (1, 2, 3, 5):
        dictate(3, 1, 4)
        auto = loader(method=method)
        some(iter(auto), stop)
        auto.close()
        with pytest.raises(penstock.ClosedError):
            next(iter(auto))


def test_a_dataset_changed_in_between_is_loaded_anew_by_as_many(dictate: Any) -> None:
    """`Loader.refresh` replaces the pool. Seen to fail: the new pool had the first number, and the node another one."""
    told = dictate(4, 2)
    with loader(method="fork") as auto:
        batches = iter(auto)
        some(batches, 3)
        told.look = lambda *_: auto.num_workers  # type: ignore[method-assign]
        before = worker_pids()
        auto.refresh()
        some(batches, 2)
        assert auto.statistics().nodes[-1].workers.workers == auto.num_workers == 4
        assert not {*before} & {*worker_pids()}


def some(iterator: Iterator[Any], number: int) -> list[Any]:
    return [next(iterator) for _ in range(number)]
