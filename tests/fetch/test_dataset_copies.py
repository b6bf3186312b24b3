"""DatasetCopies: each copy has a distinct position, large data is shared and not changed, and a dataset that cannot be
copied says why."""

from __future__ import annotations

import pickle
import random
import threading
from functools import partial

import numpy as np
import pytest
import torch

from penstock import GraphError
from penstock._fetch.dataset_copies import LARGE, DatasetCopies
from penstock._fetch.held import held


class Data:
    def __init__(self, **parts):
        vars(self).update(parts)


def test_copies_are_independent_and_as_the_dataset_was_when_the_first_was_made():
    """Seen to fail with copies of the dataset as it is now."""
    data = Data(
        rng=random.Random(3),
        seen=[1],
        array=np.zeros(4),
        tensor=torch.zeros(4),
        nested={"rng": np.random.default_rng(3)},
    )
    copies = DatasetCopies(data)
    one = copies()
    data.seen.append(2)
    one.seen.append(3)
    one.rng.random()
    one.array += 1
    one.tensor += 1
    other = copies()
    assert (one.seen, other.seen, data.seen) == ([1, 3], [1], [1, 2])
    assert other.rng.getstate() == random.Random(3).getstate() == data.rng.getstate()
    assert not other.array.any()
    assert not data.array.any()
    assert not other.tensor.any()
    assert one.nested["rng"] is not other.nested["rng"]
    assert not copies.changed()


def test_a_small_part_of_a_large_tensor_is_copied_alone():
    """Seen to fail: each copy had all of it."""
    table = torch.arange(2.0**20).reshape(1024, 1024)
    copy = DatasetCopies(Data(row=table[3], turned=table[:2, :2].t(), whole=torch.ones(2)))()
    assert copy.row.tolist() == table[3].tolist()
    assert copy.turned.tolist() == [[0, 1024], [1, 1025]]
    assert copy.row.untyped_storage().nbytes() == 4096
    assert copy.whole.tolist() == [1, 1]


@pytest.mark.parametrize("n", [LARGE - 8, LARGE, LARGE + 8])
def test_large_arrays_and_tensors_are_shared(n):
    """Seen to fail with copies of 10 GB for each lane."""
    data = Data(array=np.zeros(n, np.uint8), tensor=torch.zeros(n, dtype=torch.uint8))
    copies = DatasetCopies(data)
    one, shared = copies(), n > LARGE
    assert np.shares_memory(one.array, data.array) == shared
    assert (one.tensor.data_ptr() == data.tensor.data_ptr()) == shared
    assert one.array.flags.writeable != shared
    assert data.array.flags.writeable, "the user's own is as it was"
    one.tensor += 1
    assert copies.changed() == shared
    if shared:
        with pytest.raises(ValueError, match="read-only"):
            one.array[0] = 1


def test_arrays_of_objects_are_copied():
    data = Data(array=np.array([[k] for k in range(20_000)] + [None], dtype=object))
    one = DatasetCopies(data)()
    one.array[0].append(1)
    assert data.array[0] == [0]


def test_a_memory_map_is_not_read(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(100_000))
    data = Data(array=np.load(tmp_path / "x.npy", mmap_mode="r"))
    one = DatasetCopies(data)()
    assert np.shares_memory(one.array, data.array)


def test_functions_classes_and_modules_are_the_same():
    class Local:
        pass

    data = Data(function=lambda: 3, kind=Local, made=Local(), module=np, built=len)
    one = DatasetCopies(data)()
    assert (one.function, one.kind, one.module, one.built) == (data.function, Local, np, len)
    assert type(one.made) is Local
    assert one.made is not data.made


@pytest.mark.parametrize("part", [threading.Lock, lambda: (n for n in range(3)), partial(open, __file__)])
def test_what_cannot_be_copied_is_said(part):
    data = Data(part=part())
    with pytest.raises(GraphError, match=r"Data cannot be copied \(TypeError.*make generators and locks, in __iter__"):
        DatasetCopies(data)()
    if hasattr(data.part, "close"):
        data.part.close()


def test_another_process_makes_its_own():
    copies = DatasetCopies(Data2())
    copies().seen.append(1)
    again = pickle.loads(pickle.dumps(copies))
    assert again().seen == []


class Data2:
    def __init__(self):
        self.seen = []


def test_a_walk_over_what_objects_hold_ends_at_copies():
    """Seen to fail: a generator in a copy was found, and seeded."""
    copies = DatasetCopies(Data(rng=random.Random(3)))
    found, _ = held({"data": Data(copies=copies, rng=random.Random(4))})
    assert [one.path for one in found if isinstance(one.value, random.Random)] == ["data.rng"]
