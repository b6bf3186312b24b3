"""Workers on other machines: actors of Ray, behind the same `Pool` as threads and processes.

A task is a pure function of its address, so it may be done anywhere, and again after a death. Ray places the actors,
carries tasks and results, and reports deaths. This pool decides which actor does which task, what is done again, and
when to give up; Ray's own restarts and retries stay off.

::

    submit ──► TaskTable ──a call of several tasks──► RayWorker, in an actor ──one object──► value,
        in memory of the consumer's `Allocate`

This file tracks where each task is, `Actors` which actors are alive, and `RayWorker` is the code inside an actor.

Who touches what. The consumer thread: everything. Ray's own threads: `Came`, when an answer has reached this machine.
Any thread: `interrupt` and `statistics`. An exception may come at any line of the consumer (Ctrl-C). The loader then
resets its graph; `discard` drops all tasks, and restores the state of the actors (`Actors.restore`).
"""

from __future__ import annotations

import copy
import logging
import os
import re
import time
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, final

import torch

from penstock._errors import ANEW, ClosedError, SampleError, WorkerDied, is_own_error
from penstock._memory.allocation import afresh, anywhere
from penstock._memory.parcel import BYTES, pickled, value_of
from penstock._workers.lifetime import when_abandoned
from penstock._workers.meter import Histogram, now
from penstock._workers.pool import IDLE, Job, named
from penstock._workers.processes.protocol import VALUE, Setup
from penstock._workers.processes.remote_error import RemoteError
from penstock._workers.processes.task_table import PendingTask, TaskTable
from penstock._workers.ray_actors import Actor, Actors, Request, end, kill
from penstock._workers.ray_worker import NO_TASK, by_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock._memory.allocation import Allocate
    from penstock._statistics import Durations, WorkerStatistics
    from penstock._workers.ray_worker import Answer

_logger = logging.getLogger("penstock")

_NO_ROW: Final = IDLE - 1
_LOOK_S: Final = 5.0
"""How long to wait before checking again, because after ``ray.shutdown`` by another thread no answer comes."""
_SHORT_NS: Final = 2_000_000
"""Work per call: short tasks share a call, because a call costs the consumer about half a millisecond."""


@final
class RayPool:
    """`Pool` of actors.

    Args:
        setup: What each actor receives, pickled by Ray's cloudpickle, which includes classes of ``__main__`` and
            lambdas.
        num_workers: Actors at first.
        queue_size: Tasks that an actor may hold, including the one in progress.
        max_restarts: Actors that may be replaced over the life of the pool, in total.
        ray_options: For ``ray.remote(…).options(…)``: what an actor needs (default: ``{"num_cpus": 1}``),
            ``runtime_env``, ``scheduling_strategy``, …
        allocate: Memory for results. Called in the consumer's thread.
    """

    def __init__(
        self,
        setup: Setup,
        num_workers: int,
        *,
        queue_size: int = 2,
        max_restarts: int = 8,
        ray_options: Mapping[str, Any] | None = None,
        allocate: Allocate = anywhere,
    ) -> None:
        self.size = num_workers
        self._work = setup.work
        self._actors = Actors(setup, ray_options or {})
        self._queue_size, self._max_restarts = queue_size, max_restarts
        self._allocate = allocate
        self._tasks = TaskTable()
        self._unpacked = Histogram()
        self._task_ns = _SHORT_NS  # what a task takes, lately
        self._owner = os.getpid()
        self._restarts = 0
        self._started = self._interrupted = self._closed = False

    def start(self) -> None:
        """Start the workers, without waiting for them. Idempotent.

        Raises:
            ImportError: Ray is not installed.
            TypeError: ``work`` cannot be pickled.
            ClosedError: After `shutdown`, or in a fork of the process that made the pool.
        """
        self._check_usable()
        if not self._started:
            self._owner = os.getpid()
            self._actors.connect()
            when_abandoned(self, partial(end, self._actors.by_worker)).atexit = False  # then Ray ends them
            self._started = True
        self._actors.start(self.size)

    def submit(self, task: Any, to: int | None = None) -> Job:
        """Queue a task, for worker ``to`` or for any worker.

        Never waits for a worker. Errors from pickling ``task`` propagate.
        """
        self._check_usable()
        job, body = Job(task), pickled(task)
        if b"__main__" in body:
            body = by_value(task)  # the program's own classes, which an actor cannot import
        self._tasks.add(job, body, to)
        self._take_events()
        # so that a loop that never waits is also warned about missing workers
        self._actors.check_places(may_raise=False)
        return job

    def wait(self, jobs: Sequence[Job], timeout: float | None) -> None:
        """See `Pool.wait`. The actor that holds a job for too long is ended and replaced, which counts as a restart.

        Raises:
            TimeoutError: ``timeout`` seconds have passed, and no worker has begun any of them; or no actor has found a
                place. They stay in flight.
            ClosedError: After `interrupt` (until `discard`), after `shutdown`, or in a fork.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_usable()
            if self._interrupted:
                raise ClosedError("the loader was closed, or moved to another position, while it waited for a batch.")
            self._take_events()
            if any(job.done for job in jobs):
                return
            patience = self._actors.check_places(may_raise=True)
            if deadline is not None:
                if not any(actor.where for actor in self._actors):
                    deadline = time.monotonic() + (timeout or 0.0)  # placement has its own deadline
                left = deadline - time.monotonic()
                if left <= 0:
                    self._on_timeout(jobs, timeout)
                    return
                patience = left if patience is None else min(left, patience)
            self._actors.came.bell.wait(_LOOK_S if patience is None else min(patience, _LOOK_S))

    def discard(self) -> None:
        """Clear any interrupt, and drop every job that is not done."""
        self._check_usable()
        self._interrupted = False
        self._tasks.discard(partial(ClosedError, "this was discarded after a jump."))
        if self._started:
            # Actors finish the tasks they have: after `ray.cancel` of a queued call, Ray 2.60 makes the actor wait 30 s
            # for it, and then drops it.
            self._actors.restore(self.size)

    def interrupt(self) -> None:
        """See `Pool.interrupt`."""
        self._interrupted = True
        self._actors.came.bell.ring()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the actors, without waiting for them; Ray does that. Idempotent."""
        self.interrupt()
        if self._closed or os.getpid() != self._owner:
            return
        self._actors.end()
        self._tasks.fail(partial(ClosedError, "the loader was closed while this was being loaded."))
        self._closed = True

    @property
    def all_ready(self) -> bool:
        """See `Pool.all_ready`."""
        return all(actor.ready for actor in self._actors if actor.worker < self.size)

    def resize(self, num_workers: int) -> int:
        """See `Pool.resize`."""
        self._check_usable()
        self.size = num_workers
        self._actors.start(num_workers)
        self._dispatch()
        return num_workers

    def bound(self) -> tuple[int, str]:
        """How many workers there is room for, and what bounds that, in words; for ``num_workers="auto"``."""
        return self._actors.room()

    def statistics(self) -> WorkerStatistics:
        """See `Pool.statistics`."""
        from penstock._statistics import WorkerStatistics

        actors = list(self._actors)
        busy = sum(bool(actor.held) for actor in actors)
        return WorkerStatistics(
            "ray",
            workers=sum(actor.ready for actor in actors),
            busy=busy,
            waiting=self._tasks.waiting,
            tasks=self._tasks.finished,
            restarts=self._restarts,
        )

    def unpacked(self) -> Durations:
        """How long it took to copy each result into this process."""
        return self._unpacked.durations()

    def counted(self) -> list[list[int]]:
        """See `Pool.counted`."""
        return [*self._actors.ended, *(list(actor.counted) for actor in self._actors if actor.counted is not None)]

    def _check_usable(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError(
                f"these workers belong to process {self._owner}, and this process is a fork of it. {ANEW}"
            )
        if self._closed:
            raise ClosedError(f"these Ray workers have ended. {ANEW}")
        if self._actors.lost:
            raise ClosedError(f"Ray was shut down or reconnected after this loader had started its workers. {ANEW}")

    # To the actors, and back.

    def _dispatch(self) -> None:
        """Give tasks to their owners, and other tasks to the least loaded actors, while there are both.

        Short tasks share a call, and while an actor has a call, the next one is not made before it is full, because a
        call costs the consumer about half a millisecond regardless of its content.
        """
        tasks = self._tasks
        # Half of the queue at most, so that an actor has the next call when it finishes one.
        several = min(max(1, _SHORT_NS // max(1, self._task_ns)), max(1, self._queue_size // 2))
        while tasks.waiting:
            able = [
                actor
                for actor in self._actors
                if actor.able and actor.worker < self.size and actor.held < self._queue_size
            ]
            able.sort(key=attrgetter("held"))
            found = next((one for one in able if tasks.waiting_for(one.worker) >= (several if one.held else 1)), None)
            if found is not None:
                self._actors.do(found, self._taken(found.worker, several))
            elif able and (n := tasks.waiting_for(None)) >= (several if able[0].held else 1):
                self._actors.do(able[0], self._taken(None, min(several, -(-n // len(able)))))
            else:
                return

    def _taken(self, owner: int | None, most: int) -> list[PendingTask]:
        """The tasks of the next call. A task that has killed an actor goes alone."""
        found: list[PendingTask] = []
        while len(found) < most and (task := self._tasks.take(owner)) is not None:
            if task.fatal_rows and found:
                self._tasks.requeue([task])
                break
            found.append(task)
            if task.fatal_rows:
                break
        return found

    def _take_events(self) -> None:
        """Handle all answers that have come, and dispatch the tasks that can be dispatched now."""
        came = self._actors.came.requests
        while came:
            request = came.popleft()
            actor, answer = request.actor, request.answer
            if request not in actor.requests or self._actors.by_worker.get(actor.worker) is not actor:
                continue  # it came twice, or from an actor that is gone
            lost = isinstance(answer, self._actors.ray.exceptions.RayActorError)
            # An actor's death comes as the answer to each of its requests, in any order and between true answers. It is
            # replaced when all have come, so nothing that it has done is done again.
            if lost:
                actor.death = answer
            elif isinstance(answer, BaseException):
                self._failed(request, answer)
            elif request.kind == "where":
                actor.where, actor.asked = answer, time.monotonic()
            elif request.kind == "tasks":
                self._answered(actor, request.tasks, *answer)
            elif answer is None:
                actor.ready = True
            else:
                self._tasks.fail(partial(self._error, answer, actor.where, "its start"))
            if not lost:  # otherwise `_replace` needs it
                actor.requests.remove(request)
                request.forget()
            if actor.gave_all:
                self._replace(actor)
            del request, answer  # or this frame would keep the object in the store
        for actor in self._actors:
            if actor.worker >= self.size and not actor.requests:
                self._actors.remove(actor)
        self._dispatch()

    def _answered(
        self, actor: Actor, tasks: list[PendingTask], answers: list[Answer], took_ns: int, counted: Any
    ) -> None:
        self._task_ns = (3 * self._task_ns + took_ns // len(tasks)) // 4
        if counted is not None:
            actor.counted = counted.tolist()
        for task, answer in zip(tasks, answers, strict=True):
            if task.job.done:
                continue  # discarded
            try:
                if answer[0] == VALUE:
                    self._tasks.finish(task, value=self._value(answer))
                else:
                    self._tasks.finish(task, error=self._error(answer, actor.where, self._named(task.job)))
            except Exception as error:
                if not is_own_error(error):
                    raise
                self._tasks.finish(task, error=error)

    def _value(self, answer: Answer) -> Any:
        """The value in our own memory, because objects in the object store are read-only, and stay there as long as
        they are viewed.
        """
        began = now()
        _, kind, body, found = answer
        if kind != BYTES and found:
            specs = [((len(one),), torch.uint8) for one in found]
            memory = self._allocate(specs) or afresh(specs)
            for to, one in zip(memory, found, strict=True):
                to.numpy()[:] = one
            found = [one.numpy() for one in memory]
        value = value_of(kind, body, found)
        self._unpacked.add(now() - began)
        return value

    def _error(self, answer: Answer, where: str, what: str) -> BaseException:
        _, kind, body, found = answer
        return RemoteError(*value_of(kind, body, found)).rebuilt(where, what)

    # Deaths.

    def _failed(self, request: Request, error: BaseException) -> None:
        """``request`` brought no answer, although its actor may be fine."""
        errors = self._actors.ray.exceptions
        if isinstance(error, errors.RayTaskError):
            error = error.as_instanceof_cause()
        if isinstance(error, errors.ObjectLostError) and request.tasks:  # with the node that had it
            self._tasks.requeue(request.tasks)
        else:
            self._tasks.fail(partial(copy.copy, error))

    def _replace(self, actor: Actor) -> None:
        needed, how, calls = actor.worker < self.size, _cause(actor.death), actor.calls
        self._actors.remove(actor)  # first: whatever comes from it now is too late
        # The answer to the first call may have been lost with the actor, so it may have been working on the second.
        suspects = [task for call in calls[:2] for task in call.tasks if not task.job.done]
        number, row, may_accuse = NO_TASK, IDLE, False
        if any(task.fatal_rows for task in suspects) and (noted := self._actors.at(actor)) is not None:
            (number, row), may_accuse = noted, True
            # the others had not begun
            suspects = [task for task in suspects if not task.fatal_rows or task.number == number]
        blamed = next((task for task in suspects if task.number == number), None)
        if blamed is None:
            blamed, row = suspects[0] if len(suspects) == 1 else None, IDLE
        doing = (
            f" while loading {self._named(blamed.job, row)}" if blamed else "" if actor.ready else " while it started"
        )
        where = actor.where or f"Ray worker {actor.worker}"
        what = f"{where} {actor.stuck}" if actor.stuck else f"{where} died{doing}: {how}"
        why = ""
        if needed and not actor.where and "import" in how:
            why = (
                "A replacement would fail, too: install the missing module there, or send it with "
                "ray.init(runtime_env=…)."
            )
        elif needed and self._restarts >= self._max_restarts:
            why = f"Workers were replaced {self._restarts} times, and max_restarts={self._max_restarts} allows no more."
        if why:
            self._tasks.fail(partial(WorkerDied, f"{what} {why}"))
            return
        if needed:
            self._restarts += 1
            _logger.warning(
                "%s It is replaced, and its unfinished work is done again (%d of %d).",
                what,
                self._restarts,
                self._max_restarts,
            )
        unreachable = isinstance(actor.death, self._actors.ray.exceptions.ActorUnavailableError) or how.startswith(
            "its node"
        )
        if not actor.stuck and not unreachable:  # otherwise it was not this task
            for task in suspects:  # which row it was is known from the second death on
                if self._tasks.blame(task, row if task is blamed else IDLE) and task is blamed and may_accuse:
                    name = self._named(task.job, row)
                    self._tasks.finish(
                        task, error=SampleError(f"{name} has killed two workers; the last of them: {how}")
                    )
        self._tasks.requeue(task for call in calls for task in call.tasks)
        self._actors.start(self.size)

    def _on_timeout(self, jobs: Sequence[Job], timeout: float | None) -> None:
        """End the actor that one of ``jobs`` has been waiting for.

        The job fails if the actor had certainly begun it. Otherwise its tasks go alone from now on.
        """
        held = [
            (actor, call, task)
            for actor in self._actors
            for call in actor.calls
            for task in call.tasks
            if task.job in jobs
        ]
        if not held:
            starting = [actor for actor in self._actors if not actor.ready]
            why = f"; {len(starting)} have not finished their start" if starting else ""
            raise TimeoutError(f"waited {timeout} s for {self._named(jobs[0])}, which no Ray worker has begun{why}.")
        actor, call, task = next((one for one in held if one[1] is one[0].calls[0]), held[0])
        first = call is actor.calls[0]
        begun = first and len(call.tasks) == 1
        behind = "" if begun else ", where it may not have begun" if first else ", where it has not begun"
        late = TimeoutError(
            f"waited {timeout} s for {self._named(task.job)}, in {actor.where}{behind}. That worker is ended and "
            f"replaced."
        )
        for one in call.tasks if first else ():
            one.fatal_rows.add(_NO_ROW)  # it has killed no actor, but is watched from now on
        actor.stuck = f"did not answer in time (timeout={timeout}) and was ended."
        kill(actor)  # its death brings back what else it held
        if not begun:
            raise late
        self._tasks.finish(task, error=late)

    def _named(self, job: Job, row: int = IDLE) -> str:
        return named(self._work, job.task, row)


def _cause(error: BaseException | None) -> str:
    """Ray's reason for a death, in one line."""
    said = " ".join(str(error).split())
    found = re.search(r"The actor (?:is dead|died) because (.*?)(?: Some common causes|$)", said)
    return found[1] if found else said
