"""The global generators of Python, NumPy and torch: one draw from each, their states as values that compare, and one
seed for all."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def generators() -> tuple[Any, ...]:
    name, words, *rest = np.random.get_state()
    return random.getstate(), (name, words.tolist(), *rest), torch.get_rng_state().tolist()  # type: ignore[union-attr]


def seeded(seed: int = 7) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
