"""Mapper and ParallelMapper: the data level, where items become data.

The parallel one pulls items ahead into a `DeliveryWindow`, each with the source's state after the pull, so the state of the item handed out is
simply its entry's: no snapshots, no polling, nothing to reorder.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, final

from penstock._arguments import seconds, whole_number
from penstock._errors import ClosedError, GraphError, StateError, StateMismatch
from penstock._fetch.error_policy import ErrorBudget, check_policy
from penstock._fetch.fetch import Fetch
from penstock._fetch.task import FetchTask, annotate
from penstock._memory.allocation import afresh, pinned
from penstock._memory.devices import can_pin
from penstock._memory.recycler import Recycler
from penstock._memory.tree import nbytes
from penstock._nodes.delivery_window import DeliveryWindow, Entry
from penstock._nodes.inline_work import InlineWork
from penstock._nodes.node import EndOfEpoch, Node, State, fields
from penstock._random.orders import checked_seed
from penstock._statistics import ProcessStatistics, ThreadStatistics
from penstock._workers.inline_pool import InlinePool
from penstock._workers.pool import IDLE, Job, Pool, SplitJob
from penstock._workers.process_pool import ProcessPool, check_processes
from penstock._workers.thread_pool import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._fetch.error_policy import OnError
    from penstock._memory.allocation import Allocate
    from penstock._nodes.node import BaseNode
    from penstock._workers.pool import StartMethod


T = TypeVar("T", covariant=True)

_logger = logging.getLogger("penstock")


@final
class ParallelMapper(Node[T]):
    """Apply ``map_fn`` to the items of ``source`` in parallel workers that live as long as the node.

    Args:
        source: The items; read in the thread that calls ``next``.
        map_fn: A `Fetch`, or any callable of one value (for an index-level item: the index, or the list of them). Worker
            processes get it once.
        num_workers: How many threads or processes; 0 applies ``map_fn`` in the caller's thread.
        in_order: Hand items out in the order of ``source``. If False, as they are done, but never one epoch before the end of
            the other; such a state then belongs to this rank and this world size.
        method: ``"thread"`` or ``"process"``.
        multiprocessing_context: A start method or context; default: multiprocessing's.
        max_concurrent: Items in work at once, at most; default ``num_workers * prefetch_factor``.
        prefetch_factor: Items in work for each worker; default 2, and 8 where the first item turns out to be small (64 KiB).
        timeout: Seconds that ``next`` waits for an item before ``TimeoutError``; None waits for ever, and inline there is nothing to
            wait for. The item is lost, and the next one comes next. A worker process that was in the middle of it is killed and
            replaced (which counts for ``max_restarts``); a thread cannot be stopped, and is left to itself.
        worker_init_fn: Called with the worker's number in each worker process as it starts.
        seed: Of the random numbers of samples; default: that of the order.
        seed_samples: Seed the global generators of ``random``, ``numpy.random`` and torch for each sample, in worker processes and
            inline; in threads they are never touched. After four batches that drew nothing, seeding stops; if a later batch draws,
            it is loaded a second time, seeded. Use ``"always"`` if samples only inspect a generator (``torch.initial_seed()``) or restore
            it themselves (``torch.random.fork_rng``): that cannot be detected. Inline under a `Prefetcher`, `PinMemory` or `ToDevice`
            samples that draw are loaded only while the consumer waits for them, so that it never draws beside them; the log says so.
            A batch there that is the first to draw, after four that did not, is not noticed either.
        pin_memory: Where there is an accelerator, make batches in page-locked memory at once; not in worker processes.
        run_ahead: Work on the next epoch before it is asked for.
        max_restarts: How many worker processes may die and be replaced before `WorkerDied`, all of them together; default 8, or
            twice the number of workers where that is more.
        on_error: What becomes of a sample whose loading raises an ``Exception``; ``map_fn`` must be a `Fetch` for all but the first.
            ``"raise"``: the batch is lost, and ``next`` raises it. ``"skip"``: it is left out, and its batch is shorter. A function
            ``(exception, index, epoch, position)``, called where the sample was loaded: what it returns takes the sample's place, or
            leaves it out if that is `SKIP`. A batch of which nothing is left raises `SampleError`.
        max_errors: How many samples may fail before ``next`` raises `SampleError`: an ``int`` in all, a ``float`` that share of any
            1000 samples in a row; None: any number.

    Raises:
        ValueError: An argument makes no sense; or the dataset has a ``set_epoch``, which threads would call under one another.
    """

    def __init__(
        self,
        source: BaseNode[Any],
        map_fn: Callable[[Any], T],
        num_workers: int,
        in_order: bool = True,
        method: Literal["thread", "process"] = "thread",
        multiprocessing_context: StartMethod | None = None,
        max_concurrent: int | None = None,
        *,
        prefetch_factor: int | None = None,
        timeout: float | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        seed: int | None = None,
        seed_samples: bool | Literal["always"] = True,
        pin_memory: bool = False,
        run_ahead: bool = True,
        max_restarts: int | None = None,
        on_error: OnError = "raise",
        max_errors: float | None = None,
    ) -> None:
        super().__init__(source)
        if not callable(map_fn):
            raise ValueError(f"map_fn must be callable, and {map_fn!r} is not. For a dataset write Fetch(dataset).")
        num_workers, timeout = whole_number("num_workers", num_workers, 0), seconds("timeout", timeout)
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
                "on_error looks at each sample of a batch, and only a Fetch(dataset) loads them one by one; your own function can catch what it raises. Leave on_error out."
            )
        seed = self.source.settings().get("seed", 0) if seed is None else checked_seed(seed)
        self.map_fn = map_fn
        self.in_order = in_order
        self.num_workers = num_workers
        self._timeout = timeout
        self._run_ahead = run_ahead and self.may_run_ahead and num_workers > 0
        self._tolerance = None if on_error == "raise" else ErrorBudget(max_errors)
        self._in_work = 1 if not num_workers else max_concurrent if max_concurrent is not None else num_workers * (prefetch_factor or _FEW)
        self._undecided = num_workers > 0 and max_concurrent is None and prefetch_factor is None  # until the first item shows its size
        self._inline = InlineWork(map_fn, seed, False if method == "thread" and num_workers else seed_samples, on_error)
        self._work = work = self._inline.seeded
        if work.epoch_aware and num_workers and method == "thread":
            raise ValueError(
                f"{type(work.epoch_aware[0]).__name__}.set_epoch would be called while other threads load samples of another epoch. Use "
                f'method="process", or have the dataset read penstock.sample().epoch and rename its set_epoch.'
            )
        if num_workers and method == "process":
            check_processes(multiprocessing_context)
        self._method = method
        self._pin_memory = pin_memory
        self._seed = seed
        self._of_processes: dict[str, Any] = {
            "queue_size": prefetch_factor or _MANY,
            "refill_at": None if prefetch_factor else _MANY // 2,
            "max_restarts": max(8, 2 * num_workers) if max_restarts is None else max_restarts,
            "multiprocessing_context": multiprocessing_context,
            "worker_init_fn": worker_init_fn,
        }
        # None of these is there before the first reset, so that a graph can be forked and pickled until then.
        self._allocate: Allocate | None = None
        self._pool: Pool | None = None
        self._closed = False
        self._stale = False
        self._said = False
        self._window = DeliveryWindow(in_order)

    def reset(self, initial_state: State | None = None) -> None:
        super(Node, self).reset(initial_state)
        delivered: list[int] = []
        if initial_state is not None and "delivered" in initial_state:
            self._check_rank(initial_state)
            delivered, initial_state = initial_state["delivered"], initial_state["source"]
        pool = self._staff()
        if not self.in_order and not self._said and self.ranks()[1] > 1:
            self._said = True
            _logger.warning(
                "in_order=False: each rank's state is its own and loads on that rank only. Save every rank's, or use in_order=True."
            )
        pool.discard()
        pool.start()
        self.source.reset(initial_state)
        self._window.restart(self.source.get_state(), delivered)

    def next(self) -> T:
        window = self._window
        if window.unsettled:
            window.settle()  # An item that raised counts as delivered from the next call on.
        self._fill(self._in_work)
        entry = self._awaited()
        job = entry.job
        if job is None and not isinstance(entry.value, BaseException):
            window.deliver(entry)
            return cast("T", entry.value)  # the mark
        try:
            value = self._value(job) if job is not None else entry.raise_value()
        except Exception:
            window.fail(entry)
            raise
        if self._undecided:
            self._undecided = False
            if nbytes(value) <= _SMALL:
                self._in_work = self.num_workers * _MANY
        if self.num_workers:
            self._fill(self._in_work + 1)  # Now, and not when the next batch is asked for: the workers go on while the caller trains.
        window.deliver(entry)  # The last step: if Ctrl-C comes before it, nobody has got this item, and the state does not say so.
        return value

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Any:
        raise GraphError(
            "a ParallelMapper cannot be dealt or batched, because its items are done already. Put Sharder and Batcher upstream of it."
        )

    def get_state(self) -> State:
        window = self._window
        if not window.ahead:
            return cast("State", window.base)
        rank, world_size = self.ranks()
        return {"source": window.base, "delivered": list(window.ahead), "rank": rank, "world_size": world_size}

    def start_of(self, epoch: int) -> State | None:
        return self.source.start_of(epoch)

    def remaining(self, state: State | None = None) -> int | None:
        state = self.get_state() if state is None else state
        if "delivered" not in state:
            return self.source.remaining(state)
        left = self.source.remaining(state["source"])
        return None if left is None else left - len(state["delivered"])

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **(self.map_fn.settings() if isinstance(self.map_fn, Fetch) else {})}

    def check(self, state: Any) -> None:
        if not isinstance(state, dict) or "delivered" not in state:
            return super().check(state)
        delivered = fields(state, source=dict, delivered=list, rank=int, world_size=int)["delivered"]
        if not all(isinstance(k, int) and not isinstance(k, bool) and 0 <= k <= _FARTHEST for k in delivered) or delivered != sorted(
            set(delivered)
        ):
            raise StateError(f"'delivered' of a state must be rising whole numbers from 0 to {_FARTHEST}, and {delivered!r:.80} came.")
        self.source.check(state["source"])

    def failure(self) -> BaseException | None:
        return KeyboardInterrupt("while the entries changed") if self._window.torn else self.source.failure()

    def interrupt(self) -> None:
        if self._pool is not None:
            self._pool.interrupt()
        self.source.interrupt()

    def shutdown(self) -> None:
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown()
        self._window.restart(self._window.base)
        self.source.shutdown()

    def statistics(self) -> tuple[Any, ...]:
        workers = self._pool.statistics() if self._pool is not None else _IDLE[self._method if self.num_workers else "inline"]
        failures = None if self._tolerance is None else self._tolerance.statistics()
        return (*self.source.statistics(), *(own for own in (workers, failures) if own is not None))

    @property
    def in_step(self) -> bool:
        """See `InlineWork.in_step`."""
        return not self.num_workers and self._inline.in_step

    def refresh(self) -> None:
        """Hand the dataset to new workers at the next `reset`: for what was changed in it, in this process. Starts nothing by itself."""
        self._stale = True
        super().refresh()

    def _staff(self) -> Pool:
        """The workers, with memory for what they make; new ones, if the dataset was changed."""
        if self._closed and self.num_workers:
            raise ClosedError("these workers have ended; build a new loader.")
        if self._stale and self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._stale = False
        if self._pool is None:
            self._allocate = pinned if self._pin_memory and can_pin() else Recycler(self._in_work).allocate
            if not self.num_workers:
                self._pool = InlinePool(self._inline, self._allocate)
            elif self._method == "thread":
                self._pool = ThreadPool(self._work, self.num_workers, allocate=self._allocate)
            else:
                self._pool = ProcessPool(self._work, self.num_workers, seed=self._seed, **self._of_processes)
        return self._pool

    def _fill(self, most: int) -> None:
        """Pull from the source and hand to the workers, until ``most`` jobs are under way."""
        window = self._window
        while window.under_way < most and window.has_room(most, self._run_ahead):
            window.torn = True  # from the pull until the entry is there
            item: Any = None
            try:
                item = next(self.source)
                if isinstance(item, EndOfEpoch):
                    entry = Entry(item, None, self.source.get_state())
                else:
                    entry = Entry(None, None if window.comes_delivered else self._submitted(item), self.source.get_state())
            except StopIteration:
                window.exhaust()
                return
            except Exception as exc:  # of the source, or of an item that cannot be handed over: an error in its own place
                if item is not None:
                    annotate(exc, f"while handing over {self._work.name(item, IDLE)}")
                entry = Entry(exc, None, self.source.get_state())
            window.push(entry)

    def _submitted(self, item: Any) -> Job | SplitJob:
        """``item`` handed to the workers; to all of them at once where they have nothing else, so that it does not take one its whole time."""
        pool: Any = self._pool
        if self.num_workers > 1 and not self._window.under_way and isinstance(self._work, FetchTask):
            parts = self._work.parts(item, self.num_workers, here=self._method == "thread")
            if len(parts) > 1:
                jobs, together, allocate = [pool.submit(part) for part in parts], self._work.together, self._allocate or afresh
                return SplitJob(item, jobs, lambda values: together(item, parts, values, allocate))
        job: Job = pool.submit(item)
        return job

    def _awaited(self) -> Entry:
        """The entry to hand out next, once it is ready."""
        candidates = self._window.candidates()
        if not candidates:
            raise StopIteration
        while True:
            for entry in candidates:
                if entry.job is None or entry.job.done:
                    return entry
            pool: Any = self._pool
            pool.wait(_under_way(candidates), self._timeout)

    def _value(self, job: Job | SplitJob) -> T:
        """What came of it, or its error."""
        value: T = job.result()
        if self._tolerance is not None:
            samples = len(job.task) if job.task.is_batch else 1
            value = self._tolerance.passed(samples, value, "" if job.worker == IDLE else f" in worker {job.worker}")
        return value

    def _check_rank(self, state: State) -> None:
        saved, now = (state["rank"], state["world_size"]), self.ranks()
        if saved != now:
            raise StateMismatch(
                f"this state was taken with in_order=False by rank {saved[0]} of {saved[1]}, and says what that rank had delivered; "
                f"this is rank {now[0]} of {now[1]}. Load that rank's own state at the same world size, or train with in_order=True."
            )


def _under_way(entries: list[Entry]) -> list[Job]:
    jobs: list[Job] = entries[0].job.under_way
    for entry in entries[1:]:
        jobs += entry.job.under_way
    return jobs


_FEW, _MANY = 2, 8
"""Items in work for each worker: for what is large, and for what is small, of which waking a worker is most of the cost."""
_SMALL = 2**16
"""Bytes."""
_FARTHEST = 2**16
"""How far ahead of the oldest item out-of-order delivery may be; the window bounds it, and states come from files."""
_IDLE = {"inline": None, "thread": ThreadStatistics(0, 0, 0, 0), "process": ProcessStatistics(0, 0, 0, 0, 0, 0, 0)}
"""Before there are any workers."""
