"""What each concurrent part has done so far, as frozen objects, so that a slow or failing run explains itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """What a pool of processes has done.

    Attributes:
        workers: Worker processes alive.
        busy: How many of them have a task.
        waiting: Tasks not yet given to a worker.
        tasks: Tasks finished.
        restarts: Workers that died and were replaced.
        slots: Shared-memory slots, made by workers still alive, that hold a result or are free for one.
        slot_bytes: Total size of these slots.
    """

    workers: int
    busy: int
    waiting: int
    tasks: int
    restarts: int
    slots: int
    slot_bytes: int


@final
@dataclass(frozen=True, slots=True)
class ThreadStatistics:
    """What a pool of threads has done.

    Attributes:
        workers: Threads.
        tasks: Tasks finished.
        waiting: Tasks not yet given to a thread.
        stuck: Threads that ``timeout`` gave up on and that are still in their task.
    """

    workers: int
    tasks: int
    waiting: int
    stuck: int


@final
@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """What ``on_error`` has handled, counted over the batches delivered so far.

    Attributes:
        samples: Samples requested.
        failed: How many of them raised.
        skipped: How many of those that failed were left out; the others were replaced by a substitute.
        last: A description of the sample that failed last; empty if none has.
    """

    samples: int
    failed: int
    skipped: int
    last: str


@final
@dataclass(frozen=True, slots=True)
class PinStatistics:
    """What a `PinMemory` has done.

    Attributes:
        pinned: Batches copied to pinned memory.
        already: Batches that were pinned already or held nothing to pin.
    """

    pinned: int
    already: int


@final
@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """What the reader thread ``name`` has done.

    Attributes:
        name: The thread's name.
        depth: The most items it keeps ready.
        ready: Items ready now.
        items: Items read.
        wait_s: Seconds that the consumer has waited, in all.
    """

    name: str
    depth: int
    ready: int
    items: int
    wait_s: float
