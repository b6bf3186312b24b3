"""The schema of a batch: learned from one sample, then used to fill the batch field by field. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from penstock._errors import is_own_error
from penstock._fetch.packed_rows import PackedRow, batch_of
from penstock._fetch.torch_collate import collated_field, parts_of, row_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock._memory.allocation import Allocate, Spec


WRITE_BYTES = 2**20
"""Bytes of samples to write per call: enough for few calls, each of which may pass Python's lock to another thread, but
not so many that large samples pile up.
"""
_UNDIVIDED = 2**15
"""Torch divides a copy of more elements than this among its own threads, which busy-wait for each other: slow next to
worker threads.
"""
_CODES = {float: "d", int: "q"}
"""The `struct` codes of these types. If a batch begins with a float, `struct` and torch accept the same values as
floats: anything with ``__float__``, but no strings.
"""
_FEW_NUMBERS = 4
"""From this many on, number fields of the same type are written together."""


def collate_fields(samples: Sequence[Any]) -> Any:
    """The batch of ``samples``, with every field collated by ``default_collate``."""
    filler = BatchSchema(samples[0], in_place=False).root.filler(iter(()))
    try:
        filler.add(samples)
    except OtherStructure:
        return batch_of(samples) if PackedRow in map(type, samples) else collated_field(samples, "")
    return filler.finish(len(samples))


# The schema.


class OtherStructure(Exception):
    """The containers of some samples differ from the schema."""


class BatchSchema:
    """The structure of a batch of samples like ``sample``.

    Args:
        sample: Any sample.
        in_place: False: every field is collated by ``default_collate``, and none is written in place.

    Attributes:
        root: The tree of fields.
        specs: Shape and dtype of one row of each field that is written in place.
        step: Samples to write per call.
        anywhere: The last allocator that said that a batch may be anywhere, and of how many rows.
    """

    anywhere: tuple[Allocate | None, int] = None, 0

    def __init__(self, sample: Any, *, in_place: bool = True) -> None:
        self._registry = dict(default_collate_fn_map)  # a copy: the schema is current only while nothing is registered
        self.specs: list[Spec] = []
        self.root = self._learn(sample, in_place, list, "")
        row_bytes = sum(dtype.itemsize * int(np.prod(shape)) for shape, dtype in self.specs)
        self.step = max(1, WRITE_BYTES // max(1, row_bytes))

    @property
    def is_current(self) -> bool:
        """Whether torch's collate registry has not changed since the schema was learned; costs 0.1 us."""
        return self._registry == default_collate_fn_map

    def _learn(self, sample: Any, in_place: bool, column: type, path: str) -> Field:
        parts = parts_of(sample)
        if parts is not None:
            all_keys = list(parts)
            keyed = type(sample) is dict or dataclasses.is_dataclass(sample)
            # the type `default_collate` receives for a column, and returns for a column of strings
            inner = list if keyed else tuple
            fields: dict[tuple[Any, ...], Field] = {}
            # By the exact type: to Python a bool is an int, but it has its own dtype.
            for kind in (float, int):
                keys = (
                    tuple(key for key, part in parts.items() if type(part) is kind and row_spec(part) is not None)
                    if in_place
                    else ()
                )
                if len(keys) >= _FEW_NUMBERS:
                    fields[keys] = _NumbersField(kind, inner, [f"{path}[{key!r}]" for key in keys])
                    self.specs.append(((len(keys),), torch.float64 if kind is float else torch.int64))
                    parts = {key: part for key, part in parts.items() if key not in keys}
            for key, part in parts.items():
                # In the order in which `specs` grows, because the fillers draw their memory from one iterator.
                fields[key,] = self._learn(part, in_place, inner, f"{path}[{key!r}]")
            return _Container(type(sample), all_keys, fields)
        spec = row_spec(sample) if in_place else None
        if spec is None:
            return _ListField(column, path)
        self.specs.append(spec)
        return _TensorField(
            type(sample), sample.dtype if isinstance(sample, np.ndarray | np.generic) else None, *spec, column, path
        )


# The fields, and their fillers for one batch.


class Field(Protocol):
    def filler(self, memory: Iterator[torch.Tensor]) -> Filler:
        """A filler with its share of ``memory``, in the order of `BatchSchema.specs`."""
        ...

    def whole(self, column: Sequence[Any]) -> Any:
        """The batch of this field of all samples, in memory of its own.

        It raises if they do not fit the schema: perhaps a filler is wiser.
        """


class Filler(Protocol):
    def add(self, column: Sequence[Any]) -> None:
        """Add this field of the next samples, one or more.

        Raises:
            OtherStructure: Their containers differ; in that case none of ``column`` counts as added.
        """

    def row(self, row: int) -> Any:
        """The value that was added for ``row``, rebuilt as a view of the memory if necessary."""

    def fell_back(self) -> bool:
        """Whether the schema no longer fits, so that the next batch should learn a new one."""
        ...

    def finish(self, rows: int) -> Any:
        """The batch of this field, of ``rows`` samples."""


def _filled(filler: Filler, column: Sequence[Any]) -> Any:
    filler.add(column)
    if filler.fell_back():
        raise OtherStructure
    return filler.finish(len(column))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """A view as an array; for a dtype that NumPy lacks, of its bits. Raises if the tensor is more than plain memory."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


class _ListField:
    """A field that is collected in a list and collated by `default_collate` at the end; it is its own filler."""

    def __init__(self, kind: type, path: str) -> None:
        self.kind = kind  # the type of column that `default_collate` receives; it returns a column of strings unchanged
        self.path = path  # the keys that lead to the field, such as ['image'][0]
        self.column: list[Any] = []

    def filler(self, memory: Iterator[torch.Tensor]) -> _ListField:
        return _ListField(self.kind, self.path)

    def whole(self, column: Sequence[Any]) -> Any:
        return _filled(self.filler(iter(())), column)

    def add(self, column: Sequence[Any]) -> None:
        self.column.extend(column)

    def row(self, row: int) -> Any:
        return self.column[row]

    def fell_back(self) -> bool:
        """Whether the field could be taken apart or written in place now."""
        return parts_of(self.column[0]) is not None or row_spec(self.column[0]) is not None

    def finish(self, rows: int) -> Any:
        if parts_of(self.column[0]) is not None:
            return collate_fields(self.column)
        if type(self.column[0]) is PackedRow:
            return batch_of(self.column)
        return collated_field(self.kind(map(_positive_strides, self.column)), self.path)


def _positive_strides(one: Any) -> Any:
    """A copy of an array with negative strides, which torch refuses; anything else is returned unchanged."""
    return np.ascontiguousarray(one) if type(one) is np.ndarray and min(one.strides, default=0) < 0 else one


class _TensorField:
    """A field in which each sample is one row of a tensor: a tensor, an array, or a number of type ``kind``.

    ``numpy_dtype`` is the samples' NumPy dtype, if they have one; ``shape`` and ``dtype`` describe one row of the
    batch.
    """

    def __init__(
        self,
        kind: type,
        numpy_dtype: np.dtype[Any] | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        column: type,
        path: str,
    ) -> None:
        self.kind = kind
        self.numpy_dtype = numpy_dtype
        self.shape = shape
        self.dtype = dtype
        self.column = column
        self.path = path
        self.write = self._tensors if kind is torch.Tensor else self._arrays if kind is np.ndarray else self._numbers

    def filler(self, memory: Iterator[torch.Tensor]) -> _InPlace:
        return _InPlace(self, next(memory))

    def whole(self, column: Sequence[Any]) -> Any:
        first = column[0]
        plain = (
            self.kind is torch.Tensor
            and type(first) is torch.Tensor
            and first.layout is torch.strided
            and not first.is_nested
        )
        if plain and first.numel() * len(column) <= _UNDIVIDED:
            return torch.stack(list(column))  # as torch does
        rows = torch.empty((len(column), *self.shape), dtype=self.dtype, device="cpu")
        self.write(column, rows)
        return rows

    # Each of these methods writes `column` to `rows`, or raises; after an error the rows are undefined.

    def _tensors(self, column: Sequence[Any], rows: torch.Tensor) -> None:
        first = column[0]
        # `stack` into memory of another dtype converts silently. It refuses tensors that require grad, and so does
        # `_numpy`, so they need no check here.
        if set(map(type, column)) != {torch.Tensor} or {one.dtype for one in column} != {self.dtype}:
            raise TypeError
        each = first.numel()
        if each * 4 > _UNDIVIDED:
            if {one.shape for one in column} != {self.shape}:
                raise TypeError
            np.concatenate([_numpy(one) for one in column], out=_numpy(rows).reshape(-1, *self.shape[1:]), casting="no")
            return
        most = _UNDIVIDED // max(1, each)
        for begun in range(0, len(column), most):
            if column[begun].shape != self.shape:  # `stack` would reallocate `out`
                raise TypeError
            torch.stack(list(column[begun : begun + most]), out=rows[begun : begun + most])

    def _arrays(self, column: Sequence[Any], rows: torch.Tensor) -> None:
        if set(map(type, column)) != {np.ndarray}:
            raise TypeError
        if len(column) > 1 and self.shape:
            # `concatenate` checks only the sum: arrays of 1 and 3 rows would fill the places of two arrays of 2, one
            # overlapping the other.
            if set(map(len, column)) != {self.shape[0]}:
                raise TypeError
            # This raises if the other dimensions or the dtypes differ from those of `rows`.
            np.concatenate(column, out=rows.numpy().reshape(len(column) * self.shape[0], *self.shape[1:]), casting="no")
            return
        for place, one in enumerate(column):
            if one.dtype != self.numpy_dtype or one.shape != self.shape:
                raise TypeError
            rows.numpy()[place] = one

    def _numbers(self, column: Sequence[Any], rows: torch.Tensor) -> None:
        into: Any = rows.numpy()
        # If the first is a float, torch converts all others to floats, and so does `struct`; see `_CODES`. Ints
        # are checked one by one, because `struct` would accept a bool as an int.
        if set(map(type, column[:1] if self.kind is float else column)) != {self.kind}:
            raise TypeError
        if self.kind in _CODES:
            struct.pack_into(f"={len(column)}{_CODES[self.kind]}", into, 0, *column)  # raises if an int is too large
        else:
            into[...] = np.array(column, into.dtype)


class _InPlace:
    """Fills the rows of one tensor; at the first sample that does not fit, the whole field falls back to
    `default_collate`.
    """

    def __init__(self, field: _TensorField, memory: torch.Tensor) -> None:
        self._field = field
        self._memory = memory
        self._rows = memory.size(0)  # faster than `len`, which costs a microsecond
        self._written = 0
        self._fallback: _ListField | None = None

    def add(self, column: Sequence[Any]) -> None:
        if self._fallback is None:
            end = self._written + len(column)
            try:
                self._field.write(
                    column, self._memory if len(column) == self._rows else self._memory[self._written : end]
                )
            except (TypeError, ValueError, RuntimeError, OverflowError, struct.error) as exc:
                if not is_own_error(exc):
                    raise
                # The samples of earlier calls are gone, but the memory has their values.
                rows = [self.row(row) for row in range(self._written)]
                self._fallback = _ListField(self._field.column, self._field.path)
                self._fallback.add(rows)
            else:
                self._written = end
                return
        self._fallback.add(column)

    def row(self, row: int) -> Any:
        if self._fallback is not None:
            return self._fallback.row(row)
        if self._field.kind is torch.Tensor:
            return self._memory[row]
        one = self._memory.numpy()[row]
        return (
            one.item()
            if self._field.numpy_dtype is None
            else np.asarray(one)
            if self._field.kind is np.ndarray
            else one
        )

    def fell_back(self) -> bool:
        return self._fallback is not None

    def finish(self, rows: int) -> Any:
        if self._fallback is not None:
            return self._fallback.finish(rows)
        return self._memory if rows == self._rows else self._memory[:rows]


class _NumbersField:
    """Fields that each hold a Python number of type ``kind``. All numbers of a sample are written by one call."""

    def __init__(self, kind: type, column: type, paths: list[str]) -> None:
        self.kind = kind
        self.column = column
        self.paths = paths
        self.row = struct.Struct(f"={len(paths)}{_CODES[kind]}")

    def filler(self, memory: Iterator[torch.Tensor]) -> _Numbers:
        return _Numbers(self, next(memory))

    def whole(self, column: Sequence[Any]) -> Any:
        shape, dtype = (len(column), len(self.paths)), torch.float64 if self.kind is float else torch.int64
        return _filled(_Numbers(self, torch.empty(shape, dtype=dtype, device="cpu")), column)


class _Numbers:
    """Fills a `_NumbersField`."""

    def __init__(self, field: _NumbersField, memory: torch.Tensor) -> None:
        self._field = field
        self._memory = memory
        # one row per sample; the batch wants one row per field
        self._table = np.empty(memory.shape, memory.numpy().dtype)
        self._written = 0
        self._fallback: list[_ListField] | None = None

    def add(self, column: Sequence[Sequence[Any]]) -> None:
        field = self._field
        if self._fallback is None:
            end = self._written + len(column)
            try:
                # As in `_TensorField._numbers`.
                decisive = column[0] if field.kind is float else itertools.chain.from_iterable(column)
                if set(map(type, decisive)) != {field.kind}:
                    raise TypeError
                pack, table, size = field.row.pack_into, cast("Any", self._table), field.row.size
                for at, row in zip(range(self._written * size, end * size, size), column, strict=True):
                    pack(table, at, *row)
            except (TypeError, ValueError, OverflowError, struct.error) as exc:
                if not is_own_error(exc):
                    raise
                # Converted back to Python numbers, without loss: float64 and int64 hold every float, and every int that
                # `struct` accepted.
                written = self._table[: self._written].T.tolist()
                self._fallback = [_ListField(field.column, path) for path in field.paths]
                for one, values in zip(self._fallback, written, strict=True):
                    one.add(values)
            else:
                self._written = end
                return
        for one, values in zip(self._fallback, zip(*column, strict=True), strict=True):
            one.add(values)

    def row(self, row: int) -> list[Any]:
        numbers: list[Any] = (
            self._table[row].tolist() if self._fallback is None else [one.row(row) for one in self._fallback]
        )
        return numbers

    def fell_back(self) -> bool:
        return self._fallback is not None

    def finish(self, rows: int) -> list[Any]:
        if self._fallback is not None:
            return [one.finish(rows) for one in self._fallback]
        memory, every = self._memory.view(-1), len(self._table)
        memory.numpy().reshape(-1, every)[:, :rows] = self._table[:rows].T
        # To autograd these are independent tensors, like torch's. Those of `unbind` must not be modified in place by
        # anything with gradients.
        columns = torch.unsafe_split(memory, every)
        return list(columns) if rows == every else [one[:rows] for one in columns]


class _Container:
    """A field made of fields: takes samples apart and puts their values back together.

    ``keys`` are the keys of a dict, the field names of a dataclass, or the places of a sequence. ``parts`` has a field
    for one or more keys; the column of several keys has one tuple per sample. The batch of a tuple is a list, as with
    ``default_collate``. The batch of a dataclass is an instance of the same class, built without calling ``__init__``.
    """

    def __init__(self, kind: type, keys: Sequence[Any], parts: dict[tuple[Any, ...], Field]) -> None:
        self.kind = kind
        self.keys = keys
        self.parts = parts
        self.is_record = dataclasses.is_dataclass(kind)
        self.is_named = hasattr(kind, "_fields")
        self._getters = [(attrgetter if self.is_record else itemgetter)(*its_keys) for its_keys in parts]
        self._in_order = [key for its_keys in parts for key in its_keys] == list(keys)

    def filler(self, memory: Iterator[torch.Tensor]) -> _Parts:
        return _Parts(self, [(len(keys) > 1, part.filler(memory)) for keys, part in self.parts.items()])

    def whole(self, column: Sequence[Any]) -> Any:
        values: list[Any] = []
        for (keys, part), its_column in zip(self.parts.items(), self.columns(column, first=True), strict=True):
            if len(keys) > 1:
                values += part.whole(its_column)
            else:
                values.append(part.whole(its_column))
        return self.together(values, batch=True)

    def columns(self, samples: Sequence[Any], *, first: bool) -> list[Sequence[Any]]:
        """The values of each part.

        ``first``: these samples are the first of their batch, which takes its keys from them, in their order.
        """
        if first and type(samples[0]) is self.kind is dict and list(samples[0]) != self.keys:
            raise OtherStructure
        if set(map(type, samples)) != {self.kind}:
            raise OtherStructure
        # The getters below would not notice extra keys or places.
        if not self.is_record and set(map(len, samples)) != {len(self.keys)}:
            raise OtherStructure
        try:
            return [list(map(get, samples)) for get in self._getters]
        except KeyError:
            raise OtherStructure from None

    def together(self, values: list[Any], *, batch: bool) -> Any:
        """The container of these values, given in the order of ``parts``."""
        if not self._in_order:
            found = dict(zip((key for keys in self.parts for key in keys), values, strict=True))
            values = [found[key] for key in self.keys]
        if self.kind is dict:
            return dict(zip(self.keys, values, strict=True))
        if self.is_record:
            record: Any = object.__new__(self.kind)
            for name, value in zip(self.keys, values, strict=True):
                # Works for a frozen dataclass as well.
                object.__setattr__(record, name, value)
            return record
        return self.kind(*values) if self.is_named else values if batch else self.kind(values)


class _Parts:
    """Fills a `_Container`. Each filler is stored with a flag that tells whether it is for several keys."""

    def __init__(self, field: _Container, parts: list[tuple[bool, Filler]]) -> None:
        self._field = field
        self._parts = parts
        self._begun = False

    def add(self, column: Sequence[Any]) -> None:
        columns = self._field.columns(column, first=not self._begun)
        self._begun = True
        for (_, part), its_column in zip(self._parts, columns, strict=True):
            part.add(its_column)

    def row(self, row: int) -> Any:
        return self._together(lambda part: part.row(row), batch=False)

    def fell_back(self) -> bool:
        return any(part.fell_back() for _, part in self._parts)

    def finish(self, rows: int) -> Any:
        return self._together(lambda part: part.finish(rows), batch=True)

    def _together(self, value: Callable[[Filler], Any], *, batch: bool) -> Any:
        values: list[Any] = []
        for several, part in self._parts:
            if several:
                values += value(part)
            else:
                values.append(value(part))
        return self._field.together(values, batch=batch)
