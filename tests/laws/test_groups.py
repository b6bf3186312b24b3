"""The laws for packs and buckets, through the whole graph: resume at every step, every document once, one sequence for any ranks, a small state."""

from __future__ import annotations

import json
from itertools import islice, product

import numpy as np
import pytest
from fleets import chain, endless
from pairwise import engines, pairwise

import penstock
from penstock import Buckets, Loader, Mix, Packs, Shards, pad
from penstock.testing import assert_resumes_everywhere, plain

N = 60
LENGTHS = np.random.default_rng(4).lognormal(2, 0.8, N).astype(np.int64) + 1
CAPACITY, BUDGET = 40, 80
COUNTS = [20, 0, 13, 22, 5]  # of documents in shards


def document(index):
    return {"tokens": 100 * index + np.arange(LENGTHS[index])}


def drawn(document):
    """With the epoch in its tokens, and a random number beside each."""
    sample = penstock.sample()
    return {"tokens": 10_000 * sample.epoch + document["tokens"], "drawn": sample.rng.integers(1000, size=len(document["tokens"]))}


class Documents:
    """The tokens of document i in epoch e are ``10_000 * e + 100 * i`` and on, and each has a random number beside it."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return drawn(document(index))


def indexed(shard):
    return [document(index) for index in range(sum(COUNTS[:shard]), sum(COUNTS[: shard + 1]))]


def forward(shard):
    yield from indexed(shard)


def mixed():
    return Mix({"a": Documents(), "b": Documents()}, {"a": 1, "b": 2}, epoch_size=50)


def noisy(document):
    """A transform that draws, too."""
    return {**document, "noise": penstock.sample().rng.integers(1000, size=len(document["tokens"]))}


GROUPS = {
    "packs": lambda: {"groups": Packs(LENGTHS, CAPACITY, block=16), "batch_size": 6},
    "packs, transformed": lambda: {"groups": Packs(LENGTHS, CAPACITY, block=16), "batch_size": 6, "transform": noisy},
    "packs of a mix": lambda: {"dataset": mixed(), "groups": Packs([*LENGTHS, *LENGTHS], CAPACITY, block=16), "batch_size": 6},
    "packs, counted": lambda: {"groups": Packs(LENGTHS, CAPACITY, block=16, count=True), "batch_size": 6},
    "packs of shards": lambda: {
        "dataset": Shards(5, forward, counts=COUNTS, lanes=2),
        "transform": drawn,
        "groups": Packs(LENGTHS, CAPACITY, block=16),
        "batch_size": 6,
    },
    "buckets of shards": lambda: {
        "dataset": Shards(5, indexed, counts=COUNTS),
        "transform": drawn,
        "groups": Buckets(LENGTHS, BUDGET, block=32),
        "collate_fn": pad(-1),
    },
    "buckets": lambda: {"groups": Buckets(LENGTHS, BUDGET, block=32, same_size_run=2), "collate_fn": pad(-1)},
    "buckets, counted": lambda: {"groups": Buckets(LENGTHS, BUDGET, block=32, same_size_run=2, count=True), "collate_fn": pad(-1)},
}
groups = pytest.mark.parametrize("kind", GROUPS)


def loader(kind, **words):
    return Loader.from_dataset(**{"dataset": Documents(), "shuffle": True, "seed": 5, **GROUPS[kind](), **words})


@pytest.mark.parametrize(("kind", "workers"), engines(GROUPS))
def test_each_resumes_everywhere(kind, workers):
    options = {} if workers == "inline" else {"num_workers": 2, "method": workers}
    assert_resumes_everywhere(lambda: loader(kind, **options), steps=9 if "packs" in kind else 30)


@pytest.mark.parametrize(("kind", "rank", "tail"), pairwise(GROUPS, [0, 2], ["drop", "exact"]))
def test_each_resumes_everywhere_on_a_rank(kind, rank, tail):
    words = {"batch_size": 2} if "packs" in kind else {}
    assert_resumes_everywhere(lambda: loader(kind, rank=rank, world_size=3, tail=tail, **words), steps=13)


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [*product(["packs", "buckets"], [1, 2, 3, 4]), *((kind, 3) for kind in GROUPS if "counted" in kind or "shards" in kind)],
)
def test_every_document_comes_once_in_an_epoch_on_any_number_of_ranks(kind, world_size):
    for epoch in range(2):
        seen = []
        for rank in range(world_size):
            with loader(kind, rank=rank, world_size=world_size, tail="exact") as one:
                one.set_epoch(epoch)
                for batch in one:
                    rows = batch["segment_ids"] > 0 if "packs" in kind else batch["tokens"] >= 0
                    seen += batch["tokens"][rows].tolist()
        assert sorted(seen) == [10_000 * epoch + 100 * index + place for index in range(N) for place in range(LENGTHS[index])]


def rows_of(batch):
    return [{name: plain(field)[1][row] for name, field in batch.items()} for row in range(len(batch["tokens"]))]


@pytest.mark.parametrize("kind", ["packs", "packs, transformed", "packs of a mix", "packs, counted", "packs of shards"])
def test_packs_go_on_with_one_sequence_on_other_numbers_of_ranks(kind):
    """Global batches of 12: tokens, borders and random numbers, in order, over ends of epochs."""

    def build(**words):
        return loader(kind, drop_last=True, **words)

    with build(batch_size=12) as alone:
        expected = list(islice((pack for batch in endless(alone, rows_of) for pack in batch), 12 * 5))
    assert chain(build, [(4, 3, 1), (3, 4, 2), (1, 12, 1), (2, 6, 1)], rows_of) == expected


@pytest.mark.parametrize("kind", ["buckets", "buckets, counted", "buckets of shards"])
def test_buckets_go_on_with_one_sequence_on_other_numbers_of_ranks(kind):
    """Within an epoch: at its end each number of ranks drops another rest."""

    def build(*, batch_size, **words):
        return loader(kind, **words)

    with loader(kind) as alone:
        expected = list(islice(endless(alone, rows_of), 10))
    assert chain(build, [(1, 0, 1), (4, 0, 1), (3, 0, 1), (2, 0, 1)], rows_of, whole=True) == expected


@groups
def test_each_has_a_small_state(kind):
    with loader(kind) as one:
        next(iter(one))
        state = one.state_dict()["penstock"]
        assert json.loads(state)["state"]["source"].keys() == {"epoch", "block", "taken", "position"}
        assert len(state) < 450


def test_a_state_of_other_lengths_is_refused():
    with loader("packs") as one:
        next(iter(one))
        state = one.state_dict()
    with (
        loader("packs", groups=Packs(LENGTHS + (np.arange(N) == 3), CAPACITY, block=16)) as other,
        pytest.raises(penstock.StateMismatch, match="lengths was '[0-9a-f]*' and is '[0-9a-f]*'"),
    ):
        other.load_state_dict(state)


FROZEN = {
    "packs": [(15800, 15805), (11500, 11539), (10000, 15203), (11400, 15908), (12300, 15722)],
    "buckets": [(13300, 13316), (15700, 15722)],
}


@pytest.mark.parametrize("kind", FROZEN)
def test_what_each_loads_is_frozen(kind):
    """A release that changes one of these changes every user's runs: never edit them. The last batch of epoch 1: the first and last token of each row."""
    with loader(kind) as one:
        one.set_epoch(1)
        *_, batch = one
        assert [(row[0], max(row)) for row in batch["tokens"].tolist()] == FROZEN[kind]
