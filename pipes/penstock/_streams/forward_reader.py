"""Random access to a shard that can only be read forward.

A lane requests the records of a shard in order, or nearly so: a window moves them by less than its width, and threads
overtake each other by a few batches. So one pass over the shard serves the lane, provided that skipped records are kept
for a while. A record requested later than that is read again from the beginning, which is correct but slower.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from penstock._fetch.error_policy import annotate
from penstock._streams.retrying import close

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NEAR: Final = 64
"""At least this many of the last skipped records are kept, because threads that read one record at a time overtake each
other.
"""


class Unreadable(NamedTuple):
    """Stands in for an unreadable record in an iterable of records.

    Requesting it raises the error; the next record is not affected.
    """

    error: Exception


@final
class ForwardShard:
    """One shard as a sequence of records, over iterators that are read forward. For one thread at a time.

    Several lanes may read the same shard, in the middle of an epoch or at an epoch boundary. Each then gets its own
    reader, without any bookkeeping: a record is read by the reader closest behind it, and a new reader starts if there
    is none.

    Args:
        label: What messages call the shard.
        count: How many records it should have.
        open: Opens the shard again; called with ``start=``, the first record wanted, unless ``start`` is None.
        opened: What it returned the first time.
        start: The record with which ``opened`` begins; None if ``open`` always begins with the first.
        window: How far the order moves a record within its lane.
        most: Maximum number of readers at once.
    """

    def __init__(
        self,
        label: str,
        count: int,
        open: Callable[..., Iterable[Any]],
        opened: Iterable[Any],
        start: int | None,
        window: int,
        most: int,
    ) -> None:
        self._label = label
        self._count = count
        self._open = open
        self._seeks = start is not None
        self._reach = self._near = 2 * window + NEAR
        self._most = most
        self._readers = [ForwardReader(label, count, opened, start or 0)]  # the most recently used reader comes last
        self._failed: int | None = None  # the record at which reading last failed
        self._dead_end: int | None = None  # the record at which it failed twice in a row

    @property
    def handles(self) -> int:
        """How many readers there are; 0 if none is worth keeping."""
        return max(len(self._readers), self._failed is not None)

    def read(self, numbers: Sequence[int], threads: int) -> list[Any]:
        """The records ``numbers``, in ascending order. ``threads`` read shards, and overtake each other."""
        self._reach = max(self._reach, self._near + (4 + threads) * len(numbers))
        return [self._record(number) for number in numbers]

    def close(self) -> None:
        """Close the readers. The shard can be read again."""
        while self._readers:
            self._readers.pop().close()

    def _record(self, number: int) -> Any:
        if self._dead_end is not None and number > self._dead_end:
            # With on_error="skip" each record after a damaged one would read the shard up to the damage once more.
            raise ValueError(
                f"record {number} of {self._label} comes after record {self._dead_end}, at which reading failed twice."
            )
        reader = self._reader(number)
        try:
            record = reader.take(number, self._reach)
        except BaseException as exc:
            reader.close()  # after an error its position is unknown
            if isinstance(exc, Exception):
                annotate(exc, f"in record {reader.next} of {self._label}")
                if not isinstance(exc, OSError):  # a disk may recover
                    self._dead_end = reader.next if self._failed == reader.next else None
                    self._failed = reader.next
            raise
        if reader.kept or reader.next < self._count:
            self._readers.append(reader)
        if isinstance(record, Unreadable):
            annotate(record.error, f"in record {number} of {self._label}")
            raise record.error
        return record

    def _reader(self, number: int) -> ForwardReader:
        """Remove the reader for ``number`` from the list; it is put back only on success."""
        best = None
        for reader in self._readers:
            if number in reader.kept:
                best = reader
                break
            if reader.next <= number and (best is None or reader.next > best.next):
                best = reader
        if best is not None and (number in best.kept or not self._seeks or number - best.next <= self._reach):
            self._readers.remove(best)
            return best
        while len(self._readers) >= self._most:
            self._readers.pop(0).close()
        if self._seeks:
            return ForwardReader(self._label, self._count, self._open(start=number), number)
        return ForwardReader(self._label, self._count, self._open(), 0)


@final
class ForwardReader:
    """One pass over the records of a shard.

    Attributes:
        next: The number of the next record.
        kept: Records that were skipped and not requested yet, by number, in ascending order.
    """

    def __init__(self, label: str, count: int, records: Iterable[Any], start: int) -> None:
        self._label = label
        self._count = count
        self._records = records
        try:
            self._iterator = iter(records)
        except TypeError as exc:
            raise TypeError(
                f"open() returned a {type(records).__name__} for {label}. It must return the records: an iterable, or "
                f"an object with __len__ and __getitem__."
            ) from exc
        self.next = start
        self.kept: OrderedDict[int, Any] = OrderedDict()

    def take(self, number: int, reach: int) -> Any:
        """Record ``number``, which is kept or ahead. Forgets records more than ``reach`` before it.

        Raises:
            ValueError: The shard has more or fewer records than it should.
        """
        if number in self.kept:
            return self.kept.pop(number)
        while True:
            record = self._read()
            if self.next > number:
                break
            if self.next > number - reach:
                self.kept[self.next - 1] = record
        while self.kept and next(iter(self.kept)) < number - reach:
            self.kept.popitem(last=False)
        return record

    def close(self) -> None:
        """Close the iterator, and what it iterates over. Idempotent."""
        self.kept.clear()
        self._end()

    def _read(self) -> Any:
        try:
            record = next(self._iterator)
        except StopIteration:
            raise ValueError(differs(self._label, self._count, f"ended after {self.next} records")) from None
        self.next += 1
        if self.next == self._count:
            for _ in self._iterator:
                raise ValueError(differs(self._label, self._count, "has more"))
            self._end()
        return record

    def _end(self) -> None:
        for opened in (self._iterator, self._records):
            close(opened, Exception)
        self._iterator, self._records = iter(()), ()


def differs(label: str, count: int, what: str) -> str:
    """The error message for a shard that does not have ``count`` records."""
    return (
        f"{label} should have {count} records, but it {what}. The shard has changed or is damaged, or the counts are "
        f"wrong: count it again (python -m penstock index), or correct counts=."
    )
