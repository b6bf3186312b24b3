"""Dealing is arithmetic: compared with dealing cards one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock._nodes.tails import batches, share


def dealt(items: int, world_size: int, tail: str) -> list[int]:
    """The number of cards of each rank when they are dealt by hand."""
    hands = [0] * world_size
    for k in range(items):
        hands[k % world_size] += 1
    if tail == "pad":
        return [max(hands)] * world_size
    return [min(hands)] * world_size if tail == "drop" else hands


@given(st.integers(0, 200), st.integers(1, 20), st.sampled_from(["pad", "drop", "exact"]))
def test_share_is_what_dealing_by_hand_gives(items, world_size, tail):
    assert [share(items, rank, world_size, tail) for rank in range(world_size)] == dealt(items, world_size, tail)


@given(st.integers(0, 200), st.integers(1, 20), st.booleans())
def test_batches_is_what_cutting_gives(items, batch_size, drop_last):
    cut = [range(items)[start : start + batch_size] for start in range(0, items, batch_size)]
    assert batches(items, batch_size, drop_last) == len([one for one in cut if len(one) == batch_size or not drop_last])
