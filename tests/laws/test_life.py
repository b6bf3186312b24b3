"""The life law: workers live as long as the loader, and not a moment longer."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from worker_pids import worker_pids

from penstock import Loader
from penstock.testing import Tagged


class Who(Tagged):
    """Returns the process and thread that loaded each sample."""

    def __getitem__(self, index):
        return torch.tensor([super().__getitem__(index), os.getpid(), threading.get_ident()])


METHODS = [
    {"method": "thread"},
    {"method": "process", "multiprocessing_context": "fork"},
    pytest.param({"method": "process", "multiprocessing_context": "forkserver"}, marks=pytest.mark.soak),
    pytest.param({"method": "process", "multiprocessing_context": "spawn"}, marks=pytest.mark.soak),
]


@pytest.mark.parametrize("options", METHODS)
def test_the_same_workers_across_epochs_jumps_and_loads(options):
    """20 epochs, an abandoned one, set_epoch, load_state_dict: seen to fail when reset rebuilt the pool."""
    with Loader.from_dataset(Who(6), batch_size=1, num_workers=2, **options) as loader:

        def workers(batches):
            return {(int(batch[0, 1]), int(batch[0, 2])) for batch in batches}

        def engaged():
            threads = {thread for thread in threading.enumerate() if thread.name.startswith("penstock-map")}
            return threads or {*worker_pids()}

        seen = workers(loader)
        first = engaged()
        for _ in range(20):
            seen |= workers(loader)
        for _ in loader:
            state = loader.state_dict()
            break
        seen |= workers(loader)
        loader.set_epoch(3)
        seen |= workers(loader)
        loader.load_state_dict(state)
        seen |= workers(loader)
        assert len(first) == 2
        assert engaged() == first
        if options["method"] == "thread":
            assert seen <= {(os.getpid(), thread.ident) for thread in first}
        else:
            assert {pid for pid, _ in seen} <= first


@pytest.mark.parametrize("options", METHODS)
def test_an_abandoned_loader_leaves_nothing(options):
    """Without close(). The leak fixture checks after the test."""
    loader = Loader.from_dataset(Who(6), batch_size=1, num_workers=2, **options)
    next(iter(loader))
    del loader
    gc.collect()


@pytest.mark.parametrize("options", METHODS[:2])
def test_an_exception_in_the_loop_leaves_nothing(options):
    with pytest.raises(RuntimeError, match="out of memory"):
        for _ in Loader.from_dataset(Who(6), batch_size=1, num_workers=2, **options):
            raise RuntimeError("out of memory")
    gc.collect()


@pytest.mark.parametrize("options", METHODS[:2])
def test_close_ends_the_workers_of_a_loader_that_is_kept(options):
    """Seen to fail: a close that left them to the garbage collector."""
    loader = Loader.from_dataset(Who(6), batch_size=6, num_workers=2, **options)
    pids = {int(pid) for pid in next(iter(loader))[:, 1]} - {os.getpid()}
    loader.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")] == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert loader.is_last
