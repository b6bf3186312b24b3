"""Samples on their way from a worker process to the consumer, field by field.

A tensor costs both of them 10 us to send, whatever its size. So the small ones of one field travel as one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BYTES: Final = 2**14
"""A larger tensor or array travels alone, because it would be copied once more."""


class Columns(NamedTuple):
    """Samples of one structure.

    ``names`` is the keys of dicts, the type of lists or tuples, or None for samples of one field. There is a column for
    each field: a list, or a tensor or an array with a row for each sample.
    """

    names: list[Any] | type | None
    columns: list[Any]


def in_columns(samples: list[Any]) -> Columns | list[Any]:
    """``samples``, as `Columns` if they have tensors or arrays that can travel as one."""
    kinds = set(map(type, samples))
    if len(kinds) != 1:
        return samples
    (kind,) = kinds
    names: Any = None
    fields: list[Any] = [samples]
    if kind is dict:
        names = [*samples[0]]
        if any([*sample] != names for sample in samples):
            return samples
        fields = [*zip(*(sample.values() for sample in samples), strict=True)]
    elif kind is list or kind is tuple:
        names = kind
        if len(set(map(len, samples))) != 1:
            return samples
        fields = [*zip(*samples, strict=True)]
    columns = [_stacked(field) for field in fields]
    return samples if all(type(column) is list for column in columns) else Columns(names, columns)


def in_rows(samples: Columns | Sequence[Any]) -> Sequence[Any]:
    """What `in_columns` was given; its tensors and arrays are views of the columns."""
    if not isinstance(samples, Columns):
        return samples
    names, columns = samples
    fields = [column.unbind() if type(column) is torch.Tensor else [*column] for column in columns]
    if names is None:
        return fields[0]
    rows = zip(*fields, strict=True)
    return list(map(names, rows)) if isinstance(names, type) else [dict(zip(names, row, strict=True)) for row in rows]


def _stacked(field: Sequence[Any]) -> Any:
    """``field`` as one tensor or array, if it has plain, small ones of one shape and dtype; otherwise as a list."""
    first, kind = field[0], type(field[0])
    if (kind is torch.Tensor or kind is np.ndarray) and set(map(type, field)) == {kind}:
        with contextlib.suppress(RuntimeError, ValueError):  # other shapes, nested or sparse tensors, several devices
            if {value.dtype for value in field} == {first.dtype} and first.nbytes <= MOST_BYTES and _is_plain(first):
                if kind is np.ndarray:
                    return np.stack(field)
                if not any(value.requires_grad for value in field):
                    return torch.stack([*field])
    return [*field]


def _is_plain(value: Any) -> bool:
    if type(value) is np.ndarray:  # without dimensions, its row would be no array
        return value.ndim > 0 and value.dtype.isnative and not value.dtype.hasobject
    return value.device.type == "cpu" and not value.is_quantized
