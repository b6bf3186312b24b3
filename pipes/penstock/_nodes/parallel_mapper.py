"""Mapper and ParallelMapper: the data level, where items become data.

The parallel one is a bounded FIFO. Each entry holds a job and the source's state after the pull, so the state of the item handed
out is simply its entry's: no snapshots, no polling, nothing to reorder.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast, final

from penstock._arguments import seconds, whole_number
from penstock._errors import ClosedError, GraphError, StateError, StateMismatch
from penstock._fetch.error_policy import ErrorBudget, check_policy
from penstock._fetch.fetch import Fetch
from penstock._fetch.task import FetchTask, annotate
from penstock._memory.allocation import afresh, pinned
from penstock._memory.devices import can_pin
from penstock._memory.recycler import Recycler
from penstock._memory.tree import nbytes
from penstock._nodes.inline_work import InlineWork
from penstock._nodes.node import EndOfEpoch, Node, State, fields
from penstock._random.orders import checked_seed
from penstock._statistics import ProcessStatistics, ThreadStatistics
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


class _Entry:
    """What was pulled from the source: a job, or something that needs no worker (a mark, or an error)."""

    __slots__ = ("delivered", "job", "state", "value")

    def __init__(self, value: EndOfEpoch | BaseException | None, job: Job | SplitJob | None, state: State) -> None:
        self.value = value
        self.job = job
        self.state = state
        self.delivered = False

    @property
    def ready(self) -> bool:
        return self.job is None or self.job.done

    def raise_value(self) -> NoReturn:
        """Raise the error, and keep it no longer: it knows every frame on its way, and so the graph that this entry is in."""
        error, self.value = self.value, None
        assert isinstance(error, BaseException)
        try:
            raise error
        finally:
            del error


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
        self._run_ahead = run_ahead and self.may_run_ahead
        self._tolerance = None if on_error == "raise" else ErrorBudget(max_errors)
        self._window = max_concurrent if max_concurrent is not None else num_workers * (prefetch_factor or _FEW)
        self._undecided = max_concurrent is None and prefetch_factor is None  # whether many items may be in work
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
        self._entries: deque[_Entry] = deque()
        self._open = 0  # entries with a job that is not delivered; at most the window
        self._pulled = 0  # entries since reset
        self._skip: frozenset[int] = frozenset()  # which of them were delivered before the state was taken
        self._base: State = {}  # the source's state before the oldest entry that is not delivered
        self._state: State = {}
        self._exhausted = False
        self._torn = False  # set while entries change: if it stays, an interrupt came out of the middle of that

    def reset(self, initial_state: State | None = None) -> None:
        super(Node, self).reset(initial_state)
        delivered: list[int] = []
        if initial_state is not None and "delivered" in initial_state:
            self._check_rank(initial_state)
            delivered, initial_state = initial_state["delivered"], initial_state["source"]
        self._staff()
        if not self.in_order and not self._said and self.ranks()[1] > 1:
            self._said = True
            _logger.warning(
                "in_order=False: each rank's state is its own and loads on that rank only. Save every rank's, or use in_order=True."
            )
        if self._pool is not None:
            self._pool.discard()
            self._pool.start()
        self._entries.clear()
        self._open = self._pulled = 0
        self._exhausted = self._torn = False
        self._skip = frozenset(delivered)
        self.source.reset(initial_state)
        self._base = self.source.get_state()
        self._settle()

    def next(self) -> T:
        if self._pool is None and not self._entries and not self._skip:
            return self._at_once()
        if self._entries and self._entries[0].delivered:
            self._settle()  # What raised last time counts as delivered from now on.
        self._fill()
        entry = self._finished()
        job = entry.job
        if job is None and isinstance(entry.value, BaseException):
            entry.delivered = True
            entry.raise_value()
        if job is None:
            self._torn = True
            entry.delivered = True
            self._settle()
            return entry.value  # type: ignore[return-value]  # the mark
        self._open -= 1
        try:
            value = self._value(job)
        except Exception:  # the item's own: it counts as delivered from the next call on
            entry.delivered = True
            job.forget()
            raise
        except BaseException:
            self._open += 1
            raise
        try:
            if self._undecided:
                self._undecided = False
                if nbytes(value) <= _SMALL:
                    self._window = self.num_workers * _MANY
            if self._pool is not None:
                self._fill()  # Now, and not when the next batch is asked for: the workers go on while the caller trains.
        except BaseException:  # Ctrl-C, or a signal's handler: nobody has got this item, and the state must not say so.
            self._open += 1
            raise
        self._torn = True
        entry.delivered = True
        self._settle()
        return value

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Any:
        raise GraphError(
            "a ParallelMapper cannot be dealt or batched, because its items are done already. Put Sharder and Batcher upstream of it."
        )

    def get_state(self) -> State:
        return self._state

    def start_of(self, epoch: int) -> State | None:
        return self.source.start_of(epoch)

    def remaining(self, state: State | None = None) -> int | None:
        state = self._state if state is None else state
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
        return KeyboardInterrupt("while the entries changed") if self._torn else self.source.failure()

    def interrupt(self) -> None:
        if self._pool is not None:
            self._pool.interrupt()
        self.source.interrupt()

    def shutdown(self) -> None:
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown()
        self._entries.clear()
        self.source.shutdown()

    def statistics(self) -> tuple[Any, ...]:
        workers = self._pool.statistics() if self._pool is not None else _IDLE[self._method] if self.num_workers else None
        failures = None if self._tolerance is None else self._tolerance.statistics()
        return (*self.source.statistics(), *(own for own in (workers, failures) if own is not None))

    @property
    def in_step(self) -> bool:
        """See `InlineWork.in_step`."""
        return not self.num_workers and self._inline.in_step

    def refresh(self) -> None:
        """Hand the dataset to new workers at the next `reset`: for what was changed in it, in this process. Starts nothing by itself."""
        self._stale = True

    def _staff(self) -> None:
        """Have memory and workers; new workers, if the dataset was changed."""
        if self._closed and self.num_workers:
            raise ClosedError("these workers have ended; build a new loader.")
        if self._allocate is None:
            self._allocate = pinned if self._pin_memory and can_pin() else Recycler(self._window).allocate
        if self._stale and self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._stale = False
        if self.num_workers and self._pool is None:
            if self._method == "thread":
                self._pool = ThreadPool(self._work, self.num_workers, allocate=self._allocate)
            else:
                self._pool = ProcessPool(self._work, self.num_workers, seed=self._seed, **self._of_processes)

    def _fill(self) -> None:
        """Pull from the source and hand to the workers until the window is full."""
        while self._open < max(1, self._window) and len(self._entries) < 4 * self._window + 4 and not self._blocked():
            self._torn = True
            item: Any = None
            try:
                item = next(self.source)
                entry = self._begun(item)
            except StopIteration:
                self._exhausted, self._torn = True, False
                return
            except Exception as exc:  # of the source, or of an item that cannot be handed over: an error in its own place
                if item is not None:
                    annotate(exc, f"while handing over {self._work.name(item, IDLE)}")
                entry = _Entry(exc, None, self.source.get_state())
            self._open += entry.job is not None
            self._entries.append(entry)
            self._pulled += 1
            self._torn = False
            if self._entries[0].delivered:
                self._settle()  # A state loaded from a run with a wider window: what it had delivered takes no room here.

    def _begun(self, item: Any) -> _Entry:
        state = self.source.get_state()
        if isinstance(item, EndOfEpoch):
            return _Entry(item, None, state)
        if self._pulled in self._skip:
            entry = _Entry(None, None, state)
            entry.delivered = True
            return entry
        job = Job(item) if self._pool is None else self._submitted(self._pool, item)
        return _Entry(None, job, state)

    def _submitted(self, pool: Pool, item: Any) -> Job | SplitJob:
        """``item`` handed to the workers; to all of them at once where they have nothing else, so that it does not take one its whole time."""
        work, allocate = self._work, self._allocate or afresh
        parts = (
            work.parts(item, self.num_workers, here=isinstance(pool, ThreadPool)) if self._open == 0 and isinstance(work, FetchTask) else []
        )
        if len(parts) < 2 or not isinstance(work, FetchTask):
            return pool.submit(item)
        return SplitJob(item, [pool.submit(part) for part in parts], lambda values: work.together(item, parts, values, allocate))

    def _blocked(self) -> bool:
        """Whether nothing may be pulled before the newest entry is delivered."""
        if self._exhausted or not self._entries:
            return self._exhausted
        last = self._entries[-1].value
        empty = isinstance(last, EndOfEpoch) and len(self._entries) > 1 and isinstance(self._entries[-2].value, EndOfEpoch)
        return isinstance(last, BaseException) or empty or (last is not None and not self._run_ahead)

    def _finished(self) -> _Entry:
        """The entry to hand out next, once it is ready: the oldest one, or out of order any before the next mark."""
        choice: list[_Entry] = []
        for entry in self._entries:
            if entry.delivered:
                continue
            if entry.job is None:
                if not choice:
                    return entry
                break
            if entry.job.done:
                return entry
            choice.append(entry)
            if self.in_order:
                break
        if not choice:
            raise StopIteration
        if self._pool is None:
            job = choice[0].job
            assert isinstance(job, Job)
            self._do(job)
            return choice[0]
        while True:
            jobs = [entry.job for entry in choice if entry.job is not None]
            self._pool.wait([one for job in jobs for one in (job.under_way if isinstance(job, SplitJob) else [job])], self._timeout)
            for entry in choice:
                if entry.ready:
                    return entry

    def _at_once(self) -> T:
        """The next item, inline, where nothing is ever under way: without an entry, unless it raises."""
        job = None
        try:
            self._torn = True
            item = next(self.source)
            if isinstance(item, EndOfEpoch):
                value: Any = item
            else:
                job = Job(item)
                self._torn = False
                self._do(job)
                value = self._value(job)
            self._state = self._base = self.source.get_state()
            self._torn = False
        except BaseException as exc:
            self._torn = self._torn and not isinstance(exc, Exception)
            if job is not None or (isinstance(exc, Exception) and not isinstance(exc, StopIteration)):
                entry = _Entry(None, job, self.source.get_state())
                entry.delivered = job is None or (job.done and isinstance(exc, Exception))
                if job is not None and entry.delivered:
                    job.forget()
                self._entries.append(entry)
                self._open = 0 if entry.delivered else 1
            raise
        return cast("T", value)

    def _do(self, job: Job) -> None:
        """Do it in this thread. Ctrl-C is not the item's fault: it goes through, and the job is not done."""
        try:
            job.value = self._inline(job.task, self._allocate or afresh)
        except (Exception, SystemExit, GeneratorExit) as exc:
            job.error = exc
        job.done = True

    def _value(self, job: Job | SplitJob) -> T:
        """What came of it, or its error."""
        value: T = job.result()
        if self._tolerance is not None:
            samples = len(job.task) if job.task.is_batch else 1
            value = self._tolerance.passed(samples, value, "" if job.worker == IDLE else f" in worker {job.worker}")
        return value

    def _settle(self) -> None:
        """Let the state follow what was delivered."""
        self._torn = True
        self._state = self._settled()
        self._torn = False

    def _settled(self) -> State:
        while self._entries and self._entries[0].delivered:
            self._base = self._entries.popleft().state
        if self.in_order and not self._skip:
            return self._base
        ahead = [place for place, entry in enumerate(self._entries) if entry.delivered]
        oldest = self._pulled - len(self._entries)
        ahead += [place - oldest for place in sorted(self._skip) if place >= self._pulled]
        if not ahead:
            return self._base
        rank, world_size = self.ranks()
        return {"source": self._base, "delivered": ahead, "rank": rank, "world_size": world_size}

    def _check_rank(self, state: State) -> None:
        saved, now = (state["rank"], state["world_size"]), self.ranks()
        if saved != now:
            raise StateMismatch(
                f"this state was taken with in_order=False by rank {saved[0]} of {saved[1]}, and says what that rank had delivered; "
                f"this is rank {now[0]} of {now[1]}. Load that rank's own state at the same world size, or train with in_order=True."
            )


_FEW, _MANY = 2, 8
"""Items in work for each worker: for what is large, and for what is small, of which waking a worker is most of the cost."""
_SMALL = 2**16
"""Bytes."""
_FARTHEST = 2**16
"""How far ahead of the oldest item out-of-order delivery may be; the window bounds it, and states come from files."""
_IDLE = {"thread": ThreadStatistics(0, 0, 0, 0), "process": ProcessStatistics(0, 0, 0, 0, 0, 0, 0)}
"""Before there are any workers."""
