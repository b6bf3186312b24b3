"""The step that packs: sequences of unknown lengths, laid one after another into rows of one length."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import numpy as np
import torch

from penstock._arguments import Shown, whole_number
from penstock._fetch.padding import check_fits
from penstock._streams.run_cursor import running
from penstock._streams.step_identity import named

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from penstock._streams.run_cursor import Tag

_Size = tuple[int, int]
"""The length of a piece, and when it came: sorts by length, then by age."""


@final
class Pack(Shown):
    """A step: pack sequences into rows of ``capacity`` places, like `Packs`, without knowing their lengths beforehand.

    A record is a sequence of numbers: a list, a 1-D array or a tensor (more dimensions may follow the first), or a dict of such fields, all of one length. A
    row is a dict of the fields (a bare sequence is called ``tokens``), padded to the capacity, with ``position_ids``, which begin again in each sequence, and
    ``segment_ids``, 1 in the first sequence, 2 in the second, …, 0 in the padding.

    *Best fit over a window.* A row begins with the oldest sequence that waits, and is filled with those of the others that leave the least room, one or two at
    a time. That fills 99.8 % where lengths are lognormal. At the end of the shard all that waits is packed, the longest first; the last row may be half empty.

    Args:
        capacity: Length of a row.
        length: A function of one record, for records that are no sequences: images and their number of patches, say. A row then is the list of its
            records.
        pad: The value of the padding, or one for each field, by name; fields without one get 0.
        oversize: What to do with a sequence longer than ``capacity``: ``"split"`` it into pieces, ``"truncate"`` it, or raise an ``"error"``. Default: split
            sequences, and raise for other records.
        window: How many sequences wait at most, unless they are tiny: at least two rows do.

    Raises:
        ValueError: An argument makes no sense. On reading: a record is no sequence, has other fields or other types than those before it in the shard, or is
            too long.
    """

    __module__ = "penstock"

    def __init__(
        self,
        capacity: int,
        length: Callable[[Any], int] = len,
        *,
        pad: float | Mapping[str, float] = 0,
        oversize: Literal["split", "truncate", "error"] | None = None,
        window: int = 256,
    ) -> None:
        if not callable(length):
            raise TypeError(f"length must be a function of one record, and {length!r:.80} cannot be called.")
        for value in pad.values() if isinstance(pad, Mapping) else [pad]:
            if not isinstance(value, int | float | np.number):
                raise ValueError(f"pad={pad!r:.80} must be a number, or a dict of a number for each field.")
        whole = length is not len
        if oversize not in (None, "split", "truncate", "error"):
            raise ValueError(f"oversize={oversize!r} must be 'split', 'truncate' or 'error'.")
        if whole and oversize in ("split", "truncate"):
            raise ValueError(f"oversize={oversize!r} cuts sequences, but with length= records stay whole. Leave one of them out.")
        self.capacity = whole_number("capacity", capacity, 1, 2**40)
        self.length = length
        self.pad = dict(pad) if isinstance(pad, Mapping) else pad
        self.oversize = oversize or ("error" if whole else "split")
        self.window = whole_number("window", window, 1)

    def __call__(self, records: Iterator[Any]) -> Generator[Any]:
        """The rows."""
        run = running()
        waiting = _Waiting(self.capacity)
        rows = _Rows(self.capacity, self.pad) if self.length is len else None
        number = 0

        def row(*, last: bool) -> Any:
            nonlocal number
            pieces = waiting.take(last=last)
            if run is not None:
                run.at, run.place = pieces[0].tag, number  # type: ignore[assignment]  # within a run each has one
            number += 1
            return [piece.value for piece in pieces] if rows is None else rows.row(pieces)

        for record in records:
            tag = None if run is None else run.at
            if rows is None:
                waiting.add(_Piece(self._length(record), record, tag))
            else:
                fields = rows.fields(record)
                whole = len(next(iter(fields.values())))
                if whole > self.capacity and self.oversize == "error":
                    self._refuse(whole)
                end = min(whole, self.capacity) if self.oversize == "truncate" else whole
                for start in range(0, end, self.capacity):
                    stop = min(start + self.capacity, end)
                    waiting.add(_Piece(stop - start, {name: value[start:stop] for name, value in fields.items()}, tag))
            while len(waiting) >= self.window and waiting.total >= 2 * self.capacity:
                yield row(last=False)
        while len(waiting):
            yield row(last=True)

    def details(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "oversize": self.oversize, "window": self.window}

    def settings(self) -> dict[str, Any]:
        """All arguments."""
        pad: Any = sorted(self.pad.items()) if isinstance(self.pad, dict) else [("", self.pad)]
        return {
            "capacity": self.capacity,
            "length": named(self.length),
            "pad": [[name, repr(float(value))] for name, value in pad],  # NaN is no JSON
            "oversize": self.oversize,
            "window": self.window,
        }

    def _length(self, record: Any) -> int:
        length = whole_number("length(record)", self.length(record), 1, remedy="A row holds whole records of at least one place each.")
        if length > self.capacity:
            self._refuse(length)
        return length

    def _refuse(self, length: int) -> None:
        also = ", or use oversize='split' or 'truncate'" if self.length is len else ""
        raise ValueError(
            f"a record has the length {length}, but the capacity is {self.capacity}. Raise the capacity, leave the record out with a Filter{also}."
        )


class _Piece(NamedTuple):
    """What waits for its row: a sequence or a part of one, as a dict of its fields; or a whole record."""

    length: int
    value: Any
    tag: Tag | None


@final
class _Waiting:
    """The pieces that wait. The rule of packing is here, and nothing of what pieces are.

    Attributes:
        total: The sum of their lengths.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._gain = capacity // 128
        self._pieces: dict[int, _Piece] = {}  # by when they came
        self._sizes: list[_Size] = []  # sorted
        self._came = 0
        self.total = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, piece: _Piece) -> None:
        """Let ``piece`` wait; it is no longer than the capacity."""
        self._pieces[self._came] = piece
        insort(self._sizes, (piece.length, self._came))
        self._came += 1
        self.total += piece.length

    def take(self, *, last: bool) -> list[_Piece]:
        """The pieces of the next row, as they came. ``last``: no more will come, so what is hardest to place goes first, and not what is oldest."""
        sizes = self._sizes
        first = sizes[bisect_left(sizes, (sizes[-1][0], 0))][1] if last else next(iter(self._pieces))
        length = self._pieces[first].length
        del sizes[bisect_left(sizes, (length, first))]
        members, room = [first], self._capacity - length
        while sizes and sizes[0][0] <= room:
            for place in [len(sizes) - 1] if room > 2 * sizes[-1][0] else self._best(room):
                length, came = sizes.pop(place)
                members.append(came)
                room -= length
        self.total -= self._capacity - room
        return [self._pieces.pop(came) for came in sorted(members)]

    def _best(self, room: int) -> list[int]:
        """The places of the piece, or of two, the later first, that leave the least of ``room``.

        Two are taken only if they leave noticeably less: small pieces are what fills the rows to come.
        """
        sizes = self._sizes
        high = bisect_right(sizes, (room, self._came)) - 1
        best, found = sizes[high][0] + self._gain, [high]
        if best >= room:
            return found
        low = max(0, min(high, bisect_right(sizes, (room - sizes[high][0], self._came))) - 1)
        while low < high and best < room:
            both = sizes[low][0] + sizes[high][0]
            if both > room:
                high -= 1
            else:
                if both > best:
                    best, found = both, [high, low]
                low += 1
        return found


@final
class _Rows:
    """Makes rows of the fields of sequences, which must be of one kind all over a shard."""

    def __init__(self, capacity: int, pad: Any) -> None:
        self._capacity = capacity
        self._pad = pad
        self._first: dict[str, Any] = {}  # an empty piece of each field: what the others must be like

    def fields(self, record: Any) -> dict[str, Any]:
        """The fields of a sequence, as arrays or tensors."""
        given = record if isinstance(record, Mapping) else {"tokens": record}
        fields = {name: _array(name, value) for name, value in given.items()}
        if self._first and fields.keys() != self._first.keys():
            raise ValueError(f"a sequence has the fields {sorted(fields)}, and those before it in the shard have {sorted(self._first)}.")
        if len({len(value) for value in fields.values()}) != 1:
            lengths = ", ".join(f"{name!r} {len(value)}" for name, value in fields.items())
            raise ValueError(
                f"the fields of a sequence must have the same length, but they have: {lengths}. Drop what does not go along the sequence in a step before."
                if fields
                else "a sequence has no fields."
            )
        if not len(next(iter(fields.values()))):
            return fields  # an empty list says nothing of its numbers
        if not self._first:
            self._begin(fields)
        for name, value in fields.items():
            first = self._first[name]
            if value.dtype != first.dtype or value.shape[1:] != first.shape[1:] or type(value) is not type(first):
                was, came = (
                    f"{type(one).__name__} of {one.dtype}, shape (…, {', '.join(map(str, one.shape[1:]))})" for one in (first, value)
                )
                raise ValueError(
                    f"the field {name!r} is {came} here, and {was} in the sequences before it in the shard. Convert it in a step before."
                )
        return fields

    def row(self, pieces: list[_Piece]) -> dict[str, Any]:
        """One row."""
        position_ids, segment_ids = np.zeros((2, self._capacity), np.int64)
        total = 0
        for number, piece in enumerate(pieces, 1):
            begin, total = total, total + piece.length
            position_ids[begin:total] = self._places[: piece.length]
            segment_ids[begin:total] = number
        row: dict[str, Any] = {}
        for name, first in self._first.items():
            values, pad = [piece.value[name] for piece in pieces], self._pad_of(name)
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
        return {**row, "position_ids": numbers[0], "segment_ids": numbers[1]}

    def _begin(self, fields: dict[str, Any]) -> None:
        if wrong := sorted(fields.keys() & {"position_ids", "segment_ids"}):
            raise ValueError(f"a sequence has the field {wrong[0]!r}, which packing makes itself. Drop it in a step before.")
        if isinstance(self._pad, dict) and (unknown := sorted(self._pad.keys() - fields.keys())):
            raise ValueError(f"pad has a value for {unknown[0]!r}, but the sequences have the fields {sorted(fields)}.")
        for name, value in fields.items():
            check_fits(self._pad_of(name), value.dtype, f"the field {name!r}")
        self._first = {name: value[:0] for name, value in fields.items()}
        self._places = np.arange(self._capacity)

    def _pad_of(self, name: str) -> Any:
        return self._pad.get(name, 0) if isinstance(self._pad, dict) else self._pad


def _array(name: str, value: Any) -> Any:
    if isinstance(value, list):
        try:
            value = np.frombuffer(array("q", value), np.int64) if value and type(value[0]) is int else np.asarray(value)  # half the time
        except (TypeError, OverflowError):
            value = np.asarray(value)
    numbers = isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")
    if not numbers or not value.ndim:
        raise ValueError(
            f"the field {name!r} of a sequence to pack must be an array, a tensor or a list of numbers, one for each place, but {value!r:.80} came. Drop it in a "
            f"step before; records that are no sequences need length=."
        )
    return value
