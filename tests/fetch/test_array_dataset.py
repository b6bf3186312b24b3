"""Datasets that are arrays, and batches made by ``__getitems__``, equal those of `DataLoader`, value for value."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
from pairwise import pairwise
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate, default_convert
from ways import NAMED

from comparison import difference
from penstock import Loader, Mix
from penstock._fetch.array_dataset import ArrayDataset, RowDataset, gathered, is_arrays
from penstock._memory.allocation import afresh
from penstock._memory.tree import leaves
from penstock.nodes import Indices


def tensors(n, start=0):
    at = torch.arange(start, start + n)
    return TensorDataset(
        at,
        at[:, None, None].expand(n, 65, 128) * 0.5,  # two rows are written into memory that is lent, one is not
        (at % 2).bool(),
        at.to(torch.bfloat16)[:, None],
        (at * 1j)[:, None],
        at.to(torch.uint8).reshape(n, 1),
        torch.empty(n, 0),
        at.repeat(4, 1).T,
    )


class Numbers(RowDataset):
    """Sample i is ``first + i``, in two fields."""

    def __init__(self, n, first=0, more=None):
        super().__init__({"numbers": ((65, 128), torch.int64), "halves": ((), torch.float32), **(more or {})}, n)
        self.first = first

    most = 0  # rows that were read at once

    def read(self, rows, out, places):
        Numbers.most = max(Numbers.most, len(rows))
        assert rows.dtype == np.int64
        assert ((rows >= 0) & (rows < len(self))).all()
        values = torch.from_numpy(rows) + self.first
        out[0][places] = values[:, None, None]
        out[1][places] = values / 2


BASE = tensors(20)
DATASETS = {
    "tensors": BASE,
    "subset by list": Subset(BASE, [3, 19, 0, 3, 7, 11]),
    "subset by range": Subset(BASE, range(19, 2, -2)),
    "subset by array": Subset(BASE, np.array([5, 4, 3, 2, 19], np.int32)),
    "subset by tensor": Subset(BASE, torch.tensor([5, 4, 3, 2, 19])),
    "subset by negative": Subset(BASE, [-1, -20, 5, -3]),
    "concat": ConcatDataset([tensors(7), tensors(5, 100), tensors(9, 50)]),
    "concat of one": ConcatDataset([tensors(7)]),
    "subset of subset": Subset(Subset(BASE, list(range(0, 20, 2))), [9, 1, -2, 4]),
    "subset of concat": Subset(ConcatDataset([tensors(7), tensors(5, 100)]), [11, 0, 6, 7, -1, -12, 3]),
    "concat of subsets": ConcatDataset([Subset(BASE, [5, 3, 1]), tensors(4, 60), Subset(tensors(3, 90), [-1, -2])]),
    "concat of concats": ConcatDataset(
        [ConcatDataset([tensors(2), tensors(3, 9)]), Subset(ConcatDataset([tensors(4), tensors(1)]), [4, 0])]
    ),
    "rows": Numbers(20),
    "subset of rows": Subset(Numbers(20), [3, 19, 0, -3, 7, 11]),
    "concat of rows": ConcatDataset([Numbers(7), Numbers(5, 100), Numbers(9, 50)]),
    "concat of subsets of rows": ConcatDataset([Subset(Numbers(20), [5, 3, -1]), Numbers(4, 60)]),
    "concat of concats of rows": ConcatDataset(
        [ConcatDataset([Numbers(2), Numbers(3, 9)]), Subset(ConcatDataset([Numbers(4), Numbers(1)]), [4, 0])]
    ),
}


@pytest.mark.parametrize(
    ("name", "batch_size"), [*pairwise(DATASETS, [1, 4, 50])[::2], *((name, 4) for name in DATASETS if "rows" in name)]
)
def test_batches_are_dataloaders(name, batch_size):
    """Also negative indices, empty parts and empty rows. Seen to fail: `_read_parts` searching from the left (the first
    sample of a part), and passing ``at`` on without ``places`` (a part inside a part)."""
    dataset = DATASETS[name]
    assert is_arrays(dataset)
    n = len(dataset)
    order = np.random.default_rng(5).permutation([*range(n), *range(-n, 0)]).tolist()
    theirs = list(DataLoader(dataset, batch_size=batch_size, sampler=order))
    Numbers.most = 0
    with Loader.from_dataset(dataset, batch_size=batch_size, sampler=order) as ours:
        batches = list(ours)
    assert Numbers.most > 1 or batch_size == 1 or "rows" not in name, "samples were made"
    assert difference(batches, theirs) is None


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 1, "method": "process"}], ids=len
)
def test_rows_of_a_mix_are_gathered(workers):
    """Also from a subset, and with large batches. Seen to fail: `Mix.only_concatenates` False, with samples that are
    made."""
    mix = Mix({"a": Numbers(7), "b": Subset(Numbers(90, 100), range(60))}, {"a": 0.3, "b": 0.7}, epoch_size=600)
    assert is_arrays(mix)
    order = mix.order(shuffle=True, seed=4).indices(0, np.arange(600))
    expected = torch.tensor([index if index < 7 else 100 + index - 7 for index in order.tolist()])
    with Loader.from_dataset(mix, batch_size=300, shuffle=True, seed=4, **workers) as loader:
        batches = list(loader)
    assert torch.cat([batch["numbers"] for batch in batches]).equal(expected[:, None, None].expand(-1, 65, 128))
    assert torch.cat([batch["halves"] for batch in batches]).equal(expected / 2)


def batch(values):
    return Indices(0, np.arange(len(values)), np.array(values))


@pytest.mark.parametrize("index", [7, -8])
def test_a_row_out_of_bounds_is_named(index):
    """On a GPU a bad index aborts the process; ``meta`` does not check either. Seen to fail: `_on` without
    `_from_0`."""
    on_device = torch.empty(7, 3, device="meta")
    for dataset in (
        Numbers(7),
        ConcatDataset([Numbers(3), Numbers(4)]),
        TensorDataset(on_device),
        ArrayDataset(on_device, 7),
    ):
        assert len(next(leaves(gathered(dataset, batch([3, -1]), 0, afresh)))) == 2
        with pytest.raises(IndexError, match=f"index {index} is out of bounds for a dataset of 7 samples"):
            gathered(dataset, batch([3, index]), 0, afresh)
    with pytest.raises(IndexError, match=f"index {index} is out of bounds for a dataset of 7 samples"):
        Numbers(7)[index]


@pytest.mark.parametrize("index", [1.5, "3", None])
def test_a_row_is_asked_for_by_a_whole_number(index):
    """Seen red without `operator.index`: row 1 came for 1.5, and row 3 for "3"."""
    assert Numbers(7)[np.int32(2)]["halves"] == Numbers(7)[torch.tensor(2)]["halves"] == 1
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        Numbers(7)[index]


def test_a_subset_that_says_it_is_shorter():
    """A negative index counts from the end of the tensors. ``meta`` stands in for a device. Seen to fail: `_on` with
    the length of the dataset."""

    class Half(TensorDataset):
        def __len__(self):
            return 5

    assert gathered(Half(torch.arange(10)), batch([-1, 7]), 0, afresh)[0].tolist() == [9, 7]
    assert gathered(Half(torch.empty(10, device="meta")), batch([-1, 7]), 0, afresh)[0].shape == (2,)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("columns", [2, 2**15])
def test_rare_types_are_gathered_by_every_torch(dtype, columns):
    """Positive and negative indices, and one out of bounds. On torch 2.6 neither index operation knows the unsigned
    types, which raised "index_select" not implemented; the one for negative indices does not know the small floats
    either."""
    dataset = TensorDataset(
        torch.arange(6).to(dtype), torch.arange(6 * columns).reshape(6, columns).to(dtype).T.contiguous().T
    )
    for order in ([5, 0, 3], [-1, 0, -6], [2, 2]):
        theirs = next(iter(DataLoader(dataset, batch_size=3, sampler=order)))
        kept = ArrayDataset(list(dataset.tensors), 6)
        for ours in (gathered(dataset, batch(order), 0, afresh), kept.batch(np.array(order), batch(order), 0)):
            for mine, its in zip(ours, theirs, strict=True):
                assert mine.dtype == its.dtype == dtype
                assert torch.equal(mine.contiguous().view(torch.uint8), its.contiguous().view(torch.uint8))
    for gather in (
        lambda: gathered(dataset, batch([0, 6]), 0, afresh),
        lambda: kept.batch(np.array([0, 6]), batch([0, 6]), 0),
    ):
        with pytest.raises(IndexError, match="6 is out of bounds"):
            gather()


@pytest.mark.parametrize(("index", "workers"), [(20, 1), (-21, 0), (10**12, 0)])
def test_an_index_that_is_out_of_bounds_is_named(index, workers):
    """Seen to fail: `_from_parts` without its check (-21 is counted from the end of the last part)."""
    for dataset in (BASE, ConcatDataset([tensors(10), tensors(10)])):
        with Loader.from_dataset(dataset, batch_size=2, sampler=[3, index], num_workers=workers) as loader:
            with pytest.raises(IndexError, match=str(index)) as raised:
                next(iter(loader))
            assert f"dataset indices [3, {index}]" in raised.value.__notes__[0]


@pytest.mark.parametrize("on_error", ["skip", lambda error, index, epoch, position: tensors(1, 77)[0]])
def test_with_on_error_the_others_are_loaded(on_error, caplog):
    """Seen to fail: `_fetched` without the ``suppress``."""
    with Loader.from_dataset(BASE, batch_size=3, sampler=[3, 20, 5], on_error=on_error) as loader:
        numbers = next(iter(loader))[0].tolist()
    assert numbers == ([3, 5] if on_error == "skip" else [3, 77, 5])
    assert "dataset index 20 (epoch 0, position 1)" in caplog.text


# Datasets that are loaded sample by sample.


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * one for one in super().__getitem__(index))


class Fetching(TensorDataset):
    def __getitems__(self, indices):
        return [tuple(3 * one for one in self[index]) for index in indices]


class OddSubset(Subset):
    def __getitem__(self, index):
        return self.dataset[self.indices[-1 - index]]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class OddSubsets(Subset):
    def __getitems__(self, indices):
        return [self.dataset[0] for _ in indices]


class OddConcat(ConcatDataset):
    def __getitem__(self, index):
        return super().__getitem__(len(self) - 1 - index)


class OddRows(Numbers):
    def __getitem__(self, index):
        return super().__getitem__(0)


class Tagging(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "dataset",
    [
        Doubled(torch.arange(6)),
        Fetching(torch.arange(6)),
        OddSubset(TensorDataset(torch.arange(6)), [1, 2, 3]),
        OddSubsets(TensorDataset(torch.arange(6)), [1, 2, 3]),
        OddConcat([TensorDataset(torch.arange(6)), TensorDataset(torch.arange(2))]),
        Subset(Doubled(torch.arange(6)), [1, 2, 3]),
        ConcatDataset([TensorDataset(torch.arange(6)), Doubled(torch.arange(6))]),
        Subset(Fetching(torch.arange(6)), [1, 2]),
        OddRows(6),
        ConcatDataset([Numbers(4), tensors(4)]),
        ConcatDataset([Numbers(4), Numbers(4, more={"numbers": ((65, 128), torch.int32)})]),
        ConcatDataset([Numbers(4), Subset(OddRows(4), [1, 2])]),
        ConcatDataset([TensorDataset(torch.arange(4)), TensorDataset(torch.arange(4.0))]),
        ConcatDataset([TensorDataset(torch.zeros(4, 2)), TensorDataset(torch.ones(4, 2).double())]),
        TensorDataset(torch.arange(4.0).as_subclass(Tagging)),
        TensorDataset(torch.arange(4.0), torch.arange(4.0).to(torch.complex64).conj()),
        TensorDataset(torch.arange(4).to(torch.uint16), torch.arange(8.0).reshape(4, 2).to(torch.float8_e4m3fn)),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_what_cannot_be_gathered_is_loaded_one_by_one(dataset):
    """What overrides something, parts that differ, and tensors that are more than their values.

    Seen to fail: `is_arrays` using only isinstance; `_form` returning the first part's.
    """
    for batch_size in (2, 4):
        with Loader.from_dataset(dataset, batch_size=batch_size) as loader:
            assert difference(list(loader), list(DataLoader(dataset, batch_size=batch_size))) is None


def test_parts_of_other_shapes_are_dataloaders_error():
    dataset = ConcatDataset([TensorDataset(torch.zeros(3, 2)), TensorDataset(torch.zeros(3, 4))])
    with Loader.from_dataset(dataset, batch_size=3) as loader:
        assert [one[0].shape for one in loader] == [(3, 2), (3, 4)]
    with Loader.from_dataset(dataset, batch_size=2) as loader, pytest.raises(RuntimeError, match="equal size"):
        list(loader)


def test_gradients_flow_into_the_dataset():
    """Such a dataset is read sample by sample, as in torch."""
    weights = torch.arange(6.0, requires_grad=True)
    with Loader.from_dataset(TensorDataset(weights, torch.arange(6)), batch_size=3) as loader:
        for values, numbers in loader:
            (values * numbers).sum().backward()
    assert weights.grad.tolist() == [0, 1, 2, 3, 4, 5]


# Batches made by `__getitems__`.

Pair = namedtuple("Pair", "x y")


class Made(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 6

    def __getitem__(self, index):
        raise AssertionError("__getitems__ is there")

    def __getitems__(self, indices):
        assert type(indices) is list
        assert all(type(index) is int for index in indices)
        return self.make(np.array(indices))


class Frame(dict):
    pass


KINDS = {
    "list": lambda at: [{"x": index} for index in at.tolist()],
    "tuple": lambda at: tuple((index, float(index)) for index in at.tolist()),
    "tensor": lambda at: torch.from_numpy(at)[:, None],
    "array": lambda at: at * 1.5,
    "dict": lambda at: {"x": at, "y": torch.from_numpy(at), "z": [str(index) for index in at]},
    "subclass of dict": lambda at: Frame(x=at),
    "named tuple": lambda at: Pair(at, torch.from_numpy(at)),
    "string": lambda at: "abc",
}


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in KINDS), ("list", NAMED["process"]), ("dict", NAMED["process"])]
)
def test_what_getitems_returns(kind, options):
    """A list holds samples; anything else is the batch. Seen to fail: `batch_of` collating everything."""
    with Loader.from_dataset(Made(KINDS[kind]), batch_size=4, **options) as loader:
        batches = list(loader)
    made = default_collate if kind in ("list", "tuple") else default_convert
    assert difference(batches, [made(KINDS[kind](np.arange(4))), made(KINDS[kind](np.arange(4, 6)))]) is None


@pytest.mark.parametrize(
    "dataset",
    [*(Made(make) for make in KINDS.values()), BASE, DATASETS["concat of subsets"]],
    ids=[*KINDS, "tensors", "concat of subsets"],
)
def test_a_collate_fn_is_handed_what_dataloader_hands_it(dataset):
    """Of any type, and once per batch; of arrays, a list of samples."""
    ours, theirs = [], []
    with Loader.from_dataset(dataset, batch_size=4, collate_fn=ours.append) as loader:
        list(loader)
    list(DataLoader(dataset, batch_size=4, collate_fn=theirs.append))
    assert difference(ours, theirs) is None


def test_getitems_of_a_subset_is_that_of_its_dataset():
    asked = []

    def make(at):
        asked.append(at.tolist())
        return {"x": at}

    with Loader.from_dataset(Subset(Made(make), [5, 3, 1]), batch_size=2, seed_global_rngs=False) as loader:
        assert [one["x"].tolist() for one in loader] == [[5, 3], [1]]
    assert asked == [[5, 3], [1]]


def test_the_users_tensor_stays_as_it_was():
    """It can be resized, and shares nothing with a batch. Seen to fail: rows taken through ``Tensor.numpy``, which
    fixes the size of the storage."""
    tensor = torch.arange(20.0).reshape(10, 2)
    with Loader.from_dataset(TensorDataset(tensor), batch_size=4) as loader:
        batches = [batch for (batch,) in loader]
    tensor.resize_(40, 2).zero_()
    assert torch.cat(batches).tolist() == torch.arange(20.0).reshape(10, 2).tolist()
