"""The workers of a `ParallelMapper`: the user's settings for them, how many there are, and `open_pool`, the only place
that chooses their pool.

A pool is anything with the methods of `Pool`, and each kind has its file in ``_workers``. To add a kind, write that
file, add its ``method`` to `METHODS`, and add a branch to `open_pool`. No other code compares method names; code that
depends on the method reads its `Kind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

from penstock._arguments import seconds, whole_number
from penstock._memory.tree import nbytes
from penstock._workers.meter import traced
from penstock._workers.pool import check_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock._fetch.task import Task
    from penstock._memory.allocation import Allocate
    from penstock._nodes.auto_workers import AutoWorkers
    from penstock._workers.meter import Totals
    from penstock._workers.pool import Pool, StartMethod


class Kind(NamedTuple):
    """The properties of the workers of a method.

    Attributes:
        in_process: They share this process: its memory, its dataset and its global generators.
        one: The name of one worker.
        many: The name of several.
        ahead: Default for items in progress per worker, if the items are small.
        most: How many ``num_workers="auto"`` may start; None: from the cores of this machine.
    """

    in_process: bool
    one: str
    many: str
    ahead: int = 8
    most: int | None = None


METHODS: Final = {
    "thread": Kind(True, "worker thread", "worker threads"),
    "process": Kind(False, "worker process", "worker processes"),
    "ray": Kind(
        False, "Ray worker", "Ray workers", ahead=32, most=256
    ),  # a call takes half of the items; the cluster limits the number of workers
}


_OURS: Final = {
    *("concurrency_groups", "get_if_exists", "lifetime", "max_concurrency", "max_pending_calls", "max_restarts"),
    *("max_task_retries", "name", "namespace"),
}


@final
@dataclass
class WorkerOptions:
    """The user's settings for the workers of a `ParallelMapper`, which documents them. They are checked here."""

    num_workers: int | Literal["auto"]
    method: Literal["thread", "process", "ray"]
    multiprocessing_context: StartMethod | None
    max_concurrent: int | None
    prefetch_factor: int | None
    timeout: float | None
    worker_init_fn: Callable[[int], None] | None
    pin_memory: bool
    max_restarts: int | None
    ray_options: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        if not self.is_auto:
            self.num_workers = whole_number("num_workers", self.num_workers, 0, remedy='Or pass "auto".')
        self.timeout = seconds("timeout", self.timeout)
        for name, least in (("prefetch_factor", 1), ("max_concurrent", 1), ("max_restarts", 0)):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, whole_number(name, value, least))
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} must be one of {', '.join(map(repr, METHODS))}.")
        if self.ray_options is not None and self.method != "ray":
            raise ValueError(
                f"ray_options={self.ray_options!r:.80} is for method='ray', but method={self.method!r}. Leave "
                f"ray_options out."
            )
        if refused := sorted(_OURS.intersection(self.ray_options or ())):
            raise ValueError(
                f"ray_options has {', '.join(refused)}, but the loader itself controls the names, lifetime, restarts "
                f"and concurrency of its workers. Leave it out. (max_restarts= is an argument of the loader.)"
            )
        if self.method == "process" and self.num_workers:
            check_processes(self.multiprocessing_context)

    @property
    def is_auto(self) -> bool:
        """Whether the number of workers is ``"auto"``."""
        return isinstance(self.num_workers, str) and self.num_workers == "auto"

    @property
    def kind(self) -> Kind:
        """The kind of the workers, if there are any."""
        return METHODS[self.method]


@final
class Crew:
    """How many workers there are, and how many items they may have in progress.

    Args:
        options: The user's settings.

    Attributes:
        auto: Finds the number of workers; None if the user has chosen it.
        number: Workers now; 0: the calling thread does the work.
        most: Upper limit for the number.
        depth: The most items in progress.
        is_new: No item has shown its size yet.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self.auto: AutoWorkers | None = None
        if options.is_auto:
            from penstock._nodes.auto_workers import AutoWorkers

            self.auto = AutoWorkers(options.kind.most)
        # "auto" is no number
        self.number: int = 1 if self.auto is not None else options.num_workers  # type: ignore[assignment]
        self.most = self.number if self.auto is None else self.auto.most
        self.is_new = self.number > 0
        self._per_worker = options.prefetch_factor or _FEW
        self.depth = self.depth_of(self.number)

    def __str__(self) -> str:
        kind = self._options.kind
        if not self.number:
            return "no workers"
        return f"{self.number} {kind.one if self.number == 1 else kind.many}{' (auto)' * (self.auto is not None)}"

    def depth_of(self, workers: int) -> int:
        """The most items in progress with so many workers."""
        if not self.number:
            return 1
        return workers * self._per_worker if self._options.max_concurrent is None else self._options.max_concurrent

    @property
    def most_ahead(self) -> int:
        """The most items that may ever be in progress, whatever their size."""
        options = self._options
        return self.most and (options.max_concurrent or self.most * (options.prefetch_factor or options.kind.ahead))

    def learn(self, value: Any) -> None:
        """Choose the depth from the bytes of the first item.

        For small items, waking a worker is most of the cost, so more are in progress.
        """
        self.is_new, options, size = False, self._options, nbytes(value)
        if options.max_concurrent is None and options.prefetch_factor is None:
            self._per_worker = options.kind.ahead if size <= 2**16 else _SOME if size <= 2**20 else _FEW
            self.depth = self.depth_of(self.number)
        if self.auto is not None and options.max_concurrent is None:
            self.auto.ahead_bytes = int(size) * self._per_worker

    def resize(self, pool: Pool, waited_ns: int) -> None:
        """Apply the number of workers that ``num_workers="auto"`` has chosen, now that the node has waited so long in
        total.
        """
        if self.auto is None or (wanted := self.auto.look(pool, waited_ns, self.depth)) == self.number:
            return
        number = pool.resize(wanted)
        self.depth = self.depth_of(number)
        self.auto.resized(number, wanted, self.depth)
        self.number = number  # last: after an interrupt, the next call does all of it again

    def available_ns(self, totals: Totals) -> int:
        """The time that all workers together had so far."""
        if self.auto is not None:
            return self.auto.available_ns(totals.first, totals.last)
        return max(1, self.number) * (totals.last - totals.first)


_FEW, _SOME = 2, 4  # items in progress per worker


def open_pool(options: WorkerOptions, work: Task, crew: Crew, allocate: Allocate) -> Pool:
    """A new pool, not yet started.

    Args:
        options: The user's settings; ``options.method`` decides.
        work: What each worker gets.
        crew: How many workers at first, at least 1, and at most.
        allocate: Memory for the results of work in this process.
    """
    workers, most = crew.number, crew.most
    if options.method == "thread":
        from penstock._workers.thread_pool import ThreadPool

        return ThreadPool(work, workers, most=most, allocate=allocate)

    from penstock._workers.processes.protocol import Setup

    init: Any = options.worker_init_fn
    if options.method == "process":
        for one in traced:
            init = one.in_worker(init)
    setup = Setup(work, most, work.seed, init)
    factor, ahead = options.prefetch_factor, options.kind.ahead
    max_restarts = max(8, 2 * most) if options.max_restarts is None else options.max_restarts
    if options.method == "ray":
        from penstock._workers.ray_pool import RayPool

        ray_options = options.ray_options
        return RayPool(
            setup,
            workers,
            queue_size=factor or ahead,
            max_restarts=max_restarts,
            ray_options=ray_options,
            allocate=allocate,
        )

    from penstock._workers.process_pool import ProcessPool

    refill_at, context = None if factor else ahead // 2, options.multiprocessing_context
    return ProcessPool(
        setup,
        workers,
        queue_size=factor or ahead,
        refill_at=refill_at,
        max_restarts=max_restarts,
        multiprocessing_context=context,
    )
