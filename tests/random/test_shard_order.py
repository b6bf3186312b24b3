"""Shards of known lengths: every record once, lanes that only move forward, a lane's shards in the epoch's order."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._random import shard_order, sliding_order
from penstock._random.permutation import philox_words, splitmix64_stream
from penstock.orders import ShardOrder, ShuffledOrder

COUNTS = st.lists(st.integers(0, 40), max_size=40)


def whole(order, epoch=0):
    return order.indices(epoch, np.arange(len(order)))


def shards_of(counts, indices):
    return np.searchsorted(np.cumsum(counts), indices, side="right")


@given(counts=COUNTS, lanes=st.integers(1, 50), window=st.sampled_from([0, 5, 3000]), epoch=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_every_record_comes_once(counts, lanes, window, epoch):
    """Also with more lanes than records, and empty shards at any place. Seen red with `searchsorted(side="left")`: an
    empty shard then takes what is its neighbour's."""
    order = ShardOrder(counts, lanes, window, 3)
    assert np.array_equal(np.sort(whole(order, epoch)), np.arange(sum(counts)))


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_lane_reads_its_shards_forward(shuffle):
    """A lane's records are a stretch of the concatenation; so a shard is opened once, unless a border of two lanes lies
    in it."""
    rng = np.random.default_rng(0)
    counts, lanes = rng.integers(0, 200, 300), 24
    order = ShardOrder(counts, lanes, seed=4, shuffle=shuffle)
    for epoch in (0, 1):
        indices = whole(order, epoch)
        shards = ShuffledOrder(300, 4).indices(epoch, np.arange(300)) if shuffle else np.arange(300)
        starts = np.cumsum(counts) - counts
        concatenated = np.concatenate([np.arange(starts[shard], starts[shard] + counts[shard]) for shard in shards])
        assert np.array_equal(np.concatenate([indices[lane::lanes] for lane in range(lanes)]), concatenated)
        opened = sum(1 + (np.diff(shards_of(counts, indices[lane::lanes])) != 0).sum() for lane in range(lanes))
        assert opened <= (counts > 0).sum() + lanes


def test_a_window_moves_records_within_their_lane():
    counts, lanes, window = [100] * 100, 8, 50
    inside, shuffled = (whole(ShardOrder(counts, lanes, one, 4)) for one in (0, window))
    place = np.empty(10_000, np.int64)
    place[inside] = np.arange(10_000)
    assert np.array_equal(place[shuffled] % lanes, np.arange(10_000) % lanes)
    moved = place[shuffled] // lanes - np.arange(10_000) // lanes
    assert 25 <= np.abs(moved).max() < window
    # and the lanes are not shuffled alike
    assert not np.array_equal(moved[0::lanes], moved[1::lanes])


def test_neighbours_come_from_as_many_shards_as_there_are_lanes():
    indices = whole(ShardOrder([1000] * 400, 96, seed=1))
    assert min(len(np.unique(shards_of([1000] * 400, indices[k : k + 96]))) for k in range(0, 300_000, 960)) >= 95


@pytest.mark.parametrize(
    ("shards", "lanes"),
    [(0, 1), (1, 1), (7, 1), (8, 2), (16, 4), (47, 8), (95, 8), (96, 24), (383, 48), (384, 96), (10**5, 96)],
)
def test_lanes_leave_four_shards_to_each(shards, lanes):
    assert ShardOrder([1] * shards).cuts == lanes


def test_epochs_seeds_and_every_argument_differ():
    counts = [30] * 100
    orders = [
        ShardOrder(counts, 8, 20, 1),
        ShardOrder(counts, 8, 20, 2),
        ShardOrder(counts, 4, 20, 1),
        ShardOrder(counts, 8, 21, 1),
        ShardOrder(counts, 8, 0, 1),
    ]
    orders += [ShardOrder(counts, 8, 0, 1, shuffle=False), ShardOrder([*counts[1:], 29, 1], 8, 20, 1)]
    assert len({json.dumps(order.settings()) for order in orders}) == len(orders)
    assert len({tuple(whole(order)) for order in orders}) == len(orders)
    assert not np.array_equal(whole(orders[0], 0), whole(orders[0], 1))
    assert np.array_equal(whole(orders[5], 0), whole(orders[5], 1))


@pytest.mark.slow
def test_a_million_shards_are_a_small_state():
    order = ShardOrder(np.full(10**6, 10**4, np.int64), seed=1)
    assert len(json.dumps(order.settings())) < 200
    assert len(order) == 10**10
    positions = np.arange(10**9, 10**9 + 4096)
    order.indices(3, positions)
    begin = time.thread_time()
    order.indices(3, positions + 4096)
    assert time.thread_time() - begin < 0.1, "the epoch's shards are laid out once"


def test_what_a_state_and_a_graph_say_of_it():
    """By value, because a state of yesterday is compared with it. Seen to fail: each word changed."""
    order = ShardOrder([3, 0, 2, 4], 2, 5, 7)
    counts = ShardOrder([3, 0, 2, 4], seed=7).settings()["counts"]
    assert counts != ShardOrder([3, 0, 4, 2], seed=7).settings()["counts"]
    assert order.settings() == {"order": "shards", "length": 9, "counts": counts, "lanes": 2, "window": 5, "seed": 7}
    assert ShardOrder([1], shuffle=False).settings()["order"] == "shards in order"
    assert order.details() == {"shards": 4, "records": 9, "lanes": 2, "window": 5, "seed": 7}
    assert (ShardOrder([1], 2**16).settings()["lanes"], len(ShardOrder([2**56]))) == (2**16, 2**56)
    assert ShardOrder([1]).settings()["seed"] == 0
    with pytest.raises(ValueError, match="^lanes=65537 must be"):
        ShardOrder([1], 2**16 + 1)
    with pytest.raises(ValueError, match="window=5 shuffles the records, but shuffle=False"):
        ShardOrder([1], window=5, shuffle=False)


def test_the_openings_are_those_of_a_walk():
    """Each shard once per lane that reads of it, when that lane comes to it. Seen to fail: another epoch, and times
    without the epoch."""
    order = ShardOrder([3, 0, 2, 4, 6], 2, seed=7)
    for epoch in (0, 3):
        walked = [
            [*dict.fromkeys(shards_of([3, 0, 2, 4, 6], whole(order, epoch)[lane::2]).tolist())] for lane in range(2)
        ]
        opened = order.opens(epoch)
        assert [opened.shards[opened.lanes == lane].tolist() for lane in range(2)] == walked
        assert (np.diff(opened.times) >= 0).all()
        assert opened.times[0] == epoch
        assert opened.times[-1] < epoch + 1


@pytest.mark.parametrize(
    ("shards", "most", "lanes"),
    [(0, None, 1), (7, None, 1), (8, None, 2), (400, None, 96), (400, 48, 48), (400, 47, 24)],
)
def test_the_usual_lanes(shards, most, lanes):
    """At least four shards each, at most ``most``. Seen to fail: less than ``most``."""
    from penstock._random.shard_order import usual_lanes

    assert usual_lanes(shards, most) == lanes


def test_the_openings_of_lanes_that_are_level_come_lane_by_lane():
    """Seen to fail: with another length of a lane, and sorted by an algorithm that is not stable."""
    opened = ShardOrder([3] * 200, 100, seed=1, shuffle=False).opens(2)
    assert opened.lanes.tolist() == [*range(100)] * 2
    assert opened.shards.tolist() == [*range(0, 200, 2), *range(1, 200, 2)]
    assert opened.times.tolist() == [2.0] * 100 + [2 + 3 / 7] * 100


def test_what_an_epoch_needs_is_computed_once(monkeypatch):
    """Seen to fail: laid out at each call, and a window's block computed again."""
    laid, computed = [], []
    monkeypatch.setattr(
        shard_order, "philox_words", lambda seed, epoch, *of: laid.append(epoch) or philox_words(seed, epoch, *of)
    )
    monkeypatch.setattr(
        sliding_order, "splitmix64_stream", lambda *of: computed.append(len(of[0])) or splitmix64_stream(*of)
    )
    order = ShardOrder([40] * 50, 2, 30, 7)
    for begin in range(0, 2000, 100):
        order.indices(3, np.arange(begin, begin + 100))
    assert laid == [3]
    assert computed == [1000, 1000]
    ShardOrder([40] * 50, 2, 1, 7).indices(3, np.arange(9))
    assert laid == [3]


@pytest.mark.parametrize("counts", [[1, 2, 2], [7], [0, 11]])
def test_the_shortest_window_and_lanes_of_unequal_length(counts):
    """Seen to fail: with lanes of one length."""
    order = ShardOrder(counts, 3, 2, 1)
    for epoch in range(8):
        assert sorted(whole(order, epoch)) == list(range(sum(counts)))
    assert len({tuple(whole(order, epoch).tolist()) for epoch in range(8)}) > 1
