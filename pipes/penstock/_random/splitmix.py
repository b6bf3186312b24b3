"""SplitMix64: its constants, for 64-bit words of any kind, and its finaliser for Python integers.

Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014. Word k of a stream is the
finaliser of its key plus k times the golden gamma. The finaliser is a bijection of 64 bits in which each input bit
flips about half of the output bits: variant 13 of Stafford's "Better Bit Mixing" (2011).

`permutation` implements it for NumPy arrays, `batch_rng` for torch tensors: the same steps in the arithmetic of each,
so that words are identical everywhere.
"""

from __future__ import annotations

from typing import Final

MASK: Final = 2**64 - 1
GAMMA: Final = 0x9E3779B97F4A7C15
STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The steps of the finaliser: shift the word right by this much, XOR it with the result, and multiply by the factor."""
LAST_SHIFT: Final = 31
"""Then a last shift and XOR."""


def mixed(z: int) -> int:
    """The finaliser of the lowest 64 bits of ``z``."""
    z &= MASK
    for shift, factor in STEPS:
        z = ((z ^ (z >> shift)) * factor) & MASK
    return z ^ (z >> LAST_SHIFT)
