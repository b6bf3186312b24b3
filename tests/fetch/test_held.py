"""The walk over what the user's objects hold."""

from __future__ import annotations

import functools
import io
import logging
import random
import time
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from penstock import Loader
from penstock._fetch.held import EndOfWalk, held


class Holder:
    def __init__(self, **held):
        vars(self).update(held)

    def method(self):
        pass


class Slotted:
    __slots__ = ("empty", "inner")

    def __init__(self, inner):
        self.inner = inner


def paths(most=2000, enters=lambda value: True, **roots):
    return [one.path for one in held(roots, most, enters)]


def test_where_it_looks():
    """Near objects first. Seen to fail: each kind left out."""
    end = type("End", (EndOfWalk, Holder), {})(inner=Holder())
    dataset = Holder(
        number=1,
        rng=random.Random(7),
        listed=[0, Slotted(Holder())],
        named={"a": Holder(), Holder: Holder()},
        partial=functools.partial(max, Holder(), key=Holder()),
        method=Holder().method,
        drawn=random.Random(7).random,
        queue=deque([Holder()]),
        tensor=torch.zeros(3),
        kind=Holder,
        function=paths,
        module=logging,
        end=end,
        itself=None,
    )
    dataset.itself = dataset
    found = paths(dataset=dataset, nothing=None)
    names = ("rng", "listed", "named", "partial", "method", "drawn", "queue", "tensor")
    assert found[:9] == ["dataset", *(f"dataset.{name}" for name in names)]
    assert {*found[9:]} == {
        *("dataset.listed[1]", "dataset.named['a']", "dataset.named[key 1]"),
        *("dataset.partial.func", "dataset.partial.args[0]", "dataset.partial.key", "dataset.queue[0]"),
        "dataset.listed[1].inner",
    } | {"dataset.method", "dataset.drawn"}


def test_what_is_there_now():
    dataset = Holder(listed=[Holder()], slotted=Slotted(Holder()))
    found = {one.path: one for one in held({"dataset": dataset})}
    dataset.listed[0], dataset.slotted.inner = 1, 2
    assert [found[path].again() for path in ("dataset.listed[0]", "dataset.slotted.inner")] == [1, 2]


def test_its_bounds():
    """2,000 objects, and 64 items of a container. Seen to fail: each of the two left out."""
    assert len(paths(root=[[Holder() for _ in range(100)] for _ in range(100)])) == 2000
    assert len(paths(root=[Holder() for _ in range(100)])) == 65
    assert paths(most=2, root=[Holder(), Holder()]) == ["root", "root[0]"]


def test_whom_the_caller_leaves_closed():
    both = ConcatDataset([TensorDataset(torch.zeros(3)), Subset([1], [0])])
    assert paths(root=both, enters=lambda one: not isinstance(one, TensorDataset)) == [
        *("root", "root.datasets", "root.datasets[0]", "root.datasets[1]"),
    ]


def test_a_flat_dataset_takes_no_time():
    """0.2 ms at most."""
    flat = Holder(root="a", samples=[(f"{k}.jpg", k) for k in range(100_000)], names={f"{k}": k for k in range(1000)})
    took = []
    for _ in range(20):
        began = time.perf_counter()
        list(held({"dataset": flat}))
        took.append(time.perf_counter() - began)
    assert min(took) < 0.0002


class Refusing:
    """Refuses every look, as a proxy does that is not bound to anything."""

    def __getattribute__(self, name):
        raise RuntimeError("not bound")


class Countless(list):
    def __len__(self):
        raise RuntimeError("not loaded yet")


class Posing(Slotted):
    """Passes for what it wraps."""

    def __getattribute__(self, name):
        return getattr(object.__getattribute__(self, "inner"), name)


class Beside:
    """Holds something in front of a generator. Sample i is i."""

    def __init__(self, first):
        self.first, self.rng = first, random.Random(7)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def arrays():
    np.savez(file := io.BytesIO(), a=np.ones(3))
    file.seek(0)
    return np.load(file)


@pytest.mark.parametrize("words", [{}, {"num_workers": 1, "method": "thread"}])
def test_what_refuses_to_be_looked_at_is_passed_over(words):
    """Seen to fail: it raised what the look raises; what stands behind it in a list was not found; nor was what is in
    it.
    """
    dead = weakref.proxy(Holder())
    first = [torch.eye(8).to_sparse(), dead, Refusing(), arrays(), torch.nn.LazyLinear(3)]
    first += [
        Countless([Holder(rng=random.Random(7))]),
        Posing({"a": Holder(rng=random.Random(7))}),
    ]
    dataset = Beside([*first, random.Random(7)])
    with Loader.from_dataset(dataset, 4, **words) as loader:
        assert [torch.cat([*loader]).tolist() for _ in range(2)] == 2 * [[*range(8)]]
    found = {one.path for one in held({"dataset": dataset}) if isinstance(one.value, random.Random)}
    inside = {"dataset.first[5][0].rng", "dataset.first[6]['a'].rng"}
    assert found == {"dataset.rng", "dataset.first[7]"} | inside
