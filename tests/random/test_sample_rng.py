"""A sample's random numbers: a pure function of (seed, epoch, position), independent, frozen."""

from __future__ import annotations

import contextvars
import random

import numpy as np
import pytest
import torch

from penstock._random.global_rng import global_rngs_kept, seed_globals
from penstock._random.sample_rng import numpy_generator, torch_generator

SOUND = 5.0
"""Standard deviations; chance alone exceeds it once in a million."""


@pytest.fixture(autouse=True)
def kept():
    with global_rngs_kept():
        yield


def from_globals():
    """One draw from each: uniform in [0, 1)."""
    return [random.random(), np.random.random(), float(torch.rand((), dtype=torch.float64))]


def by_key(seed, epoch, position):
    """The first draw of each generator under this key, shape ``(5,)``."""
    seed_globals(seed, epoch, position)
    ours = torch.rand((), dtype=torch.float64, generator=torch_generator(seed, epoch, position))
    return [*from_globals(), numpy_generator(seed, epoch, position).random(), float(ours)]


class TestStreams:
    @pytest.mark.parametrize("step", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**32)])
    def test_of_adjacent_keys_are_uncorrelated(self, step):
        """Seen to fail: `mixed` that returns its argument; the epoch left out of the Philox key."""
        n = 1500
        drawn = np.array([by_key(7 + k * step[0], 5 + k * step[1], 11 + k * step[2]) for k in range(n)])
        centred = (drawn - 0.5) * np.sqrt(12)
        assert abs(centred.mean(0)).max() < SOUND / np.sqrt(n)
        assert abs((centred**2).mean(0) - 1).max() < SOUND * np.sqrt(0.8 / n)
        for lag in (1, 2):
            assert abs((centred[:-lag] * centred[lag:]).mean(0)).max() < SOUND / np.sqrt(n - lag)
        between = centred.T @ centred / n
        assert abs(between[~np.eye(5, dtype=bool)]).max() < SOUND / np.sqrt(n), (
            "the generators of one key are independent of each other"
        )


FROZEN = [
    (
        (0, 0, 0),
        [997618, 298820, 693945],
        [282830, 24163, 79669],
        [392419, 879967, 978329],
        [982721, 20867, 700431],
        [535594, 288377, 397010],
    ),
    (
        (1, 2, 3),
        [35002, 550755, 819839],
        [770498, 30968, 657660],
        [117305, 108366, 296407],
        [885932, 809865, 977720],
        [203765, 739618, 367418],
    ),
    (
        (2**63 - 1, 10**6, 10**12),
        [25776, 877175, 619130],
        [248237, 466941, 741630],
        [388210, 788178, 51997],
        [777557, 165318, 664796],
        [237111, 445138, 96798],
    ),
]


@pytest.mark.parametrize(("key", "numpys", "torchs", "randoms", "global_numpys", "global_torchs"), FROZEN)
def test_keys_are_frozen(key, numpys, torchs, randoms, global_numpys, global_torchs):
    """A release that changes one of these changes every user's augmentation: never edit them."""
    assert numpy_generator(*key).integers(0, 10**6, 3).tolist() == numpys
    assert torch.randint(10**6, (3,), generator=torch_generator(*key)).tolist() == torchs
    seed_globals(*key)
    assert [random.getrandbits(20) for _ in range(3)] == randoms
    assert np.random.randint(0, 10**6, 3).tolist() == global_numpys
    assert torch.randint(10**6, (3,)).tolist() == global_torchs


def test_a_copy_of_the_context_holds_no_tensor():
    """asyncio's threads keep such copies. Seen to fail: a program that was reading over HTTP was aborted at its end,
    where one let go of the last tensor."""

    def within():
        with global_rngs_kept():
            return contextvars.copy_context()

    (states,) = contextvars.Context().run(within).values()
    assert [type(state) for state in states] == [tuple, tuple, bytes]
