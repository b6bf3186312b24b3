"""Each item of a sampler is one index under ``sampler=``, and one batch under ``batch_sampler=``, whatever its type: as
in `DataLoader`, by value."""

from __future__ import annotations

import pickle
from collections import deque
from itertools import groupby, product

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from penstock import GraphError, Loader
from penstock._fetch.indices import pack
from penstock.nodes import Indices
from penstock.testing import assert_resumes_everywhere


class Keys(Dataset):
    """Returns the key it got, with its type, so that a key mistaken for a batch is detected."""

    def __len__(self):
        return 99

    def __getitem__(self, key):
        if isinstance(key, np.generic) or (isinstance(key, torch.Tensor) and key.numel() == 1):
            key = key.item()  # `DataLoader` passes it on unchanged
        return f"{type(key).__name__} {key}"


class Gathering(Keys):
    """Also accepts a whole batch at once, and records that."""

    def __getitems__(self, keys):
        return [f"together {self[key]}" for key in keys]


class Yields:
    """A sampler that yields the items of a fresh ``make()`` in each epoch."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return iter(self.make())


def grouped():
    """Each group is an iterator that becomes empty when the next group begins."""
    return (group for _, group in groupby(range(9), lambda i: i // 4))


def reused():
    """Always the same list."""
    batch = []
    for i in range(5):
        batch[:] = [i, i + 10]
        yield batch


def seen(samples):
    return type(samples).__name__, samples


def loaded(workers, dataset=None, **options):
    method, count = workers or ("thread", 0)
    with Loader.from_dataset(dataset or Keys(), num_workers=count, method=method, **options) as loader:
        return list(loader)


SAMPLERS = {
    "integers": lambda: range(5),
    "batches of a BatchSampler": lambda: BatchSampler(SequentialSampler(range(5)), 2, drop_last=False),
    "lists": lambda: [[0, 1], [2], []],
    "tuples": lambda: [(0, 32), (1, 64), (2, 32)],
    "words": lambda: ["a", "bcd", ""],
    "tensors of one element": lambda: [torch.tensor(1), torch.tensor([2]), torch.tensor(3)],
    "a tensor": lambda: torch.arange(3),
    "tensors of several elements": lambda: [torch.arange(3), torch.arange(2)],
    "arrays": lambda: [np.arange(3), np.arange(2), np.arange(1)],
    "integers of NumPy": lambda: [np.int64(1), np.uint8(2), 3],
    "this and that": lambda: [3, "x", (1, 2), torch.tensor(4), None, [5], 6.5, True],
    "dicts": lambda: [{"index": 1}, {}, {"index": 2, "size": 32}],
    "huge integers": lambda: [2**70, 1],
}


@pytest.mark.parametrize(
    ("name", "batch_size", "workers"),
    [*product(SAMPLERS, [None, 2], [0]), ("this and that", None, ("process", 1)), ("tuples", 2, ("process", 1))],
)
def test_an_item_of_a_sampler_is_one_index(name, batch_size, workers):
    """Seen to fail: lists, tuples, arrays and tensors were taken for batches, so the key ``(0, 32)`` loaded the samples
    0 and 32; a list alone went to ``__getitems__``."""
    theirs = list(DataLoader(Keys(), batch_size=batch_size, sampler=SAMPLERS[name]()))
    assert loaded(workers, batch_size=batch_size, sampler=SAMPLERS[name]()) == theirs
    if batch_size is None:
        assert loaded(workers, Gathering(), batch_size=None, sampler=SAMPLERS[name]()) == theirs


BATCH_SAMPLERS = {
    "lists": lambda: [[0, 1], [2]],
    "tuples": lambda: [(0, 1), (2,)],
    "a BatchSampler": lambda: BatchSampler(SequentialSampler(range(5)), 2, drop_last=True),
    "ranges": lambda: [range(2), range(2, 7)],
    "deques": lambda: [deque([3, 1]), deque([2])],
    "sets": lambda: [{3, 1}, {2}],
    "arrays": lambda: [np.arange(2), np.array([7])],
    "arrays of words": lambda: [np.array(["a", "b"]), np.array(["c"])],
    "tensors": lambda: [torch.arange(2), torch.tensor([7])],
    "lists of tensors": lambda: [[torch.tensor(1), torch.tensor([2])], [torch.tensor(3), "x"]],
    "iterators": lambda: Yields(lambda: (iter([i, i + 1]) for i in range(3))),
    "groups": lambda: Yields(grouped),
    "the same list again": lambda: Yields(reused),
    "words": lambda: ["ab", "c"],
    "keys that are tuples": lambda: [[(0, 32), (1, 64)], [(2, 32)]],
    "keys that are lists": lambda: [[[0, 1], [2]], [[3]]],
    "keys of a dict": lambda: [{3: "x", 1: "y"}],
}


@pytest.mark.parametrize(
    ("name", "dataset", "workers"),
    [*product(BATCH_SAMPLERS, [Keys, Gathering], [0]), ("lists of tensors", Gathering, ("process", 1))],
)
def test_an_item_of_a_batch_sampler_is_a_batch(name, dataset, workers):
    """``collate_fn`` gets a list. Seen to fail: a range, a deque, a set, an iterator and a word were taken for one
    index each."""
    theirs = list(DataLoader(Keys(), batch_sampler=BATCH_SAMPLERS[name](), collate_fn=seen))
    if dataset is Gathering:
        theirs = [(kind, [f"together {sample}" for sample in samples]) for kind, samples in theirs]
    assert loaded(workers, dataset(), batch_sampler=BATCH_SAMPLERS[name](), collate_fn=seen) == theirs


def test_a_dataset_of_arrays_is_indexed_once_by_a_list():
    """As torch documents bulk reading. Seen to fail: the batch was collated from single samples, which gives the same
    values."""

    asked = []

    class Rows(TensorDataset):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    class Plain(TensorDataset):
        pass

    sampler = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    for kind in (Rows, Plain):
        dataset = kind(torch.arange(5.0) * 2, torch.arange(5))
        theirs = list(DataLoader(dataset, batch_size=None, sampler=sampler))
        asked.clear()
        ours = loaded(0, dataset, batch_size=None, sampler=sampler, seed_global_rngs=False)
        assert [[part.tolist() for part in batch] for batch in ours] == [
            [part.tolist() for part in batch] for batch in theirs
        ]
        assert asked == ([[0, 1], [2, 3], [4]] if kind is Rows else [])


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_key_is_dealt_whole_to_the_ranks(batch_size):
    sampler = [(i, 32 * i) for i in range(5)]
    ranks = [loaded(0, batch_size=batch_size, sampler=sampler, rank=rank, world_size=2) for rank in range(2)]
    shares = [[f"tuple {key}" for key in [*sampler, sampler[0]][rank::2]] for rank in range(2)]
    assert ranks == ([[share[:2], share[2:]] for share in shares] if batch_size else shares)


LONG = list(range(600))


class Spoilt(Keys):
    def __getitem__(self, key):
        if key in ([2, 3], (1, 64), LONG):
            raise LookupError("spoilt")
        return super().__getitem__(key)


def test_an_error_names_the_whole_key():
    """Cut if it is long. Seen to fail: it named a batch, or one number of the key; a note of 3,000 characters."""
    for options, name in (
        ({"batch_size": None, "sampler": [[0, 1], [2, 3]]}, r"dataset index [2, 3] (epoch 0, position 1)"),
        ({"batch_size": None, "sampler": [LONG]}, f"dataset index {str(LONG)[:79]}… (epoch 0, position 0)"),
        ({"batch_size": 2, "sampler": [(0, 32), (1, 64)]}, r"dataset index (1, 64) (epoch 0, position 1)"),
        ({"batch_sampler": [[(0, 32)], [(0, 64), (1, 64)]]}, r"dataset index (1, 64) (epoch 0, position 2)"),
    ):
        with pytest.raises(LookupError) as raised:
            loaded(0, Spoilt(), **options)
        assert raised.value.__notes__ == [f"while loading {name}"]


@pytest.mark.parametrize("workers", [0, ("process", 1)])
def test_a_key_is_skipped_as_one_sample(workers, caplog):
    skipped = loaded(workers, Spoilt(), batch_size=3, sampler=[(0, 32), (1, 64), (2, 96)], on_error="skip")
    assert skipped == [["tuple (0, 32)", "tuple (2, 96)"]]
    assert "dataset index (1, 64) (epoch 0, position 1)" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": None, "sampler": BatchSampler(RandomSampler(range(5)), 2, False)},
        {"batch_size": 2, "sampler": [(i, 32) for i in range(5)]},
        {"batch_sampler": [[(0, 32), (1, 64)], [(2, 32)]]},
        {"batch_sampler": [range(3), {5}, torch.arange(2)]},
    ],
)
def test_keys_resume_everywhere(options):
    assert_resumes_everywhere(lambda: Loader.from_dataset(Keys(), collate_fn=seen, **options), steps=8)


@pytest.mark.parametrize("value", [[0, 1], (0, 1), np.arange(2), "ab", None])
def test_an_address_keeps_its_key(value):
    """Seen to fail: `plain` made a list of an array that is one key."""
    one = pickle.loads(pickle.dumps(Indices(1, 2, value)))
    assert not one.is_batch
    assert type(one.plain()) is type(value)
    assert repr(one.plain()) == repr(value)
    batch = pack([one, one])
    assert (batch.is_batch, type(batch.values)) == (True, list)
    assert repr(batch[1].values) == repr(value)


# Graphs built by hand.


def test_a_list_that_nobody_spoke_about_is_refused(wrap):
    """Seen to fail: it was a batch."""
    with pytest.raises(
        ValueError, match=r"list yields lists, .*batches=True\) for batches, or batches=False where"
    ) as raised:
        next(wrap([0, [1, 2]]))
    assert raised.value.__notes__[0] == "while reading the indices of epoch 0 from list"


def test_what_is_no_batch_is_refused(wrap):
    """Seen to fail: with ``list(item)`` alone, whose error names neither the sampler nor the way out."""
    for sampler, name in (([[1, 2], 3], "3"), ([torch.tensor(3)], r"tensor\(3\)"), ([None], "None")):
        with pytest.raises(TypeError, match=rf"list yields {name}, which is not a batch.*sampler=.*batches=False"):
            next(wrap(sampler, batches=True))


def test_an_error_inside_a_batch_is_its_own(wrap):
    """Not "is not a batch". Seen to fail: with the batch read inside the ``try`` around its ``iter``."""

    def broken():
        yield 1
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        next(wrap(Yields(lambda: [broken()]), batches=True))


def test_a_batch_sampler_of_torch_needs_no_word(wrap):
    class Own(BatchSampler):
        def __iter__(self):
            return iter([(1, 2), (3,)])

    for sampler in (BatchSampler(range(1, 4), 2, drop_last=False), Own(range(3), 2, False)):
        assert [item.plain() for item in wrap(sampler)] == [[1, 2], [3]]
    assert [item.plain() for item in wrap(Own(range(3), 2, False), batches=False)] == [(1, 2), (3,)]
    assert [item.plain() for item in wrap([(1, 2), (3,)])] == [(1, 2), (3,)]


@pytest.mark.parametrize("batch_size", [None, 2])
def test_shares_in_batches_are_no_indices(batch_size):
    """A ``BatchSampler`` over a ``DistributedSampler`` as ``sampler=``. Seen to fail: it was taken over as if it were a
    batch sampler."""
    sampler = BatchSampler(DistributedSampler(range(8), 2, 0), 2, False)
    with pytest.raises(
        GraphError,
        match=(
            r"DistributedSampler shards .*pass the BatchSampler as batch_sampler=.*the sampler that the "
            r"DistributedSampler shards"
        ),
    ):
        Loader.from_dataset(Keys(), batch_size=batch_size, sampler=sampler)
