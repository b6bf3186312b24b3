"""``set_epoch`` reaches each worker at the right task, and `Loader.refresh` sends changes of the dataset to the
workers."""

from __future__ import annotations

import contextlib
import os
import signal
from itertools import islice

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from ways import FORK, INLINE, SPAWN, THREAD

from penstock import GraphError, Loader
from penstock.nodes import Prefetcher

processes = pytest.mark.parametrize("way", [INLINE, FORK, SPAWN])
anywhere = pytest.mark.parametrize("way", [INLINE, THREAD, FORK, SPAWN])


class Curriculum:
    """Sample i is ``1000 * e + i`` after ``set_epoch(e)``."""

    def __init__(self, n):
        self.n = n
        self.epoch = None
        self.told = []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.told.append(epoch)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([1000 * self.epoch + index, os.getpid()])


def values(batches):
    return [batch[:, 0].tolist() for batch in batches]


def expected(n, size, epochs):
    return [[[1000 * e + i for i in range(start, min(start + size, n))] for start in range(0, n, size)] for e in epochs]


@processes
def test_set_epoch_reaches_the_worker_with_the_task(way):
    """Epochs of two batches, so that both workers are an epoch ahead. Seen to fail: `set_epoch` called once per
    worker."""
    with Loader.from_dataset(Curriculum(4), batch_size=2, **way) as loader:
        assert [values(loader) for _ in range(6)] == expected(4, 2, range(6))
        loader.set_epoch(2)
        assert values(loader) == expected(4, 2, [2])[0]


def test_it_is_called_once_per_epoch():
    """With the number of the next one when one ends, before the loop may call it with another."""
    dataset = Curriculum(6)
    with Loader.from_dataset(dataset, batch_size=2) as loader:
        for _ in range(3):
            list(loader)
    assert dataset.told == [0, 1, 2, 3]


def test_a_replaced_worker_is_told_too():
    """Workers are killed in every epoch."""
    with Loader.from_dataset(
        Curriculum(8), batch_size=2, num_workers=2, multiprocessing_context="fork", max_restarts=100
    ) as loader:
        seen = []
        for _ in range(3):
            for number, batch in enumerate(loader):
                seen.append(batch[:, 0].tolist())
                if number % 2:
                    with contextlib.suppress(ProcessLookupError):  # it was killed before
                        os.kill(int(batch[0, 1]), signal.SIGKILL)
        assert seen == [batch for one in expected(8, 2, range(3)) for batch in one]


@pytest.mark.parametrize(
    "wrapped",
    [lambda d: Subset(d, range(4)), lambda d: ConcatDataset([d, d]), lambda d: Subset(ConcatDataset([d]), range(4))],
)
def test_torchs_own_wrappers_do_not_hide_it(wrapped):
    with Loader.from_dataset(wrapped(Curriculum(4)), batch_size=2, num_workers=1) as loader:
        assert values(islice(loader, 2)) == expected(4, 2, [0])[0]
        assert values(islice(loader, 2)) == expected(4, 2, [1])[0]


def test_threads_share_it():
    """Nothing is loaded over the end of an epoch. Seen to fail: it was refused."""
    dataset = Curriculum(8)
    with Loader.from_dataset(dataset, batch_size=2, num_workers=3, method="thread") as loader:
        assert [values(loader) for _ in range(4)] == expected(8, 2, range(4))
        assert values(islice(loader, 2)) == expected(8, 2, [4])[0][:2]
        assert values(loader) == expected(8, 2, [5])[0]
        batches = iter(loader)
        next(batches), next(batches)
        address = loader.last
        assert loader.load(address)[:, 0].tolist() == [6002, 6003]
        assert len(list(batches)) == 2
        with pytest.raises(GraphError, match='share a dataset with a set_epoch.*method="process"'):
            loader.load(address)
    assert dataset.told == [*range(8)]


class Refuses(Curriculum):
    def set_epoch(self, epoch):
        if epoch == 1:
            raise LookupError("no such epoch")
        super().set_epoch(epoch)


@pytest.mark.parametrize("way", [INLINE, FORK])
def test_an_error_of_set_epoch_is_that_of_the_batch(way):
    """And every batch of that epoch raises it, not only the first."""
    with Loader.from_dataset(Refuses(4), batch_size=2, **way) as loader:
        assert len(list(loader)) == 2
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(LookupError, match="no such epoch"):
                next(batches)
        loader.set_epoch(2)
        assert values(loader) == expected(4, 2, [2])[0]


# Refresh.


class Changed:
    """A dataset that the training loop changes."""

    def __init__(self, n):
        self.n = n
        self.version = 0

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([100 * self.version + index, os.getpid()])


@anywhere
def test_refresh_hands_the_dataset_over_and_moves_nothing(way):
    """In the middle of an epoch, at its end, before the first batch, twice. Seen to fail: without the reset (old
    batches in flight)."""
    dataset = Changed(8)
    with Loader.from_dataset(dataset, batch_size=2, **way) as loader:
        loader.refresh()
        batches = iter(loader)
        first = next(batches)
        dataset.version = 1
        loader.refresh()
        loader.refresh()
        assert values(batches) == [[102, 103], [104, 105], [106, 107]]
        dataset.version = 2
        loader.refresh()
        again = list(loader)
        assert values(again) == [[200, 201], [202, 203], [204, 205], [206, 207]]
        assert loader.epoch == 2
        pids = {batch[0, 1].item() for batch in again}
        assert (first[0, 1].item() in pids) == (way["num_workers"] == 0 or way.get("method") == "thread")
    dataset.version = 3


@pytest.mark.parametrize("way", [THREAD, FORK])
def test_refresh_reaches_through_a_prefetcher(way):
    dataset = Changed(8)
    root = Prefetcher(Loader.from_dataset(dataset, batch_size=2, **way).root)
    with Loader(root) as loader:
        batches = iter(loader)
        assert values([next(batches)]) == [[0, 1]]
        dataset.version = 1
        loader.refresh()
        assert values(batches) == [[102, 103], [104, 105], [106, 107]]


def test_healing_after_refresh_sees_the_refreshed_dataset():
    dataset = Changed(40)
    with Loader.from_dataset(dataset, batch_size=2, num_workers=1, multiprocessing_context="fork") as loader:
        batches = iter(loader)
        next(batches)
        dataset.version = 1
        loader.refresh()
        pid = int(next(batches)[0, 1])
        dataset.version = 2
        os.kill(pid, signal.SIGKILL)
        assert all(value // 100 == 1 for batch in values(batches) for value in batch)
