"""A sample with every type that a batch can contain, and with its own random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import penstock


def rich(index: int) -> dict[str, Any]:
    own = penstock.sample()
    return {
        "image": np.full((40, 40), index, np.float32),
        "large": torch.full((30_000,), float(index)),
        "half": torch.full((3,), float(index), dtype=torch.bfloat16),
        "label": index,
        "name": f"{index}",
        "pair": (index / 3, [np.int16(index), index % 2 == 0]),
        "own": own.rng.random(),
        "address": torch.tensor([own.epoch, own.position, own.index]),
    }
