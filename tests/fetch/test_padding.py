"""penstock.pad: what it pads, and what it leaves alone."""

from __future__ import annotations

import os
import pickle
import signal
from typing import NamedTuple

import numpy as np
import pytest
import torch

from penstock import Buckets, Loader, pad
from penstock.nodes import Fetch
from penstock.testing import plain


def test_pads_to_the_longest_rounded_up():
    """Seen red with a length that is one step too long."""
    samples = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.int64)]
    assert pad()(samples).tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    assert pad(-1, 4)(samples).tolist() == [[1, 2, 3, -1], [4, -1, -1, -1], [-1] * 4]
    assert pad(0, 3)(samples).shape == (3, 3)


def test_a_number_pads_every_field_that_has_a_dimension():
    samples = [{"a": [1, 2], "b": np.ones(1), "id": 7, "name": "x"}, {"a": [3], "b": np.ones(3), "id": 8, "name": "y"}]
    assert plain(pad(0)(samples)) == {
        "a": ("torch.int64", [[1, 2], [3, 0]]),
        "b": ("torch.float64", [[1, 0, 0], [1, 1, 1]]),
        "id": ("torch.int64", [7, 8]),
        "name": ["x", "y"],
    }


def test_a_dict_pads_the_fields_that_it_names():
    """Images are not rounded up, and labels get their own value."""
    samples = [
        {"tokens": [1, 2], "labels": [1, 2], "image": torch.zeros(3, 4)},
        {"tokens": [3], "labels": [3], "image": torch.zeros(3, 4)},
    ]
    batch = pad({"tokens": 0, "labels": -100}, to_multiple_of=4, lengths=True)(samples)
    assert batch["tokens"].tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, -100, -100], [3, -100, -100, -100]]
    assert batch["image"].shape == (2, 3, 4)
    assert plain(batch["tokens_lengths"]) == plain(batch["labels_lengths"]) == ("torch.int64", [2, 1])
    assert set(batch) == {"tokens", "labels", "image", "tokens_lengths", "labels_lengths"}


def test_lengths_are_those_of_the_fields_with_a_dimension():
    assert set(pad(lengths=True)([{"a": [1], "id": 3}])) == {"a", "a_lengths", "id"}


class Pair(NamedTuple):
    audio: torch.Tensor
    label: int


def test_takes_tuples():
    batch = pad()([(torch.ones(2), 1), (torch.ones(1), 2)])
    assert plain(batch) == [("torch.float32", [[1, 1], [1, 0]]), ("torch.int64", [1, 2])]
    named = pad()([Pair(torch.ones(2), 1), Pair(torch.ones(1), 2)])
    assert type(named) is Pair
    assert plain(named) == plain(batch)


@pytest.mark.parametrize(
    ("words", "samples", "error", "said"),
    [
        ({"value": "0"}, [], ValueError, "value='0' must be a number"),
        ({"to_multiple_of": 0}, [], ValueError, "to_multiple_of=0 must be"),
        (
            {"value": {"x": 0}},
            [{"a": [1]}],
            ValueError,
            r"pad has a value for 'x', but the samples have the fields \['a'\]",
        ),
        (
            {"value": {"a": 0}},
            [{"a": 5}],
            ValueError,
            "to be padded, the field 'a' must be a tensor, an array or a list of numbers, not 5",
        ),
        (
            {"value": {"a": 0}},
            [[1]],
            TypeError,
            "pad with a value for each field needs samples that are dicts, not list",
        ),
        ({"lengths": True}, [[1]], TypeError, "pad with lengths=True needs samples that are dicts"),
        (
            {},
            [{"a": [1]}, {"b": [1]}],
            ValueError,
            r"a sample has the fields \['b'\], but the first one of its batch has \['a'\]",
        ),
        ({"value": 0.5}, [{"a": [1]}], ValueError, "pad=0.5 does not fit the field 'a', which is torch.int64"),
        (
            {"value": -1},
            [torch.ones(1, dtype=torch.uint8)],
            ValueError,
            "pad=-1 does not fit the sample, which is torch.uint8",
        ),
        (
            {},
            [np.ones((1, 2)), np.ones((1, 3))],
            ValueError,
            r"the sample is torch.float64 of shape \[1, 3\] in one sample and",
        ),
        ({}, [(np.ones(1), 1), (np.ones(1, int), 1)], ValueError, "element 0 is torch.int64"),
        (
            {"lengths": True},
            [{"a": [1], "a_lengths": 5}],
            ValueError,
            "adds a field a_lengths, which the samples already have",
        ),
        ({"lengths": True}, [{"a_lengths": 5, "a": [1]}], ValueError, "adds a field a_lengths"),
        ({}, [{"a": [1]}, [1]], TypeError, "a sample is a list, but the first one of its batch is a dict"),
        (
            {},
            [{"a": [1]}, {"a": 5}],
            ValueError,
            "the field 'a' is to be padded, so it must be a tensor, .* in every sample, not 5",
        ),
        ({}, [{"a": [[1, 2], [3]]}], ValueError, "the field 'a' cannot be converted to a tensor"),
    ],
)
def test_refuses(words, samples, error, said):
    with pytest.raises(error, match=said):
        pad(**words)(samples)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.bfloat16,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [1, 2])
def test_every_dtype_is_padded_as_torch_would(dtype, step):
    """Seen red with a row that was written one step too far to the right. Strides are followed."""
    samples = [torch.arange(12 * n).reshape(-1, 3).to(dtype)[::step] for n in (2, 0, 3, 1)]
    batch = pad(1, 5)(samples)
    assert batch.dtype == dtype
    expected = torch.full((4, -(-len(samples[2]) // 5) * 5, 3), 1, dtype=dtype)
    for row, sample in enumerate(samples):
        expected[row, : len(sample)] = sample
    assert torch.equal(batch, expected)


def test_arrays_may_run_backwards_and_be_read_only():
    one, other = np.arange(4)[::-1], np.arange(3)
    other.flags.writeable = False
    assert pad(7)([one, other]).tolist() == [[3, 2, 1, 0], [0, 1, 2, 7]]


def test_empty_samples_say_nothing():
    """Seen red with empty rows that were written all the same: the list has no dimension of 2."""
    assert pad(5)([[], np.ones((1, 2), np.int32)]).tolist() == [[[5, 5]], [[1, 1]]]


def test_gradients_pass_through():
    sample = torch.ones(2, requires_grad=True)
    batch = pad()([sample, torch.ones(3)])
    (2 * batch).sum().backward()
    assert sample.grad is not None
    assert sample.grad.tolist() == [2, 2]


def test_a_value_too_large_for_half_precision_is_infinite():
    """As in torch from 2.7 on. Seen red with NumPy's warning."""
    try:
        torch.zeros(1, dtype=torch.half).fill_(1e9)
    except RuntimeError:
        pytest.skip("this torch refuses it")
    assert pad(1e9)([np.ones(1, np.float16), np.ones(2, np.float16)]).tolist() == [[1, float("inf")], [1, 1]]


def test_what_is_padded_is_written_into_the_memory_of_the_batch():
    """All fields get their memory at once. Seen red with one call for each field, whose memory was then the same."""
    memory, asked = torch.zeros(64, dtype=torch.int64), []

    def allocate(specs):
        asked.append(specs)
        return [memory[:6].view(2, 3), memory[6:10].view(2, 2)]

    samples = [{"a": np.array([1, 2, 3]), "b": [4]}, {"a": np.array([5]), "b": [6, 7]}]
    batch = Fetch(samples, pad(-1)).collate(samples, allocate)
    assert asked == [[((2, 3), torch.int64), ((2, 2), torch.int64)]]
    assert memory[:10].tolist() == [1, 2, 3, 5, -1, -1, 4, -1, 6, 7]
    assert [batch[name].data_ptr() - memory.data_ptr() for name in "ab"] == [0, 48]


class Long:
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return np.full(5000 + index, index)


class Mishaps(Long):
    """Sample 5 is bad, and sample 22 kills its worker the first time."""

    def __init__(self, flag):
        self.flag = flag

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("bad")
        if index == 22 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_skipped_sample_and_a_killed_worker_leave_the_others_as_they_are(tmp_path, caplog):
    """Seen red with memory for as many rows as there are indices."""
    words = {"num_workers": 2, "method": "process", "multiprocessing_context": "fork", "on_error": "skip"}
    with Loader.from_dataset(Mishaps(tmp_path / "flag"), 4, collate_fn=pad(-1), **words) as loader:
        batches = list(loader)
    assert "signal SIGKILL" in caplog.text
    assert len(batches) == 12
    for number, batch in enumerate(batches):
        indices = [index for index in range(4 * number, 4 * number + 4) if index != 5]
        expected = torch.full((len(indices), 5000 + indices[-1]), -1)
        for row, index in enumerate(indices):
            expected[row, : 5000 + index] = index
        assert torch.equal(batch, expected)


class Ragged:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"tokens": torch.full((index % 7 + 1,), index)}


def test_collates_buckets_in_a_worker_process():
    collate = pad({"tokens": -1}, 4, lengths=True)
    assert plain(pickle.loads(pickle.dumps(collate))([Ragged()[3]])) == plain(collate([Ragged()[3]]))
    groups = Buckets(np.arange(40) % 7 + 1, 24, block=20)
    with Loader.from_dataset(Ragged(), groups=groups, collate_fn=collate, shuffle=True, num_workers=1) as loader:
        batches = list(loader)
    assert sorted(batch["tokens"][row, 0].item() for batch in batches for row in range(len(batch["tokens"]))) == list(
        range(40)
    )
    assert all(batch["tokens"].shape[1] in (4, 8) for batch in batches)


def test_a_negative_zero_is_no_positive_one():
    """Seen to fail: a cache took them for equal, and padded with the one that came first."""
    for value in (0.0, -0.0):
        assert torch.signbit(pad(value)([torch.ones(1), torch.ones(2)])[0, 1]).item() is (str(value) == "-0.0")


@pytest.mark.parametrize(
    ("make", "what", "value"),
    [
        (lambda i: {"images": [torch.zeros(3, 4 + i, 5)]}, "the field 'images'", 0),
        (lambda i: {"images": torch.zeros(3, 4 + i, 5), "x": [1]}, "the field 'images'", {"x": 0}),
        (lambda i: ([1], [torch.zeros(3, 4 + i, 5)]), "element 1", 0),
        (lambda i: [torch.zeros(3, 4 + i, 5)], "the sample", 0),
    ],
    ids=["list", "no value", "tuple", "bare"],
)
def test_what_is_not_padded_and_cannot_be_collated_is_named(make, what, value):
    """Fails if all that is said is torch's own error, of a stack."""
    with pytest.raises(RuntimeError, match="equal size") as caught:
        pad(value)([make(i) for i in range(2)])
    assert caught.value.__notes__[0].startswith(f"in {what}, which is collated as it is")
