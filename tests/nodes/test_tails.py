"""Dealing is arithmetic: compared with dealing cards one by one."""

from __future__ import annotations

import pytest
from dealing import TAILS, dealt
from hypothesis import given
from hypothesis import strategies as st

from penstock._nodes.tails import batches, check_tail, share


@given(st.integers(0, 200), st.integers(1, 20), st.sampled_from(TAILS))
def test_share_is_what_dealing_by_hand_gives(items, world_size, tail):
    hands = [dealt(items, world_size, tail)[rank::world_size] for rank in range(world_size)]
    assert [share(items, rank, world_size, tail) for rank in range(world_size)] == [len(hand) for hand in hands]


@given(st.integers(0, 200), st.integers(1, 20), st.booleans())
def test_batches_is_what_cutting_gives(items, batch_size, drop_last):
    cut = [range(items)[start : start + batch_size] for start in range(0, items, batch_size)]
    assert batches(items, batch_size, drop_last) == len([one for one in cut if len(one) == batch_size or not drop_last])


@pytest.mark.parametrize("tail", ["cut", "", "PAD"])
def test_another_tail_is_refused_with_those_that_there_are(tail):
    with pytest.raises(
        ValueError, match=rf"^tail='{tail}' must be one of \('pad', 'drop', 'exact'\): pad the last round"
    ):
        check_tail(tail)
