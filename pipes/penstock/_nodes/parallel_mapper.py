"""ParallelMapper: turns items into data in parallel workers.

It pulls items ahead into a `DeliveryWindow`. Each entry holds a job and the source's state right after its item was
pulled. So the state after a delivered item is the state in its entry, and there is nothing to snapshot, poll or
reorder. The `Executor` decides which workers run the jobs, and how many at a time. Without workers an item gets an
entry only if something goes wrong (`_done_at_once`).

`next` fills the window twice, before it waits and before it returns. If jobs were submitted only by the next call, the
workers would be idle while the caller trains.

Ctrl-C may interrupt any line. If it comes before `DeliveryWindow.deliver`, the last step, the caller has not received
the item, and the state does not count it. If it comes between a pull and its entry, the source has moved but the window
has not: see `ParallelMapper._go_to`. If it comes in the middle of a change to the window, the window may be
inconsistent, so the `Loader` resets the graph after an interrupt.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, final

from penstock._errors import GraphError, Once, StateError, StateMismatch, is_own_error
from penstock._fetch.error_policy import ErrorBudget, check_policy
from penstock._fetch.fetch import Fetch
from penstock._fetch.indices import Indices, Nothing
from penstock._fetch.shared_values import shared_in
from penstock._nodes.delivery_window import DeliveryWindow, Entry
from penstock._nodes.executor import Executor, samples_of
from penstock._nodes.index_node import index_of
from penstock._nodes.node import EndOfEpoch, Node, State, fields
from penstock._nodes.pools import WorkerOptions
from penstock._nodes.sharder import ranks_of
from penstock._random.orders import checked_seed
from penstock._workers.meter import now, traced
from penstock._workers.pool import IDLE, Job
from penstock._workers.slow_read import SlowRead

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock._fetch.error_policy import OnError
    from penstock._nodes.node import BaseNode
    from penstock._statistics import NodeStatistics
    from penstock._workers.pool import SplitJob, StartMethod


T = TypeVar("T", covariant=True)

_logger = logging.getLogger("penstock")


class ParallelMapper(Node[T]):
    """Apply ``map_fn`` to the items of ``source`` in parallel workers that live as long as the node.

    Args:
        source: Yields the items; read in the thread that calls ``next``.
        map_fn: A `Fetch`, or any callable of one value (for an index-level item: the index, or the list of indices).
            Worker processes receive it once.
        num_workers: Number of threads or processes; 0 applies ``map_fn`` in the caller's thread, and then a `Batcher`
            or a `Sharder` may be downstream. ``"auto"`` begins with one, and adjusts the number at run time within the
            process's cores and memory; see `WorkerChoice`.
        in_order: Deliver items in the order of ``source``. If False, deliver them as they finish, but never an item of
            the next epoch before the end of this one. A state with ``in_order=False`` is valid only on its rank and at
            its world size.
        method: ``"thread"``, ``"process"``, or ``"ray"`` (actors of a Ray cluster, on other machines).
        multiprocessing_context: A start method or context; default: that of ``multiprocessing``.
        max_concurrent: The most items in progress; default: ``num_workers * prefetch_factor``.
        prefetch_factor: Items in progress per worker. Default: 2; 4 if the first item has at most 1 MiB; 8 (Ray: 32) if
            at most 64 KiB.
        timeout: Seconds that ``next`` waits for an item before ``TimeoutError``; None waits forever. It has no effect
            without workers. The item is lost, and the next call returns the one after it. A worker process that was
            working on it is killed and replaced, which counts towards ``max_restarts``; a thread cannot be stopped, and
            is abandoned.
        worker_init_fn: Called with the worker's number in each worker process as it starts.
        seed: Seeds the samples' random numbers; default: the seed of the order.
        seed_global_rngs: Seed the global generators of ``random``, ``numpy.random`` and torch for each sample, in
            worker processes and inline; and the generators that ``map_fn`` holds, such as a dataset's ``self.rng``,
            each by its path. In threads, and for items that come from another mapper and so have no position, they are
            never seeded; a warning names the code that draws from them, unless this is False. After four batches that
            drew nothing, seeding stops; if a later batch draws, it is loaded a second time, seeded. Use ``"always"`` if
            samples only inspect a generator (``torch.initial_seed()``) or restore it themselves
            (``torch.random.fork_rng``), because that cannot be detected. The first sample of each process is loaded
            twice, and the log says if the two differ, unless this is False. Without workers and upstream of a
            `Prefetcher`, `PinMemory` or `ToDevice`, samples that draw are loaded only while the consumer waits for
            them, so that the two never draw at the same time; the log says so. In that case, a batch that is the first
            to draw after four that did not goes unnoticed.
        pin_memory: If there is an accelerator, create batches in page-locked memory. No effect with worker processes.
        prefetch_next_epoch: Work on the next epoch before the consumer requests it.
        max_restarts: Worker processes that may die and be replaced, in total, before `WorkerDied`; default: 8, or twice
            the number of workers if that is more.
        on_error: How to handle an ``Exception`` from loading a sample; all but ``"raise"`` need a `Fetch` as
            ``map_fn``. ``"raise"``: the batch is lost, and ``next`` raises the exception. ``"skip"``: the sample is
            left out, and its batch is shorter. A function ``(exception, index, epoch, position)`` is called where the
            sample was loaded; its result takes the sample's place, or leaves it out if it is `SKIP`. A batch with no
            samples left raises `SampleError`.
        max_errors: Samples that may fail before ``next`` raises `SampleError`: an ``int`` is a total, a ``float`` is a
            share of any 1000 consecutive samples; None: unlimited.
        ray_options: With ``method="ray"``: what each worker needs, as for ``.options()`` of a Ray actor; default:
            ``{"num_cpus": 1}``.

    Raises:
        ValueError: An argument is invalid.
    """

    __module__ = "penstock.nodes"

    def __init__(
        self,
        source: BaseNode[Any],
        map_fn: Callable[[Any], T],
        num_workers: int | Literal["auto"],
        in_order: bool = True,
        method: Literal["thread", "process", "ray"] = "thread",
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
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(source)
        if not callable(map_fn):
            raise ValueError(f"map_fn must be callable, but {map_fn!r} is not. For a dataset, pass Fetch(dataset).")
        options = WorkerOptions(
            num_workers,
            method,
            multiprocessing_context,
            max_concurrent,
            prefetch_factor,
            timeout,
            worker_init_fn,
            pin_memory,
            max_restarts,
            ray_options,
        )
        check_policy(on_error, max_errors)
        if on_error != "raise" and not isinstance(map_fn, Fetch):
            raise ValueError(
                "on_error handles single samples of a batch, but only Fetch(dataset) loads them one by one. Leave "
                "on_error out, and catch errors in your function."
            )
        facts = index_of(self.source).facts
        if not in_order and facts.carries_over_epochs:
            raise GraphError(
                "in_order=False delivers some items before older ones, but this source begins each epoch exactly where "
                "the previous one was left. Use in_order=True, or shards with counts."
            )
        self._seed = facts.settings.get("seed", 0) if seed is None else checked_seed(seed)
        self.map_fn = map_fn
        self.in_order = in_order
        self._options = options
        self.executor = Executor(map_fn, options, self._seed, seed_global_rngs, on_error)
        self._first = first = index_of(self.source).first
        self.executor.generators.leave(sampler=getattr(first, "sampler", None))
        self._prefetch_next_epoch = prefetch_next_epoch and self.num_workers > 0
        first.has_workers = self.num_workers > 0
        roots = {
            "iterable": getattr(first, "iterable", None),
            **self.executor.roots,
            "worker_init_fn": worker_init_fn,
        }
        self._may_share = roots
        self._forward = hasattr(first, "iterable") and self.num_workers > 0
        self._slow_read: SlowRead | None = None  # made at the first read ahead of such a source
        self._tolerance = None if on_error == "raise" else ErrorBudget(max_errors)
        self._at_once = self._keeps_none = not self.num_workers and self._tolerance is None
        self._once = Once()
        self._window = DeliveryWindow(in_order)
        self.passes_ends = True  # False: nothing of an epoch is loaded before the loop asks for it
        # Where the source is, compared by identity; None while it is read, because it may raise.
        self._at: State | None = None
        self._address: Indices | None = None  # of the item that was delivered last
        self._source_ns = 0  # time spent in the source
        self._errors = 0  # errors raised
        self._ready = self._looks = 0  # items that were ready in total, and how often they were counted

    @property
    def num_workers(self) -> int:
        """The current number of workers; ``"auto"`` changes it."""
        return self.executor.num_workers

    def _seeds(self) -> dict[str, Any]:
        return {"sample_seed": self._seed}

    def details(self) -> dict[str, Any]:
        method = {"method": self._options.method} if self.num_workers else {}
        auto = {"auto": True} if self._options.is_auto else {}
        return {"map_fn": self.map_fn, "num_workers": self.num_workers, **auto, **method, "in_order": self.in_order}

    def reset(self, initial_state: State | None = None) -> None:
        super(Node, self).reset(initial_state)
        delivered: list[int] = []
        if initial_state is not None and "delivered" in initial_state:
            _check_rank(initial_state, ranks_of(self))
            delivered, initial_state = initial_state["delivered"], initial_state["source"]
        world_size = ranks_of(self)[1]
        if not self.in_order and world_size > 1 and self._once("in_order"):
            _logger.warning(
                "in_order=False: the state of a rank loads on that rank only. Save the states of all ranks, or use "
                "in_order=True."
            )
        self.executor.start(world_size)
        self.source.reset(initial_state)
        self._at = self.source.get_state()
        self._window.restart(self._at, delivered)

    def next(self) -> T:
        window, executor = self._window, self.executor
        while True:
            if self._at_once and window.is_clear:
                made: Any = self._done_at_once()
                if type(made) is Nothing:
                    continue
                if made is not _HELD:
                    return made  # type: ignore[no-any-return]
            if window.unsettled:
                # the last call raised; its item counts as delivered only now, so that a state saved in between retries
                # it
                window.settle()
            self._fill(executor.limit_before())
            entry = self._awaited()
            job = entry.job
            if job is None and not isinstance(entry.value, BaseException):
                executor.epoch_ended()
                window.deliver(entry)
                return cast("T", entry.value)  # the end-of-epoch marker
            try:
                value: Any = self._value(job) if job is not None else entry.raise_value()
            except Exception:
                window.fail(entry)
                self._errors += 1
                raise
            if type(value) is Nothing:
                self._first.absent(value)
                window.deliver(entry)
                continue
            if more := executor.limit_after(value):  # may warn, and so may raise: then the batch is not lost
                self._fill(more, replaces=True)  # now, so that the workers are busy while the caller trains
            self._address = entry.address
            window.deliver(entry)  # the last step: see the top of this file
            return cast("T", value)

    def address(self) -> Indices | None:
        return self._address

    def again(self, item: Any) -> Any:
        return self.executor.again(item, ranks_of(self)[1])

    def begin_again(self, items: Sequence[Any]) -> None:
        """See `Executor.begin_again`."""
        self.executor.begin_again(items, ranks_of(self)[1])

    def get_state(self) -> State:
        window = self._window
        if not window.ahead:
            state: State = window.base
            return state
        rank, world_size = ranks_of(self)
        return {"source": window.base, "delivered": list(window.ahead), "rank": rank, "world_size": world_size}

    def start_of(self, epoch: int, after: State | None = None) -> State:
        return super().start_of(epoch, after)

    def check(self, state: Any) -> None:
        if not isinstance(state, dict) or "delivered" not in state:
            return super().check(state)
        delivered = fields(state, source=dict, delivered=list, rank=int, world_size=int)["delivered"]
        if not all(
            isinstance(k, int) and not isinstance(k, bool) and 0 <= k <= _FARTHEST for k in delivered
        ) or delivered != sorted(set(delivered)):
            raise StateError(
                f"'delivered' in a state must be increasing whole numbers from 0 to {_FARTHEST}, not {delivered!r:.80}."
            )
        self.source.check(state["source"])

    @property
    def holds_error(self) -> bool:
        """Whether the source has raised an error that the consumer has not seen yet."""
        return self._window.holds_error

    @property
    def watched(self) -> Sequence[Any]:
        return self.executor.tops

    @property
    def runs_ahead(self) -> bool:
        # the user's own objects, which are read here, must not be told an epoch that the loop has not begun
        may_tell = self.executor.copies or not self.executor.told_parts
        return self.passes_ends and may_tell and self.source.runs_ahead and self._shares_nothing

    def tell(self, epoch: int) -> None:
        self.executor.tell(epoch)

    def settle(self, epoch: int) -> bool:
        holds = self.executor.told_parts.begin(epoch)
        if not holds and self.executor.copies:
            self.executor.refresh()
        return holds

    @property
    def ahead(self) -> int | None:
        return self.executor.crew.most_ahead if self.in_order and not self._options.is_auto else None

    @cached_property
    def _shares_nothing(self) -> bool:
        """Whether the loop can change nothing for an epoch that the workers read."""
        if (path := shared_in(self._may_share)) is not None:
            _logger.info(
                "%s is shared memory, which your loop may change for an epoch, so nothing of an epoch is loaded before "
                "you ask for it. To load ahead, let the dataset take the epoch from penstock.sample().epoch or from "
                "its set_epoch(epoch).",
                path,
            )
        return path is None

    def interrupt(self) -> None:
        self.executor.interrupt()
        self.source.interrupt()

    def shutdown(self) -> None:
        if self._slow_read is not None:
            self._slow_read.end()
        self.executor.shutdown()
        self._window.restart(self._window.base, self._window.ahead)
        self.source.shutdown()

    def _transformed(self, item: Any) -> Any:
        """What a `Batcher` or a `Sharder` downstream gets, which reads the source itself. Only without workers."""
        if isinstance(item, EndOfEpoch):
            return item
        began = now()
        value = self.executor.run_inline(item, began)
        self.executor.count(item)
        self._own_ns += now() - began
        return value

    def _was_read(self, ns: int) -> None:
        super()._was_read(ns)
        if self._source_ns:
            self.source._was_read(self._source_ns)

    def _items_read(self, items: int) -> int:
        return self.executor.tasks + self._window.under_way

    def _stages(self) -> dict[str, Any]:
        return self.executor.stages()

    def _counted(self, elapsed_s: float, items: int) -> NodeStatistics:
        failures = None if self._tolerance is None else self._tolerance.statistics()
        return dataclasses.replace(
            self.executor.statistics(super()._counted(elapsed_s, items)),
            ready=self._window.ready(),
            ready_mean=self._ready / self._looks if self._looks else 0.0,
            errors=self._errors if failures is None else failures.failed,
            failures=failures,
        )

    def _fill(self, most: int, *, replaces: bool = False) -> None:
        """Pull and submit items until ``most`` jobs are in flight.

        A source that is read forward may take its time, so an item that is ready does not wait for it: the items in
        flight become more only while none is ready, and with ``replaces`` one is pulled for the one to be delivered.
        """
        window, source = self._window, self.source
        if self._forward and replaces:
            most = min(most, window.under_way + 1)
        while window.under_way < most and window.has_room(most, self._may_pass):
            if self._forward and not replaces and window.under_way and self._is_ready():
                return
            self._go_to(window.place)
            try:
                if self._forward and window.under_way:
                    self._slow_read = self._slow_read or SlowRead(_SLOW)
                    self._slow_read.reads.append(now())
                began = now()
                item: Any = source.next()
                ended = now()
                self._source_ns += ended - began
                for one in traced:
                    one.read(source, began, ended)
                place = source.get_state()
                if isinstance(item, EndOfEpoch):
                    entry = Entry(item, None, place)
                else:
                    job = None if window.comes_delivered else self.executor.submit(item, idle=not window.under_way)
                    entry = Entry(None, job, place, item if type(item) is Indices else source.address())
            except StopIteration:
                window.exhaust()
                return
            except Exception as exc:  # from the source, or from submitting the item; `next` raises it in its turn
                if not is_own_error(exc):
                    raise  # from a signal handler: there is no entry, so `_go_to` has the item read again
                place = source.get_state()
                entry = Entry(exc, None, place)
            finally:
                if self._slow_read is not None:
                    self._slow_read.reads.clear()
            self._at = place
            window.push(entry)

    def _may_pass(self) -> bool:
        """Whether items of the next epoch may be pulled before the marker of this one is delivered."""
        return self._prefetch_next_epoch and self.runs_ahead

    def _go_to(self, place: State) -> None:
        """Make sure that the source is at ``place``.

        It is not if Ctrl-C came between an earlier read and its entry; that item is read again.
        """
        at, self._at = self._at, None
        if at is not place:
            self.source.reset(place)

    def _done_at_once(self) -> Any:
        """The next item, made in this thread without the window, or the marker.

        `_HELD` if it raises or there is none; the window records that.

        An interrupt leaves the window unchanged, so the next call repeats everything.
        """
        window, source, executor = self._window, self._source, self.executor
        assert source is not None
        if self._at is not window.base:
            self._go_to(window.base)
        self._at = None  # `_go_to`, inlined: unless this succeeds, the source is reset at the next call
        try:
            asked = now()
            item = source.next()
            began = now()
            self._source_ns += began - asked
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
        try:
            value = executor.run_inline(item, began)
        except BaseException as exc:
            if not is_own_error(exc):
                raise
            # This needs an entry, with a finished job: `next` raises and counts its error, as it does for a worker's.
            self._at = place
            window.push(Entry(None, Job(item, exc), place, item if type(item) is Indices else source.address()))
            return _HELD
        if type(value) is Nothing:
            self._first.absent(value)
        executor.tasks += 1  # `Executor.count`, inlined
        executor.samples += samples_of(item)
        self._address = item if type(item) is Indices else source.address()
        self._at = window.base = place  # the last step: see the top of this file
        return value

    def _is_ready(self) -> bool:
        """Whether `_awaited` would return at once."""
        self.executor.poll()
        return any(entry.job is None or entry.job.done for entry in self._window.candidates())

    def _awaited(self) -> Entry:
        """Wait for the entry to deliver next."""
        candidates, executor = self._window.candidates(), self.executor
        if not candidates:
            raise StopIteration
        if executor.crew.number and not executor.tasks % _LOOK:
            self._looks += 1
            self._ready += self._window.ready()
        while True:
            for entry in candidates:
                if entry.job is None or entry.job.done:
                    return entry
            executor.wait([job for entry in candidates for job in entry.job.under_way])

    def _value(self, job: Job | SplitJob) -> T:
        """The value of ``job``; raises its error, or the error of an exhausted error budget."""
        value: T = self.executor.result(job)
        if self._tolerance is not None:
            where = "" if job.worker == IDLE else f" in worker {job.worker}"
            value = self._tolerance.passed(samples_of(job.task), value, where, self.get_state())
        return value


@final
class Mapper(ParallelMapper[T]):
    """A `ParallelMapper` without workers: apply ``map_fn`` to each item of ``source`` in the caller's thread.

    Args:
        source: Yields the items.
        map_fn: A `Fetch`, or any callable of one value. Never called for a marker.
        seed: Seeds the samples' random numbers; default: the seed of the order.
        seed_global_rngs: See `ParallelMapper`.
    """

    __module__ = "penstock.nodes"

    def __init__(
        self,
        source: BaseNode[Any],
        map_fn: Callable[[Any], T],
        *,
        seed: int | None = None,
        seed_global_rngs: bool | Literal["always"] = True,
    ) -> None:
        super().__init__(source, map_fn, 0, seed=seed, seed_global_rngs=seed_global_rngs)

    def details(self) -> dict[str, Any]:
        return {"map_fn": self.map_fn}


_HELD = object()
_SLOW: Final = (
    "the next items have not come for 10 s, and batches read before them wait, because workers need several ahead. If "
    "the source waits for what your loop does with those batches, as a queue may that the loop fills, this never ends: "
    "pass num_workers=0, and nothing is read ahead. timeout= does not end the wait for a source."
)
_FARTHEST = 2**16
"""Largest distance from the oldest item that a state may list. The window keeps it smaller, but states come from
files.
"""
_LOOK = 16
"""The items that are ready are counted once in this many calls."""


def _check_rank(state: State, now: tuple[int, int]) -> None:
    saved = state["rank"], state["world_size"]
    if saved != now:
        raise StateMismatch(
            f"rank {saved[0]} of {saved[1]} saved this state with in_order=False, so it lists the items delivered on "
            f"that rank, but this is rank {now[0]} of {now[1]}. Load this rank's own state at the same world size, or "
            f"train with in_order=True."
        )
