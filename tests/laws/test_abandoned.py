"""A loader that raised and is then dropped, without `close`, leaves nothing: no thread, no process, no open file.

The garbage collector is off: where reference counts are enough, nothing else may be needed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sysconfig
import threading
import weakref
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler

from penstock import Loader
from penstock._memory.devices import can_pin
from penstock._nodes.reader_node import ReaderNode
from penstock.nodes import (
    Batcher,
    Cycler,
    Fetch,
    Mapper,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    Sampler,
    SamplerWrapper,
    ToDevice,
)
from penstock.orders import SequentialOrder
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N, BAD = 20, 3


class Faulty:
    """One of the samples raises."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        if index == BAD:
            raise ValueError("three")
        return index


class FaultySampler:
    """Raises in the middle of an epoch."""

    def __iter__(self) -> Iterator[int]:
        yield from range(BAD)
        raise ValueError("three")


class Converting(ReaderNode):
    """`PinMemory` and `ToDevice` as they are on a machine with an accelerator."""

    def __init__(self, source: Any) -> None:
        super().__init__(source, 1, "penstock-convert")

    def _converter(self) -> Callable[[Any], Any]:
        return lambda item: item


accelerated = (pytest.mark.gpu, pytest.mark.skipif(not can_pin(), reason="no accelerator on this machine"))
ROOFS = [
    pytest.param(lambda node: node, id="no roof"),
    pytest.param(Prefetcher, id="Prefetcher"),
    pytest.param(Converting, id="a converting reader"),
    pytest.param(lambda node: Prefetcher(Converting(node)), id="both"),
    pytest.param(lambda node: ToDevice(node, "cpu"), id="ToDevice, cpu"),
    pytest.param(PinMemory, id="PinMemory", marks=accelerated),
    pytest.param(
        lambda node: ToDevice(node, torch.accelerator.current_accelerator()), id="ToDevice", marks=accelerated
    ),
]
KINDS: list[Any] = [
    pytest.param((0, "thread", None), id="inline"),
    pytest.param((2, "thread", None), id="threads"),
    pytest.param((2, "process", "fork"), id="fork"),
]


def loader(roof: Callable[[Any], Any], kind: tuple[int, str, str | None], batch_size: int = 2) -> Loader[Any]:
    workers, method, context = kind
    indices = Batcher(Cycler(Sampler(SequentialOrder(N))), batch_size)
    fetch = Fetch(Faulty())
    mapper = ParallelMapper(indices, fetch, workers, method=method, multiprocessing_context=context)  # type: ignore
    return Loader(roof(mapper))


def resources(before: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
    """Threads, processes, open files. Without Python's lock they are ``before`` only after a collection, if no thread
    holds the graph just then."""
    me = psutil.Process()
    for _ in range(100 if sysconfig.get_config_var("Py_GIL_DISABLED") else 0):
        gc.collect()
        if before is None or threading.active_count() == before[0]:
            break
    return threading.active_count(), len(me.children(recursive=True)), me.num_fds()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Garbage is not collected automatically here."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def read_until_it_raises(batches: Loader[Any]) -> None:
    with pytest.raises(ValueError, match="three"):
        for _ in batches:
            pass


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("roof", ROOFS)
def test_a_loader_that_raised_and_is_dropped_goes_at_once(roof, kind):
    """Seen to fail: an entry or a job that keeps its error, whose traceback leads to the loader. Under a `Prefetcher`
    the reader thread kept all of that forever: a thread and two processes per loader. Elsewhere it stayed until the
    garbage collector ran."""
    read_until_it_raises(loader(roof, kind))  # starts helpers that live as long as the program (multiprocessing's)
    before = resources()
    for _ in range(3):
        batches = loader(roof, kind)
        read_until_it_raises(batches)
        del batches
        assert resources(before) == before


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("roof", ROOFS[:2])
def test_one_whose_batch_was_loaded_by_several_workers_goes_at_once(roof):
    """Seen to fail: a `SplitJob` whose parts keep their errors."""
    before = resources()
    read_until_it_raises(loader(roof, (2, "thread", None), batch_size=8))
    assert resources(before) == before


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("kind", KINDS[1:])
def test_an_exception_that_is_kept_does_not_keep_the_loader(kind):
    """Seen to fail: a traceback that contains the loader's own frames, which refer to it."""
    before = resources()
    batches = loader(Prefetcher, kind)
    with pytest.raises(ValueError, match="three") as kept:
        list(batches)
    del batches
    assert resources(before) == before
    assert kept.value.args == ("three",)


@pytest.mark.usefixtures("uncollected")
def test_one_that_goes_on_after_the_error_goes_at_once():
    before = resources()
    batches = loader(Prefetcher, (2, "thread", None))
    iterator = iter(batches)
    read: list[int] = []
    for _ in range(N // 2):
        try:
            read += next(iterator).tolist()
        except ValueError:
            continue
    assert read == [0, 1, *range(4, N)]
    del batches, iterator
    assert resources(before) == before


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "roof", [Prefetcher, lambda node: Prefetcher(Prefetcher(node))], ids=["one reader", "two readers"]
)
def test_a_mapper_under_a_reader_goes_at_once(roof):
    before = resources()
    read_until_it_raises(Loader(roof(Mapper(Batcher(Cycler(Sampler(SequentialOrder(N))), 2), Fetch(Faulty())))))
    assert resources(before) == before


@pytest.mark.parametrize("roof", ROOFS[:4])
@pytest.mark.parametrize("again", [False, True], ids=["once", "asked again"])
def test_a_source_that_raised_is_collected(roof, again):
    """The graph keeps the error, so this needs the garbage collector. Seen to fail: a reader thread that holds the
    graph while it waits."""
    before = resources()
    batches = Loader(
        roof(ParallelMapper(Batcher(Cycler(SamplerWrapper(FaultySampler(), plan_ahead=False)), 2), Fetch(range(N)), 2))
    )
    read_until_it_raises(batches)
    if again:
        with pytest.raises(ValueError, match="three"):  # the sampler is read anew
            next(iter(batches))
    gone = weakref.ref(batches)
    del batches
    gc.collect()
    assert gone() is None
    assert resources(before) == before


@pytest.mark.usefixtures("uncollected")
def test_one_that_is_dropped_in_the_middle_of_a_read_goes_at_once():
    """The thread is inside the source then, waiting for a worker. Seen to fail: a finalizer that does not interrupt the
    source."""
    gate, begun = threading.Event(), threading.Event()

    class Gated:
        def __getitem__(self, index: int) -> int:
            if index == 4:
                begun.set()
                assert gate.wait(100)
            return index

    before = threading.active_count()
    node = Prefetcher(ParallelMapper(Cycler(Sampler(SequentialOrder(N))), Fetch(Gated()), 1), 8)
    assert next(node) == 0
    assert begun.wait(100)
    reader = next(thread for thread in threading.enumerate() if thread.name == "penstock-prefetch")
    # the reader ends although the worker is stuck
    opener = threading.Thread(target=lambda: (reader.join(100), gate.set()))
    opener.start()
    del node
    opener.join(100)
    assert threading.active_count() == before


class Records(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(N)


@pytest.mark.parametrize(
    "words",
    [
        {"shuffle": True},
        {"sampler": True},
        {"skip": [(4, 8)]},
        {"num_workers": 2, "method": "thread"},
        {"forward": True},
    ],
    ids=str,
)
def test_what_the_user_gave_is_free_again(words: dict[str, Any]) -> None:
    """Also in the middle of an epoch. Seen to fail: a node of the graph that held a method of its own, and so itself; a
    sampler that the ranges to skip held."""
    data: Any = Records() if words.pop("forward", False) else Tagged(N)
    sampler = RandomSampler(data) if words.pop("sampler", False) else None
    loader = Loader.from_dataset(data, 4, sampler=sampler, **words)
    batches = iter(loader)
    next(batches)
    first = loader._reader.positions.first  # nothing else shows that a part of the graph stays
    left = [weakref.ref(one) for one in (data, sampler, first, loader) if one is not None]
    del data, sampler, first, loader, batches
    assert [one() for one in left] == [None] * len(left)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_that_drops_the_loader_touches_nothing_of_it(monkeypatch):
    """A thread that held a lock when this process forked never releases it in the child. Seen to hang: finalizers that
    do not check their process."""
    locks, made = [], threading.RLock
    monkeypatch.setattr(threading, "RLock", lambda: locks.append(made()) or locks[-1])
    batches = loader(Prefetcher, (2, "thread", None))
    iterator = iter(batches)
    next(iterator)
    monkeypatch.undo()
    assert locks
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            release.wait(100)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(100)
    child = os.fork()
    if not child:
        del batches, iterator, locks
        os._exit(7)
    release.set()
    holder.join(100)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
