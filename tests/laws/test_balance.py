"""The laws of ``balance``: each global batch keeps its samples, each rank as many, and nothing of it is in a state. A
step of DDP: tests/distributed."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from fleets import endless
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

import penstock
from penstock import Buckets, GraphError, Loader, Mix, Packs
from penstock.nodes import Batcher, Cycler, Grouper, KeyGrouper, Sampler, Sharder
from penstock.orders import SequentialOrder, ShuffledOrder

N = 34
COSTS = np.random.default_rng(6).lognormal(3, 1.2, N).astype(np.int64) + 1
LENGTHS = np.random.default_rng(7).lognormal(1.5, 0.8, N).astype(np.int64) + 1
DOCUMENTS = [np.full(length, index) for index, length in enumerate(LENGTHS)]


class Tokens:
    """A sample draws."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = penstock.sample()
        return torch.tensor([index, sample.epoch, sample.position, int(sample.rng.integers(1000))])


def records(shard: int) -> Any:
    """They can only be read forward."""
    yield from range(100 * shard, 100 * shard + [10, 0, 17, 7][shard])


def squares(lengths: np.ndarray) -> np.ndarray:
    return lengths**2


KINDS: dict[str, dict[str, Any]] = {
    "shuffled": {"balance": COSTS},
    "in order": {"shuffle": False, "balance": COSTS.tolist()},
    "seconds": {"balance": COSTS / 7},
    "a sampler": {"shuffle": None, "sampler": RandomSampler(range(N)), "balance": COSTS},
    "a mix": {"dataset": Mix({"a": range(10), "b": range(24)}, {"a": 1, "b": 2}), "balance": COSTS},
    "shards": {"dataset": penstock.Shards(4, records, counts=[10, 0, 17, 7], lanes=2), "balance": COSTS},
    "packs": {"dataset": DOCUMENTS, "groups": Packs(LENGTHS, 12, block=16), "balance": squares},
    "packs, counted": {"dataset": DOCUMENTS, "groups": Packs(LENGTHS, 12, block=16, count=True), "balance": squares},
    "packs by index": {"dataset": DOCUMENTS, "groups": Packs(LENGTHS, 12, block=16), "balance": COSTS},
    "keys": {"groups": Buckets(keys=np.arange(N) % 7 % 3, batch_size=3), "balance": COSTS},
    "keys, padded": {"groups": Buckets(keys=np.arange(N) % 7 % 3, batch_size=3, short="pad"), "balance": COSTS},
}
TAILS = ["pad", "drop", "exact"]


def loader(kind: str, *, balanced: bool = True, **words: Any) -> Loader[Any]:
    of = {"dataset": Tokens(), "shuffle": True, "seed": 4, **KINDS[kind], **words}
    if "keys" in kind:
        of.pop("batch_size", None)
        of.pop("tail", None)
    elif "packs" in kind and of.get("tail") == "pad":
        of["tail"] = "drop"
    if not balanced:
        of["balance"] = None
    return Loader.from_dataset(**of)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), tail=st.sampled_from(TAILS), drop_last=st.booleans())
def test_each_global_batch_keeps_its_samples_over_any_chain(kind: str, data: Any, tail: str, drop_last: bool) -> None:
    """And each rank has as many, with the same states after each step; a state loads with and without it, and on any
    number of ranks.

    Seen to fail: with costs that differ between ranks; with a short last round that is dealt by cost.
    """
    # an epoch has less than 25 packs
    drop_last = drop_last and tail != "exact" and "keys" not in kind and "packs" not in kind
    state = None
    for ranks, size, steps in data.draw(
        st.lists(st.tuples(st.integers(1, 5), st.integers(2, 5), st.integers(1, 6)), min_size=1, max_size=3)
    ):
        words = {"batch_size": size, "drop_last": drop_last, "tail": tail, "world_size": ranks}
        fleets = [
            [loader(kind, balanced=balanced, rank=rank, **words) for rank in range(ranks)] for balanced in (True, False)
        ]
        for one in (one for fleet in fleets for one in fleet):
            if state is not None:
                one.load_state_dict(state)
        streams = [[endless(one, lambda batch: [batch]) for one in fleet] for fleet in fleets]
        for _ in range(steps):
            lasts = []
            for fleet, stream in zip(fleets, streams, strict=True):
                for one in stream:
                    next(one)
                lasts.append([one.last for one in fleet])
            if tail == "exact" and len({last.epoch for last in lasts[0]}) > 1:
                break  # some ranks had no batch left
            mine, plain = ([last.positions.tolist() for last in some] for some in lasts)
            assert [len(positions) for positions in mine] == [len(positions) for positions in plain]
            assert sorted(chain.from_iterable(mine)) == sorted(chain.from_iterable(plain))
            assert all(positions == sorted(positions) or "keys" in kind for positions in mine)
            balanced, states = ([one.state_dict() for one in fleet] for fleet in fleets)
            assert balanced == states
            if tail != "exact":
                assert states == [states[0]] * ranks
        state = states[0]
        for one in (one for fleet in fleets for one in fleet):
            one.close()


MANY = np.random.default_rng(8).lognormal(2, 0.8, 600).astype(np.int64) + 1
DEALT = {
    "samples": ({"batch_size": 4, "balance": MANY}, lambda indices: MANY[indices].sum()),
    "packs": (
        {"batch_size": 4, "groups": Packs(MANY, 64), "balance": squares},
        lambda packs: sum(length**2 for pack in packs for length in pack.lengths),
    ),
    "packs by index": (
        {"batch_size": 4, "groups": Packs(MANY, 64), "balance": MANY**2},
        lambda packs: sum(MANY[pack.indices] @ pack.lengths for pack in packs),
    ),
    "keys": (
        {"groups": Buckets(keys=np.arange(600) % 2, batch_size=4, short="drop"), "balance": MANY},
        lambda indices: MANY[indices].sum(),
    ),
}


@pytest.mark.parametrize("kind", DEALT)
def test_batches_of_a_round_cost_about_the_same(kind: str) -> None:
    """Seen to fail: with the cheapest samples first; with the costs of other packs."""
    means = []
    words, cost_of = DEALT[kind]
    for balance in ({}, {"balance": None}):
        drop = {} if kind == "keys" else {"tail": "drop", "drop_last": True}
        fleet = [
            Loader.from_dataset(
                range(600), shuffle=True, seed=4, rank=rank, world_size=3, **{**drop, **words, **balance}
            ).root.source
            for rank in range(3)
        ]
        rounds = zip(*[node.read(node.start(0), 999)[0] for node in fleet], strict=True)
        costs = np.array([[cost_of(batch.values) for batch in batches] for batches in rounds])
        means.append((costs.max(1) / costs.mean(1)).mean())
    assert means[0] - 1 < (means[1] - 1) / 4


@pytest.mark.parametrize(("ranks", "size"), [(2, 100), (3, 2), (7, 40), (67, 2), (96, 8), (130, 4), (256, 3)])
def test_any_number_of_ranks_shares_a_global_batch(ranks: int, size: int) -> None:
    """Seen to fail: with groups of a size that does not divide the ranks; with costs that differ between ranks."""
    count = 2 * ranks * size
    costs = np.random.default_rng(ranks).lognormal(3, 1, count)
    for first in (
        Sampler(ShuffledOrder(count, 1)),
        KeyGrouper(ShuffledOrder(count, 1), Buckets(keys=[0] * count, batch_size=size)),
    ):
        nodes = [Sharder(Cycler(first), rank, ranks, balance=costs) for rank in range(ranks)]
        if isinstance(first, Sampler):
            nodes = [Batcher(node, size) for node in nodes]
        hands = [node.read(node.start(0), 1)[0][0] for node in nodes]
        assert {len(batch) for batch in hands} == {size}
        assert sorted(np.concatenate([batch.positions for batch in hands]).tolist()) == list(range(ranks * size))
        first.shutdown()


@pytest.mark.parametrize("kind", ["shuffled", "packs", "keys"])
@pytest.mark.parametrize("engine", [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 2}])
def test_a_batch_is_loaded_again_by_a_loader_without(kind: str, engine: dict[str, Any]) -> None:
    """What a rank got, with its random numbers. Seen to fail: with the positions that the rank would have had."""
    with (
        loader(kind, rank=1, world_size=3, batch_size=3, **engine) as one,
        loader(kind, balanced=False, batch_size=2) as other,
    ):
        for batch in islice(one, 3):
            again = other.load(one.last)
            assert other.locate(one.last).indices == one.last.indices
            assert (
                torch.equal(again, batch)
                if torch.is_tensor(batch)
                else all(torch.equal(again[name], batch[name]) for name in batch)
            )


def test_samples_of_one_cost_are_dealt_as_without() -> None:
    """Seen to fail: with a heap that is none where costs are equal."""
    for rank in range(5):
        with (
            loader("shuffled", balance=[3] * N, rank=rank, world_size=5, batch_size=3) as one,
            loader("shuffled", balanced=False, rank=rank, world_size=5, batch_size=3) as other,
        ):
            assert all(map(torch.equal, one, other))


def test_more_ranks_than_64_exchange_within_groups() -> None:
    """Rank r is in group r mod (ranks / 64). Each global batch keeps its samples all the same. Seen to fail: with
    contiguous groups."""
    n, size, ranks = 1024, 2, 256
    costs = np.random.default_rng(0).lognormal(3, 1, n).astype(np.int64)
    hands = []
    for rank in range(ranks):
        node = Batcher(Sharder(Cycler(Sampler(ShuffledOrder(n, 1))), rank, ranks, balance=costs), size)
        hands.append(node.read(node.start(0), 2)[0])
    for step in range(2):
        batches = [hand[step] for hand in hands]
        assert sorted(np.concatenate([batch.positions for batch in batches]).tolist()) == list(
            range(512 * step, 512 * (step + 1))
        )
        for rank, batch in enumerate(batches):
            assert {position % 4 for position in batch.positions.tolist()} == {rank % 4}
        for group in range(4):
            each = np.array([costs[batch.values] for batch in batches[group::4]])
            dearest = np.sort(each.ravel())[[-1, 0]].sum()  # with the one that costs least
            assert each.sum(1).max() <= max(dearest, 1.05 * each.sum(1).mean())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"balance": COSTS[:9]}, "balance has 9 costs, but Tokens has 34 samples. Pass one cost"),
        (
            {"balance": -COSTS},
            (
                r"the cost of index of the dataset 0 is -\d+, but a cost must be a finite number of at least 0 \(34 "
                r"are not\)"
            ),
        ),
        ({"balance": np.where(np.arange(N) == 7, np.nan, 1.0)}, "the cost of index of the dataset 7 is nan"),
        ({"balance": np.full(N, np.inf)}, "the cost of index of the dataset 0 is inf"),
        (
            {"balance": np.ones((N, 2))},
            r"shape \(34, 2\) and dtype float64, but there must be one number for each index",
        ),
        ({"balance": ["1"] * N}, r"shape \(34,\) and dtype <U1"),
        ({"balance": [True] * N}, "dtype bool"),
        ({"balance": 3}, r"shape \(\) and dtype int64"),
        ({"balance": squares}, "balance is a function of lengths, but only Packs have any. Pass an array"),
        (
            {"batch_size": 1},
            (
                "with batch_size=1 each rank gets one sample, whatever it costs, so balance changes nothing. Raise "
                "batch_size"
            ),
        ),
        ({"batch_size": None}, "with batch_size=None each rank gets one sample"),
        ({"batch_size": 1, "shuffle": None, "batch_sampler": [[0, 1]]}, "but a batch sampler already does. Use"),
        ({"shuffle": None, "sampler": range(N), "split": "own"}, "but split='own' already does. Use"),
        (
            {"batch_size": 1, "groups": Buckets(LENGTHS, 100)},
            "balance would move samples between Buckets by length.*same_size_run",
        ),
        (
            {"groups": Packs(LENGTHS, 12), "balance": lambda lengths: lengths[1:]},
            r"shape \(12,\) and dtype int64, .* each length",
        ),
        ({"groups": Packs(LENGTHS, 12), "balance": lambda lengths: 3 - lengths}, "the cost of length 4 is -1"),
    ],
)
def test_what_makes_no_sense_is_refused(words: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Loader.from_dataset(**{"dataset": Tokens(), "shuffle": True, "batch_size": 4, "balance": COSTS, **words})


def test_what_is_read_forward_is_refused() -> None:
    stream = penstock.Stream(4, range, epoch_size=8, lanes=2)
    with pytest.raises(ValueError, match="Leave balance out"):
        Loader.from_dataset(stream, batch_size=4, balance=[1] * 8)

    class Forward(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(8))

    for words in ({}, {"lanes": 2}):
        with pytest.raises(
            ValueError, match="balance needs the cost of each index of a dataset, but Forward can only be iterated"
        ):
            Loader.from_dataset(Forward(), batch_size=4, balance=[1] * 8, **words)


def test_a_graph_by_hand_is_refused_where_it_deals_no_items() -> None:
    source = Sampler(SequentialOrder(8))
    with pytest.raises(GraphError, match="balance deals single items to the ranks, which split='within' does not"):
        Sharder(Cycler(source), 0, 2, split="within", balance=[1] * 8)
    node = Batcher(Sharder(Cycler(penstock.nodes.SamplerWrapper(["a", "b", "c", "d"])), 0, 2, balance=[1] * 4), 2)
    node.reset()
    with pytest.raises(GraphError, match="balance needs dataset indices, but the sampler yields 'a'"):
        next(node)
    node.shutdown()
    for first in (
        Grouper(SequentialOrder(8), Packs([1] * 8, 2)),
        KeyGrouper(SequentialOrder(8), Buckets(keys="aabbccdd")),
    ):
        assert Sharder(Cycler(first), 0, 2, balance=[1] * 8).facts.rank_settings["balance"]


@pytest.mark.parametrize("words", [{"skip": [(4, 8)]}, {"batch_size": penstock.Ramp([(0, 2), (8, 4)])}])
def test_rounds_that_change_are_not_balanced(words):
    """Seen to fail: a skipped range was dealt nevertheless."""
    with pytest.raises(ValueError, match="balance deals rounds of one size"):
        penstock.Loader.from_dataset(list(range(32)), **{"batch_size": 4, **words}, balance=list(range(32)))
