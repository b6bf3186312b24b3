"""Inspecting a batch must not change or lose it. A batch may be of any type, because the user's ``collate_fn`` makes
it."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, UserDict, UserList
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from penstock import Loader
from penstock._memory import devices
from penstock._memory.devices import pin
from penstock._memory.tree import leaves, mapped, nbytes


class Span(NamedTuple("Span", [("start", Any), ("end", Any)])):
    """Validates its arguments."""

    __slots__ = ()

    def __new__(cls, start: Any, end: Any) -> Span:
        if start is None or end is None or start.shape != end.shape:
            raise ValueError("a span has two ends")
        return super().__new__(cls, start, end)


class Strict(UserDict):
    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError("tensors only")
        super().__setitem__(key, value)


class Boxed(UserDict):
    """A copy shares its contents."""

    def __copy__(self) -> Boxed:
        other = Boxed.__new__(Boxed)
        other.data = self.data
        return other


class Fixed(OrderedDict):
    """Like a ``ModelOutput`` of Transformers."""

    def update(self, *_: Any) -> None:
        raise TypeError("it forbids this")


@dataclasses.dataclass
class Late:
    x: Any
    y: Any = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any


class Pair(tuple):
    """A class of one's own, with an attribute."""

    name = ""


class Row(list):
    """Like Pair, and nobody may write to it."""

    name = ""

    def __setitem__(self, *_: Any) -> None:
        raise TypeError("it forbids this")

    append = extend = __setitem__

    def __copy__(self) -> Row:
        return self


def named(kind: Any, *values: Any) -> Any:
    one = kind(values)
    one.name = kind.__name__
    return one


class Deaf:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def endless() -> list:
    batch: list = [torch.arange(3)]
    batch.append(batch)
    return batch


def x() -> torch.Tensor:
    return torch.arange(3)


BATCHES = {
    "packed sequence": lambda: pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False),
    "named tuple that checks": lambda: Span(x(), x()),
    "tuple of its own class": lambda: named(Pair, x(), x()),
    "tuple that is written in C": lambda: torch.stack([x(), x()]).max(0),
    "list of its own class": lambda: named(Row, x(), x()),
    "list around a list": lambda: UserList([x(), x()]),
    "mapping that checks": lambda: Strict(x=x()),
    "mapping whose copies share": lambda: Boxed(x=x(), y=x()),
    "mapping without update": lambda: Fixed(x=x()),
    "dataclass half set": lambda: Late(x()),
    "frozen dataclass with slots": lambda: Frozen(x(), x()),
    "itself": endless,
}


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_leaves_only_looks(make):
    """Seen to fail: `leaves` built on `mapped`, which rebuilt each container with None for every leaf."""
    batch = make()
    tensors = [leaf for leaf in leaves(batch) if leaf is not None]
    assert tensors
    assert all(isinstance(one, torch.Tensor) for one in tensors)
    assert nbytes(batch) == sum(one.nbytes for one in tensors) + 8 * sum(leaf is None for leaf in leaves(batch))


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_the_first_batch_is_sized_and_not_lost(make):
    """Seen to fail: the container refused to be built from None, so the first ``next`` raised and batch 0 was lost; for
    the mapping with shared contents, every tensor of batch 0 was None.
    """
    with Loader.from_dataset(
        range(4), batch_size=2, num_workers=1, method="thread", collate_fn=lambda _: make()
    ) as loader:
        batches = list(loader)
    assert len(batches) == 2
    assert type(batches[0]) is type(make())
    assert [leaf.tolist() for leaf in leaves(batches[0])] == [leaf.tolist() for leaf in leaves(make())]


def test_leaves_come_in_order_and_shared_ones_each_time():
    shared = [1, 2]
    assert list(leaves({"a": shared, "b": (shared, OrderedDict(x=3), Late(4))})) == [1, 2, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_is_sized():
    """Torch says of some sparse tensors that "nbytes is not defined"."""
    assert nbytes({"x": torch.zeros(3), "y": [np.zeros(2), 1, None, "abc"]}) == 12 + 16 + 8 + 8 + 3
    assert nbytes(object()) == nbytes([{1}]) == math.inf
    assert nbytes(torch.eye(3).to_sparse_csr()) > 0
    assert nbytes(torch.eye(3).to_sparse()) > 0


def test_sizing_never_raises():
    """A batch of unknown size counts as large. Seen to fail: `nbytes` without its ``except``."""

    class Broken(UserDict):
        def __iter__(self):
            raise RuntimeError("not now")

    class Odd(torch.Tensor):
        @property
        def nbytes(self):
            raise RuntimeError("not now")

    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    for batch in (Broken(x=1), torch.ones(2).as_subclass(Odd), deep):
        assert nbytes(batch) == math.inf


@pytest.mark.parametrize("make", [make for make in BATCHES.values() if make is not endless])
def test_mapped_rebuilds_what_checks_itself(make):
    """Seen to fail: `mapped` using ``update``; `mapped` reading fields that are not set; `mapped` writing into the
    batch itself."""
    batch = make()
    before = [leaf.tolist() for leaf in leaves(batch) if leaf is not None]
    changed = mapped(batch, lambda leaf: None if leaf is None else leaf + 1)
    assert type(changed) is type(batch)
    assert [(leaf - 1).tolist() for leaf in leaves(changed) if leaf is not None] == before
    assert type(batch) is Boxed or [leaf.tolist() for leaf in leaves(batch) if leaf is not None] == before


@pytest.mark.parametrize("kind", [Pair, Row])
def test_a_tuple_and_a_list_keep_their_class_and_their_attributes(kind):
    """As with ``DataLoader``, whose ``pin_memory`` enters every list. Seen to fail: they stayed as they were, so that
    ``device=`` left what is in them on the CPU; `mapped` writing into a copy, which the class may refuse, or which may
    be the list itself.
    """
    batch = {"own": named(kind, x(), x()), "shape": torch.Size([2])}
    changed = mapped(batch, lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf + 1, "to")
    own = changed["own"]
    assert (type(own), own.name, [leaf.device.type for leaf in own]) == (kind, kind.__name__, ["meta", "meta"])
    assert [leaf.device.type for leaf in batch["own"]] == ["cpu", "cpu"]
    assert changed["shape"] == torch.Size([3])
    assert type(changed["shape"]) is torch.Size


def test_pin_keeps_what_torch_would_make_a_list():
    """Seen to fail: torch's ``pin_memory`` alone, which returns a list."""
    pinned = pin({"at": range(3), "shape": torch.Size([2])})
    assert pinned == {"at": range(3), "shape": torch.Size([2])}
    assert type(pinned["shape"]) is torch.Size


def test_mapped_leaves_alone_what_has_the_method():
    packed = BATCHES["packed sequence"]()
    assert mapped([packed, packed.data], lambda leaf: type(leaf), "to") == [PackedSequence, torch.Tensor]
    assert mapped(Deaf(), lambda leaf: "changed", "to") == "changed"


def test_pin_is_for_dataclasses_too_and_by_their_own_method(monkeypatch):
    """Seen to fail: torch's ``pin_memory``, which returned a dataclass unchanged; `mapped` building a named tuple by
    ``type(tree)(...)``."""
    monkeypatch.setattr(devices, "pin_memory", lambda leaf: leaf.pin_memory() if isinstance(leaf, Own) else "pinned")
    batch = pin({"record": Late(x()), "span": Span(x(), x()), "own": Own(x())})
    assert batch["record"].x == "pinned"
    assert tuple(batch["span"]) == ("pinned", "pinned")
    assert batch["own"] == "by itself"


@dataclasses.dataclass
class Own:
    x: Any

    def pin_memory(self) -> str:
        return "by itself"
