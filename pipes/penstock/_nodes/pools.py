"""The workers of a `ParallelMapper`: the user's settings for them, and `open_pool`, the only place that chooses their pool.

A pool is anything with the methods of `Pool`, and each kind has its file in ``_workers``. To add a kind, write that file, add its ``method``
to `METHODS`, and add a branch to `open_pool`. No other code compares method names; code that depends on the method reads its `Kind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

from penstock._arguments import seconds, whole_number
from penstock._workers.inline_pool import InlinePool
from penstock._workers.meter import traced
from penstock._workers.pool import check_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock._memory.allocation import Allocate
    from penstock._nodes.inline_work import InlineWork
    from penstock._workers.blocked import Place
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
                f"ray_options={self.ray_options!r:.80} is for method='ray', but method={self.method!r}. Leave ray_options out."
            )
        if refused := sorted(_OURS.intersection(self.ray_options or ())):
            raise ValueError(
                f"ray_options has {', '.join(refused)}, but the loader itself controls the names, lifetime, restarts and concurrency of its workers. "
                f"Leave it out. (max_restarts= is an argument of the loader.)"
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


def open_pool(options: WorkerOptions, inline: InlineWork, workers: int, most: int, allocate: Allocate, place: Place | None) -> Pool:
    """A new pool, not yet started.

    Args:
        options: The user's settings; ``options.method`` decides.
        inline: The work. Workers get ``inline.seeded``; without workers, the caller's thread calls ``inline`` itself.
        workers: Workers at first; 0 for none.
        most: Upper limit for the number of workers.
        allocate: Memory for the results of work in this process.
        place: The place of the thread that waits for worker threads; see `DrawWatch`.
    """
    if not workers:
        return InlinePool(inline, allocate, inline.meter)
    if options.method == "thread":
        from penstock._workers.thread_pool import ThreadPool

        return ThreadPool(inline.seeded, workers, most=most, allocate=allocate, place=place)

    factor = options.prefetch_factor
    max_restarts = max(8, 2 * most) if options.max_restarts is None else options.max_restarts
    shared: dict[str, Any] = {
        "most": most,
        "queue_size": factor or options.kind.ahead,
        "max_restarts": max_restarts,
        "seed": inline.seeded.seed,
    }
    init: Any = options.worker_init_fn
    if options.method == "ray":
        from penstock._workers.ray_pool import RayPool

        return RayPool(inline.seeded, workers, ray_options=options.ray_options, allocate=allocate, worker_init_fn=init, **shared)

    from penstock._workers.process_pool import ProcessPool

    for one in traced:
        init = one.in_worker(init)
    refill_at, context = None if factor else options.kind.ahead // 2, options.multiprocessing_context
    return ProcessPool(inline.seeded, workers, refill_at=refill_at, multiprocessing_context=context, worker_init_fn=init, **shared)
