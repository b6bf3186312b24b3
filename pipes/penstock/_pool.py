"""What a node sees of its workers, whether they are threads or processes.

One consumer thread owns a pool: it submits, waits and collects. A worker never touches the graph. The only call that another
thread may make is `Pool.interrupt`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock._errors import SampleError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, MutableSequence
    from multiprocessing.context import BaseContext

    StartMethod = str | BaseContext

IDLE = -1
"""What a worker's cell holds while it loads no sample."""

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

Allocate = Callable[[Sequence[Spec]], list[torch.Tensor]]
"""Memory for one batch: contiguous CPU tensors, contents undefined. Asked again for the same batch, it may give the same memory."""


def afresh(specs: Sequence[Spec]) -> list[torch.Tensor]:
    """`Allocate` without anything to recycle."""
    return [torch.empty(shape, dtype=dtype) for shape, dtype in specs]


def pinned(specs: Sequence[Spec]) -> list[torch.Tensor]:
    """`Allocate` in page-locked memory of torch's own cache, which waits for copies to a device that are still on their way."""
    return [torch.empty(shape, dtype=dtype, pin_memory=True) for shape, dtype in specs]


PATIENCE_S = 2.0
"""How long a shutdown may take, unless `closing_within` says otherwise."""

_patience_s: ContextVar[float] = ContextVar("penstock_patience_s", default=PATIENCE_S)


@contextlib.contextmanager
def closing_within(timeout: float) -> Iterator[None]:
    """Let every `Pool.shutdown` in the body that is not told a time take ``timeout`` seconds; nodes hand no arguments down."""
    token = _patience_s.set(timeout)
    try:
        yield
    finally:
        _patience_s.reset(token)


def patience_s(timeout: float | None) -> float:
    """``timeout``, or that of `closing_within`."""
    return _patience_s.get() if timeout is None else timeout


class Work(Protocol):
    """What a worker does with one task. Handed to each worker once; pickled where processes are not forked."""

    def __call__(self, task: Any, cell: MutableSequence[int], allocate: Allocate) -> Any:
        """Do ``task``; write the row being loaded (its place in the task) to ``cell[0]`` where there are rows.

        What lies in memory that ``allocate`` gave need not be copied on its way to the consumer.
        """
        ...

    def name(self, task: Any, row: int) -> str:
        """``task`` in words, for errors; with ``row`` of `IDLE` the whole of it."""
        ...


class Job:
    """One task on its way: done when ``done`` is true, and then with a value or an error."""

    __slots__ = ("done", "error", "task", "value", "worker")

    def __init__(self, task: Any) -> None:
        self.task = task
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.worker = IDLE

    def result(self) -> Any:
        """The value; raises the error, if that is what came of the task.

        What would end more than a batch where it is raised, such as ``StopIteration`` or ``SystemExit``, is raised as a `SampleError`.
        """
        if self.error is None:
            return self.value
        if isinstance(self.error, Exception) and not isinstance(self.error, StopIteration | StopAsyncIteration):
            raise self.error
        where = ", ".join(getattr(self.error, "__notes__", ()))
        raise SampleError(f"{type(self.error).__name__} came out of user code {where}".rstrip()) from self.error


class Pool(Protocol):
    """Workers that live as long as the pool, one protocol for threads and processes."""

    def start(self) -> None:
        """Start the workers; again, does nothing."""

    def submit(self, task: Any) -> Job:
        """Hand over a task; never blocks on a worker."""
        ...

    def wait(self, jobs: Iterable[Job], timeout: float | None) -> None:
        """Until one of ``jobs`` is done; `ClosedError` after `interrupt`.

        After ``timeout`` seconds a job that a worker is in the middle of is done with a `TimeoutError` of its own, and its worker is
        given up; where none of ``jobs`` has been begun, `wait` raises it, and they are still to come.
        """

    def discard(self) -> None:
        """Forget every job in flight, after a jump; the workers live on, and finish or skip what they have."""

    def interrupt(self) -> None:
        """Wake whoever is in `wait` with `ClosedError`; from any thread."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers within ``timeout`` seconds (see `closing_within`) and give back all they held; again, does nothing."""

    def statistics(self) -> Any:
        """A frozen object that counts what the pool has done."""
