"""The step that packs: sequences of unknown lengths, concatenated into rows of one length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

import numpy as np

from penstock._arguments import Shown, whole_number
from penstock._fetch.packed_rows import Ragged
from penstock._fetch.packing import Rows
from penstock._fetch.padding import checked_pad
from penstock._random.groups import companions
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
    """A step: pack sequences into rows of ``capacity`` places, like `Packs`, but without knowing their lengths in
    advance.

    A record is a sequence of numbers: a list, a 1-D array or a tensor (more dimensions may follow the first), or a dict
    of such fields, all of the same length. A row is a dict of the fields (a bare sequence is called ``tokens``), padded
    to the capacity, with ``position_ids``, which restart in each sequence, and ``segment_ids``: 1 in the first
    sequence, 2 in the second, …, 0 in the padding. With ``along`` or ``cu_seqlens`` it is a row with media, as `Packs`
    makes it; its ``documents`` are the numbers of the records in the shard, as in ``penstock.sample().index``. A step
    behind it that adds a field must keep the row, ``row["x"] = …``: in a batch, plain dicts made of such rows would be
    stacked, and their offsets would not count through the batch.

    *Best fit over a window.* A row begins with the oldest waiting sequence, and is filled with those of the others that
    leave the least room, one or two at a time. With lognormal lengths that fills 99.8 %. At the end of the shard all
    waiting sequences are packed, longest first; the last row may be half empty.

    With ``crop`` there is no padding: the rest of a row is filled with the beginning of the shortest waiting sequence,
    whose end is dropped. Whatever does not fill a row at the end of the shard is dropped as well. So every row is full,
    and every sequence in it starts at its beginning.

    Args:
        capacity: Length of a row; if each token needs a target, one more than the model's context.
        length: A function of one record that returns its length, for records that are not sequences, such as images and
            their number of patches. A row is then the list of its records.
        pad: The padding value, or a dict of one per field; fields without one get 0.
        crop: Cut sequences to fill every row. Not with ``length``.
        oversize: What to do with a sequence longer than ``capacity``: ``"split"`` it into pieces, ``"truncate"`` it, or
            raise an ``"error"``. Default: split sequences, or truncate them with ``crop``; raise for other records.
        window: Maximum number of waiting sequences, unless they are tiny: at least two rows of them wait. They are in
            memory, with their media.
        along: See `Packs`. Not with ``length`` or ``crop``.
        also: Further budgets, by name: a function of one record that returns what it takes, and how much a row may
            hold. As with `Packs`, a record that takes some is never cut. Not with ``crop``.
        cu_seqlens: See `Packs`. Not with ``length``.

    Raises:
        ValueError: An argument is invalid. On reading: a record is not a sequence, has other fields or types than those
            before it in the shard, or is too long.
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
        along: Mapping[str, Any] | None = None,
        also: Mapping[str, tuple[Callable[[Any], int], int]] | None = None,
        cu_seqlens: bool = False,
    ) -> None:
        if not callable(length):
            raise TypeError(f"length must be a function of one record, but {length!r:.80} is not callable.")
        whole = length is not len
        if oversize not in (None, "split", "truncate", "error"):
            raise ValueError(f"oversize={oversize!r} must be 'split', 'truncate' or 'error'.")
        if whole and (crop or oversize in ("split", "truncate")):
            raise ValueError(
                f"crop={crop}, oversize={oversize!r} cut sequences, but with length= records stay whole. Drop one of "
                f"them."
            )
        if whole and (along or cu_seqlens):
            raise ValueError(
                "along= and cu_seqlens= are for sequences, but with length= a row is the list of its records. Drop one "
                "of them."
            )
        if crop and (along or also):
            raise ValueError(
                "crop=True cuts sequences, but those with something in along= or also= must stay whole. Drop one of "
                "them."
            )
        self.capacity = whole_number("capacity", capacity, 1, 2**40)
        self.ragged = Ragged.of(along, cu_seqlens)
        self.limits = {name: _limit(name, given) for name, given in (also or {}).items()}
        # A callable, so that a state compares the values that the functions hold.
        self.counts = (
            partial(_counts, {name: function for name, (function, _) in also.items()}, self.limits) if also else None
        )
        self.length = length
        self.pad = checked_pad("pad", pad)
        self.crop = crop
        self.oversize = oversize or ("error" if whole else "truncate" if crop else "split")
        self.window = whole_number("window", window, 1)

    def __call__(self, records: Iterator[Any]) -> Generator[Any]:
        """The rows."""
        run = running()
        waiting = _Waiting(self.capacity, [*self.limits.values()])
        rows = (
            Rows(self.capacity, self.pad, "shard", "a step before", _HINT, self.ragged) if self.length is len else None
        )
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
                # within a run every piece has a tag
                run.at, run.place = pieces[0].tag, number  # type: ignore[assignment]
            number += 1
            values = [piece.value for piece in pieces]
            return (
                values if rows is None else rows.row(values, () if plain else [piece.more.document for piece in pieces])
            )

        plain, more, came = self.counts is None and self.ragged is None, _PLAIN, count()
        for record in records:
            tag = None if run is None else run.at
            if not plain:
                record, more = self._apart(record, rows, next(came) if tag is None else tag.number)
            if rows is None:
                waiting.add(_Piece(self._length(record), record, tag, more))
            else:
                fields = rows.fields(record)
                whole = len(next(iter(fields.values())))
                if not whole and (any(more.takes) or (more.document[1] and rows.has_any(more.document[1]))):
                    raise ValueError(
                        "a record has no place for a token, but something in along= or also=, which would be left out. "
                        "Drop it with a Filter."
                    )
                if whole > self.capacity:
                    if self.oversize == "error" or any(more.takes):
                        self._refuse(whole, more.takes)
                    if more.document[1]:
                        rows.check_uncut(*more.document)
                end = min(whole, self.capacity) if self.oversize == "truncate" else whole
                for start in range(0, end, self.capacity):
                    stop = min(start + self.capacity, end)
                    piece = (
                        fields if stop - start == whole else {name: value[start:stop] for name, value in fields.items()}
                    )
                    waiting.add(_Piece(stop - start, piece, tag, more))
            while len(waiting) >= self.window and waiting.total >= 2 * self.capacity:
                yield row(last=False)
        while len(waiting) and (end := row(last=True)) is not _END:
            yield end

    def _apart(self, record: Any, rows: Rows | None, number: int) -> tuple[Any, _More]:
        """The fields of a record that have one value per token, and what else there is of it."""
        counts = {} if self.counts is None else self.counts(record)
        parts: dict[str, Any] = {}
        if rows is not None and self.ragged is not None:
            record, parts = rows.apart(record, number, counts)
        return record, _More((*counts.values(),), (number, parts))

    def details(self) -> dict[str, Any]:
        also = {"also": self.limits} if self.limits else {}
        return {"capacity": self.capacity, "crop": self.crop, "oversize": self.oversize, "window": self.window, **also}

    def settings(self) -> dict[str, Any]:
        """All arguments, except ``also``, whose functions are compared with what they hold."""
        pad: Any = sorted(self.pad.items()) if isinstance(self.pad, dict) else [("", self.pad)]
        return {
            "capacity": self.capacity,
            "length": named(self.length),
            "pad": [[name, repr(float(value))] for name, value in pad],  # NaN is not valid JSON
            "oversize": self.oversize,
            "window": self.window,
            "crop": self.crop,
            **({} if self.ragged is None else self.ragged.settings()),
        }

    def _length(self, record: Any) -> int:
        length = whole_number(
            "length(record)",
            self.length(record),
            1,
            remedy="A row holds whole records that take at least one place each.",
        )
        if length > self.capacity:
            self._refuse(length)
        return length

    def _refuse(self, length: int, takes: tuple[int, ...] = ()) -> None:
        also = ", or use oversize='split' or 'truncate'" if self.length is len and not any(takes) else ""
        why = ", and a record that takes some of a budget in also= is never cut" if any(takes) else ""
        raise ValueError(
            f"a record has length {length}, but the capacity is {self.capacity}{why}. Raise the capacity, drop the "
            f"record with a Filter{also}."
        )


def _limit(name: str, given: Any) -> int:
    """The limit of a budget in ``also``."""
    if not isinstance(given, tuple) or len(given) != 2 or not callable(given[0]):
        raise ValueError(
            f"also[{name!r}]={given!r:.80} must be a tuple of a function of one record and the limit of a row."
        )
    return whole_number(f"the limit of also[{name!r}]", given[1], 1)


def _counts(functions: dict[str, Callable[[Any], int]], limits: dict[str, int], record: Any) -> dict[str, int]:
    """What ``record`` takes of each budget."""
    found = {name: whole_number(f"also[{name!r}](record)", function(record), 0) for name, function in functions.items()}
    for name, takes in found.items():
        if takes > limits[name]:
            raise ValueError(
                f"a record takes {takes} of {name!r}, but a row is limited to {limits[name]}. Raise the limit, or drop "
                f"the record with a Filter."
            )
    return found


class _More(NamedTuple):
    """What a record takes of each budget in ``also``; its number, and its fields in ``along``."""

    takes: tuple[int, ...]
    document: tuple[int, Mapping[str, Any]]


_PLAIN: Final = _More((), (0, {}))


class _Piece(NamedTuple):
    """What waits for a row: a sequence or part of one, as a dict of its fields; or a whole record."""

    length: int
    value: Any
    tag: RecordId | None
    more: _More


@final
class _Waiting:
    """The waiting pieces. This class contains the packing rule and does not look inside the pieces.

    Attributes:
        total: The sum of their lengths.
    """

    def __init__(self, capacity: int, limits: list[int]) -> None:
        self._capacity = capacity
        self._limits = limits
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
        """The pieces of the next row, in order of arrival, and the remaining room.

        ``last``: no more will come, so the row begins with the piece that is hardest to place, not the oldest.
        """
        sizes = self._sizes
        first = sizes[bisect_left(sizes, (sizes[-1][0], 0))][1] if last else next(iter(self._pieces))
        length = self._pieces[first].length
        del sizes[bisect_left(sizes, (length, first))]
        members, room = [first], self._capacity - length
        if self._limits:
            came_at = [*self._pieces]
            takes = np.array([(piece.length, *piece.more.takes) for piece in self._pieces.values()])
            members = [
                came_at[at] for at in companions(takes, np.array([self._capacity, *self._limits]), came_at.index(first))
            ]
            for came in members[1:]:
                length = self._pieces[came].length
                del sizes[bisect_left(sizes, (length, came))]
                room -= length
        else:
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
