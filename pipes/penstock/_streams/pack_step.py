"""The step that packs: sequences of unknown lengths, laid one after another into rows of one length."""

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
_HINT: Final = "; records that are no sequences need length="
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

    With ``crop`` there is no padding: what is left of a row is filled with the beginning of the shortest sequence that waits, whose end is dropped, and so is what
    does not fill a row at the end of the shard. So every row is full, and nothing in it is without its beginning.

    Args:
        capacity: Length of a row; with a target for each token, one more than the model's context.
        length: A function of one record, for records that are no sequences: images and their number of patches, say. A row then is the list of its
            records.
        pad: The value of the padding, or one for each field, by name; fields without one get 0.
        crop: Cut sequences to fill every row. Not with ``length``.
        oversize: What to do with a sequence longer than ``capacity``: ``"split"`` it into pieces, ``"truncate"`` it, or raise an ``"error"``. Default: split
            sequences, or truncate them with ``crop``, and raise for other records.
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
        crop: bool = False,
        oversize: Literal["split", "truncate", "error"] | None = None,
        window: int = 256,
    ) -> None:
        if not callable(length):
            raise TypeError(f"length must be a function of one record, and {length!r:.80} cannot be called.")
        whole = length is not len
        if oversize not in (None, "split", "truncate", "error"):
            raise ValueError(f"oversize={oversize!r} must be 'split', 'truncate' or 'error'.")
        if whole and oversize in ("split", "truncate"):
            raise ValueError(f"oversize={oversize!r} cuts sequences, but with length= records stay whole. Leave one of them out.")
        if whole and crop:
            raise ValueError("crop=True cuts sequences, but with length= records stay whole. Leave one of them out.")
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
                run.at, run.place = pieces[0].tag, number  # type: ignore[assignment]  # within a run each has one
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
            "pad": [[name, repr(float(value))] for name, value in pad],  # NaN is no JSON
            "crop": self.crop,
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
    tag: RecordId | None


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

    def shortest(self) -> _Piece:
        """Take out the shortest piece, of those the oldest."""
        length, came = self._sizes.pop(0)
        self.total -= length
        return self._pieces.pop(came)

    def take(self, *, last: bool) -> tuple[list[_Piece], int]:
        """The pieces of the next row, as they came, and the room that is left. ``last``: no more will come, so what is hardest to place goes first, and not what is oldest."""
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
