"""LaneOwners: who reads which lane, by Hypothesis; `test_lanes_and_workers` has them read."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._nodes.lane_owners import LaneOwners
from penstock.nodes import Indices


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 100), st.integers(1, 9), st.integers(2, 9), st.integers(0, 100), st.integers(1, 40))
def test_the_work_is_even_and_a_window_of_two_batches_a_worker_keeps_all_busy(
    lanes: int, world_size: int, workers: int, start: int, batch: int
) -> None:
    """Seen to fail: one piece a worker (96 lanes, 2 workers, batches of 8: first one worker had nothing to do, then the
    other)."""
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
