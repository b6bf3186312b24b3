"""Where each task is. Pure bookkeeping: no process, socket, thread or clock.

::

    add ──► backlog ──take──► held by a worker ──finish──► done
               ▲                     │ the worker died: requeue
               └──── at the front ───┘

A task may have an *owner*, the worker that should do it. It waits for that worker, or for its replacement; no other
worker takes it. A task without an owner goes to any worker.

`discard` and `fail` end tasks wherever they are. A worker may still hold a task that has ended, and its result is then
ignored. So "is it wanted?" has one answer everywhere: ``not task.job.done``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock._workers.pool import Job


@dataclass(slots=True, eq=False)
class PendingTask:
    """A task on its way.

    Attributes:
        job: The job that the submitter waits for.
        number: Grows with every task.
        body: The task, pickled.
        owner: The number of the worker that should do it; None: any worker.
        fatal_rows: The rows that workers were loading when they died.
    """

    job: Job
    number: int
    body: bytes
    owner: int | None = None
    fatal_rows: set[int] = field(default_factory=set)


class TaskTable:
    """The tasks of one pool.

    Attributes:
        next_number: The next task's number; all tasks so far have lower ones.
        finished: Tasks that ended with their own result or error.
        failure: Makes the error of every later task, once the pool has failed.
        owned: The backlog of each owner. Empty if no task has had one.
    """

    def __init__(self) -> None:
        self.next_number = 0
        self.finished = 0
        self.failure: Callable[[], BaseException] | None = None
        self._wanted: dict[int, PendingTask] = {}  # by number, in order
        self._backlog: deque[PendingTask] = deque()  # for anybody
        self.owned: dict[int, deque[PendingTask]] = {}

    def __len__(self) -> int:
        """Tasks that are still wanted."""
        return len(self._wanted)

    @property
    def waiting(self) -> int:
        """Tasks that no worker holds."""
        if not self.owned:
            return len(self._backlog)
        # a copy, because `statistics` asks from other threads
        return len(self._backlog) + sum(map(len, list(self.owned.values())))

    def add(self, job: Job, body: bytes, owner: int | None = None) -> None:
        """Put a new task at the end of the common backlog, or of its ``owner``'s."""
        if self.failure is not None:
            job.error, job.done = self.failure(), True
            return
        task = PendingTask(job, self.next_number, body, owner)
        self.next_number += 1
        self._wanted[task.number] = task
        self._queue(owner).append(task)

    def waiting_for(self, owner: int | None) -> int:
        """Tasks that no worker holds: those for worker ``owner``, or with None those for any worker."""
        return len(self._backlog) if owner is None else len(self.owned.get(owner, ()))

    def take(self, owner: int | None = None) -> PendingTask | None:
        """The next task for worker ``owner``, or with None the next for any worker; None if there is none."""
        queue = self._queue(owner)
        return queue.popleft() if queue else None

    def _queue(self, owner: int | None) -> deque[PendingTask]:
        return self._backlog if owner is None else self.owned.setdefault(owner, deque())

    def finish(self, task: PendingTask, value: Any = None, error: BaseException | None = None) -> None:
        """Settle a task's job, unless it has ended already."""
        job = task.job
        if job.done:
            return
        # `done` is set after the result. The task is removed last: if an interrupt comes in between, `restart` sees
        # that the job is done. In the other order the job might never end.
        job.value, job.error = value, error
        job.done = True
        self._wanted.pop(task.number, None)  # a signal handler may have closed the pool since
        self.finished += 1

    def blame(self, task: PendingTask, row: int) -> bool:
        """Record that a worker died while loading ``row`` of ``task``. Returns whether one had died there before."""
        again = row in task.fatal_rows
        task.fatal_rows.add(row)
        return again

    def requeue(self, tasks: Iterable[PendingTask]) -> None:
        """Put the tasks of a dead worker, oldest first, back at the front of the backlog, because they have waited
        longest.
        """
        # From the youngest to the oldest, each to the front, so that the oldest ends up first.
        for task in reversed([task for task in tasks if not task.job.done]):
            self._queue(task.owner).appendleft(task)

    def restart(self) -> None:
        """Put every task back into the backlog, as if no worker had received any.

        Rebuilt from the jobs alone, because an exception may have interrupted any other method.
        """
        self._wanted = {number: task for number, task in self._wanted.items() if not task.job.done}
        self._backlog, self.owned = deque(), {}
        for task in self._wanted.values():
            self._queue(task.owner).append(task)

    def discard(self, why: Callable[[], BaseException]) -> None:
        """End every task with its own error."""
        for task in self._wanted.values():
            if not task.job.done:
                # A new error for each job: a single one would collect the traceback of every place that raises it.
                task.job.error, task.job.done = why(), True
        self._wanted.clear()
        self._backlog.clear()
        self.owned.clear()

    def fail(self, why: Callable[[], BaseException]) -> None:
        """End every task with an error, and also every task that is added later."""
        self.failure = why
        self.discard(why)
