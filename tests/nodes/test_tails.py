"""Dealing is arithmetic: compared with dealing cards one by one."""

from __future__ import annotations

from dealing import TAILS, dealt
from hypothesis import given
from hypothesis import strategies as st

from penstock._nodes.tails import batches, share


@given(st.integers(0, 200), st.integers(1, 20), st.sampled_from(TAILS))
def test_share_is_what_dealing_by_hand_gives(items, world_size, tail):
    hands = [dealt(items, world_size, tail)[rank::world_size] for rank in range(world_size)]
    assert [share(items, rank, world_size, tail) for rank in range(world_size)] == [len(hand) for hand in hands]


@given(st.integers(0, 200), st.integers(1, 20), st.booleans())
def test_batches_is_what_cutting_gives(items, batch_size, drop_last):
    cut = [range(items)[start : start + batch_size] for start in range(0, items, batch_size)]
    assert batches(items, batch_size, drop_last) == len([one for one in cut if len(one) == batch_size or not drop_last])
