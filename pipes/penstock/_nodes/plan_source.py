"""Make plans here or in a thread, one of them ahead, so that a slow sampler leaves no gap between epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, final

from penstock._errors import ANEW, ClosedError
from penstock._memory.modes import neutral_modes

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    from penstock._memory.allocation import Allocate
    from penstock._workers.pool import Job, Pool


P = TypeVar("P", covariant=True)
Place = Literal["here", "thread"]


class PlanRequest(NamedTuple):
    """A request to plan ``epoch``, or the block of it that contains ``position``.

    Attributes:
        epoch: From 0.
        position: Items of the epoch that are already done.
    """

    epoch: int
    position: int = 0


class Planner(Protocol[P]):
    """Makes plans, in one thread at a time."""

    @property
    def place(self) -> Place:
        """Where to make the next plan."""
        ...

    def __call__(self, request: PlanRequest) -> P:
        """The plan."""
        ...


@final
class PlanSource(Generic[P]):
    """Plans, made where their planner says, in the order of the requests.

    One plan is made ahead of the consumer. If the consumer jumps and requests another one, that is queued behind it: a
    sampler cannot be stopped, so the older plan is finished and dropped.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._ordered: tuple[Planner[P], PlanRequest, Job] | None = None
        self._interrupted = False
        self._closed = False

    def get(self, planner: Planner[P], request: PlanRequest) -> P:
        """The plan of ``planner`` for ``request``. Waits for it, and raises any error from making it.

        Raises:
            ClosedError: After `interrupt`, until `resume`; after `shutdown`.
        """
        self.order(planner, request)
        pool, ordered = self._pool, self._ordered
        if pool is None or ordered is None or ordered[:2] != (planner, request):
            with neutral_modes():
                return planner(request)
        job = ordered[2]
        # `interrupt` sets the flag and then reads the pool. Here the order is reversed, so at least one of the two sees
        # the other.
        if self._interrupted:
            raise ClosedError("the wait for the next epoch's plan was interrupted.")
        pool.wait([job], None)
        try:
            plan: P = job.result()
        finally:
            self._ordered = None
            job.forget()
        return plan

    def order(self, planner: Planner[P], request: PlanRequest) -> None:
        """Start making the plan for ``request``. Idempotent. Does nothing if the planner makes it here."""
        if planner.place == "here":
            return
        if self._pool is None:
            from penstock._workers.thread_pool import ThreadPool

            self._pool = ThreadPool(_Work(), 1, name="penstock-plan")
        # `shutdown` sets its flag and then reads the pool. Here the order is reversed, so no pool outlives it.
        if not self._closed:
            self._pool.start()
        if self._closed:
            self._pool.shutdown()
            raise ClosedError(f"this loader was closed. {ANEW}")
        if self._ordered is None or self._ordered[:2] != (planner, request):
            self._ordered = planner, request, self._pool.submit(Planning(planner, request))

    def resume(self) -> None:
        """Clear an `interrupt`, and drop a plan that was being made when it came.

        A finished plan is kept, because it may be requested next.
        """
        if self._interrupted:
            self._interrupted = False
            if self._ordered is not None and not self._ordered[2].done:
                self._ordered = None
            if self._pool is not None:
                self._pool.discard()

    def interrupt(self) -> None:
        """Make a waiting `get`, and every later one until `resume`, raise `ClosedError`. Thread-safe."""
        self._interrupted = True
        if self._pool is not None:
            self._pool.interrupt()

    def shutdown(self) -> None:
        """End the thread; see `Pool.shutdown`. Idempotent."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown()


class Planning(NamedTuple):
    """A task of the pool; a trace knows it by its name."""

    planner: Any
    request: PlanRequest


class _Work:
    """The work of the pool: makes a plan."""

    def __call__(self, task: Planning, current_row: MutableSequence[int], allocate: Allocate) -> Any:
        return task.planner(task.request)

    def name(self, task: Planning, row: int) -> str:
        return f"the plan of epoch {task.request.epoch}"
