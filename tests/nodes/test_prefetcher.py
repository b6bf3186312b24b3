"""Prefetcher, PinMemory and the reader thread upstream of them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import islice

import pytest
import torch

from penstock import ClosedError, Loader
from penstock._memory.devices import can_pin
from penstock._statistics import PinStatistics
from penstock.nodes import Cycler, EndOfEpoch, Mapper, Node, PinMemory, Prefetcher, Sampler
from penstock.orders import SequentialOrder


def source(n=5):
    return Cycler(Sampler(SequentialOrder(n)))


class Gated(Node):
    """Delivers an item only once its gate is open, and signals each request."""

    def __init__(self, source, gate, asked) -> None:
        super().__init__(source)
        self.gate, self.asked = gate, asked

    def transform(self, item):
        self.asked.release()
        assert self.gate.acquire(timeout=100)
        return item


def test_it_reads_ahead_but_no_further_than_its_depth():
    """Seen to fail with an unbounded queue: the reader asked for a fourth item."""
    gate, asked = threading.Semaphore(0), threading.Semaphore(0)
    node = Prefetcher(Gated(source(9), gate, asked), 2)
    node.reset()
    for _ in range(2):
        assert asked.acquire(timeout=100)
        gate.release()
    assert not asked.acquire(timeout=0.05)  # two are ready, and the reader does not ask for a third
    assert next(node).values == 0
    assert asked.acquire(timeout=100)
    gate.release()
    node.shutdown()


def test_a_stuck_reader_is_left_behind_by_name(caplog):
    """Within the timeout of `close`. Seen to fail: `shutdown` that always waits 2 s; `join` that logs nothing."""
    gate, asked = threading.Semaphore(0), threading.Semaphore(0)
    loader = Loader(Prefetcher(Gated(source(9), gate, asked), 2))
    gate.release()
    next(iter(loader))
    assert asked.acquire(timeout=100)
    assert asked.acquire(timeout=100)
    thread = next(thread for thread in threading.enumerate() if thread.name == "penstock-prefetch")
    began = time.monotonic()
    loader.close(timeout=0.05)
    assert time.monotonic() - began < 1
    assert caplog.text.count("thread penstock-prefetch is still busy") == 1
    gate.release()
    thread.join(100)
    assert not thread.is_alive()


def test_a_reset_steals_no_item():
    """torchdata's old reader takes an item of the new run. Seen to fail without waiting for the reader to leave the
    source."""
    gate, asked = threading.Semaphore(0), threading.Semaphore(0)
    node = Prefetcher(Gated(source(50), gate, asked), 4)
    node.reset()
    assert asked.acquire(timeout=100)  # the reader is inside the source, with item 0
    mover = threading.Thread(target=node.reset, args=({"epoch": 0, "source": {"epoch": 0, "position": 30}},))
    mover.start()
    gate.release(50)
    mover.join(100)
    assert [item.values for item in islice(node, 3)] == [30, 31, 32]
    node.shutdown()


def test_shutdown_ends_and_is_final():
    node = Prefetcher(source(), 2)
    next(node)
    node.shutdown()
    node.shutdown()
    with pytest.raises(ClosedError):
        next(node)
    with pytest.raises(ClosedError):
        node.reset()


@pytest.mark.parametrize("depth", [0, -1, 1.5, None, True])
def test_a_depth_that_is_none_is_refused(depth):
    with pytest.raises(ValueError, match="prefetch_factor"):
        Prefetcher(source(), depth)


@pytest.mark.skipif(can_pin(), reason="this machine has an accelerator")
def test_pin_memory_without_an_accelerator_passes_through_and_says_so():
    with pytest.warns(UserWarning, match="no accelerator"):
        node = PinMemory(Mapper(source(), torch.tensor))
    assert next(node).item() == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-pin"]
    assert node.statistics()[-1].pinned == PinStatistics(pinned=0, already=1)
    with Loader.from_dataset(range(4), batch_size=2, pin_memory=True, num_workers=1, method="thread") as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@dataclass
class Handle:
    """A batch that its own method alone can pin: there is no tensor in its fields."""

    index: int
    pinned: bool = False

    def pin_memory(self):
        return Handle(self.index, True)


def test_an_object_that_pins_itself_is_told_to(monkeypatch):
    """As with ``DataLoader``. Seen to fail: a dataclass without a tensor that is not pinned passed through
    unchanged."""
    monkeypatch.setattr("penstock._nodes.pin_memory.can_pin", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    node = PinMemory(Mapper(source(), Handle))
    assert next(node) == Handle(0, pinned=True)
    node.shutdown()


@pytest.mark.gpu
@pytest.mark.skipif(not can_pin(), reason="no accelerator on this machine")
def test_pin_memory_pins():
    node = PinMemory(Mapper(source(), lambda value: {"x": torch.full((3,), value)}))
    batches = list(islice(node, 5))
    assert all(batch["x"].is_pinned() for batch in batches)
    assert [batch["x"][0].item() for batch in batches] == [0, 1, 2, 3, 4]
    assert next(node) == EndOfEpoch(0)
    node.shutdown()
