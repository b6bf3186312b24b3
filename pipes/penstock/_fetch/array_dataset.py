"""Datasets that are arrays, or that read many rows at once: a batch is gathered per field, without creating individual
samples.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from penstock._arguments import Shown
from penstock._fetch.error_policy import annotate
from penstock._fetch.torch_collate import has_registered
from penstock._memory.allocation import afresh, pinned
from penstock._memory.tree import leaves, mapped
from penstock._random.batch_rng import BatchRng

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock._fetch.indices import Indices
    from penstock._memory.allocation import Allocate, Spec


class ArrayDataset(Shown):
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

    def details(self) -> dict[str, Any]:
        return {"samples": self._length, "device": self._device}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """One row as stored; ``augment`` applies to batches only."""
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is out of bounds for {self._length} samples")
        return mapped(self.fields, lambda field: field[index])

    def batch(self, rows: np.ndarray, indices: Indices, seed: int) -> Any:
        """The batch of ``rows`` (int64, shape ``(n,)``); ``indices`` holds their addresses, for ``augment``."""
        at = _on(self._device, rows, self._length)
        batch = mapped(self.fields, lambda field: _rows(field, at))
        if self.augment is None:
            return batch
        positions = torch.from_numpy(indices.positions).to(self._device)
        return self.augment(batch, BatchRng(seed, indices.epoch, positions))


class RowDataset(Dataset[Any]):
    """Samples of fixed shapes that are read many at a time, directly into a batch; also inside a ``Subset``, a
    ``ConcatDataset`` or a `Mix`.

    Args:
        row: The shape and dtype of each field of a sample, by name.
        length: Number of samples.
    """

    def __init__(self, row: Mapping[str, Spec], length: int) -> None:
        self.row = dict(row)
        self.form = _Form(list(row), list(row.values()), _CPU)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = _from_0(np.array([operator.index(index)], np.int64), self._length)
        out = afresh([((1, *shape), dtype) for shape, dtype in self.row.values()])
        self.read(rows, out, ALL)
        return {name: field[0] for name, field in zip(self.row, out, strict=True)}

    def read(self, rows: np.ndarray, out: Sequence[torch.Tensor], places: Places) -> None:
        """Write samples into a batch.

        Args:
            rows: int64, shape ``(n,)``, each from 0 to ``len - 1``.
            out: The fields of the batch, in the order of ``row``: contiguous, on the CPU.
            places: Where each of the ``n`` samples goes in the first dimension of ``out``.
        """
        raise NotImplementedError


Places = np.ndarray | slice
"""Rows of a batch: an int64 array, or `ALL` rows in order."""

ALL = slice(None)


def is_arrays(dataset: Any) -> bool:
    """Whether `gathered` may be able to read ``dataset``: one of ours, or one of torch's without an override that
    changes its samples.
    """
    if isinstance(dataset, ArrayDataset):
        return True
    kind = type(dataset)
    if isinstance(dataset, RowDataset):
        return kind.__getitem__ is RowDataset.__getitem__ and not hasattr(dataset, "__getitems__")
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
    """The batch of ``indices``, equal to what ``default_collate`` would make of the samples.

    None if gathering is not enough: for tensors that require grad, parts that differ in dtype or shape, or a collate
    function that the user registered with torch.

    Raises:
        IndexError: An index is out of bounds.
    """
    rows = indices.values
    while isinstance(dataset, Subset):
        dataset, rows = dataset.dataset, _chosen(dataset, rows)
    if isinstance(dataset, ArrayDataset):
        return dataset.batch(rows, indices, seed)
    form = None if has_registered() else _form(dataset)
    if form is None:
        return None
    specs = [((len(rows), *shape), dtype) for shape, dtype in form.specs]
    large = any(math.prod(shape) * dtype.itemsize > _SMALL for shape, dtype in specs)
    lent = form.device.type == "cpu" and (large or allocate is pinned)
    if isinstance(dataset, TensorDataset) and not lent:
        at = _on(form.device, rows, len(dataset.tensors[0]))
        return [_rows(one, at) for one in dataset.tensors]
    out = (allocate(specs) if lent else None) or [
        torch.empty(shape, dtype=dtype, device=form.device) for shape, dtype in specs
    ]
    _read(dataset, rows, out, ALL)
    return out if form.names is None else dict(zip(form.names, out, strict=True))


_SMALL = 2**16
"""Fields of up to this many bytes are allocated directly unless they are to be pinned, which costs less than a call to
the allocator.
"""


class _Form(NamedTuple):
    """The form of a dataset's samples.

    Attributes:
        names: Names of the fields if samples are dicts; None if they are tuples.
        specs: Shape and dtype of each field.
        device: The device that holds them.
    """

    names: list[str] | None
    specs: list[Spec]
    device: torch.device


def _form(dataset: Any) -> _Form | None:
    """None if the tensors of ``dataset`` are not plain, or its parts disagree."""
    if isinstance(dataset, RowDataset):
        return dataset.form
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
        return _Form(None, [(one.shape[1:], one.dtype) for one in dataset.tensors], device)
    if isinstance(dataset, Subset):
        return _form(dataset.dataset)
    if isinstance(dataset, ArrayDataset):
        return None  # inside a `ConcatDataset`
    first, *others = map(_form, dataset.datasets)
    return first if all(other == first for other in others) else None


_CPU = torch.device("cpu")


def _read(
    dataset: Any, rows: np.ndarray, out: Sequence[torch.Tensor], places: Places, *, checked: bool = False
) -> None:
    """Write samples into ``places`` of a batch. ``checked`` promises that rows are from 0 to ``len - 1``."""
    if isinstance(dataset, Subset):
        _read(dataset.dataset, _chosen(dataset, rows), out, places)
    elif isinstance(dataset, ConcatDataset):
        _read_parts(dataset, rows, out, places)
    elif isinstance(dataset, RowDataset):
        dataset.read(rows if checked else _from_0(rows, len(dataset)), out, places)
    else:
        _read_tensors(dataset.tensors, rows, out, places)


def _read_parts(dataset: Any, rows: np.ndarray, out: Sequence[torch.Tensor], places: Places) -> None:
    ends = np.asarray(dataset.cumulative_sizes)
    rows = _from_0(rows, int(ends[-1]))
    part_of = np.searchsorted(ends, rows, side="right")
    parts = set(part_of.tolist())
    for part in parts:
        start = ends[part - 1] if part else 0
        try:
            if len(parts) == 1:
                _read(dataset.datasets[part], rows - start, out, places, checked=True)
            else:
                at = np.flatnonzero(part_of == part)
                _read(
                    dataset.datasets[part],
                    rows[at] - start,
                    out,
                    at if isinstance(places, slice) else places[at],
                    checked=True,
                )
        except Exception as exc:
            if getattr(dataset, "only_concatenates", False):
                annotate(exc, f"in the source {dataset.names[part]!r} of a mix")
            raise


def _read_tensors(
    tensors: Sequence[torch.Tensor], rows: np.ndarray, out: Sequence[torch.Tensor], places: Places
) -> None:
    at = _on(tensors[0].device, rows, len(tensors[0]))
    for tensor, field in zip(tensors, out, strict=True):
        if isinstance(places, slice):
            try:
                torch.index_select(_plain(tensor), 0, at, out=_plain(field))
            except (IndexError, RuntimeError):
                field.copy_(_indexed(tensor, at))
        else:
            _words(field)[torch.from_numpy(places).to(field.device)] = _words(_indexed(tensor, at))


def _rows(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The rows ``at``. Uses the faster operation unless there are negative indices, which it refuses."""
    try:
        return _as(tensor.dtype, _plain(tensor).index_select(0, at))
    except (IndexError, RuntimeError):
        return _indexed(tensor, at)


def _indexed(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The rows ``at``, by the operation that accepts negative indices and whose error names an index out of bounds."""
    return _as(tensor.dtype, _plain(tensor)[at])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a view of it as integers of the same size if this torch version cannot index its dtype."""
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
    """The indices on ``device``.

    For an accelerator, bounds are checked first, because an index out of bounds would abort the process.
    """
    if device.type == "cpu":
        return torch.from_numpy(indices)
    return torch.from_numpy(_from_0(indices, n)).to(device)


def _from_0(indices: np.ndarray, n: int) -> np.ndarray:
    """The indices with negative ones counted from the end."""
    if len(indices) and indices.view(np.uint64).max() < n:  # negative indices are huge as unsigned numbers
        return indices
    outside = (indices < -n) | (indices >= n)
    if outside.any():
        raise IndexError(f"index {indices[outside][0]} is out of bounds for a dataset of {n} samples")
    return np.where(indices < 0, indices + n, indices)


def _chosen(subset: Subset[Any], indices: np.ndarray) -> np.ndarray:
    """The corresponding indices in the dataset inside ``subset``."""
    table: Any = subset.indices
    chosen = (
        table[indices] if isinstance(table, np.ndarray | torch.Tensor) else [table[index] for index in indices.tolist()]
    )
    return np.asarray(chosen, np.int64)
