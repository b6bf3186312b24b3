"""Functions that the user registers in torch's ``default_collate_fn_map`` take precedence at any time, as in
``default_collate`` itself."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from comparison import difference
from penstock import Loader, Resident
from penstock._fetch.array_dataset import gathered
from penstock._fetch.collate import BatchBuilder, Collator
from penstock._fetch.indices import Indices
from penstock._memory.allocation import afresh


@pytest.fixture(autouse=True)
def registry():
    """torch's map, restored afterwards."""
    before = dict(default_collate_fn_map)
    yield default_collate_fn_map
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


@dataclass
class Point:
    x: int
    y: torch.Tensor


class Nearer(Point):
    pass


class Pair(NamedTuple):
    x: int
    y: torch.Tensor


def padded(batch, *, collate_fn_map=None):
    return torch.nn.utils.rnn.pad_sequence(list(batch), batch_first=True)


def doubled(batch, *, collate_fn_map=None):
    return 2 * torch.stack(list(batch))


def named(batch, *, collate_fn_map=None):
    return f"{type(batch).__name__} of {len(batch)} {type(batch[0]).__name__}"


def stacked_by_x(batch, *, collate_fn_map=None):
    return {"x": collate([one.x for one in batch], collate_fn_map=collate_fn_map)}


def ones(k):
    return torch.ones(k + 1)


SAMPLES = {
    "dataclass": lambda k: Point(k, torch.tensor(k)),
    "its child": lambda k: Nearer(k, torch.tensor(k)),
    "named tuple": lambda k: Pair(k, torch.tensor(k)),
    "dict": lambda k: {"a": torch.tensor([k]), "b": k, "c": k / 2, "d": f"{k}", "e": np.float32(k), "f": np.full(2, k)},
    "ordered dict": lambda k: collections.OrderedDict(a=k),
    "tuple": lambda k: (k, torch.tensor([k]), np.arange(2) + k, True),
    "list": lambda k: [k, "a", [Pair(k, torch.tensor(k))]],
    "tensor": lambda k: torch.tensor([k, k]),
    "array": lambda k: np.array([k, k]),
    "float": lambda k: k / 3,
    "np.float64": lambda k: np.float64(k),
    "bool": lambda k: k > 1,
    "bytes": lambda k: b"a",
}
REGISTERED = {
    "nothing": {},
    "dataclass": {Point: stacked_by_x},
    "named tuple": {Pair: stacked_by_x},
    "tensor": {torch.Tensor: doubled},
    "array": {np.ndarray: named},
    "float": {float: named},
    "int": {int: named},
    "bool": {bool: named},
    "str": {str: named},
    "one NumPy type": {np.float32: named},
    "NumPy scalars": {(np.bool_, np.number, np.object_): named},
    "dict": {dict: named},
    "tuple": {tuple: named},
    "list": {list: named},
    "any mapping": {Mapping: named},
    "everything": {object: named},
    "two": {Point: stacked_by_x, torch.Tensor: named},
}


def ours(collator, samples, size):
    batch = BatchBuilder(collator, len(samples), afresh)
    for start in range(0, len(samples), size):
        batch.add(samples[start : start + size])
    return batch.finish()


@pytest.mark.parametrize("what", REGISTERED)
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_registered_goes_first(what, size, registry):
    """Whole and sample by sample; with a schema learned before the registration, after it, and after it was removed.
    Seen to fail: tensors, arrays and numbers were written in place, and dataclasses, named tuples, dicts and lists
    taken apart, despite the registration; and, without `BatchSchema.is_current`, schemas learned earlier stayed in use.
    """
    original = dict(registry)
    for name, make in SAMPLES.items():
        # those are collated here, and by torch only where they are registered
        by_torch = name not in ("dataclass", "its child")
        if not by_torch and what not in ("dataclass", "everything", "two"):
            continue
        collator = Collator()
        for ks, registered in (
            (range(3), {}),
            (range(3, 6), REGISTERED[what]),
            (range(3, 6), REGISTERED[what]),
            (range(3, 6), {}),
        ):
            registry.clear()
            registry.update({**original, **registered})
            samples = [make(k) for k in ks]
            found = ours(collator, samples, size)
            assert not (by_torch or registered) or difference(found, default_collate(samples)) is None, name


def test_tensors_of_other_shapes_may_be_padded(registry):
    """The usual reason to register a function."""
    registry[torch.Tensor] = padded
    with Loader.from_dataset([{"x": ones(k), "n": k} for k in range(4)], batch_size=2) as loader:
        batches = list(loader)
    assert [batch["x"].tolist() for batch in batches] == [[[1, 0], [1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
    assert [batch["n"].tolist() for batch in batches] == [[0, 1], [2, 3]]


def test_a_class_is_looked_up_before_its_bases_and_bases_in_the_maps_order(registry):
    registry[Point] = lambda batch, *, collate_fn_map: "point"
    assert Collator()([Nearer(1, ones(1))]) == "point"
    registry[Nearer] = lambda batch, *, collate_fn_map: "nearer"
    assert Collator()([Nearer(1, ones(1))]) == "nearer"
    assert Collator()([Point(1, ones(1))]) == "point"


@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(torch.arange(6)), Subset(TensorDataset(torch.arange(6.0), torch.ones(6)), [4, 1, 0, 3])],
    ids=["whole", "subset"],
)
@pytest.mark.parametrize("what", [torch.Tensor, tuple])
def test_tensor_datasets_are_collated_by_it_too(dataset, what, registry):
    """Seen to fail: they were gathered without a check of the map."""
    registry[what] = named
    with Loader.from_dataset(dataset, batch_size=2) as loader:
        assert list(loader) == list(DataLoader(dataset, batch_size=2))
    assert gathered(dataset, Indices(0, [0], np.array([0])), 0, afresh) is None


def test_resident_data_stay_gathered(registry):
    """The samples were collated when they were loaded."""
    resident = Resident(TensorDataset(torch.arange(6)))
    registry[torch.Tensor] = named
    with Loader.from_dataset(resident, batch_size=3) as loader:
        assert [batch[0].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


class Unsendable(Dataset):
    """Samples that cannot be pickled, so they must be collated where they are loaded."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return Handle(index)


class Handle:
    def __init__(self, x):
        self.x = x

    def __reduce__(self):
        raise TypeError("a handle cannot be pickled")


def in_a_worker(batch, *, collate_fn_map=None):
    return [os.getpid(), *(one.x for one in batch)]


def test_it_runs_where_the_samples_are_loaded(registry):
    """Seen to fail: the parts of the first batch, loaded by several workers, were sent as samples and collated in the
    consumer's process."""
    registry[Handle] = in_a_worker
    with Loader.from_dataset(Unsendable(), batch_size=6, num_workers=2, multiprocessing_context="fork") as loader:
        batches = list(loader)
    assert [batch[1:] for batch in batches] == [[*range(6)], [*range(6, 12)]]
    assert os.getpid() not in {batch[0] for batch in batches}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Point(0, torch.zeros(1))] * 8)


@pytest.mark.parametrize("given", [None, default_collate])
def test_what_draws_is_seeded_over_a_stream_too(registry, given):
    """Seen to fail: over a stream without a function of the user's, nothing was seeded."""
    registry[Point] = lambda batch, *, collate_fn_map=None: torch.rand(1)

    def drawn():
        torch.manual_seed(0)
        torch.rand(counts.pop())
        before = torch.get_rng_state()
        first = next(iter(Loader.from_dataset(Stream(), 2, collate_fn=given))).item()
        return first, torch.equal(torch.get_rng_state(), before)

    counts = [3, 1]
    (first, untouched), (second, _) = drawn(), drawn()
    assert (first, untouched) == (second, True)
