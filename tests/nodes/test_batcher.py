"""Batcher: which items are in a batch, and what happens to the rest."""

from __future__ import annotations

import pytest

from penstock.nodes import Batcher, Cycler, EndOfEpoch, IterableSource, Sampler
from penstock.orders import SequentialOrder


def test_what_drop_last_leaves_over_is_passed_with_the_last_batch():
    """So the state after the last batch is the state of a finished epoch. Seen to fail without it: position 4 of 5."""
    node = Batcher(Cycler(Sampler(SequentialOrder(5))), 2, drop_last=True)
    next(node), next(node)
    assert node.get_state()["source"]["position"] == 5
    assert node.left(node.get_state()) == 0


@pytest.mark.parametrize("drop_last", [False, True])
def test_items_without_an_address_make_lists(drop_last):
    node = Batcher(Cycler(IterableSource("abcde")), 2, drop_last)
    expected = ["ab", "cd"] + ([] if drop_last else ["e"])
    for epoch in range(2):
        assert ["".join(next(node).plain()) for _ in expected] == expected
        assert next(node) == EndOfEpoch(epoch)


@pytest.mark.parametrize("size", [0, -1, 1.0, "2", None, True])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        Batcher(Cycler(Sampler(SequentialOrder(5))), size)
