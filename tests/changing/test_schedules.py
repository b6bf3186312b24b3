"""Ramps and skipped ranges, by value: compared with lists of every sample."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Ramp
from penstock._changing.skipping import Skips


def test_a_ramp_knows_the_stage_of_each_sample():
    """Seen to fail: with the stage before, and with the end of the last one."""
    ramp = Ramp([(0, 1), (3, 64), (4, np.int64(2))])
    assert [ramp.at(sample) for sample in (0, 2, 3, 4, 10**12)] == [
        (0, 1, 3),
        (0, 1, 3),
        (3, 64, 4),
        (4, 2, None),
        (4, 2, None),
    ]
    assert ramp.details() == {"stages": [(0, 1), (3, 64), (4, 2)]}


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ([], r"^the batch sizes start at the samples \[\]\. The first must start at 0"),
        ([(1, 2)], r"the samples \[1\]"),
        ([(0, 2), (5, 3), (5, 4)], r"the samples \[0, 5, 5\]"),
        ([(-1, 2)], "^start=-1 must be a whole number of at least 0"),
        ([(0, 0)], "^batch_size=0 must be a whole number of at least 1"),
    ],
)
def test_a_ramp_that_makes_no_sense_is_refused(stages, why):
    with pytest.raises(ValueError, match=why):
        Ramp(stages)


@given(ends=st.sets(st.integers(0, 40), max_size=8), touching=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ranges_are_those_of_a_list_of_every_sample(ends, touching):
    """Also of ranges that touch. Seen to fail: `bisect_left`, and without what is gone before a range."""
    ends = sorted(ends)
    ranges = [*pairwise(ends)] if touching else [*zip(ends[::2], ends[1::2], strict=False)]
    skips = Skips(reversed(ranges))
    gone = {sample for begin, end in ranges for sample in range(begin, end)}
    stay = [sample for sample in range(60) if sample not in gone]
    assert skips.ranges == [[*pair] for pair in ranges]
    assert skips.at(np.arange(len(stay))).tolist() == stay
    assert [int(skips.at(number)) for number in range(len(stay))] == stay
    for sample in range(45):
        assert skips.kept(sample) == sum(one < sample for one in stay)
        assert skips.begun(sample) == [[begin, end] for begin, end in ranges if begin < sample]
        assert [skips.touch(sample, end) for end in range(sample + 1, 45)] == [
            not gone.isdisjoint(range(sample, end)) for end in range(sample + 1, 45)
        ]


def test_no_ranges_pass_over_nothing():
    assert (Skips().ranges, Skips().kept(7), int(Skips().at(7)), Skips().touch(0, 9)) == ([], 7, 7, False)


@pytest.mark.parametrize(
    ("ranges", "why"),
    [
        ([(3, 3)], r"^skip=\[3, 3\]: a range is"),
        ([(3, 2)], r"^skip=\[3, 2\]"),
        ([(3,)], r"^skip=\[3\]"),
        ([(1, 2, 3)], r"^skip=\[1, 2, 3\]"),
        ([(-1, 2)], "^skip=-1 must be a whole number of at least 0"),
        ([(4, 6), (0, 5)], r"^the ranges \[0, 5\] and \[4, 6\] of skip overlap\. Join them into \[0, 6\]\.$"),
        ([(4, 6), (1, 9)], r"Join them into \[1, 9\]\.$"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(ranges, why):
    with pytest.raises(ValueError, match=why):
        Skips(ranges)
