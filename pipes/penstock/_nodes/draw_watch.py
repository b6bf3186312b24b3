"""Warns once of draws in worker threads from the global generators, and from those that the user's objects hold.

Threads share these generators with each other and with the training loop, so they cannot be seeded for a sample, and
the numbers drawn depend on timing. If the generators move while all threads between the loop and its workers wait
(`Blocked`), a worker has drawn, or another thread of the program. That costs two looks per wait.
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
class DrawWatch(Blocked):
    """Watches the workers of one `ParallelMapper`.

    Args:
        work: Their task function.

    Attributes:
        message: The warning, once issued.
    """

    def __init__(self, work: Task) -> None:
        super().__init__(looker(work.generators.states))
        self._work = work
        self.message: str | None = None

    def warn(self, workers: Collection[int]) -> None:
        """Warn if what was seen is a draw, and end the watch.

        Args:
            workers: The threads that were watched.
        """
        changed, self.changed = self.changed, None
        if changed is None or self.off:  # a thread saw another change just as the watch ended
            return
        if message := self._message(*changed, self.others(workers)):  # none if a generator has only been found
            self.off, self.message = True, message
            warnings.warn(message, stacklevel=2)

    def message_if_drawn(self, before: Look) -> str:
        """The warning, if the generators changed since ``before``, a `look`; otherwise empty.

        For a caller who knows that only workers can have drawn.

        The watch itself looks only while the loop waits.
        """
        return self._message(before, self.look(), [])

    def _message(self, before: Look, after: Look, others: list[str]) -> str:
        names = drawn(before, after)
        if not names:
            return ""
        of_process, of_objects = [name for name in GENERATORS if name in names], sorted(names.difference(GENERATORS))
        what = ["the global random numbers"] * bool(of_process) + ["a shared generator"] * bool(of_objects)
        other = f", or another thread of your program ({', '.join(others[:_NAMED])})," if others else ""
        return (
            f"{self._work.parts_that_may_draw}{other} drew from {' and from '.join(what)} in worker threads "
            f"({', '.join(of_process + of_objects)}). The threads share them with each other and with your loop, so "
            f"the numbers depend on timing: another run gives different batches, and so does a resumed one. In the "
            f"dataset and in transform=, draw from penstock.sample().rng or penstock.sample().torch_generator, which "
            f'belong to the sample; or use method="process", where penstock seeds these generators for each sample.'
        )


_NAMED = 3
"""Other threads that the warning names."""
