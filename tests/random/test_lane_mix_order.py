"""A mix with streams, by value: each lane is a mix of its own, and an index says which item of which source it is in
which lane."""

from __future__ import annotations

import json
import zlib
from fractions import Fraction

import numpy as np
import pytest

from penstock._arguments import shortened
from penstock._random.lane_mix_order import MOST_SOURCES, InterleavedMixOrder
from penstock._random.lane_order import InterleavedOrder
from penstock._random.mix_order import MixOrder
from penstock._random.orders import LONGEST
from penstock._random.splitmix import GAMMA, mixed
from penstock.orders import SequentialOrder, ShuffledOrder

WEIGHTS = {"a": 5, "b": 3, "c": 2}
DATA = {"a": {"files": "one"}, "b": {}, "c": {"files": "two", "rows": "three"}}

SETTINGS = {
    "order": "mixed lanes",
    "length": 40,
    "lanes": 4,
    "seed": 3,
    "stages": "83f9aa5f9fa399d4",
    "orders": "b39fba0aacb26f9a",
    "files": "07cb8d1ae909ec5d",
    "rows": "three",
}
FROZEN = [0, 5, 2, 287, 62, 6145, 1500000000]


def sources(**of_a):
    return {"c": ShuffledOrder(37, 9), "b": InterleavedOrder(2, 10), "a": InterleavedOrder(4, 10, **of_a)}


def order(weights=WEIGHTS, *, seed=3, **rest):
    return InterleavedMixOrder(rest.pop("orders", sources()), weights, rest.pop("epoch_size", 40), seed, **rest)


def by_hand(weights, positions, seed=3):
    """Lane by lane; ``weights`` with the starts of stages in a lane."""
    out = []
    for position in positions:
        item, lane = divmod(position, 4)
        endless = {name: SequentialOrder(2**56) for name in "abc"}
        mix = MixOrder(endless, weights, LONGEST, mixed((mixed(seed + GAMMA) ^ lane) + GAMMA) >> 1)
        source, number = divmod(int(mix.indices(0, np.array([item]))[0]), 2**56)
        if source == 2:
            pass_, place = divmod(number * 4 + lane, 37)
            number = int(ShuffledOrder(37, 9).indices(pass_, np.array([place]))[0])
        out.append((number * 3 + source) * 4 + lane)
    return out


STAGES = [(0, WEIGHTS), (42, {"c": 1}), (80, {"a": 1, "b": 1})]
IN_A_LANE = [(0, WEIGHTS), (11, {"c": 1}), (20, {"a": 1, "b": 1})]


@pytest.mark.parametrize(
    ("weights", "in_a_lane"), [(WEIGHTS, WEIGHTS), (STAGES, IN_A_LANE)], ids=["one stage", "three"]
)
@pytest.mark.parametrize("seed", [0, 3])
def test_an_index_is_lane_source_and_item(weights, in_a_lane, seed):
    """A stage begins in each lane at its share of the start, rounded up. Seen to fail: rounded down; with the item of
    the lane in place of the pass's."""
    positions = [*range(100), 4095, 4096, 10**6 + 1]
    found = order(weights, seed=seed).indices(5, np.array(positions[::-1]))
    assert found.tolist() == by_hand(in_a_lane, positions, seed)[::-1]
    assert order(weights, seed=seed).indices(0, np.array([], np.int64)).tolist() == []


def test_it_is_frozen():
    """A release that changes these changes every run: never edit them."""
    assert order().indices(0, np.array([0, 1, 2, 3, 50, 4097, 10**9])).tolist() == FROZEN
    assert order(STAGES, data=DATA).settings() == SETTINGS


def test_what_a_graph_says_of_it():
    one = order(STAGES)
    assert one.details() == {"sources": ["a", "b", "c"], "stages": 3, "epoch_size": 40, "lanes": 4, "seed": 3}
    assert (one.round, one.lanes, one.grain, len(one), one.names, one.read_ahead) == (
        4,
        4,
        4,
        40,
        ["a", "b", "c"],
        2**16,
    )
    assert one.choices() == {"stages from": [0, 44, 80]}
    assert one.changes() == {}
    assert one.marks is None
    assert len(InterleavedMixOrder(sources(), WEIGHTS, LONGEST)) == LONGEST
    assert InterleavedMixOrder(sources(), WEIGHTS, 1).settings() == {**order().settings(), "length": 1, "seed": 0}
    many = {f"s{k}": InterleavedOrder(1, 1) for k in range(MOST_SOURCES)}
    assert len(InterleavedMixOrder(many, dict.fromkeys(many, 1), 7)) == 7


def test_settings_at_know_the_stages_that_have_begun():
    """Those that begin where a state was taken have given nothing. Seen to fail: with the stage that begins there."""
    one = order(STAGES, data=DATA)
    of_plan = [order([*STAGES[:n], (1000, WEIGHTS)], data=DATA) for n in (1, 2, 3)]
    for position, begun in ((0, 1), (1, 1), (44, 1), (45, 2), (80, 2), (81, 3), (10**9, 3)):
        said = one.settings_at(7, position)
        assert said == of_plan[begun - 1].settings_at(0, min(position, 999))
        assert said.keys() == {"length", "stages", "orders", "files", "rows"}
    assert {**one.settings(), **one.settings_at(0, 10**9)} == one.settings()
    far = order([(0, WEIGHTS), (2**60, {"a": 1})])
    assert far.settings_at(0, 2**60) == far.settings_at(0, 1) != far.settings_at(0, 2**60 + 1)
    late = order([(0, {"a": 1}), (400, {"b": 1, "c": 1})], data=DATA)
    assert [late.settings_at(0, at)["rows"] for at in (400, 401)] == [None, "three"]
    assert late.settings_at(0, 400)["orders"] != late.settings_at(0, 401)["orders"]


def test_what_a_source_holds_is_said_apart_once_it_is_used():
    """So that an error can name what differs. Seen to fail: with what is held by sources that no stage has used."""
    held = {"files": ["x"] * 3}
    one = order([(0, {"b": 1}), (400, {"a": 1, "c": 1})], orders=sources(settings={"held": held}))
    assert one.settings()["held"] == shortened({"a": held})
    assert one.settings_at(0, 401)["held"] == shortened({"a": held})
    assert one.settings_at(0, 400)["held"] is None
    assert one.settings()["orders"] == order(one_plan := [(0, {"b": 1}), (400, {"a": 1, "c": 1})]).settings()["orders"]
    assert "held" not in order(one_plan).settings()


def test_stages_that_a_run_adds_are_those_of_a_plan():
    """In lanes that were read before, and in others. Seen to fail: restaged in the first lane only."""
    one, plan = order(), order([(0, WEIGHTS), (40, {"b": 1}), (402, {"c": 1})])
    assert one.indices(0, np.arange(2)).tolist() == plan.indices(0, np.arange(2)).tolist()
    added = [(40, {"b": 1}), (402, {"c": 1})]
    one.adopt(json.loads(json.dumps({"stages": added})))
    positions = np.arange(600)
    assert one.indices(0, positions).tolist() == plan.indices(0, positions).tolist()
    assert one.changes() == {"stages": added}
    assert one.choices() == plan.choices() == {"stages from": [0, 40, 404]}
    assert one.settings() == plan.settings()
    assert one.details()["stages"] == 3
    for changes in ({"stages": [(48, {"z": 1})]}, {"weights": 1}):
        with pytest.raises(ValueError, match="there are weights of the stage at 12 for 'z'|has no weights to change"):
            one.adopt(changes)
    assert one.indices(0, positions).tolist() == plan.indices(0, positions).tolist()
    assert one.changes() == {"stages": added}
    one.adopt({})
    assert (one.changes(), one.indices(0, positions).tolist()) == ({}, order().indices(0, positions).tolist())


def test_expected_shares_are_exact():
    one = order([(0, WEIGHTS), (40, {"b": 1})])
    assert one.expected(0, 40) == {"a": 20, "b": 12, "c": 8}
    assert one.expected(8, 80) == {"a": 16, "b": Fraction(48, 5) + 40, "c": Fraction(32, 5)}


def test_marks_are_of_one_choice_from_each_source():
    """Ranks that have one in common for every source have one in common. Seen to fail: the marks of one source."""
    marked = {
        "a": InterleavedOrder(4, 1, marks=lambda: (1, 2)),
        "b": InterleavedOrder(4, 1, marks=lambda: (7,)),
        "c": InterleavedOrder(4, 1),
    }
    assert order(orders=marked).marks() == tuple(zlib.crc32(repr(choice).encode()) for choice in ((1, 7), (2, 7)))
    many = {**marked, "a": InterleavedOrder(4, 1, marks=lambda: tuple(range(2000)))}
    assert len(order(orders=many).marks()) == 1024


def test_all_sources_are_taken():
    taken = []
    order(orders=sources(take=lambda: taken.append("a"))).take()
    assert taken == ["a"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"epoch_size": 0}, "^epoch_size=0 must be a whole number of at least 1"),
        ({"epoch_size": LONGEST + 1}, "^epoch_size=72057594037927937 must be a whole number below"),
        ({"seed": -1}, "^seed=-1"),
        (
            {"orders": {**sources(), "a": InterleavedOrder(6, 10), "b": InterleavedOrder(4, 10)}},
            (
                "^the source 'b' has 4 lanes, which do not divide 6, .* number of lanes= that divides 6: 4 shards or "
                "more allow 3.$"
            ),
        ),
        (
            {"orders": {**sources(), "a": InterleavedOrder(9, 10), "b": InterleavedOrder(2, 10)}},
            "divides 9: 2 shards or more allow 1.$",
        ),
        (
            {"orders": dict.fromkeys(map(str, range(MOST_SOURCES + 1)), InterleavedOrder(1, 1))},
            "^a mix with streams has at most 64 sources, but got 65.$",
        ),
        ({"weights": {"a": 1, "b": 1}}, "^the source 'c' has no weight"),
    ],
)
def test_what_cannot_be_mixed_is_refused(words, why):
    with pytest.raises(ValueError, match=why):
        order(**words)
