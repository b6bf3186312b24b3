"""What holds of every order: it is pure and frozen, and refuses what makes no sense when it is built. What each of them
is for has its own file."""

from __future__ import annotations

import numpy as np
import pytest

from penstock._random.mix_order import MixOrder
from penstock._random.orders import LONGEST
from penstock.orders import SequentialOrder, ShardOrder, ShuffledOrder, SlidingOrder, TorchOrder, WeightedOrder
from penstock.testing import assert_order_is_pure

COUNTS = [0, 7, 500, 0, 3, 90, 1, 200]
STAGES = [(0, {"a": 1, "b": 2, "c": 3}), (3000, {"a": 1, "c": 9}), (8000, {"b": 1})]
ORDERS = {
    "sequential": lambda: SequentialOrder(7),
    "sorted": lambda: ShuffledOrder(7, 1),
    "enciphered": lambda: ShuffledOrder(7000, 1),
    "torch": lambda: TorchOrder(7, 1),
    "weighted": lambda: WeightedOrder([1, 2], 7, 1),
    "sliding": lambda: SlidingOrder(100, 60, 1),
    "sliding, in blocks": lambda: SlidingOrder(5000, 60, 1),
    "shards": lambda: ShardOrder(COUNTS, 3, 0, 1),
    "shards with a window": lambda: ShardOrder(np.array(COUNTS), 3, 60, 1),
    "mix": lambda: MixOrder(
        {"a": ShuffledOrder(40, 1), "b": ShuffledOrder(7000, 2), "c": SequentialOrder(300)}, STAGES, 5000, seed=3
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_each_is_pure_and_ends_where_it_says(name):
    """Its indices do not depend on how they are read, nor on what was read before."""
    order = ORDERS[name]()
    n = len(order)
    assert_order_is_pure(order, items=7340 if name == "mix" else None, again=ORDERS[name]())
    for outside in (-1, n):
        with pytest.raises(IndexError, match=f"position {outside} is outside an epoch of {n} items"):
            order.indices(0, np.array([0, outside]))


@pytest.mark.parametrize(
    "order",
    [SequentialOrder(0), ShuffledOrder(0), TorchOrder(0), WeightedOrder([1], 0), SlidingOrder(0, 5), ShardOrder([])],
    ids=lambda order: type(order).__name__,
)
def test_each_may_be_of_nothing(order):
    assert len(order) == 0
    assert order.indices(0, np.arange(0)).tolist() == []


def test_each_may_be_of_the_longest():
    for order in (
        SequentialOrder(LONGEST),
        ShuffledOrder(LONGEST),
        WeightedOrder([1], LONGEST),
        SlidingOrder(LONGEST, 5),
    ):
        assert len(order) == LONGEST


def sixths(n):
    return [k * n // 6 for k in range(6)] if n >= 6 else list(range(n))


def borders(n):
    return [0, 1, 2, n // 2, n - 2, n - 1]


WEIGHTED = WeightedOrder([1, 0, 2.5, 4, 0], 1000, 7)
FROZEN = [
    (ShuffledOrder(1, 0), 0, sixths, [0]),
    (ShuffledOrder(3, 0), 0, sixths, [2, 0, 1]),
    (ShuffledOrder(10, 7), 1, sixths, [9, 2, 4, 8, 5, 7]),
    (ShuffledOrder(101, 2**63 - 1), 5, sixths, [66, 40, 65, 34, 36, 33]),
    (ShuffledOrder(4096, 1), 2, sixths, [917, 270, 3112, 1642, 2145, 591]),
    (ShuffledOrder(4097, 1), 2, sixths, [3795, 605, 3122, 2375, 69, 3967]),
    (ShuffledOrder(10**6, 0), 3, sixths, [495456, 605034, 765942, 875978, 52238, 60098]),
    (ShuffledOrder(2**24, 5), 0, sixths, [2604067, 2358422, 9608993, 4372697, 13685284, 15740024]),
    (ShuffledOrder(10**9, 0), 0, sixths, [504670756, 472817006, 841486959, 188520067, 190835451, 225910475]),
    (
        ShuffledOrder(10**12, 123),
        4,
        sixths,
        [743562769369, 152573502910, 226315983986, 924210904781, 930721862961, 570198748011],
    ),
    (
        ShuffledOrder(2**48, 0),
        1,
        sixths,
        [90679936676036, 227079665185807, 125069398067559, 249993327063041, 271130267879563, 38639008367892],
    ),
    (WEIGHTED, 0, lambda n: range(12), [0, 0, 2, 3, 3, 3, 2, 3, 3, 3, 2, 3]),
    (WEIGHTED, 3, lambda n: [999, 0, 5, 500], [2, 2, 2, 0]),
    (SlidingOrder(10, 4, 0), 0, borders, [0, 2, 1, 4, 8, 9]),
    (SlidingOrder(5000, 100, 7), 2, borders, [9, 5, 19, 2463, 4984, 4994]),
    (SlidingOrder(10**9, 1000, 1), 10**12, borders, [26, 30, 59, 500000039, 999999999, 999999953]),
    (ShardOrder([3, 0, 5, 2], 2, 0, 0), 0, borders, [3, 0, 4, 2, 7, 9]),
    (ShardOrder([40] * 50, None, 0, 7), 3, borders, [1240, 770, 20, 445, 1589, 559]),
    (ShardOrder([40] * 50, 5, 30, 7), 3, borders, [1241, 1849, 1160, 645, 999, 552]),
]


@pytest.mark.parametrize(
    ("order", "epoch", "positions", "values"), FROZEN, ids=[f"{order}, epoch {epoch}" for order, epoch, *_ in FROZEN]
)
def test_each_is_frozen(order, epoch, positions, values):
    """A release that changes one of these changes every user's order: never edit them."""
    assert order.indices(epoch, np.array(positions(len(order)))).tolist() == values


SAID = [
    (lambda: SequentialOrder(7), {"order": "sequential", "length": 7}, {"n": 7}),
    (lambda: ShuffledOrder(7), {"order": "shuffled", "length": 7, "seed": 0}, {"n": 7, "seed": 0}),
    (lambda: TorchOrder(7), {"order": "torch", "length": 7, "seed": 0}, {"n": 7, "seed": 0}),
    (lambda: TorchOrder(7, -(2**63)), {"order": "torch", "length": 7, "seed": -(2**63)}, {"n": 7, "seed": -(2**63)}),
    (
        lambda: WeightedOrder([1, 0, 2.5, 4, 0], 1000),
        {"order": "weighted", "length": 1000, "seed": 0, "weights": "a3db1212c4370c49"},
        {"weights": 5, "num_samples": 1000, "seed": 0},
    ),
    (
        lambda: SlidingOrder(9, 4),
        {"order": "sliding", "length": 9, "window": 4, "seed": 0},
        {"n": 9, "window": 4, "seed": 0},
    ),
]


@pytest.mark.parametrize(("make", "settings", "details"), SAID, ids=[str(settings["order"]) for _, settings, _ in SAID])
def test_each_says_what_it_is_in_a_state(make, settings, details):
    """The states of a release must load in the next: never edit these either. Seen to fail: each of the names and of
    the defaults."""
    order = make()
    assert (order.settings(), order.details()) == (settings, details)
    order.say(more=1)
    assert order.settings() == settings | {"more": 1}


PLAN = [(0, {"a": 0.7, "b": 0.2, "c": 0.1}), (5000, {"b": 0.999, "c": 0.001}), (11_000, {"a": 1, "b": 1, "c": 1})]
FROZEN_MIXES = [
    (0, 1, 0, [5863, 4618, 5603, 5791, 9729, 5851, 5362, 8573, 14125, 12557]),
    (0, 1, 3, [18826, 3627, 2956, 2832, 21316, 1718, 4405, 25510, 18688, 4596]),
    (7, 1, 0, [5863, 4618, 5603, 5791, 9729, 16156, 4633, 14125, 18565, 15436]),
    (7, 8, 1, [13980, 11852, 12557, 16489, 11719, 10744, 8069, 4305, 19120, 17485]),
    (2**63 - 1, 1, 10**12, [24459, 22728, 7074, 2279, 27264, 10321, 16799, 1574, 25298, 12706]),
]


@pytest.mark.parametrize(("seed", "run", "epoch", "values"), FROZEN_MIXES)
def test_a_mix_is_frozen(seed, run, epoch, values):
    """Never edit these either. Positions on both sides of a block's and a stage's border."""
    order = MixOrder({name: ShuffledOrder(10**4, k) for k, name in enumerate("abc")}, PLAN, 8000, seed, run)
    assert order.indices(epoch, np.array([0, 1, 2, 1023, 1024, 2999, 3000, 4999, 5000, 7999])).tolist() == values


def test_the_checksum_of_weights_is_frozen():
    assert WEIGHTED.settings() == {"order": "weighted", "length": 1000, "seed": 7, "weights": "a3db1212c4370c49"}


def mix(weights, **rest):
    return MixOrder({name: SequentialOrder(5) for name in "abc"}, weights, **rest)


ALL = {"a": 1, "b": 1, "c": 1}
REFUSED = [
    (lambda: ShuffledOrder(-1), "n=-1 must be a whole number of at least 0"),
    (lambda: SequentialOrder(LONGEST + 1), "must be a whole number below"),
    (lambda: ShuffledOrder(3.0), "n=3.0, a float, must be a whole number"),
    (lambda: TorchOrder([1, 2]), r" Pass the number of items, as len\(dataset\).$"),
    (lambda: TorchOrder(3, -(2**63) - 1), r"seed=-9223372036854775809 .* at least -9223372036854775808"),
    (lambda: ShuffledOrder(3, -1), r"seed=-1 .* A larger one can be folded: seed % 2\*\*63.$"),
    (lambda: ShuffledOrder(3, 2**63), "seed % 2"),
    (lambda: ShuffledOrder(3, None), "seed=None"),
    (lambda: WeightedOrder([1], 1.5), "num_samples=1.5"),
    (lambda: WeightedOrder([1, -0.5], 5), r"weights\[1\] is -0.5"),
    (lambda: WeightedOrder([1, float("nan")], 5), r"weights\[1\] is nan"),
    (lambda: WeightedOrder([float("inf"), 1], 5), r"weights\[0\] is inf"),
    (lambda: WeightedOrder([0, 0], 5), "all 2 weights are 0"),
    (lambda: WeightedOrder([], 5), r"shape \(0,\)"),
    (lambda: WeightedOrder(3.0, 5), r"shape \(\)"),
    (lambda: ShardOrder([3, -1]), r"counts\[1\] is -1, but a count cannot be negative"),
    (lambda: ShardOrder([3, 1.5]), "counts must be integers, one per shard, but have dtype float64"),
    (lambda: ShardOrder([[3]]), r"and shape \(1, 1\)"),
    (lambda: ShardOrder([2**56, 1]), "the counts add up to 72057594037927937"),
    (lambda: ShardOrder([3], 0), "lanes=0 must be a whole number of at least 1"),
    (lambda: ShardOrder([3], 2**17), "lanes=131072 must be a whole number below"),
    (lambda: ShardOrder([3], 1, -1), "window=-1"),
    (lambda: ShardOrder([3], 1, 0, -1), "seed=-1"),
    (
        lambda: ShardOrder([3], window=5, shuffle=False),
        "window=5 shuffles the records, but shuffle=False keeps them in order",
    ),
    (lambda: SlidingOrder(5, -1), "window=-1 must be a whole number of at least 0"),
    (lambda: SlidingOrder(5, 2**31), "window=2147483648 must be a whole number below"),
    (lambda: SlidingOrder(-1, 5), "n=-1"),
    (lambda: SlidingOrder(5, 5, -1), "seed=-1"),
    (lambda: MixOrder({}, {}), "a mix needs at least one source"),
    (lambda: MixOrder({"a": SequentialOrder(0)}, {"a": 1}), "the source 'a' has a weight but no items"),
    (lambda: mix({**ALL, "d": 1}), r"there are weights for 'd', but the sources are 'a', 'b', 'c'"),
    (lambda: mix({"a": 1, "b": 1}), r"the source 'c' has no weight. Give it one, which may be 0"),
    (
        lambda: mix({**ALL, "b": -0.5}),
        r"the weight of 'b' is -0.5. A weight must be a finite number that is not negative",
    ),
    (lambda: mix({**ALL, "b": float("nan")}), "the weight of 'b' is nan"),
    (lambda: mix({**ALL, "b": True}), "the weight of 'b' is True"),
    (lambda: mix({**ALL, "b": "many"}), "the weight of 'b' is 'many'"),
    (lambda: mix(dict.fromkeys("abc", 0)), "all weights are 0, so nothing can be drawn"),
    (
        lambda: mix({**ALL, "b": 1e-9}),
        r"the weight of 'b' is 1e-09, which is 1 item in 2e\+09. The smallest share is 1 in 1048576",
    ),
    (lambda: mix([(0, ALL), (0, {"a": 1})]), r"the stages start at the items \[0, 0\]"),
    (lambda: mix([(5, ALL)]), "The first stage must start at 0"),
    (lambda: mix([]), "The first stage must start at 0"),
    (lambda: mix([(0, {"a": 1, "b": 1}), (10, {"a": 1})]), "the source 'c' has no weight in any stage"),
    (lambda: mix([(0, ALL), (10, {"a": 0})]), "all weights of the stage at 10 are 0"),
    (
        lambda: mix([(0, ALL), (-1, {"a": 1})]),
        "start=-1 must be a whole number of at least 0. A stage starts at an item",
    ),
    (lambda: mix(5), "weights must be a dict, or a list of pairs of a start and a dict, not 5"),
    (lambda: mix([(0, ALL), {"a": 1}]), "a list of pairs of a start and a dict"),
    (
        lambda: mix([(0, [1, 1, 1])]),
        "the weights are a list. Pass a dict with a weight for each source, such as {'a': 1.0}",
    ),
    (lambda: mix(ALL, epoch_size=0), "epoch_size=0 must be a whole number of at least 1"),
    (lambda: mix(ALL, epoch_size=10, run=4), "epoch_size=10 is not a multiple of run=4. Make it 8"),
    (lambda: mix(ALL, epoch_size=2, run=4), "not a multiple of run=4. Make it 4"),
    (lambda: mix(ALL, run=0), "run=0 must be a whole number of at least 1"),
    (lambda: mix(ALL, seed=-1), "seed=-1"),
    (lambda: mix(ALL, epoch_size="first", run=8), "run=8 is longer than a source"),
    (lambda: mix([(0, ALL), (6, ALL)], run=4), "a stage starts at item 6, which is not a multiple of run=4. Make it 4"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_arguments_that_make_no_sense_are_refused_when_it_is_built(make, why):
    with pytest.raises(ValueError, match=why):
        make()
