"""When to seed the global generators: for each sample, unless nothing is known to draw from them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar, final

from penstock._errors import is_own_error
from penstock._random.global_rng import (
    GlobalRngSnapshot,
    forget_interrupted,
    global_rngs_kept,
    note_watched,
    seed_globals,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._random.global_rng import States


T = TypeVar("T")

CALM = 4
"""After this many consecutive batches without a draw, batches are loaded unseeded and watched."""


@final
class GlobalSeeding:
    """Seeds ``random``, ``numpy.random`` and torch's CPU generator for each sample, in 7 us, or makes sure that nothing
    draws from them.

    Few datasets draw from them. So once several batches have drawn nothing, batches are loaded unseeded, and the
    generators are compared before and after. If a batch does draw, it is loaded again, seeded, and so are all later
    ones: a sample is the same either way. Code that only looks at a generator (``torch.initial_seed()``), or restores
    it (``torch.random.fork_rng``), is not detected; for such code use ``calm=None``. One thread at a time.

    Args:
        seed: Seed of the samples' random numbers.
        on: False never touches the generators.
        calm: How many consecutive batches must draw nothing before seeding stops; None: it never stops.

    Attributes:
        active: Whether the samples being loaded now must be seeded.
    """

    def __init__(self, seed: int, on: bool, *, calm: int | None = CALM) -> None:
        self.active = on
        self._seed = seed
        self._on = on
        self._needed = calm or 0
        self._calm: int | None = None if calm is None else 0  # consecutive batches without a draw; None: one did draw
        self._watch = GlobalRngSnapshot()
        self._seen: States | None = None  # the states at the last unseeded look
        self._last = 0, 0

    def seed(self, epoch: int, position: int) -> None:
        """Seed the generators for one sample; ``~position`` seeds them for anything else that loads."""
        self._last = epoch, position
        seed_globals(self._seed, epoch, position)

    def seed_collate(self, epoch: int, position: int) -> None:
        """Seed the generators for the user's own ``collate_fn``, by the first position of the batch."""
        if self.active:
            self._judge()
            self.seed(epoch, ~position)

    def run(self, load: Callable[[], T], *, of_many: bool, kept: bool) -> T:
        """Return ``load()``; with ``kept``, restore the generators afterwards.

        ``load`` calls `seed` for each sample if `active`, and may be called twice. ``of_many``: whether it loads enough
        samples for watching to cost less than it saves.
        """
        if not self._on:
            return load()
        if of_many and self._calm is not None and self._calm >= self._needed:
            # in a worker process nothing else draws
            before = self._watch.look() if kept or self._seen is None else self._seen
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
        """Load unseeded; if that draws, load again with seeds."""
        error: BaseException | None = None
        noted = kept and note_watched(before)
        self.active = False
        try:
            value = load()
        except BaseException as exc:
            error = exc
        finally:
            self.active = True
        self._seen = self._watch.look()
        drew = self._seen != before
        if drew and kept:
            self._watch.put_back(before)
        if noted:
            forget_interrupted()
        if drew:
            self._calm = None
            # an error from a signal handler would not recur
            if error is None or (isinstance(error, Exception) and is_own_error(error)):
                with self.kept(kept):
                    return load()
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # breaks a reference cycle with this frame

    def kept(self, kept: bool = True) -> contextlib.AbstractContextManager[None]:
        """Restore the generators after the body, if they are used at all."""
        return global_rngs_kept() if self._on and kept else contextlib.nullcontext()

    def _judge(self) -> None:
        """Determine whether anything was drawn since the last seeding: if so, seeding again changes the generators."""
        if self._calm is None:
            return
        now = self._watch.look()
        seed_globals(self._seed, *self._last)
        if now is None or self._watch.look() != now:
            self._calm = None
