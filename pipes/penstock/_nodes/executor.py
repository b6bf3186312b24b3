"""Executor: decides which workers make the items of a `ParallelMapper`, how many at a time, and in what memory.

The mapper handles where items come from and in which order they are delivered. For each item it calls, in its own
thread::

    limit_before ─► submit, as often as there is room ─► wait, until the one that is due is done ─► result
        ─► limit_after ─► submit …

The limits bound the items in progress: before the wait, and while the consumer uses the item. The executor makes its
decisions there: with ``num_workers="auto"`` it changes the number of workers, it derives from the first item how many
should be in progress, and it warns of code that draws (`DrawWatch`). Without workers the mapper calls `run_inline`
instead. An item that needs an entry in the window is then submitted, which makes it at once.

The pool of workers is created at the first `start`, so that a graph can be forked and pickled until then. It lives as
long as the executor, unless `refresh` replaces it. Only `pools.open_pool` chooses the kind of pool.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

from penstock._errors import ANEW, ClosedError, GraphError, SampleError, is_own_error
from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.error_policy import PartialBatch, annotate
from penstock._fetch.fetch import Fetch
from penstock._fetch.fetch_task import FetchTask
from penstock._fetch.indices import Indices
from penstock._fetch.plain_values import plain_values
from penstock._fetch.task import Loaded, Part
from penstock._fetch.told_parts import ToldParts
from penstock._memory.allocation import anywhere, pinned
from penstock._memory.devices import can_pin
from penstock._memory.recycler import Recycler
from penstock._nodes.inline_work import InlineWork
from penstock._nodes.pools import Crew, open_pool
from penstock._workers.meter import Meter, Totals, now, traced
from penstock._workers.pool import IDLE, Job, SplitJob, why_not_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._fetch.error_policy import OnError
    from penstock._memory.allocation import Allocate
    from penstock._nodes.draw_watch import DrawWatch
    from penstock._nodes.lane_owners import LaneOwners
    from penstock._nodes.pools import WorkerOptions
    from penstock._statistics import NodeStatistics

_logger = logging.getLogger("penstock")


@final
class Executor:
    """Runs ``map_fn`` in worker threads, in worker processes, or in the calling thread.

    One thread uses it; any thread may `interrupt` it.

    Args:
        map_fn: Applied to each item.
        options: The user's settings for the workers.
        seed: Seed of the samples' random numbers.
        seed_global_rngs: See `ParallelMapper`.
        on_error: See `ParallelMapper`.

    Attributes:
        crew: How many workers there are, and how many items they may have in progress.
        tasks: Items made so far, failed ones included.
        samples: Samples in them.
        told_parts: What has a ``set_epoch``.
        copies: Whether workers, or lanes, have copies of the user's objects.
        roots: Those objects, by the first words of their paths.
        given: The plain values of the copies, once there are any.
        generators: Those that the user's objects hold.

    Raises:
        ValueError: The dataset cannot be read by such workers.
    """

    def __init__(
        self,
        map_fn: Callable[[Any], Any],
        options: WorkerOptions,
        seed: int,
        seed_global_rngs: bool | Literal["always"],
        on_error: OnError,
    ) -> None:
        self._options = options
        self.crew = Crew(options)
        facts = map_fn.facts if isinstance(map_fn, Fetch) and not options.kind.in_process else DatasetFacts(None)
        lanes = facts.lanes
        if self.crew.auto is not None and lanes:
            raise ValueError(
                f"num_workers='auto' changes the number of workers at run time, but {facts.name} is read in lanes, and "
                "one worker process must read each lane forward. Pass a number (num_workers=2)"
                + (
                    "."
                    if facts.sets_worker_info
                    else ', or use method="thread", where threads share what they have read.'
                )
            )
        self._threaded = options.kind.in_process and self.num_workers > 0
        self._inline = InlineWork(map_fn, seed, False if self._threaded else seed_global_rngs, on_error)
        self._work = self._inline.seeded
        self.generators, self.told_parts = self._work.generators, self._work.told_parts
        self.copies, self.roots = self.num_workers > 0 and not self._threaded, {**self.generators.roots}
        self.tops: Sequence[Any] = map_fn.facts.tops if isinstance(map_fn, Fetch) else ()
        if isinstance(map_fn, Fetch) and (copied := map_fn.facts.copied) is not None:
            data = DatasetFacts(copied.dataset)
            self.copies, self.roots["dataset"], self.tops = True, data.dataset, data.tops
            self.told_parts = ToldParts(data.dataset, data.tops)
            copied.left = self.told_parts.left
        self.generators.checks = seed_global_rngs is not False  # in threads too
        if self._threaded and isinstance(map_fn, Fetch) and map_fn.facts.sets_worker_info:
            raise ValueError(
                f"method={options.method!r}: {map_fn.facts.name} reads an IterableDataset as several workers would, "
                f"but torch has one worker info per process, so threads could not read at the same time, and your loop "
                f'would see it. Use method="process", or num_workers=0.'
            )
        self._watches_draws = self._threaded and seed_global_rngs is not False
        self._by_position = lanes is None and self.crew.auto is None
        if self._by_position:
            lanes = facts.cuts
        self._lanes = lanes if self.num_workers > 1 else None
        # Created at the first start.
        self._allocate: Allocate = anywhere
        self._pool: Any = None  # a `Pool`
        self._owners: LaneOwners | None = None
        self._draws: DrawWatch | None = None
        self._closed = False
        self._stale = True  # the next start opens a pool
        self.given: dict[str, Any] = {}
        self._again: dict[Any, Job | SplitJob] = {}  # see `begin_again`
        self.tasks = self.samples = 0
        self._wait_ns = 0
        self._replaced: list[list[int]] = []  # the counts of workers that were replaced after a `refresh`

    @property
    def num_workers(self) -> int:
        """The current number of workers; 0: the calling thread does the work."""
        return self.crew.number

    # Its life: `start` at each reset of the mapper, `refresh`, `interrupt`, `shutdown`.

    def start(self, world_size: int) -> None:
        """Make sure that there are workers, with nothing in progress. After `refresh`, they are new ones.

        Args:
            world_size: Number of ranks.
        """
        if self._closed and self.num_workers:
            raise ClosedError(f"these workers have ended. {ANEW}")
        if self._stale:
            if self._pool is not None:
                self._pool.shutdown()
                self._replaced += self._pool.counted()
                self._pool = None
            self._open(world_size)
            self._stale = False
        if self.crew.auto is not None:
            self.crew.auto.restart()
        if self._pool is not None:
            self._again = {}
            self._pool.discard()
            self._pool.start()

    def tell(self, epoch: int) -> None:
        """An epoch is over: tell the user's own objects that ``epoch`` comes next."""
        if self.told_parts is self._work.told_parts:
            self._work.tell(epoch, inline=True)
        else:  # of what is copied
            self.told_parts.tell(epoch, inline=True)

    def why_not_sent(self) -> Exception | None:
        """Why the user's objects could not be sent to new workers; None if they can be."""
        return why_not_sent(self._work, self._options.multiprocessing_context) if self.num_workers else None

    def refresh(self) -> None:
        """Replace the workers at the next `start`, so that they get this process's current dataset.

        Starts nothing by itself.
        """
        self._stale, self.given = True, {}
        self._close_data()

    def interrupt(self) -> None:
        """Make a `wait` in another thread raise `ClosedError`, until the next `start`."""
        if self._pool is not None:
            self._pool.interrupt()

    def shutdown(self) -> None:
        """End the workers, for good."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown()
        self._close_data()

    def _close_data(self) -> None:
        if isinstance(self._work, FetchTask):
            self._work.close()

    def _open(self, world_size: int) -> None:
        options, workers = self._options, self.num_workers
        self.given = plain_values(self.roots) if self.copies else {}
        self.generators.forget()
        self._allocate = (
            pinned if options.pin_memory and can_pin() else Recycler(self.crew.depth_of(self.crew.most)).allocate
        )
        if not workers:
            return
        self._pool = open_pool(options, self._work, self.crew, self._allocate)
        if self.draws is not None:
            self._pool.watched = partial(self.draws.waiting, 0)
        if self._lanes is not None:
            from penstock._nodes.lane_owners import LaneOwners

            self._owners = LaneOwners(self._lanes, world_size, workers, by_position=self._by_position)
            if (idle := workers - self._owners.share) > 0:
                _logger.warning(
                    "%d of %d workers have nothing to do: this rank reads %d of the dataset's %d lanes, and each is "
                    "read by one worker. Use num_workers=%d, or more lanes: pass lanes= to the dataset, up to the "
                    "number of its shards.",
                    *(idle, workers, self._owners.share, self._lanes, self._owners.share),
                )

    # The path of an item.

    def run_inline(self, item: Any, began: int) -> Any:
        """Make ``item`` in this thread; ``began`` is now.

        Inlined for speed, because each batch without workers passes here.
        """
        words = self._work.meter.words
        words[_SINCE] = began
        try:
            value = self._inline(item, self._allocate)
        except BaseException as exc:
            if is_own_error(exc):
                self._work.meter.end()
            raise
        ended = words[_LAST] = now()
        words[_BUSY] += ended - began
        if not words[_FIRST]:
            words[_FIRST] = began
        for one in traced:
            one.task(item, began, ended)
        return value

    def limit_before(self) -> int:
        """How many items may be in progress, now that the mapper wants one more.

        After an interrupt, the next call does the rest.
        """
        if self.crew.auto is not None:
            self.crew.resize(self._pool, self._wait_ns)
        return self.crew.depth

    def submit(self, item: Any, *, idle: bool) -> Job | SplitJob:
        """Submit ``item``; without workers, make it.

        With lanes it goes row by row to their owners, otherwise as a whole to any worker.

        Args:
            item: From the source.
            idle: Nothing is in progress. The item is then split among all workers, so that the first batch takes the
                time of a few samples.
        """
        told = self._work.told
        if self._threaded and hasattr(item, "epoch") and self.told_parts.lack(item.epoch, told):
            self._work.tell(item.epoch, inline=item.epoch == told)  # nothing of another epoch is in progress
        if not self.crew.number:
            made = Job(item)
            try:
                made.value, made.done = self.run_inline(item, now()), True
            except BaseException as exc:
                if not is_own_error(exc):
                    raise  # from a signal handler: the item is made again
                return Job(item, exc)
            return made
        work = self._work
        try:
            if self.crew.number > 1 and isinstance(work, FetchTask):
                if self._owners is not None and isinstance(item, Indices):
                    rows = self._owners.rows(item)
                    if item.is_batch and (len(rows) > 1 or (rows and work.collates_itself)):
                        return self._split(
                            work, item, [work.part(item, own, here=self._threaded) for own in rows.values()], [*rows]
                        )
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
        """Wait until one of ``jobs`` is done; see `Pool.wait`."""
        began = now()
        try:
            self._pool.wait(jobs, self._options.timeout)
        finally:
            self._wait_ns += now() - began

    def poll(self) -> None:
        """Take in what workers have finished, without waiting."""
        if (poll := getattr(self._pool, "poll", None)) is not None:
            poll()

    def result(self, job: Job | SplitJob) -> Any:
        """The value of ``job``, which is done, or its error."""
        self.tasks += 1  # `count`, inlined
        self.samples += samples_of(job.task)
        return self._work.unwrapped(job.result())

    def count(self, item: Any) -> None:
        """``item`` was made."""
        self.tasks += 1
        self.samples += samples_of(item)

    def again(self, item: Any, world_size: int) -> Any:
        """Make ``item`` once more, beside what is in progress, and count it nowhere."""
        if self.num_workers:
            job = self._again.pop(_key(item), None) or self._begun(item, world_size)
            while not job.done:
                self._pool.wait(job.under_way, self._options.timeout)
            value = self._work.unwrapped(job.result())
        else:
            value = self._inline.again(item, self._allocate)
        if type(value) is not PartialBatch:
            return value
        if not value.left:
            raise SampleError("all samples of this batch failed and were skipped, so nothing is left of it.")
        return value.value

    def begin_again(self, items: Sequence[Any], world_size: int) -> None:
        """Begin to make ``items`` once more, in the workers, because `again` is about to ask for them."""
        if self.num_workers:
            self._again = {
                _key(item): self._again.get(_key(item)) or self._begun(item, world_size)
                for item in items[: self.crew.depth]
            }

    def _begun(self, item: Any, world_size: int) -> Job | SplitJob:
        if self._pool is None:
            self.start(world_size)
        told = self._work.told
        if self._threaded and self.told_parts and told not in (None, getattr(item, "epoch", told)):
            raise GraphError(
                f"threads share a dataset with a set_epoch, so only batches of epoch {told}, in which they are, can be "
                f'made again. Use method="process", or have the dataset read penstock.sample().epoch.'
            )
        return self.submit(item, idle=False)

    def limit_after(self, value: Any) -> int:
        """How many items may be in progress while the consumer uses ``value``, which still counts as one.

        May warn, and so may raise.
        """
        if self.crew.is_new:
            self.crew.learn(value)
        if self._draws is not None and self._draws.changed is not None:
            self._draws.warn(self._pool.threads)
        return self.crew.depth + 1 if self.crew.number else 0

    def epoch_ended(self) -> None:
        """The end-of-epoch marker is delivered."""
        if self.crew.auto is not None:
            self.crew.auto.mark()

    def _split(self, work: FetchTask, item: Indices, parts: list[Part], to: list[int | None]) -> SplitJob:
        jobs, allocate = list(map(self._pool.submit, parts, to)), self._allocate
        collate = self._inline if work.collates_itself else work.inline
        if self._draws is not None:  # draws in it count as a worker's
            collate = partial(self._draws.waiting, 0, collate)

        def collated(values: list[Any]) -> Any:
            began, loaded = now(), Loaded(item, parts, list(map(work.unwrapped, values)))
            value = collate(loaded, allocate)
            for one in traced:
                one.task(loaded, began, now())
            return value

        return SplitJob(item, jobs, collated)

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
        return (
            not self.num_workers or (self._lanes is not None and self._work.collates_itself)
        ) and self._inline.in_step

    def statistics(self, of_node: NodeStatistics) -> NodeStatistics:
        """``of_node`` with the statistics of the workers."""
        from penstock._statistics import WorkerStatistics

        totals, workers = self._totals(), max(1, self.num_workers)
        available_ns = self.crew.available_ns(totals)
        idle_s = max(0.0, (available_ns - totals.busy_ns) / workers / 1e9)
        own = (
            WorkerStatistics(self._options.method if self.num_workers else "inline")
            if self._pool is None
            else self._pool.statistics()
        )
        return dataclasses.replace(
            of_node,
            consumer_wait_s=idle_s if self.num_workers else of_node.consumer_wait_s,
            work_s=totals.busy_ns / 1e9,
            depth=self.crew.depth if self.num_workers else 0,
            workers=dataclasses.replace(
                own,
                busy_share=min(1.0, totals.busy_ns / available_ns) if available_ns else 0.0,
                wait_s=(self._wait_ns if self.num_workers else totals.busy_ns) / 1e9,
                tasks=own.tasks if self.num_workers else self.tasks,
                choice=None if self.crew.auto is None else self.crew.auto.choice,
                draws=None if self._draws is None else self._draws.message,
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
            "copies": DatasetFacts.of(self._work.dataset).copies,
        }

    def _totals(self) -> Totals:
        """The counts of all workers and of the caller's thread so far."""
        pool = [] if self._pool is None else self._pool.counted()
        return Totals([*self._replaced, *pool, self._work.meter.counted()])


def samples_of(task: Any) -> int:
    """The number of samples in a task."""
    positions = getattr(task, "positions", 0)
    return 1 if isinstance(positions, int) else len(positions)


_SINCE, _FIRST, _LAST, _BUSY = Meter.SINCE, Meter.FIRST, Meter.LAST, Meter.BUSY


def _key(item: Any) -> Any:
    """What identifies an item among those that are made once more."""
    return (
        (item.epoch, item.positions.tobytes() if item.is_batch else item.positions)
        if type(item) is Indices
        else id(item)
    )
