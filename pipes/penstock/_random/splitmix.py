"""SplitMix64: its constants, for whatever holds 64-bit words, and its finaliser on Python's integers.

Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014. Word k of a stream is the finaliser of its key plus k times
the golden gamma. The finaliser is a bijection of 64 bits in which each bit of the input flips about half of the result's: variant 13 of
Stafford's "Better Bit Mixing" (2011).

`permutation` has it on NumPy's arrays, `batch_rng` on torch's tensors: the same steps in the arithmetic of each, so that a word is the same word
everywhere.
"""

from __future__ import annotations

from typing import Final

MASK: Final = 2**64 - 1
GAMMA: Final = 0x9E3779B97F4A7C15
STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Of the finaliser: shift the word right by so much, XOR it with the result, and multiply by the factor."""
LAST_SHIFT: Final = 31
"""Then shift once more, and XOR."""


def mixed(z: int) -> int:
    """The finaliser; of ``z`` the lowest 64 bits count."""
    z &= MASK
    for shift, factor in STEPS:
        z = ((z ^ (z >> shift)) * factor) & MASK
    return z ^ (z >> LAST_SHIFT)
