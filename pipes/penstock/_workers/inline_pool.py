"""A pool without workers: the thread that waits for a job runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from penstock._errors import is_own_error
from penstock._workers.meter import traced
from penstock._workers.pool import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._memory.allocation import Allocate
    from penstock._statistics import WorkerStatistics
    from penstock._workers.meter import Meter


@final
class InlinePool:
    """`Pool` that runs ``work(task, allocate)`` in the caller's thread."""

    def __init__(self, work: Callable[[Any, Allocate], Any], allocate: Allocate, meter: Meter) -> None:
        self._work = work
        self._meter = meter
        self._allocate = allocate

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, task: Any, to: int | None = None) -> Job:
        return Job(task)

    def wait(self, jobs: Sequence[Job], timeout: float | None) -> None:
        """Run the first of ``jobs``. Ctrl-C and ``sys.exit`` in a signal handler are not its error: they propagate, and the job stays undone."""
        job, meter = jobs[0], self._meter
        since = meter.begin()
        try:
            job.value = self._work(job.task, self._allocate)
        except BaseException as exc:
            if not isinstance(exc, Exception) and not is_own_error(exc):
                raise
            job.error = exc
        ended = meter.end()
        for one in traced:
            one.task(job.task, since, ended)
        job.done = True

    def discard(self) -> None:
        """Nothing is in flight."""

    def interrupt(self) -> None:
        """Nothing to interrupt: no thread waits for another."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to shut down."""

    @property
    def size(self) -> int:
        """There are no workers."""
        return 0

    @property
    def all_ready(self) -> bool:
        """There are no workers."""
        return True

    def resize(self, num_workers: int) -> int:
        """There are no workers."""
        return 0

    def statistics(self) -> WorkerStatistics:
        from penstock._statistics import WorkerStatistics

        return WorkerStatistics("inline")

    def counted(self) -> list[list[int]]:
        return []  # the work's own meter counts
