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


class OfLists(NamedTuple):
    """The columns of samples that are lists."""

    columns: Sequence[Any]


def in_columns(samples: list[Any]) -> Any:
    """``samples`` in columns: one tensor or array; or, of samples with fields, a dict or a tuple of columns, or
    `OfLists`. A column that cannot travel as one is a sequence.

    Returns ``samples`` itself if none can.
    """
    kinds = set(map(type, samples))
    if len(kinds) != 1:
        return samples
    (kind,) = kinds
    if kind is dict:
        names = [*samples[0]]
        if any([*sample] != names for sample in samples):
            return samples
        fields = zip(*(sample.values() for sample in samples), strict=True)
    elif kind is list or kind is tuple:
        if len(set(map(len, samples))) != 1:
            return samples
        fields = zip(*samples, strict=True)
    else:
        return _stacked(samples)
    columns = tuple(map(_stacked, fields))
    if all(type(column) is tuple for column in columns):
        return samples
    return dict(zip(names, columns, strict=True)) if kind is dict else columns if kind is tuple else OfLists(columns)


def in_rows(samples: Any) -> Sequence[Any]:
    """What `in_columns` was given; its tensors and arrays are views of the columns."""
    kind = type(samples)
    if kind is dict:
        rows = zip(*map(_unstacked, samples.values()), strict=True)
        return [dict(zip(samples, row, strict=True)) for row in rows]
    if kind is tuple:
        return [*zip(*map(_unstacked, samples), strict=True)]
    if kind is OfLists:
        return [*map(list, zip(*map(_unstacked, samples.columns), strict=True))]
    return _unstacked(samples)


def _unstacked(column: Any) -> Sequence[Any]:
    return column.unbind() if type(column) is torch.Tensor else [*column] if type(column) is np.ndarray else column


def _stacked(field: Sequence[Any]) -> Any:
    """``field`` as one tensor or array, if it has plain, small ones of one shape and dtype; otherwise as it is."""
    first, kind = field[0], type(field[0])
    stack: Any = torch.stack if kind is torch.Tensor else np.stack
    with contextlib.suppress(RuntimeError, ValueError):  # other shapes, nested or sparse tensors, several devices
        if _is_plain(first) and first.nbytes <= MOST_BYTES:
            dtype = first.dtype
            for value in field:
                if type(value) is not kind or value.dtype != dtype or (kind is torch.Tensor and value.requires_grad):
                    return field
            return stack(field)
    return field


def _is_plain(value: Any) -> bool:
    if type(value) is np.ndarray:  # without dimensions, its row would be no array
        return value.ndim > 0 and value.dtype.isnative and not value.dtype.hasobject
    return type(value) is torch.Tensor and value.is_cpu and not value.is_quantized
