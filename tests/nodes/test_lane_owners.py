"""LaneOwners: who reads which lane, as tables and by Hypothesis."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._nodes.lane_owners import LaneOwners
from penstock.nodes import Indices


def owners_of(of: LaneOwners, values: list[int]) -> list[int]:
    """The owner of each row of a batch."""
    rows = of.rows(Indices(0, np.arange(len(values)), np.array(values)))
    return [next(owner for owner, own in rows.items() if row in own) for row in range(len(values))]


@pytest.mark.parametrize(
    ("lanes", "world_size", "workers", "first", "batch", "owners"),
    [
        (8, 1, 2, 0, 8, [0, 0, 0, 0, 1, 1, 1, 1]),
        (8, 2, 2, 0, 8, [0, 0, 1, 1]),
        (8, 2, 2, 1, 8, [0, 0, 1, 1]),
        (8, 3, 2, 2, 8, [0, 0, 0, 0, 1, 1, 1, 1]),
        (8, 1, 3, 5, 8, [0, 0, 0, 1, 1, 1, 2, 2]),
        (3, 1, 7, 0, 8, [0, 2, 4]),
        (1, 1, 4, 0, 8, [0]),
        (24, 8, 3, 3, 8, [0, 1, 2]),
        (8, 1, 2, 0, 1, [0, 1, 0, 1, 0, 1, 0, 1]),
        (8, 1, 2, 0, 2, [0, 0, 1, 1, 0, 0, 1, 1]),
        (8, 1, 2, 0, 3, [0, 0, 0, 0, 1, 1, 1, 1]),
        (12, 1, 2, 0, 3, [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]),
    ],
)
def test_contiguous_pieces_in_the_order_of_appearance(
    lanes: int, world_size: int, workers: int, first: int, batch: int, owners: list[int]
) -> None:
    """And again and again. Seen to fail: lanes dealt by their number; ``workers`` pieces of all lanes rather than of the rank's; one piece a worker."""
    of = LaneOwners(lanes, world_size, workers)
    values = [first + world_size * k for k in range(batch * 3 * len(owners))]
    found = [owner for start in range(0, len(values), batch) for owner in owners_of(of, values[start : start + batch])]
    assert found == owners * (3 * batch)


def test_a_jump_brings_other_lanes_and_changes_no_owner() -> None:
    """The rank's share of the lanes is another one after a change of the number of ranks in the middle of an epoch."""
    of = LaneOwners(8, 2, 2)
    assert owners_of(of, [1, 3, 5, 7]) == [0, 0, 1, 1]
    assert owners_of(of, [0, 2, 4, 6]) == [0, 0, 1, 1]
    assert owners_of(of, [9, 11, 13, 15, 8]) == [0, 0, 1, 1, 0]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 100), st.integers(1, 9), st.integers(2, 9), st.integers(0, 100), st.integers(1, 40))
def test_the_work_is_even_and_a_window_of_two_batches_a_worker_keeps_all_busy(
    lanes: int, world_size: int, workers: int, start: int, batch: int
) -> None:
    """Seen to fail: one piece a worker (96 lanes, 2 workers, batches of 8: first one worker had nothing to do, then the other)."""
    of = LaneOwners(lanes, world_size, workers)
    share = lanes // math.gcd(lanes, world_size)
    window = 2 * workers * batch
    owners: list[int] = []
    while len(owners) < window + 2 * share:
        values = start + world_size * (len(owners) + np.arange(batch))
        rows = of.rows(Indices(0, np.arange(batch), values))
        assert sorted(row for own in rows.values() for row in own) == list(range(batch))
        assert all(own == sorted(own) for own in rows.values())
        owners += [owner for _, owner in sorted((row, owner) for owner, own in rows.items() for row in own)]
    assert all(owner == owners[place % share] for place, owner in enumerate(owners))
    owned = np.bincount(owners[:share], minlength=workers)
    assert len(owned) == workers
    pieces = max(1, share // (workers * batch))
    assert owned.max() - owned.min() <= pieces
    assert all(set(owners[at : at + window]) == set(owners) for at in range(share))
