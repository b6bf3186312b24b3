"""Sees draws from the global generators, where only worker threads can have drawn; and finds out which part of their work draws.

It only reads the generators. A look costs 0.2 us, because a word and the position of each Mersenne Twister tell whether it was drawn from: the position
moves with each draw, and the words change when it starts over. A normal deviate that a generator has kept from an earlier draw may be taken unseen; the
draw that made it is seen.
"""

from __future__ import annotations

import random
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from penstock._random.global_rng import _numpy_twister, _python_twister, _torch_twister

if TYPE_CHECKING:
    from collections.abc import Callable

    Look = tuple[Any, Any, Any]

GENERATORS = "random", "numpy.random", "torch"


def looker() -> Callable[[], Look]:
    """A function that returns where the three generators stand, to be compared. It looks at the generators that there are now."""
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    twister, numpys, torchs = _python_twister(), _numpy_twister(bits), _torch_twister()
    if twister is None or numpys is None or torchs is None:
        return lambda: (random.getstate(), repr(bits.state), torch.default_generator.get_state().numpy().tobytes())
    # The position, and a word beside it.
    a, b, c = (memoryview(eight).cast("Q") for eight in (twister[1][:8], numpys[-8:], torchs.place))
    return lambda bits=bits: (a[0], b[0], c[0])  # type: ignore[misc]  # its memory must live as long as it is read


def drawn(before: Look, after: Look) -> set[str]:
    """From which generators was drawn between two looks."""
    return {name for name, was, now in zip(GENERATORS, before, after, strict=True) if was != now}


@final
class Trial:
    """Finds which parts of a task draw. The worker does the task alone, while the consumer waits.

    If the program has other threads, they may draw as well, now and then or all the time. So a part is found only after three draws, and after each of
    them the worker pauses, for four times as long as the part took: nothing may be drawn then. Another thread that draws at random times passes for a
    part once in 1800 cases, if its rhythm is the worst.

    Args:
        look: See `looker`.
        stamp: Tells whether all others wait: an equal value before and after a part says that they did in between. None: not now.
        alone: Whether the program has no other threads.

    Attributes:
        disturbed: Another thread has drawn in a pause, so nothing is found.
    """

    def __init__(self, look: Callable[[], Look], stamp: Callable[[], int | None], alone: bool) -> None:
        self._look = look
        self._stamp = stamp
        self._needed = 1 if alone else 3
        self._seen: dict[str, list[set[str]]] = {}
        self._detail: str | None = None
        self.disturbed = False

    @property
    def found(self) -> dict[str, set[str]]:
        """The parts that draw, and from which generators."""
        return {part: set.union(*draws) for part, draws in self._seen.items() if len(draws) >= self._needed}

    def watched(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """``function``, which is called ``part``, watched while it runs."""

        def runs(*arguments: Any) -> Any:
            token, self._detail = trying.set(self), None
            stamp, before, began = self._stamp(), self._look(), time.perf_counter()
            try:
                return function(*arguments)
            finally:
                after, spent = self._look(), time.perf_counter() - began
                trying.reset(token)
                if after != before and not self.disturbed and stamp is not None and stamp == self._stamp():
                    self._judge(self._detail or part, drawn(before, after), spent)

        return runs

    def name(self, detail: str) -> None:
        """What draws in the part that runs is ``detail``."""
        self._detail = detail

    def _judge(self, part: str, generators: set[str], spent: float) -> None:
        draws = self._seen.setdefault(part, [])
        draws.append(generators)
        if 1 < self._needed >= len(draws):
            before = self._look()
            time.sleep(min(4 * spent, _PAUSE_S))
            self.disturbed = self._look() != before


_PAUSE_S = 1.0

trying: ContextVar[Trial | None] = ContextVar("penstock_trial", default=None)
"""The trial of the part that runs here."""
