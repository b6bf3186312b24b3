"""Parcels: whatever a worker or an item consists of comes back as it was, and the same memory travels once."""

from __future__ import annotations

import enum
import pickle
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from tensors import KINDS, SLOW, content, make, of_prototypes

from penstock._memory.parcel import Parcel, pickled, unpack


def sent(value: Any) -> Any:
    """``value`` after it travelled as an answer."""
    parcel = Parcel(value)
    memory = np.zeros(parcel.end() + 64, np.uint8)
    parcel.write(memoryview(memory))
    return unpack(memory)


@of_prototypes
@pytest.mark.parametrize("way", [lambda value: pickle.loads(pickled(value)), sent], ids=["task", "answer"])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.soak) if k in SLOW else k for k in KINDS])
def test_tensors_of_every_kind_come_back(kind, way):
    """Seen to fail with torch's own pickle, which cannot be read again for dtypes without a storage class, and then
    with torch's function that rebuilds these, for those that require gradients."""
    value = make(kind)
    assert content(way((value, [value]))[0]) == content(value)


@pytest.mark.slow
def test_the_same_memory_travels_once():
    """Slices of an Arrow table are pickled with all of its memory. Seen to fail: each had its own copy of it."""
    table = pytest.importorskip("pyarrow").table({"x": np.arange(200_000)})
    slices = [table.slice(1000 * k, 10) for k in range(8)]
    array = np.arange(200_000)
    assert Parcel((slices, array, array[:])).end() < 1.01 * (table.nbytes + array.nbytes)
    found, one, _ = sent((slices, array, array[:]))
    assert [part["x"].to_pylist() for part in found] == [[*range(1000 * k, 1000 * k + 10)] for k in range(8)]
    assert (one == array).all()


class Forwards:
    """As wrappers of trainers do."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class ForwardsBySlot(Forwards):
    __slots__ = ("inner",)


class NamedKeys(dict):
    """As configurations do: a name that is missing is a KeyError."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Asks(Forwards):
    """Has a way of its own."""

    def __setstate__(self, state):
        self.__dict__ = {"inner": state["inner"], "asked": True}


class ByName(type):
    def __getattr__(cls, name):
        return vars(cls)["names"][name]


class Named(metaclass=ByName):
    names = MappingProxyType({"a": 1})


class Space(enum.Enum):
    RAS = 1


@pytest.mark.parametrize("way", [lambda value: pickle.loads(pickled(value)), sent], ids=["task", "answer"])
def test_a_class_whose_attributes_are_looked_up_comes_back(way):
    """Until Python 3.11 that of each enum is one, such as MONAI's, in all of its tensors. Seen to fail: "unbound method
    object.__getstate__() needs an argument"."""
    assert way((Named, Space.RAS)) == (Named, Space.RAS)


@pytest.mark.parametrize("way", [lambda value: pickle.loads(pickled(value)), sent], ids=["task", "answer"])
def test_objects_that_forward_attributes_come_back(way):
    """Seen to fail: pickle asks the new object, which has no ``inner`` yet, for a ``__setstate__``, without end."""
    for kind in (Forwards, ForwardsBySlot, Asks):
        made = way(kind(Forwards([1, 2])))
        assert (type(made), made.inner.inner, made.count(2)) == (kind, [1, 2], 1)
    assert made.asked
    made = way(NamedKeys(x=NamedKeys(y=3)))
    assert (type(made.x), made.x.y) == (NamedKeys, 3)
