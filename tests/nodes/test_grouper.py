"""Grouper: packs and batches of similar lengths as items of an epoch. Every item once, in blocks, the same on all
ranks; a jump plans one block."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import Buckets, GraphError, Mix, Packs, StateError
from penstock._nodes.index_node import items_in
from penstock.nodes import Cycler, EndOfEpoch, Grouper, Sharder
from penstock.orders import SequentialOrder, ShuffledOrder
from penstock.testing import assert_resumes_everywhere

N = 64
LENGTHS = np.maximum(1, np.random.default_rng(0).lognormal(2.1, 0.9, N)).astype(np.int64)
KINDS = {
    "packs": lambda **words: Packs(LENGTHS, 40, block=16, **words),
    "buckets": lambda **words: Buckets(LENGTHS, 120, max_samples=6, block=32, same_size_run=2, **words),
}
kinds = pytest.mark.parametrize("kind", KINDS)
counted = pytest.mark.parametrize("count", [False, True])


def grouper(kind, order=None, **words):
    return Grouper(order or ShuffledOrder(N, 3), KINDS[kind](**words))


def epoch(node):
    """The items up to the mark."""
    items = []
    while not isinstance(item := next(node), EndOfEpoch):
        items.append(item)
    return items


def pieces_of(items):
    return sorted(
        piece
        for item in items
        for piece in zip(item.values.indices, item.values.starts, item.values.lengths, strict=True)
    )


class TestAnEpoch:
    @pytest.mark.parametrize("oversize", ["split", "truncate"])
    def test_of_packs_holds_every_place_of_every_item_once(self, oversize):
        """Seen red with a last block that ends one position early."""
        node = Cycler(grouper("packs", oversize=oversize))
        node.reset()
        for _ in range(2):
            items = epoch(node)
            expected = []
            for index, length in enumerate(LENGTHS.tolist()):
                starts = range(0, length if oversize == "split" else 1, 40)
                expected += [(index, start, min(40, length - start)) for start in starts]
            assert pieces_of(items) == sorted(expected)
            assert max(sum(item.values.lengths) for item in items) <= 40
            assert [item.positions for item in items] == list(range(len(items)))
            assert all(item.values.wholes == LENGTHS[item.values.indices].tolist() for item in items)

    @kinds
    @counted
    def test_of_nothing_is_empty(self, kind, count):
        groups = {"packs": Packs([], 8, count=count), "buckets": Buckets([], 8, count=count)}[kind]
        node = Cycler(Grouper(SequentialOrder(0), groups))
        node.reset()
        assert epoch(node) == epoch(node) == []
        node.shutdown()

    @counted
    def test_of_empty_sequences_has_none_of_them(self, count):
        """Whole blocks of them, at the ends too, and on any number of ranks."""
        lengths = np.array([0, 0, 0, 5, 0, 3, 9, 0, 0, 0])
        for world_size in (1, 2):
            hands = []
            for rank in range(world_size):
                node = Sharder(
                    Cycler(Grouper(SequentialOrder(10), Packs(lengths, 4, block=2, count=count))),
                    rank,
                    world_size,
                    tail="exact",
                )
                node.reset()
                hands.append(epoch(node))
                assert node.get_state() == {"epoch": 1, "source": node.source.source.start_of(1)}
                node.shutdown()
            dealt = [hand[k] for k in range(len(hands[0])) for hand in hands if k < len(hand)]
            assert pieces_of(dealt) == [(3, 0, 4), (3, 4, 1), (5, 0, 3), (6, 0, 4), (6, 4, 4), (6, 8, 1)]
        assert_resumes_everywhere(
            lambda: Cycler(Grouper(SequentialOrder(10), Packs(lengths, 4, block=2, count=count))), steps=20
        )


class TestTaking:
    def test_refuses_an_index_without_a_length(self):
        node = Grouper(SequentialOrder(5), Packs([1, 2, 3], 8))
        with pytest.raises(GraphError, match="index 4, but there are 3 lengths"):
            node.read(node.start(0), 1)


class TestTheState:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"block": 7, "taken": 0, "position": 20},
            {"block": 6, "taken": 1, "position": 40},
            {"block": 3, "taken": 4, "position": 3},
            {"block": 3, "taken": 1, "position": 2**63 - 1},
        ],
    )
    def test_out_of_bounds_is_refused(self, wrong):
        with pytest.raises(StateError, match=r"out of bounds|must be a whole number|expected a state"):
            grouper("packs").check({"epoch": 0, **wrong})

    @pytest.mark.parametrize(("kind", "wrong", "world_size"), [("packs", -1, 2), ("packs", 10, 1), ("buckets", 1, 2)])
    def test_that_counts_wrong_is_refused_before_the_epoch_ends(self, kind, wrong, world_size):
        """A position too high ends the epoch early, or gives every rank all the items. Seen red without the check."""
        one = grouper(kind, count=True)
        _, state = one.read(one.start(0), 8)
        assert state["block"]
        node = Sharder(Cycler(one), 0, world_size, tail="drop")
        node.reset({"epoch": 0, "source": {**state, "position": state["position"] + wrong}})
        with pytest.raises(StateError, match=r"groups come before group \d+ of block \d, but epoch 0 has"):
            epoch(node)
        node.shutdown()

    def test_of_a_mix_depends_on_the_stages_that_the_block_has_seen(self):
        """Blocks of 16: what begins at item 32 is part of a block that was begun at item 32, and not of the one
        before."""
        longer = [(0, {"a": 1}), (32, {"b": 1})]
        one, other = (
            Grouper(
                Mix({"a": range(40), "b": range(20)}, stages, epoch_size=N).order(shuffle=True, seed=1),
                KINDS["packs"](),
            )
            for stages in ([*longer[:1], (32, {"a": 1, "b": 1})], longer)
        )
        for block, taken, same in ((0, 0, True), (1, 3, True), (2, 0, True), (2, 1, False), (3, 0, False)):
            state = {"epoch": 0, "block": block, "taken": taken, "position": 30}
            assert (one.settings_at(0, state) == other.settings_at(0, state)) is same
        assert one.settings_at(0, None) != other.settings_at(0, None)
        assert one.settings_at(0, {"block": "x", "taken": 1}) == {}


class TestRanks:
    @kinds
    @counted
    def test_cannot_be_padded(self, kind, count):
        node = Sharder(Cycler(grouper(kind, count=count)), 0, 2)
        node.reset()
        with pytest.raises(GraphError, match="groups cannot be read by position, which tail='pad' needs"):
            next(node)
        node.shutdown()


class TestCounting:
    @kinds
    def test_says_how_many_groups_each_epoch_has(self, kind):
        """Before, during and after it; the number of packs differs from epoch to epoch."""
        node = Cycler(grouper(kind, count=True))
        lengths = [node.left(node.start(number)) for number in range(4)]
        assert len(set(lengths)) > 1 or kind == "buckets"
        node.reset()
        for number, length in enumerate(lengths):
            assert node.left(node.get_state()) == items_in(node, number) == length
            next(node)
            assert (node.left(node.get_state()), items_in(node, number)) == (length - 1, length)
            assert len(epoch(node)) == length - 1
        node.shutdown()

    @kinds
    def test_is_not_done_unless_asked_for(self, kind):
        node = grouper(kind)
        assert node.left(node.start(0)) is items_in(node, 0) is None


class TestOverManyBlocks:
    @pytest.mark.parametrize(("alike", "least", "most"), [(8, 0, 0.04), (1, 0.2, 1)])
    def test_ranks_that_take_turns_at_buckets_wait_little_if_runs_are_aligned_with_them(self, alike, least, most):
        """In all blocks, with a cost that has a quadratic part. The other runs are the negative control."""
        seconds = np.random.default_rng(3).lognormal(1.9, 0.7, 16_384).clip(0.5, 35)
        hands = []
        for rank in range(8):
            node = Sharder(
                Cycler(Grouper(ShuffledOrder(16_384, 1), Buckets(seconds, 200, max_samples=64, same_size_run=alike))),
                rank,
                8,
                tail="drop",
            )
            node.reset()
            hands.append([seconds[item.values] for item in epoch(node)])
        batches = [batch for hand in hands for batch in hand]
        assert 1 - sum(batch.sum() for batch in batches) / sum(batch.max() * len(batch) for batch in batches) < 0.02, (
            "little is padding"
        )
        cost = np.array([[batch.max() * len(batch) * (1 + batch.max() / 20) for batch in hand] for hand in hands])
        assert least < 1 - cost.mean() / cost.max(axis=0).mean() < most


def test_refuses_what_is_no_grouping_and_no_order():
    with pytest.raises(GraphError, match=r"groups must be penstock.Packs or penstock.Buckets, not int"):
        Grouper(SequentialOrder(3), 5)
    with pytest.raises(GraphError, match="an order has __len__"):
        Grouper([0, 1], Packs([1, 2], 8))
