"""Load samples in the thread that reads the node: the consumer's, or a reader thread."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, Literal, final

from penstock._fetch.fetch import Fetch
from penstock._fetch.fetch_task import FetchTask
from penstock._fetch.function_task import FunctionTask
from penstock._random.global_rng import GlobalRngSnapshot, global_rngs_kept, seed_globals
from penstock._random.global_seeding import CALM
from penstock._workers.reader_thread import reads_ahead

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._fetch.error_policy import OnError
    from penstock._memory.allocation import Allocate
    from penstock._random.global_rng import States


_logger = logging.getLogger("penstock")


@final
class InlineWork:
    """Runs tasks in the caller's thread, and leaves the global generators unchanged.

    In the consumer's thread, the generators are seeded for each sample and restored afterwards; see `GlobalSeeding`. In
    a reader thread, restoring would undo the consumer's concurrent draws. So a reader thread watches the first batches
    to see whether samples draw at all:

    - If they do not, nothing is seeded.
    - If they do, they are seeded, and each batch is loaded only while the consumer waits for it (`in_step`), so that no
      other code draws.

    Args:
        map_fn: Applied to each item.
        seed: Seed of the samples' random numbers.
        seed_global_rngs: See `ParallelMapper`.
        on_error: See `ParallelMapper`.
    """

    def __init__(
        self, map_fn: Callable[[Any], Any], seed: int, seed_global_rngs: bool | Literal["always"], on_error: OnError
    ) -> None:
        self.seeded: FetchTask | FunctionTask = (
            FetchTask(map_fn, seed, seed_global_rngs, on_error)
            if isinstance(map_fn, Fetch)
            else FunctionTask(map_fn, seed, seed_global_rngs)
        )
        # A function may change its item; a sample can be loaded again.
        self._copies = not isinstance(self.seeded, FetchTask) or self.seeded.dataset is None
        self._calm = CALM if seed_global_rngs is False else 0  # consecutive batches that drew nothing
        # What belongs to the whole process is not touched while the consumer works, neither its generators nor torch's
        # worker info.
        self._draws = seed_global_rngs == "always" or (isinstance(map_fn, Fetch) and map_fn.facts.sets_worker_info)
        self._watch = GlobalRngSnapshot()

    def __call__(self, task: Any, allocate: Allocate) -> Any:
        """Do ``task`` and return its value."""
        if self._draws or not reads_ahead():
            return self.seeded.inline(task, allocate)
        if self._calm >= CALM:
            return self.seeded.unseeded(task, allocate)
        return self._probed(task, allocate)

    def again(self, task: Any, allocate: Allocate) -> Any:
        """The same, for a task of any epoch. The user's own datasets are told again which epoch the loop is in."""
        epoch = self.seeded.told
        try:
            return self(task, allocate)
        finally:
            if epoch is not None and self.seeded.told != epoch:
                self.seeded.tell(epoch, inline=True)

    @property
    def in_step(self) -> bool:
        """Whether a reader thread may load a batch only while the consumer waits for it."""
        return self._draws or self._calm < CALM

    def _probed(self, task: Any, allocate: Allocate) -> Any:
        """Load ``task`` unseeded. If that draws, load it again, seeded."""
        again = task
        if self._copies:
            try:
                again = copy.deepcopy(task)
            except Exception:  # an open file, a generator
                self._draws = True  # perhaps: seeding is always right
                return self.seeded.inline(task, allocate)
        with global_rngs_kept():
            # the consumer's draws may have left a spare normal deviate in NumPy, which `look` cannot handle
            seed_globals(0, 0, 0)
            before = self._watch.look()
            try:
                value = self.seeded.unseeded(task, allocate)
            except Exception:
                if self._was_calm(before):
                    raise
            else:
                if self._was_calm(before):
                    return value
        _logger.warning(
            "%s draws from the global random numbers in a background thread, or another thread drew while it ran. To "
            "leave your own draws undisturbed, batches are loaded only while you wait for them, not ahead. To load "
            "ahead, use workers (num_workers; a ParallelMapper has them, a Mapper does not), or draw from "
            "penstock.sample().rng, also in the other thread.",
            self.seeded.parts_that_may_draw,
        )
        self.seeded.generators.is_first = self.seeded.generators.checks  # it was not compared: unseeded numbers differ
        return self.seeded.inline(again, allocate)

    def _was_calm(self, before: States | None) -> bool:
        """Record whether the batch drew nothing since ``before``."""
        self._draws = before is None or self._watch.look() != before
        self._calm += not self._draws
        return not self._draws
