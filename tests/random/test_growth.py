"""Growth, GrowingDeal and GrowingLanes: how many parts there are at which time, and which shards each lane reads."""

from __future__ import annotations

import hashlib
import re

import pytest

from penstock import StateError
from penstock._random.growth import WHY, GrowingDeal, GrowingLanes, Growth
from penstock._random.lane_order import PASSES, Deal

ERA = 2**48  # the deals of an era are numbered from a multiple of this


def grown(now=9, noun="shards"):
    return Growth(now, noun, lambda many: {"first": many})


def lanes_of(growth):
    """An order of 3 lanes, and how often its data were taken and dealt anew."""
    calls = []
    taken, dealt = (lambda: calls.append("taken")), (lambda: calls.append("dealt"))
    return GrowingLanes(3, 10, {"seed": 5}, taken, growth, dealt), calls


def test_there_are_more_parts_from_when_the_run_goes_on():
    """Seen to fail: an era that begins one later; an era kept that begins when the run goes on."""
    growth = grown()
    assert (growth.eras, growth.at(0), growth.at(10**9)) == ([(0, 9)], 9, 9)
    growth.adopt({"grow": [[0, 2], [4, 3], [6, 5]]})
    assert [growth.at(when) for when in range(8)] == [2, 2, 2, 2, 3, 3, 5, 5]
    for since in (6, 1):  # the second has no more
        growth.goes_on(since)
        assert growth.eras == [(0, 2), (4, 3), (6, 9)]
    growth.adopt({"grow": [[0, 0], [1, 3]]})
    assert growth.changes() == {"grow": [[0, 0], [1, 3]]}
    growth.goes_on(0)
    assert growth.changes() == {"grow": [[0, 9]]}
    growth.adopt({"grow": [[0, 3]]})
    growth.adopt({})
    assert growth.eras == [(0, 9)]


def test_what_identifies_parts_is_asked_for_once():
    """Seen to fail: an answer that is not kept."""
    asked = []
    growth = Growth(4, "shards", lambda many: asked.append(many) or {"first": many})
    assert [growth.settings(many) for many in (4, 2, 4, 2)] == [{"first": many} for many in (4, 2, 4, 2)]
    assert growth.settings(3) is growth.settings(3)
    assert asked == [4, 2, 3]


@pytest.mark.parametrize(
    "grow",
    [
        *([], [[1, 4]]),
        *([[0, 4], [0, 5]], [[0, 4], [9, 4]], [[0, 5], [9, 4]], [[0, 1], [9, 2], [8, 3]], [[0, 1], [8, 2], [9, 2]]),
    ],
)
def test_damaged_changes_are_refused(grow):
    """Seen to fail: an era with as many parts as the one before it."""
    growth = grown()
    growth.adopt({"grow": [[0, 3]]})
    with pytest.raises(StateError, match=r"^what the data have grown by is damaged in this state. Load an older one.$"):
        growth.adopt({"grow": grow})
    assert growth.eras == [(0, 3)]


def test_changes_that_data_cannot_have_are_refused():
    """Seen to fail: a message that names "grow" too, and one with the number of an earlier era."""
    growth = grown(1005, "files")
    with pytest.raises(ValueError, match=r"^data that grow have no skip, weights to change\.$"):
        growth.adopt({"weights": 1, "grow": [[0, 3]], "skip": []})
    why = "there were 1,234 files, and now there are 1,005. Data that grow keep what they had, in its order, and have "
    with pytest.raises(ValueError, match=f"^{re.escape(why)}more behind it[.]$"):
        growth.adopt({"grow": [[0, 5], [9, 1007], [10, 1234]]})
    assert growth.eras == [(0, 1005)]


def test_ranks_compare_what_there_was_and_what_there_is():
    """Seen to fail: marks without what identifies the parts."""
    growth = grown()
    growth.adopt({"grow": [[0, 2], [4, 3]]})
    assert growth.choices() == {"grow": [[0, 2], [4, 3]], "grown": {"first": 9}}
    digest = hashlib.blake2b(repr(growth.choices()).encode(), digest_size=8).digest()
    assert growth.marks() == (int.from_bytes(digest, "big"),)
    assert len({grown().marks(), grown().marks(), growth.marks(), grown(8).marks()}) == 3


def test_a_lane_ends_its_pass_before_it_reads_more_shards():
    """It reaches the eras with its items 3 and 5.

    Seen to fail: the next era in the middle of a pass; one item too late; a quotient in floating point.
    """
    deal = GrowingDeal([(0, 4), (6, 5), (10, 6)], 2, shuffle=False, seed=1)
    assert (deal.shards, deal.lanes, deal.shuffle, deal.seed) == (6, 2, False, 1)
    assert [deal.after(number, 9) for number in (0, 1, 4, 5)] == [2, 3, 6, 7]
    for first, after in ((0, 4), (2, 4), (3, ERA), (4, ERA), (5, 2 * ERA)):
        assert [deal.after(number, first) for number in (2, 3)] == [after, after + 1]
    assert [deal.after(ERA + number, 4) for number in (3, 4)] == [ERA + 5, ERA + 6]
    assert [deal.after(ERA + number, 5) for number in (2, 3, 4)] == [ERA + 4, 2 * ERA + 1, 2 * ERA]
    assert deal.after(2 * ERA + 5, 99) == 2 * ERA + 7
    assert [deal.shards_with(number) for number in (0, ERA - 1, ERA, 2 * ERA)] == [4, 4, 5, 6]
    far = GrowingDeal([(0, 4), (2 * (2**53 + 1), 5)], 2, shuffle=False, seed=1)
    assert [far.after(2, 2**53 + more) for more in (0, 1)] == [4, ERA]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_passes_of_an_era_are_those_of_its_shards_alone(shuffle):
    """Behind the last era too, where readers look. Seen to fail: another era's shards; its own seed left out."""
    deal = GrowingDeal([(0, 5), (6, 7)], 3, shuffle=shuffle, seed=2)
    for pass_, era, shards in ((0, 0, 5), (2, 0, 5), (PASSES, 1, 7), (PASSES + 1, 1, 7), (2 * PASSES + 1, 1, 7)):
        opens, alone, number = deal.opens(pass_), Deal(shards, 3, shuffle=shuffle, seed=2), pass_ % PASSES
        places = range(number * shards, (number + 1) * shards)
        assert opens.shards.tolist() == [alone[place][1] for place in places]
        assert opens.lanes.tolist() == [place % 3 for place in places]
        assert opens.times.tolist() == [pass_ + place / shards for place in range(shards)]
        assert [deal[era * ERA + place] for place in places] == [
            (era * PASSES + number, shard) for shard in opens.shards.tolist()
        ]


def test_lanes_say_what_there_was_at_a_position():
    growth = grown()
    order, calls = lanes_of(growth)
    assert order.settings() == {"order": "lanes", "length": 10, "lanes": 3, "seed": 5}
    order.adopt({"grow": [[0, 4], [6, 5]]})
    assert growth.eras == [(0, 4), (6, 5)]
    assert [order.settings_at(3, position) for position in (0, 5, 6)] == [
        {"length": 10, "first": many} for many in (4, 4, 5)
    ]
    assert (order.changes(), order.choices(), order.marks()) == (growth.changes(), growth.choices(), growth.marks())
    assert order.why_ranks_differ == WHY
    assert (order.presumed({"shards": 4, "seed": 5}), order.presumed({"seed": 5})) == ({"grow": [[0, 4]]}, {})
    order.take()
    assert calls == ["taken"]


def test_lanes_are_dealt_anew_once_there_is_another_era():
    """From the next item of the first lane on. Seen to fail: dealt anew at each load."""
    growth = grown()
    order, calls = lanes_of(growth)
    order.resume_at(1, 7, 7)
    assert calls == []
    for sample, since in ((7, 9), (9, 9), (10, 12), (0, 0)):
        order.adopt({"grow": [[0, 4]]} if since else {})
        order.resume_at(1, 0, sample)
        assert growth.eras == ([(0, 4), (since, 9)] if since else [(0, 9)])
    assert calls == ["dealt"] * 3  # not by the second, whose eras are the first's
    order.resume_at(1, 0, 30)
    assert len(calls) == 3


@pytest.mark.parametrize("eras", [[[0, 2], [3, 5]], [[0, 0], [3, 5]], [[0, 4], [4, 5]]])
def test_lanes_refuse_fewer_parts_than_there_are_of_them_and_an_era_inside_a_round(eras):
    """Seen to fail: taken over, and refused by the deal when the run went on, as if the user had chosen the lanes."""
    growth = grown()
    order, calls = lanes_of(growth)
    with pytest.raises(StateError, match="what the data have grown by is damaged in this state"):
        order.adopt({"grow": eras})
    assert (growth.eras, calls) == ([(0, 9)], [])
