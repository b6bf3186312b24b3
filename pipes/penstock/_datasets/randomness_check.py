"""Detects randomness in samples that are loaded once and reused in every epoch."""

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
    """Refuses samples that draw from `penstock.sample()`, and warns once per process about samples that draw from the
    global generators.

    It watches the global generators only in a main thread (of a worker process, or inline): in a worker thread, another
    thread may have made the draw.

    Args:
        remedy: The last sentence of the message, which says what to do instead.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._watch = GlobalRngSnapshot()
        self._warned = False

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Watch for draws while the body loads ``what``.

        Raises:
            ValueError: The body drew from `penstock.sample()`.
        """
        try:
            known = vars(sample())  # a generator appears here on first use
        except RuntimeError:
            known = {}
        asked = len(known)
        watched = not self._warned and threading.current_thread() is threading.main_thread()
        before = self._watch.look() if watched else None
        yield
        if len(known) > asked:
            raise ValueError(
                f"{what} drew from penstock.sample(), so the result would be the same in every epoch. {self._remedy}"
            )
        if before is not None and self._watch.look() != before:
            self._warned = True
            _logger.warning(
                "%s drew from the global random numbers (or another thread did at the same time). Every epoch reuses "
                "those draws. Samples loaded from now on are not checked. %s",
                what,
                self._remedy,
            )
