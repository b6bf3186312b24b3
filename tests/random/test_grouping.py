"""Packs and Buckets: what they are told is checked when they are built, and what they plan depends on the lengths and
the indices only."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from penstock import Buckets, Packs

INDICES = np.array([3, 0, 2, 2, 1])
LENGTHS = [4, 9, 2, 5]


def plan(groups, indices=INDICES):
    planned = groups.plan(indices)
    return [part.tolist() for part in np.split(planned.members, planned.splits[1:-1])]


@pytest.mark.parametrize(
    "lengths",
    [
        LENGTHS,
        np.array(LENGTHS, np.int32),
        np.array(LENGTHS, np.uint16),
        torch.tensor(LENGTHS),
        np.array(LENGTHS, ">i8"),
        np.array(LENGTHS, float),
    ],
)
def test_lengths_may_be_any_kind_of_whole_numbers(lengths):
    packs = Packs(lengths, 10)
    assert packs.settings() == Packs(LENGTHS, 10).settings()
    assert plan(packs) == plan(Packs(LENGTHS, 10)) == [[0, 1], [2, 3], [4]]


def test_lengths_may_be_seconds():
    buckets = Buckets([0.5, 0.25, 3.0], 3.5)
    assert sorted(plan(buckets, np.arange(3))) == [[1, 0], [2]]
    assert buckets.settings()["lengths"] != Buckets([0.5, 0.25, 3.1], 3.5).settings()["lengths"]


@pytest.mark.parametrize("kind", [Packs, Buckets])
@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([3, -1, 2], r"lengths\[1\] is -1, but a length must be a .*number from 0"),
        ([3, 2, float("nan")], r"lengths\[2\] is nan"),
        ([float("inf"), 2], r"lengths\[0\] is inf"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
        (["3", "4"], r"dtype <U1"),
        ([True, False], "dtype bool"),
        (5, r"shape \(\)"),
        ([2**62], r"lengths\[0\] is 4611686018427387904"),
    ],
)
def test_lengths_that_are_none_are_refused(kind, lengths, said):
    with pytest.raises(ValueError, match=said):
        kind(lengths, 100)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Packs([1, 2.5], 4), r"lengths\[1\] is 2.5, but a length must be a whole number"),
        (lambda: Packs(LENGTHS, 0), r"capacity=0 must be a whole number of at least 1"),
        (lambda: Packs(LENGTHS, 4.0), "capacity=4.0, a float, must be a whole number"),
        (lambda: Packs(LENGTHS, 9, block=0), "block=0"),
        (lambda: Packs(LENGTHS, 9, oversize="clip"), r"oversize='clip' must be 'split', 'truncate' or 'error'"),
        (lambda: Packs(LENGTHS, 8, oversize="error"), r"item 1 has length 9, but the capacity is 8"),
        (lambda: Buckets(LENGTHS, 8), r"lengths\[1\] is 9, but a batch is limited to max_padded_size=8"),
        (lambda: Buckets(LENGTHS, 0), "max_padded_size=0 must be a number above 0"),
        (lambda: Buckets(LENGTHS, float("nan")), "max_padded_size=nan must be"),
        (lambda: Buckets(LENGTHS, True), "max_padded_size=True must be"),
        (lambda: Buckets(LENGTHS, "9"), "max_padded_size='9' must be"),
        (lambda: Buckets(LENGTHS, 9, max_samples=0), "max_samples=0"),
        (lambda: Buckets(LENGTHS, max_tokens=8), r"lengths\[1\] is 9, but a batch is limited to max_tokens=8"),
        (lambda: Buckets(LENGTHS, max_tokens=0), "max_tokens=0 must be a number above 0: the sum of the lengths"),
        (lambda: Buckets(LENGTHS), "Buckets needs exactly one of max_padded_size, max_tokens and keys, .*but got none"),
        (lambda: Buckets(LENGTHS, 9, max_tokens=9), "but got max_padded_size and max_tokens"),
        (
            lambda: Buckets(max_tokens=9),
            "max_tokens limits lengths, but there are none. Pass the length of each sample as lengths",
        ),
        (lambda: Buckets(LENGTHS, 9, same_size_run=0), "same_size_run=0"),
        (lambda: Buckets(LENGTHS, 9, block=4, same_size_run=5), "same_size_run=5 must be a whole number below 5"),
    ],
)
def test_other_arguments_are_refused_too(build, said):
    with pytest.raises(ValueError, match=said):
        build()


def test_buckets_are_shuffled_by_their_indices():
    """Seen red with words of a constant key: every block then has its batches in the same order."""
    lengths = np.arange(1, 201)
    buckets = Buckets(lengths, 400)
    firsts = {
        tuple(lengths[indices][group[0]] for group in plan(buckets, indices))
        for indices in (np.arange(200), np.arange(200)[::-1].copy())
    }
    assert len(firsts) == 2
    assert plan(buckets, np.arange(200)) == plan(buckets, np.arange(200))


@pytest.mark.parametrize("groups", [Packs(LENGTHS, 10), Buckets(LENGTHS, 20.0, max_samples=3, same_size_run=2)])
def test_a_copy_plans_the_same(groups):
    for other in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert plan(other) == plan(groups)
        assert other.settings() == groups.settings()


def test_are_frozen():
    """A release that changes one of these changes every user's groups: never edit them."""
    lengths = np.arange(1, 41) ** 2 % 37 + 1
    indices = np.arange(40)[::-1].copy()
    assert plan(Packs(lengths, 50), indices)[:5] == FROZEN_PACKS
    assert plan(Buckets(lengths, 100, same_size_run=2), indices)[:5] == FROZEN_BUCKETS
    also = {"a": (np.arange(40) % 4, 6), "b": (np.arange(40) % 3 * (lengths < 20), 3)}
    assert plan(Packs(lengths, 50, also=also), indices)[:5] == FROZEN_WITHIN_BUDGETS
    assert Packs(lengths, 50, also=also).settings()["also"] == [
        ["a", 6, "47059a4968d2b9ab"],
        ["b", 3, "a31c96cedb9f29b3"],
    ]
    assert Packs(lengths, 50).settings() == {
        "groups": "packs",
        "capacity": 50,
        "oversize": "split",
        "block": 1024,
        "lengths": "5f4e1c7724b65dbd",
    }


FROZEN_PACKS = [[0, 3, 6, 21], [1, 14, 15], [2, 7, 20], [4, 23, 36], [5, 28, 29]]
FROZEN_WITHIN_BUDGETS = [[0, 19], [1, 14, 28], [2, 3, 4, 9, 39], [5, 10, 20], [6, 30, 33]]
FROZEN_BUCKETS = [[10, 33, 7, 36], [16, 27, 8], [19, 24], [9, 34], [35, 13, 30]]


@pytest.mark.parametrize(
    ("make", "settings", "details", "per_item"),
    [
        (
            lambda: Packs([3, 0, 12], 5),
            {"groups": "packs", "capacity": 5, "oversize": "split", "block": 1024, "lengths": "7890c7f9aa062c6a"},
            {"lengths": 3, "capacity": 5, "oversize": "split"},
            3,
        ),
        (
            lambda: Packs([3, 0, 12], 5, oversize="truncate", block=2**24),
            {"groups": "packs", "capacity": 5, "oversize": "truncate", "block": 2**24, "lengths": "7890c7f9aa062c6a"},
            {"lengths": 3, "capacity": 5, "oversize": "truncate"},
            1,
        ),
        (
            lambda: Buckets([3, 0, 12], 12),
            {
                "groups": "buckets",
                "budget": 12.0,
                "most": None,
                "alike": 1,
                "block": 8192,
                "lengths": "7890c7f9aa062c6a",
            },
            {"lengths": 3, "max_padded_size": 12.0, "max_samples": None},
            1,
        ),
        (
            lambda: Buckets([0.5], 0.5, max_samples=1, block=1),
            {"groups": "buckets", "budget": 0.5, "most": 1, "alike": 1, "block": 1, "lengths": "8037ae1b14e13ccf"},
            {"lengths": 1, "max_padded_size": 0.5, "max_samples": 1},
            1,
        ),
        (
            lambda: Buckets([3, 0, 12], max_tokens=12, drop_last=True),
            {
                "groups": "buckets",
                "max_tokens": 12.0,
                "most": None,
                "alike": 1,
                "block": 8192,
                "full": True,
                "lengths": "7890c7f9aa062c6a",
            },
            {"lengths": 3, "max_tokens": 12.0, "max_samples": None},
            1,
        ),
    ],
)
def test_each_says_what_it_is_in_a_state(make, settings, details, per_item):
    """Never edit these either. Seen to fail: each of the names and of the defaults."""
    groups = make()
    assert (groups.settings(), groups.details(), groups.groups_per_item) == (settings, details, per_item)
    assert groups.count is False


def test_nothing_and_the_bounds_are_allowed():
    assert (Packs([], 1).groups_per_item, Packs([0], 1, block=1).block, len(Buckets([], 0.5).lengths)) == (1, 1, 0)
    assert (Packs([], 1).pad, Packs([], 1, pad=2, count=True).pad, Packs([], 1, pad=2, count=True).count) == (
        0,
        2,
        True,
    )
    assert Buckets([], 1, block=2**24, count=True).count is True
    for kind in (Packs, Buckets):
        with pytest.raises(ValueError, match="^block=16777217 must be a whole number below 16777217"):
            kind([], 1, block=2**24 + 1)
        with pytest.raises(ValueError, match=r"^lengths\[0\] is 281474976710656"):
            kind([2**48], 2**50)
    assert Buckets({"b": [1], "a": [2, 3]}, 9).lengths.tolist() == [2, 3, 1]
    with pytest.raises(ValueError, match="max_padded_size=4611686018427387904 must be"):
        Buckets([], 2**62)
