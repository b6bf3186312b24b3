"""What torch's ``default_collate`` does with one field: its rules, the form of a row in the batch, and why it refused.

Pure.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import (
    collate_float_fn,
    collate_int_fn,
    collate_numpy_array_fn,
    collate_numpy_scalar_fn,
    collate_str_fn,
    collate_tensor_fn,
    default_collate_fn_map,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._memory.allocation import Spec

TORCHS_OWN = {
    collate_tensor_fn,
    collate_numpy_array_fn,
    collate_numpy_scalar_fn,
    collate_float_fn,
    collate_int_fn,
    collate_str_fn,
}
"""Its rules, while the user has registered no others."""


def plain_collate(samples: Any) -> Any:
    """``default_collate``, but never into shared memory."""
    # In a process that torch considers a DataLoader worker, it collates into its own shared memory, which we do not
    # want.
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return default_collate(samples)
    finally:
        torch_worker._worker_info = info


def has_registered() -> bool:
    """Whether ``default_collate_fn_map`` holds anything besides torch's own functions."""
    return not TORCHS_OWN.issuperset(default_collate_fn_map.values())


def registered(sample: Any) -> Callable[..., Any] | None:
    """The entry of ``default_collate_fn_map`` for ``sample``, looked up as ``default_collate`` does before opening any
    container.
    """
    kind = type(sample)
    if kind in default_collate_fn_map:
        return default_collate_fn_map[kind]
    return next((collate for key, collate in default_collate_fn_map.items() if isinstance(sample, key)), None)


_LONG = 1024
"""A list or tuple longer than this is not treated as a record; `default_collate` handles it as a whole."""


def parts_of(sample: Any) -> dict[Any, Any] | None:
    """The children of a container that we take apart; None for a leaf.

    A container type that the user registered with torch is a leaf.
    """
    kind = type(sample)
    is_record = dataclasses.is_dataclass(kind) and not isinstance(sample, Mapping)
    is_sequence = kind in (list, tuple) or (isinstance(sample, tuple) and hasattr(sample, "_fields"))
    if (
        not (kind is dict or is_sequence or is_record)
        or registered(sample) is not None
        or (is_sequence and len(sample) > _LONG)
    ):
        return None
    if is_sequence:
        return dict(enumerate(sample))
    return (
        {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        if is_record
        else cast("dict[Any, Any]", sample)
    )


def row_spec(sample: Any) -> Spec | None:
    """Shape and dtype of one row for a field like ``sample``; None if it cannot be written in place."""
    if type(sample) not in (torch.Tensor, np.ndarray, bool, int, float) and not isinstance(sample, np.generic):
        return None
    if registered(sample) not in TORCHS_OWN or default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
        return None  # torch collates arrays with the function for tensors, so a custom one applies to both
    if type(sample) is torch.Tensor:
        plain_memory = (
            sample.layout is torch.strided
            and sample.device.type == "cpu"
            and not (sample.is_quantized or sample.is_nested)
        )
        return (
            (tuple(sample.shape), sample.dtype)
            if plain_memory and not sample.requires_grad and _in_numpy(sample.dtype)
            else None
        )
    try:
        # Torch itself converts one sample, so none of its rules for numbers and dtypes is repeated here. It
        # refuses negative strides, which the copy does not have. The copy of a scalar array has a dimension, hence
        # `reshape`.
        batch = plain_collate(
            [np.ascontiguousarray(sample).reshape(sample.shape) if type(sample) is np.ndarray else sample]
        )
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None  # `default_collate` will raise an error that explains it
    shape = getattr(sample, "shape", ())
    if type(batch) is not torch.Tensor or batch.shape != (1, *shape) or not _in_numpy(batch.dtype):
        return None
    same = type(sample) in (bool, int, float) or batch.numpy().dtype == sample.dtype
    return (shape, batch.dtype) if same else None


def _in_numpy(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return True
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except (TypeError, RuntimeError):
        return False
    return True


def collated_field(column: Any, path: str) -> Any:
    """The batch of one field.

    If it cannot be made, the error gets a note that names the field, the reason and the remedy.
    """
    try:
        return plain_collate(column)
    except Exception as exc:
        if registered(column[0]) not in (None, *TORCHS_OWN):
            raise  # a function that the user registered explains its own errors
        with contextlib.suppress(Exception):  # samples may raise when inspected, and a frozen exception accepts no note
            exc.add_note(
                f"{_why_not(column, path)}. Write a collate_fn that makes a batch of them (penstock.pad(0) is one, for "
                f"samples that differ only in length), or use collate_fn=list to keep them unchanged."
            )
        raise


def _why_not(column: Sequence[Any], path: str) -> str:
    for place, one in enumerate(column):
        if (difference := _difference(column[0], one, path)) is not None:
            where, first, other = difference
            return (
                f"samples 0 and {place} of this batch differ{f' in field {where}' * bool(where)}: {first}, and {other}"
            )
    return (
        f"there is no collate rule for {_in_words(column[0])}{f', which is field {path} of these samples' * bool(path)}"
    )


def _difference(first: Any, other: Any, path: str) -> tuple[str, str, str] | None:
    """The first field in which two samples differ, and a description of each."""
    parts, others = parts_of(first), parts_of(other)
    if parts is not None and others is not None and type(first) is type(other) and parts.keys() == others.keys():
        differences = (_difference(part, others[key], f"{path}[{key!r}]") for key, part in parts.items())
        return next((one for one in differences if one is not None), None)
    words = _in_words(first), _in_words(other)
    return None if words[0] == words[1] else (path, *words)


def _in_words(one: Any) -> str:
    if isinstance(one, torch.Tensor) and one.is_nested:
        return "nested Tensor"
    if isinstance(one, torch.Tensor | np.ndarray):
        return f"{type(one).__name__} of shape {tuple(one.shape)} and dtype {one.dtype}"
    if isinstance(one, Mapping):
        return f"{type(one).__name__} with the keys {list(one)!r:.120}"
    if isinstance(one, list | tuple):
        return f"{type(one).__name__} of length {len(one)}"
    return type(one).__name__
