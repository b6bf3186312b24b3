"""The front door: DataLoader's words and meanings, and what is refused at once."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)
from torchdata.stateful_dataloader.sampler import BatchSampler as TheirBatchSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import penstock
from penstock import Loader
from penstock.testing import Tagged

DATA = list(range(11))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def shown(batches) -> list:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 4, "sampler": SequentialSampler(DATA)},
        {"batch_size": 4, "sampler": [3, 1, 2, 2, 9]},
        {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
        {"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, True)},
        {"batch_size": 3, "num_workers": 2, "prefetch_factor": 3, "timeout": 20, "persistent_workers": True},
        {"batch_size": 3, "collate_fn": tuple},
    ],
)
def test_the_same_batches_as_a_dataloader(options):
    with Loader.from_dataset(DATA, **options) as ours:
        theirs = DataLoader(DATA, **options)
        assert shown(ours) == shown(theirs)
        assert len(ours) == len(theirs)


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}])
def test_an_iterable_dataset_is_batched_and_cycled(options):
    theirs = shown(DataLoader(Stream(), **options))
    with Loader.from_dataset(Stream(), **options) as ours:
        assert shown(ours) == shown(ours) == theirs
        with pytest.raises(TypeError):
            len(ours)


def test_shuffling_visits_everything_anew_each_epoch():
    with Loader.from_dataset(DATA, batch_size=4, shuffle=True) as loader:
        epochs = [[value for batch in loader for value in batch.tolist()] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [DATA] * 3
    assert len(set(map(tuple, epochs))) == 3


def test_a_generators_seed_is_the_seed_and_nothing_is_drawn_from_it():
    generator = torch.Generator().manual_seed(42)
    before = generator.get_state()
    with (
        Loader.from_dataset(DATA, shuffle=True, generator=generator) as one,
        Loader.from_dataset(DATA, shuffle=True, seed=42) as other,
    ):
        assert list(map(int, one)) == list(map(int, other))
    assert generator.get_state().equal(before)


# A DistributedSampler is taken over: sharding it again would lose half of the data in every script that is ported.


@pytest.mark.parametrize(("tail", "rest"), [(None, [6, 0]), ("exact", [6]), ("drop", [])])
def test_what_a_distributed_sampler_does_at_the_end_is_not_what_the_user_has_said(tail, rest):
    """Seen to fail: its ``drop_last`` before ``tail``, which was left out without a word."""
    for rank, first in enumerate([[0, 2, 4], [1, 3, 5]]):
        sampler = DistributedSampler(range(7), 2, rank, shuffle=False)
        with Loader.from_dataset(range(7), 1, sampler=sampler, rank=rank, world_size=2, tail=tail) as loader:
            assert [int(batch) for batch in loader] == [*first, *rest[rank : rank + 1]]


@pytest.mark.parametrize("kind", [DistributedSampler, StatefulDistributedSampler])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("nested", [None, BatchSampler, TheirBatchSampler])
def test_a_distributed_sampler_is_taken_over(kind, shuffle, drop_last, nested):
    """Rank by rank, over three epochs. Seen to fail without taken_over: every rank saw half of its half; torchdata's
    was refused."""
    for rank in range(2):
        sampler = kind(DATA, 2, rank, shuffle=shuffle, seed=3, drop_last=drop_last)
        options = {"batch_sampler": nested(sampler, 3, True)} if nested else {"sampler": sampler, "batch_size": 3}
        theirs = DataLoader(DATA, **options)
        with Loader.from_dataset(DATA, **options, rank=rank, world_size=2) as ours:
            for epoch in range(3):
                sampler.set_epoch(epoch)
                expected = [batch.tolist() for batch in theirs]  # first, because ours tells it the next epoch
                assert [batch.tolist() for batch in ours] == expected


def test_a_sampler_of_torchdatas_with_a_loaded_state_is_refused():
    """The loader would ignore that state, and load the same samples again."""
    sampler = StatefulDistributedSampler(DATA, 2, 0)
    sampler.load_state_dict({"yielded": 2})
    with pytest.raises(penstock.GraphError, match="has loaded its own state.*Load the loader's"):
        Loader.from_dataset(DATA, sampler=sampler)


def test_a_distributed_sampler_of_one_rank_is_dealt(monkeypatch):
    """It has the indices of all. Seen to fail: each of two ranks loaded everything, and check_ranks passed."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        theirs = DataLoader(DATA, 3, sampler=DistributedSampler(DATA, 2, rank, seed=3))
        with Loader.from_dataset(DATA, 3, sampler=DistributedSampler(DATA, 1, 0, seed=3)) as ours:
            assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]


def test_any_other_sampler_that_shards_by_itself_is_refused():
    class Own(torch.utils.data.Sampler):
        def __init__(self):
            self.rank, self.num_replicas = 0, 2

        def __iter__(self):
            return iter(range(0, 11, 2))

    for options in ({"sampler": Own()}, {"batch_sampler": BatchSampler(Own(), 2, False)}):
        with pytest.raises(penstock.GraphError, match=r"the loader would .*with num_replicas=1.*order=.*tail='exact'"):
            Loader.from_dataset(DATA, **options)


class Repeated(DistributedSampler):
    """Three times every index of a shuffled epoch, dealt to the ranks, until each has as many as without repeats."""

    def __iter__(self):
        n = len(self.dataset)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.epoch)).repeat_interleave(3)
        return iter(order[self.rank : n : self.num_replicas].tolist())


def test_a_sampler_that_shards_for_one_rank_is_dealt_to_all():
    """Seen to fail: it was refused, with the advice to pass exactly that. Each rank gets the share that it had before,
    epoch by epoch."""
    for rank in range(2):
        share = Repeated(range(12), 2, rank)
        theirs = DataLoader(range(12), 2, sampler=share)
        with Loader.from_dataset(range(12), 2, sampler=Repeated(range(12), 1, 0), rank=rank, world_size=2) as ours:
            for epoch in range(3):
                share.set_epoch(epoch)
                assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]
    batches = BatchSampler(Repeated(range(12), 1, 0), 4, False)
    with Loader.from_dataset(range(12), batch_sampler=batches, rank=0, world_size=1) as ours:
        expected = list(batches)
        assert [batch.tolist() for batch in ours] == expected


# The graph.


def rooms(loader) -> list[str]:
    return [type(node).__name__ for node in loader.root.chain()][::-1]


def test_the_canonical_graph_has_no_node_that_does_nothing():
    assert rooms(Loader.from_dataset(DATA)) == ["Sampler", "Cycler", "Sharder", "Batcher", "ParallelMapper"]
    assert rooms(Loader.from_dataset(DATA, batch_size=None)) == ["Sampler", "Cycler", "Sharder", "ParallelMapper"]
    assert rooms(Loader.from_dataset(DATA, batch_sampler=[[1]])) == [
        "SamplerWrapper",
        "Cycler",
        "Sharder",
        "ParallelMapper",
    ]
    assert rooms(Loader.from_dataset(Stream())) == ["IterableSource", "Cycler", "Sharder", "Batcher", "ParallelMapper"]


# Bad input: what came, why not, what to do.


class NoLength:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    [
        (NoLength(), {}, TypeError, "NoLength has no length.*__len__"),
        (
            DATA,
            {"batch_sampler": [[1]], "batch_size": 4},
            ValueError,
            "batch_sampler and batch_size=4.*exclude each other",
        ),
        (DATA, {"batch_sampler": [[1]], "drop_last": True}, ValueError, "exclude each other"),
        (
            DATA,
            {"batch_sampler": [[1]], "shuffle": True},
            ValueError,
            "shuffle=True and batch_sampler exclude each other",
        ),
        (DATA, {"sampler": [1], "shuffle": True}, ValueError, "shuffle=True and sampler exclude"),
        (DATA, {"sampler": [1], "order": penstock.orders.SequentialOrder(3)}, ValueError, "sampler and order exclude"),
        (DATA, {"batch_size": None, "drop_last": True}, ValueError, "drop_last=True needs batches"),
        (DATA, {"drop_last": True, "tail": "exact"}, ValueError, "tail='exact' promises all"),
        (DATA, {"infinite": True, "tail": "exact"}, ValueError, "an infinite loader never ends"),
        (DATA, {"split": "within"}, ValueError, "there is no batch_sampler"),
        (DATA, {"method": "fork"}, ValueError, "method='fork'"),
        (DATA, {"seed": -1, "shuffle": True}, ValueError, "seed"),
        (DATA, {"seed_global_rngs": "never"}, ValueError, "must be True, False or 'always'"),
        (DATA, {"order": [1, 2]}, penstock.GraphError, "an order has"),
        (Stream(), {"shuffle": True}, ValueError, "shuffle=True needs a dataset that is read by index"),
        (Stream(), {"sampler": [1]}, ValueError, "sampler needs a dataset"),
    ],
)
def test_bad_input_is_refused_when_built(dataset, options, error, words):
    """Numbers: `test_dataloader_words` and `test_sharder`."""
    with pytest.raises(error, match=words):
        Loader.from_dataset(dataset, **options)


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.slow
def test_a_dataset_that_cannot_be_pickled_is_refused_and_nothing_is_left(context):
    class Local(Tagged):
        pass

    with Loader.from_dataset(Local(5), num_workers=1, multiprocessing_context=context) as loader:
        for _ in range(2):
            with pytest.raises(TypeError, match=r'pickled.*method="thread"'):
                next(iter(loader))
        assert len(loader) == 5
