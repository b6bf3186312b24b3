"""Corners that a hostile tester found: each was a lost sample, a hang, a false number or a dead loader once."""

from __future__ import annotations

import json
import threading
from itertools import islice

import pytest
from children import in_a_child
from epochs import B, N, epoch, loader, resumed, values
from torch.utils.data import DistributedSampler, RandomSampler

import penstock
from penstock import Loader
from penstock.nodes import Batcher, Cycler, Fetch, ParallelMapper, Prefetcher, Sampler, SamplerWrapper
from penstock.orders import SequentialOrder, TorchOrder
from penstock.testing import Tagged


@pytest.mark.parametrize(
    "source", [lambda: Sampler(TorchOrder(200, 1)), lambda: SamplerWrapper(RandomSampler(range(200)))]
)
def test_jumps_under_a_reader_thread_over_a_planned_source(source):
    """Seen to fail in half of all runs when an interrupt that came while nobody waited was kept for the next one who
    did."""
    for _ in range(10):
        with Loader(Prefetcher(ParallelMapper(Batcher(Cycler(source()), 10), Fetch(range(200)), 2))) as batches:
            for e in (0, 3, 5, 7):
                batches.set_epoch(e)
                next(iter(batches))
                assert batches.epoch == e


class Slow(Tagged):
    """Item 0 waits for its gate."""

    gate = threading.Event()

    def __getitem__(self, index):
        if index == 0:
            assert self.gate.wait(100)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("in_order", [True, False])
def test_states_out_of_order_load_into_a_smaller_window_and_are_saved_again(workers, in_order):
    """Seen to fail twice: 'delivered' of 0 was refused, and delivered items filled the window of a loader with fewer
    workers."""
    Slow.gate = threading.Event()
    with Loader.from_dataset(
        Slow(40), batch_size=1, num_workers=4, method="thread", in_order=False, prefetch_factor=5
    ) as batches:
        first = [int(batch) for batch in islice(batches, 15)]
        state = batches.state_dict()
        Slow.gate.set()
    assert len(json.loads(state["penstock"])["state"]["delivered"]) == 15
    rest = []
    for _ in range(25):
        with Loader.from_dataset(
            Slow(40), batch_size=1, num_workers=workers, method="thread", in_order=in_order
        ) as batches:
            batches.load_state_dict(state)
            rest += [int(batch) for batch in islice(batches, 1)]
            state = batches.state_dict()
    assert sorted(first + rest) == list(range(40))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [2, 4])
def test_a_loaded_state_whose_first_batch_failed_is_still_loaded(workers, stop):
    """Seen to fail when the jump counted as use of the state: the rest of the epoch was lost without a word."""
    fail = [False]

    class Moody(Tagged):
        def __getitem__(self, index):
            if fail[0]:
                raise OSError("disk")
            return super().__getitem__(index)

    with Loader.from_dataset(Moody(N), batch_size=B, num_workers=workers, method="thread") as batches:
        list(islice(batches, stop)) if stop == 2 else list(batches)
        state = batches.state_dict()
        fail[0] = True
        batches.load_state_dict(state)
        with pytest.raises(OSError, match="disk"):
            next(iter(batches))
        fail[0] = False
        assert stop == 4 or batches.state_dict() == state
        assert values(batches) == (epoch(0, 2) if stop == 2 else epoch(1))


@pytest.mark.parametrize("restart", [None, True, False])
@pytest.mark.parametrize("asked", [None, 0])
def test_an_endless_loader_goes_on_behind_a_complete_state_either_way(restart, asked):
    with loader() as batches:
        list(islice(batches, 4))
        state = batches.state_dict()
    with resumed(state, infinite=True, restart_on_stop_iteration=restart) as batches:
        if asked is not None:
            batches.set_epoch(asked)
        assert values(islice(batches, 5)) == [*epoch(1), *epoch(2)[:1]]


@pytest.mark.parametrize(
    "build",
    [
        lambda: loader(num_workers=2, method="thread"),
        lambda: loader(num_workers=2),
        pytest.param(lambda: loader(num_workers=2, multiprocessing_context="forkserver"), marks=pytest.mark.soak),
        lambda: Loader(Prefetcher(ParallelMapper(Batcher(Cycler(Sampler(TorchOrder(N))), B), Fetch(Tagged(N)), 0))),
    ],
)
def test_a_forked_child_is_told_and_does_not_hang(build):
    """Seen to hang when only worker processes knew whose they were. A loader that was not started may be used in a
    child. Seen to fail: with a fork server that was the parent's, for which multiprocessing waits.
    """
    with build() as started, build() as fresh:
        iterator = iter(started)
        next(iterator)

        def in_the_child(_):
            for use in (lambda: next(iterator), lambda: next(iter(started))):
                with pytest.raises(penstock.ClosedError, match="is a fork"):
                    use()
            started.close()
            assert len(values(fresh)) == 4
            fresh.close()

        in_a_child(in_the_child)()
        assert len(values(iterator)) == 3


def test_an_empty_batch_of_a_batch_sampler():
    with Loader.from_dataset(Tagged(5), batch_sampler=[[0], [], [1, 2]], collate_fn=list) as batches:
        assert list(batches) == [[0], [], [1, 2]]
    with Loader.from_dataset(Tagged(5), batch_sampler=[[0], [], [1, 2]]) as batches:
        iterator = iter(batches)
        next(iterator)
        with pytest.raises(IndexError) as raised:
            next(iterator)
        assert raised.value.__notes__[0] == "while loading an empty batch (epoch 0)"
        assert next(iterator).tolist() == [1, 2]


def test_an_environment_that_is_no_number_says_so(monkeypatch):
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with loader() as batches, pytest.raises(ValueError, match="RANK='x' and WORLD_SIZE='2'"):
        next(iter(batches))


def test_a_distributed_sampler_that_was_moved_begins_there():
    """Seen to fail: the loader began at epoch 0, with a warning."""
    sampler = DistributedSampler(range(N), 2, 0)
    sampler.set_epoch(4)
    with loader(sampler=sampler) as moved, loader(sampler=DistributedSampler(range(N), 2, 0)) as asked:
        asked.set_epoch(4)
        assert [batch.tolist() for batch in moved] == [batch.tolist() for batch in asked]
        assert moved.epoch == 5


def test_a_signal_that_closes_a_loader_in_the_middle_of_next_is_told_so():
    """Its handler may run wherever the main thread is. Seen to fail: a GraphError of a StopIteration, which the graph
    gives once it is closed."""

    class Signalled(penstock.nodes.Node):
        def next(self):
            loader.close()
            raise StopIteration

    loader = Loader(Signalled(Batcher(Cycler(Sampler(SequentialOrder(8))), 2)))
    with pytest.raises(penstock.ClosedError, match="this loader was closed"):
        next(iter(loader))
