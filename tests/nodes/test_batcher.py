"""Batcher: which items are in a batch, and what happens to the rest."""

from __future__ import annotations

import pytest

from penstock._random.lane_order import InterleavedOrder
from penstock.nodes import Batcher, Cycler, EndOfEpoch, IterableSource, Sampler, Sharder
from penstock.orders import SequentialOrder


def batches_of(n, size, **options):
    return Batcher(Cycler(Sampler(SequentialOrder(n))), size, **options)


def read(node, place, *how):
    items, place = node.read(place, *how)
    return [item.plain() for item in items], place


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
    with pytest.raises(ValueError, match="^batch_size=.* whole number of at least 1"):
        batches_of(5, size)


@pytest.mark.parametrize(
    ("n", "drop_last", "expected"),
    [(7, False, [[0, 1], [2, 3], [4, 5], [6]]), (7, True, [[0, 1], [2, 3], [4, 5]]), (4, True, [[0, 1], [2, 3]])],
)
def test_each_rank_reads_its_batches_and_all_of_them_are_passed(n, drop_last, expected):
    """Seen to fail: `first` that is not counted from the place; a full last batch that is passed as a rest."""
    node = batches_of(n, 2, drop_last=drop_last)
    assert node.counted(n) == node.left(node.start(0)) == len(expected)
    for every in (1, 2, 3):
        for first in range(every):
            items, behind = read(node, node.start(0), -(-len(expected) // every), every, first)
            assert items == expected[first::every]
            assert behind["source"]["position"] == n
    once, behind = read(node, node.start(0), 1, 2, 1)
    assert (once, behind["source"]["position"]) == ([expected[1]], 4)


def test_a_rest_that_fills_no_batch_begins_the_next_epoch_if_the_order_goes_on():
    """Seen to fail: the rest was read; it was forgotten by a second read behind the end; it was passed before anything
    was read."""
    node = Batcher(Cycler(Sampler(InterleavedOrder(1, 5))), 2, drop_last=True)
    start = node.start(0)
    assert read(node, start, 0) == ([], start)
    items, end = read(node, start, 2)
    assert (items, end["source"]) == ([[0, 1], [2, 3]], {"epoch": 0, "position": 5, "origin": 0, "left": 1})
    assert read(node, end, 2) == ([], end)
    inside = {"epoch": 0, "source": start["source"] | {"position": 4}}
    assert read(node, inside, 0) == ([], inside)
    assert read(node, inside, 1) == ([], end)
    assert read(node, node.over(end)[1], 1)[0] == [[4, 5]]
    assert read(Batcher(Cycler(Sampler(InterleavedOrder(1, 5))), 2), inside, 1)[0] == [[4]]


def test_it_says_what_must_be_the_same_to_load_a_state_and_on_every_rank():
    node = batches_of(5, 2, drop_last=True)
    assert node.facts.settings == SequentialOrder(5).settings() | {"batches_of": "samples"}
    assert node.facts.rank_settings == node.details() == {"batch_size": 2, "drop_last": True}
    assert batches_of(5, 2).details() == {"batch_size": 2, "drop_last": False}


def test_what_it_cannot_do_is_refused():
    with pytest.raises(
        ValueError,
        match="^drop_last=True drops samples, but tail='exact' promises all of them. Use only one of the two.$",
    ):
        Batcher(Sharder(Cycler(Sampler(SequentialOrder(5))), 0, 2, tail="exact"), 2, drop_last=True)
    for tail, drop_last in (("exact", False), ("drop", True)):
        Batcher(Sharder(Cycler(Sampler(SequentialOrder(5))), 0, 2, tail=tail), 2, drop_last=drop_last)
    padded = (
        "^batches cannot be padded. Use tail='drop' or tail='exact', or put the Batcher downstream of the node with "
        "tail='pad'.$"
    )
    with pytest.raises(ValueError, match=padded):
        next(Sharder(batches_of(5, 2), 0, 2))
