"""When the global generators are seeded: for each sample, unless it is known that nothing draws from them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar, final

from penstock._random.global_rng import GlobalRngSnapshot, global_rngs_kept, seed_globals

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._random.global_rng import States


T = TypeVar("T")

CALM = 4
"""Batches in a row that draw nothing, after which they are loaded unseeded, and watched."""


@final
class GlobalSeeding:
    """Seeds ``random``, ``numpy.random`` and torch's CPU generator for each sample, in 7 us; or sees to it that nothing draws from them.

    Few datasets do draw. So once some batches have not, they are loaded unseeded, and the generators compared before and after.
    A batch that does draw after all is loaded once more, seeded, and so are all that follow: what a sample is does not depend on
    which of these ways it went. What only looks at a generator (``torch.initial_seed()``), or puts it back behind itself
    (``torch.random.fork_rng``), is not seen: for that there is ``calm=None``. One thread at a time.

    Args:
        seed: Of the random numbers of samples.
        on: Whether any of this happens.
        calm: After how many batches; None: never.

    Attributes:
        active: Whether samples that are being loaded now must be seeded.
    """

    def __init__(self, seed: int, on: bool, *, calm: int | None = CALM) -> None:
        self.active = on
        self._seed = seed
        self._on = on
        self._needed = calm or 0
        self._calm: int | None = None if calm is None else 0  # batches in a row that drew nothing; None: one did
        self._watch = GlobalRngSnapshot()
        self._seen: States | None = None  # where they stood at the last look, unseeded
        self._last = 0, 0

    def seed(self, epoch: int, position: int) -> None:
        """Seed the generators for one sample; with ``~position``, for what is no sample."""
        self._last = epoch, position
        seed_globals(self._seed, epoch, position)

    def seed_collate(self, epoch: int, position: int) -> None:
        """Seed the generators for the user's own ``collate_fn``, by the first position of the batch."""
        if self.active:
            self._judge()
            self.seed(epoch, ~position)

    def run(self, load: Callable[[], T], *, of_many: bool, kept: bool) -> T:
        """What ``load`` returns; ``kept``: with the generators left as they were.

        ``load`` calls `seed` for each sample where `active` says so, and may be called twice. ``of_many`` samples: watching costs
        more than it saves on a few.
        """
        if not self._on:
            return load()
        if of_many and self._calm is not None and self._calm >= self._needed:
            before = self._watch.look() if kept or self._seen is None else self._seen  # in a worker nobody else draws
            if before is not None:
                return self._watched(load, before, kept)
        self._seen = None
        with self.kept(kept):
            value = load()
            if of_many and self._calm is not None:
                self._calm += 1
                self._judge()
            return value

    def _watched(self, load: Callable[[], T], before: States, kept: bool) -> T:
        """Unseeded, and if it then draws, once more seeded."""
        error: BaseException | None = None
        self.active = False
        try:
            value = load()
        except BaseException as exc:
            error = exc
        finally:
            self.active = True
        self._seen = self._watch.look()
        if self._seen != before:
            self._calm = None
            if kept:
                self._watch.put_back(before)
            if error is None or isinstance(error, Exception):
                with self.kept(kept):
                    return load()
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # which knows this frame: neither should keep the other

    def kept(self, kept: bool = True) -> contextlib.AbstractContextManager[None]:
        """Leave the generators as they were, if they are touched at all."""
        return global_rngs_kept() if self._on and kept else contextlib.nullcontext()

    def _judge(self) -> None:
        """See whether anything was drawn since the last seed: then the generators do not stand where it had put them."""
        if self._calm is None:
            return
        now = self._watch.look()
        seed_globals(self._seed, *self._last)
        if now is None or self._watch.look() != now:
            self._calm = None
