"""Random numbers for the samples of a batch, generated on the batch's device."""

from __future__ import annotations

import math
from typing import Any, final

import torch

from penstock._arguments import Shown
from penstock._random.sample_rng import epoch_word
from penstock._random.splitmix import GAMMA, LAST_SHIFT, STEPS


@final
class BatchRng(Shown):
    """Random numbers for each sample of a batch: a pure function of (seed, epoch, position), whatever the batch, the
    rank or the device.

    A counter-based generator: a sample's words are the SplitMix64 stream of its key. `uniform` and `integers` agree to
    the last bit on all devices; `normal` takes logarithms, which devices round differently.

    Args:
        seed: The loader's seed.
        epoch: The batch's epoch.
        positions: The positions of its samples, int64, shape ``(n,)``; the numbers are generated on the same device.
    """

    __module__ = "penstock"

    def __init__(self, seed: int, epoch: int, positions: torch.Tensor) -> None:
        self._keys = mixed((positions ^ _signed(epoch_word(seed, epoch))) + _GAMMA)
        self._drawn = 0

    def details(self) -> dict[str, Any]:
        return {"samples": len(self._keys), "device": self._keys.device}

    def uniform(self, *shape: int) -> torch.Tensor:
        """Uniform in [0, 1), float32, shape ``(n, *shape)``: multiples of 2**-24."""
        return (self._words(shape, 24)).to(torch.float32) * 2.0**-24

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Uniform from ``low`` to ``high - 1``, int64, shape ``(n, *shape)``.

        Raises:
            ValueError: ``high`` is not above ``low``, or is more than 2**31 above it.
        """
        if not 0 < high - low <= 2**31:
            raise ValueError(f"integers({low}, {high}): high must be above low, by at most 2**31.")
        return self._words(shape, 62) % (high - low) + low

    def normal(self, *shape: int) -> torch.Tensor:
        """Normal with mean 0 and variance 1, float32, shape ``(n, *shape)``; Box and Muller, Annals of Mathematical
        Statistics 29 (1958).
        """
        radius = torch.sqrt(-2 * torch.log((self._words(shape, 53).to(torch.float64) + 1) * 2.0**-53))
        return (radius * torch.cos(2 * math.pi * (self._words(shape, 53).to(torch.float64) * 2.0**-53))).to(
            torch.float32
        )

    def _words(self, shape: tuple[int, ...], bits: int) -> torch.Tensor:
        """The upper ``bits`` of the next words of each sample."""
        count = math.prod(shape)
        places = torch.arange(self._drawn + 1, self._drawn + count + 1, device=self._keys.device)
        self._drawn += count
        return _shifted(mixed(self._keys[:, None] + places * _GAMMA), 64 - bits).reshape(len(self._keys), *shape)


def mixed(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser; int64 arithmetic wraps around like uint64."""
    for shift, factor in _STEPS:
        words = (words ^ _shifted(words, shift)) * factor
    return words ^ _shifted(words, LAST_SHIFT)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Right shift that fills with zeros."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GAMMA = _signed(GAMMA)
_STEPS = [(shift, _signed(factor)) for shift, factor in STEPS]
