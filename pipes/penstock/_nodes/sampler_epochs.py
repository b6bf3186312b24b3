"""One epoch of a sampler, read as far as it was asked for; and the next one, read from a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from penstock._errors import suppress_own
from penstock._memory.modes import neutral_modes
from penstock._nodes.sampler_reading import Reading
from penstock._nodes.sampler_traits import owns_its_randomness

if TYPE_CHECKING:
    from penstock._nodes.epoch_plan import Plan
    from penstock._nodes.plan_source import Place, PlanRequest

_REPLAYED: Final = 2**8
"""Blocks read of each endless epoch when earlier epochs are replayed, so that the result does not depend on how far an
earlier run went.
"""
_KEPT: Final = 2**22
"""Samples of the blocks that are kept, to go back to when what is in flight is dropped."""


@final
class SamplerEpoch:
    """What a sampler yields in one epoch. Errors of the sampler name it.

    Args:
        reading: Of the epoch, at its start.
        name: Of the sampler.

    Attributes:
        epoch: The epoch.
        blocks: What was read and is kept, one at least.
        whole: The epoch is one block, which is all of it.
    """

    def __init__(self, reading: Reading, name: str) -> None:
        self.epoch, self._reading, self._name = reading.epoch, reading, name
        self.blocks: list[Plan] = []
        self._read()
        self.whole = not self.blocks[0].more

    def kept(self, position: int) -> Plan | None:
        """The block with the item at ``position``, or the last one; None if it is not in memory. Thread-safe."""
        blocks = self.blocks
        if blocks[-1].more and position >= blocks[-1].end:
            return None
        return next((block for block in reversed(blocks) if block.begin <= position), None)

    def at(self, position: int) -> Plan | None:
        """The same, read on to ``position`` if necessary."""
        while self.blocks[-1].more and position >= self.blocks[-1].end:
            self._read()
        return self.kept(position)

    def replay(self) -> None:
        """Read it to its end, or `_REPLAYED` blocks of it, for the sampler to be where that leaves it."""
        for _ in range(_REPLAYED):
            if self.blocks[-1].more:
                self._read()
        self.close()

    def close(self) -> None:
        """Take back the generators that were lent to the sampler. Idempotent."""
        self._reading.close()

    def _read(self) -> None:
        with neutral_modes():
            try:
                block = self._reading.block()
            except BaseException as exc:
                if isinstance(exc, StopIteration):  # it would be mistaken for the end of the epoch
                    raise RuntimeError(
                        f"{self._name} raised StopIteration outside of its iterator, in epoch {self.epoch}."
                    ) from exc
                with suppress_own():  # a frozen exception takes no note
                    exc.add_note(f"while reading the indices of epoch {self.epoch} from {self._name}")
                raise
        blocks = [*self.blocks, block]
        while len(blocks) > 2 and sum(len(each.values) for each in blocks) > _KEPT:
            del blocks[0]
        self.blocks = blocks  # a new list, because other threads look at it


@final
class SamplerCopy:
    """Reads any epoch of a sampler whose order depends on nothing but its ``set_epoch``, from a copy.

    Args:
        sampler: The copy.
        seed: With the epoch, seeds everything that it draws from.
        words: Arguments of each `Reading`.

    Attributes:
        sampler: The copy.
        place: Where to read the next epoch. Nothing can be seeded in a thread, so one that is not torch's own is first
            read where the loop waits, and goes on there if it draws from the global generators.
    """

    def __init__(self, sampler: Any, seed: int, **words: Any) -> None:
        self.sampler, self._seed, self._words = sampler, seed, words
        self._is_torchs = owns_its_randomness(sampler)
        self.place: Place = "thread" if self._is_torchs else "here"

    def __call__(self, request: PlanRequest) -> SamplerEpoch:
        """The epoch of ``request``, at its start."""
        draws = self.place == "here" and not self._is_torchs
        with neutral_modes():
            reading = Reading(self.sampler, self._seed, request.epoch, draws=draws, **self._words)
        found = SamplerEpoch(reading, type(self.sampler).__name__)
        if found.whole and not found.blocks[0].drew:
            self.place = "thread"
        return found
