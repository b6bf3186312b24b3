"""DatasetCopies: each copy has a distinct position, large data is shared and not changed, and a dataset that cannot be
copied says why."""

from __future__ import annotations

import pickle
import random
import threading
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from tensors import KINDS, SLOW, content, make, of_prototypes

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


class Bare:
    """A wrapper that forwards what it does not have."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_wrappers_that_forward_attributes_are_copied():
    """Seen to fail by a RecursionError."""
    data = Bare(Bare(Data(seen=[1])))
    one = DatasetCopies(data)()
    one.seen.append(2)
    assert (one.inner.inner.seen, data.seen) == ([1, 2], [1])


class Fails:
    def __setstate__(self, state):
        raise LookupError("no such thing")

    def __getstate__(self):
        return {"x": 1}


def test_a_copy_that_cannot_be_made_is_said():
    """Seen to fail by a bare LookupError."""
    with pytest.raises(GraphError, match=r"Data cannot be copied \(LookupError: no such thing"):
        DatasetCopies(Data(part=Fails()))()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SLOW])
@of_prototypes
def test_tensors_of_every_kind_are_copied(kind):
    """Seen to fail by an AttributeError for dtypes without a storage class."""
    data = Data(part=make(kind))
    one = DatasetCopies(data)()
    assert content(one.part) == content(data.part)


def test_a_large_tensor_of_inference_is_shared():
    """Seen to fail: it has no count of its changes."""
    with torch.inference_mode():
        data = Data(tensor=torch.zeros(LARGE))
    copies = DatasetCopies(data)
    assert copies().tensor.data_ptr() == data.tensor.data_ptr()
    assert not copies.changed()


def test_what_cannot_change_is_shared():
    """Seen to fail: each copy of a slice of a table had all of the table."""
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"x": np.arange(100_000)})
    batch = table.to_batches()[0]
    parts = [table, table.slice(3, 4), batch, table["x"], batch["x"], arrow.py_buffer(b"x" * LARGE), "x" * LARGE]
    data = Data(parts=[*parts, b"x" * LARGE], short="x" * 20, schema=table.schema)
    copies = DatasetCopies(data)
    one = copies()
    assert all(part is given for part, given in zip(one.parts, data.parts, strict=True))
    assert (one.short, one.schema, one.parts is data.parts) == (data.short, data.schema, False)
    assert 0 < copies.nbytes < 10_000


@pytest.mark.slow
def test_copies_of_a_hugging_face_dataset_in_memory_take_no_memory():
    """The more copies there are, the more slices has each. Seen to fail: 250 MB."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["x" * 1000] * 2000})  # 2 MB
    copies = DatasetCopies(rows.to_iterable_dataset(num_shards=8).shuffle(seed=1, buffer_size=10))
    first = copies()
    tracemalloc.start()
    try:
        kept = [copies() for _ in range(8)]
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert next(iter(kept[0])) == next(iter(first))


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
    found = held({"data": Data(copies=copies, rng=random.Random(4))})
    assert [one.path for one in found if isinstance(one.value, random.Random)] == ["data.rng"]
