"""How long work takes, counted where it is done.

A `Meter` belongs to one worker, which alone writes it; anybody may read it at any time. It keeps counts in words of 64 bits, so that it can lie in
the memory that a worker process shares with the consumer, and so that measuring keeps neither samples nor batches, and needs no memory.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from time import perf_counter_ns, sleep, thread_time_ns
from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock._statistics import Durations

now = perf_counter_ns
"""The time, in nanoseconds: one clock for all processes."""


class Listener:
    """Is told of what happens, and when it began and ended, while it is in `traced`. From any thread."""

    def task(self, task: Any, begin: int, end: int) -> None:
        """A worker, or the thread that is its own worker, has done ``task``."""

    def read(self, node: Any, begin: int, end: int) -> None:
        """Workers or a reader thread have got an item of ``node``."""

    def delivered(self, loader: Any, begin: int, end: int) -> None:
        """A loop has waited for a batch."""

    def ended(self, loader: Any, begin: int, why: str) -> None:
        """A loop has waited since ``begin``, and got no batch."""

    def in_worker(self, init: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """What a worker process is to call with its number at its start; without listeners it is ``init``."""
        return init


traced: list[Listener] = []
"""Who listens: nobody, or one."""

_COST_NS = 100_000
"""Measuring a sample costs less than a hundredth of this. So many nanoseconds of samples go unmeasured for each one that is."""
_MOST_PLAIN = 255
"""Batches in a row that go unmeasured, at most."""
_LOOK_NS = 50_000_000
"""The least time between two looks at the processor time and at Python's lock: they cost up to 150 µs."""
_NAP_S = 5e-5
"""For so long a thread gives up Python's lock, so that another one that waits for it wakes up and takes it."""
_CONTENDED_NS = 800_000
"""The lock was taken if it then took so long to get it back."""


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
        """Another one with the same counts."""
        return Histogram(list(self.words))

    def add_many(self, ns: np.ndarray) -> None:
        """Count each of ``ns``, int64."""
        if not len(ns):
            return
        words = self.words
        words[0] += int(ns.sum())
        words[1] = max(words[1], int(ns.max()))
        fractions, octaves = np.frexp(np.maximum(ns, 8).astype(np.float64))
        places = (octaves << 2) + (fractions * 8).astype(np.int64) - 18
        counts = np.bincount(places)
        for place in np.flatnonzero(counts).tolist():
            words[place] += int(counts[place])

    def add_all(self, other: Sequence[int]) -> None:
        """Add the ``words`` of another one."""
        mine = self.words
        longest = max(mine[1], other[1])
        for place, count in enumerate(other):
            if count:
                mine[place] += count
        mine[1] = longest

    def durations(self, slowest: Any = None) -> Durations:
        """What was counted so far."""
        from penstock._statistics import Durations

        words = list(self.words)
        return Durations.of(words[2:], words[0] / 1e9, words[1] / 1e9, slowest)


@final
class Meter:
    """What one worker has spent its time on.

    Args:
        words: `WORDS` integers that are 0. None: memory of its own.
        tries_lock: Now and then, see whether other threads want Python's lock as well.

    Attributes:
        load: `Histogram` of samples.
        transform: `Histogram` of samples.
        collate: `Histogram` of batches.
        pack: `Histogram` of batches.
        plain: Batches to leave unmeasured; the first one is, because files are opened and modules imported in it. Whoever has a batch counts it down.
        slowest_row: Which row of the batch took longer than any sample before it; None if none did.
    """

    BUSY, SINCE, FIRST, LAST, CPU, WALL, LOOKS, WAITS, SLOWEST_NS, NAME_BYTES, NAME = range(11)
    MOST_NAME_BYTES = 128
    HEAD = NAME + MOST_NAME_BYTES // 8
    HISTOGRAMS = 4
    WORDS = HEAD + HISTOGRAMS * Histogram.WORDS

    __slots__ = (
        "_cpu",
        "_looked",
        "_seen",
        "_slowest_ns",
        "_tries_lock",
        "_wall",
        "collate",
        "load",
        "pack",
        "plain",
        "slowest_row",
        "transform",
        "words",
    )

    def __init__(self, words: Any = None, *, tries_lock: bool = False) -> None:
        self._tries_lock = tries_lock
        size = Histogram.WORDS
        parts: list[Any] = [None if words is None else words[k : k + size] for k in range(self.HEAD, self.WORDS, size)]
        self.words: Any = [0] * self.HEAD if words is None else words[: self.HEAD]  # a list of one's own is faster
        self.load, self.transform, self.collate, self.pack = map(Histogram, parts)
        self.slowest_row: int | None = None
        self._slowest_ns = 0
        self.plain = 1
        self._seen = 0  # of the time of loading, when this batch began
        self._looked = 0  # when
        self._cpu = self._wall = 0  # at the last look; 0 for the wall: no look in this batch

    def __reduce__(self) -> Any:
        return Meter, ()  # each worker counts for itself

    def counted(self) -> list[int]:
        """All the words, for `Totals`."""
        return [*self.words, *self.load.words, *self.transform.words, *self.collate.words, *self.pack.words]

    def ended(self) -> list[int]:
        """The same of a worker that has ended: it is in no task."""
        words = self.counted()
        words[self.SINCE] = 0
        return words

    # A task.

    def begin(self) -> None:
        """A task begins."""
        words = self.words
        since = words[self.SINCE] = now()
        if not words[self.FIRST]:
            words[self.FIRST] = since

    def end(self) -> None:
        """The task has ended."""
        words = self.words
        ended = words[self.LAST] = now()
        words[self.BUSY] += ended - words[self.SINCE]

    # A batch in the task.

    def measure(self) -> None:
        """Measure the batch that begins; `measured` ends that."""
        words = self.words
        self._seen = self.load.words[0] + self.transform.words[0]
        self._wall, self.slowest_row = 0, None
        wall = now()
        if wall - self._looked >= _LOOK_NS:
            self._looked = wall
            self._cpu, self._wall = _active_ns(), wall
            if self._tries_lock:
                sleep(_NAP_S)
                self._wall, cpu = now(), self._cpu
                self._cpu = _active_ns()
                words[self.LOOKS] += 1
                words[self.WAITS] += self._wall - wall - (self._cpu - cpu) > _CONTENDED_NS

    def measured(self, rows: int) -> None:
        """The batch, of ``rows`` samples, was made."""
        words = self.words
        if self._wall:
            words[self.WALL] += now() - self._wall
            words[self.CPU] += _active_ns() - self._cpu
        mean_ns = (self.load.words[0] + self.transform.words[0] - self._seen) // max(1, rows)
        self.plain = min(_MOST_PLAIN, _COST_NS // max(1, mean_ns))

    def timed(self, function: Callable[[Any], Any], histogram: Histogram, cell: Sequence[int]) -> Callable[[Any], Any]:
        """``function`` of one sample, measured; the sample's row is in ``cell``."""
        add, words = histogram.add, histogram.words

        def measured(argument: Any) -> Any:
            began = now()
            try:
                return function(argument)
            finally:
                ns = now() - began
                if ns > words[1] and ns > self._slowest_ns:
                    self._slowest_ns, self.slowest_row = ns, cell[0]
                add(ns)

        return measured

    def loaded_many(self, ns: int, rows: int) -> None:
        """``rows`` samples were loaded together, in ``ns``."""
        share = ns // max(1, rows)
        self.load.add(share, rows)
        if share > self._slowest_ns:
            self._slowest_ns, self.slowest_row = share, 0

    def name_slowest(self, name: int | str) -> None:
        """The slowest sample so far is ``name``."""
        text = json.dumps(name).encode()
        if len(text) > self.MOST_NAME_BYTES:
            text = b"null"
        words = self.words
        words[self.SLOWEST_NS] = self._slowest_ns
        words[self.NAME_BYTES] = len(text)
        for place in range(0, len(text), 8):
            words[self.NAME + place // 8] = int.from_bytes(text[place : place + 8].ljust(8), "little", signed=True)


measuring: ContextVar[Meter | None] = ContextVar("penstock_meter", default=None)
"""The meter of the worker that runs here."""


def _active_ns() -> int:
    """How long this thread has computed, or waited for a free core."""
    try:
        _, ready, _ = np.fromfile("/proc/thread-self/schedstat", np.int64, sep=" ")  # one call, so no interrupt leaves the file open
    except (OSError, ValueError):  # not Linux, or no file descriptor left
        return thread_time_ns()
    except SystemError as exc:  # what NumPy makes of an interrupt that comes while it opens the file
        raise (exc.__cause__ or exc) from None
    return thread_time_ns() + int(ready)


class Totals:
    """What several meters have counted, together.

    Attributes:
        busy_ns: Time spent on tasks.
        first: When the first task began; 0 if none has.
        last: When the last task ended, or now if a worker is in one.
        cpu_ns: Of ``wall_ns``, how long the worker computed, or waited for a free core.
        looks: How often a worker tried to get Python's lock.
        waits: How often it was taken.
        slowest: The index of the slowest sample; None if unknown.
    """

    def __init__(self, meters: Iterable[Sequence[int]]) -> None:
        self.busy_ns = self.first = self.last = self.cpu_ns = self.wall_ns = self.looks = self.waits = 0
        self.slowest: Any = None
        self._slowest_ns = 0
        self.histograms = [Histogram() for _ in range(Meter.HISTOGRAMS)]
        for words in meters:
            self.add(words)

    @property
    def stages(self) -> dict[str, Durations]:
        """What was measured of ``load``, ``transform``, ``collate`` and ``pack``."""
        found = dict(zip(("load", "transform", "collate", "pack"), self.histograms, strict=True))
        of_sample = "load" if found["load"].words[1] >= found["transform"].words[1] else "transform"
        return {name: histogram.durations(self.slowest if name == of_sample else None) for name, histogram in found.items()}

    def add(self, words: Sequence[int]) -> None:
        """Add the ``words`` of one meter."""
        moment, since, last = now(), words[Meter.SINCE], words[Meter.LAST]
        in_task = since > last
        self.busy_ns += words[Meter.BUSY] + (max(0, moment - since) if in_task else 0)
        self.first = min(filter(None, (self.first, words[Meter.FIRST])), default=0)
        self.last = max(self.last, moment if in_task else last)
        self.cpu_ns += words[Meter.CPU]
        self.wall_ns += words[Meter.WALL]
        self.looks += words[Meter.LOOKS]
        self.waits += words[Meter.WAITS]
        if words[Meter.SLOWEST_NS] > self._slowest_ns:
            self._slowest_ns, self.slowest = words[Meter.SLOWEST_NS], _name_in(words)
        start = Meter.HEAD
        for histogram in self.histograms:
            histogram.add_all(words[start : start + Histogram.WORDS])
            start += Histogram.WORDS


def _name_in(words: Sequence[int]) -> Any:
    text = b"".join(word.to_bytes(8, "little", signed=True) for word in words[Meter.NAME : Meter.HEAD])
    try:
        return json.loads(text[: words[Meter.NAME_BYTES]])
    except ValueError:  # it is being written
        return None
