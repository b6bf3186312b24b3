"""SplitMix64 on Python's integers."""

from __future__ import annotations

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mixed(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).

    A bijection of 64 bits in which each bit of ``z`` flips about half of the result's.
    """
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
