"""What is loaded once, for all epochs, should not be random: what sees whether it is."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, final

from penstock._fetch.sample import sample
from penstock._random.global_rng import GlobalRngSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator


_logger = logging.getLogger("penstock")


@final
class RandomnessCheck:
    """Refuses what draws from `penstock.sample()`, and warns, once in a process, of what draws from the global generators.

    Those are looked at in main threads only (worker processes', and inline): in a worker thread nobody can tell whose draw it was.

    Args:
        remedy: What to do instead, in a sentence.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._watch = GlobalRngSnapshot()
        self._warned = False

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Look at what the body draws; ``what`` it loads.

        Raises:
            ValueError: It has asked for the random numbers of a sample.
        """
        try:
            known = vars(sample())  # its generators appear there when they are first asked for
        except RuntimeError:
            known = {}
        asked = len(known)
        watched = not self._warned and threading.current_thread() is threading.main_thread()
        before = self._watch.look() if watched else None
        yield
        if len(known) > asked:
            raise ValueError(f"{what} drew from penstock.sample(), and that would be frozen for all epochs. {self._remedy}")
        if before is not None and self._watch.look() != before:
            self._warned = True
            _logger.warning(
                "%s drew from the global random numbers (or another thread did meanwhile), and that is frozen for all epochs, here and in what is "
                "loaded from now on. %s",
                what,
                self._remedy,
            )
