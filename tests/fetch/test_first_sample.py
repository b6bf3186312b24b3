"""The first sample of each process is loaded twice, and a difference is said once: what nobody seeds shows."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import penstock
from penstock import Loader
from penstock._fetch.first_sample import difference
from penstock.nodes import Batcher, Cycler, Mapper, Prefetcher, Sampler
from penstock.orders import SequentialOrder

N = 24
METHODS = {
    "inline": {},
    "processes": {"num_workers": 2, "multiprocessing_context": "fork"},
    "threads": {"num_workers": 2, "method": "thread"},
}
of_module = np.random.default_rng(0)
counter = itertools.count()
SAID = "made another sample when the first one was loaded again"


class Of:
    """Sample k is what a function makes of k."""

    def __init__(self, make, *held):
        self.make, self.held = make, held

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.make(index)


class OfClass(Of):
    rng = random.Random(7)

    def __getitem__(self, index):
        return self.rng.random()


class Together(Of):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class TogetherAsBatch(Of):
    def __getitems__(self, indices):
        return {"x": torch.tensor([self[index] for index in indices])}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(N))


def closed_over():
    rng = random.Random(7)
    return lambda index: rng.random()


DIFFERS = {
    "a module": lambda: Of(lambda index: of_module.random()),
    "a closure": lambda: Of(closed_over()),
    "a class": lambda: OfClass(None),
    "the system": lambda: Of(lambda index: torch.tensor([*os.urandom(8)])),
    "a counter": lambda: Of(lambda index: {"a": [index, next(counter)]}),
    "loaded together": lambda: Together(lambda index: of_module.random()),
    "loaded as a batch": lambda: TogetherAsBatch(lambda index: of_module.random()),
}
CASES = [
    *((what, "inline") for what in DIFFERS),
    *((what, how) for what in ("a module", "loaded together") for how in ("processes", "threads")),
]


def said_of(caplog, dataset, **words):
    """The levels of what is said of ``dataset`` in two epochs."""
    caplog.clear()
    with caplog.at_level("INFO"), Loader.from_dataset(dataset, 4, **words) as loader:
        for _ in range(2):
            list(loader)
    return [record.levelname for record in caplog.records if SAID in record.message]


@pytest.mark.parametrize(("what", "how"), CASES)
@pytest.mark.timeout(60)
def test_what_is_not_seeded_is_named(what, how, caplog):
    """Once, and not with ``seed_global_rngs=False``."""
    make = DIFFERS[what]
    assert said_of(caplog, make(), **METHODS[how]) == ["WARNING"]
    (record,) = [record for record in caplog.records if SAID in record.message]
    assert record.message.startswith(f"{type(make()).__qualname__}.__getitem")
    assert said_of(caplog, make(), **METHODS[how], seed_global_rngs=False) == []


def test_it_is_the_parent_that_says_it(capfd):
    """Once for all workers. Seen to fail: said by each of them."""
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w"))
    logging.getLogger("penstock").addHandler(handler)
    try:
        with Loader.from_dataset(DIFFERS["a module"](), 2, num_workers=3, multiprocessing_context="fork") as loader:
            list(loader)
    finally:
        logging.getLogger("penstock").removeHandler(handler)
        handler.stream.close()
    assert capfd.readouterr().err.count(SAID) == 1


def test_text_that_differs_is_no_warning(caplog):
    dataset = Of(lambda index: f"{index} at {next(counter)}")
    assert said_of(caplog, dataset, collate_fn=list) == ["INFO"]


class Anything:
    pass


@dataclasses.dataclass
class Row:
    x: torch.Tensor
    y: float = float("nan")


class Lazily(Of):
    def __getitem__(self, index):
        if not hasattr(self, "rng"):
            self.rng = random.Random()
        return self.rng.random()


REPEATS = {
    "global draws": lambda: Of(lambda index: random.random() + np.random.rand() + torch.rand(())),
    "its own numbers": lambda: Of(lambda index: penstock.sample().rng.random()),
    "one that appears": lambda: Lazily(None),
}


@pytest.mark.filterwarnings("ignore:.*drew from the global random numbers")
@pytest.mark.parametrize(
    ("what", "how"),
    [(what, how) for what in REPEATS for how in METHODS if (what, how) != ("one that appears", "threads")],
)
@pytest.mark.timeout(60)
def test_what_repeats_itself_is_not(what, how, caplog):
    """Draws in threads are named by another watch. Seen to fail: `_compared` without it; a sample's own numbers that
    went on."""
    assert said_of(caplog, REPEATS[what](), collate_fn=len, **METHODS[how]) == []


def test_a_second_load_that_raises_is_ignored(caplog):
    left = [*range(N)]
    with Loader.from_dataset(Of(lambda index: left.pop(left.index(index))), 4) as loader:
        assert [batch.tolist() for batch in loader] == torch.arange(N).reshape(-1, 4).tolist()
    assert SAID not in caplog.text


def test_the_samples_are_those_that_are_loaded_once():
    """Seen to fail: the first sample's own numbers of the second load went on where the first had stopped."""

    def read(**words):
        with Loader.from_dataset(
            Of(lambda index: (index, penstock.sample().rng.random())),
            4,
            shuffle=True,
            **words,
        ) as loader:
            return [[column.tolist() for column in batch] for batch in loader]

    expected = read(seed_global_rngs=False)
    assert all(read(**words) == expected for words in METHODS.values())


def of_item(item):
    return item + of_module.random()


def in_place(item):
    item[:] = [item[0] + 1]
    return item


def test_a_transform_of_what_is_read_once(caplog):
    """It gets a copy the second time, because it may have modified the item. Seen to fail: items transformed twice."""
    for words in ({}, METHODS["processes"]):
        assert said_of(caplog, Stream(), transform=of_item, **words) == ["WARNING"]

    class Lists(Stream):
        def __iter__(self):
            return ([k] for k in range(N))

    with Loader.from_dataset(Lists(), 4, transform=in_place, collate_fn=list) as loader:
        assert [item for batch in loader for item in batch] == [[k + 1] for k in range(N)]
    assert caplog.text.count(SAID) == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_function_and_a_thread_that_reads_ahead(ahead, caplog):
    """Seen to fail: draws from the global generators, unseeded there at first, taken for another sample."""

    def said(function):
        caplog.clear()
        node = Mapper(Batcher(Cycler(Sampler(SequentialOrder(N))), 4), function)
        with Loader(Prefetcher(node, 2) if ahead else node) as loader:
            list(loader)
        return [record.levelname for record in caplog.records if SAID in record.message]

    assert said(lambda indices: [of_item(index) for index in indices]) == ["WARNING"]
    assert said(lambda indices: [index + random.random() for index in indices]) == []


def test_a_transform_of_shards(tmp_path, caplog):
    """They are read forward, so only the transform runs again. Seen to fail: a shard that was opened twice."""
    opened = []

    def open_shard(shard):
        opened.append(shard)
        return iter(range(10 * shard, 10 * shard + 10))

    shards = penstock.Shards([0, 1], open_shard, counts=[10, 10], lanes=1)
    assert said_of(caplog, shards, transform=of_item) == ["WARNING"]
    assert opened == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("one", "other", "level"),
    [
        (1, 1, 0),
        (1, 2, logging.WARNING),
        (float("nan"), float("nan"), 0),
        (float("nan"), 1.0, logging.WARNING),
        (1, "1", logging.WARNING),
        ("a", "b", logging.INFO),
        (None, "b", logging.INFO),
        (torch.arange(3), torch.arange(3), 0),
        (torch.arange(3), torch.arange(4), logging.WARNING),
        (np.array(["a"]), np.array(["b"]), logging.WARNING),
        (np.float32(1), np.float32(2), logging.WARNING),
        ({"a": 1}, {"b": 1}, logging.WARNING),
        ({"a": [1, "a"]}, {"a": [1, "b"]}, logging.INFO),
        ([1, 2], [1], logging.WARNING),
        (Row(torch.ones(2)), Row(torch.ones(2)), 0),
        (Row(torch.ones(2)), Row(torch.zeros(2)), logging.WARNING),
        (Anything(), Anything(), 0),
        ({1}, {2}, logging.INFO),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), 0),
        (iter([]), iter([]), 0),
    ],
)
def test_how_much_two_samples_differ(one, other, level):
    assert difference(one, other) == level
    assert difference(one, one) == 0
