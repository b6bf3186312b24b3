"""The random numbers of an iterable that is read in the consumer's process: seeded per item, with the caller's
generators unchanged.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, final

from penstock._fetch.held_generators import HeldGenerators
from penstock._memory.modes import GradientMode, neutral_modes
from penstock._random.global_rng import GlobalRngSnapshot, global_rngs_kept, seed_globals
from penstock._random.orders import checked_seed
from penstock._random.splitmix import GAMMA, mixed
from penstock._workers.reader_thread import reads_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock._fetch.dataset_facts import DatasetFacts

log = logging.getLogger("penstock")

START = ~0
"""The position whose key seeds ``set_epoch`` and ``iter``."""


@final
class StreamRng:
    """Seeds the global generators, and those that an iterable holds, while it is read.

    In a reader thread it does not, because the consumer draws from them at the same time.

    Args:
        facts: Of the iterable.
        seed: From 0 to 2**63 - 1.
        enabled: False leaves the generators alone.
        held: Whether those that the iterable holds are seeded too, by their paths.
    """

    def __init__(self, facts: DatasetFacts, seed: int, enabled: bool, held: bool) -> None:
        self._name = facts.name
        # not the samples' key: a map_fn with the same seed must draw other numbers
        self._key = mixed(checked_seed(seed) + 5 * GAMMA)
        self._enabled = enabled
        self._seeds = False  # whether this read does
        self._held = HeldGenerators(self._key, {"iterable": facts.dataset} if held else {}, enabled and held)
        self._watched = not enabled
        self._made: set[str] = set()  # the paths for which a beginning was read again
        self._gradients = GradientMode()

    @contextlib.contextmanager
    def kept(self, anew: bool = False) -> Iterator[None]:
        """In this context `seed` works, and torch's modes are neutral, except for gradients, which are as the iterable
        left them. Afterwards the caller's generators and modes are restored.

        ``anew``: a pass begins, so what the iterable holds is looked for.
        """
        self._seeds = self._enabled and not reads_ahead()
        if anew:
            self._gradients = GradientMode()
            if self._seeds and self._held.seeds:
                self._held.look_again()
        with (
            neutral_modes(),
            self._gradients,
            global_rngs_kept() if self._seeds else contextlib.nullcontext(),
            self._held.kept(self._seeds),
        ):
            yield

    def seed(self, epoch: int, position: int) -> None:
        """Seed the draws for the item at ``position``, or at the `START` of a pass."""
        if self._seeds:
            seed_globals(self._key, epoch, position)
            if self._held.found:
                self._held.seed(epoch, position)

    def made_one(self) -> bool:
        """Whether the beginning of a pass must be read again, because the iterable has made a generator there, which
        was not seeded. One that is made anew in each pass counts once.
        """
        made = {one.where.path for one in self._held.look_again()} if self._seeds and self._held.seeds else set()
        known, self._made = self._made, self._made | made
        return self._made != known

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Log a warning if the first block draws from generators that cannot be seeded.

        The consumer waits meanwhile, so no other code draws.
        """
        if self._watched or self._seeds:
            yield
            return
        self._watched = True
        watch = GlobalRngSnapshot()
        before = watch.look()
        yield
        if before is not None and watch.look() != before:
            log.warning(
                "%s draws from the global random numbers and is read in a background thread, where seeding them would "
                "disturb your own draws. So its draws depend on timing. Give it its own generator, or leave out "
                "pin_memory and device (in a hand-built graph: the node that reads ahead).",
                self._name,
            )
