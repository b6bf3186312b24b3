"""The dataset of the cache in ``saved_cache/``; the cache stores its name and its samples. To write a cache, run this
file in ``tests/..``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import penstock

FOLDER = Path(__file__).with_name("saved_cache")


class Point(NamedTuple):
    x: Any
    y: Any


class Saved:
    """Samples of every kind that a cache accepts; ``calls`` counts the loads."""

    calls = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        Saved.calls += 1
        return {
            "image": torch.arange(index * 2 + 2, dtype=torch.float32).reshape(2, -1),
            "array": np.full((index, 3), index, np.int16),
            "point": Point(np.float64(index / 3), [index, None, True]),
            "text": f"sample {index}",
            "bytes": bytes(range(index)),
        }


if __name__ == "__main__":
    # so that it is saved under a name that can be imported
    from tests.compatibility.saved_dataset import Saved as Named

    cache = penstock.Cached(Named(), sys.argv[1], fingerprint={"version": 1})
    for index in range(len(cache)):
        cache[index]
    cache.close()
