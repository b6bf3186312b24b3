"""Samples that a reader thread loads inline: the user's generators are never disturbed, and samples draw the same
numbers as without the thread."""

from __future__ import annotations

import logging
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from global_draws import generators

from penstock import Loader, sample
from penstock._random.global_seeding import CALM
from penstock.nodes import Batcher, Cycler, Fetch, IterableSource, Mapper, ParallelMapper, Prefetcher, Sampler
from penstock.orders import SequentialOrder

if TYPE_CHECKING:
    from collections.abc import Callable

N, B = 60, 3


class Consumer:
    """Whether the consumer is waiting for an item now, visible to the dataset."""

    def __init__(self) -> None:
        self.waits = False

    def next(self, items: Any) -> Any:
        self.waits = True
        try:
            return next(items)
        finally:
            self.waits = False


class Samples:
    """Records for each sample whether the consumer was waiting while it was loaded."""

    def __init__(self, consumer: Consumer, draw: Callable[[int], Any]) -> None:
        self.consumer, self.draw = consumer, draw
        self.waited: list[bool] = []
        self.loaded = threading.Semaphore(0)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        before = self.consumer.waits
        drawn = self.draw(index)
        self.waited.append(before and self.consumer.waits)
        self.loaded.release()
        return index, drawn


def of_all(index: int) -> float:
    return random.random() + float(np.random.random()) + torch.rand(()).item()


DRAWS: dict[str, Callable[[int], float]] = {
    "random": lambda index: random.random(),
    "numpy": lambda index: float(np.random.normal()),  # NumPy draws these in pairs, and keeps the second one
    "torch": lambda index: torch.rand(()).item(),
    "all": of_all,
}
READERS: dict[str, Callable[[Any], Any]] = {
    "one": lambda node: Prefetcher(node, 4),
    "two": lambda node: Prefetcher(Prefetcher(node, 4), 4),
}


def graph(dataset: Any, **options: Any) -> Any:
    return ParallelMapper(Batcher(Cycler(Sampler(SequentialOrder(N))), B), Fetch(dataset), 0, seed=4, **options)


def values(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.mark.parametrize(("reader", "draw"), [*(("one", draw) for draw in DRAWS), ("two", "all")])
def test_samples_that_draw_are_loaded_only_while_the_consumer_waits(draw, reader, caplog):
    """And they are the same as without a reader. Seen to fail: a reader that goes on while the user draws, and then
    undoes those draws."""
    consumer = Consumer()
    expected = values(Loader(graph(Samples(consumer, DRAWS[draw]))))
    dataset = Samples(consumer, DRAWS[draw])
    with Loader(READERS[reader](graph(dataset))) as loader:
        batches, got = iter(loader), []
        while len(got) < N // B:
            before = generators()
            got.append(consumer.next(batches))
            assert generators() == before
            random.random(), np.random.random(), torch.rand(3)
    assert all(dataset.waited)
    assert values(got) == expected
    assert caplog.text.count("Samples.__getitem__ draws from the global random numbers in a background thread") == 1


@pytest.mark.parametrize(
    "draw", [lambda index: 1.0, lambda index: float(sample().rng.random())], ids=["nothing", "sample().rng"]
)
def test_samples_that_draw_nothing_are_read_ahead(draw, caplog):
    """As soon as that is known. Seen to fail: a reader that is held forever."""
    consumer = Consumer()
    expected = values(Loader(graph(Samples(consumer, draw))))
    dataset = Samples(consumer, draw)
    with Loader(Prefetcher(graph(dataset), 4)) as loader:
        batches = iter(loader)
        got = [consumer.next(batches) for _ in range(CALM + 1)]
        for _ in range((CALM + 1 + 4) * B):
            assert dataset.loaded.acquire(timeout=100)
        got += list(batches)
    assert values(got) == expected
    assert all(dataset.waited[: CALM * B])
    assert not all(dataset.waited)
    assert caplog.text == ""


def test_what_was_calm_is_not_watched_any_more():
    """Because the consumer may draw meanwhile. Seen to fail: `Task.unseeded` that seeds, which loaded it twice."""
    loaded = []

    def late(index: int) -> bool:
        loaded.append(index)
        return index == N - 1 and random.random() > 2

    with Loader(Prefetcher(graph(Samples(Consumer(), late)), 4)) as loader:
        assert len(list(loader)) == N // B
    assert loaded.count(N - 1) == 1


def test_always_means_always():
    """For samples that only look at a generator, which cannot be detected."""

    def look(index: int) -> int:
        return torch.initial_seed()

    consumer = Consumer()
    expected = values(Loader(graph(Samples(consumer, look), seed_global_rngs="always")))
    dataset = Samples(consumer, look)
    with Loader(Prefetcher(graph(dataset, seed_global_rngs="always"), 4)) as loader:
        batches = iter(loader)
        got = [consumer.next(batches) for _ in range(N // B)]
    assert values(got) == expected
    assert len({number for _, numbers in expected for number in numbers}) == N
    assert all(dataset.waited)


def changed_in_place(item: Any) -> Any:
    torch.rand(())
    item = item if isinstance(item, list) else list(item)  # a generator can neither be copied nor read again
    item[0] += 100
    return item


@pytest.mark.parametrize("kind", [list, iter], ids=["a list", "an iterator"])
def test_a_function_gets_each_item_as_it_was(kind):
    """Also the first, which is done once more, seeded, where it drew. Seen to fail: the second time it got what the
    first had left of the item."""
    items = [[k] if kind is list else (value for value in [k]) for k in range(CALM + 3)]
    with Loader(Prefetcher(Mapper(IterableSource(items), changed_in_place))) as loader:
        assert list(loader) == [[100 + k] for k in range(CALM + 3)]


def jittered(value: int) -> float:
    return value + random.random()


def test_the_transform_of_a_stream_is_named(caplog):
    """Seen to fail: "NoneType draws"."""
    mapper = Loader.from_dataset(IterableSource(range(N)), B, transform=jittered).root
    with Loader(Prefetcher(mapper)) as loader:
        assert [int(value) for batch in loader for value in batch] == list(range(N))
    assert "transform jittered draws from the global random numbers in a background thread" in caplog.text


@pytest.mark.parametrize("method", ["a Mapper", "inline", "process"])
@pytest.mark.parametrize("draws", [True, False])
def test_draws_behind_another_mapper_are_said(tmp_path, method, draws):
    """Their items have no position. Seen to fail: other numbers in each run, also after a resume, without a word;
    inline, each item drew the same."""
    log = logging.FileHandler(tmp_path / "log")  # the workers write into it, too
    logging.getLogger("penstock").addHandler(log)
    node = ParallelMapper(Cycler(Sampler(SequentialOrder(9))), int, 1, method="thread")
    function = jittered if draws else int
    options = (
        {}
        if method == "a Mapper"
        else {"num_workers": int(method == "process"), "method": "process", "multiprocessing_context": "fork"}
    )
    try:
        with Loader((Mapper if method == "a Mapper" else ParallelMapper)(node, function, **options)) as loader:
            values = list(loader)
    finally:
        logging.getLogger("penstock").removeHandler(log)
        log.close()
    assert list(map(int, values)) == list(range(9))
    drawn = {round(value % 1, 9) for value in values}  # equal draws, added to other numbers, differ in their last bits
    assert len(drawn) == (9 if draws else 1)
    assert (tmp_path / "log").read_text().count("jittered seems to draw from the global random numbers") == draws
