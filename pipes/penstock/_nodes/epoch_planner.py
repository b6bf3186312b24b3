"""Makes the plans of one sampler for requests in any order, even if the sampler can only move forward."""

from __future__ import annotations

import logging
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from penstock._memory.modes import neutral_modes
from penstock._nodes.plan_source import PlanRequest
from penstock._nodes.sampler_content import CannotCompare, Content, Memory, content
from penstock._nodes.sampler_reading import Reading
from penstock._nodes.sampler_traits import copied, owns_its_randomness, tell, told_by
from penstock._random.draws import looker

if TYPE_CHECKING:
    from penstock._nodes.epoch_plan import Plan
    from penstock._nodes.plan_source import Place

log = logging.getLogger("penstock")

REPLAYED = 2**8
"""Blocks read from each endless epoch when earlier epochs are replayed."""


@final
class EpochPlanner:
    """Plans epoch after epoch of what a sampler was when this was built, in one thread at a time.

    It reads a copy, and keeps another one that is never read, with which `holds` compares the sampler when an epoch
    begins. A sampler that cannot be copied and compared whole is read itself, and only when its epoch begins.

    Args:
        sampler: Yields indices, or batches of them.
        seed: Together with the epoch, seeds everything the sampler draws from.
        batches: Whether it yields batches. None: it does not, but the user has not said so, and a list is refused.
        infinite: It may go on past its length.
        plan_ahead: Read a copy, if possible.

    Attributes:
        pristine: The copy that is never read; None if the sampler itself is read.
        place: Where to make the next plan. In a thread nothing can be seeded, so the first plan is made where the loop
            waits. If the sampler then draws from the global generators, so are all others.
    """

    def __init__(
        self, sampler: Any, seed: int, *, batches: bool | None, infinite: bool = False, plan_ahead: bool = False
    ) -> None:
        self._name = type(sampler).__name__
        self._seed = seed
        self._batches = batches
        self._infinite = infinite
        self._logs = plan_ahead
        self.pristine: Any = None
        self._reached = Memory(b"", [])  # what its code reaches by name, which a copy shares
        if plan_ahead:
            with neutral_modes():
                try:
                    self.pristine, self._reached = _whole_copy(sampler)
                except CannotCompare as exc:
                    log.info(
                        f"{self._name} is read when an epoch begins, and nothing is loaded of the epoch before that, "
                        f"because it cannot be compared with a copy, which would show whether the loop has changed it: "
                        f"{exc}."
                    )
        self._sampler = sampler if self.pristine is None else copied(self.pristine)
        self._is_torchs = owns_its_randomness(sampler)  # this only saves time
        # the epoch that the sampler yields next; None: it was left in the middle of one
        self._next_epoch: int | None = 0
        self._asked = False
        self._reading: Reading | None = None
        self.place: Place = "thread" if self._is_torchs and self.pristine is not None else "here"

    def __call__(self, request: PlanRequest) -> Plan:
        """The plan of an epoch, or of the block with the requested position. Errors of the sampler name the epoch.

        If a thread makes it, and meanwhile the global generators move, or what the sampler's code reaches changes, the
        plan says that it drew.
        """
        look = looker() if self.place == "thread" and not self._is_torchs else None
        before = None if look is None else (look(), self._reaches_the_same())
        try:
            if self._reading is None or (self._reading.epoch, self._reading.begin) != request[:2]:
                self._begin(request)
            assert self._reading is not None
            plan = self._reading.block()
            while plan.more and plan.end <= request.position:
                plan = self._reading.block()
        except BaseException as exc:
            self.close()
            if isinstance(exc, StopIteration):  # it would be mistaken for the end of the epoch
                raise RuntimeError(
                    f"{self._name} raised StopIteration outside of its iterator, in epoch {request.epoch}."
                ) from exc
            with suppress(Exception):  # a frozen exception takes no note
                exc.add_note(f"while reading the indices of epoch {request.epoch} from {self._name}")
            raise
        if not plan.more:
            self.close()
            self._next_epoch = request.epoch + 1
        if look is not None:
            plan = replace(plan, drew=before != (look(), True) or not self._reaches_the_same())
        elif self.pristine is not None and not plan.drew and not plan.is_block:
            self.place = "thread"
        return replace(plan, said=plan.signature())  # here, where the consumer does not wait for it

    def holds(self, sampler: Any, epoch: int) -> bool:
        """Whether ``sampler``, which was told ``epoch``, is still what was copied."""
        with neutral_modes():
            tell(self.pristine, epoch, seeded=True)
            now, then = _content(sampler), _content(self.pristine)
            return (
                now is not None and then is not None and now.own.equals(then.own) and now.reached.equals(self._reached)
            )

    def is_certain(self, epoch: int, plan: Plan) -> bool:
        """Whether ``plan``, made in a thread, is what the sampler yields.

        If it is in doubt, only another reading can tell.

        If the global generators moved meanwhile, another thread may have drawn from them, or the sampler, which was not
        seen to draw before.
        """
        if not plan.drew or plan.is_block or self.place == "here" or (other := self.anew()) is None:
            return True
        with neutral_modes():
            again = other(PlanRequest(epoch))
        if again.drew:
            log.warning(
                "%s draws from the global random numbers for the first time in epoch %d, and was read in a thread, so "
                "your own draws since the epoch before differ from those of a run without it. Its indices are made "
                "again. To seed it from the start, pass plan_ahead=False.",
                self._name,
                epoch,
            )
        return again.said == plan.said and not again.drew

    def anew(self) -> EpochPlanner | None:
        """A planner over another copy of the sampler, which plans here and changes nothing.

        None if the sampler cannot be copied.
        """
        source = self._sampler if self.pristine is None else self.pristine
        sampler = copied(source, shares_data=_content(source) is None)
        if sampler is None:
            return None
        other = EpochPlanner(sampler, self._seed, batches=self._batches, infinite=self._infinite)
        if self.pristine is None:
            other._next_epoch, other._asked = self._next_epoch, self._asked
        return other

    def close(self) -> None:
        """Stop reading the current epoch, and take back the generators lent to the sampler."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _reaches_the_same(self) -> bool:
        """Whether what the sampler's code reaches by name is what it was."""
        now = _content(self._sampler)
        return now is not None and now.reached.equals(self._reached)

    def _begin(self, request: PlanRequest) -> None:
        """Open the epoch, with the sampler in the state in which earlier epochs leave it."""
        follows = request.epoch == self._next_epoch
        self.close()
        self._next_epoch = None
        if not follows and not self._is_torchs:
            self._catch_up(request)
        self._asked = True
        self._reading = self._open(self._sampler, request.epoch)

    def _catch_up(self, request: PlanRequest) -> None:
        """If the sampler has a memory, read the earlier epochs. Only indices are read, and none are kept.

        `REPLAYED` blocks of an endless epoch are read, so that the result does not depend on how far an earlier run
        went.
        """
        if self._asked and self.pristine is None:
            # It cannot be moved back. The checksum will show whether its plan fits, except at the start of an epoch.
            if self._logs and not request.checksum and not told_by(self._sampler):
                log.warning(
                    "%s cannot be moved to another epoch, because it can be neither copied nor compared, so epoch %d "
                    "is what it yields next. If it remembers what it has yielded, the order differs from that of a run "
                    "that did not jump. Give it a set_epoch.",
                    self._name,
                    request.epoch,
                )
            return
        if self._asked:
            self._sampler = copied(self.pristine)
        if self._leaves_a_trace(request.epoch):
            for epoch in range(request.epoch):
                self._read_past(self._sampler, epoch)

    def _leaves_a_trace(self, epoch: int) -> bool:
        """Whether the sampler holds something else once it has yielded ``epoch``, as a copy shows.

        True if nobody can tell.
        """
        tell(self._sampler, epoch, seeded=True)
        before = _content(self._sampler)  # None where a copy may share a memory, which reading it would advance
        if before is None or (other := copied(self._sampler)) is None:
            return True
        self._read_past(other, epoch)
        after = _content(other)
        return after is None or not after.own.equals(before.own)

    def _read_past(self, sampler: Any, epoch: int) -> None:
        with closing(self._open(sampler, epoch)) as reading:
            any(not reading.block().more for _ in range(REPLAYED))

    def _open(self, sampler: Any, epoch: int) -> Reading:
        # other code may read it at the same time, and draw from its generator
        if self._is_torchs and self.pristine is None:
            sampler = sampler if (other := copied(sampler)) is None else other
        draws = self.place == "here" and not self._is_torchs
        return Reading(sampler, self._seed, epoch, batches=self._batches, infinite=self._infinite, draws=draws)


def _content(sampler: Any) -> Content | None:
    """What ``sampler`` holds; None if that cannot be told whole."""
    try:
        return content(sampler)
    except CannotCompare:
        return None


def _whole_copy(sampler: Any) -> tuple[Any, Memory]:
    """A copy of ``sampler``, and what the two share, because their code reaches it by name.

    Raises:
        CannotCompare: It cannot be copied whole, or the copy cannot be compared.
    """
    now = content(sampler)
    copy = copied(sampler)
    if copy is None or copy is sampler or not content(copy).own.equals(now.own):
        raise CannotCompare("it cannot be copied")
    return copy, now.reached.kept()
