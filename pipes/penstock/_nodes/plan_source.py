"""Make plans here, in a thread, or in a process, one of them ahead, so that a slow sampler leaves no gap between epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, final

from penstock._errors import ClosedError, WorkerDied
from penstock._memory.modes import neutral_modes
from penstock._workers.lifetime import patience_s

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    from penstock._memory.allocation import Allocate
    from penstock._workers.pool import Job, Pool


_AT_MOST_S = 0.2
"""Seconds to wait for a process that is making a plan. The plan is not needed, and a process, unlike a thread, can be killed."""

P = TypeVar("P", covariant=True)
Place = Literal["here", "thread", "process"]


class PlanRequest(NamedTuple):
    """A request to plan ``epoch``, or the block of it that contains ``position``.

    Attributes:
        epoch: From 0.
        position: Items of the epoch that are already done.
        checksum: Checksum of the samples in those items.
    """

    epoch: int
    position: int = 0
    checksum: int = 0


class Planner(Protocol[P]):
    """Makes plans, in one thread at a time."""

    @property
    def place(self) -> Place:
        """Where to make the next plan. Read until it is not ``"here"``; from then on the thread or process owns the planner."""
        ...

    def __call__(self, request: PlanRequest) -> P:
        """The plan."""
        ...


@final
class PlanSource(Generic[P]):
    """The plans of a planner, made where it says, in the order of the requests.

    One plan is made ahead of the consumer. If the consumer jumps and requests another one, that is queued behind it: a sampler cannot be
    stopped, so the older plan is finished and dropped.
    """

    def __init__(self, planner: Planner[P]) -> None:
        self._planner = planner
        self._pool: Pool | None = None
        self._place: Place = "here"
        self._ordered: tuple[PlanRequest, Job] | None = None
        self._interrupted = False
        self._closed = False

    def get(self, request: PlanRequest) -> P:
        """The plan for ``request``. Waits for it, and raises any error from making it.

        Raises:
            ClosedError: After `interrupt`, until `resume`; after `shutdown`.
            WorkerDied: The process has died.
        """
        self.order(request)
        pool, ordered = self._pool, self._ordered
        if pool is None or ordered is None:
            with neutral_modes():
                return self._planner(request)
        job = ordered[1]
        # `interrupt` sets the flag and then reads the pool. Here the order is reversed, so at least one of the two sees the other.
        if self._interrupted:
            raise ClosedError("the wait for the next epoch's plan was interrupted.")
        pool.wait([job], None)
        try:
            plan: P = job.result()
        except WorkerDied as exc:
            raise WorkerDied(
                f"{exc} It planned epochs ahead. If the sampler cannot run in another process, use plan_ahead=False, which runs it in this one, "
                f"between two epochs."
            ) from exc
        finally:
            self._ordered = None
            job.forget()
        return plan

    def order(self, request: PlanRequest) -> None:
        """Start making the plan for ``request``. Idempotent. Does nothing if plans are made here."""
        pool = self._started()
        if pool is not None and (self._ordered is None or self._ordered[0] != request):
            self._ordered = request, pool.submit(request)

    def resume(self) -> None:
        """Clear an `interrupt`, and drop a plan that was being made when it came. A finished plan is kept, because it may be requested next."""
        if self._interrupted:
            self._interrupted = False
            if self._ordered is not None and not self._ordered[1].done:
                self._ordered = None
            if self._pool is not None:
                self._pool.discard()

    def interrupt(self) -> None:
        """Make a waiting `get`, and every later one until `resume`, raise `ClosedError`. Thread-safe."""
        self._interrupted = True
        if self._pool is not None:
            self._pool.interrupt()

    def shutdown(self) -> None:
        """End the thread or process; see `Pool.shutdown`. Idempotent."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(min(_AT_MOST_S, patience_s(None)) if self._place == "process" else None)

    def _started(self) -> Pool | None:
        if self._pool is None:
            self._place = self._planner.place
            if self._place == "here":
                return None
            work = _Work(self._planner)
            if self._place == "thread":
                from penstock._workers.thread_pool import ThreadPool

                self._pool = ThreadPool(work, 1, name="penstock-plan")
            else:
                from penstock._workers.process_pool import ProcessPool

                # Not replaced if it dies, because a new process would not know how far the old one had read the sampler.
                self._pool = ProcessPool(work, 1, max_restarts=0, name="penstock-plan")
        # `shutdown` sets its flag and then reads the pool. Here the order is reversed, so no pool outlives it.
        if not self._closed:
            self._pool.start()
        if self._closed:
            self._pool.shutdown()
            raise ClosedError("this loader was closed; build a new one.")
        return self._pool


class _Work:
    """The work of the pool: makes a plan."""

    def __init__(self, planner: Planner[Any]) -> None:
        self._planner = planner

    def __call__(self, task: PlanRequest, current_row: MutableSequence[int], allocate: Allocate) -> Any:
        return self._planner(task)

    def name(self, task: PlanRequest, row: int) -> str:
        return f"the plan of epoch {task.epoch}"
