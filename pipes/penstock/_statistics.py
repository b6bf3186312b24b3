"""Frozen statistics: what each thing that works has done so far, for a slow or troubled run to explain itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """What a pool of processes has done.

    Attributes:
        workers: Worker processes alive.
        busy: Of these, how many have a task.
        waiting: Tasks that no worker has yet.
        tasks: Tasks finished.
        restarts: Workers that died and were replaced.
        slots: Shared-memory slots that hold a result or wait for one, and that workers alive have made.
        slot_bytes: Their size.
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
        waiting: Tasks that no thread has yet.
        stuck: Threads that a ``timeout`` has given up, and that have not come back.
    """

    workers: int
    tasks: int
    waiting: int
    stuck: int


@final
@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """What ``on_error`` has met with, in the batches that were handed out.

    Attributes:
        samples: Samples asked for.
        failed: Of these, how many raised.
        skipped: Of these, how many were left out; for the others there was a substitute.
        last: The sample that failed last, in words; empty where none has.
    """

    samples: int
    failed: int
    skipped: int
    last: str


@final
@dataclass(frozen=True, slots=True)
class PinStatistics:
    """What a `PinMemory` has found to do.

    Attributes:
        pinned: Batches that it has copied to pinned memory.
        already: Batches that lay there already, or for which there was nothing to pin.
    """

    pinned: int
    already: int


@final
@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """``ready`` items of at most ``depth``; the reader has read ``items``; the consumer has waited ``wait_s`` seconds in all."""

    name: str
    depth: int
    ready: int
    items: int
    wait_s: float
