"""Tensors of every kind, by name, and what is in one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Mine(torch.Tensor):
    """A subclass."""


@dataclass
class Record:
    tokens: torch.Tensor
    label: int


def of(dtype: torch.dtype) -> torch.Tensor:
    """Six values of any dtype, by their bytes if there is no conversion."""
    try:
        return torch.arange(6).to(dtype)
    except (RuntimeError, NotImplementedError):
        return torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(dtype)


def nested(**words: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], **words)


_NEW = """uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
complex32 bits8 bits16 bfloat16"""
DTYPES = [name for name in _NEW.split() if hasattr(torch, name)]  # some are newer than torch 2.6

KINDS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: of(getattr(torch, name)) for name in DTYPES},  # type: ignore[misc]
    "gradient": lambda: of(torch.float8_e5m2).requires_grad_(),
    "subclass": lambda: of(torch.uint16).as_subclass(Mine),
    "parameter": lambda: torch.nn.Parameter(of(torch.float8_e5m2), requires_grad=False),
    "empty": lambda: torch.empty((0, 3), dtype=torch.uint16),
    "empty subclass": lambda: torch.empty((0, 3), dtype=torch.uint16).as_subclass(Mine),
    "transposed": lambda: of(torch.uint16).reshape(2, 3).t(),
    "transposed subclass": lambda: of(torch.uint16).reshape(2, 3).t().as_subclass(Mine),
    "strided": lambda: torch.arange(12).to(torch.uint16)[::2],
    "expanded": lambda: torch.tensor([7]).to(torch.uint16).expand(4),
    "number": lambda: torch.tensor(7).to(torch.uint64),
    "view of a large one": lambda: torch.arange(100_000).to(torch.uint16)[7:9],
    "large": lambda: torch.arange(50_000).to(torch.uint16),
    "shared": lambda: of(torch.uint16).share_memory_(),
    "conjugated": lambda: torch.tensor([1 + 2j, 3j]).to(torch.complex32).conj(),
    "in containers": lambda: {"a": of(torch.uint16), "b": [of(torch.float8_e5m2), (of(torch.uint64), 3)]},
    "in a record": lambda: Record(of(torch.uint32), 3),
    "in an array": lambda: np.array([of(torch.uint16), None], dtype=object),
    "sparse": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), of(torch.float8_e5m2)[:2], (3,)),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8),
    "nested": nested,
    "jagged": lambda: nested(layout=torch.jagged),
    "jagged uint16": lambda: torch.nested.nested_tensor_from_jagged(of(torch.uint16), torch.tensor([0, 2, 6])),
    "meta": lambda: torch.empty(3, dtype=torch.uint16, device="meta"),
    "large meta": lambda: torch.empty(10**12, device="meta"),
}


_PROTOTYPES = ["TypedStorage is dep", "torch.quantize", "ComplexHalf", "The PyTorch API of nested", "Sparse"]
of_prototypes = pytest.mark.filterwarnings(*(f"ignore:{text}" for text in _PROTOTYPES))
"""Torch warns of some kinds, once in each process, wherever one is made or rebuilt first."""

SLOW = ["jagged", "jagged uint16"]
"""For them, torch imports for seconds."""


def make(name: str) -> Any:
    """One of ``KINDS``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch's kinds are prototypes
        return KINDS[name]()


def content(value: Any) -> Any:
    """What is in ``value``, for a comparison."""
    if isinstance(value, dict):
        return {key: content(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [content(one) for one in value]
    if isinstance(value, Record):
        return Record, content(value.tokens), value.label
    if isinstance(value, np.ndarray):
        return value.dtype, content(value.tolist())
    if not isinstance(value, torch.Tensor):
        return value
    head = type(value), value.dtype, value.layout, value.device, value.requires_grad
    if value.is_nested:
        return head, [content(one) for one in value.unbind()]
    if value.is_meta:
        return head, value.shape
    if value.layout is torch.sparse_coo:
        return head, value.shape, content(methodcaller("_indices")(value)), content(methodcaller("_values")(value))
    if value.layout is torch.sparse_csr:
        return head, value.to_dense().tolist()
    if value.is_quantized:
        return head, value.q_scale(), content(value.int_repr())
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().contiguous()
    return head, value.shape, plain.view(-1).view(torch.uint8).tolist() if plain.numel() else []


def as_they_are(batch: Any) -> Any:
    """A ``collate_fn``."""
    return batch


class Yields(IterableDataset[Any]):
    """Of each kind of ``names``: (number, such a tensor); every worker its share."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for number in range(info.id if info else 0, len(self.names), info.num_workers if info else 1):
            yield number, self.of(number)

    def of(self, number: int) -> Any:
        return make(self.names[number])


class HoldsAndYields(Yields):
    """Made before it is read."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.held = [make(name) for name in names]

    def of(self, number: int) -> Any:
        return self.held[number]


class Holds(Dataset[Any]):
    """The same, read by index."""

    def __init__(self, names: list[str]) -> None:
        self.held = [make(name) for name in names]

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, number: int) -> Any:
        return number, self.held[number]
