"""The actors of a `RayPool`: starts and ends them, sends requests, and collects answers.

Each request to an actor is recorded, and removed once its answer was handled. An exception may come at any line
(Ctrl-C), and lose an answer just taken from `Actors.came`, or a worker that was being started. All of that can be
recovered: see `Actors.restore`.

The consumer never uses Ray's futures (``ObjectRef.future``), because their lock is a ``threading.Condition``; see
`bell`. If an exception left one locked, the thread by which Ray delivers answers would wait for it forever. That thread
calls `Came.add` instead.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, final

from penstock._workers.bell import Bell
from penstock._workers.meter import Meter
from penstock._workers.ray_worker import NOTED_WITHIN_S, RayNotes, RayWorker, by_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock._workers.processes.protocol import Setup
    from penstock._workers.processes.task_table import PendingTask

_logger = logging.getLogger("penstock")

PLACED_WITHIN_S: Final = 60.0
"""How long Ray may take to start a worker."""


def connected() -> Any:
    """Ray, connected to the program's current cluster, or to the one that ``ray.init()`` finds or starts.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import ray
    except ImportError:
        raise ImportError('method="ray" needs Ray: pip install ray') from None
    if not ray.is_initialized():
        ray.init()
    return ray


@final
class Request:
    """A request to an actor: to say where it is, to get ready, or to run ``tasks``.

    Once answered, it has the value in ``answer``, or Ray's error.
    """

    __slots__ = ("actor", "answer", "kind", "ref", "tasks")

    def __init__(
        self, actor: Actor, kind: Literal["where", "ready", "tasks"], ref: Any, tasks: list[PendingTask]
    ) -> None:
        self.actor, self.kind, self.ref, self.tasks = actor, kind, ref, tasks
        self.answer: Any = None

    def forget(self) -> None:
        """Drop the answer, which would stay in the object store as long as anything refers to this request."""
        self.answer = self.ref = None


@final
class Actor:
    """The consumer's side of one actor.

    Attributes:
        worker: Its number, which a replacement inherits.
        life: A number unique among the actors of the pool.
        handle: Ray's handle; Ray ends an actor without one.
        requests: Its unanswered requests, in the order in which it handles them.
        where: A description of it, once it has a place.
        ready: It is set up, and waits for tasks.
        stuck: Why we ended it.
        death: Ray's error for its end.
        asked: When a place was requested, or found.
        counted: The counts of its meter, as last reported.
    """

    __slots__ = ("asked", "counted", "death", "handle", "life", "ready", "requests", "stuck", "where", "worker")

    def __init__(self, worker: int, life: int, handle: Any) -> None:
        self.worker, self.life, self.handle = worker, life, handle
        self.requests: list[Request] = []
        self.where, self.stuck, self.ready = "", "", False
        self.death: BaseException | None = None
        self.asked = time.monotonic()
        self.counted: list[int] | None = None

    @property
    def calls(self) -> list[Request]:
        """Those of its requests that have tasks."""
        return [request for request in self.requests if request.tasks]

    @property
    def held(self) -> int:
        """Tasks that it has not answered."""
        return sum(len(request.tasks) for request in self.requests)

    @property
    def able(self) -> bool:
        """Whether it may be given tasks."""
        return self.ready and not self.stuck and self.death is None

    @property
    def gave_all(self) -> bool:
        """Whether it is dead, and all its answers have been handled."""
        return self.death is not None and all(isinstance(request.answer, BaseException) for request in self.requests)


@final
class Came:
    """Unhandled answers; those of one actor are in any order.

    Ray's threads add to it. It does not refer to the pool, so an abandoned pool is collected.
    """

    def __init__(self) -> None:
        self.requests: deque[Request] = deque()
        self.bell = Bell()

    def add(self, request: Request, _ref: Any, answer: Any) -> None:
        """It was answered. Until then, Ray's callback holds the reference."""
        # In a thread of Ray's, while the consumer may be anywhere. Each step is a single call in C, and the answer is
        # there before its request.
        request.answer = answer
        self.requests.append(request)
        self.bell.ring()

    def close(self) -> None:
        """Drop present and future answers, which would stay in the object store."""
        self.requests = deque(maxlen=0)


@final
class Actors:
    """All actors of a pool.

    Args:
        setup: Sent to every worker.
        options: Ray's options for each worker.

    Attributes:
        ray: The module, connected; None before `start`.
        came: Their answers.
        by_worker: The live actors; only changed in place, because a finalizer refers to it.
        ended: The counts of workers that have ended.
        placed_within_s: How long Ray may take to start one.
    """

    def __init__(self, setup: Setup, options: Mapping[str, Any]) -> None:
        self.ray: Any = None
        self.came = Came()
        self.by_worker: dict[int, Actor] = {}
        self.ended: list[list[int]] = []
        self.placed_within_s = PLACED_WITHIN_S
        self._setup = setup
        self._options = {"num_cpus": 1, **options, "max_restarts": 0, "max_task_retries": 0}
        self._class: Any = None
        self._connection = "", ""
        self._sent: Any = None  # a reference to the setup, in the object store
        self._notes: Any = None
        self._lives = itertools.count()
        self._warned = False

    def __iter__(self) -> Any:
        return iter(list(self.by_worker.values()))

    def connect(self) -> None:
        """Connect to Ray, and send the setup for every worker.

        Raises:
            ImportError: Ray is not installed.
            TypeError: The setup cannot be pickled.
        """
        ray = connected()
        self._connection = self._connected_to(ray)
        self.ray = ray  # last: before `_connection` is set, `lost` would take the connection for another one
        try:
            setup = by_value(self._setup)
        except Exception as error:
            error.add_note(
                "while packing the dataset, transform=, collate_fn= and worker_init_fn= for Ray workers, which get "
                "copies of them"
            )
            raise
        self._class = self.ray.remote(RayWorker)
        self._sent = self.ray.put(setup)

    @staticmethod
    def _connected_to(ray: Any) -> tuple[str, str]:
        """A job's number is unique on its cluster only."""
        context = ray.get_runtime_context()
        return context.get_job_id(), context.get_node_id()

    @property
    def lost(self) -> bool:
        """Whether the program has closed its connection since.

        A request to Ray would then start a cluster, and earlier requests are never answered.
        """
        return self.ray is not None and (
            not self.ray.is_initialized() or self._connection != self._connected_to(self.ray)
        )

    def start(self, workers: int) -> None:
        """Make sure that there are workers of all numbers below ``workers``, without waiting for them."""
        for worker in range(workers):
            if worker not in self.by_worker:  # if an interrupt loses its handle, Ray ends it
                life = next(self._lives)
                self.by_worker[worker] = Actor(worker, life, self._class.options(**self._options).remote(worker, life))
            actor = self.by_worker[worker]
            asked = {request.kind for request in actor.requests}
            if not actor.where and "where" not in asked:
                self._ask(actor, "where", actor.handle.where.remote(), [])
            if not actor.ready and "ready" not in asked:
                self._ask(actor, "ready", actor.handle.prepare.remote(self._sent), [])

    def do(self, actor: Actor, tasks: list[PendingTask]) -> None:
        """Make ``actor`` run ``tasks``. For a task that has killed an actor before, the actor records its progress."""
        watched = bool(tasks[0].fatal_rows)
        if watched and self._notes is None:
            affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            here = affinity(self.ray.get_runtime_context().get_node_id(), soft=True)
            self._notes = self.ray.remote(RayNotes).options(num_cpus=0, scheduling_strategy=here).remote()
        for task in tasks:
            task.job.worker = actor.worker
        ref = actor.handle.run.remote(
            [task.body for task in tasks], (self._notes, tasks[0].number) if watched else None
        )
        self._ask(actor, "tasks", ref, tasks)

    def _ask(self, actor: Actor, kind: Literal["where", "ready", "tasks"], ref: Any, tasks: list[PendingTask]) -> None:
        # Listed before it is awaited: if an interrupt comes in between, `restore` awaits it.
        request = Request(actor, kind, ref, tasks)
        actor.requests.append(request)
        self._await(request)

    def _await(self, request: Request) -> None:
        request.ref._on_completed(partial(self.came.add, request, request.ref))

    def restore(self, workers: int) -> None:
        """After an exception in the middle of anything, deliver all answers once more, and start the missing
        workers.
        """
        # An answer that comes twice does no harm, because a request that was handled is no longer on its actor's list.
        self.start(workers)
        for actor in self:
            for request in actor.requests:
                self._await(request)

    def at(self, actor: Actor) -> tuple[int, int] | None:
        """The number of the task, and its row, that an actor last recorded; None if unknown."""
        if self._notes is None:
            return None
        try:
            found: tuple[int, int] = self.ray.get(self._notes.at.remote(actor.life), timeout=NOTED_WITHIN_S)
        except self.ray.exceptions.RayError:  # the notes have died, too
            return None
        return found

    def check_places(self, *, may_raise: bool) -> float | None:
        """Check that Ray starts the actors. Returns how long to wait before the next check; None: forever.

        Raises:
            TimeoutError: It takes too long, and no actor works.
        """
        actors = list(self.by_worker.values())
        without = [actor for actor in actors if not actor.where]
        none_works = len(without) == len(actors)
        if not without:
            self._warned = False
        if not without or (self._warned and not none_works):
            return None
        left = max(actor.asked for actor in actors) + self.placed_within_s - time.monotonic()
        if left > 0:
            return left
        if none_works and not may_raise:
            return None
        said = (
            f"In the last {self.placed_within_s:g} s Ray has started none of {len(without)} of {len(actors)} workers. "
            f"Each needs {_in_words(self._needed)}. Free now: {_in_words(self.ray.available_resources())}. (If that is "
            f"enough, their processes fail to start: see Ray's logs.)"
        )
        if none_works:
            for actor in without:
                actor.asked = time.monotonic()  # another call waits as long again
            raise TimeoutError(f"{said} Start more nodes, or request less: num_workers, ray_options.")
        self._warned = True
        _logger.warning("%s The others continue.", said)
        return None

    def room(self) -> tuple[int, str]:
        """How many workers the cluster has room for, and what bounds that, in words."""
        free, needed = self.ray.available_resources(), self._needed
        more = min(
            (int(free.get(name, 0) // amount) for name, amount in needed.items()), default=self._setup.num_workers
        )
        return len(self.by_worker) + more, f"the cluster's free {' and '.join(needed) or 'room'}"

    @property
    def _needed(self) -> dict[str, float]:
        """The resources that an actor needs, by Ray's names."""
        own = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        needed = {own[key]: self._options.get(key) for key in own} | dict(self._options.get("resources") or {})
        return {name: amount for name, amount in needed.items() if amount}

    def remove(self, actor: Actor) -> None:
        """End an actor, and forget it."""
        if actor.counted is not None:
            counted, actor.counted = actor.counted, None
            counted[Meter.SINCE] = 0  # it is in no task
            self.ended.append(counted)
        del self.by_worker[actor.worker]
        kill(actor)
        for request in actor.requests:
            request.forget()

    def end(self) -> None:
        """End all actors, and drop our objects in the object store."""
        for actor in self:
            self.remove(actor)
        if self._notes is not None and not self.lost:
            with contextlib.suppress(Exception):
                self.ray.kill(self._notes)
        # Ray would keep what these refer to for as long as the program holds the pool, such as in a variable of a
        # notebook.
        self.came.close()
        self._sent = self._notes = None


def kill(actor: Actor) -> None:
    """End an actor by force. Without a connection, Ray has already ended it, and a call would start another cluster."""
    import ray

    if ray.is_initialized():
        with contextlib.suppress(Exception):  # it has died, or is of another cluster
            ray.kill(actor.handle)


def end(actors: dict[int, Actor]) -> None:
    """End all of them."""
    for actor in list(actors.values()):
        kill(actor)
    actors.clear()


def _in_words(resources: Mapping[str, float]) -> str:
    shown = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "nothing"
