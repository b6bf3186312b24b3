"""The step that packs: sequences of unknown lengths, concatenated into rows of one length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

from penstock._arguments import Shown, whole_number
from penstock._fetch.packing import Rows
from penstock._fetch.padding import checked_pad
from penstock._streams.run_cursor import running
from penstock._streams.step_identity import named

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from penstock._streams.run_cursor import RecordId

_END: Final = object()
_HINT: Final = "; records that are not sequences need length="
_Size = tuple[int, int]
"""The length of a piece and its arrival number, so that pieces sort by length, then by age."""


@final
class Pack(Shown):
    """A step: pack sequences into rows of ``capacity`` places, like `Packs`, but without knowing their lengths in advance.

    A record is a sequence of numbers: a list, a 1-D array or a tensor (more dimensions may follow the first), or a dict of such fields, all of the same length. A
    row is a dict of the fields (a bare sequence is called ``tokens``), padded to the capacity, with ``position_ids``, which restart in each sequence, and
    ``segment_ids``: 1 in the first sequence, 2 in the second, …, 0 in the padding.

    *Best fit over a window.* A row begins with the oldest waiting sequence, and is filled with those of the others that leave the least room, one or two at
    a time. With lognormal lengths that fills 99.8 %. At the end of the shard all waiting sequences are packed, longest first; the last row may be half empty.

    With ``crop`` there is no padding: the rest of a row is filled with the beginning of the shortest waiting sequence, whose end is dropped. Whatever does not fill
    a row at the end of the shard is dropped as well. So every row is full, and every sequence in it starts at its beginning.

    Args:
        capacity: Length of a row; if each token needs a target, one more than the model's context.
        length: A function of one record that returns its length, for records that are not sequences, such as images and their number of patches. A row is then the list
            of its records.
        pad: The padding value, or a dict of one per field; fields without one get 0.
        crop: Cut sequences to fill every row. Not with ``length``.
        oversize: What to do with a sequence longer than ``capacity``: ``"split"`` it into pieces, ``"truncate"`` it, or raise an ``"error"``. Default: split
            sequences, or truncate them with ``crop``; raise for other records.
        window: Maximum number of waiting sequences, unless they are tiny: at least two rows of them wait.

    Raises:
        ValueError: An argument is invalid. On reading: a record is not a sequence, has other fields or types than those before it in the shard, or is
            too long.
    """

    __module__ = "penstock"

    def __init__(
        self,
        capacity: int,
        length: Callable[[Any], int] = len,
        *,
        pad: float | Mapping[str, float] = 0,
        crop: bool = False,
        oversize: Literal["split", "truncate", "error"] | None = None,
        window: int = 256,
    ) -> None:
        if not callable(length):
            raise TypeError(f"length must be a function of one record, but {length!r:.80} is not callable.")
        whole = length is not len
        if oversize not in (None, "split", "truncate", "error"):
            raise ValueError(f"oversize={oversize!r} must be 'split', 'truncate' or 'error'.")
        if whole and (crop or oversize in ("split", "truncate")):
            raise ValueError(f"crop={crop}, oversize={oversize!r} cut sequences, but with length= records stay whole. Drop one of them.")
        self.capacity = whole_number("capacity", capacity, 1, 2**40)
        self.length = length
        self.pad = checked_pad("pad", pad)
        self.crop = crop
        self.oversize = oversize or ("error" if whole else "truncate" if crop else "split")
        self.window = whole_number("window", window, 1)

    def __call__(self, records: Iterator[Any]) -> Generator[Any]:
        """The rows."""
        run = running()
        waiting = _Waiting(self.capacity)
        rows = Rows(self.capacity, self.pad, "shard", "a step before", _HINT) if self.length is len else None
        number = 0

        def row(*, last: bool) -> Any:
            nonlocal number
            pieces, room = waiting.take(last=last)
            if self.crop and room:
                if not len(waiting):
                    return _END
                shortest = waiting.shortest()
                pieces.append(shortest._replace(value={name: value[:room] for name, value in shortest.value.items()}))
            if run is not None:
                run.at, run.place = pieces[0].tag, number  # type: ignore[assignment]  # within a run every piece has a tag
            number += 1
            values = [piece.value for piece in pieces]
            return values if rows is None else rows.row(values)

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
        while len(waiting) and (end := row(last=True)) is not _END:
            yield end

    def details(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "crop": self.crop, "oversize": self.oversize, "window": self.window}

    def settings(self) -> dict[str, Any]:
        """All arguments."""
        pad: Any = sorted(self.pad.items()) if isinstance(self.pad, dict) else [("", self.pad)]
        return {
            "capacity": self.capacity,
            "length": named(self.length),
            "pad": [[name, repr(float(value))] for name, value in pad],  # NaN is not valid JSON
            "oversize": self.oversize,
            "window": self.window,
            "crop": self.crop,
        }

    def _length(self, record: Any) -> int:
        length = whole_number(
            "length(record)", self.length(record), 1, remedy="A row holds whole records that take at least one place each."
        )
        if length > self.capacity:
            self._refuse(length)
        return length

    def _refuse(self, length: int) -> None:
        also = ", or use oversize='split' or 'truncate'" if self.length is len else ""
        raise ValueError(
            f"a record has length {length}, but the capacity is {self.capacity}. Raise the capacity, drop the record with a Filter{also}."
        )


class _Piece(NamedTuple):
    """What waits for a row: a sequence or part of one, as a dict of its fields; or a whole record."""

    length: int
    value: Any
    tag: RecordId | None


@final
class _Waiting:
    """The waiting pieces. This class contains the packing rule and does not look inside the pieces.

    Attributes:
        total: The sum of their lengths.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._gain = capacity // 128
        self._pieces: dict[int, _Piece] = {}  # by arrival number
        self._sizes: list[_Size] = []  # sorted
        self._came = 0
        self.total = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, piece: _Piece) -> None:
        """Add ``piece``, which is no longer than the capacity."""
        self._pieces[self._came] = piece
        insort(self._sizes, (piece.length, self._came))
        self._came += 1
        self.total += piece.length

    def shortest(self) -> _Piece:
        """Remove and return the shortest piece, the oldest one if there are several."""
        length, came = self._sizes.pop(0)
        self.total -= length
        return self._pieces.pop(came)

    def take(self, *, last: bool) -> tuple[list[_Piece], int]:
        """The pieces of the next row, in order of arrival, and the remaining room. ``last``: no more will come, so the row begins with the piece that is hardest to place, not the oldest."""
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
        return [self._pieces.pop(came) for came in sorted(members)], room

    def _best(self, room: int) -> list[int]:
        """The places of one piece, or of two with the later one first, that leave the least of ``room``.

        Two are taken only if they leave noticeably less, because small pieces are needed to fill later rows.
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
