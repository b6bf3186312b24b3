"""Makes the plans of one sampler for requests in any order, even if the sampler can only move forward."""

from __future__ import annotations

import copy
import logging
import warnings
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from penstock._nodes.sampler_reading import Reading
from penstock._nodes.sampler_traits import can_be_pickled, copied, is_told, owns_its_randomness, twin

if TYPE_CHECKING:
    from penstock._nodes.epoch_plan import Plan
    from penstock._nodes.plan_source import Place, PlanRequest

log = logging.getLogger("penstock")

REPLAYED = 2**8
"""Blocks read from each endless epoch when earlier epochs are replayed."""


@final
class EpochPlanner:
    """Makes the plans of one sampler, in one thread at a time, or in a worker process to which it is sent before its first plan.

    Args:
        sampler: Yields indices, or batches of them.
        seed: Together with the epoch, seeds everything the sampler draws from.
        batches: Whether it yields batches. None: it does not, but the user has not said so, and a list is refused.
        plan_ahead: If False, `place` is always ``"here"``.
    """

    def __init__(self, sampler: Any, seed: int, *, batches: bool | None, plan_ahead: bool = True) -> None:
        self._sampler = sampler
        self._seed = seed
        self._batches = batches
        self._plan_ahead = plan_ahead
        self._remembers = not owns_its_randomness(sampler)
        self._place: Place | None = None if plan_ahead else "here"
        self._warned = False
        self._pristine: Any = None
        self._next_epoch: int | None = 0  # the epoch that the sampler yields next; None: it was left in the middle of one
        self._asked = False
        self._reading: Reading | None = None

    @property
    def place(self) -> Place:
        """Where the next plan may be made.

        A sampler that may draw from the global generators must not run concurrently with the user's threads, which draw from them too. So it
        runs in a separate process. If it cannot, it runs here, and moves to a thread once it is seen not to draw.
        """
        if self._place is None:
            self._place = "here"
            if not self._remembers:
                self._place = "thread"
            elif can_be_pickled(self._sampler):
                with suppress(RuntimeError):  # the platform has no worker processes
                    from penstock._workers.process_pool import check_processes

                    check_processes(None)
                    self._place = "process"
        return self._place

    def __call__(self, request: PlanRequest) -> Plan:
        """The plan of an epoch, or of the block with the requested position. Errors of the sampler name the epoch."""
        try:
            if self._reading is None or (self._reading.epoch, self._reading.begin) != request[:2]:
                self._begin(request)
            assert self._reading is not None
            plan = _block_at(self._reading, request.position)
        except BaseException as exc:
            self.close()
            if isinstance(exc, StopIteration):  # it would be mistaken for the end of the epoch
                raise RuntimeError(
                    f"{type(self._sampler).__name__} raised StopIteration outside of its iterator, in epoch {request.epoch}."
                ) from exc
            with suppress(Exception):  # a frozen exception takes no note
                exc.add_note(f"while reading the indices of epoch {request.epoch} from {type(self._sampler).__name__}")
            raise
        if not plan.more:
            self.close()
            self._next_epoch = request.epoch + 1
        if self.place == "here" and self._plan_ahead:
            self._look(plan)
        return replace(plan, said=plan.signature())  # here, where the consumer does not wait for it

    def trial(self, request: PlanRequest) -> Plan | None:
        """The plan that would be made now, made with a copy of the sampler, so that nothing changes. None if it cannot be copied."""
        other = copy.copy(self)
        other._sampler = copied(self._sampler) if self._remembers else self._sampler
        other._reading = None
        return None if other._sampler is None else other(request)

    def close(self) -> None:
        """Stop reading the current epoch, and take back the generators lent to the sampler."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _look(self, plan: Plan) -> None:
        """Move to a thread if the sampler did not draw; warn if it did."""
        if not plan.drew and not plan.is_block:
            self._place = "thread"
        elif plan.drew and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self._sampler).__name__} draws from the global random numbers and cannot be pickled, so it is read between two epochs "
                f"while the workers wait. Give it its own generator, make it picklable, or pass plan_ahead=False.",
                stacklevel=2,
            )

    def _begin(self, request: PlanRequest) -> None:
        """Open the epoch, with the sampler in the state in which earlier epochs leave it."""
        follows = request.epoch == self._next_epoch
        self.close()
        self._next_epoch = None
        if self._remembers:
            if self._plan_ahead and not self._asked:  # otherwise the user may change the sampler, so no copy may replace it
                self._pristine = copied(self._sampler)
            if not follows:
                self._catch_up(request)
        self._asked = True
        self._reading = self._open(self._sampler, request.epoch)

    def _catch_up(self, request: PlanRequest) -> None:
        """If the sampler has a memory, read the earlier epochs. Only indices are read, and none are kept.

        A copy is tested for a memory: a sampler with one does not reproduce the plan of the state, or plans the same epoch differently twice.
        `REPLAYED` blocks of an endless epoch are read, so that the result does not depend on how far an earlier run went.
        """
        if self._asked and self._pristine is None:
            # It cannot be moved back. The checksum will show whether its plan fits, except at the start of an epoch.
            if self._plan_ahead and not request.checksum and not is_told(self._sampler):
                log.warning(
                    "%s can be neither pickled nor copied, so epoch %d is what it yields next. If it remembers what it has yielded, the order differs from that of a run "
                    "that did not jump. Make it picklable, or give it a set_epoch.",
                    type(self._sampler).__name__,
                    request.epoch,
                )
            return
        if self._asked:
            self._sampler = copied(self._pristine)
        trial = copied(self._sampler)
        # Before the first sample any plan fits, and a memory may show only later.
        if trial is not None and (request.checksum or is_told(self._sampler)):
            fits, plan = self._tried(trial, request)
            if fits and self._tried(trial, request) == (True, plan):
                return
        for epoch in range(request.epoch):
            with closing(self._open(self._sampler, epoch)) as reading:
                any(not reading.block().more for _ in range(REPLAYED))

    def _tried(self, sampler: Any, request: PlanRequest) -> tuple[bool, int]:
        """Whether the plan fits, and its checksum. Reads to the epoch's end, because a memory may change there."""
        fits, checksum = False, 0
        with closing(self._open(sampler, request.epoch)) as reading:
            for _ in range(REPLAYED):
                try:
                    plan = reading.block()
                except Exception:
                    if fits:
                        break  # the reader will get the same error there
                    raise
                fits = fits or plan.fits(request.position, request.checksum)
                checksum = plan.signature(checksum)
                if not plan.more:
                    break
        return fits, checksum

    def _open(self, sampler: Any, epoch: int) -> Reading:
        one = sampler if self._remembers else twin(sampler)  # other code may read it at the same time, and draw from its generator
        return Reading(one, self._seed, epoch, batches=self._batches, draws=self._remembers and self.place != "thread")


def _block_at(reading: Reading, position: int) -> Plan:
    """Read up to the block with the item at ``position``, or to the last one; blocks before it are dropped."""
    plan = reading.block()
    while plan.more and plan.end <= position:
        plan = reading.block()
    return plan
