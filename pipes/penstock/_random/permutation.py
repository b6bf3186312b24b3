"""Permutations of an epoch, keyed by (seed, epoch), and the random words that all orders are made of. Pure."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from penstock._random.splitmix import GAMMA, LAST_SHIFT, STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

SHORT: Final = 2**12
"""Epochs up to this length are shuffled by sorting random words, longer ones by a cipher."""


class SortedPermutation:
    """The permutation that sorts n random words.

    Two words are equal once in 2**41 epochs, and then keep their order.
    """

    def __init__(self, epoch: int, seed: int, n: int) -> None:
        self.epoch = epoch
        self._permutation = stable_argsort(philox_words(seed, epoch, SHUFFLED, n))

    def __call__(self, positions: Int64s) -> Int64s:
        return self._permutation[positions]


def stable_argsort(words: UInt64s) -> Int64s:
    """The same as ``np.argsort(words, kind="stable")``, in a fifth of the time, for up to 2**12 words."""
    # Sorting values is much faster than sorting indices, so each word carries its index in its lowest bits. That is the
    # same order unless two words differ in those bits only, which happens once in 2**29 epochs.
    n = len(words)
    low = np.uint64((1 << (n - 1).bit_length()) - 1)
    ranked = words & ~low
    ranked |= np.arange(n, dtype=np.uint64)
    ranked.sort()
    indices = ranked & low
    ranked ^= indices
    if (ranked[1:] == ranked[:-1]).any():
        return np.argsort(words, kind="stable").astype(np.int64)
    return indices.view(np.int64)


class FeistelPermutation:
    """The network of `ShuffledOrder` with the round keys of one epoch."""

    def __init__(self, epoch: int, seed: int, n: int) -> None:
        self.epoch = epoch
        a = isqrt(n - 1) + 1
        b = -(-n // a)
        self._n = np.uint64(n)
        self._a = _constant(a)
        keys = philox_words(seed, epoch, SHUFFLED, rounds(n))
        # A hash h of 64 bits becomes a number below m by (h >> bits) * m >> (64 - bits), which does not overflow for
        # m < 2**bits.
        halves = [(_constant(m), _constant(m.bit_length()), _constant(64 - m.bit_length())) for m in (a, b)]
        self._rounds = [(_constant(int(key)), *halves[k % 2]) for k, key in enumerate(keys)]

    def __call__(self, positions: Int64s) -> Int64s:
        out = self._network(positions.astype(np.uint64))
        while (outside := out >= self._n).any():  # cycle walking
            out[outside] = self._network(out[outside])
        return out.view(np.int64)

    def _network(self, x: UInt64s) -> UInt64s:
        right = x // self._a
        left = x - right * self._a
        h, shifted = np.empty_like(x), np.empty_like(x)
        for key, modulus, down, up in self._rounds:
            np.add(right, key, out=h)
            np.multiply(h, _M1, out=h)
            np.right_shift(h, _S32, out=shifted)
            np.bitwise_xor(h, shifted, out=h)
            np.multiply(h, _M2, out=h)
            np.right_shift(h, down, out=h)
            np.multiply(h, modulus, out=h)
            np.right_shift(h, up, out=h)
            np.add(left, h, out=left)
            # If left is already below the modulus, left - modulus wraps around to a huge number, so the smaller one is
            # the remainder.
            np.subtract(left, modulus, out=h)
            np.minimum(left, h, out=left)
            left, right = right, left
        right *= self._a
        right += left
        return right


def rounds(n: int) -> int:
    """The number of rounds of the network at length ``n``: even, so that each half is hashed equally often and ends on
    its own side.
    """
    return 8 if n < 2**24 else 6


def _constant(value: int) -> UInt64s:
    """``value`` in the form that NumPy's functions accept fastest: a zero-dimensional array."""
    return np.array(value, dtype=np.uint64)


_GAMMA, _LAST_SHIFT, _S32 = _constant(GAMMA), _constant(LAST_SHIFT), _constant(32)
_STEPS = [(_constant(shift), _constant(factor)) for shift, factor in STEPS]
(_, _M1), (_, _M2) = _STEPS  # a round of the network needs only a cheaper hash than the whole finaliser
SHUFFLED, WEIGHTED, SAMPLES, MIXED, SLID, LANES, GROUPED = range(1, 8)  # the purposes of `philox`


def philox(seed: int, epoch: int, purpose: int, position: int = 0) -> np.random.Philox:
    """Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) under the key (seed,
    epoch).

    The highest word of its counter is the purpose, the next the position: streams never overlap in their first 2**130
    words.
    """
    return np.random.Philox(
        key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, position, purpose], np.uint64)
    )


def philox_words(seed: int, epoch: int, purpose: int, n: int) -> UInt64s:
    """``n`` random words for (seed, epoch), shape ``(n,)``."""
    return philox(seed, epoch, purpose).random_raw(n)


def by_group(group_of: npt.NDArray[Any]) -> Iterator[tuple[int, Int64s]]:
    """Each non-empty group, and the indices of its members, in ascending order. Groups are numbers below 2**16."""
    members = np.argsort(group_of.astype(np.uint16), kind="stable")  # by radix, because they have 16 bits
    end = 0
    for group, n in enumerate(np.bincount(group_of).tolist()):
        if n:
            begin, end = end, end + n
            yield group, members[begin:end]


def splitmix64_stream(counter: UInt64s, key: np.uint64, other_key: np.uint64) -> UInt64s:
    """The words of a SplitMix64 stream at ``counter``; ``other_key`` selects another stream, not just another part of
    the same one.
    """
    first, second = _STEPS
    z = _step(counter * _GAMMA + key, *first) ^ other_key
    z = _step(z, *second)
    return z ^ (z >> _LAST_SHIFT)


def _step(z: UInt64s, shift: UInt64s, factor: UInt64s) -> UInt64s:
    return (z ^ (z >> shift)) * factor
