"""How long work takes, counted where it is done.

A `Meter` belongs to one worker, its only writer; any thread may read it at any time. It keeps counts in 64-bit words,
so that it fits in the memory that a worker process shares with the consumer, and so that measuring keeps no samples or
batches alive and allocates no memory.
"""

from __future__ import annotations

import json
from array import array
from contextvars import ContextVar
from operator import itemgetter
from time import perf_counter_ns, sleep, thread_time_ns
from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock._statistics import Durations

now = perf_counter_ns
"""The time, in nanoseconds: one clock for all processes."""


class Listener:
    """Receives events with their begin and end while it is in `traced`, from any thread."""

    def task(self, task: Any, begin: int, end: int) -> None:
        """A worker, or a thread without workers, has run ``task``."""

    def read(self, node: Any, begin: int, end: int) -> None:
        """Workers or a reader thread have received an item of ``node``."""

    def delivered(self, loader: Any, begin: int, end: int) -> None:
        """A loop has waited for a batch."""

    def ended(self, loader: Any, begin: int, why: str) -> None:
        """A loop has waited since ``begin`` and received no batch."""

    def in_worker(self, init: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """The function that a worker process calls with its number at its start; without listeners it is ``init``."""
        return init


traced: list[Listener] = []
"""The listeners: none, or one."""

_COST_NS = 100_000
"""Measuring a sample costs less than a hundredth of this. After each measured sample, samples go unmeasured for this
long.
"""
_MOST_PLAIN = 255
"""The most batches in a row that go unmeasured."""
_LOOK_NS = 500_000_000
"""The least time between two checks of the processor time and of Python's lock, which cost up to 150 µs."""
_NAP_S = 5e-5
"""How long a thread gives up Python's lock, so that another thread that waits for it wakes up and takes it."""
_CONTENDED_NS = 800_000
"""The lock was contended if getting it back took this long."""


@final
class Histogram:
    """Counts of durations, in four classes to an octave.

    Args:
        words: `WORDS` integers: the sum, the longest, and the counts.
    """

    WORDS = 242
    __slots__ = ("words",)

    def __init__(self, words: Any = None) -> None:
        self.words: Any = [0] * self.WORDS if words is None else words

    def add(self, ns: int, n: int = 1) -> None:
        """Count ``n`` durations of ``ns`` nanoseconds each."""
        words = self.words
        words[0] += ns * n
        if ns > words[1]:
            words[1] = ns
        octave = ns.bit_length()
        words[(octave << 2) + (ns >> octave - 3) - 18 if octave > 3 else 2] += n

    def copy(self) -> Histogram:
        """A copy of the counts."""
        return Histogram(list(self.words))

    def add_many(self, ns: np.ndarray) -> None:
        """Count each of ``ns``, int64."""
        if not len(ns):
            return
        words = self.words
        words[0] += int(ns.sum())
        words[1] = max(words[1], int(ns.max()))
        fractions, octaves = np.frexp(np.maximum(ns, 8).astype(np.float64))
        numbers = (octaves << 2) + (fractions * 8).astype(np.int64) - 18
        counts = np.bincount(numbers)
        for number in np.flatnonzero(counts).tolist():
            words[number] += int(counts[number])

    def durations(self, slowest: Any = None) -> Durations:
        """The counts so far, as `Durations`."""
        from penstock._statistics import Durations

        words = list(self.words)
        return Durations.of(words[2:], words[0] / 1e9, words[1] / 1e9, slowest)


@final
class Meter:
    """How one worker has spent its time.

    Args:
        words: `WORDS` integers that are 0. None: private memory.
        tries_lock: Check now and then whether other threads wait for Python's lock.

    Attributes:
        load: `Histogram` of samples.
        transform: `Histogram` of samples.
        collate: `Histogram` of batches.
        pack: `Histogram` of batches.
        plain: Batches to leave unmeasured, counted down by the code that makes a batch. The first batch is unmeasured,
            because it opens files and imports modules.
    """

    BUSY, SINCE, FIRST, LAST, CPU, WALL, LOOKS, WAITS, SLOWEST_NS, NAME = range(10)
    MOST_NAME_BYTES = 128
    HEAD = NAME + MOST_NAME_BYTES // 8
    STAGES = ("load", "transform", "collate", "pack")
    WORDS = HEAD + len(STAGES) * Histogram.WORDS

    def __init__(self, words: Any = None, *, tries_lock: bool = False) -> None:
        self._tries_lock = tries_lock
        size = Histogram.WORDS
        parts: list[Any] = [None if words is None else words[k : k + size] for k in range(self.HEAD, self.WORDS, size)]
        self.words: Any = [0] * self.HEAD if words is None else words[: self.HEAD]  # a list of one's own is faster
        self.load, self.transform, self.collate, self.pack = map(Histogram, parts)
        self.plain = 1
        self._current_row: Sequence[int] = (0,)  # has the row being loaded
        self._slowest_ns = 0
        self._slowest_row: int | None = None  # the row of the batch that took longer than any sample before it
        self._seen = 0  # the time of loading when this batch began
        self._looked = 0  # the time of the last check
        self._cpu = self._wall = 0  # at the last check; a wall of 0 means no check in this batch

    def __reduce__(self) -> Any:
        return Meter, ()  # each worker counts for itself

    def counted(self, *, ended: bool = False) -> list[int]:
        """All the words, for `Totals`. A worker that has ``ended`` is in no task."""
        words = [*self.words, *self.load.words, *self.transform.words, *self.collate.words, *self.pack.words]
        words[self.SINCE] *= not ended
        return words

    # A task.

    def begin(self) -> int:
        """A task begins; returns when."""
        words = self.words
        since: int = now()
        words[self.SINCE] = since
        if not words[self.FIRST]:
            words[self.FIRST] = since
        return since

    def end(self) -> int:
        """The task has ended; returns when."""
        words = self.words
        ended: int = now()
        words[self.LAST] = ended
        words[self.BUSY] += ended - words[self.SINCE]
        return ended

    # A batch in the task.

    def measure(self, current_row: Sequence[int]) -> None:
        """Measure the batch that begins; ``current_row`` has the row being loaded. `measured` ends that."""
        self._current_row, self._slowest_row, self._wall = current_row, None, 0
        self._seen = self.load.words[0] + self.transform.words[0]
        wall = now()
        if wall - self._looked >= _LOOK_NS:
            self._looked = wall
            self._cpu, self._wall = active_ns(), wall
            if self._tries_lock:
                sleep(_NAP_S)
                self._wall, cpu = now(), self._cpu
                self._cpu = active_ns()
                self.words[self.LOOKS] += 1
                self.words[self.WAITS] += self._wall - wall - (self._cpu - cpu) > _CONTENDED_NS

    def measured(self, rows: int, name_of: Callable[[int], int | str | None]) -> None:
        """A batch of ``rows`` samples was made.

        If one of them was the slowest so far, ``name_of`` its row is recorded.
        """
        words = self.words
        if self._wall:
            words[self.WALL] += now() - self._wall
            words[self.CPU] += active_ns() - self._cpu
        mean_ns = (self.load.words[0] + self.transform.words[0] - self._seen) // max(1, rows)
        self.plain = min(_MOST_PLAIN, _COST_NS // max(1, mean_ns))
        if self._slowest_row is not None:
            # The name before the time by which it is chosen. A reader in another process may still see half of it: then
            # it is no JSON, or names the sample that was the slowest before.
            name = json.dumps(name_of(self._slowest_row)).encode()
            most = self.MOST_NAME_BYTES
            words[self.NAME : self.HEAD] = array("q", (name if len(name) <= most else b"null").ljust(most))
            words[self.SLOWEST_NS] = self._slowest_ns

    def timed(self, function: Callable[[Any], Any], histogram: Histogram) -> Callable[[Any], Any]:
        """``function`` of one sample, measured."""
        add, words, current_row = histogram.add, histogram.words, self._current_row

        def measured(argument: Any) -> Any:
            began = now()
            try:
                return function(argument)
            finally:
                ns = now() - began
                if ns > words[1] and ns > self._slowest_ns:
                    self._slowest_ns, self._slowest_row = ns, current_row[0]
                add(ns)

        return measured

    def loaded_many(self, ns: int, rows: int) -> None:
        """``rows`` samples were loaded together, in ``ns``."""
        share = ns // max(1, rows)
        self.load.add(share, rows)
        if share > self._slowest_ns:
            self._slowest_ns, self._slowest_row = share, 0


measuring: ContextVar[Meter | None] = ContextVar("penstock_meter", default=None)
"""The meter of the worker that runs here."""


def active_ns() -> int:
    """Nanoseconds that this thread has computed, or waited for a free core."""
    try:
        # one call, so no interrupt leaves the file open
        _, ready, _ = np.fromfile("/proc/thread-self/schedstat", np.int64, sep=" ")
    except (OSError, ValueError):  # not Linux, or no file descriptor left
        return thread_time_ns()
    except SystemError as exc:  # NumPy's translation of an interrupt while it opens the file
        raise (exc.__cause__ or exc) from None
    return thread_time_ns() + int(ready)


class Totals:
    """The sums over several meters.

    Attributes:
        busy_ns: Time spent on tasks.
        first: When the first task began; 0 if none has.
        last: When the last task ended, or now if a worker is in one.
        cpu_ns: Of ``wall_ns``, how long the worker computed, or waited for a free core.
        looks: How often a worker tried to get Python's lock.
        waits: How often it was taken.
    """

    def __init__(self, meters: Iterable[Sequence[int]]) -> None:
        self._meters = np.array([*meters], np.int64).reshape(-1, Meter.WORDS)
        self._sums: list[int] = self._meters.sum(0).tolist()
        moment, (since, first, last) = now(), self._meters.T[[Meter.SINCE, Meter.FIRST, Meter.LAST]]
        in_task = since > last  # read while the worker writes: a task that ends meanwhile counts up to now
        self.busy_ns = self._sums[Meter.BUSY] + int(np.maximum(moment - since[in_task], 0).sum())
        self.first = int(min(first[first > 0], default=0))
        self.last = moment if in_task.any() else int(max(last, default=0))
        self.cpu_ns, self.wall_ns, self.looks, self.waits = self._sums[Meter.CPU : Meter.WAITS + 1]

    @property
    def stages(self) -> dict[str, Durations]:
        """The measurements of ``load``, ``transform``, ``collate`` and ``pack``."""
        size, longest = Histogram.WORDS, dict.fromkeys(Meter.STAGES, 0)
        found = {}
        for number, name in enumerate(Meter.STAGES):
            start = Meter.HEAD + number * size
            longest[name] = int(max(self._meters[:, start + 1], default=0))
            found[name] = Histogram([self._sums[start], longest[name], *self._sums[start + 2 : start + size]])
        of_sample = "load" if longest["load"] >= longest["transform"] else "transform"
        return {
            name: histogram.durations(self._slowest() if name == of_sample else None)
            for name, histogram in found.items()
        }

    def _slowest(self) -> Any:
        """The name of the slowest sample; None if unknown."""
        words = max(self._meters, key=itemgetter(Meter.SLOWEST_NS), default=None)
        try:
            return None if words is None else json.loads(words[Meter.NAME : Meter.HEAD].tobytes())
        except ValueError:  # there is none, or it is being written
            return None
