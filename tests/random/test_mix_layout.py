"""The places of a block's items, by value. That they are spread well is in `test_mix_order`."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from penstock._arguments import checksum
from penstock._random.mix_layout import laid_out
from penstock._random.mix_stages import Stage
from penstock._random.permutation import MIXED, philox_words

SHARES = [Fraction(7, 10), Fraction(0), Fraction(1, 1024), Fraction(3, 10) - Fraction(1, 1024)]
KEYS = philox_words(3, 1, MIXED, 6)
USED = [True, False, True, True]
FROZEN = ["155550ae99af525b", "2fe950b0b5857a3d", "08c1a65174e03c59", "63f4e5361f819ab7"]
LARGEST = ["7b5309fce234f18c"]


def checked(blocks):
    """The checksum of each block's sources."""
    return [checksum(row.astype("<u2").tobytes()) for row in blocks.sources]


def test_each_block_holds_its_items_in_order_and_is_frozen():
    """A release that changes these changes every mix: never edit them."""
    stage, numbers = Stage(0, SHARES), [0, 1, 10**9, 2**62]
    blocks = laid_out(stage, numbers, KEYS, USED)
    assert (blocks.sources.dtype, blocks.numbers.dtype) == (np.uint16, np.int64)
    for row, block in enumerate(numbers):
        quotas = [end - begin for begin, end in zip(stage.before(block), stage.before(block + 1), strict=True)]
        for source, quota in enumerate(quotas):
            assert blocks.numbers[row][blocks.sources[row] == source].tolist() == list(range(quota))
    assert checked(blocks) == FROZEN
    alone = [laid_out(stage, [block], KEYS, USED) for block in numbers]
    assert np.array_equal(blocks.sources, np.concatenate([one.sources for one in alone]))
    assert np.array_equal(blocks.numbers, np.concatenate([one.numbers for one in alone]))


def test_a_source_that_no_stage_has_used_changes_nothing():
    """Seen to fail: sources numbered with those of later stages."""
    without = laid_out(Stage(0, SHARES[:1] + SHARES[2:]), [0, 5], KEYS, [True] * 3)
    blocks = laid_out(Stage(0, SHARES), [0, 5], KEYS, USED)
    assert np.array_equal(np.array([0, 2, 3])[without.sources], blocks.sources)
    used = laid_out(Stage(0, SHARES), [0, 5], KEYS, [True] * 4)
    assert not np.array_equal(used.sources, blocks.sources)


@pytest.mark.parametrize("block", [3, 2**64 - 1])
def test_blocks_are_numbered_in_64_bits(block):
    stage = Stage(0, [Fraction(1, 2), Fraction(1, 2)])
    there, far = (laid_out(stage, [number], KEYS, [True, True]) for number in (block, block + 2**64))
    assert np.array_equal(there.sources, far.sources)


@pytest.mark.slow
def test_the_largest_block_is_frozen():
    """Its slots need all bits that a key has for them."""
    stage = Stage(0, [Fraction(1, 2**20), 1 - Fraction(1, 2**20)])
    assert checked(laid_out(stage, [1], KEYS, [True, True])) == LARGEST
