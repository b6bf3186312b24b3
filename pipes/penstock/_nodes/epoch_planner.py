"""Makes the plans of one sampler for requests in any order, even if the sampler can only move forward."""

from __future__ import annotations

import logging
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from penstock._nodes.sampler_content import CannotCompare, content
from penstock._nodes.sampler_reading import Reading
from penstock._nodes.sampler_traits import copied, is_told, owns_its_randomness, tell, twin
from penstock._random.global_rng import GlobalRngSnapshot

if TYPE_CHECKING:
    from penstock._nodes.epoch_plan import Plan
    from penstock._nodes.plan_source import Place, PlanRequest
    from penstock._nodes.sampler_content import Memory

log = logging.getLogger("penstock")

REPLAYED = 2**8
"""Blocks read from each endless epoch when earlier epochs are replayed."""


@final
class EpochPlanner:
    """Makes the plans of one sampler, in one thread at a time.

    Args:
        sampler: Yields indices, or batches of them.
        seed: Together with the epoch, seeds everything the sampler draws from.
        batches: Whether it yields batches. None: it does not, but the user has not said so, and a list is refused.
        infinite: It may go on past its length.
        pristine: A copy of it that is never read; None if there is none. Then the user may change the sampler, so no copy may replace it.
        reached: What its code reaches by name must be when it is read.
        named: Log that a sampler without a copy cannot be moved to another epoch.
    """

    def __init__(
        self,
        sampler: Any,
        seed: int,
        *,
        batches: bool | None,
        infinite: bool = False,
        pristine: Any = None,
        reached: Memory | None = None,
        named: bool = False,
    ) -> None:
        self._sampler = sampler
        self._seed = seed
        self._batches = batches
        self._infinite = infinite
        self._pristine = pristine
        self._reached = reached
        self._named = named
        self._remembers = not owns_its_randomness(sampler)
        self._next_epoch: int | None = 0  # the epoch that the sampler yields next; None: it was left in the middle of one
        self._asked = False
        self._reading: Reading | None = None
        self._watch = GlobalRngSnapshot()
        self.place: Place = "here" if self._remembers or pristine is None else "thread"

    def __call__(self, request: PlanRequest) -> Plan:
        """The plan of an epoch, or of the block with the requested position. Errors of the sampler name the epoch.

        The first plan is made where the loop waits. If the sampler then draws from the global generators, so are all others, because they must be
        seeded. Otherwise the next ones are made in a thread. If the generators move meanwhile, or what its code reaches changes, the plan says that it drew.
        """
        before = (self._watch.look(), self._reaches_the_same()) if self.place == "thread" and self._remembers else None
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
        if before is not None:
            plan = replace(plan, drew=before != (self._watch.look(), True) or not self._reaches_the_same())
        elif self._pristine is not None and not plan.drew and not plan.is_block:
            self.place = "thread"
        return replace(plan, said=plan.signature())  # here, where the consumer does not wait for it

    def _reaches_the_same(self) -> bool:
        """Whether what the sampler's code reaches by name, which a copy shares, is what it was."""
        try:
            return self._reached is None or content(self._sampler).reached.equals(self._reached)
        except CannotCompare:
            return False

    def trial(self) -> EpochPlanner | None:
        """A planner over a copy of the sampler, which plans here and changes nothing. None if the sampler cannot be copied."""
        source = self._sampler if self._pristine is None else self._pristine
        sampler = copied(source) if self._remembers else source
        if sampler is None:
            return None
        other = EpochPlanner(sampler, self._seed, batches=self._batches, infinite=self._infinite)
        if self._pristine is None:
            other._next_epoch, other._asked = self._next_epoch, self._asked
        return other

    def close(self) -> None:
        """Stop reading the current epoch, and take back the generators lent to the sampler."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _begin(self, request: PlanRequest) -> None:
        """Open the epoch, with the sampler in the state in which earlier epochs leave it."""
        follows = request.epoch == self._next_epoch
        self.close()
        self._next_epoch = None
        if self._remembers and not follows:
            self._catch_up(request)
        self._asked = True
        self._reading = self._open(self._sampler, request.epoch)

    def _catch_up(self, request: PlanRequest) -> None:
        """If the sampler has a memory, read the earlier epochs. Only indices are read, and none are kept.

        `REPLAYED` blocks of an endless epoch are read, so that the result does not depend on how far an earlier run went.
        """
        if self._asked and self._pristine is None:
            # It cannot be moved back. The checksum will show whether its plan fits, except at the start of an epoch.
            if self._named and not request.checksum and not is_told(self._sampler):
                log.warning(
                    "%s cannot be moved to another epoch, because it can be neither copied nor compared, so epoch %d is what it yields next. If it remembers "
                    "what it has yielded, the order differs from that of a run that did not jump. Give it a set_epoch.",
                    type(self._sampler).__name__,
                    request.epoch,
                )
            return
        if self._asked:
            self._sampler = copied(self._pristine)
        if self._keeps_memory(request.epoch):
            for epoch in range(request.epoch):
                self._read_past(self._sampler, epoch)

    def _keeps_memory(self, epoch: int) -> bool:
        """Whether the sampler holds something else once it has yielded ``epoch``, as a copy shows. True if nobody can tell."""
        tell(self._sampler, epoch, seeded=True)
        try:
            content(self._sampler)  # raises where a copy may share a memory, which a trial would advance
            if (trial := copied(self._sampler)) is None:
                return True
            self._read_past(trial, epoch)
            return not content(trial).own.equals(content(self._sampler).own)
        except CannotCompare:
            return True

    def _read_past(self, sampler: Any, epoch: int) -> None:
        with closing(self._open(sampler, epoch)) as reading:
            any(not reading.block().more for _ in range(REPLAYED))

    def _open(self, sampler: Any, epoch: int) -> Reading:
        one = sampler if self._remembers else twin(sampler)  # other code may read it at the same time, and draw from its generator
        return Reading(
            one, self._seed, epoch, batches=self._batches, infinite=self._infinite, draws=self._remembers and self.place != "thread"
        )


def _block_at(reading: Reading, position: int) -> Plan:
    """Read up to the block with the item at ``position``, or to the last one; blocks before it are dropped."""
    plan = reading.block()
    while plan.more and plan.end <= position:
        plan = reading.block()
    return plan
