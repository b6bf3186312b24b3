"""Datasets that are arrays: a batch is one index operation per field, and no sample is ever made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from penstock._fetch.batch_schema import has_registered
from penstock._memory.allocation import pinned
from penstock._memory.tree import leaves, mapped
from penstock._random.batch_rng import BatchRng

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._fetch.indices import Indices
    from penstock._memory.allocation import Allocate


Fields = Sequence[torch.Tensor]


class ArrayDataset:
    """Rows in memory, on any device: a map-style dataset that gathers a whole batch at once.

    Args:
        fields: A tree of tensors of shape ``(length, ...)``, with the structure of a batch.
        length: Number of rows.
        augment: Called with each batch and the `BatchRng` of its samples; returns the batch to deliver.
    """

    def __init__(self, fields: Any, length: int, augment: Callable[[Any, BatchRng], Any] | None = None) -> None:
        self.fields = fields
        self.augment = augment
        self._length = length
        self._device: torch.device = next(leaves(fields)).device

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """One row as stored; ``augment`` sees batches only."""
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is out of bounds for {self._length} samples")
        return mapped(self.fields, lambda field: field[index])

    def batch(self, rows: np.ndarray, indices: Indices, seed: int) -> Any:
        """The batch of ``rows`` (int64, shape ``(n,)``); ``indices`` has their addresses, for ``augment``."""
        at = _on(self._device, rows, self._length)
        try:
            batch = mapped(self.fields, lambda field: _selected(field, at))
        except (IndexError, RuntimeError):
            batch = mapped(self.fields, lambda field: _indexed(field, at))
        if self.augment is None:
            return batch
        positions = torch.from_numpy(indices.positions).to(self._device)
        return self.augment(batch, BatchRng(seed, indices.epoch, positions))


def is_arrays(dataset: Any) -> bool:
    """Whether `gathered` may be able to read ``dataset``: one of ours, or one of torch's without an override that changes what a sample is."""
    if isinstance(dataset, ArrayDataset):
        return True
    kind = type(dataset)
    if isinstance(dataset, TensorDataset):
        return kind.__getitem__ is TensorDataset.__getitem__ and not hasattr(dataset, "__getitems__")
    if isinstance(dataset, Subset):
        own = kind.__getitem__ is Subset.__getitem__ and kind.__getitems__ is Subset.__getitems__
        return own and is_arrays(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        own = kind.__getitem__ is ConcatDataset.__getitem__ or getattr(dataset, "only_concatenates", False)
        own = own and not hasattr(dataset, "__getitems__")
        return own and all(is_arrays(part) for part in dataset.datasets)
    return False


def gathered(dataset: Any, indices: Indices, seed: int, allocate: Allocate) -> Any:
    """The batch of ``indices``, equal to what ``default_collate`` makes of the samples.

    None if an index operation is not enough: tensors that require grad, parts that differ in dtype or shape, or a collate function that
    the user registered with torch.

    Raises:
        IndexError: An index is out of bounds.
    """
    rows = indices.values
    while isinstance(dataset, Subset):
        dataset, rows = dataset.dataset, _chosen(dataset, rows)
    if isinstance(dataset, ArrayDataset):
        return dataset.batch(rows, indices, seed)
    fields = None if has_registered() else _fields(dataset)
    if fields is None:
        return None
    small = allocate is not pinned and all(one.nbytes * len(rows) <= _SMALL * one.shape[0] for one in fields)
    if small or fields[0].device.type != "cpu":
        return _into(dataset, rows, None)
    return _into(dataset, rows, allocate([((len(rows), *one.shape[1:]), one.dtype) for one in fields]))


_SMALL = 2**16
"""Bytes of a field up to which the index operation allocates its own result; that costs less than a call to the allocator."""


def _fields(dataset: Any) -> Fields | None:
    """The tensors of ``dataset`` (of its first part, if it has several); None if they are not plain or its parts disagree."""
    if isinstance(dataset, TensorDataset):
        device = dataset.tensors[0].device
        for one in dataset.tensors:
            if (
                type(one) is not torch.Tensor
                or one.layout is not torch.strided
                or one.requires_grad
                or one.is_quantized
                or one.device != device
            ):
                return None
        return dataset.tensors
    if isinstance(dataset, Subset):
        return _fields(dataset.dataset)
    if isinstance(dataset, ArrayDataset):
        return None  # inside a `ConcatDataset`
    parts = [_fields(part) for part in dataset.datasets]
    first = parts[0]
    if first is None:
        return None
    like = [(one.dtype, one.shape[1:], one.device) for one in first]
    agree = all(part is not None and [(one.dtype, one.shape[1:], one.device) for one in part] == like for part in parts)
    return first if agree else None


def _into(dataset: Any, indices: np.ndarray, out: Fields | None) -> Fields:
    """Gather into ``out``, or with None into new memory on the tensors' device."""
    if isinstance(dataset, Subset):
        return _into(dataset.dataset, _chosen(dataset, indices), out)
    if isinstance(dataset, ConcatDataset):
        return _from_parts(dataset, indices, out)
    at = _on(dataset.tensors[0].device, indices, len(dataset.tensors[0]))
    try:
        if out is None:
            return [_selected(one, at) for one in dataset.tensors]
        for one, rows in zip(dataset.tensors, out, strict=True):
            torch.index_select(_plain(one), 0, at, out=_plain(rows))
    except (IndexError, RuntimeError):
        fields = [_indexed(one, at) for one in dataset.tensors]
        return fields if out is None else [rows.copy_(field) for rows, field in zip(out, fields, strict=True)]
    return out


def _from_parts(dataset: Any, indices: np.ndarray, out: Fields | None) -> Fields:
    ends = np.asarray(dataset.cumulative_sizes)
    indices = _from_0(indices, int(ends[-1]))
    part_of = np.searchsorted(ends, indices, side="right")
    first = int(part_of[0])
    if (part_of == first).all():
        return _into(dataset.datasets[first], indices - (ends[first - 1] if first else 0), out)
    for part in np.unique(part_of):
        places = np.flatnonzero(part_of == part)
        chosen = indices[places] - (ends[part - 1] if part else 0)
        fields = _into(dataset.datasets[part], chosen, None)
        if out is None:
            out = [one.new_empty((len(indices), *one.shape[1:])) for one in fields]
        for rows, field in zip(out, fields, strict=True):
            _words(rows)[torch.from_numpy(places).to(rows.device)] = _words(field)
    assert out is not None
    return out


def _selected(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The rows ``at``, by the faster operation; it refuses negative indices."""
    return _as(tensor.dtype, _plain(tensor).index_select(0, at))


def _indexed(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The rows ``at``, by the operation that accepts negative indices, and whose error names an index out of bounds."""
    return _as(tensor.dtype, _plain(tensor)[at])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a view of it as integers of the same size if some torch version cannot index its dtype."""
    integers = _INTEGERS.get(tensor.dtype)
    return tensor if integers is None else tensor.view(integers)


def _as(dtype: torch.dtype, rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.dtype is dtype else rows.view(dtype)


_INTEGERS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A view as integers of the same size, because not every dtype can be assigned by index."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize)
    return tensor if words is None or tensor.is_complex() else tensor.view(words)


def _on(device: torch.device, indices: np.ndarray, n: int) -> torch.Tensor:
    """The indices on ``device``. Bounds are checked first for an accelerator, where an index out of bounds aborts the process."""
    if device.type == "cpu":
        return torch.from_numpy(indices)
    return torch.from_numpy(_from_0(indices, n)).to(device)


def _from_0(indices: np.ndarray, n: int) -> np.ndarray:
    """The indices with negative ones counted from the end."""
    outside = (indices < -n) | (indices >= n)
    if outside.any():
        raise IndexError(f"index {indices[outside][0]} is out of bounds for a dataset of {n} samples")
    return np.where(indices < 0, indices + n, indices)


def _chosen(subset: Subset[Any], indices: np.ndarray) -> np.ndarray:
    """The matching indices in the dataset inside ``subset``."""
    table: Any = subset.indices
    chosen = table[indices] if isinstance(table, np.ndarray | torch.Tensor) else [table[index] for index in indices.tolist()]
    return np.asarray(chosen, np.int64)
