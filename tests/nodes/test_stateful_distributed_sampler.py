"""torchdata's samplers, which only count what they yielded, are taken over like torch's own."""

from __future__ import annotations

import pytest
import torch.utils.data
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler, StatefulDistributedSampler

from penstock import GraphError, Loader

N = 11


def sharded(rank, **options):
    return StatefulDistributedSampler(range(N), num_replicas=2, rank=rank, seed=3, **options)


@pytest.mark.parametrize("batches", [None, torch.utils.data.BatchSampler, BatchSampler])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}])
def test_is_taken_over_with_its_order_in_each_epoch(batches, rank, options):
    """Seen to fail: from_dataset refused it, with the advice to pass it to from_dataset."""
    words = (
        {"sampler": sharded(rank, **options), "batch_size": 2}
        if batches is None
        else {"batch_sampler": batches(sharded(rank, **options), 2, False)}
    )
    expected = []
    for epoch in range(3):
        sampler = sharded(rank, **options)
        sampler.set_epoch(epoch)
        expected.append([batch.tolist() for batch in DataLoader(range(N), 2, sampler=sampler)])
    with Loader.from_dataset(range(N), **words) as loader:
        assert [[batch.tolist() for batch in loader] for _ in range(3)] == expected


def test_with_a_loaded_state_is_refused():
    """The loader would ignore that state, and load the same samples again."""
    sampler = sharded(0)
    sampler.load_state_dict({"yielded": 2})
    with pytest.raises(GraphError, match="has loaded a state of its own.*Load the loader's"):
        Loader.from_dataset(range(N), sampler=sampler)
