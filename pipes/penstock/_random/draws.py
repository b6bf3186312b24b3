"""Detects draws from the global generators where only worker threads can have made them, and finds the part of their work that draws.

It only reads the generators. A look costs 0.2 us, because one word and the position of each Mersenne Twister show whether it was used: the position
advances with each draw, and the words change when it wraps around. A normal deviate that a generator kept from an earlier draw can be taken without being
detected, but the draw that made it is detected.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from penstock._random.global_rng import numpy_twister, python_twister, torch_twister

if TYPE_CHECKING:
    from collections.abc import Callable

    Look = tuple[Any, Any, Any, dict[str, Any]]

GENERATORS = "random", "numpy.random", "torch"


def looker(others: Callable[[], dict[str, Any]] = dict) -> Callable[[], Look]:
    """A function that returns the positions of the three generators, for comparison, and the states of ``others``. It looks at the generators that exist now."""
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    twister, numpys, torchs = python_twister(), numpy_twister(bits), torch_twister()
    if twister is None or numpys is None or torchs is None:
        return lambda: (random.getstate(), repr(bits.state), torch.default_generator.get_state().numpy().tobytes(), others())
    # The position, and an adjacent word.
    a, b, c = (eight.data.cast("Q") for eight in (twister[1][:8], numpys[-8:], torchs.place))
    return lambda bits=bits: (a[0], b[0], c[0], others())  # type: ignore[misc]  # keeps alive the memory that it reads


def drawn(before: Look, after: Look) -> set[str]:
    """The generators that were used between two looks."""
    return {name for name, was, now in zip(GENERATORS, before, after, strict=False) if was != now} | moved(before[3], after[3])


def moved(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The names whose values differ."""
    return {name for name, state in after.items() if before.get(name, state) != state}


@final
class Trial:
    """Finds which parts of a task draw. The worker does the task alone, while the consumer waits.

    Other threads of the program may draw as well, occasionally or all the time. So after each part the worker pauses for about four times as long as
    the part took, and a part is reported only if it draws five times before anything is drawn during a pause. Draws at random times are mistaken for those of a part
    once in 3000 cases. The lengths of the pauses vary, so that no rhythm matches them.

    Args:
        look: See `looker`.
        stamp: Shows whether all other workers are idle: an equal value before and after a part means that they were idle in between. None: not now.
        alone: Whether the program has no other threads.

    Attributes:
        found: The parts that draw, and from which generators.
        over: Nothing more will be found.
    """

    def __init__(self, look: Callable[[], Look], stamp: Callable[[], int | None], alone: bool) -> None:
        self.found: dict[str, set[str]] = {}
        self.over = False
        self._look = look
        self._stamp = stamp
        self._alone = alone
        self._draws: Counter[str] = Counter()
        self._detail: str | None = None
        self._pauses = 0
        self._paused_s = 0.0

    def watched(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """``function``, known as ``part``, watched while it runs. It may call other parts."""

        def runs(*arguments: Any) -> Any:
            if self.over:
                return function(*arguments)
            token, self._detail = trying.set(self), None
            counted, paused = self._draws.total(), self._paused_s
            stamp, before, began = self._stamp(), self._look(), time.perf_counter()
            try:
                return function(*arguments)
            finally:
                after, spent = self._look(), time.perf_counter() - began
                trying.reset(token)
                if stamp is not None and stamp == self._stamp():
                    if after != before and self._draws.total() == counted:
                        self._count(self._detail or part, drawn(before, after))
                    if not self._alone and not self.over:
                        self._pause(spent - (self._paused_s - paused))

        return runs

    def name(self, detail: str) -> None:
        """Add ``detail``: what draws in the current part."""
        self._detail = detail

    def _count(self, part: str, generators: set[str]) -> None:
        self._draws[part] += 1
        if self._alone or self._draws[part] == _DRAWS:
            self.found.setdefault(part, set()).update(generators)
            self.over = not self._alone

    def _pause(self, spent: float) -> None:
        self._pauses += 1
        pause = min(_LONGEST_S, spent * (2 + 4 * (self._pauses * 0.618 % 1)))
        before = self._look()
        time.sleep(pause)
        self._paused_s += pause
        self.over = self._look() != before or (self._paused_s > _PATIENCE_S and self._pauses > 2 * _DRAWS)


_DRAWS = 5
_LONGEST_S = 2.0
_PATIENCE_S = 5.0

trying: ContextVar[Trial | None] = ContextVar("penstock_trial", default=None)
"""The trial of the part that is currently running."""
