"""The number of items in each epoch of a sampler, if it is known before the epoch is read."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, final

from penstock._fetch.dataset_facts import length
from penstock._memory.modes import neutral_modes
from penstock._nodes.sampler_traits import is_told, length_in

if TYPE_CHECKING:
    from penstock._nodes.epoch_plan import Plan

_EPOCHS = 4
"""Number of epochs whose lengths are kept, the latest ones requested."""


@final
class LengthBook:
    """The ``len(sampler)`` of each epoch, trusted until an epoch turns out to have another length.

    Args:
        sampler: The sampler, or a copy of it.
        believed: False: its lengths were found wrong before.

    Attributes:
        believed: Whether its lengths are trusted.
    """

    def __init__(self, sampler: Any, *, believed: bool = True) -> None:
        self._sampler = sampler
        self._follows_epochs = is_told(sampler)
        self.believed = believed
        self._said: dict[int, int | None] = {}

    def items(self, epoch: int, plan: Plan | None) -> int | None:
        """Items of ``epoch``, whose plan is ``plan`` if it has been made; None if unknown."""
        if not self.believed:
            return None
        if plan is not None:
            return None if plan.is_block else len(plan)
        return self._length(epoch)

    def compare(self, epoch: int, plan: Plan) -> None:
        """Warn, once, if ``plan`` shows that the sampler's length is wrong; then all lengths are unknown."""
        said = self._length(epoch) if self.believed else None
        if said is not None and said != len(plan):
            self.believed = False
            if plan.is_block:  # it may be infinite
                return
            warnings.warn(
                f"{type(self._sampler).__name__} has a length of {said}, but epoch {epoch} has {len(plan)} items. From now on the length counts as "
                f"unknown. Make __len__ agree with __iter__.",
                stacklevel=2,
            )

    def _length(self, epoch: int) -> int | None:
        if not self._follows_epochs:
            return length(self._sampler)
        if epoch not in self._said:  # this copies the sampler, because its length may depend on `set_epoch`
            with neutral_modes():
                said = length_in(self._sampler, epoch)
            self._said = {**dict(list(self._said.items())[1 - _EPOCHS :]), epoch: said}
        return self._said[epoch]
