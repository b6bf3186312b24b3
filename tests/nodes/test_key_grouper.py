"""KeyGrouper: rounds of one key as items of an epoch. The same key on all ranks, every sample once, in blocks; a jump
plans one block."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from penstock import Buckets, GraphError, Loader, Mix, Packs, StateError
from penstock.nodes import Cycler, EndOfEpoch, Grouper, KeyGrouper, Sharder
from penstock.orders import SequentialOrder, ShuffledOrder, TorchOrder, WeightedOrder
from penstock.testing import assert_resumes_everywhere

N = 50
KEYS = np.random.default_rng(2).choice(["wide", "tall", "square", "odd"], N, p=[0.5, 0.3, 0.16, 0.04])
SHORTS = ["carry", "pad", "drop"]


def grouper(short="carry", order=None, block=None, **words):
    return KeyGrouper(order or ShuffledOrder(N, 3), Buckets(keys=KEYS, batch_size=3, short=short, block=block, **words))


def ranks(count, **words):
    made = [Sharder(Cycler(grouper(**words)), rank, count) for rank in range(count)]
    for node in made:
        node.reset()
    return made


def epoch(node):
    """The items up to the mark."""
    items = []
    while not isinstance(item := next(node), EndOfEpoch):
        items.append(item)
    return items


class TestAnEpoch:
    @pytest.mark.parametrize("block", [None, 20])
    @pytest.mark.parametrize("short", SHORTS)
    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_has_one_key_in_each_round_and_every_sample(self, short, count, block):
        """Seen to fail: with the samples of a block in its order, and not by key."""
        nodes = ranks(count, short=short, block=block)
        for number in range(2):
            hands = [epoch(node) for node in nodes]
            assert len({len(hand) for hand in hands}) == 1
            for batches in zip(*hands, strict=True):
                assert len({KEYS[index] for batch in batches for index in batch.values}) == 1
                assert len({node.get_state()["epoch"] for node in nodes}) == 1
                if short != "carry":
                    assert {len(batch) for batch in batches} == {3}
            seen = np.concatenate([batch.positions for hand in hands for batch in hand])
            assert len(np.unique(seen)) == len(seen)
            assert np.array_equal(
                ShuffledOrder(N, 3).indices(number, seen % N),
                np.concatenate([b.values for hand in hands for b in hand]),
            )
            once = np.sort(seen[seen < N])
            if short == "drop":
                assert N - len(once) < 4 * 3 * count * (1 if block is None else 3)
            else:
                assert once.tolist() == list(range(N))
            if short == "carry" and block is None:
                assert len(seen) - N == sum(max(0, count - many) for many in np.unique(KEYS, return_counts=True)[1])
        for node in nodes:
            node.shutdown()

    def test_of_nothing_is_empty(self):
        node = Cycler(KeyGrouper(SequentialOrder(0), Buckets(keys=[])))
        node.reset()
        assert epoch(node) == epoch(node) == []
        node.shutdown()

    def test_may_draw_a_sample_more_than_once(self):
        """An order need not be a permutation."""

        class Twice:
            def __len__(self):
                return 8

            def indices(self, epoch, positions):
                return positions // 2

            def settings(self):
                return {"order": "twice"}

        node = Cycler(KeyGrouper(Twice(), Buckets(keys="aabb", batch_size=2)))
        node.reset()
        assert [(item.positions.tolist(), item.plain()) for item in epoch(node)] == [
            ([0, 1], [0, 0]),
            ([2, 3], [1, 1]),
            ([4, 5], [2, 2]),
            ([6, 7], [3, 3]),
        ]
        node.shutdown()


class TestResuming:
    @pytest.mark.parametrize("block", [None, 20])
    @pytest.mark.parametrize("short", SHORTS)
    def test_everywhere(self, short, block):
        for rank, count in ((0, 1), (1, 2)):
            assert_resumes_everywhere(
                lambda rank=rank, count=count: Sharder(Cycler(grouper(short, block=block)), rank, count),
                steps=60 // count,
            )

    def test_over_an_order_that_is_planned_as_a_whole(self):
        assert_resumes_everywhere(lambda: Cycler(grouper(order=TorchOrder(N, 1))), steps=40)


class TestTheState:
    def test_is_small_whatever_the_number_of_keys(self):
        """After 20 numbers of ranks in one epoch."""
        n = 60_000
        order, buckets = ShuffledOrder(n, 1), Buckets(keys=np.arange(n) % 3000, batch_size=2)
        state = None
        for count in range(1, 21):
            node = Sharder(Cycler(KeyGrouper(order, buckets)), 0, count)
            node.reset(state)
            next(node)
            state = node.get_state()
            node.shutdown()
        assert state["source"]["rounds"] == [[count, 1] for count in range(1, 21)]
        assert len(json.dumps(state)) < 300

    @pytest.mark.parametrize(
        "wrong",
        [
            {"block": 4, "rounds": []},
            {"block": 3, "rounds": [[1, 1]]},
            {"block": 0, "rounds": [[1, 21]]},
            {"block": 2, "rounds": [[1, 11]]},
            {"block": 0, "rounds": [[0, 1]]},
            {"block": 0, "rounds": [[2**17, 1]]},
            {"block": 0, "rounds": [[1, 0]]},
            {"block": 0, "rounds": [[1, -1]]},
            {"block": 0, "rounds": [[1]]},
            {"block": 0, "rounds": [1]},
            {"block": 0, "rounds": {}},
            {"block": 0, "rounds": [[1, 12], [2, 12]]},
        ],
    )
    def test_out_of_bounds_is_refused(self, wrong):
        with pytest.raises(StateError, match=r"out of bounds|must be a whole number|must be list"):
            grouper(block=20).check({"epoch": 0, **wrong})

    @pytest.mark.parametrize("rounds", [[[1, 20]], [[2, 19], [1, 1]], [[1, 1], [2, 1], [3, 17]]])
    def test_with_more_rounds_than_there_are_is_refused_where_it_is_read(self, rounds):
        node = grouper(block=20)
        state = {"epoch": 0, "block": 0, "rounds": rounds}
        node.check(state)
        with pytest.raises(StateError, match=r"after the rounds .* is out of bounds: block 0 has fewer"):
            node.read(state, 1)
        node.shutdown()

    def test_of_a_mix_depends_on_the_stages_that_the_block_has_seen(self):
        """Blocks of 16: what begins at item 32 is part of a block that was begun at item 32, and not of the one
        before."""
        longer = [(0, {"a": 1}), (32, {"b": 1})]
        one, other = (
            KeyGrouper(
                Mix({"a": range(40), "b": range(20)}, stages, epoch_size=64).order(shuffle=True, seed=1),
                Buckets(keys="x" * 60, block=16),
            )
            for stages in ([*longer[:1], (32, {"a": 1, "b": 1})], longer)
        )
        for block, rounds, same in (
            (0, [], True),
            (1, [[1, 3]], True),
            (2, [], True),
            (2, [[1, 1]], False),
            (3, [], False),
        ):
            state = {"epoch": 0, "block": block, "rounds": rounds}
            assert (one.settings_at(0, state) == other.settings_at(0, state)) is same
        assert one.settings_at(0, None) != other.settings_at(0, None)
        assert one.settings_at(0, {"block": "x", "rounds": []}) == {}


class TestTheLog:
    def said(self, caplog, count, **words):
        with caplog.at_level(logging.INFO, "penstock"):
            for node in ranks(count, **words):
                next(node)
                next(node)
                node.shutdown()
        return [record.getMessage() for record in caplog.records]

    def test_names_what_is_dropped_before_the_first_batch_and_once(self, caplog):
        """Rank 0 says it. There are 28, 12, 9 and 1 samples."""
        counts = dict(zip(*np.unique(KEYS, return_counts=True), strict=True))
        (told,) = self.said(caplog, 4, short="drop")
        lost = {str(key): int(many) % 12 for key, many in counts.items() if many % 12}
        assert f"of the epoch, {sum(lost.values())} samples are left out, by key: " in told
        for key, many in lost.items():
            assert f"'{key}': {many}{' (all of them)' * int(counts[key] < 12)}" in told
        assert told.count("all of them") == 2

    def test_names_what_is_repeated(self, caplog):
        counts = dict(zip(*np.unique(KEYS, return_counts=True), strict=True))
        (told,) = self.said(caplog, 2, short="pad")
        assert f"of the epoch, {sum(-many % 6 for many in counts.values())} samples are repeated" in told

    def test_has_nothing_to_say_if_every_sample_comes_once(self, caplog):
        assert self.said(caplog, 1, short="carry") == []


def test_a_sample_that_is_repeated_has_a_place_of_its_own():
    """And is found there. Seen to fail: with the positions of the first time, so that both draw the same random
    numbers."""
    node = KeyGrouper(SequentialOrder(3), Buckets(keys="abb", batch_size=4, short="pad"))
    items, _ = node.read(node.start(0), 2)
    assert [(item.positions.tolist(), item.plain()) for item in items] == [
        ([0, 3, 6, 9], [0] * 4),
        ([1, 2, 4, 5], [1, 2, 1, 2]),
    ]
    for item in items:
        assert node.at(0, item.positions) == item
    for wrong in (-1, 3 * 2**31):
        with pytest.raises(IndexError, match=f"position {wrong} is not in epoch 0"):
            node.at(0, np.array([wrong]))
    with pytest.raises(IndexError):
        KeyGrouper(SequentialOrder(3), Buckets(keys="abb", short="drop")).at(0, np.array([3]))
    node.shutdown()


def test_refuses_what_is_no_order_and_has_no_keys():
    with pytest.raises(GraphError, match="a KeyGrouper needs Buckets with keys"):
        KeyGrouper(SequentialOrder(3), Buckets([1, 1, 1], 3))
    with pytest.raises(GraphError, match="use a KeyGrouper"):
        Grouper(SequentialOrder(3), Buckets(keys="abc"))
    with pytest.raises(GraphError, match="an order has __len__"):
        KeyGrouper([0, 1], Buckets(keys="ab"))
    with pytest.raises(GraphError, match="needs Buckets with keys"):
        KeyGrouper(SequentialOrder(2), Packs([1, 2], 8))
    node = KeyGrouper(SequentialOrder(5), Buckets(keys="abc"))
    with pytest.raises(GraphError, match="index 4, but there are 3 keys"):
        node.read(node.start(0), 1)
    node.shutdown()
    node = KeyGrouper(SequentialOrder(3), Buckets(keys="abc"))
    with pytest.raises(GraphError, match="groups cannot be read by position"):
        node.peek(node.start(0), np.arange(1))


@pytest.mark.parametrize("groups", [Buckets(keys=[0, 1] * 10, batch_size=2), Packs([1] * 20, 4)])
def test_an_update_that_comes_too_late_is_refused_each_time(groups):
    """Seen to fail: epochs by key were drawn by the weights before; with packs, the second try was."""
    order = WeightedOrder([1.0] * 20, 20)
    with Loader.from_dataset([np.arange(1)] * 20, order=order, groups=groups, collate_fn=list) as loader:
        assert len(list(loader)) > 0
        order.update([1.0] * 3 + [0.0] * 17)
        for _ in range(2):
            with pytest.raises(GraphError, match="the order was updated, but groups are planned ahead"):
                next(iter(loader))


def test_later_stages_of_a_mix_are_compared_and_cannot_be_added():
    mix = {"a": range(8), "b": range(8)}
    later = [
        Mix(mix, [(0, {"a": 1}), (99_000, {"a": 1, "b": size})], epoch_size=8).order(shuffle=True, seed=0)
        for size in (1, 2)
    ]
    one, other = (KeyGrouper(order, Buckets(keys=[0] * 16)).choices() for order in later)
    assert one != other
    with (
        Loader.from_dataset(Mix(mix, {"a": 1, "b": 1}), groups=Buckets(keys=[0] * 16)) as loader,
        pytest.raises(ValueError, match="this loader reads 'mix' in Buckets by key, whose rounds are planned ahead"),
    ):
        loader.reweight({"b": 1})


BY_SOURCE = {"web": ["tall", "wide", "tall"], "code": np.array([[1, 2], [1, 2]])}


class TestKeysBySource:
    """A mix counts through its sources by name, whatever their order in a dict."""

    def loader(self, keys):
        mix = Mix({"web": ["w0", "w1", "w2"], "code": ["c0", "c1"]}, {"web": 3, "code": 2}, epoch_size=30)
        return Loader.from_dataset(mix, groups=Buckets(keys=keys, batch_size=2, short="drop"), collate_fn=list)

    def test_are_those_of_the_mix(self):
        """Seen to fail: the names of the sources taken for keys."""
        of_sample = {"w0": "tall", "w1": "wide", "w2": "tall", "c0": (1, 2), "c1": (1, 2)}
        with self.loader(BY_SOURCE) as loader, self.loader([(1, 2), (1, 2), "tall", "wide", "tall"]) as flat:
            batches = list(loader)
            assert batches == list(flat)
        assert len(batches) > 10
        for batch in batches:
            assert len({of_sample[sample] for sample in batch}) == 1

    @pytest.mark.parametrize(
        ("keys", "said"),
        [
            ({"web": ["tall"] * 3}, r"keys is a dict by source, but Mix has .*: missing are \['code'\]"),
            (
                {"web": ["tall"] * 2, "code": [1, 2]},
                r"of another number are \{'web': 2\}. Pass one key for each sample",
            ),
            ({0: "tall", 1: "wide"}, r"unknown are \['0', '1'\]"),
        ],
    )
    def test_that_are_others_are_refused(self, keys, said):
        with pytest.raises(ValueError, match=said):
            self.loader(keys)
