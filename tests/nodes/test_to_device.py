"""ToDevice, pinned batches and datasets on a device. The CPU tests run everywhere; the others need ``-m gpu``."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import OrderedDict
from itertools import islice
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from penstock import Loader, Resident
from penstock._memory.devices import can_pin, pin
from penstock._nodes import to_device
from penstock._nodes.to_device import _Mover
from penstock.nodes import Batcher, Cycler, EndOfEpoch, Fetch, ParallelMapper, PinMemory, Sampler, ToDevice
from penstock.orders import SequentialOrder


def on_a_device(test):
    """Has an accelerator with streams, or is skipped."""
    streams = torch.accelerator.is_available() and can_pin()
    return pytest.mark.gpu(pytest.mark.skipif(not streams, reason="no accelerator with streams on this machine")(test))


class Images:
    """Image ``i`` is full of ``i``."""

    def __init__(self, n: int = 10, side: int = 4) -> None:
        self.n, self.side = n, side

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict:
        return {"image": np.full((self.side, self.side), index, np.float32), "label": index, "name": f"n{index}"}


def mapped(function=None):
    return ParallelMapper(Batcher(Cycler(Sampler(SequentialOrder(10))), 2), function or Fetch(Images()), 0)


def accelerator() -> torch.device:
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


def test_the_cpu_changes_nothing():
    """No thread, no copy: the same object that the source made."""
    source = mapped()
    made = []
    original = source.next
    source.next = lambda: made.append(original()) or made[-1]
    node = ToDevice(source, "cpu")
    assert all(batch is made[k] for k, batch in enumerate(islice(node, 5)))
    assert next(node) == EndOfEpoch(0)
    assert [thread for thread in threading.enumerate() if thread.name == "penstock-device"] == []
    assert node.get_state() == source.get_state()


@pytest.mark.parametrize("device", ["cuda:97", "xpu:3", "meta", "nonsense", 1.5])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device):
    with pytest.raises(ValueError, match=r"This machine has: cpu|is not a torch device"):
        ToDevice(mapped(), device)
    with pytest.raises(ValueError, match=r"This machine has: cpu|is not a torch device"):
        Loader.from_dataset(Images(), device=device)


def test_what_lies_on_a_device_needs_no_pinning():
    """``meta`` stands for such a device. Seen to fail: `pin` that passes everything to torch ("Cannot access
    accelerator device")."""

    class Own:
        def pin_memory(self) -> str:
            return "pinned"

    there = torch.empty(3, device="meta")
    batch = pin({"there": there, "own": [Own(), "name"]})
    assert batch["there"] is there
    assert batch["own"] == ["pinned", "name"]


class Encoding(OrderedDict):
    """A container of tensors that moves itself, like a ``BatchEncoding``; it has an attribute for its device."""

    where = "cpu"

    def to(self, device: torch.device) -> Encoding:
        moved = Encoding(self)
        moved.where = str(device)
        return moved


@dataclasses.dataclass
class Movable:
    x: torch.Tensor
    where: str = "cpu"

    def to(self, device: torch.device) -> Movable:
        return Movable(self.x, str(device))


class Edge(NamedTuple):
    source: torch.Tensor
    to: torch.Tensor


class Row:
    """Answers to any attribute, like a row of a table, or raises an error that ``getattr`` does not expect."""

    def __getattr__(self, name: str) -> object:
        raise KeyError(name)


class FakeDevice:
    """Makes ``meta`` a device with streams, and writes down who did what in which order.

    Args:
        interface: ``"torch"``, which implements torch's generic functions only, or ``"module"``, which has a module
            like ``torch.cuda`` instead.
        records: Whether tensors can record streams.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interface: str, records: bool) -> None:
        self.log: list[str] = []
        self.done: set[str] = set()
        self.here = threading.local()
        fake = self

        class Event:
            def __init__(self, name: str) -> None:
                self.name = name

            def query(self) -> bool:
                return self.name in fake.done

        class Stream:
            def __init__(self, device: torch.device, name: str = "own") -> None:
                self.name, self.events = name, 0

            def record_event(self) -> Event:
                self.events += 1
                fake.log.append(f"{self.name} records {self.name}{self.events}")
                return Event(f"{self.name}{self.events}")

            def wait_event(self, event: Event) -> None:
                fake.log.append(f"{self.name} waits for {event.name}")

        @contextlib.contextmanager
        def stream(one):
            before, self.here.stream = current(), one
            yield
            self.here.stream = before

        def current(device=None):
            if not hasattr(self.here, "stream"):
                self.here.stream = Stream(
                    None, "reader" if threading.current_thread().name == "penstock-device" else "consumer"
                )
            return self.here.stream

        def missing(*_):
            raise RuntimeError("Backend doesn't support it.")

        def record(tensor, one):
            if not records:
                raise NotImplementedError("aten::record_stream")
            fake.log.append(f"a tensor records {one.name}")

        generic = interface == "torch"
        enter = lambda device: fake.log.append(f"{current().name} enters {device}")  # noqa: E731
        monkeypatch.setattr(torch.accelerator, "current_stream", current if generic else missing)
        monkeypatch.setattr(torch.accelerator, "set_stream", lambda one: setattr(self.here, "stream", one))
        monkeypatch.setattr(torch.accelerator, "set_device_index", enter)
        monkeypatch.setattr(torch, "Stream", Stream)
        module = SimpleNamespace(
            Stream=Stream, current_stream=current, stream=stream, set_device=enter, is_available=lambda: False
        )
        monkeypatch.setattr(torch, "get_device_module", missing if generic else lambda device: module)
        monkeypatch.setattr(torch.Tensor, "record_stream", record)
        monkeypatch.setattr(to_device, "can_pin", lambda: False)
        monkeypatch.setattr(to_device, "resolve_device", torch.device)
        for where, name, does in (
            (torch.Tensor, "to", "copies"),
            (torch.Tensor, "copy_", "copies"),
            (torch, "empty_like", "allocates"),
        ):
            monkeypatch.setattr(where, name, self.logged(name, getattr(where, name), does))
        self.current, self.stream = current, Stream

    def logged(self, name, function, does):
        def call(tensor, *arguments, **words):
            result = function(tensor, *arguments, **words)
            if name != "to" or result is not tensor:  # what is there already is not copied
                self.log.append(f"{self.current().name} {does}")
            return result

        return call


@pytest.mark.parametrize("interface", ["torch", "module"])
def test_streams_wait_for_each_other_in_the_order_that_keeps_memory_whole(interface, monkeypatch):
    """Seen to fail: with torch's generic interface alone there was no stream; without ``record_stream`` it raised in
    the consumer."""
    fake = FakeDevice(monkeypatch, interface, records=True)
    mover = _Mover(torch.device("meta"))
    fake.log.clear()
    consumer, fake.here.stream = fake.current(), fake.stream(None, "reader")
    moved = mover({"x": torch.ones(2), "there": torch.empty(2, device="meta")})
    assert fake.current().name == "reader"  # as it was
    fake.here.stream = consumer
    moved.arrived()
    assert fake.log == [
        "reader enters meta",
        "own copies",
        "own records own1",
        "reader records reader1",
        "consumer waits for own1",
        "consumer waits for reader1",
        "a tensor records consumer",
        "a tensor records consumer",
    ]


@pytest.mark.parametrize("interface", ["torch", "module"])
def test_where_tensors_cannot_record_streams_a_copy_waits_for_the_consumer(interface, monkeypatch):
    """After the memory was allocated, or work that is queued in between would still read it. And a batch that nobody
    wants any more is kept until it is copied.

    Seen to fail: an event of the consumer recorded before the allocation; nothing kept.
    """
    fake = FakeDevice(monkeypatch, interface, records=False)
    mover = _Mover(torch.device("meta"))
    fake.log.clear()
    moved = mover([torch.ones(2)])
    moved.arrived()
    assert fake.log == [
        "consumer enters meta",
        "own allocates",
        "consumer records consumer1",
        "own waits for consumer1",
        "own copies",
        "own records own1",
        "consumer waits for own1",
    ]
    kept = weakref.ref(moved.batch[0])
    del moved
    fake.here.stream = fake.stream(None, "another")
    mover([torch.ones(2)]).arrived()
    assert kept() is not None
    fake.log.clear()
    fake.done |= {"own1", "own2"}
    mover([torch.ones(2)])
    assert kept() is None
    # the stream that the consumer has asked from last
    assert fake.log[1:3] == ["another records another1", "own waits for another1"]


@pytest.mark.parametrize("interface", ["torch", "module"])
@pytest.mark.parametrize("records", [True, False])
def test_the_reader_copies_on_its_stream_and_the_consumer_waits_for_each_batch(interface, records, monkeypatch):
    fake = FakeDevice(monkeypatch, interface, records)
    node = ToDevice(mapped(), "meta")
    for k, batch in enumerate(islice(node, 5), 1):
        assert batch["image"].is_meta
        assert f"own records own{k}" in fake.log[: fake.log.index(f"consumer waits for own{k}")]
    node.shutdown()
    assert [entry for entry in fake.log if "enters" in entry] == ["reader enters meta"]
    assert [entry for entry in fake.log if "consumer waits" in entry] == [
        f"consumer waits for own{k}" for k in range(1, 6)
    ]


@pytest.fixture
def mover(monkeypatch):
    """Copies to ``meta``, which stands for a device without streams."""
    # torch, too, asks
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(is_available=lambda: False))
    return _Mover(torch.device("meta"))


def test_an_object_with_a_to_of_its_own_is_moved_whole_by_it(mover):
    """Seen to fail: `mapped` took a packed sequence apart as the named tuple that it is, so ``batch_sizes`` went to the
    device, where torch refuses it; a mapping and a dataclass were moved leaf by leaf.
    """
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    batch = mover(
        {
            "packed": packed,
            "encoding": Encoding(x=torch.ones(2)),
            "record": Movable(torch.ones(2)),
            "plain": torch.ones(2),
        }
    )
    assert batch.batch["plain"].is_meta
    batch = batch.arrived()
    assert type(batch["packed"]) is PackedSequence
    assert batch["packed"].data.is_meta
    assert batch["packed"].batch_sizes.device.type == "cpu"
    assert batch["encoding"].where == batch["record"].where == "meta"


def test_a_field_of_the_name_to_is_no_method_and_a_row_that_raises_is_a_leaf(mover):
    """Seen to fail: ``getattr(row, "to", None)`` raised the row's KeyError."""
    row = Row()
    batch = mover([Edge(torch.ones(2), torch.ones(2)), row, torch.float32, Edge]).arrived()
    assert [leaf.device.type for leaf in batch[0]] == ["meta", "meta"]
    assert batch[1:] == [row, torch.float32, Edge]


# With an accelerator.


@on_a_device
@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 2, "method": "process"}]
)
def test_batches_arrive_on_the_device_in_order(workers):
    with Loader.from_dataset(Images(), batch_size=2, device=accelerator(), **workers) as loader:
        for _ in range(2):
            batches = list(loader)
            assert [batch["label"].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
            for batch in batches:
                assert batch["image"].device == batch["label"].device == accelerator()
                assert torch.equal(batch["image"][:, 0, 0].long(), batch["label"])
                assert batch["name"] == [f"n{label}" for label in batch["label"].tolist()]


@on_a_device
def test_the_copy_waits_for_nobody_and_the_consumer_for_the_copy():
    """The consumer's stream is delayed; batches still arrive complete, whenever it reads them."""
    streams = torch.get_device_module(accelerator())
    with Loader.from_dataset(
        Images(10, 1500), batch_size=2, device=accelerator(), num_workers=2, method="thread"
    ) as loader:
        for _ in range(3):
            sums = []
            for batch in loader:
                streams._sleep(20_000_000)  # cycles
                sums.append((batch["image"].sum(dim=(1, 2)), batch["label"]))
                del batch  # its memory must not be reused before the sum is computed
            for total, label in sums:
                assert torch.equal(total, label * float(1500 * 1500))


@on_a_device
def test_pinned_memory_is_not_used_again_before_the_copy_is_over():
    """The user copies by hand and drops the batch at once, while the stream is delayed."""
    streams = torch.get_device_module(accelerator())
    with Loader.from_dataset(Images(40, 700), batch_size=2, pin_memory=True, num_workers=2, method="thread") as loader:
        copies = []
        for batch in loader:
            assert batch["image"].is_pinned()
            streams._sleep(20_000_000)
            copies.append((batch["image"].to(accelerator(), non_blocking=True), batch["label"].clone()))
            del batch
        for images, labels in copies:
            assert torch.equal(images[:, 0, 0].cpu().long(), labels)
            assert torch.equal(images[:, -1, -1].cpu().long(), labels)


class Boxed:
    """A user-defined batch class."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def pin_memory(self) -> Boxed:
        return Boxed(self.x.pin_memory())

    def to(self, device) -> Boxed:
        return Boxed(self.x.to(device))


@on_a_device
def test_batches_of_ones_own_types():
    source = lambda: mapped(lambda indices: Boxed(torch.tensor(indices)))  # noqa: E731
    pinned = PinMemory(source())
    assert next(pinned).x.is_pinned()
    pinned.shutdown()
    moved = ToDevice(source(), accelerator())
    assert next(moved).x.device == accelerator()
    moved.shutdown()


@on_a_device
def test_resident_on_the_device_is_the_ordinary_loader():
    """Both with a seed, because two loaders in step are warned of."""
    data = torch.utils.data.TensorDataset(torch.arange(400.0).reshape(100, 4), torch.arange(100))
    ordinary = Loader.from_dataset(data, batch_size=8, shuffle=True, seed=0)
    with Loader.from_dataset(Resident(data, accelerator()), batch_size=8, shuffle=True, seed=0) as loader:
        for _ in range(2):
            for batch, other in zip(loader, ordinary, strict=True):
                assert [part.device for part in batch] == [accelerator()] * 2
                assert all(torch.equal(mine.cpu(), its) for mine, its in zip(batch, other, strict=True))
        assert loader.state_dict() == ordinary.state_dict()


@on_a_device
def test_what_is_on_the_device_already_is_waited_for_too():
    """It was made in the reader thread, on its current stream, which is not the consumer's."""
    streams = torch.get_device_module(accelerator())

    def made(indices: list[int]) -> dict:
        streams._sleep(20_000_000)
        return {"there": torch.full((1000,), float(indices[0]), device=accelerator()), "here": torch.tensor(indices)}

    node = ToDevice(mapped(made), accelerator())
    with streams.stream(streams.Stream()):
        sums = [(batch["there"].sum(), batch["here"][0]) for batch in islice(node, 5)]
    assert [(there.item(), here.item()) for there, here in sums] == [(1000 * k, k) for k in (0, 2, 4, 6, 8)]
    node.shutdown()
    resident = Resident(torch.utils.data.TensorDataset(torch.arange(20)), accelerator())
    for way in ({"device": accelerator()}, {"pin_memory": True}):
        with Loader.from_dataset(resident, batch_size=5, **way) as loader:
            assert [batch[0].tolist() for batch in loader] == [[*range(k, k + 5)] for k in (0, 5, 10, 15)]


@on_a_device
def test_draws_are_the_same_on_every_device():
    from penstock import BatchRng

    here, there = (BatchRng(1, 2, torch.arange(1000, device=device)) for device in ("cpu", accelerator()))
    assert torch.equal(here.uniform(3, 2), there.uniform(3, 2).cpu())
    assert torch.equal(here.integers(-5, 7, 4), there.integers(-5, 7, 4).cpu())
    assert torch.allclose(here.normal(3), there.normal(3).cpu(), atol=1e-5)
