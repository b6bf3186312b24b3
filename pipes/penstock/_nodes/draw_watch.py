"""Warns once of draws from the global generators in worker threads.

Threads share these generators with each other and with the training loop, so they cannot be seeded for a sample, and the numbers drawn depend on timing.
If the generators move while all threads between the loop and its workers wait (`Blocked`), a worker has drawn, or another thread of the program. That costs
two looks per wait.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, final

from penstock._random.draws import GENERATORS, drawn, looker
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

    def warn(self, workers: Collection[int]) -> None:
        """Warn of what `blocked` has seen; the watch ends with a draw.

        Args:
            workers: The threads that were watched.
        """
        changed, self.blocked.changed = self.blocked.changed, None
        if changed is None or self.said is not None:  # a thread saw another change just as the watch ended
            return
        if words := self._words(*changed, self.blocked.others(workers)):  # a generator that has only been found is no draw
            self.blocked.off, self.said = True, words
            warnings.warn(words, stacklevel=2)

    def words_if_drawn(self, before: Look) -> str:
        """The warning, if the generators changed since ``before``, a `look`, and only workers can have drawn; otherwise empty.

        The watch itself looks only while the loop waits.
        """
        return self._words(before, self.look(), [])

    def _words(self, before: Look, after: Look, others: list[str]) -> str:
        names = drawn(before, after)
        if not names:
            return ""
        order = *GENERATORS, *sorted(names.difference(GENERATORS))
        what = ["the global random numbers"] * bool(names.intersection(GENERATORS)) + ["a shared generator"] * bool(
            names.difference(GENERATORS)
        )
        other = f", or another thread of your program ({', '.join(others[:_NAMED])})," if others else ""
        return (
            f"{self._work.parts_that_may_draw}{other} drew from {' and from '.join(what)} in worker threads ({', '.join(name for name in order if name in names)}). The threads "
            f"share them with each other and with your loop, so the numbers depend on timing: another run gives different batches, and so does a resumed one. In the dataset and "
            f'in transform=, draw from penstock.sample().rng or penstock.sample().torch_generator, which belong to the sample; or use method="process", where penstock seeds '
            f"these generators for each sample."
        )


_NAMED = 3
"""Other threads that the warning names."""
