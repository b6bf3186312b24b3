"""A loader inside a DataLoader, where a trainer's habits may put it."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, IterableDataset

from penstock import GraphError, Loader
from penstock.testing import Tagged


class Inside(IterableDataset):
    """A loader inside a dataset, where it does not belong."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 1])
def test_a_loader_inside_a_dataloader_is_told_at_once(rank: int | None) -> None:
    """Each worker would deliver every batch. Seen to fail: 2 workers delivered 48 samples of 24."""
    with Loader.from_dataset(Tagged(24), batch_size=4, rank=rank, world_size=None if rank is None else 2) as loader:
        batches = iter(DataLoader(Inside(loader), batch_size=None, num_workers=2))
        said = ""
        for _ in range(2):  # On two ranks, one of the workers has the rank's own number, and can tell nothing.
            try:
                next(batches)
            except GraphError as exc:
                said += str(exc)
        batches._shutdown_workers()
        assert "read inside a DataLoader, whose 2 workers would each" in said
        assert len(list(DataLoader(Inside(loader), batch_size=None))) == len(loader)
        with pytest.raises(TypeError, match="not subscriptable"):
            next(iter(DataLoader(loader)))
