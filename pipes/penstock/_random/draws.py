"""Detects draws from the global generators, and from others that objects hold.

It only reads the generators. A look costs 0.2 us, because one word and the position of each Mersenne Twister show
whether it was used: the position advances with each draw, and the words change when it wraps around. A normal deviate
that a generator kept from an earlier draw can be taken without being detected, but the draw that made it is detected.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock._random.global_rng import numpy_twister, python_twister, torch_twister

if TYPE_CHECKING:
    from collections.abc import Callable

    Look = tuple[Any, Any, Any, dict[str, Any]]

GENERATORS = "random", "numpy.random", "torch"


def looker(others: Callable[[], dict[str, Any]] = dict) -> Callable[[], Look]:
    """A function that returns the positions of the three generators, for comparison, and the states of ``others``.

    It looks at the generators that exist now.
    """
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    twister, numpys, torchs = python_twister(), numpy_twister(bits), torch_twister()
    if twister is None or numpys is None or torchs is None:
        return lambda: (
            random.getstate(),
            repr(bits.state),
            torch.default_generator.get_state().numpy().tobytes(),
            others(),
        )
    # The position, and an adjacent word.
    a, b, c = (eight.data.cast("Q") for eight in (twister[1][:8], numpys[-8:], torchs.place))
    return lambda bits=bits: (a[0], b[0], c[0], others())  # type: ignore[misc]  # keeps alive the memory that it reads


def drawn(before: Look, after: Look) -> set[str]:
    """The generators that were used between two looks."""
    return {name for k, name in enumerate(GENERATORS) if before[k] != after[k]} | moved(before[3], after[3])


def moved(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The names whose values differ."""
    return {name for name, state in after.items() if before.get(name, state) != state}
