"""What a node sees of its workers, whether they are threads or processes.

One consumer thread owns a pool: it submits, waits and collects. A worker never touches the graph. The only call that another
thread may make is `Pool.interrupt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from penstock._errors import SampleError

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence, Sequence
    from multiprocessing.context import BaseContext

    from penstock._memory.allocation import Allocate


if TYPE_CHECKING:
    StartMethod = str | BaseContext

IDLE = -1
"""What a worker's cell holds while it loads no sample."""


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

    @property
    def under_way(self) -> list[Job]:
        """What is to be waited for: itself."""
        return [self]

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

    def forget(self) -> None:
        """Keep the error no longer that `result` has raised: it knows every frame on its way, and those know this job."""
        self.error = None


class SplitJob:
    """A batch whose rows are loaded by several workers at once; a `Job` to whoever looks."""

    worker = IDLE

    def __init__(self, task: Any, jobs: list[Job], together: Callable[[list[Any]], Any]) -> None:
        self.task = task
        self._jobs = jobs
        self._together = together

    @property
    def done(self) -> bool:
        return not self.under_way or any(job.error is not None for job in self._jobs)

    @property
    def under_way(self) -> list[Job]:
        return [job for job in self._jobs if not job.done]

    def result(self) -> Any:
        for job in self._jobs:
            if job.error is not None:
                job.result()
        return self._together([job.value for job in self._jobs])

    def forget(self) -> None:
        for job in self._jobs:
            job.forget()


class Pool(Protocol):
    """Workers that live as long as the pool, one protocol for threads and processes."""

    def start(self) -> None:
        """Start the workers; again, does nothing."""

    def submit(self, task: Any) -> Job:
        """Hand over a task; never blocks on a worker."""
        ...

    def wait(self, jobs: Sequence[Job], timeout: float | None) -> None:
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
