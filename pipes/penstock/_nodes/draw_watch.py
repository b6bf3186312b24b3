"""Warns once of draws in worker threads from the global generators, and from those that the user's objects hold.

Threads share these generators with each other and with the training loop, so they cannot be seeded for a sample, and
the numbers drawn depend on timing. If the generators move while all threads between the loop and its workers wait, a
worker has drawn, or another thread of the program: the last one that begins to wait looks, and the first one that ends
looks again. That costs two looks per wait.
"""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, final

from penstock._random.draws import GENERATORS, drawn, looker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock._fetch.task import Task
    from penstock._random.draws import Look

T = TypeVar("T")


@final
class DrawWatch:
    """Watches the workers of one `ParallelMapper`.

    Each thread that waits for them, or for one that does, has a place: the one that reads the mapper has the first, and
    if that is a reader thread, the loop's own and those of other reader threads have more.

    Args:
        work: Their task function.

    Attributes:
        look: Returns what is watched of the generators, for `message_if_drawn`.
        changed: The looks before and after all waited, if they differed; the last such pair.
        off: The watch has ended.
        message: The warning, once issued.
    """

    def __init__(self, work: Task) -> None:
        self._work = work
        self.look = looker(work.generators.states)
        self.changed: tuple[Look, Look] | None = None
        self.off = False
        self.message: str | None = None
        # An RLock, because a signal handler may read the loader, too.
        self._lock = threading.RLock()
        self._threads = [0]  # in each place, the one that was there last
        self._waits = [False]  # in each place, whether it waits
        self._before: Any = None  # the look when the last one began to

    def place(self) -> Callable[..., Any]:
        """A place for one more thread: `waiting` in it."""
        self._threads.append(0)
        self._waits.append(False)
        return partial(self.waiting, len(self._waits) - 1)

    def waiting(self, place: int, wait: Callable[..., T], *arguments: Any) -> T:
        """Return ``wait(*arguments)``, in which the thread waits, or does the workers' work."""
        if self.off:
            return wait(*arguments)
        try:
            with self._lock:
                self._threads[place], self._waits[place] = threading.get_ident(), True
                if all(self._waits):
                    self._before = self.look()
            return wait(*arguments)
        finally:
            # Look while this thread still counts as waiting, because its own draws, from the next line of the loop on,
            # are not a worker's.
            with self._lock:
                if all(self._waits) and (after := self.look()) != self._before:
                    self.changed = self._before, after
                self._waits[place] = False

    def warn(self, workers: Collection[int]) -> None:
        """Warn if what was seen is a draw, and end the watch.

        Args:
            workers: The threads that were watched.
        """
        changed, self.changed = self.changed, None
        if changed is None or self.off:  # a thread saw another change just as the watch ended
            return
        known = {*workers, *self._threads}
        others = [thread.name for thread in threading.enumerate() if thread.ident not in known]
        if message := self._message(*changed, others):  # none if a generator has only been found
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
