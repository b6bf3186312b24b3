"""Workers on other machines: actors of Ray, behind the same `Pool` as threads and processes.

A task is a pure function of its address, so it may be done anywhere, and again after a death. Ray places the actors, carries tasks and results, and
reports deaths; what is whose turn, what is done again, and when to give up is ours (Ray's own restarts and retries stay off).

::

    submit ──► TaskTable ──a call of several tasks──► RayWorker, in an actor ──one object──► value, in memory of the consumer's `Allocate`

Who touches what. The consumer thread: everything. Ray's own threads: they append to `_Came.events` and ring its bell when an answer has come to this
machine. Any thread: `interrupt` and `statistics`.

A `KeyboardInterrupt` at any line leaves tasks that nobody does. The loader then resets its graph, and `discard` forgets them; an actor of which no handle
was kept is ended by Ray.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import re
import time
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import torch

from penstock._errors import ClosedError, SampleError, WorkerDied
from penstock._memory.allocation import afresh
from penstock._memory.parcel import BYTES, value_of
from penstock._workers.bell import Bell
from penstock._workers.meter import Histogram, Meter, now
from penstock._workers.pool import IDLE, Job, Work
from penstock._workers.processes.protocol import VALUE, Setup
from penstock._workers.processes.remote_error import RemoteError
from penstock._workers.processes.task_table import PendingTask, TaskTable
from penstock._workers.ray_worker import NO_TASK, NOTED_WITHIN_S, RayNotes, RayWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np

    from penstock._memory.allocation import Allocate
    from penstock._statistics import Durations, WorkerStatistics
    from penstock._workers.ray_worker import Answer

_logger = logging.getLogger("penstock")

PLACED_WITHIN_S: Final = 60.0
"""Default of how long Ray may take to find a place for an actor."""
_SHORT_NS: Final = 2_000_000
"""Tasks go several to a call, for so much work: a call costs the consumer about half a millisecond."""


def ray() -> Any:
    """Ray, connected: to the cluster that the program uses already, or as ``ray.init()`` finds or starts one.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import ray as found
    except ImportError:
        raise ImportError('method="ray" needs Ray: pip install "torch-penstock[ray]"') from None
    if not found.is_initialized():
        found.init()
    return found


@final
class _Came:
    """What has come from the actors and nobody has looked at. It knows nothing of the pool, so that an abandoned one is collected."""

    def __init__(self) -> None:
        self.events: deque[tuple[_Actor, _Call | str, Any]] = deque()
        self.bell = Bell()
        self.closed = False  # what comes now is dropped, or it would stay in the object store

    def ask(self, actor: _Actor, what: _Call | str, ref: Any) -> None:
        """Have an event once the object of ``ref`` is on this machine. Those of one actor come in any order."""
        ref.future().add_done_callback(partial(self._add, actor, what))

    def _add(self, actor: _Actor, what: _Call | str, future: Any) -> None:
        if not self.closed:
            self.events.append((actor, what, future))
        self.bell.ring()


@final
class _Call:
    """Some tasks on their way to an actor and back."""

    __slots__ = ("ref", "tasks")

    def __init__(self, tasks: list[PendingTask], ref: Any) -> None:
        self.tasks, self.ref = tasks, ref


@final
class _Actor:
    """The consumer's side of one actor.

    Attributes:
        worker: Its number. A replacement has that of the one before it.
        handle: Ray's; Ray ends an actor of which nobody has one.
        calls: Those that were not answered, in their order; it does them in this order.
        where: It in words, once it has a place.
        death: What Ray says of its end.
        lost: Calls that nobody will answer.
        ready: It has all that it needs, and waits for tasks.
        asked: When a place was asked for, or found.
        counted: What its meter had counted when it last said so.
    """

    __slots__ = ("asked", "calls", "counted", "death", "gone", "handle", "lost", "ready", "stuck", "where", "worker")

    def __init__(self, worker: int, handle: Any) -> None:
        self.worker, self.handle = worker, handle
        self.calls: list[_Call] = []
        self.where, self.stuck = "", ""
        self.ready = self.gone = False
        self.asked = time.monotonic()
        self.counted: list[int] | None = None
        self.death: BaseException | None = None
        self.lost = 0

    @property
    def held(self) -> int:
        """Tasks that it has not answered."""
        return sum(len(call.tasks) for call in self.calls)


@final
class RayPool:
    """`Pool` of ``num_workers`` actors that do ``work``.

    Args:
        work: Each actor gets it once, pickled by Ray's cloudpickle, which takes classes of ``__main__`` and lambdas along.
        num_workers: At least 1.
        most: How far `resize` may go, and how many the workers are told that there are; None: ``num_workers``.
        queue_size: Tasks that an actor may hold, including the one in progress.
        max_restarts: Actors that may be replaced over the life of the pool, in total.
        ray_options: For ``ray.remote(…).options(…)``: what an actor needs (default: ``{"num_cpus": 1}``), ``runtime_env``, ``scheduling_strategy``, …
        allocate: Memory for results. Called in the consumer's thread.
        worker_init_fn: Called with the worker's number as each worker starts, after seeding.
        seed: Together with its number, seeds a worker's own generators.
        placed_within_s: How long Ray may take to find a place for an actor while none works; default: `PLACED_WITHIN_S`.
    """

    def __init__(
        self,
        work: Work,
        num_workers: int,
        *,
        most: int | None = None,
        queue_size: int = 2,
        max_restarts: int = 8,
        ray_options: Mapping[str, Any] | None = None,
        allocate: Allocate = afresh,
        worker_init_fn: Callable[[int], None] | None = None,
        seed: int = 0,
        placed_within_s: float | None = None,
    ) -> None:
        self._setup = Setup(work, most or num_workers, seed, worker_init_fn, "penstock-map")
        self._options = {"num_cpus": 1, **(ray_options or {}), "max_restarts": 0, "max_task_retries": 0}
        self.size = num_workers
        self._queue_size, self._max_restarts, self._placed_within_s = queue_size, max_restarts, placed_within_s or PLACED_WITHIN_S
        self._allocate = allocate
        self._tasks = TaskTable()
        self._actors: dict[int, _Actor] = {}  # by worker; emptied in place, because the finalizer has it
        self._ended: list[list[int]] = []  # what the meters of workers that have ended had counted
        self._came = _Came()
        self._unpacked = Histogram()
        self._task_ns = _SHORT_NS  # what a task takes, lately
        self._owner = os.getpid()
        self._ray: Any = None
        self._sent: Any = None  # a reference to the setup, in the object store
        self._notes: Any = None
        self._restarts = 0
        self._warned = self._interrupted = self._closed = False

    def start(self) -> None:
        """Start the workers. Waits for none. Idempotent.

        Raises:
            ImportError: Ray is not installed.
            TypeError: ``work`` cannot be pickled.
            ClosedError: After `shutdown`, or in a fork of the process that made the pool.
        """
        self._check_usable()
        if self._sent is not None:
            return
        self._ray = ray()
        self._owner = os.getpid()
        self._server = self._ray.remote(RayWorker)
        self._sent = self._ray.put(self._ray.cloudpickle.dumps(self._setup))
        weakref.finalize(self, _end, self._actors, os.getpid())
        for worker in range(self.size):
            self._launch(worker)

    def submit(self, task: Any, to: int | None = None) -> Job:
        """Queue a task, for worker ``to`` or for anybody. Never waits for a worker. Errors from pickling ``task`` propagate."""
        self._check_usable()
        job, body = Job(task), pickle.dumps(task, 5)
        if b"__main__" in body:
            body = self._ray.cloudpickle.dumps(task)  # the program's own classes, which an actor cannot import
        self._tasks.add(job, body, to)
        self._take_events()
        if self._tasks.finished:  # a loop that never waits is told, too, how many work for it
            self._check_places()
        return job

    def wait(self, jobs: Iterable[Job], timeout: float | None) -> None:
        """See `Pool.wait`. The actor that holds a job for too long is ended and replaced, which counts as a restart.

        Raises:
            TimeoutError: ``timeout`` seconds have passed, and no worker has begun any of them; or no actor has found a place. They stay in flight.
            ClosedError: After `interrupt` (until `discard`), after `shutdown`, or in a fork.
        """
        jobs = list(jobs)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_usable()
            if self._interrupted:
                raise ClosedError("the loader was closed, or moved to another position, while it waited for a batch.")
            self._take_events()
            if any(job.done for job in jobs):
                return
            patience = self._check_places()
            if deadline is not None:
                if not any(actor.ready for actor in self._actors.values()):
                    deadline = time.monotonic() + (timeout or 0.0)  # a start has a deadline of its own
                left = deadline - time.monotonic()
                if left <= 0:
                    self._on_timeout(jobs, timeout)
                    return
                patience = left if patience is None else min(left, patience)
            self._came.bell.wait(patience)

    def discard(self) -> None:
        """Forget any interrupt, and every job that is not done."""
        self._check_usable()
        self._interrupted = False
        self._tasks.discard(partial(ClosedError, "this was discarded after a jump."))
        for actor in self._actors.values():
            for call in actor.calls[1:]:  # those that it has not begun
                self._ray.cancel(call.ref)

    def interrupt(self) -> None:
        """See `Pool.interrupt`."""
        self._interrupted = True
        self._came.bell.ring()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the actors. Idempotent. Waits for none of them: Ray does that."""
        self.interrupt()
        if self._closed or os.getpid() != self._owner:
            return
        for actor in list(self._actors.values()):
            self._note_counted(actor)
        _end(self._actors, self._owner)
        with contextlib.suppress(Exception):  # Ray is not there any more
            if self._notes is not None:
                self._ray.kill(self._notes)
        self._tasks.fail(partial(ClosedError, "the loader was closed while this was being loaded."))
        self._came.closed = True  # before the next line
        self._came.events.clear()
        self._sent = self._notes = None
        self._closed = True

    @property
    def all_ready(self) -> bool:
        """See `Pool.all_ready`."""
        return all(actor.ready for actor in list(self._actors.values()) if actor.worker < self.size)

    def resize(self, num_workers: int) -> int:
        """See `Pool.resize`."""
        self._check_usable()
        self.size = num_workers
        for worker in range(num_workers):
            if worker not in self._actors:
                self._launch(worker)
        self._dispatch()
        return num_workers

    def bound(self) -> tuple[int, str]:
        """How many workers the cluster has room for, and what bounds that, in words; for ``num_workers="auto"``."""
        free, needed = self._ray.available_resources(), _resources(self._options)
        more = min((int(free.get(name, 0) // amount) for name, amount in needed.items() if amount), default=self._setup.num_workers)
        return len(self._actors) + more, f"the cluster's free {', '.join(needed)}"

    def statistics(self) -> WorkerStatistics:
        """See `Pool.statistics`."""
        from penstock._statistics import WorkerStatistics

        actors = list(self._actors.values())
        busy = sum(bool(actor.calls) for actor in actors)
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
        return [*self._ended, *(list(actor.counted) for actor in list(self._actors.values()) if actor.counted is not None)]

    # Actors.

    def _check_usable(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError(f"these workers belong to process {self._owner}, of which this one is a fork. Build a new loader here.")
        if self._closed:
            raise ClosedError("these Ray workers have ended; build a new loader.")

    def _launch(self, worker: int) -> None:
        actor = _Actor(worker, self._server.options(**self._options).remote(worker))
        self._actors[worker] = actor
        self._came.ask(actor, "where", actor.handle.where.remote())
        self._came.ask(actor, "ready", actor.handle.prepare.remote(self._sent))

    def _check_places(self) -> float | None:
        """See that Ray starts the actors. Returns how long to wait before the next look; None: forever.

        Raises:
            TimeoutError: It takes too long, and no actor works.
        """
        without = [actor for actor in self._actors.values() if not actor.where]
        if not without or self._warned:
            return None
        left = max(actor.asked for actor in self._actors.values()) + self._placed_within_s - time.monotonic()
        if left > 0:
            return left
        said = (
            f"In the last {self._placed_within_s:g} s Ray has started none of {len(without)} of {len(self._actors)} workers. Each needs "
            f"{_in_words(_resources(self._options))}. Free now: {_in_words(self._ray.available_resources())}."
        )
        if len(without) < len(self._actors):
            self._warned = True
            _logger.warning("%s The others go on.", said)
            return None
        for actor in without:
            actor.asked = time.monotonic()  # another call waits as long again
        raise TimeoutError(f"{said} Start more nodes, or ask for less: num_workers, ray_options.")

    def _dispatch(self) -> None:
        """Hand tasks to their owners, and the others to the least loaded actors, as long as both are there.

        Short tasks go several to a call, and while an actor has a call, another one is not made before it is full: a call costs the consumer about half
        a millisecond, whatever is in it.
        """
        tasks = self._tasks
        several = min(max(1, _SHORT_NS // max(1, self._task_ns)), max(1, self._queue_size // 2))
        while tasks.waiting:
            able = [
                actor
                for actor in self._actors.values()
                if actor.ready and not actor.stuck and actor.death is None and actor.worker < self.size
            ]
            able = sorted((actor for actor in able if actor.held < self._queue_size), key=_held)
            found = next((one for one in able if tasks.waiting_for(one.worker) >= (several if one.calls else 1)), None)
            if found is not None:
                self._call(found, self._taken(found.worker, several))
            elif able and (n := tasks.waiting_for(None)) >= (several if able[0].calls else 1):
                self._call(able[0], self._taken(None, min(several, -(-n // len(able)))))
            else:
                return

    def _taken(self, owner: int | None, most: int) -> list[PendingTask]:
        """The tasks of the next call. What has ended an actor goes alone."""
        found: list[PendingTask] = []
        while len(found) < most and (task := self._tasks.take(owner)) is not None:
            if task.fatal_rows and found:
                self._tasks.requeue([task])
                break
            found.append(task)
            if task.fatal_rows:
                break
        return found

    def _call(self, actor: _Actor, tasks: list[PendingTask]) -> None:
        watched = bool(tasks[0].fatal_rows)
        if watched and self._notes is None:
            here = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                self._ray.get_runtime_context().get_node_id(), soft=True
            )
            self._notes = self._ray.remote(RayNotes).options(num_cpus=0, scheduling_strategy=here).remote()
        ref = actor.handle.run.remote([task.body for task in tasks], (self._notes, tasks[0].number) if watched else None)
        call = _Call(tasks, ref)
        actor.calls.append(call)
        for task in tasks:
            task.job.worker = actor.worker
        self._came.ask(actor, call, ref)

    # What has come.

    def _take_events(self) -> None:
        events = self._came.events
        while events:
            actor, what, future = events.popleft()
            if actor.gone:
                continue
            error = future.exception()
            if error is not None:
                self._failed(actor, what, error)
            elif isinstance(what, _Call):
                actor.calls.remove(what)
                self._answered(actor, what.tasks, *future.result())
            elif what == "where":
                actor.where, actor.asked = future.result(), time.monotonic()
            else:
                self._ready(actor, future.result())
            if actor.death is not None and actor.lost == len(actor.calls):  # the answers that it had given have come
                self._replace(actor, actor.death)
            del future  # or this frame would keep the object in the store
        for actor in list(self._actors.values()):
            if actor.worker >= self.size and not actor.calls:
                self._remove(actor)
        self._dispatch()

    def _ready(self, actor: _Actor, refused: Answer | None) -> None:
        if refused is None:
            actor.ready = True
        else:
            self._tasks.fail(partial(self._error, refused, actor.where, "its start"))

    def _answered(self, actor: _Actor, tasks: list[PendingTask], answers: list[Answer], took_ns: int, counted: np.ndarray | None) -> None:
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
                self._tasks.finish(task, error=error)

    def _value(self, answer: Answer) -> Any:
        """The value in memory of ours: what comes from the object store is read-only, and stays there for as long as anybody looks at it."""
        began = now()
        _, kind, body, found = answer
        if kind != BYTES and found:
            memory = self._allocate([((len(one),), torch.uint8) for one in found])
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

    def _failed(self, actor: _Actor, what: _Call | str, error: BaseException) -> None:
        """A call has brought no answer."""
        errors = self._ray.exceptions
        if isinstance(error, errors.RayActorError):
            actor.death = error
            actor.lost += isinstance(what, _Call)
            return
        if isinstance(what, _Call):
            actor.calls.remove(what)
            if isinstance(error, errors.ObjectLostError):  # with the node that had it; the actor may be well
                self._tasks.requeue(what.tasks)
                return
        if not isinstance(error, errors.TaskCancelledError):  # that is of `discard`
            self._tasks.fail(partial(_again, error))

    def _replace(self, actor: _Actor, error: BaseException) -> None:
        self._remove(actor)
        needed, how = actor.worker < self.size, _cause(error)
        # Of the first call the answer may have been lost with it, so it may have been at the second.
        suspects = [task for call in actor.calls[:2] for task in call.tasks if not task.job.done]
        number, row = self._at(actor.worker) if any(task.fatal_rows for task in suspects) else (NO_TASK, IDLE)
        blamed = next((task for task in suspects if task.number == number), suspects[0] if len(suspects) == 1 else None)
        doing = f"while loading {self._named(blamed.job, row)}" if blamed else "" if actor.ready else "while it started"
        where = actor.where or f"Ray worker {actor.worker}"
        what = f"{where} {actor.stuck}" if actor.stuck else f"{where} died {doing}: {how}".replace("  ", " ").replace(" :", ":")
        if needed and (self._restarts >= self._max_restarts or (not actor.where and "import" in how)):
            why = f"Workers were replaced {self._restarts} times, and max_restarts={self._max_restarts} allows no more."
            self._tasks.fail(partial(WorkerDied, f"{what} {why}"))
            return
        if needed:
            self._restarts += 1
            _logger.warning(
                "%s It is replaced, and what it had not finished is done again (%d of %d).", what, self._restarts, self._max_restarts
            )
        if not actor.stuck and not how.startswith("its node"):  # otherwise it was not this task
            for task in suspects:
                if self._tasks.blame(task, 0) and task is blamed:
                    name = self._named(task.job, row)
                    self._tasks.finish(task, error=SampleError(f"{name} has killed two workers; the last of them: {how}"))
        self._tasks.requeue(task for call in actor.calls for task in call.tasks)
        if needed:
            self._launch(actor.worker)

    def _at(self, worker: int) -> tuple[int, int]:
        """The number of the task, and its row, that a worker was at that had to say so."""
        try:
            found: tuple[int, int] = self._ray.get(self._notes.at.remote(worker), timeout=NOTED_WITHIN_S)
        except Exception:  # it has died, too
            return NO_TASK, IDLE
        return found

    def _remove(self, actor: _Actor) -> None:
        self._note_counted(actor)
        actor.gone = True
        del self._actors[actor.worker]
        _kill(actor.handle)

    def _note_counted(self, actor: _Actor) -> None:
        if actor.counted is not None:
            actor.counted[Meter.SINCE] = 0  # it is in no task
            self._ended.append(actor.counted)

    def _on_timeout(self, jobs: list[Job], timeout: float | None) -> None:
        """End the actor that one of ``jobs`` has been waiting for. The job fails if the actor was at it."""
        held = [(a, call, task) for a in self._actors.values() for call in a.calls for task in call.tasks if task.job in jobs]
        if not held:
            starting = [a for a in self._actors.values() if not a.ready]
            why = f"; {len(starting)} of {len(self._actors)} have not finished their start" if starting else ""
            raise TimeoutError(f"waited {timeout} s for {self._named(jobs[0])}, which no Ray worker has begun{why}.")
        actor, call, task = next((one for one in held if one[1] is one[0].calls[0]), held[0])
        begun = call is actor.calls[0]
        behind = "" if begun else ", where it has not begun"
        late = TimeoutError(f"waited {timeout} s for {self._named(task.job)}, in {actor.where}{behind}. That worker is ended and replaced.")
        actor.stuck = f"did not answer in time (timeout={timeout}) and was ended."
        _kill(actor.handle)  # its death brings back what else it held
        if not begun:
            raise late
        self._tasks.finish(task, error=late)

    def _named(self, job: Job, row: int = IDLE) -> str:
        try:
            return self._setup.work.name(job.task, row)
        except Exception:  # a name that cannot be made must not hide what happened
            return f"a task that cannot be named, row {row}"


def _held(actor: _Actor) -> int:
    return actor.held


def _resources(options: Mapping[str, Any]) -> dict[str, float]:
    """What an actor needs, by Ray's names of resources."""
    own = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    return {own[key]: options[key] for key in own if options.get(key)} | dict(options.get("resources") or {})


def _in_words(resources: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if not name.startswith(("node:", "object_store"))) or "nothing"
    )


def _cause(error: BaseException) -> str:
    """What Ray says of a death, in one line."""
    said = " ".join(str(error).split())
    found = re.search(r"The actor (?:is dead|died) because (.*?)(?: Some common causes|$)", said)
    return found[1] if found else said


def _again(error: BaseException) -> BaseException:
    """An error of one's own for everyone who waits."""
    return copy.copy(error)


def _kill(handle: Any) -> None:
    import ray

    with contextlib.suppress(Exception):  # it has died, or Ray has
        ray.kill(handle)


def _end(actors: dict[int, _Actor], owner: int) -> None:
    """End all of them; a forked child has none."""
    if os.getpid() == owner:
        for actor in list(actors.values()):
            actor.gone = True
            _kill(actor.handle)
        actors.clear()
