"""The sliding shuffle: a permutation, within its window, the same as a heap over a stream makes, and the same wherever
the data ends."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock._random import sliding_order
from penstock._random.orders import LONGEST
from penstock._random.permutation import SLID, philox_words, splitmix64_stream
from penstock.orders import SlidingOrder


def whole(order, epoch=0):
    return order.indices(epoch, np.arange(len(order)))


@example(n=6000, window=500, seed=0, epoch=0)  # several blocks; what is drawn may be one block every time
@given(n=st.integers(0, 6000), window=st.integers(0, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_is_a_permutation_within_its_window(n, window, seed, epoch):
    """Seen red with candidates from half a window around the block: items come twice at its edges."""
    items = whole(SlidingOrder(n, window, seed), epoch)
    assert np.array_equal(np.sort(items), np.arange(n))
    assert n == 0 or np.abs(items - np.arange(n)).max() <= max(0, window - 1)


@pytest.mark.parametrize("window", [2, 10, 500, 5000])
def test_is_what_a_heap_makes_of_a_stream(window):
    """An item leaves the heap once no item to come can have a smaller key: an item's key is not below its number."""
    n, seed, epoch = 9000, 5, 3
    words = splitmix64_stream(np.arange(n, dtype=np.uint64), *philox_words(seed, epoch, SLID, 2))
    heap, out = [], []
    for item, word in enumerate(words.tolist()):
        while heap and heap[0] < (item << 32, 0):
            out.append(heapq.heappop(heap)[1])
        heapq.heappush(heap, ((item << 32) + window * (word >> 32), item))
    out += [heapq.heappop(heap)[1] for _ in range(len(heap))]
    assert whole(SlidingOrder(n, window, seed), epoch).tolist() == out


def test_does_not_depend_on_where_the_data_ends():
    short, long = whole(SlidingOrder(5000, 300, 1)), whole(SlidingOrder(50_000, 300, 1))
    assert np.array_equal(short[:4700], long[:4700])


def test_reaches_far_and_has_no_edges():
    """An item moves evenly by up to half the window and hardly more; no place is a border that no item crosses."""
    items = whole(SlidingOrder(200_000, 1000, 2))
    moved = items - np.arange(200_000)
    assert abs(moved.std() / (1000 / np.sqrt(12)) - 1) < 0.02
    assert 500 < np.abs(moved).max() < 600
    crossings = [np.abs(moved[border - 1000 : border + 1000]).mean() for border in range(4000, 196_000, 4000)]
    assert min(crossings) > 230


@pytest.mark.parametrize("window", [0, 1])
def test_without_a_window_stays_in_order(window):
    assert whole(SlidingOrder(100, window)).tolist() == list(range(100))


def test_reads_at_the_far_end_of_the_longest():
    order = SlidingOrder(LONGEST, 2**16, 1)
    positions = LONGEST - 1 - np.arange(1000)
    items = order.indices(5, positions)
    assert np.unique(items).size == 1000
    assert np.abs(items - positions).max() < 2**16


def test_a_block_is_computed_once(monkeypatch):
    """Otherwise each batch would sort a block. Seen to fail: without the block that is kept, and without the epoch of
    its keys."""
    computed = []

    def stream(candidates, *keys):
        computed.append((int(candidates[0]), len(candidates)))
        return splitmix64_stream(candidates, *keys)

    keyed = []

    def words(seed, epoch, *rest):
        keyed.append(epoch)
        return philox_words(seed, epoch, *rest)

    monkeypatch.setattr(sliding_order, "splitmix64_stream", stream)
    monkeypatch.setattr(sliding_order, "philox_words", words)
    order = SlidingOrder(5000, 300, 1)
    for epoch in (0, 3):
        for begin in range(0, 2400, 16):
            order.indices(epoch, np.arange(begin, begin + 16))
    assert computed == [(0, 1500), (900, 1800)] * 2  # a block is four windows, and needs one more on each side
    assert keyed == [0, 3]
    computed.clear()
    SlidingOrder(5000, 1).indices(0, np.arange(9))
    assert computed == []
    SlidingOrder(5000, 2).indices(0, np.arange(1030))
    assert computed == [(0, 1026), (1022, 1028)]


def test_equal_keys_leave_the_earlier_item_first(monkeypatch):
    """Here keys are whole numbers of places, so that many are equal. Seen to fail: sorted by an algorithm that is not
    stable."""
    monkeypatch.setattr(
        sliding_order,
        "splitmix64_stream",
        lambda items, *keys: items * items * np.uint64(2654435761) % np.uint64(1024) << np.uint64(54),
    )
    ahead = [item * item * 2654435761 % 1024 for item in range(4000)]
    assert whole(SlidingOrder(4000, 1024)).tolist() == sorted(range(4000), key=lambda item: item + ahead[item])


def test_keys_are_counted_from_their_block():
    """So that they fit 64 bits wherever it is. Seen to fail: counted from elsewhere."""
    positions = np.arange(2**30 - 8192, 2**30 + 8192)
    items = SlidingOrder(2**31, 1000, 1).indices(0, positions)
    assert np.unique(items).size == positions.size
    assert np.abs(items - positions).max() < 1000


def test_the_largest_window():
    assert SlidingOrder(5, 2**30).settings()["window"] == 2**30
    with pytest.raises(
        ValueError,
        match=r"^window=1073741825 must be a whole number below 1073741825. It is in items; 0 leaves them in order.$",
    ):
        SlidingOrder(5, 2**30 + 1)
