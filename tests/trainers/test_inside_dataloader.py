"""A loader inside a DataLoader, where a trainer's habits may put it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from penstock import GraphError, Loader
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable


class Inside(IterableDataset):
    """A loader inside a dataset, where it does not belong."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


class InLanes(IterableDataset):
    """A loader of each lane, with the arguments that ``words`` makes of the worker info."""

    def __init__(self, words: Callable[[Any], dict[str, int]]) -> None:
        self.words = words

    def __iter__(self):
        with Loader.from_dataset(Tagged(24), batch_size=None, **self.words(get_worker_info())) as loader:
            yield from map(int, loader)


def whole(info: Any) -> dict[str, int]:
    return {}


def share(info: Any) -> dict[str, int]:
    return {"rank": info.id, "world_size": info.num_workers}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_inside_a_lane_is_told_of_lanes(workers: int) -> None:
    """And what it is told works. Seen to fail: it was "inside a DataLoader"."""
    with (
        Loader.from_dataset(InLanes(whole), batch_size=None, lanes=2, num_workers=workers) as loader,
        pytest.raises(GraphError, match=r"in each of the 2 lanes of another one.*rank=info.id"),
    ):
        list(loader)
    with Loader.from_dataset(InLanes(share), batch_size=None, lanes=2, num_workers=workers) as loader:
        assert [*loader] == [*range(24)]


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
