"""Warns once about work that draws from the global generators in worker threads.

Threads share these generators with each other and with the training loop, so they cannot be seeded for a sample, and the numbers drawn
depend on timing. Such draws are found in two steps:

1. *Does anything draw?* It does if the generators change while the consumer waits for the workers; see `Blocked`. That costs two checks per
   wait.
2. *What draws?* The mapper then makes the next items one at a time, each in one worker alone while the consumer waits; see `Trial`. This
   costs a program that draws a few batches that are not loaded ahead, once. A program that does not draw pays nothing.

If the trial finds nothing, the draws are rare, or there was a single one, such as from a module that draws on import, or from another
thread. Then the next draw that is seen counts if the program has no other threads; if it has, the trial is repeated a few times.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, final

from penstock._random.draws import GENERATORS, Trial, drawn, looker
from penstock._workers.blocked import Blocked

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock._fetch.task import Task
    from penstock._random.draws import Look


@final
class DrawWatch:
    """Watches the workers of one `ParallelMapper`.

    Args:
        work: Their task function.

    Attributes:
        blocked: The places of the threads that wait for the workers.
        place: The place of the thread that reads the mapper.
        said: The warning, once issued.
    """

    def __init__(self, work: Task) -> None:
        self._work = work
        self.look = looker(work.generators.states)
        self.blocked = Blocked(self.look)
        self.place = self.blocked.place()
        self.said: str | None = None
        self._trial: Trial | None = None
        self._left = 0  # items that this trial may still take
        self._failed = 0  # trials that found nothing

    @property
    def trying(self) -> bool:
        """Whether the mapper must have at most one item in progress."""
        return self.blocked.changed is not None

    def begin(self, workers: Collection[int]) -> None:
        """The next item is made alone."""
        if self.blocked.off or self.blocked.changed is None:  # the loop saw another change just as the watch ended
            self.blocked.changed = None
            return
        if self._trial is None:
            alone = self.blocked.alone(workers)
            if self._failed and alone and self.blocked.direct:
                self._say({self._work.parts_that_may_draw: drawn(*self.blocked.changed)})
                return
            self._trial, self._left = Trial(self.look, self.blocked.stamp, alone), _TRIES
        self._work.trial = self._trial

    def judge(self) -> None:
        """An item was made; it was made alone if `begin` was called before."""
        trial, self._work.trial = self._work.trial, None
        if trial is None:
            return
        self._left -= 1
        if trial.found:
            self._say(trial.found)
        elif trial.over or not self._left:
            self._failed += 1
            self._end(off=self._failed == _TRIALS)

    def words_if_drawn(self, before: Look) -> str:
        """The warning, if the generators changed since ``before``, a `look`, and only workers can have drawn; otherwise empty.

        The watch itself looks only while the loop waits.
        """
        found = drawn(before, self.look())
        return _words({self._work.parts_that_may_draw: found}) if found else ""

    def _end(self, *, off: bool) -> None:
        self.blocked.off = off  # first, because the loop may just be ending its wait, and would see another change
        self.blocked.changed = self._trial = None

    def _say(self, found: dict[str, set[str]]) -> None:
        self._end(off=True)
        self.said = _words(found)
        warnings.warn(self.said, stacklevel=2)


def _words(found: dict[str, set[str]]) -> str:
    names = set().union(*found.values())
    order = *GENERATORS, *sorted(names.difference(GENERATORS))
    parts = " and ".join(f"{part} ({', '.join(name for name in order if name in generators)})" for part, generators in found.items())
    what = ["the global random numbers"] * bool(names.intersection(GENERATORS)) + ["a shared generator"] * bool(
        names.difference(GENERATORS)
    )
    return (
        f"{parts} {'draw' if len(found) > 1 else 'draws'} from {' and from '.join(what)} in worker threads. The threads share them with each other and with your loop, so the "
        f"numbers depend on timing: another run gives different batches, and so does a resumed one. In the dataset and in transform=, draw from penstock.sample().rng or "
        f'penstock.sample().torch_generator, which belong to the sample; or use method="process", where penstock seeds these generators for each sample.'
    )


_TRIES = 16
_TRIALS = 4
