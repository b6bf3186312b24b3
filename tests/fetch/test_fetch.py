"""What a worker does with one task: samples, batches, random numbers, and addresses in errors."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import penstock
from comparison import difference
from penstock import Loader
from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.fetch_task import FetchTask
from penstock._workers.pool import IDLE
from penstock.nodes import Fetch, Indices


def batch(values, epoch=0, start=0):
    return Indices(epoch, np.arange(start, start + len(values)), np.array(values))


@pytest.mark.parametrize("workers", [0, 2])
def test_without_batches_samples_are_those_of_dataloader(workers):
    """The same values, dtypes and containers. Seen to fail: `Fetch.convert` that returns what it is given."""
    dataset = [
        {"x": np.float32(index), "name": f"n{index}", "y": (np.arange(index), [torch.tensor([index])])}
        for index in range(9)
    ]
    with Loader.from_dataset(dataset, batch_size=None, num_workers=workers) as ours:
        assert difference(list(ours), list(DataLoader(dataset, batch_size=None))) is None


class Noise(Dataset):
    """Draws from every kind of generator."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        own = penstock.sample()
        return torch.tensor(
            [
                float(index),
                random.random(),
                np.random.random(),
                torch.rand(()).item(),
                own.rng.random(),
                torch.rand((), generator=own.torch_generator).item(),
            ],
            dtype=torch.float64,
        )


def by_index(**options):
    """One dict per epoch: dataset index -> the numbers drawn."""
    with Loader.from_dataset(Noise(), shuffle=True, seed=5, **options) as loader:
        return [{int(row[0]): row.tolist() for rows in loader for row in rows} for _ in range(2)]


def test_augmentation_is_the_same_whatever_loads_it():
    """Purity: workers, method, batch size and ranks change no number. Seen to fail: a seed per worker."""
    expected = by_index(batch_size=4)
    assert by_index(batch_size=4, num_workers=1) == expected
    assert by_index(batch_size=3, num_workers=3) == expected
    ranks = [by_index(batch_size=2, num_workers=1, rank=rank, world_size=2) for rank in range(2)]
    assert [{**one, **two} for one, two in zip(*ranks, strict=True)] == expected
    assert expected[0] != expected[1]
    assert len({tuple(row[1:]) for epoch in expected for row in epoch.values()}) == 24


def test_seed_samples_false_leaves_the_global_generators_to_the_user():
    random.seed(3)
    drawn = random.random()
    random.seed(3)
    with Loader.from_dataset(Noise(), batch_size=4, seed_global_rngs=False) as loader:
        assert next(iter(loader))[0, 1].item() == drawn


def test_a_sample_drawn_twice_in_an_epoch_is_augmented_twice():
    work = FetchTask(Fetch(Noise()), seed=0, seed_global_rngs=True)
    rows = work.inline(batch([7, 7])).tolist()
    assert rows[0][0] == rows[1][0] == 7
    assert set(rows[0][1:]).isdisjoint(rows[1][1:])


def test_sample_knows_its_address_and_is_unknown_elsewhere():
    class Address:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            one = penstock.sample()
            return one.epoch, one.position, one.index, one.seed

    work = FetchTask(Fetch(Address(), list), seed=9, seed_global_rngs=True)
    assert work.inline(batch([5, 6], epoch=2, start=3)) == [(2, 3, 5, 9), (2, 4, 6, 9)]
    with pytest.raises(RuntimeError, match="only while a sample is being loaded"):
        penstock.sample()


def test_it_is_known_which_row_is_being_loaded():
    cell, seen = [IDLE], []

    class Peeking:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            seen.append(cell[0])
            return index

    FetchTask(Fetch(Peeking()), 0, seed_global_rngs=False)(batch([4, 5, 6]), cell)
    assert (seen, cell) == ([0, 1, 2], [IDLE])


def test_facts_keep_what_the_caller_knew_when_they_are_pickled():
    """A loader that has not started may be sent to another process. Seen to fail: an iterator was asked again, and read
    once."""
    facts = DatasetFacts([1, 2], "forward")
    again = pickle.loads(pickle.dumps(facts))
    assert (again.read, again.dataset) == ("forward", [1, 2])
    assert pickle.loads(pickle.dumps(DatasetFacts([1, 2]))).read == "by index"
