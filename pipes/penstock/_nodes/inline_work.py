"""Samples that are loaded in the thread that reads the node, whichever that is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, final

from penstock._fetch.task import FetchTask, FunctionTask, work_of
from penstock._random.global_rng import GlobalRngSnapshot, global_rngs_kept, seed_globals
from penstock._random.global_seeding import CALM
from penstock._workers.reader_thread import reads_ahead

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._fetch.error_policy import OnError
    from penstock._memory.allocation import Allocate


_logger = logging.getLogger("penstock")


@final
class InlineWork:
    """Does tasks in the caller's thread, whose global generators are left as they were.

    In the consumer's own thread they are seeded for each sample, and put back; see `GlobalSeeding`. In a reader thread that would take back what the
    consumer draws meanwhile. So there it is first found out whether samples draw from them at all, over some batches, and then:

    - They do not: nothing is seeded.
    - They do: they are seeded, and every batch is loaded only while the consumer waits for it (`in_step`), so that nobody else draws.

    Args:
        map_fn: What is applied to each item.
        seed: Of the random numbers of samples.
        seed_samples: See `ParallelMapper`.
        on_error: See `ParallelMapper`.
    """

    def __init__(
        self, map_fn: Callable[[Any], Any], seed: int, seed_samples: bool | Literal["always"], on_error: OnError = "raise"
    ) -> None:
        self.seeded: FetchTask | FunctionTask = work_of(map_fn, seed, seed_samples, on_error)
        self._unseeded = work_of(map_fn, seed, False, on_error)
        self._what = type(self.seeded.dataset if isinstance(self.seeded, FetchTask) else map_fn).__name__
        self._calm = CALM if seed_samples is False else 0  # batches in a row that drew nothing
        self._draws = seed_samples == "always"
        self._watch = GlobalRngSnapshot()

    def __call__(self, task: Any, allocate: Allocate) -> Any:
        """The value of ``task``."""
        if self._draws or not reads_ahead():
            return self.seeded.inline(task, allocate)
        if self._calm >= CALM:
            return self._unseeded.inline(task, allocate)
        return self._found_out(task, allocate)

    @property
    def in_step(self) -> bool:
        """Whether a reader thread must load nothing unless the consumer waits for it."""
        return self._draws or self._calm < CALM

    def _found_out(self, task: Any, allocate: Allocate) -> Any:
        """Unseeded; and if that draws, once more seeded."""
        error: Exception | None = None
        value = None
        with global_rngs_kept():
            seed_globals(0, 0, 0)  # Where the consumer has left them, NumPy may keep a deviate, and then nothing can be said.
            before = self._watch.look()
            try:
                value = self._unseeded.inline(task, allocate)
            except Exception as exc:
                error = exc
            self._draws = before is None or self._watch.look() != before
        if self._draws:
            _logger.warning(
                "%s draws from the global random numbers, and is loaded in a background thread: so that it does not disturb what you draw, it is loaded only "
                "while a batch is waited for, and not ahead. To load ahead, use workers (num_workers), or let it draw from penstock.sample().rng.",
                self._what,
            )
            del error
            return self.seeded.inline(task, allocate)
        self._calm += 1
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # which knows this frame: neither should keep the other
