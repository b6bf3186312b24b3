"""The exact arithmetic of a mix, by value: blocks, counts, and weights as they are written."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from penstock._random.mix_stages import MOST, Stage, as_json, stage_at, stages_of


@pytest.mark.parametrize(
    ("least", "block"),
    [
        (Fraction(1), 1024),
        (Fraction(1, 1024), 1024),
        (Fraction(2, 2049), 2048),
        (Fraction(1, 1025), 2048),
        (Fraction(1, 2048), 2048),
        (Fraction(1, 2049), 4096),
        (Fraction(1, MOST), MOST),
    ],
)
def test_a_block_holds_an_item_of_each_source(least, block):
    """The smallest power of two that does. Seen to fail: one off, and rounded down."""
    assert Stage(0, [least, 1 - least]).block == block


def test_items_before_a_block_are_cut_from_cumulative_shares():
    stage = Stage(7, [Fraction(1, 3), Fraction(0), Fraction(1, 2), Fraction(1, 6)])
    assert stage.start == 7
    for block in (0, 1, 2, 10**20):
        n = 1024 * block
        assert stage.before(block) == [n // 3, 0, n * 5 // 6 - n // 3, n - n * 5 // 6]


def test_a_stage_has_exact_shares_and_begins_at_a_run():
    """The weights as they are written. Seen to fail: the start in items, and floats as they are."""
    thirds = {"a": 0.1, "b": np.float32(0.2)}
    stage = stage_at(12, thirds, ["a", "b", "c"], 4)
    assert (stage.start, stage.shares) == (3, [Fraction(1, 3), Fraction(2, 3), Fraction(0)])
    for weight in (7, 7.0, "7", Decimal(7), np.int8(7), np.float64(7), torch.tensor(7), Fraction(7)):
        assert stage_at(0, {"a": weight, "b": Fraction(1, 3)}, ["a", "b"], 1).shares == [
            Fraction(21, 22),
            Fraction(1, 22),
        ]
    first, second = stages_of([(0, {"a": 1}), (8, {"b": 1})], ["a", "b"], 4)
    assert [(stage.start, stage.shares) for stage in (first, second)] == [(0, [1, 0]), (2, [0, 1])]
    assert stage_at(0, {"a": 1, "b": MOST - 1}, ["a", "b"], 1).shares[0] == Fraction(1, MOST)


@pytest.mark.parametrize(
    ("start", "weights", "why"),
    [
        (6, {"a": 1}, "^a stage starts at item 6, which is not a multiple of run=4. Make it 4.$"),
        (-4, {"a": 1}, "^start=-4 must be .* A stage starts at an item, counted from the start of training.$"),
        (8, {"x": 1, "y": 1}, "^there are weights of the stage at 8 for 'x', 'y', but the sources are 'a', 'b'.$"),
        (0, {"x": 1}, "^there are weights for 'x'"),
        (
            8,
            7,
            "^the weights of the stage at 8 are a int. Pass a dict with a weight for each source, such as {'a': 1.0}.$",
        ),
        (8, {"a": 0}, "^all weights of the stage at 8 are 0"),
        (8, {}, "^all weights of the stage at 8 are 0"),
        (8, {"a": True}, "^the weight of 'a' of the stage at 8 is True. A weight must be"),
        (0, {"a": torch.ones(2)}, "^the weight of 'a' is tensor"),
        (0, {"a": "1/0"}, "^the weight of 'a' is '1/0'"),
        (
            0,
            {"a": 1, "b": MOST},
            "^the weight of 'a' is 1, which is 1 item in 1.05e\\+06. The smallest share is 1 in 1048576. Remove the",
        ),
    ],
)
def test_a_stage_that_makes_no_sense_is_refused(start, weights, why):
    with pytest.raises(ValueError, match=why):
        stage_at(start, weights, ["a", "b"], 4)


@pytest.mark.parametrize("weights", [[{"a": 1, "b": 1}], [(0,)], [(0, {"a": 1}, 3)], [3], 7])
def test_stages_are_pairs(weights):
    with pytest.raises(ValueError, match="^weights must be a dict, or a list of pairs of a start and a dict, not "):
        stages_of(weights, ["a", "b"], 1)


def test_weights_as_json_mean_the_same():
    """Seen to fail: the float nearest to a fraction."""
    weights = {"a": 1, "b": 0.1, "c": Fraction(1, 3), "d": np.float32(0.2), "e": "0.3", "f": np.int64(4)}
    assert as_json(weights) == {"a": 1, "b": 0.1, "c": "1/3", "d": "1/5", "e": "3/10", "f": "4"}
    assert as_json([1]) == [1]
    with pytest.raises(ValueError, match="^the weight of 'a' is None. A"):
        as_json({"a": None})
