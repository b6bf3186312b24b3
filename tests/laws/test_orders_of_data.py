"""The laws for the orders that data brings: mixes, windows, shards. Resume at every step, any number of ranks, a small state, golden batches."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from fleets import chain, endless
from pairwise import engines, pairwise

import penstock
from penstock import Loader, Mix
from penstock.orders import ShardOrder, ShuffledOrder, SlidingOrder
from penstock.testing import assert_order_is_pure, assert_resumes_everywhere

STAGES = [(0, {"a": 0.7, "b": 0.2, "c": 0.1}), (17, {"a": 0.2, "c": 0.8}), (40, {"b": 1})]


class Addressed:
    """Sample i in epoch e is ``10_000 * e + first + i``, and a random number of its own."""

    def __init__(self, n, first=0):
        self.n = n
        self.first = first

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        sample = penstock.sample()
        return 10_000 * sample.epoch + self.first + index, sample.rng.random()


def three():
    return {"a": Addressed(5), "b": Addressed(90, 1000), "c": Addressed(11, 2000)}


def mixed(**words):
    return Mix(three(), words.pop("weights", STAGES[0][1]), **words)


DATA = {
    "mix": lambda: {"dataset": mixed(epoch_size=22)},
    "mix in stages": lambda: {"dataset": mixed(weights=STAGES, epoch_size=24)},
    "mix in runs": lambda: {"dataset": mixed(epoch_size=24, run=4)},
    "mix to the first end": lambda: {"dataset": mixed(stop="first")},
    "sliding": lambda: {"dataset": Addressed(22), "order": SlidingOrder(22, 6, 3)},
    "shards": lambda: {"dataset": Addressed(22), "order": ShardOrder([3, 0, 9, 1, 4, 5], 3, seed=3)},
    "shards with a window": lambda: {"dataset": Addressed(22), "order": ShardOrder([3, 0, 9, 1, 4, 5], 3, 4, seed=3)},
}


def loader(data, **words):
    words = {**DATA[data](), "batch_size": 6, "seed": 5, **words}
    return Loader.from_dataset(**words, **({} if "order" in words else {"shuffle": True}))


@pytest.mark.parametrize(("data", "workers"), engines(DATA))
def test_each_resumes_everywhere(data, workers):
    """Seen red with a mix that counts its sources from the start of each epoch by what it has given so far."""
    options = {} if workers == "inline" else {"num_workers": 2, "method": workers}
    assert_resumes_everywhere(lambda: loader(data, **options), steps=10)


@pytest.mark.parametrize(("data", "rank", "tail"), pairwise(DATA, [0, 2], ["pad", "drop"]))
def test_each_resumes_everywhere_on_a_rank(data, rank, tail):
    assert_resumes_everywhere(lambda: loader(data, batch_size=2, rank=rank, world_size=3, tail=tail), steps=12)


def rows_of(batch):
    values, numbers = batch
    return list(zip(values.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize("data", ["mix", "mix in stages", "mix in runs", "shards with a window"])
def test_four_ranks_and_then_three_read_one_sequence(data):
    """Global batches of 12: samples and their random numbers, in order, over ends of epochs."""

    def build(**words):
        return loader(data, tail="drop", drop_last=True, **words)

    expected = list(islice((sample for batch in endless(build(batch_size=12), rows_of) for sample in batch), 12 * 9))
    assert chain(build, [(4, 3, 3), (3, 4, 2), (1, 12, 1), (2, 6, 3)], rows_of) == expected


@pytest.mark.parametrize("data", DATA)
def test_each_has_a_small_state(data):
    with loader(data) as one:
        next(iter(one))
        state = json.loads(one.state_dict()["penstock"])
        assert state["state"] == {"epoch": 0, "source": {"epoch": 0, "position": 6}}
        assert len(one.state_dict()["penstock"]) < 350


@pytest.mark.parametrize("data", DATA)
def test_each_is_pure(data):
    """As they are here, with the seeds of the sources hashed."""
    first, again = (DATA[data]() for _ in range(2))
    order, other = (words.get("order") or words["dataset"].order(shuffle=True, seed=5) for words in (first, again))
    assert_order_is_pure(order, items=len(first["dataset"]), again=other)


FROZEN = {
    "mix": [10004, 11089, 10001, 10000],
    "mix in stages": [11064, 11089, 11009, 11074, 11085, 11023],
    "mix in runs": [10002, 10003, 10000, 10002, 10003, 10004],
    "sliding": [10019, 10021, 10018, 10020],
    "shards": [10006, 10019, 10016, 10007],
    "shards with a window": [10006, 10018, 10016, 10007],
}


@pytest.mark.parametrize("data", FROZEN)
def test_what_each_loads_is_frozen(data):
    """A release that changes one of these changes every user's runs: never edit them. The last batch of epoch 1, through the whole graph."""
    with loader(data) as one:
        one.set_epoch(1)
        *_, (values, _numbers) = one
        assert values.tolist() == FROZEN[data]


class TestTheCaseThatOthersLose:
    """Two equal sources on two ranks, where each rank reads every second item of the mix."""

    @pytest.mark.parametrize("run", [1, 2])
    def test_both_ranks_see_both_sources(self, run):
        two = {"a": Addressed(1000), "b": Addressed(1000, 5000)}
        for rank in (0, 1):
            words = {"rank": rank, "world_size": 2, "batch_size": 100, "seed": 0}
            with Loader.from_dataset(Mix(two, {"a": 0.5, "b": 0.5}, run=run), **words) as one:
                values = np.concatenate([batch.numpy() for batch, _ in one])
            assert abs((values < 5000).mean() - 0.5) < 0.07

    def test_a_source_may_be_shuffled_by_any_order(self):
        """Also of a length that its window does not divide."""

        class Windowed(Addressed):
            def order(self, *, shuffle, seed):
                return SlidingOrder(self.n, 4, seed) if shuffle else ShuffledOrder(self.n, seed)

        with Loader.from_dataset(Mix({"a": Windowed(10)}, {"a": 1}), shuffle=True, batch_size=10) as one:
            assert sorted(next(iter(one))[0].tolist()) == list(range(10))
