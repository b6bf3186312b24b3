"""A collate function that pads: fields whose first dimension varies are extended to the longest in the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch.utils.data import default_collate

from penstock._arguments import whole_number
from penstock._fetch.error_policy import annotate
from penstock._fetch.packed_rows import PackedRow
from penstock._memory.allocation import afresh, anywhere
from penstock._memory.buffers import IN_NUMPY, IN_TORCH, dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._memory.allocation import Allocate, Spec


@final
class Padded:
    """See `pad`."""

    def __init__(self, value: float | Mapping[str, float], to_multiple_of: int, lengths: bool) -> None:
        self.value = checked_pad("value", value, " As a collate_fn, write collate_fn=penstock.pad(0).")
        self.to_multiple_of = whole_number("to_multiple_of", to_multiple_of, 1)
        self.lengths = lengths

    def __call__(self, samples: Sequence[Any], allocate: Allocate = anywhere) -> Any:
        """The batch of ``samples``, a non-empty list.

        Padded fields use memory from ``allocate``, which is called at most once.
        """
        first = samples[0]
        if isinstance(first, PackedRow):
            raise TypeError("packs with along= or cu_seqlens= are not padded: leave collate_fn out, or write one.")
        fields: dict[Any, Any]
        if isinstance(first, Mapping):
            fields = self._of_dicts(samples)
        elif isinstance(self.value, dict) or self.lengths:
            what = "lengths=True" if self.lengths else "a value for each field"
            raise TypeError(f"pad with {what} needs samples that are dicts, not {type(first).__name__}.")
        elif isinstance(first, tuple):
            fields = {
                place: self._padded(f"element {place}", column, self.value)
                for place, column in enumerate(zip(*samples, strict=True))
            }
        else:
            fields = {0: self._padded("the sample", samples, self.value)}
        waiting = [name for name, field in fields.items() if type(field) is _Rows]
        if waiting:
            specs = [fields[name].spec for name in waiting]
            for name, memory in zip(waiting, allocate(specs) or afresh(specs), strict=True):
                fields[name] = fields[name].written(memory)
        if isinstance(first, Mapping):
            return fields
        if isinstance(first, tuple):
            return type(first)(*fields.values()) if hasattr(first, "_fields") else list(fields.values())
        return fields[0]

    def _of_dicts(self, samples: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
        names = samples[0].keys()
        for sample in samples:
            if type(sample) is not dict and not isinstance(sample, Mapping):
                raise TypeError(f"a sample is a {type(sample).__name__}, but the first one of its batch is a dict.")
            if sample.keys() != names:
                raise ValueError(
                    f"a sample has the fields {sorted(sample)}, but the first one of its batch has {sorted(names)}."
                )
        if isinstance(self.value, dict) and (unknown := sorted(self.value.keys() - names)):
            raise ValueError(f"pad has a value for {unknown[0]!r}, but the samples have the fields {sorted(names)}.")
        batch: dict[Any, Any] = {}
        for name in names:
            column = [sample[name] for sample in samples]
            what = f"the field {name!r}"
            if isinstance(self.value, dict) and name not in self.value:
                batch[name] = _collated(what, column)
                continue
            batch[name] = self._padded(what, column, self.value[name] if isinstance(self.value, dict) else self.value)
            if self.lengths and (isinstance(self.value, dict) or _is_long(column[0])):
                if f"{name}_lengths" in names:
                    raise ValueError(
                        f"lengths=True adds a field {name}_lengths, which the samples already have. Rename theirs, or "
                        f"drop lengths."
                    )
                batch[f"{name}_lengths"] = torch.tensor([len(one) for one in column])
        return batch

    def _padded(self, what: str, column: Sequence[Any], value: Any) -> Any:
        """A field of the batch: its `_Rows`, to be written later, or the field itself if NumPy cannot write it."""
        if not _is_long(column[0]):
            if isinstance(self.value, dict):
                raise ValueError(
                    f"to be padded, {what} must be a tensor, an array or a list of numbers, not {column[0]!r:.80}."
                )
            return _collated(what, list(column))
        arrays: Any = column if _are_alike(column) else _converted(what, column)
        lengths = list(map(len, arrays))
        like = next((one for one in arrays if len(one)), arrays[0])
        kind, longest = _kind(like), max(lengths)
        shape = (len(arrays), -(-longest // self.to_multiple_of) * self.to_multiple_of, *like.shape[1:])
        check_fits(value, kind, what)
        if type(like) is np.ndarray:
            return _Rows(arrays, lengths, _padding(value, kind), (shape, kind))
        batch = torch.full(shape, value, dtype=kind)
        for row, (length, one) in enumerate(zip(lengths, arrays, strict=True)):
            if length:
                batch[row, :length] = one
        return batch


def _collated(what: str, column: list[Any]) -> Any:
    """A field that is not padded."""
    try:
        return default_collate(column)
    except Exception as exc:
        why = "only tensors, arrays and lists of numbers (and, with a dict of values, only its fields) are padded"
        annotate(
            exc,
            f"in {what}, which is collated as it is: {why}. Convert or drop it in transform=, or write a collate_fn",
        )
        raise


@final
class _Rows:
    """One field of a batch, not written yet: its rows, their lengths, the padding value, and the memory that the field
    needs.
    """

    __slots__ = ("_arrays", "_lengths", "_padding", "spec")

    def __init__(self, arrays: list[np.ndarray], lengths: list[int], padding: Any, spec: Spec) -> None:
        self._arrays = arrays
        self._lengths = lengths
        self._padding = padding
        self.spec = spec

    def written(self, memory: torch.Tensor) -> torch.Tensor:
        """``memory``, filled with the rows and their padding."""
        batch = memory.numpy()
        batch.fill(self._padding)
        for row, length, one in zip(batch, self._lengths, self._arrays, strict=True):
            if length:  # an empty sample may have another dtype and fewer dimensions
                row[:length] = one
        return memory


def _are_alike(column: Sequence[Any]) -> bool:
    """Whether these are NumPy arrays that differ only in length."""
    first = column[0]
    if type(first) is not np.ndarray or first.dtype not in IN_TORCH or set(map(type, column)) != {np.ndarray}:
        return False
    return len({one.dtype for one in column}) == 1 and len({(one.ndim, *one.shape[1:]) for one in column}) == 1


def _converted(what: str, column: Sequence[Any]) -> list[Any]:
    """One field's samples as arrays, or all of them as tensors if NumPy cannot read one of them."""
    if (other := next((one for one in column if not _is_long(one)), column)) is not column:
        raise ValueError(
            f"{what} is to be padded, so it must be a tensor, an array or a list of numbers in every sample, not "
            f"{other!r:.80}."
        )
    try:
        tensors = [torch.as_tensor(one) for one in column]
    except (TypeError, ValueError, RuntimeError) as exc:  # e.g. a ragged list, strings, or negative strides
        raise ValueError(f"{what} cannot be converted to a tensor: {exc}") from exc
    like = next((one for one in tensors if len(one)), tensors[0])
    for one in tensors:
        if len(one) and (one.dtype != like.dtype or one.shape[1:] != like.shape[1:]):
            raise ValueError(
                f"{what} is {one.dtype} of shape {list(one.shape)} in one sample and {like.dtype} of shape "
                f"{list(like.shape)} in another: only the first dimension may differ."
            )
    return [one.numpy() for one in tensors] if all(map(_is_plain, tensors)) else tensors


def _kind(one: Any) -> torch.dtype:
    """The torch dtype of a tensor or array."""
    kind: torch.dtype = IN_TORCH[one.dtype] if type(one) is np.ndarray else one.dtype
    return kind


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether NumPy reads the same numbers from ``tensor`` as torch, without loss."""
    return (
        type(tensor) is torch.Tensor
        and dtype_name(tensor.dtype) in IN_NUMPY
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and tensor.device.type == "cpu"
    )


def _padding(value: float, dtype: torch.dtype) -> Any:
    """``value`` as a NumPy number, converted by torch, which does not warn about infinity."""
    return torch.full((), value, dtype=dtype, device="cpu").numpy()[()]


def checked_pad(name: str, value: float | Mapping[str, float], remedy: str = "") -> float | dict[str, float]:
    """``value``, checked to be a padding number, or a dict of one per field."""
    for number in value.values() if isinstance(value, Mapping) else [value]:
        if not isinstance(number, int | float | np.number):
            raise ValueError(f"{name}={value!r:.80} must be a number, or a dict with one number per field.{remedy}")
    return dict(value) if isinstance(value, Mapping) else value


def check_fits(value: float, dtype: Any, what: str) -> None:
    """Refuse a padding value that is out of bounds for ``dtype``, of torch or NumPy, or fractional for an integer
    dtype.
    """
    if isinstance(dtype, torch.dtype):
        whole = not (dtype.is_floating_point or dtype.is_complex)
        bounds: Any = torch.iinfo
    else:
        whole, bounds = dtype.kind in "iub", np.iinfo
    low, high = (
        (0, 1) if dtype in (torch.bool, np.bool_) else (bounds(dtype).min, bounds(dtype).max) if whole else (0, 0)
    )
    if whole and not (value % 1 == 0 and low <= value <= high):
        raise ValueError(
            f"pad={value!r} does not fit {what}, which is {dtype}. Choose another value, or convert the field."
        )


def _is_long(value: Any) -> bool:
    """Whether ``value`` has a first dimension, of numbers."""
    if isinstance(value, list):
        return not value or isinstance(value[0], int | float | list | np.number)
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0


def pad(value: float | Mapping[str, float] = 0, to_multiple_of: int = 1, *, lengths: bool = False) -> Padded:
    """A ``collate_fn`` that pads the first dimension of fields to the longest in the batch. It can be pickled.

    Samples are tensors, arrays or lists of numbers, or tuples or dicts of them. Everything else is collated as usual.

    Args:
        value: The padding value. A number: every field with at least one dimension is padded. A dict: only the named
            fields are, each with its own value, so that images, for example, are left alone.
        to_multiple_of: Round the length up to a multiple of this.
        lengths: Add ``<field>_lengths`` to the batch for every padded field: int64, shape ``(batch,)``. Samples must be
            dicts.

    Raises:
        ValueError: ``value`` is not a number. On collating: fields differ in more than the first dimension, or a field
            named in ``value`` is missing.
    """
    return Padded(value, to_multiple_of, lengths)


pad.__module__ = "penstock"
