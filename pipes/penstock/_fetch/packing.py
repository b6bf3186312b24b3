"""Packs: several sequences concatenated into one sample of a fixed length. Independent of how they were chosen."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from penstock._fetch.dataset_facts import DatasetFacts, DatasetView
from penstock._fetch.error_policy import annotate
from penstock._fetch.fetch import samples_in
from penstock._fetch.packed_rows import kind_of
from penstock._fetch.padding import check_fits, checked_pad
from penstock._fetch.sample import SampleCursor, current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._fetch.packed_rows import Ragged


@final
class Document(NamedTuple):
    """A document in a pack, or a piece of one: its index in the dataset, and where the piece starts in it and how long
    it is.
    """

    index: int  # type: ignore[assignment]  # a tuple's method, which nobody needs here
    start: int
    length: int


@final
class PackIndex(NamedTuple):
    """The contents of a pack; as an index of a `PackView` it stands for the pack. One entry per member.

    Attributes:
        indices: Index of the sequence in the dataset.
        positions: Its position in the order, which keys its random numbers; None: they are those of the pack.
        wholes: Length of the whole sequence.
        starts: Where the member starts in the sequence.
        lengths: Length of the member.
        counts: What each member takes of each budget in ``also``; None if there are none.
    """

    indices: list[int]
    positions: list[int] | None
    wholes: list[int]
    starts: list[int]
    lengths: list[int]
    counts: list[list[int]] | None = None

    def documents(self) -> list[Document]:
        """Its members, for people."""
        return list(map(Document, self.indices, self.starts, self.lengths))

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.indices[:8]))
        return f"[{shown}{', …' if len(self.indices) > 8 else ''}] packed"


@final
class PackView(DatasetView):
    """A dataset of sequences, viewed as a dataset of packs; its indices are `PackIndex`.

    Args:
        dataset: A dataset of sequences: 1-D arrays, tensors or lists of numbers, or dicts of them. More dimensions may
            follow the first.
        capacity: Length of a pack.
        pad: The padding value, or a dict of one per field; fields without one get 0.
        transform: Applied to each loaded sequence before it is cut. It must keep the length.
        ragged: The fields that do not run along the sequence.
        also: The names of the budgets that a `PackIndex` has counts of.

    Raises:
        ValueError: ``pad`` is not a number. On loading: the length of a sequence differs from the pack, or a field does
            not fit; the message names the index.
    """

    def __init__(
        self,
        dataset: Any,
        capacity: int,
        pad: float | Mapping[str, float] = 0,
        transform: Callable[[Any], Any] | None = None,
        ragged: Ragged | None = None,
        also: Sequence[str] = (),
    ) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of one sample, but {transform!r:.80} is not callable.")
        facts = DatasetFacts.of(dataset)
        self.dataset = facts.dataset
        self.capacity = capacity
        self.pad = checked_pad("pad", pad)
        self.transform = transform
        self._ragged = ragged
        self._also = also
        self._has_getitems = facts.has_getitems

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, pack: PackIndex) -> dict[str, Any]:
        """The sample of ``pack``."""
        return self._packed(pack, None)

    @property
    def __getitems__(self) -> Callable[[list[PackIndex]], list[dict[str, Any]]]:
        """The samples of a list of packs; present only if the dataset has a ``__getitems__`` worth calling."""
        if not self._has_getitems:
            raise AttributeError("__getitems__")
        return self._gather

    def _gather(self, packs: list[PackIndex]) -> list[dict[str, Any]]:
        wanted = [index for pack in packs for index in pack.indices]
        loaded = iter(
            samples_in(self.dataset, self.dataset.__getitems__(wanted), len(wanted), "so that they can be packed")
        )
        return [self._packed(pack, list(islice(loaded, len(pack.indices)))) for pack in packs]

    def _packed(self, pack: PackIndex, loaded: Sequence[Any] | None) -> dict[str, Any]:
        """The sample of ``pack``; ``loaded`` are its sequences, if they were already loaded."""
        rows, pieces, documents = Rows(self.capacity, self.pad, "pack", "transform", ragged=self._ragged), [], []
        loading = current.get() if pack.positions is not None else None
        ragged = self._ragged is not None
        try:
            for member, (index, whole, start, length) in enumerate(zip(pack.indices, *pack[2:5], strict=True)):
                if isinstance(loading, SampleCursor) and pack.positions is not None:
                    loading.enter_member(pack.positions[member], index)
                try:
                    sequence = self.dataset[index] if loaded is None else loaded[member]
                    if self.transform is not None:
                        sequence = self.transform(sequence)
                    if ragged:
                        counts = {} if pack.counts is None else dict(zip(self._also, pack.counts[member], strict=True))
                        sequence, parts = rows.apart(sequence, index, counts)
                        documents.append((index, parts))
                        if length < whole:
                            rows.check_uncut(index, parts)
                    fields = rows.fields(sequence, index, whole)
                except Exception as exc:
                    source = None if loading is None else loading.sample().source
                    of = (
                        ""
                        if source is None
                        else f", of the source {source!r}: a mix has its sources in the order of their names"
                    )
                    annotate(exc, f"in a pack, at dataset index {index}{of}")
                    raise
                if length:
                    pieces.append({name: value[start : start + length] for name, value in fields.items()})
        finally:
            if isinstance(loading, SampleCursor):
                loading.restart()
        if not pieces:
            raise ValueError(
                "all sequences of this pack are empty, so the type of its padding is unknown. Remove empty sequences "
                "from the dataset."
            )
        return rows.row(pieces, documents)


@final
class Rows:
    """Concatenates sequences, or pieces of them, into rows of one length.

    All must have the same fields, with the same types.

    Args:
        capacity: Length of a row.
        pad: See `PackView`.
        within: The scope in which sequences are compared, for messages.
        where: Where to change them, for messages.
        hint: Appended to the message if records are not sequences.
        ragged: The fields that do not run along the sequence.
    """

    def __init__(
        self,
        capacity: int,
        pad: float | dict[str, float],
        within: str,
        where: str,
        hint: str = "",
        ragged: Ragged | None = None,
    ) -> None:
        self._capacity = capacity
        self._pad = pad
        self._within = within
        self._where = where
        self._hint = hint
        self._ragged = ragged
        self._kinds: dict[str, str] = {}  # of the fields in ``along``
        self._first: dict[str, Any] = {}  # an empty piece of each field, which the others must match

    def fields(self, sequence: Any, index: int = 0, whole: int | None = None) -> dict[str, Any]:
        """The fields of a sequence, as arrays or tensors of one length; checked to be ``whole``, if sequence ``index``
        is known to have that length.
        """
        given = sequence if isinstance(sequence, Mapping) else {"tokens": sequence}
        fields = {name: self._array(name, value) for name, value in given.items()}
        if not fields:
            raise ValueError("a sequence has no fields.")
        # several rows, as in M-RoPE; `row` turns them back
        if "position_ids" in fields and fields["position_ids"].ndim == 2:
            fields["position_ids"] = fields["position_ids"].T
        if self._first and fields.keys() != self._first.keys():
            raise ValueError(
                f"a sequence has the fields {sorted(fields)}, but those before it in the {self._within} have "
                f"{sorted(self._first)}."
            )
        lengths = {len(value) for value in fields.values()}
        if whole is not None and lengths != {whole}:
            name = next(name for name, value in fields.items() if len(value) != whole)
            raise ValueError(
                f"lengths[{index}] is {whole}, but the field {name!r} of sequence {index} has {len(fields[name])} "
                f"places. Correct the lengths; or, if the field does not run along the sequence, name it in along=, or "
                f"drop it in {self._where}."
            )
        if len(lengths) != 1:
            said = ", ".join(f"{name!r} {len(value)}" for name, value in fields.items())
            raise ValueError(
                f"the fields of a sequence must have the same length, but they have: {said}. Name fields that do not "
                f"run along the sequence in along=, or drop them in {self._where}."
            )
        if lengths == {0}:
            return fields  # an empty list does not tell the type of its numbers
        if not self._first:
            self._begin(fields)
        for name, value in fields.items():
            first = self._first[name]
            if value.dtype != first.dtype or value.shape[1:] != first.shape[1:] or type(value) is not type(first):
                was, came = (
                    f"{type(one).__name__} of {one.dtype}, shape (…, {', '.join(map(str, one.shape[1:]))})"
                    for one in (first, value)
                )
                raise ValueError(
                    f"the field {name!r} is {came} here, but {was} in the sequences before it in the {self._within}. "
                    f"Convert it in {self._where}."
                )
        return fields

    def apart(self, sequence: Any, document: int, counts: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields of a sequence that have one value per token, and those named in ``along``; the latter as arrays or
        tensors.

        Args:
            sequence: The sequence.
            document: Its number.
            counts: The sizes that some of the latter must have.
        """
        assert self._ragged is not None
        rest, parts = {**sequence} if isinstance(sequence, Mapping) else {"tokens": sequence}, {}
        for name, (axis, empty) in self._ragged.along.items():
            value = rest.pop(name, None)
            if value is None or (isinstance(value, list) and not value):
                if empty is None:
                    raise ValueError(
                        f"sequence {document} has no field {name!r}, so its type and shape are unknown. Give every "
                        f"sequence an array or a tensor, which may be empty along axis {axis}; or pass such an empty "
                        f"one as along[{name!r}], and leave the field out where there is nothing."
                    )
                value = empty
            value = parts[name] = self._array(name, value)
            kind, what = kind_of(value, axis), f"the field {name!r} of sequence {document}"
            first = self._kinds.setdefault(name, kind if empty is None else kind_of(empty, axis))
            if kind != first or value.ndim <= axis:
                other = (
                    f"{first}, in along= or before it in the {self._within}"
                    if kind != first
                    else f"one with an axis {axis}, as in along="
                )
                raise ValueError(f"{what} is {kind}, which differs from {other}. Convert it in {self._where}.")
            if (size := value.shape[axis]) != counts.get(name, size):
                raise ValueError(
                    f"also[{name!r}] counts {counts[name]} for sequence {document}, but {what} has the size {size} "
                    f"along axis {axis}. Correct the counts; or, if they count something else, give them another name."
                )
        if wrong := sorted(rest.keys() & self._ragged.added()):
            raise ValueError(
                f"sequence {document} has the field {wrong[0]!r}, which packing adds itself. Drop it in {self._where}."
            )
        return rest, parts

    def has_any(self, parts: Mapping[str, Any]) -> str | None:
        """The name of one of these parts that is not empty, if there is one."""
        assert self._ragged is not None
        return next((name for name, (axis, _) in self._ragged.along.items() if parts[name].shape[axis]), None)

    def check_uncut(self, document: int, parts: Mapping[str, Any]) -> None:
        """Refuse sequence ``document``, which is longer than a row, if it has any of these parts."""
        if name := self.has_any(parts):
            raise ValueError(
                f"sequence {document} is longer than the capacity of {self._capacity}, but has a field {name!r}: such "
                f"sequences are never cut. Raise the capacity, or drop that sequence, for example with "
                f"{'penstock.filtered' if self._within == 'pack' else 'a Filter'}."
            )

    def row(
        self, pieces: Sequence[dict[str, Any]], documents: Sequence[tuple[int, Mapping[str, Any]]] = ()
    ) -> dict[str, Any]:
        """One row made of non-empty pieces; ``documents`` are the number of each, and what `apart` took from it, if
        there are such fields.
        """
        position_ids, segment_ids = np.zeros((2, self._capacity), np.int64)
        places, total = _places(self._capacity), 0
        for number, piece in enumerate(pieces, 1):
            length = len(next(iter(piece.values())))
            begin, total = total, total + length
            position_ids[begin:total] = places[:length]
            segment_ids[begin:total] = number
        row: dict[str, Any] = {}
        for name, first in self._first.items():
            values, pad = [piece[name] for piece in pieces], pad_of(self._pad, name)
            shape = (self._capacity, *first.shape[1:])
            if isinstance(first, torch.Tensor):
                row[name] = torch.full(shape, pad, dtype=first.dtype)
                row[name][:total] = torch.cat(values)
            else:
                row[name] = np.full(shape, pad, first.dtype)
                np.concatenate(values, out=row[name][:total])
        numbers: list[Any] = [position_ids, segment_ids]
        if any(isinstance(first, torch.Tensor) for first in self._first.values()):
            numbers = [torch.from_numpy(array) for array in numbers]
        if (own := row.get("position_ids")) is not None:
            numbers[0] = (
                own
                if own.ndim == 1
                else own.T.contiguous()
                if isinstance(own, torch.Tensor)
                else np.ascontiguousarray(own.T)
            )
        row = {**row, "position_ids": numbers[0], "segment_ids": numbers[1]}
        if self._ragged is None:
            return row
        return self._ragged.row(row, documents, [len(next(iter(piece.values()))) for piece in pieces])

    def _begin(self, fields: dict[str, Any]) -> None:
        if "segment_ids" in fields:
            raise ValueError(
                f"a sequence has the field 'segment_ids', which packing adds itself. Drop it in {self._where}."
            )
        if isinstance(self._pad, dict) and (unknown := sorted(self._pad.keys() - fields.keys())):
            raise ValueError(f"pad has a value for {unknown[0]!r}, but the sequences have the fields {sorted(fields)}.")
        for name, value in fields.items():
            check_fits(pad_of(self._pad, name), value.dtype, f"the field {name!r}")
        self._first = {name: value[:0] for name, value in fields.items()}

    def _array(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            try:
                value = (
                    np.frombuffer(array("q", value), np.int64) if value and type(value[0]) is int else np.asarray(value)
                )  # half the time
            except (TypeError, OverflowError):
                value = np.asarray(value)
        numbers = isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")
        if not numbers or not value.ndim:
            raise ValueError(
                f"the field {name!r} of a sequence to pack must be an array, a tensor or a list of numbers, one per "
                f"place, not {value!r:.80}. Drop or convert it in {self._where} (a sequence of several fields is a "
                f"dict of them){self._hint}."
            )
        return value


@lru_cache(4)
def _places(capacity: int) -> np.ndarray:
    return np.arange(capacity)


def pad_of(pad: float | dict[str, float], name: str) -> float:
    """The padding value of a field. One value for all fields is not one for positions."""
    return pad.get(name, 0) if isinstance(pad, dict) else 0 if name == "position_ids" else pad
