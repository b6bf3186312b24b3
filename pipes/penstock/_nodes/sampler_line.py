"""SamplerLine: what a sampler was when an epoch began, and the planner that reads it from then on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, final

from penstock._memory.modes import neutral_modes
from penstock._nodes.epoch_planner import EpochPlanner
from penstock._nodes.plan_source import PlanRequest
from penstock._nodes.sampler_content import CannotCompare, Memory, content
from penstock._nodes.sampler_traits import copied, tell

if TYPE_CHECKING:
    from penstock._nodes.epoch_plan import Plan

log = logging.getLogger("penstock")


@final
class SamplerLine:
    """Plans epoch after epoch from a copy of the sampler, or from the sampler itself, which then is read only when an epoch begins.

    Attributes:
        pristine: A copy that is never read, to compare the sampler with; None if there is none.
        planner: Reads another copy, or the sampler itself.
    """

    def __init__(self, sampler: Any, seed: int, *, batches: bool | None, infinite: bool, plan_ahead: bool) -> None:
        self.pristine: Any = None
        self._reached = Memory(b"", [])
        self._name = type(sampler).__name__
        if plan_ahead:
            with neutral_modes():
                try:
                    self.pristine, self._reached = _whole_copy(sampler)
                except CannotCompare as exc:
                    log.info(
                        f"{self._name} is read when an epoch begins, and nothing is loaded of the epoch before that, because it cannot be compared with a copy, "
                        f"which would show whether the loop has changed it: {exc}."
                    )
        is_copy = self.pristine is not None
        self.planner = EpochPlanner(
            copied(self.pristine) if is_copy else sampler,
            seed,
            batches=batches,
            infinite=infinite,
            pristine=self.pristine,
            reached=self._reached,
            named=plan_ahead,
        )

    def holds(self, sampler: Any, epoch: int) -> bool:
        """Whether ``sampler``, which was told ``epoch``, is still what was copied."""
        with neutral_modes():
            tell(self.pristine, epoch, seeded=True)
            try:
                now = content(sampler)
                return now.own.equals(content(self.pristine).own) and now.reached.equals(self._reached)
            except CannotCompare:
                return False

    def is_certain(self, epoch: int, plan: Plan) -> bool:
        """Whether ``plan``, made in a thread, is what the sampler yields. If it is in doubt, only another reading can tell.

        If the global generators moved meanwhile, another thread may have drawn from them, or the sampler, which was not seen to draw before.
        """
        if not plan.drew or plan.is_block or self.planner.place == "here" or (trial := self.planner.trial()) is None:
            return True
        with neutral_modes():
            again = trial(PlanRequest(epoch))
        if again.drew:
            log.warning(
                "%s draws from the global random numbers for the first time in epoch %d, and was read in a thread, so your own draws since the epoch before differ from those of "
                "a run without it. Its indices are made again. To seed it from the start, pass plan_ahead=False.",
                self._name,
                epoch,
            )
        return again.said == plan.said and not again.drew


def _whole_copy(sampler: Any) -> tuple[Any, Memory]:
    """A copy of ``sampler``, and what the two share, because their code reaches it by name.

    Raises:
        CannotCompare: It cannot be copied whole, or the copy cannot be compared.
    """
    now = content(sampler)
    copy = copied(sampler, whole=True)
    if copy is None or copy is sampler or not content(copy).own.equals(now.own):
        raise CannotCompare("it cannot be copied")
    return copy, now.reached.kept()
