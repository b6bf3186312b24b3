"""Executor: decides which workers make the items of a `ParallelMapper`, how many at a time, and in what memory.

The mapper handles where items come from and in which order they are delivered. For each item it calls, in its own thread::

    limit_before ─► submit, as often as there is room ─► wait, until the one that is due is done ─► result ─► limit_after ─► submit …

The limits bound the items in progress: before the wait, and while the consumer uses the item. The executor makes its decisions there: with
``num_workers="auto"`` it changes the number of workers, it derives from the first item how many should be in progress, and it
warns of code that draws (`DrawWatch`). Without workers the mapper calls `run_inline` instead, and only an item that failed
takes the path above.

The pool of workers is created at the first `start`, so that a graph can be forked and pickled until then. It lives as long as the executor,
unless `refresh` replaces it. Only `pools.open_pool` chooses the kind of pool.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

from penstock._errors import ClosedError, is_own_error
from penstock._fetch.error_policy import annotate
from penstock._fetch.fetch import Fetch
from penstock._fetch.fetch_task import FetchTask
from penstock._fetch.indices import Indices
from penstock._fetch.task import Loaded, Part
from penstock._memory.allocation import afresh, pinned
from penstock._memory.devices import can_pin
from penstock._memory.recycler import Recycler
from penstock._memory.tree import nbytes
from penstock._nodes.inline_work import InlineWork
from penstock._nodes.pools import open_pool
from penstock._workers.meter import Meter, Totals, now, traced
from penstock._workers.pool import IDLE, Job, Pool, SplitJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._fetch.error_policy import OnError
    from penstock._memory.allocation import Allocate
    from penstock._nodes.auto_workers import AutoWorkers
    from penstock._nodes.draw_watch import DrawWatch
    from penstock._nodes.lane_owners import LaneOwners
    from penstock._nodes.pools import WorkerOptions
    from penstock._statistics import CopyStatistics, NodeStatistics

_logger = logging.getLogger("penstock")


@final
class Executor:
    """Runs ``map_fn`` in worker threads, in worker processes, or in the calling thread. One thread uses it; any thread may `interrupt` it.

    Args:
        map_fn: Applied to each item.
        options: The user's settings for the workers.
        seed: Seed of the samples' random numbers.
        seed_global_rngs: See `ParallelMapper`.
        on_error: See `ParallelMapper`.

    Attributes:
        method: Where the workers are, if there are any.
        auto: Finds the number of workers; None if the user has chosen it.
        num_workers: The current number; 0: the calling thread does the work.
        depth: The most items in progress.
        tasks: Items made so far, failed ones included.
        samples: Samples in them.
        epoch_aware: The datasets with a ``set_epoch``.
        generators: Those that the user's objects hold.

    Raises:
        ValueError: The dataset cannot be read by such workers.
    """

    def __init__(
        self, map_fn: Callable[[Any], Any], options: WorkerOptions, seed: int, seed_global_rngs: bool | Literal["always"], on_error: OnError
    ) -> None:
        self._options = options
        self.method = options.method
        self.auto: AutoWorkers | None = None
        if options.is_auto:
            from penstock._nodes.auto_workers import AutoWorkers

            self.auto = AutoWorkers(options.kind.most)
        self.num_workers: int = 1 if self.auto is not None else options.num_workers  # type: ignore[assignment]  # "auto" is no number
        self._most_workers = self.num_workers if self.auto is None else self.auto.most
        lanes = map_fn.lanes if isinstance(map_fn, Fetch) and not options.kind.in_process else None
        if self.auto is not None and lanes and isinstance(map_fn, Fetch):
            raise ValueError(
                f"num_workers='auto' changes the number of workers at run time, but {type(map_fn.dataset).__name__} is read in lanes, and one worker process must read "
                f'each lane forward. Pass a number (num_workers=2), or use method="thread", where threads share what they have read.'
            )
        self._threaded = options.kind.in_process and self.num_workers > 0
        self._inline = InlineWork(map_fn, seed, False if self._threaded else seed_global_rngs, on_error)
        self._work = self._inline.seeded
        self.generators, self.epoch_aware = self._work.generators, self._work.epoch_aware
        if self.epoch_aware and self._threaded:
            raise ValueError(
                f"{type(self.epoch_aware[0]).__name__}.set_epoch would be called while other threads load samples of another epoch. Use "
                f'method="process", or have the dataset read penstock.sample().epoch and rename its set_epoch.'
            )
        self._watches_draws = self._threaded and seed_global_rngs is not False
        self._by_position = lanes is None and self.auto is None and isinstance(map_fn, Fetch) and not options.kind.in_process
        if self._by_position:
            lanes = map_fn.cuts  # type: ignore[attr-defined]  # it is a `Fetch`
        self._lanes = lanes if self.num_workers > 1 else None
        self._per_worker = options.prefetch_factor or _FEW
        self.depth = self._depth_of(self.num_workers)
        self._decides = options.max_concurrent is None and options.prefetch_factor is None  # how many are in progress
        self._undecided = self.num_workers > 0 and (self._decides or self.auto is not None)  # until the first item shows its size
        # Created at the first start.
        self._allocate: Allocate = afresh
        self._pool: Any = None  # a `Pool`
        self._owners: LaneOwners | None = None
        self._draws: DrawWatch | None = None
        self._closed = self._stale = False
        self.tasks = self.samples = 0
        self._wait_ns = 0
        self._replaced: list[list[int]] = []  # the counts of workers that were replaced after a `refresh`

    def __str__(self) -> str:
        if not self.num_workers:
            return "no workers"
        kind = self._options.kind
        return f"{self.num_workers} {kind.one if self.num_workers == 1 else kind.many}{' (auto)' * (self.auto is not None)}"

    # Its life: `start` at each reset of the mapper, `refresh`, `interrupt`, `shutdown`.

    def start(self, world_size: int) -> None:
        """Make sure that there are workers, with nothing in progress. After `refresh`, they are new ones.

        Args:
            world_size: Number of ranks.
        """
        if self._closed and self.num_workers:
            raise ClosedError("these workers have ended; build a new loader.")
        if self._stale and self._pool is not None:
            self._pool.shutdown()
            self._replaced += self._pool.counted()
            self._pool = None
        self._stale = False
        if self._pool is None:
            self._pool = self._opened(world_size)
        if self.auto is not None:
            self.auto.restart()
        self._pool.discard()
        self._pool.start()

    def refresh(self) -> None:
        """Replace the workers at the next `start`, so that they get this process's current dataset. Starts nothing by itself."""
        self._stale = True

    def interrupt(self) -> None:
        """Make a `wait` in another thread raise `ClosedError`, until the next `start`."""
        if self._pool is not None:
            self._pool.interrupt()

    def shutdown(self) -> None:
        """End the workers, for good."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown()

    def _opened(self, world_size: int) -> Pool:
        options, workers = self._options, self.num_workers
        self.generators.forget()
        self._allocate = pinned if options.pin_memory and can_pin() else Recycler(self._depth_of(self._most_workers)).allocate
        place = None if self.draws is None else self.draws.place
        pool = open_pool(options, self._inline, workers, self._most_workers, self._allocate, place)
        if self._lanes is not None:
            from penstock._nodes.lane_owners import LaneOwners

            self._owners = LaneOwners(self._lanes, world_size, workers, by_position=self._by_position)
            if (idle := workers - self._owners.share) > 0:
                _logger.warning(
                    "%d of %d workers have nothing to do: this rank reads %d of the dataset's %d lanes, and each is read by one worker. Use "
                    "num_workers=%d, or more lanes: pass lanes= to the dataset, up to the number of its shards.",
                    *(idle, workers, self._owners.share, self._lanes, self._owners.share),
                )
        return pool

    # The path of an item.

    def run_inline(self, item: Any, began: int) -> Any:
        """Make ``item`` in this thread; ``began`` is now. Inlined for speed, because each batch without workers passes here."""
        words = self._inline.meter.words
        words[_SINCE] = began
        try:
            value = self._inline(item, self._allocate)
        except BaseException as exc:
            if is_own_error(exc):
                self._inline.meter.end()
            raise
        ended = words[_LAST] = now()
        words[_BUSY] += ended - began
        if not words[_FIRST]:
            words[_FIRST] = began
        for one in traced:
            one.task(item, began, ended)
        self.tasks += 1
        self.samples += samples_of(item)
        return value

    def limit_before(self) -> int:
        """How many items may be in progress, now that the mapper wants one more. After an interrupt, the next call does the rest."""
        if self.auto is not None:
            self._resize(self.auto)
        return self.depth

    def submit(self, item: Any, *, idle: bool) -> Job | SplitJob:
        """Submit ``item``: row by row to the owners of their lanes if there are lanes, otherwise as a whole to any worker.

        Args:
            item: From the source.
            idle: Nothing is in progress. The item is then split among all workers, so that the first batch takes the time of a few samples.
        """
        work = self._work
        try:
            if self.num_workers > 1 and isinstance(work, FetchTask):
                if self._owners is not None and isinstance(item, Indices):
                    rows = self._owners.rows(item)
                    if item.is_batch and (len(rows) > 1 or (rows and work.collates_itself)):
                        return self._split(work, item, [work.part(item, own) for own in rows.values()], [*rows])
                    one: Job = self._pool.submit(item, next(iter(rows), None))
                    return one
                if idle and (parts := work.parts(item, self.num_workers, here=self._threaded)):
                    return self._split(work, item, parts, [None] * len(parts))
            job: Job = self._pool.submit(item)
            return job
        except Exception as exc:
            if is_own_error(exc):
                annotate(exc, f"while sending {work.name(item, IDLE)} to a worker")
            raise

    def wait(self, jobs: Sequence[Job]) -> None:
        """Wait until one of ``jobs`` is done; see `Pool.wait`. Without workers, the first of them is made here."""
        began = now()
        try:
            self._pool.wait(jobs, self._options.timeout)
        finally:
            self._wait_ns += now() - began

    def result(self, job: Job | SplitJob) -> Any:
        """The value of ``job``, which is done, or its error."""
        self.tasks += 1
        self.samples += samples_of(job.task)
        return job.result()

    def limit_after(self, value: Any) -> int:
        """How many items may be in progress while the consumer uses ``value``, which still counts as one. May warn, and so may raise."""
        if self._undecided:
            self._undecided = False
            self._learn(nbytes(value))
        if self._draws is not None and self._draws.blocked.changed is not None:
            self._draws.warn(self._pool.threads)
        return self.depth + 1 if self.num_workers else 0

    def epoch_ended(self) -> None:
        """The end-of-epoch marker is delivered."""
        if self.auto is not None:
            self.auto.mark()

    def _split(self, work: FetchTask, item: Indices, parts: list[Part], to: list[int | None]) -> SplitJob:
        jobs, allocate = list(map(self._pool.submit, parts, to)), self._allocate
        collate = self._inline if work.collates_itself else work.inline
        if self._draws is not None:  # draws in it count as a worker's
            collate = partial(self._draws.place.waiting, collate)

        def collated(values: list[Any]) -> Any:
            began, loaded = now(), Loaded(item, parts, values)
            value = collate(loaded, allocate)
            for one in traced:
                one.task(loaded, began, now())
            return value

        return SplitJob(item, jobs, collated)

    # How many.

    def _depth_of(self, workers: int) -> int:
        """The most items in progress with this many workers."""
        if not self.num_workers:
            return 1
        return workers * self._per_worker if self._options.max_concurrent is None else self._options.max_concurrent

    def _learn(self, size: float) -> None:
        """Choose the depth from the bytes of the first item. For small items, waking a worker is most of the cost, so more are in progress."""
        if self._decides:
            self._per_worker = self._options.kind.ahead if size <= 2**16 else _SOME if size <= 2**20 else _FEW
            self.depth = self._depth_of(self.num_workers)
        if self.auto is not None and self._options.max_concurrent is None:
            self.auto.ahead_bytes = int(size) * self._per_worker

    def _resize(self, auto: AutoWorkers) -> None:
        """Apply the number of workers that ``num_workers="auto"`` has chosen."""
        wanted = auto.look(self._pool, self._wait_ns, self.depth)
        if wanted != self.num_workers:
            number = self._pool.resize(wanted)
            self.depth = self._depth_of(number)
            auto.resized(number, wanted, self.depth)
            self.num_workers = number  # last: after an interrupt, the next call does all of it again

    # Queries.

    @property
    def draws(self) -> DrawWatch | None:
        """The watch on worker threads for draws from the global generators. Use it only after the first `start`."""
        if self._draws is None and self._watches_draws:
            from penstock._nodes.draw_watch import DrawWatch

            self._draws = DrawWatch(self._work)
        return self._draws

    @property
    def in_step(self) -> bool:
        """See `InlineWork.in_step`."""
        if self._draws is not None and not self.tasks:
            return True  # the first item shows most
        return (not self.num_workers or (self._lanes is not None and self._work.collates_itself)) and self._inline.in_step

    def statistics(self, of_node: NodeStatistics) -> NodeStatistics:
        """``of_node`` with the statistics of the workers."""
        from penstock._statistics import WorkerStatistics

        totals, workers = self._totals(), max(1, self.num_workers)
        available_ns = workers * (totals.last - totals.first) if self.auto is None else self.auto.available_ns(totals.first, totals.last)
        idle_s = max(0.0, (available_ns - totals.busy_ns) / workers / 1e9)
        own = WorkerStatistics(self.method if self.num_workers else "inline") if self._pool is None else self._pool.statistics()
        return dataclasses.replace(
            of_node,
            consumer_wait_s=idle_s if self.num_workers else of_node.consumer_wait_s,
            work_s=totals.busy_ns / 1e9,
            depth=self.depth if self.num_workers else 0,
            workers=dataclasses.replace(
                own,
                busy_share=min(1.0, totals.busy_ns / available_ns) if available_ns else 0.0,
                wait_s=(self._wait_ns if self.num_workers else totals.busy_ns) / 1e9,
                tasks=own.tasks if self.num_workers else self.tasks,
                choice=None if self.auto is None else self.auto.choice,
                draws=None if self._draws is None else self._draws.said,
            ),
        )

    def stages(self) -> dict[str, Any]:
        """See `Node._stages`."""
        totals = self._totals()
        return {
            "samples": self.samples,
            **totals.stages,
            **({"transfer": self._pool.unpacked()} if hasattr(self._pool, "unpacked") else {}),
            "load_cpu_share": min(1.0, totals.cpu_ns / totals.wall_ns) if totals.wall_ns else None,
            "lock_wait_share": totals.waits / totals.looks if totals.looks and self._threaded else None,
            "copies": self._copies(),
        }

    def _copies(self) -> CopyStatistics | None:
        from penstock._statistics import CopyStatistics

        ask = getattr(getattr(self._work, "dataset", None), "copy_statistics", None)
        said = ask() if callable(ask) else None
        return said if isinstance(said, CopyStatistics) else None

    def _totals(self) -> Totals:
        """The counts of all workers and of the caller's thread so far."""
        pool = [] if self._pool is None else self._pool.counted()
        return Totals([*self._replaced, *pool, self._inline.meter.counted()])


def samples_of(task: Any) -> int:
    """The number of samples in a task."""
    positions = getattr(task, "positions", 0)
    return 1 if isinstance(positions, int) else len(positions)


_FEW, _SOME = 2, 4  # items in progress per worker
_SINCE, _FIRST, _LAST, _BUSY = Meter.SINCE, Meter.FIRST, Meter.LAST, Meter.BUSY
