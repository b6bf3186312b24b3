"""Steps: functions applied to the records of a shard one after another, when the number of outputs is not known in
advance.

A step is any callable from an iterator to an iterator. The steps of a shard start with its first record and end with
its last one, so its outputs are a pure function of (seed, pass, shard), and rereading the shard gives the same outputs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from inspect import GEN_CREATED, getgeneratorstate
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from penstock._arguments import Shown
from penstock._errors import ClosedError, GraphError, first_time
from penstock._fetch.error_policy import annotate
from penstock._fetch.sample import current
from penstock._memory.modes import GradientMode
from penstock._random.global_rng import GlobalRngSnapshot
from penstock._random.permutation import splitmix64_stream
from penstock._random.sliding_order import checked_window
from penstock._streams.forward_reader import Unreadable
from penstock._streams.pack_step import Pack as Pack
from penstock._streams.retrying import close
from penstock._streams.run_cursor import PassFacts, RecordId, RunCursor, running
from penstock._streams.step_identity import named

if TYPE_CHECKING:
    from types import TracebackType

Step: TypeAlias = Callable[[Iterator[Any]], Iterable[Any]]
"""A function of the records of one shard, or of the outputs of the step before it. When a state is loaded, the step's
name and the plain values that it holds must match: attributes, defaults, and the values in a closure or a
``functools.partial``. A step may have

- ``settings()``: JSON that must match instead of those values,
- ``version``: a number or string to change by hand when the code changes in a way that nothing else shows,
- ``keeps_count = True``: it yields exactly one output per input, in any order.
"""


@final
class Filter(Shown):
    """A step: keep the records for which ``predicate(record)`` is true.

    Args:
        predicate: A function of one record. It should depend only on the record and ``penstock.sample()``.
        version: Change it when the predicate changes in a way that its code does not show, such as a different model.
    """

    __module__ = "penstock"

    def __init__(self, predicate: Callable[[Any], Any], *, version: int | str | None = None) -> None:
        if not callable(predicate):
            raise TypeError(f"predicate must be a function of one record, but {predicate!r:.80} is not callable.")
        self.predicate = predicate
        self.version = version

    def __call__(self, records: Iterator[Any]) -> Generator[Any]:
        """The records that are kept."""
        predicate = self.predicate
        for record in records:
            if predicate(record):
                yield record

    def details(self) -> dict[str, Any]:
        return {"predicate": self.predicate, "version": self.version}

    def settings(self) -> dict[str, Any]:
        """What identifies the predicate."""
        return {"predicate": named(self.predicate)}


@final
class Shuffle(Shown):
    """A step: shuffle within a sliding window, as `SlidingOrder` does.

    Record j gets the key ``j + window * u``, with u uniform in [0, 1), and the records are sorted by key. A `Filter`
    before this step does not change the order of the remaining records. The step mixes about as well as a shuffle
    buffer of half the window, holds about half the window in memory, and is emptied at the end of the shard. Neighbours
    in the global sequence come from different shards anyway, so a small window is enough.

    Args:
        window: In records, from 0 to 2**30; 0 and 1 leave them in order.
    """

    __module__ = "penstock"

    keeps_count = True

    def __init__(self, window: int) -> None:
        self.window = checked_window(window)

    def __call__(self, records: Iterator[Any]) -> Generator[Any]:
        """The records, shuffled.

        Raises:
            RuntimeError: It is not used as a step, so it has no seed.
        """
        run = running()
        if run is None:
            raise RuntimeError("penstock.Shuffle works only as a step over shards, which seeds it. Pass it in steps=.")
        if id(self) not in run.listed:  # it is part of a user's step, whose effect on the order is unknown
            run.facts.drew_randomness = True
        if self.window <= 1:
            yield from records
            return
        keys = run.shuffle_keys()
        heap: list[tuple[int, int, RecordId, Any]] = []
        left = 0
        block, offsets = -1, [0]
        for arrived, record in enumerate(records):
            number = run.place
            if number >> _BLOCK_BITS != block:
                block = number >> _BLOCK_BITS
                offsets = self._offsets(block, *keys)
            heappush(heap, ((number << 32) + offsets[number & _BLOCK - 1], arrived, run.at, record))
            while heap and heap[0][0] <= number << 32:  # every later record gets a larger key
                _, _, run.at, output = heappop(heap)
                run.place = left
                left += 1
                yield output
        while heap:
            _, _, run.at, output = heappop(heap)
            run.place = left
            left += 1
            yield output

    def details(self) -> dict[str, Any]:
        return self.settings()

    def settings(self) -> dict[str, Any]:
        """The window."""
        return {"window": self.window}

    def _offsets(self, block: int, *keys: np.uint64) -> list[int]:
        """How far back the records of a block move, in units of 2**-32 records."""
        words = splitmix64_stream(np.arange(block << _BLOCK_BITS, block + 1 << _BLOCK_BITS, dtype=np.uint64), *keys)
        offsets: list[int] = ((words >> np.uint64(32)) * np.uint64(self.window)).tolist()
        return offsets


_BLOCK_BITS = 10
_BLOCK = 1 << _BLOCK_BITS


@final
class ShardRun(Iterator[Any]):
    """The outputs of ``steps`` over the records of one shard, in order.

    Reads nothing before the first ``next``. For one thread at a time.

    While a step works, ``penstock.sample()`` is the record that it took last: ``index`` is the record's number, and its
    random numbers are keyed by (seed, pass, shard, number). They travel with the record through `Filter`, `Shuffle` and
    `Pack`. The run closes its steps at the end, after an error, and on `close`.
    """

    def __init__(
        self, records: Iterable[Any], steps: Sequence[Step], *, seed: int, pass_: int, shard: int, given: Any = None
    ) -> None:
        self._records = records
        self._iterator = iter(records)
        self._steps = list(steps)
        self._shard = shard
        self._cursor = RunCursor(
            PassFacts(seed, pass_, shard, given), frozenset(id(step) for step in self._steps if type(step) is Shuffle)
        )
        self._ahead: deque[tuple[RecordId, Any]] = deque()
        self._room = _held(self._steps)
        self._read = False  # whether the last record was read ahead
        self._stages: list[Generator[Any]] = []
        self._closed = self._ended = False
        self._gradients = GradientMode()
        self._given = 0
        shuffled = False
        for step in self._steps:
            if shuffled and not getattr(step, "keeps_count", False):
                self._cursor.facts.drew_randomness = True
            shuffled = shuffled or (type(step) is Shuffle and step.window > 1)

    def begin_near(self, output: int) -> int:
        """Skip outputs before ``output``, if the records can go there by themselves.

        Returns how many; 0 with steps, which may hold some.
        """
        seek = getattr(self._records, "seek", None)
        if self._steps or seek is None or not output:
            return 0
        token = current.set(self._cursor)
        try:
            with self._gradients:
                number: int = seek(output)
        finally:
            current.reset(token)
        self._cursor.records, self._cursor.at = number, RecordId(number)
        return number

    def applied(self, function: Callable[[Any], Any], output: Any) -> Any:
        """``function(output)`` for the last output, which is ``penstock.sample()`` meanwhile."""
        token = current.set(self._cursor)
        try:
            return function(output)
        except BaseException as exc:
            annotate(exc, f"at record {self._cursor.at.number} of shard {self._shard}")
            raise
        finally:
            current.reset(token)

    def differs_by_pass(self) -> None:
        """The records of the shard may differ from pass to pass."""
        self._cursor.facts.drew_randomness = True

    @property
    def owes(self) -> bool:
        """Whether to call `read_ahead` for the last output, because it may have come without a record being read."""
        return bool(self._ahead) or self._cursor.exhausted

    def read_ahead(self) -> bool:
        """Read a record before a step asks for one, unless as many are already waiting as the first `Shuffle` holds.

        Returns whether there may be more.

        An error is stored, and raised when a step asks for that record.
        """
        cursor, waiting = self._cursor, len(self._ahead)
        if cursor.exhausted or self._read:
            return False
        if waiting < self._room:
            number = cursor.records + waiting
            token, at = current.set(cursor), cursor.at
            try:
                # Reading may draw random numbers, so a record needs its name before it is read; record 0 has had one
                # since the run was made.
                cursor.at = tag = RecordId(number) if number else at
                with self._gradients:
                    record = next(self._iterator, _END)
            except Exception as exc:
                record = Unreadable(exc)
            finally:
                cursor.at = at
                current.reset(token)
            self._read = record is _END or type(record) is Unreadable
            if record is not _END:
                self._ahead.append((tag, record))
        return not self._read

    @property
    def depends_on_pass(self) -> bool:
        """Whether the number of outputs may differ in another pass or with another seed.

        This holds if a `Shuffle` comes before a step that does not keep the count, if a step drew random numbers, and
        until the run reaches its end: if an error cuts it short, a `Shuffle` determines what has come out by then.
        """
        return self._cursor.facts.drew_randomness or not self._ended

    def __iter__(self) -> ShardRun:
        return self

    def __next__(self) -> Any:
        if self._closed:
            if self._ended:
                raise StopIteration
            raise ClosedError(f"the run over shard {self._shard} is closed, or has failed. Start another one.")
        cursor = self._cursor
        token = current.set(cursor)
        # Checked at outputs 0, 1, 2, 4, 8, …, because each look costs 1 to 2 us. Records that may draw are left alone.
        skipped = self._given & (self._given - 1) or (cursor.facts.drew_randomness and not self._steps)
        before = None if skipped else _looked()
        try:
            if self._steps:
                cursor.watched, cursor.reading_drew = before is not None, False
                if not self._stages:
                    self._begin()
                with self._gradients:
                    output = next(self._stages[-1])
            else:  # as `_numbered`, in half the time, because no step keeps a record or its name
                cursor.at.number, cursor.at.made = cursor.records, None
                with self._gradients:
                    output = next(self._iterator)
                cursor.records += 1
            self._given += 1
            if before is not None and _looked() != before:
                self._drew(cursor.reading_drew or not self._steps)
            return output
        except StopIteration:
            self._ended = True
        except BaseException as exc:
            annotate(exc, f"at record {cursor.at.number} of shard {self._shard}")
            with contextlib.suppress(Exception):
                self.close()
            raise
        finally:
            current.reset(token)
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Close the steps, the last one first, and then the records. Idempotent.

        Raises:
            Exception: Whatever a step or the records raised on closing; all of them are closed nevertheless.
        """
        if self._closed:
            return
        self._closed = True
        stages, self._stages, records, iterator = self._stages, [], self._records, self._iterator
        self._records, self._iterator = (), iter(())
        self._ahead.clear()
        with self._gradients, contextlib.ExitStack() as stack:
            stack.callback(close, records)
            stack.callback(close, iterator)
            for stage in stages:
                stack.callback(stage.close)

    def _drew(self, while_reading: bool) -> None:
        if not while_reading:
            raise GraphError(
                f"the steps over shard {self._shard} drew from the global random numbers (random, numpy.random or "
                f"torch). Such draws depend on what else this process has done, so the outputs would differ on other "
                f"ranks, with other workers and after a resume. Draw from penstock.sample().rng or "
                f"penstock.sample().torch_generator, which belong to the record; or, if no output depends on the "
                f"draws, from a separate random.Random()."
            )
        self._cursor.facts.drew_randomness = True
        # e.g. a network library that waits a random time before a retry, which is harmless
        if first_time("reading drew"):
            _logger.warning(
                "reading shard %d drew from the global random numbers (random, numpy.random or torch). If the records "
                "depend on these draws, they will differ after a resume: draw from penstock.sample().rng or "
                "penstock.sample().torch_generator instead.",
                self._shard,
            )

    def _begin(self) -> None:
        self._stages.append(_numbered(self._iterator, self._cursor, self._ahead))
        for number, step in enumerate(self._steps):
            items = self._stages[-1]
            if type(step) in _OURS:  # these set the current record themselves, and never call `next` in user code
                self._stages.append(step(items))  # type: ignore[arg-type]  # our own steps are generators
            else:
                counts = not getattr(step, "keeps_count", False)
                self._stages.append(_guarded(step, number, items, self._cursor, counts))


_OURS = (Filter, Shuffle, Pack)
_END = object()


_logger = logging.getLogger("penstock")
_watch = GlobalRngSnapshot()


def _looked() -> Any:
    """The states of the global generators; None if another thread may be drawing from them."""
    return _watch.look() if threading.current_thread() is threading.main_thread() else None


def _held(steps: Sequence[Step]) -> int:
    """How many records the first `Shuffle` holds; 0 if a step before it may yield more than one output per record."""
    for step in steps:
        if type(step) is Shuffle:
            return step.window // 2
        if type(step) is not Filter and not getattr(step, "keeps_count", False):
            break
    return 0


def _numbered(records: Iterator[Any], cursor: RunCursor, ahead: deque[tuple[RecordId, Any]]) -> Generator[Any]:
    """The records, those read ``ahead`` first, each with a `RecordId`, which is set before the record is read because
    reading may draw random numbers.
    """
    before = tag = cursor.at
    while True:
        if ahead:
            cursor.at, record = ahead.popleft()
            tag = cursor.at
            if type(record) is Unreadable:
                raise record.error
        elif (record := _watched(records, cursor) if cursor.watched else next(records, _END)) is _END:
            break
        cursor.place = cursor.records
        cursor.records += 1
        yield record
        before, cursor.at = tag, (tag := RecordId(cursor.records))
    cursor.exhausted = True
    cursor.at = before  # whatever a step does after the last record belongs to that record


def _watched(records: Iterator[Any], cursor: RunCursor) -> Any:
    """The next record, or `_END`. Notes whether reading it drew from the global generators."""
    before = _looked()
    record = next(records, _END)
    cursor.reading_drew = cursor.reading_drew or _looked() != before
    return record


def _guarded(step: Step, place: int, items: Any, cursor: RunCursor, counts: bool) -> Generator[Any]:
    """The outputs of a user's step.

    The step continues with its current record, although others were worked on in the meantime. ``counts``: its outputs
    are renumbered.
    """
    outputs = _opened(step, place, items)
    tag, number = cursor.at, 0
    try:
        while True:
            cursor.at = tag
            try:
                item = next(outputs)
            except StopIteration as stop:
                if items.gi_frame is not None and _frames(stop.__traceback__) > isinstance(
                    type(outputs).__next__, FunctionType
                ):
                    raise RuntimeError(
                        f"{_name(step, place)} raised StopIteration in the middle of the shard, from a function that "
                        f"it calls, such as next() without a default. That would have ended the shard silently. Catch "
                        f"it there; a step that wants to end early returns."
                    ) from stop
                return
            tag = cursor.at
            if counts:
                cursor.place = number
                number += 1
            yield item
    finally:
        close(outputs)


def _opened(step: Step, number: int, items: Any) -> Iterator[Any]:
    try:
        outputs = step(items)
    except Exception as exc:
        if getgeneratorstate(items) == GEN_CREATED:  # no record was read, so the error does not belong to a record
            annotate(
                exc,
                f"{_name(step, number)} was called with the iterator over a shard, not with one record. Pass a "
                f"predicate as penstock.Filter(predicate), and a function of one record as transform=.",
            )
        raise
    try:
        iterator = iter(outputs)
    except TypeError as exc:
        raise TypeError(
            f"{_name(step, number)} returned {outputs!r:.80}, but must return an iterator of outputs. Write it as a "
            f"generator function, with yield."
        ) from exc
    if id(iterator) == id(step):
        raise TypeError(
            f"{_name(step, number)} returned itself as the iterator. All lanes run the same step at the same time, "
            f"each over its own shard, so they would take each other's records. Write __call__ as a generator, with "
            f"yield, and keep its state in local variables."
        )
    return iterator


def _frames(traceback: TracebackType | None) -> int:
    """The number of Python functions that a StopIteration passed through before reaching this one."""
    frames = -1
    while traceback is not None:
        traceback, frames = traceback.tb_next, frames + 1
    return frames


def _name(step: Step, number: int) -> str:
    return f"steps[{number}], {getattr(step, '__qualname__', type(step).__qualname__)},"
