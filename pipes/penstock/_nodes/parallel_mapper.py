"""ParallelMapper: turns items into data in parallel workers.

It pulls items ahead into a `DeliveryWindow`. Each entry holds a job and the source's state right after its item was pulled. So the state after
a delivered item is simply the state in its entry: there is nothing to snapshot, poll or reorder. Without workers an item gets an entry only if something
goes wrong (`_done_at_once`).

Why `next` fills the window twice, before it waits and before it returns: jobs submitted only by the next call would leave the workers idle
while the caller trains.

Ctrl-C may interrupt any line. If it comes before `DeliveryWindow.deliver`, the last step, the caller has not got the item, and the state does
not say so. If it comes between a pull and the entry for it, the source has moved and the window has not: see `ParallelMapper._go_to`. If it comes in the
middle of a change to the window, nobody can tell: so after an interrupt the `Loader` resets the graph.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, final

from penstock._arguments import seconds, whole_number
from penstock._errors import ClosedError, GraphError, StateError, StateMismatch, is_own_error
from penstock._fetch.error_policy import ErrorBudget, annotate, check_policy
from penstock._fetch.fetch import Fetch
from penstock._fetch.indices import Indices
from penstock._fetch.task import FetchTask, Loaded, Part
from penstock._memory.allocation import afresh, pinned
from penstock._memory.devices import can_pin
from penstock._memory.recycler import Recycler
from penstock._memory.tree import nbytes
from penstock._nodes.delivery_window import DeliveryWindow, Entry
from penstock._nodes.index_node import index_of
from penstock._nodes.inline_work import InlineWork
from penstock._nodes.node import EndOfEpoch, Node, State, fields
from penstock._nodes.sharder import ranks_of
from penstock._random.orders import checked_seed
from penstock._workers.inline_pool import InlinePool
from penstock._workers.meter import Meter, Totals, now, traced
from penstock._workers.pool import IDLE, Job, Pool, SplitJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._fetch.error_policy import OnError
    from penstock._memory.allocation import Allocate
    from penstock._nodes.auto_workers import AutoWorkers
    from penstock._nodes.draw_watch import DrawWatch
    from penstock._nodes.lane_owners import LaneOwners
    from penstock._nodes.node import BaseNode
    from penstock._statistics import NodeStatistics
    from penstock._workers.blocked import Blocked
    from penstock._workers.pool import StartMethod


T = TypeVar("T", covariant=True)

_logger = logging.getLogger("penstock")


@final
class ParallelMapper(Node[T]):
    """Apply ``map_fn`` to the items of ``source`` in parallel workers that live as long as the node.

    Args:
        source: The items; read in the thread that calls ``next``.
        map_fn: A `Fetch`, or any callable of one value (for an index-level item: the index, or the list of indices). Worker
            processes get it once.
        num_workers: Number of threads or processes; 0 applies ``map_fn`` in the caller's thread. ``"auto"``: begins with one, and finds while it
            runs how many are worth it, within the process's cores and memory; see `WorkerChoice`.
        in_order: Deliver items in the order of ``source``. If False, deliver them as they are done, but never an item of the next epoch
            before the end of this one. A state with ``in_order=False`` belongs to this rank and this world size.
        method: ``"thread"`` or ``"process"``.
        multiprocessing_context: A start method or context; default: multiprocessing's.
        max_concurrent: Bound on the items in progress; default ``num_workers * prefetch_factor``.
        prefetch_factor: Items in progress per worker; default 2; 4 if the first item turns out to have at most 1 MiB, 8 if 64 KiB.
        timeout: Seconds that ``next`` waits for an item before ``TimeoutError``; None waits forever. It has no effect without workers.
            The item is lost, and the next call returns the one after it. A worker process that was in the middle of it is killed and
            replaced, which counts towards ``max_restarts``; a thread cannot be stopped, and is abandoned.
        worker_init_fn: Called with the worker's number in each worker process as it starts.
        seed: Seed of the samples' random numbers; default: the seed of the order.
        seed_global_rngs: Seed the global generators of ``random``, ``numpy.random`` and torch for each sample, in worker processes and
            inline; in threads they are never touched, and a warning names what draws from them there, unless this is False. After four batches that drew nothing, seeding stops; if a later batch draws,
            it is loaded a second time, seeded. Use ``"always"`` if samples only inspect a generator (``torch.initial_seed()``) or restore
            it themselves (``torch.random.fork_rng``): that cannot be detected. Without workers and upstream of a `Prefetcher`, `PinMemory`
            or `ToDevice`, samples that draw are loaded only while the consumer waits for them, so that the two never draw at the same
            time; the log says so. There, a batch that is the first to draw after four that did not goes unnoticed.
        pin_memory: If there is an accelerator, make batches in page-locked memory right away. No effect with worker processes.
        prefetch_next_epoch: Work on the next epoch before the consumer asks for it.
        max_restarts: Worker processes that may die and be replaced before `WorkerDied`, in total; default 8, or twice the number of
            workers if that is more.
        on_error: How to handle an ``Exception`` from loading a sample; all but ``"raise"`` need a `Fetch` as ``map_fn``.
            ``"raise"``: the batch is lost, and ``next`` raises the exception. ``"skip"``: the sample is left out, and its batch is
            shorter. A function ``(exception, index, epoch, position)`` is called where the sample was loaded; its result takes the
            sample's place, or leaves it out if it is `SKIP`. A batch with no samples left raises `SampleError`.
        max_errors: Samples that may fail before ``next`` raises `SampleError`: an ``int`` is a total, a ``float`` is a share of any
            1000 consecutive samples; None: no bound.

    Raises:
        ValueError: An argument makes no sense; or the dataset has a ``set_epoch``, which several threads would call concurrently.
    """

    __module__ = "penstock.nodes"

    def __init__(
        self,
        source: BaseNode[Any],
        map_fn: Callable[[Any], T],
        num_workers: int | Literal["auto"],
        in_order: bool = True,
        method: Literal["thread", "process"] = "thread",
        multiprocessing_context: StartMethod | None = None,
        max_concurrent: int | None = None,
        *,
        prefetch_factor: int | None = None,
        timeout: float | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        seed: int | None = None,
        seed_global_rngs: bool | Literal["always"] = True,
        pin_memory: bool = False,
        prefetch_next_epoch: bool = True,
        max_restarts: int | None = None,
        on_error: OnError = "raise",
        max_errors: float | None = None,
    ) -> None:
        super().__init__(source)
        if not callable(map_fn):
            raise ValueError(f"map_fn must be callable, and {map_fn!r} is not. For a dataset, pass Fetch(dataset).")
        auto: AutoWorkers | None = None
        if isinstance(num_workers, str) and num_workers == "auto":
            from penstock._nodes.auto_workers import AutoWorkers

            auto, num_workers = AutoWorkers(), 1
        most_workers = num_workers = whole_number("num_workers", num_workers, 0, remedy='Or pass "auto".')
        timeout = seconds("timeout", timeout)
        if auto is not None:
            most_workers = auto.most
            if method == "process" and isinstance(map_fn, Fetch) and map_fn.lanes:
                raise ValueError(
                    f"num_workers='auto' changes the number of workers as it runs, and {type(map_fn.dataset).__name__} is read in lanes, each by one worker process, "
                    f'forward. Say how many (num_workers=2), or use method="thread", where threads share what they have read.'
                )
        if prefetch_factor is not None:
            prefetch_factor = whole_number("prefetch_factor", prefetch_factor, 1)
        if max_concurrent is not None:
            max_concurrent = whole_number("max_concurrent", max_concurrent, 1)
        if max_restarts is not None:
            max_restarts = whole_number("max_restarts", max_restarts, 0)
        if method not in ("thread", "process"):
            raise ValueError(f"method={method!r} is neither 'thread' nor 'process'.")
        check_policy(on_error, max_errors)
        if on_error != "raise" and not isinstance(map_fn, Fetch):
            raise ValueError(
                "on_error handles single samples of a batch, and only Fetch(dataset) loads them one by one. Leave on_error out, and let your function catch its own errors."
            )
        facts = index_of(self.source).facts
        if not in_order and facts.carries_over_epochs:
            raise GraphError(
                "in_order=False delivers some items before older ones, and this source begins an epoch at one place, where the one before was left. Use "
                "in_order=True, or data whose shards are counted."
            )
        seed = facts.settings.get("seed", 0) if seed is None else checked_seed(seed)
        self.map_fn = map_fn
        self.in_order = in_order
        self.num_workers = num_workers
        self._auto = auto
        self._most_workers = most_workers
        self._timeout = timeout
        self._prefetch_next_epoch = prefetch_next_epoch and facts.may_run_ahead and num_workers > 0
        self._tolerance = None if on_error == "raise" else ErrorBudget(max_errors)
        self._max_concurrent = max_concurrent if num_workers else 1
        self._per_worker = prefetch_factor or _FEW  # items in progress
        self._most_under_way = self._depth()
        self._at_once = not num_workers and self._tolerance is None
        self._decides = max_concurrent is None and prefetch_factor is None  # on how many are in progress
        self._undecided = num_workers > 0 and (self._decides or auto is not None)  # until the first item shows its size
        self._inline = InlineWork(map_fn, seed, False if method == "thread" and num_workers else seed_global_rngs, on_error)
        self._work = work = self._inline.seeded
        if work.epoch_aware and num_workers and method == "thread":
            raise ValueError(
                f"{type(work.epoch_aware[0]).__name__}.set_epoch would be called while other threads load samples of another epoch. Use "
                f'method="process", or have the dataset read penstock.sample().epoch and rename its set_epoch.'
            )
        if num_workers and method == "process":
            from penstock._workers.process_pool import check_processes

            check_processes(multiprocessing_context)
        self._method = method
        self._watches_draws = method == "thread" and num_workers > 0 and seed_global_rngs is not False
        self._lanes = map_fn.lanes if method == "process" and num_workers > 1 and isinstance(map_fn, Fetch) else None
        self._pin_memory = pin_memory
        self._seed = seed
        self._of_processes: dict[str, Any] = {
            "queue_size": prefetch_factor or _MANY,
            "refill_at": None if prefetch_factor else _MANY // 2,
            "max_restarts": max(8, 2 * most_workers) if max_restarts is None else max_restarts,
            "multiprocessing_context": multiprocessing_context,
            "worker_init_fn": worker_init_fn,
        }
        # These are made at the first reset, so that a graph can be forked and pickled until then.
        self._allocate: Allocate | None = None
        self._pool: Pool | None = None
        self._owners: LaneOwners | None = None
        self._draws: DrawWatch | None = None
        self._blocked: Blocked | None = None  # of `_draws`, for `next`
        self._closed = False
        self._stale = False
        self._said = False
        self._window = DeliveryWindow(in_order)
        self._at: State | None = (
            None  # where the source is, known by its identity; None while it is read, because an exception may come out of it
        )
        self._measured = Measured()

    def details(self) -> dict[str, Any]:
        method = {"method": self._method} if self.num_workers else {}
        auto = {"auto": True} if self.auto else {}
        return {"map_fn": self.map_fn, "num_workers": self.num_workers, **auto, **method, "in_order": self.in_order}

    def reset(self, initial_state: State | None = None) -> None:
        super(Node, self).reset(initial_state)
        delivered: list[int] = []
        if initial_state is not None and "delivered" in initial_state:
            self._check_rank(initial_state)
            delivered, initial_state = initial_state["delivered"], initial_state["source"]
        pool = self._staff()
        if not self.in_order and not self._said and ranks_of(self)[1] > 1:
            self._said = True
            _logger.warning(
                "in_order=False: each rank's state is its own and loads on that rank only. Save every rank's, or use in_order=True."
            )
        if self._auto is not None:
            self._auto.restart()
        pool.discard()
        pool.start()
        self.source.reset(initial_state)
        self._at = self.source.get_state()
        self._window.restart(self._at, delivered)

    def next(self) -> T:
        window = self._window
        if self._at_once and window.is_clear and (now_done := self._done_at_once()) is not _HELD:
            return cast("T", now_done)
        if window.unsettled:
            window.settle()  # The last call raised. Its item counts as delivered only now: a state saved in between retries it.
        if self._auto is not None:
            self._adjust(self._auto)
        blocked = self._blocked
        if alone := blocked is not None and blocked.changed is not None:
            self._alone()
        self._fill(1 if alone else self._most_under_way)
        entry = self._awaited()
        job = entry.job
        if job is None and not isinstance(entry.value, BaseException):
            if self._auto is not None:
                self._auto.mark()
            window.deliver(entry)
            return cast("T", entry.value)  # the mark
        try:
            value = self._value(job) if job is not None else entry.raise_value()
        except Exception:
            window.fail(entry)
            self._measured.errors += 1
            raise
        if self._undecided:
            self._undecided = False
            self._learn(nbytes(value))
        if self._draws is not None and blocked is not None and blocked.changed is not None:
            self._draws.judge()  # may warn, and so raise: the batch is not lost
        elif self.num_workers:
            self._fill(
                self._most_under_way + 1
            )  # now, so that the workers are busy while the caller trains; + 1 because this entry still counts
        window.deliver(entry)  # the last step: see the top of this file
        return value

    def get_state(self) -> State:
        window = self._window
        if not window.ahead:
            return cast("State", window.base)
        rank, world_size = ranks_of(self)
        return {"source": window.base, "delivered": list(window.ahead), "rank": rank, "world_size": world_size}

    def start_of(self, epoch: int, after: State | None = None) -> State:
        return super().start_of(epoch, after)

    def check(self, state: Any) -> None:
        if not isinstance(state, dict) or "delivered" not in state:
            return super().check(state)
        delivered = fields(state, source=dict, delivered=list, rank=int, world_size=int)["delivered"]
        if not all(isinstance(k, int) and not isinstance(k, bool) and 0 <= k <= _FARTHEST for k in delivered) or delivered != sorted(
            set(delivered)
        ):
            raise StateError(f"'delivered' in a state must be increasing whole numbers from 0 to {_FARTHEST}, not {delivered!r:.80}.")
        self.source.check(state["source"])

    @property
    def holds_error(self) -> bool:
        """Whether the source has raised, and the consumer has yet to come to that."""
        return self._window.holds_error

    def interrupt(self) -> None:
        if self._pool is not None:
            self._pool.interrupt()
        self.source.interrupt()

    def shutdown(self) -> None:
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown()
        self._window.restart(self._window.base, self._window.ahead)
        self.source.shutdown()

    def statistics(self, elapsed_s: float = 0.0, items: int = 0) -> tuple[NodeStatistics, ...]:
        self.source._was_read(self._measured.source_ns)
        return super().statistics(elapsed_s, items)

    def _was_read(self, ns: int) -> None:
        self._read_ns = ns

    def _items_read(self, items: int) -> int:
        return self._measured.tasks + self._window.under_way

    def _totals(self) -> Totals:
        """What all workers have counted so far, and the caller's thread."""
        pool = [] if self._pool is None else self._pool.counted()
        return Totals([*self._measured.ended, *pool, self._inline.meter.counted()])

    def _stages(self) -> dict[str, Any]:
        totals, pool, in_threads = self._totals(), cast("Any", self._pool), self.num_workers and self._method == "thread"
        return {
            "samples": self._measured.samples,
            **totals.stages,
            **({"transfer": pool.unpacked()} if hasattr(pool, "unpacked") else {}),
            "load_cpu_share": min(1.0, totals.cpu_ns / totals.wall_ns) if totals.wall_ns else None,
            "lock_wait_share": totals.waits / totals.looks if totals.looks and in_threads else None,
        }

    def _counted(self, elapsed_s: float, items: int) -> NodeStatistics:
        from penstock._statistics import WorkerStatistics

        measured, totals, own = self._measured, self._totals(), super()._counted(elapsed_s, items)
        workers = WorkerStatistics(self._method if self.num_workers else "inline") if self._pool is None else self._pool.statistics()
        available_ns = (
            max(1, self.num_workers) * (totals.last - totals.first)
            if self._auto is None
            else self._auto.available_ns(totals.first, totals.last)
        )
        idle_s = (available_ns - totals.busy_ns) / max(1, self.num_workers) / 1e9
        failures = None if self._tolerance is None else self._tolerance.statistics()
        return dataclasses.replace(
            own,
            consumer_wait_s=max(0.0, idle_s) if self.num_workers else own.consumer_wait_s,
            work_s=totals.busy_ns / 1e9,
            ready=self._window.ready(),
            ready_mean=measured.ready / measured.looks if measured.looks else 0.0,
            depth=self._most_under_way if self.num_workers else 0,
            errors=measured.errors if failures is None else failures.failed,
            workers=dataclasses.replace(
                workers,
                busy_share=min(1.0, totals.busy_ns / available_ns) if available_ns else 0.0,
                wait_s=(measured.wait_ns if self.num_workers else totals.busy_ns) / 1e9,
                tasks=workers.tasks if self.num_workers else measured.tasks,
                choice=None if self._auto is None else self._auto.choice,
                draws=None if self._draws is None else self._draws.said,
            ),
            failures=failures,
        )

    @property
    def auto(self) -> bool:
        """Whether the node looks for the number of its workers itself."""
        return self._auto is not None

    @property
    def workers(self) -> str:
        """Who does the work, in words."""
        if not self.num_workers:
            return "no workers"
        plural = "" if self.num_workers == 1 else "es" if self._method == "process" else "s"
        return f"{self.num_workers} worker {self._method}{plural}{' (auto)' * self.auto}"

    @property
    def draws(self) -> DrawWatch | None:
        """What watches worker threads for draws from the global generators; to be asked from the first `reset` on."""
        if self._draws is None and self._watches_draws:
            from penstock._nodes.draw_watch import DrawWatch

            self._draws = DrawWatch(self._work)
            self._blocked = self._draws.blocked
        return self._draws

    @property
    def in_step(self) -> bool:
        """See `InlineWork.in_step`."""
        if self._draws is not None and (self._draws.trying or not self._measured.tasks):
            return True  # the first item shows most
        return (not self.num_workers or (self._lanes is not None and self._inline.seeded.collates_itself)) and self._inline.in_step

    def refresh(self) -> None:
        """Replace the workers at the next `reset`, so that they get the dataset as it is now in this process. Starts nothing by itself."""
        self._stale = True

    def _staff(self) -> Pool:
        """The pool of workers, with memory for their results. A new pool after `refresh`."""
        if self._closed and self.num_workers:
            raise ClosedError("these workers have ended; build a new loader.")
        if self._stale and self._pool is not None:
            self._pool.shutdown()
            self._measured.ended += self._pool.counted()
            self._pool = None
        self._stale = False
        if self._pool is None:
            self._allocate = pinned if self._pin_memory and can_pin() else Recycler(self._depth(self._most_workers)).allocate
            if not self.num_workers:
                self._pool = InlinePool(self._inline, self._allocate, self._inline.meter)
            elif self._method == "thread":
                from penstock._workers.thread_pool import ThreadPool

                place = None if self.draws is None else self.draws.place
                self._pool = ThreadPool(self._work, self.num_workers, most=self._most_workers, allocate=self._allocate, place=place)
            else:
                from penstock._nodes.lane_owners import LaneOwners
                from penstock._workers.process_pool import ProcessPool

                options = self._of_processes
                for one in traced:
                    options = {**options, "worker_init_fn": one.in_worker(options["worker_init_fn"])}
                self._pool = ProcessPool(self._work, self.num_workers, most=self._most_workers, seed=self._seed, **options)
                self._owners = None if self._lanes is None else LaneOwners(self._lanes, ranks_of(self)[1], self.num_workers)
        return self._pool

    def _depth(self, workers: int | None = None) -> int:
        """Items in progress, at most."""
        return (
            (self.num_workers if workers is None else workers) * self._per_worker if self._max_concurrent is None else self._max_concurrent
        )

    def _learn(self, size: float) -> None:
        """The first item has so many bytes."""
        if self._decides:
            self._per_worker = _in_progress(size)
            self._most_under_way = self._depth()
        if self._auto is not None and self._max_concurrent is None:
            self._auto.ahead_bytes = int(size) * self._per_worker

    def _alone(self) -> None:
        """The next item is to be made alone, see `DrawWatch`: once what is in progress was delivered."""
        pool: Any = self._pool
        if self._draws is not None and not self._window.under_way:
            self._draws.begin(pool.threads)

    def _adjust(self, auto: AutoWorkers) -> None:
        """Have as many workers as ``num_workers="auto"`` finds right. An interrupt leaves the rest to the next call."""
        pool: Any = self._pool
        wanted = auto.look(pool, self._measured.wait_ns, self._most_under_way)
        if wanted != self.num_workers:
            number = pool.resize(wanted)
            self._most_under_way = self._depth(number)
            auto.resized(number, wanted, self._most_under_way)
            self.num_workers = number  # last: until then the next call does all of it again

    def _fill(self, most: int) -> None:
        """Pull items and submit them until ``most`` jobs are under way."""
        window, source, measured = self._window, self.source, self._measured
        while window.under_way < most and window.has_room(most, self._prefetch_next_epoch):
            self._go_to(window.place)
            item: Any = None
            try:
                began = now()
                item = source.next()
                ended = now()
                measured.source_ns += ended - began
                for one in traced:
                    one.read(source, began, ended)
                place = source.get_state()
                if isinstance(item, EndOfEpoch):
                    entry = Entry(item, None, place)
                else:
                    entry = Entry(None, None if window.comes_delivered else self._submitted(item), place)
            except StopIteration:
                window.exhaust()
                return
            except Exception as exc:  # from the source, or from submitting the item; `next` raises it when its turn comes
                if not is_own_error(exc):
                    raise
                if item is not None:
                    annotate(exc, f"while handing over {self._work.name(item, IDLE)}")
                place = source.get_state()
                entry = Entry(exc, None, place)
            self._at = place
            window.push(entry)

    def _go_to(self, place: State) -> None:
        """See that the source is at ``place``. It is not if an exception (Ctrl-C) came between an earlier read and the entry for it: that is read again."""
        at, self._at = self._at, None
        if at is not place:
            self.source.reset(place)

    def _done_at_once(self) -> Any:
        """The next item, made in this thread past the window, or the mark; `_HELD` if it raises, or if there is none: the window knows.

        An interrupt leaves the window as it was, so the next call does all of it again.
        """
        window, source, measured, words = self._window, self.source, self._measured, self._inline.meter.words
        if self._at is not window.base:
            self._go_to(window.base)
        self._at = None
        try:
            asked = now()
            item = source.next()
            began = now()
            measured.source_ns += began - asked
            for one in traced:
                one.read(source, asked, began)
        except StopIteration:
            self._at = window.base
            window.exhaust()
            return _HELD
        except Exception as exc:
            if not is_own_error(exc):
                raise
            place = source.get_state()
            self._at = place
            window.push(Entry(exc, None, place))
            return _HELD
        place = source.get_state()
        if isinstance(item, EndOfEpoch):
            self._at = window.base = place
            return item
        words[_SINCE] = began
        try:
            value = self._inline(item, self._allocate or afresh)
        except BaseException as exc:
            if not is_own_error(exc):
                raise
            job = Job(item)
            job.error, job.done = exc, True
            self._inline.meter.end()
            self._at = place
            window.push(Entry(None, job, place))
            return _HELD
        ended = words[_LAST] = now()
        words[_BUSY] += ended - began
        if not words[_FIRST]:
            words[_FIRST] = began
        for one in traced:
            one.task(item, began, ended)
        positions = getattr(item, "positions", 0)
        measured.tasks += 1
        measured.samples += 1 if isinstance(positions, int) else len(positions)
        self._at = window.base = place  # the last step: see the top of this file
        return value

    def _submitted(self, item: Any) -> Job | SplitJob:
        """Submit ``item``: its rows to the owners of their lanes if it has any, otherwise all of it to anybody.

        If the pipeline is empty, split it among all workers, so that the first batch takes the time of a few samples.
        """
        pool: Any = self._pool
        work = self._work
        if self.num_workers > 1 and isinstance(work, FetchTask):
            if self._owners is not None and isinstance(item, Indices):
                rows = self._owners.rows(item)
                if item.is_batch and (len(rows) > 1 or (rows and work.collates_itself)):
                    return self._split(work, item, [work.part(item, own) for own in rows.values()], [*rows])
                one: Job = pool.submit(item, next(iter(rows), None))
                return one
            alone = self._draws is not None and self._draws.trying
            if not self._window.under_way and not alone and (parts := work.parts(item, self.num_workers, here=self._method == "thread")):
                return self._split(work, item, parts, [None] * len(parts))
        job: Job = pool.submit(item)
        return job

    def _split(self, work: FetchTask, item: Indices, parts: list[Part], to: list[int | None]) -> SplitJob:
        pool: Any = self._pool
        jobs, allocate = list(map(pool.submit, parts, to)), self._allocate or afresh
        collate = self._inline if work.collates_itself else work.inline
        if self._draws is not None:  # what it draws counts as drawn in a worker
            collate = partial(self._draws.place.waiting, collate)

        def collated(values: list[Any]) -> Any:
            began, loaded = now(), Loaded(item, parts, values)
            value = collate(loaded, allocate)
            for one in traced:
                one.task(loaded, began, now())
            return value

        return SplitJob(item, jobs, collated)

    def _awaited(self) -> Entry:
        """Wait for the entry to deliver next."""
        candidates = self._window.candidates()
        if not candidates:
            raise StopIteration
        measured = self._measured
        if self.num_workers and not measured.tasks % _LOOK:
            measured.looks += 1
            measured.ready += self._window.ready()
        while True:
            for entry in candidates:
                if entry.job is None or entry.job.done:
                    return entry
            pool: Any = self._pool
            if not self.num_workers:
                pool.wait([candidates[0].job], None)
                continue
            began = now()
            try:
                pool.wait(_under_way(candidates), self._timeout)
            finally:
                measured.wait_ns += now() - began

    def _value(self, job: Job | SplitJob) -> T:
        """The value of ``job``; raises its error, or the error of an exhausted error budget."""
        positions, measured = getattr(job.task, "positions", 0), self._measured
        samples = 1 if isinstance(positions, int) else len(positions)
        measured.tasks += 1
        measured.samples += samples
        value: T = job.result()
        if self._tolerance is not None:
            value = self._tolerance.passed(samples, value, "" if job.worker == IDLE else f" in worker {job.worker}", self.get_state())
        return value

    def _check_rank(self, state: State) -> None:
        saved, now = (state["rank"], state["world_size"]), ranks_of(self)
        if saved != now:
            raise StateMismatch(
                f"rank {saved[0]} of {saved[1]} saved this state with in_order=False, so it lists the items that rank had delivered; "
                f"this is rank {now[0]} of {now[1]}. Load this rank's own state at the same world size, or train with in_order=True."
            )


class Measured:
    """What a `ParallelMapper` has counted of its jobs."""

    def __init__(self) -> None:
        self.source_ns = 0  # in the source
        self.wait_ns = 0  # for the workers
        self.tasks = self.samples = self.errors = 0
        self.ready = self.looks = 0  # items that were ready, and how often that was counted
        self.ended: list[list[int]] = []  # what workers had counted that were replaced by `refresh`


def _under_way(entries: list[Entry]) -> list[Job]:
    return [job for entry in entries for job in entry.job.under_way]  # a new list: `SplitJob` may answer with its own


def _in_progress(size: float) -> int:
    """Items in progress per worker for items of ``size`` bytes. The smaller they are, the more of their cost is waking a worker."""
    return _MANY if size <= 2**16 else _SOME if size <= 2**20 else _FEW


_FEW, _SOME, _MANY = 2, 4, 8
_HELD = object()
_SINCE, _FIRST, _LAST, _BUSY = Meter.SINCE, Meter.FIRST, Meter.LAST, Meter.BUSY
_FARTHEST = 2**16
"""Largest distance from the oldest item that a state may list. The window keeps it smaller, but states come from files."""
_LOOK = 16
"""One in so many times, the items that are ready are counted."""
