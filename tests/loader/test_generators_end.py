"""The ``finally`` of the user's generators runs when a loader is closed in the middle of an epoch: temporary files,
cursors, locks on a server."""

from __future__ import annotations

import os
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pairwise import mostly_soak
from torch.utils.data import IterableDataset, get_worker_info

import penstock
from penstock import Loader
from penstock.nodes import Batcher, Cycler, Fetch, Mapper, Prefetcher, Sampler

if TYPE_CHECKING:
    from pathlib import Path


class Opens(IterableDataset):
    """Item i of epoch 0 is i. While it is read, there is a file in ``folder``."""

    def __init__(self, folder: Path, *, gradients: bool = True) -> None:
        self.folder = folder
        self.gradients = gradients

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        yield from opened(self.folder, worker, workers, gradients=self.gradients)


def opened(folder: Path, first: int, every: int = 1, *, gradients: bool = True) -> Any:
    path = folder / f"{os.getpid()}-{first}-{random.SystemRandom().random()}"
    path.touch()
    try:
        with torch.set_grad_enabled(gradients):
            yield from range(first, 400, every)
    finally:
        assert random.random() >= 0.0  # user code may draw anywhere
        path.unlink()


class Opener:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, shard: int) -> Any:
        return opened(self.folder, shard, 4)


def plain(folder: Path) -> dict[str, Any]:
    return {"dataset": Opens(folder)}


def with_transform(folder: Path) -> dict[str, Any]:
    return {"dataset": Opens(folder), "transform": int}


def lanes(folder: Path) -> dict[str, Any]:
    return {"dataset": Opens(folder), "lanes": 3}


def stream(folder: Path) -> dict[str, Any]:
    return {"dataset": penstock.Stream(Opens(folder), lanes=3, epoch_size=96)}


def mix(folder: Path) -> dict[str, Any]:
    data = penstock.Stream(Opens(folder), lanes=3, epoch_size=96)
    return {"dataset": penstock.Mix({"only": data}, {"only": 1}, epoch_size=96)}


def shards(folder: Path) -> dict[str, Any]:
    return {"dataset": penstock.Stream(4, Opener(folder), lanes=2, epoch_size=96)}


def counted(folder: Path) -> dict[str, Any]:
    data = penstock.Shards(4, Opener(folder), counts=[100] * 4, lanes=2)
    return {"dataset": penstock.Mix({"only": data}, {"only": 1}, epoch_size=96)}


INLINE: dict[str, Any] = {}
THREADS = {"num_workers": 2, "method": "thread"}
FORK = {"num_workers": 2, "multiprocessing_context": "fork"}
SPAWN = {"num_workers": 2, "multiprocessing_context": "spawn"}
CASES = [
    (plain, INLINE),
    (with_transform, FORK),
    (with_transform, THREADS),
]
CASES += [(kind, way) for kind in (lanes, stream, mix) for way in (INLINE, FORK, SPAWN)]
CASES += [(kind, way) for kind in (shards, counted) for way in (INLINE, THREADS, FORK, SPAWN)]
USUAL = [case for case in CASES if case[1] is not SPAWN]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), mostly_soak(CASES, USUAL))
def test_they_end_when_the_loader_is_closed(kind: Any, way: dict[str, Any], tmp_path: Path) -> None:
    """In this process and in workers, while the loader and its dataset live on. Seen to fail: a generator that is read
    here ended when the loader was deleted, one in a worker process never did.
    """
    words = kind(tmp_path)
    loader = Loader.from_dataset(**words, batch_size=2, **way)
    for _ in loader:
        break
    assert [*tmp_path.iterdir()]
    state = loader.state_dict()
    loader.close()
    assert [*tmp_path.iterdir()] == []
    assert loader.state_dict() == state


def test_what_a_generator_does_as_it_ends_does_not_reach_the_loop(tmp_path: Path) -> None:
    """Its draws, and the gradient mode that it restores. Seen to fail: gradients were on after close()."""
    with torch.no_grad():
        loader = Loader.from_dataset(Opens(tmp_path, gradients=False), batch_size=2)
        next(iter(loader))
        random.seed(1)
        loader.close()
        assert not torch.is_grad_enabled()
        assert random.random() == random.Random(1).random()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("counts", [None, [40, 40]])
def test_a_thread_stuck_in_a_shard_does_not_hold_up_close(counts: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A reader thread, which waits in the user's code. Seen to fail: close() waited as long."""
    inside, go_on = threading.Event(), threading.Event()

    def opener(shard: int) -> Any:
        yield from range(20)
        inside.set()
        assert go_on.wait(60)
        yield from range(20)

    data: Any = (
        penstock.Stream(2, opener, lanes=2, epoch_size=80, bookmarks=False)
        if counts is None
        else penstock.Shards(2, opener, counts=counts, lanes=2)
    )
    batches = Batcher(Cycler(Sampler(data.order(shuffle=False, seed=0))), 4)
    loader = Loader(Prefetcher(Mapper(batches, Fetch(data)), 2))
    for _ in zip(range(9), loader, strict=False):
        pass
    assert inside.wait(60)
    loader.close(timeout=0.2)
    go_on.set()
    assert "penstock-prefetch is still busy" in caplog.text
