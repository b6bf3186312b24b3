"""Samples that travel in columns arrive as they were."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

import penstock
from penstock._fetch.columns import MOST_BYTES, in_columns, in_rows
from penstock._memory.parcel import Parcel, unpack

Pair = namedtuple("Pair", "x y")


class Strange(torch.Tensor):
    pass


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [torch.full(shape, k, dtype=dtype) for k in range(3)]


def arrays(*shape: int, dtype: Any = "f4") -> list[Any]:
    return [np.full(shape, k, dtype) for k in range(3)]


def quantized() -> list[Any]:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch will remove it
        return [torch.quantize_per_tensor(torch.ones(2), 0.1, k, torch.quint8) for k in range(2)]


TOGETHER: dict[str, list[Any]] = {
    "tensors": tensors(2, 3),
    "numbers in tensors": tensors(),
    "empty tensors": tensors(0, 2),
    "half precision": tensors(4, dtype=torch.bfloat16),
    "complex": tensors(4, dtype=torch.complex64),
    "conjugated": [one.conj() for one in tensors(4, dtype=torch.complex64)],
    "expanded": [torch.full((1,), k).expand(5) for k in range(3)],
    "not contiguous": [torch.arange(6).reshape(2, 3).t() + k for k in range(3)],
    "one sample": tensors(2)[:1],
    "as large as may be": tensors(MOST_BYTES // 4),
    "dicts": [{"x": x, "n": n, "s": str(n)} for n, x in enumerate(tensors(3))],
    "dicts of two": [{"x": x, 7: y} for x, y in zip(tensors(3), arrays(2), strict=True)],
    "one field of others": [
        {"x": x, "y": y} for x, y in zip(tensors(3), [torch.zeros(k) for k in range(3)], strict=True)
    ],
    "lists": [[x, None] for x in tensors(3)],
    "tuples": [(x, {"deep": x}) for x in tensors(3)],
    "arrays": arrays(2, 2),
    "records": arrays(2, dtype=[("a", "i4"), ("b", "f8")]),
    "dates": [np.array(["2026-01-01", "2027-01-01"], "M8[D]") + k for k in range(3)],
    "words": [np.array(["abc", "d"]), np.array(["efg", "h"])],
    "read only": [np.broadcast_to(np.float32(k), (3,)) for k in range(3)],
}
ALONE: dict[str, list[Any]] = {
    "other shapes": [torch.zeros(k) for k in range(3)],
    "other dtypes": [torch.zeros(2, dtype=torch.float64), torch.zeros(2)],
    "too large": tensors(MOST_BYTES // 4 + 1),
    "with gradients": [torch.zeros(2), torch.zeros(2, requires_grad=True)],
    "sparse": [one.to_sparse() for one in tensors(3)],
    "without memory": [one.to("meta") for one in tensors(3)],
    "one is sparse": [torch.zeros(3), torch.zeros(3).to_sparse()],
    "quantized": quantized(),
    "subclasses": [one.as_subclass(Strange) for one in tensors(2)],
    "arrays of objects": arrays(2, dtype=object),
    "arrays without dimensions": arrays(),
    "other order of bytes": arrays(2, dtype=">f4"),
    "other arrays": [np.zeros(2, "f8"), np.zeros(2, "f4")],
    "arrays of other shapes": [np.zeros(2), np.zeros(3)],
    "tensors or arrays in a field": [{"x": torch.zeros(2)}, {"x": np.zeros(2)}],
    "a subclass in a field": [{"x": torch.zeros(2)}, {"x": torch.zeros(2).as_subclass(Strange)}],
    "tensors and arrays": [torch.zeros(2), np.zeros(2, "f4")],
    "named tuples": [Pair(x, 1) for x in tensors(2)],
    "other keys": [{"x": torch.zeros(2)}, {"y": torch.zeros(2)}],
    "other order of keys": [{"x": torch.zeros(2), "y": torch.ones(2)}, {"y": torch.ones(2), "x": torch.zeros(2)}],
    "other lengths": [(torch.zeros(2),), (torch.zeros(2), 1)],
    "other kinds": [(torch.zeros(2),), [torch.zeros(2)]],
    "numbers": [1, 2, 3],
    "nothing": [],
    "empty": [{}, {}],
}


def check_same(one: Any, other: Any) -> None:
    """Equal in every type, dtype, shape and value."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert [*one] == [*other]
        for key in one:
            check_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            check_same(mine, its)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        assert one.layout == other.layout
        assert one.device == other.device
        assert one.is_meta or torch.equal(
            *(each.dequantize() if each.is_quantized else each.to_dense() for each in (one, other))
        )
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tolist() == other.tolist()
    else:
        assert one == other


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("name", [*TOGETHER, *ALONE])
def test_samples_are_the_same_after_the_journey(name: str) -> None:
    """Seen to fail, each for its cases: without a look at the shapes, dtypes, types, keys (and their order), lengths,
    gradients, layouts, dimensions or the order of bytes."""
    samples = TOGETHER.get(name) or ALONE[name]
    sent = in_columns(samples)
    assert (sent is not samples) == (name in TOGETHER)
    parcel = Parcel(sent)
    memory = np.zeros(parcel.end(), np.uint8)
    parcel.write(memoryview(memory))
    check_same(
        list(in_rows(unpack(memory))), [one.resolve_conj() if isinstance(one, torch.Tensor) else one for one in samples]
    )


class Odd(Dataset[Any]):
    """Samples of which every eighth is another one; none of these begins a batch of 16."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        odd = index % 8 == 5
        x = torch.full((4,), index, dtype=torch.float64 if odd and self.kind == "dtypes" else torch.float32)
        if self.kind == "tuples":
            return x, index, np.full(2, index)
        words = {"x": x, "n": index, "s": f"sample {index}"}
        return {**words, "more": x} if odd and self.kind == "keys" else words


class Forward(IterableDataset[Any]):
    """The same samples, dealt to the workers."""

    def __init__(self, kind: str) -> None:
        self.all = Odd(kind)

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, len(self.all), info.num_workers):
            yield self.all[index]


@pytest.mark.parametrize("kind", ["plain", "tuples", "dtypes", "keys"])
def test_a_batch_of_parts_is_torchs(kind: str) -> None:
    """Two workers read half of each batch. Seen to fail: with columns put together in the order of the workers."""
    stream = penstock.Stream(Forward(kind), lanes=8, epoch_size=96)
    with penstock.Loader.from_dataset(stream, batch_size=16, num_workers=2) as loader:
        for begin, batch in zip(range(0, 96, 16), loader, strict=True):
            samples = [Odd(kind)[index] for index in range(begin, begin + 16)]
            check_same(batch, default_collate(samples))


def only_common(sample: dict[str, Any]) -> Any:
    if sample["n"] % 8 == 5:
        raise ValueError("an odd one")
    return sample


def test_parts_with_failures_are_put_together() -> None:
    """Seen to fail: with the samples that are left taken for the first of their part."""
    stream = penstock.Stream(Forward("plain"), lanes=8, epoch_size=96)
    with penstock.Loader.from_dataset(
        stream, batch_size=48, num_workers=2, transform=only_common, on_error="skip"
    ) as loader:
        found = [index for batch in loader for index in batch["n"].tolist()]
    assert found == [index for index in range(96) if index % 8 != 5]
