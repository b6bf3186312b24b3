"""The laws of ``split="batches"``: each global batch keeps its samples, their addresses and random numbers, and each
rank as many; each rank has some in a row; and a state does not tell it from ``split="items"``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from dealing import TAILS, dealt
from pairwise import pairwise
from torch.utils.data import BatchSampler, IterableDataset, Sampler

import penstock
from penstock import Buckets, GraphError, Loader, Mix, Packs
from penstock.nodes import Batcher, Cycler, Sharder
from penstock.nodes import Sampler as Ordered
from penstock.orders import SequentialOrder, TorchOrder
from penstock.testing import Tagged, assert_resumes_everywhere

N = 34


class Drawn:
    """A sample draws."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = penstock.sample()
        return torch.tensor([1000 * sample.epoch + index, sample.position, int(sample.rng.integers(1000))])


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(N)


class Repeated(Sampler):
    """Each prompt four times in a row, as for GRPO."""

    def __len__(self) -> int:
        return 4 * 12

    def __iter__(self) -> Any:
        for prompt in torch.randperm(12).tolist():
            yield from [prompt] * 4


def fleet(world_size: int, **words: Any) -> list[Loader[Any]]:
    return [
        Loader.from_dataset(**{"dataset": Drawn(), "rank": rank, "world_size": world_size, **words})
        for rank in range(world_size)
    ]


def rounds(loaders: list[Loader[Any]], take: int | None = None) -> list[list[list[Any]]]:
    """For each step, the batch of each rank as a list. A rank that has run out gives []."""
    iterators, got = [iter(loader) for loader in loaders], []
    while take is None or len(got) < take:
        batches = [next(one, None) for one in iterators]
        if all(batch is None for batch in batches):
            break
        got.append([[] if batch is None else batch.tolist() for batch in batches])
    return got


def joined(step: list[list[Any]]) -> list[Any]:
    return [sample for batch in step for sample in batch]


SIZES = [
    *pairwise([1, 2, 3, 4], [1, 4, 7], [False, True], list(TAILS), [0, 3]),
    (3, 4, False, "exact", 0),
    (4, 7, False, "exact", 0),
]


@pytest.mark.parametrize(("world_size", "batch_size", "drop_last", "tail", "begin"), SIZES)
def test_each_rank_has_samples_in_a_row_and_each_round_those_of_items(world_size, batch_size, drop_last, tail, begin):
    """What gather returns is the order of the data, from any position on.

    Seen to fail: with the faults of ``part`` and of the padding that stand in faults.txt.
    """
    drop_last = drop_last and tail != "exact"
    words: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last, "tail": tail}
    with ExitStack() as stack:
        one, items, batches = (
            [stack.enter_context(loader) for loader in fleet(ranks, split=split, **words)]
            for ranks, split in ((1, None), (world_size, "items"), (world_size, "batches"))
        )
        state = None
        if begin:
            rounds(one, begin)
            state = one[0].state_dict()
            for loader in (*items, *batches):
                loader.load_state_dict(state)
        cards, in_turn = rounds(items), rounds(batches)
        assert [len(loader) for loader in batches] == [len(loader) for loader in items]
        assert [[len(batch) for batch in step] for step in in_turn] == [
            [len(batch) for batch in step] for step in cards
        ]
        assert [sorted(joined(step)) for step in in_turn] == [sorted(joined(step)) for step in cards]
        size, places = world_size * batch_size, dealt(N, world_size, tail, min(N, begin * batch_size))
        if drop_last:
            places = places[: len(places) // size * size]
        assert [place for step in in_turn for _, place, _ in joined(step)] == places
        assert [sample for step in in_turn for sample, _, _ in joined(step)] == [place % N for place in places]
        for here, there in zip(items, batches, strict=True):
            assert here.state_dict() == there.state_dict()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_of_either_loads_in_either_on_other_ranks(shuffle):
    """Chains over 1, 2, 4 and 3 ranks: nothing is lost, nothing comes twice, and no state tells who wrote it.

    Seen to fail: with ``split`` in the settings of a state.
    """
    words = {"batch_size": 2, "shuffle": shuffle, "tail": "drop", "infinite": True, "seed": 3}
    with fleet(1, **words)[0] as alone:
        whole = [sample for _, batch in zip(range(60), alone, strict=False) for sample in batch.tolist()]
    for first in ("items", "batches"):
        got, state, split = [], None, first
        for world_size, steps in ((1, 2), (2, 3), (4, 1), (1, 3), (2, 1), (3, 2)):
            loaders = fleet(world_size, split=split, **words)
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            for step in rounds(loaders, steps):
                got += joined(step) if split == "batches" else [s for row in zip(*step, strict=True) for s in row]
            states = [loader.state_dict() for loader in loaders]
            assert all(one == states[0] for one in states)
            state, split = states[0], "items" if split == "batches" else "batches"
            for loader in loaders:
                loader.close()
        assert len(got) > N
        assert got == whole[: len(got)]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_it_resumes_everywhere(tail, rank):
    """Also by hand. A rank that ends early with ``exact`` is outside the law."""
    if tail == "exact" and rank:
        return
    words = {"split": "batches", "tail": tail, "rank": rank, "world_size": 3}
    assert_resumes_everywhere(lambda: Loader.from_dataset(Tagged(N), 4, True, **words), steps=9)
    assert_resumes_everywhere(
        lambda: Batcher(Sharder(Cycler(Ordered(SequentialOrder(N))), rank, 3, split="batches", tail=tail), 4), steps=9
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_groups_of_a_sampler_stay_whole(world_size):
    """GRPO looks at the rewards of all ranks as ``(-1, 4)``. Dealt by items, groups mix prompts."""
    mixed = {}
    for split in ("items", "batches"):
        loaders = fleet(world_size, dataset=range(12), batch_size=8 // world_size, sampler=Repeated(), split=split)
        steps = [torch.tensor(joined(step)).view(-1, 4) for step in rounds(loaders)]
        mixed[split] = any(bool((groups != groups[:, :1]).any()) for groups in steps)
        for loader in loaders:
            loader.close()
        assert len(steps) == 6
    assert mixed == {"items": world_size > 1, "batches": False}


def rows(loaders: list[Loader[Any]]) -> list[list[Any]]:
    got = [[batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader] for loader in loaders]
    for loader in loaders:
        loader.close()
    return got


LENGTHS = np.random.default_rng(7).integers(1, 9, N)
DOCUMENTS = [np.full(length, index) for index, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    ("words", "in_a_row"),
    [
        ({"sampler": list(range(N))}, True),
        ({"order": TorchOrder(N, 5)}, True),
        ({"dataset": Stream(), "tail": "drop"}, True),
        ({"dataset": Stream(), "tail": "exact"}, True),
        ({"dataset": Mix({"a": range(10), "b": range(24)}, {"a": 1, "b": 2})}, True),
        ({"batch_size": None, "tail": "drop"}, False),
        ({"batch_size": 1, "batch_sampler": BatchSampler(range(N), 3, False), "tail": "drop"}, False),
        ({"batch_size": 1, "groups": Buckets(LENGTHS, 24, block=16), "dataset": DOCUMENTS, "collate_fn": list}, False),
    ],
    ids=["sampler", "order", "stream", "stream-exact", "mix", "samples", "batch-sampler", "buckets"],
)
def test_what_else_is_dealt(words, in_a_row):
    """Single samples and whole batches of a sampler are what ``"items"`` deals."""
    words = {"batch_size": 3, "dataset": range(N), **words}
    if "collate_fn" in words:
        words["collate_fn"] = lambda documents: [int(document[0]) for document in documents]
    (alone,) = rows(fleet(1, **{**words, "split": "batches"}))
    got = rows(fleet(2, **words, split="batches"))
    if in_a_row:
        assert [sample for step in zip(*got, strict=False) for batch in step for sample in batch][:32] == [
            sample for batch in alone for sample in batch
        ][:32]
    else:
        cards = {**words, "split": None if "dataset" not in words else "items"}
        assert got == rows(fleet(2, **cards))
        assert [batch for step in zip(*got, strict=True) for batch in step] == alone[: len(alone) // 2 * 2]


def test_packs_are_dealt_in_a_row():
    words = {"dataset": DOCUMENTS, "batch_size": 2, "groups": Packs(LENGTHS, 16, block=16)}
    tokens = [[batch["tokens"].tolist() for batch in loader] for loader in fleet(2, **words, split="batches")]
    alone = [batch["tokens"].tolist() for loader in fleet(1, **words) for batch in loader]
    steps = min(map(len, tokens)) - 1
    assert [pack for step in zip(*tokens, strict=True) for batch in step for pack in batch][: 4 * steps] == [
        pack for batch in alone for pack in batch
    ][: 4 * steps]


def records(shard: int) -> Any:
    yield from range(100 * shard, 100 * shard + 8)


def test_what_is_refused():
    """With a remedy that works."""
    shards = penstock.Shards(4, records, counts=[8] * 4, lanes=2)
    mixed = Mix({"a": penstock.Shards(4, records, counts=[8] * 4, lanes=2), "b": range(9)}, {"a": 1, "b": 1})
    for dataset in (shards, mixed):
        with pytest.raises(ValueError, match=r"read all shards.*Use split='items'"):
            Loader.from_dataset(dataset, 2, split="batches", world_size=2, rank=0)
        Loader.from_dataset(dataset, 2, split="items", world_size=2, rank=0)
    with pytest.raises(ValueError, match="split='batches' already does"):
        Loader.from_dataset(range(8), 2, split="batches", balance=range(8))
    with pytest.raises(GraphError, match="split='batches' does not"):
        Sharder(Cycler(Ordered(SequentialOrder(8))), split="batches", balance=range(8))


def test_a_rank_dealt_otherwise_is_found():
    """Ranks that deal differently would lose samples; `check_ranks` compares how they deal."""
    with Loader.from_dataset(range(8), 2, split="batches") as one, Loader.from_dataset(range(8), 2) as other:
        assert one.root.source.facts.rank_settings != other.root.source.facts.rank_settings
