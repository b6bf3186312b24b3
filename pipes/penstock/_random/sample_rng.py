"""The random numbers of a sample: a pure function of (seed, epoch, position).

Any thread or process that loads a sample, for the first time or again, gets the same numbers: none comes from a stream
that other code could have advanced. A seed, an epoch and a position are each from 0 to 2**63 - 1. Golden values in the
tests freeze the results.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from penstock._random.permutation import SAMPLES, philox
from penstock._random.splitmix import GAMMA, mixed


def numpy_generator(seed: int, epoch: int, position: int) -> np.random.Generator:
    """A NumPy generator for one sample, in 8 us."""
    return np.random.Generator(philox(seed, epoch, SAMPLES, position))


def torch_generator(seed: int, epoch: int, position: int) -> torch.Generator:
    """A torch generator (CPU) for one sample, in 4 us.

    It is a Mersenne Twister that torch seeds with 32 bits, so among 10^5 samples expect one pair with the same numbers.
    """
    return torch.Generator().manual_seed(mixed(sample_word(seed, epoch, position) + 2 * GAMMA))


def sample_word(seed: int, epoch: int, position: int) -> int:
    """64 random bits for one sample."""
    return mixed((epoch_word(seed, epoch) ^ position) + GAMMA)


@lru_cache(maxsize=64)
def epoch_word(seed: int, epoch: int) -> int:
    """64 random bits for one epoch."""
    return mixed((mixed(seed + GAMMA) ^ epoch) + GAMMA)
