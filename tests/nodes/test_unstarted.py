"""A graph that was never started can be pickled, copied, sent to another process and forked. A started one refuses, and
says what to do instead."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, TensorDataset

from penstock import Buckets, ClosedError, nodes, sample
from penstock._memory.devices import can_pin
from penstock._nodes.index_node import index_of, items_in, left_at
from penstock.nodes import (
    Batcher,
    Cycler,
    EndOfEpoch,
    Fetch,
    Grouper,
    IterableSource,
    KeyGrouper,
    Mapper,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    Sampler,
    SamplerWrapper,
    Sharder,
    ToDevice,
)
from penstock.orders import ShuffledOrder, TorchOrder
from penstock.testing import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.nodes import Node

N = 12


class Drawing:
    """Each sample draws."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(2, generator=sample().torch_generator)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(N))


class Hidden:
    """Draws from ``random``, so a copy of it is read in the thread of the graph."""

    def __iter__(self) -> Any:
        import random

        return iter(random.sample(range(N), N))

    def __len__(self) -> int:
        return N


def skipped(exc: Exception, index: Any, epoch: int, position: int) -> Any:
    raise exc


def indices() -> Node[Any]:
    return Batcher(Sharder(Cycler(Sampler(ShuffledOrder(N, seed=3)))), 4)


def loaded(workers: int = 0, **options: Any) -> Node[Any]:
    return ParallelMapper(indices(), Fetch(Drawing()), workers, seed=5, **options)


INDEX_LEVEL: dict[str, Callable[[], Node[Any]]] = {
    "TorchOrder": lambda: Sampler(TorchOrder(N, seed=3)),
    "SamplerWrapper": lambda: SamplerWrapper(RandomSampler(range(N)), seed=3),
    "SamplerWrapper, batches": lambda: SamplerWrapper(
        BatchSampler(RandomSampler(range(N)), 5, drop_last=False), seed=3
    ),
    "SamplerWrapper, helper": lambda: SamplerWrapper(Hidden(), seed=3),
    "Grouper": lambda: Grouper(ShuffledOrder(N, seed=3), Buckets([1 + k % 5 for k in range(N)], 10, count=True)),
    "KeyGrouper": lambda: KeyGrouper(ShuffledOrder(N, seed=3), Buckets(keys="aabbbcccccca", batch_size=2)),
    "IterableSource": lambda: IterableSource(Stream(), seed=3),
    "Batcher": indices,
}
DATA_LEVEL: dict[str, Callable[[], Node[Any]]] = {
    "Mapper, Fetch": lambda: Mapper(indices(), Fetch(Drawing()), seed=5),
    "inline": lambda: loaded(on_error=skipped, max_errors=2),
    "arrays": lambda: ParallelMapper(indices(), Fetch(TensorDataset(torch.arange(N))), 0),
    "threads": lambda: loaded(2),
    "processes": lambda: loaded(2, method="process"),
    "Prefetcher": lambda: Prefetcher(loaded(2)),
    "ToDevice, cpu": lambda: ToDevice(loaded(2), "cpu"),
}
accelerated = (pytest.mark.gpu, pytest.mark.skipif(not can_pin(), reason="no accelerator on this machine"))
GRAPHS = [
    *(pytest.param(build, id=name) for name, build in (INDEX_LEVEL | DATA_LEVEL).items()),
    pytest.param(lambda: PinMemory(loaded(2)), id="PinMemory", marks=accelerated),
    pytest.param(
        lambda: ToDevice(loaded(2), torch.accelerator.current_accelerator()), id="ToDevice", marks=accelerated
    ),
]


def items(node: Node[Any], n: int = 9) -> list[Any]:
    """The first items, as plain values. Shuts the node down."""
    try:
        return [plain(item) for item in islice(node, n)]
    finally:
        node.shutdown()


def test_every_node_is_in_one_of_the_graphs():
    """Seen to fail: `Grouper` was in none."""
    listed = {type(node) for graph in GRAPHS if not graph.marks for node in graph.values[0]().chain()} | {PinMemory}
    public = [
        value
        for value in (getattr(nodes, name) for name in nodes.__all__)
        if isinstance(value, type) and issubclass(value, nodes.Node)
    ]
    assert {*public} - {nodes.Node, nodes.IndexNode, nodes.FirstNode} - listed == set()


@pytest.mark.parametrize("build", GRAPHS)
def test_a_copy_of_a_graph_that_was_never_started_gives_the_same_items(build):
    """Seen to fail for every node with its own workers or memory: locks, threads, pools and a device's module cannot be
    pickled."""
    node = build()
    copies = [pickle.loads(pickle.dumps(node)), copy.deepcopy(node)]
    expected = items(node)
    assert EndOfEpoch in map(type, expected) or not index_of(node).facts.infinite or len(expected) == 9
    assert [items(one) for one in copies] == [expected, expected]


@pytest.mark.parametrize("build", GRAPHS)
def test_a_graph_that_was_started_is_not_copied(build):
    """Seen to fail: a copy that silently starts over, or an error about a lock. `Cycler`, `Sharder` and `Batcher` are
    refused by their source."""
    node = build()
    next(node)
    try:
        if isinstance(node, IterableSource):
            pytest.skip("has no workers, and a copy of it begins anew")
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(
                TypeError,
                match=(
                    "that was started cannot be pickled or copied, .*before you request its first item, or build a new "
                    "graph"
                ),
            ):
                copied(node)
    finally:
        node.shutdown()


@pytest.mark.parametrize("build", GRAPHS)
def test_nothing_exists_before_the_first_reset(build):
    """No thread, no process, no open file, and no finalizer for them. Seen to fail: pools made with their node."""
    build().shutdown()
    gc.collect()

    def resources() -> tuple[int, ...]:
        me = psutil.Process()
        finalizers = len(weakref.finalize._registry)  # type: ignore[attr-defined]
        return threading.active_count(), len(me.children(recursive=True)), me.num_fds(), finalizers

    before = resources()
    node = build()
    index_of(node).facts, left_at(node, node.start_of(3)), items_in(node, 0), node.statistics()
    node.interrupt()
    assert resources() == before


@pytest.mark.parametrize("build", [pytest.param(build, id=name) for name, build in DATA_LEVEL.items() if "s" in name])
def test_a_graph_that_ended_before_it_started_does_not_start(build):
    node = build()
    node.shutdown()
    if any(getattr(one, "num_workers", 0) for one in node.chain()):
        with pytest.raises(ClosedError):
            node.reset()
    assert threading.active_count() == 1 or not [
        thread for thread in threading.enumerate() if thread.name.startswith("penstock")
    ]
