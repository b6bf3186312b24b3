"""The random numbers of a sample: a pure function of (seed, epoch, position).

Whoever loads a sample, thread or process, first or again, gets the same numbers. Nothing here is drawn from a stream that
somebody else could have advanced. A seed, an epoch and a position are each from 0 to 2**63 - 1; golden values in the tests
freeze what comes of them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from penstock._random.splitmix import GAMMA, mixed

_SAMPLES = 3  # the highest word of a Philox counter: 1 and 2 are the orders'


def numpy_generator(seed: int, epoch: int, position: int) -> np.random.Generator:
    """A NumPy generator of its own for one sample, in 8 us.

    Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) under the key (seed, epoch), with the
    position high in its counter: streams never overlap in their first 2**130 words.
    """
    key = np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, position, _SAMPLES], np.uint64)))


def torch_generator(seed: int, epoch: int, position: int) -> torch.Generator:
    """A torch generator of its own (CPU) for one sample, in 4 us.

    It is a Mersenne Twister that torch seeds by 32 bits, so among 10^5 samples a pair with the same numbers is to be expected.
    """
    return torch.Generator().manual_seed(mixed(sample_word(seed, epoch, position) + 2 * GAMMA))


def sample_word(seed: int, epoch: int, position: int) -> int:
    """64 bits for a key."""
    return mixed((epoch_word(seed, epoch) ^ position) + GAMMA)


@lru_cache(maxsize=64)
def epoch_word(seed: int, epoch: int) -> int:
    """64 bits for the keys of an epoch."""
    return mixed((mixed(seed + GAMMA) ^ epoch) + GAMMA)
