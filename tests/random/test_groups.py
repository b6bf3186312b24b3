"""Packs and buckets of a block: every item once, no group too large, little waste, and similar batches for all
ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Buckets
from penstock._random.buckets import bucketed
from penstock._random.groups import companions, packed, packed_within, pieces_of
from penstock._random.permutation import philox_words

LENGTHS = st.lists(st.integers(0, 60), max_size=80).map(lambda lengths: np.array(lengths, np.int64))


def documents(n, seed=0):
    """Lognormal lengths, of a mean of 645 tokens."""
    return np.maximum(1, np.random.default_rng(seed).lognormal(5.8, 1.16, n)).astype(np.int64)


def words(n=1000, seed=1):
    return philox_words(seed, 0, 9, n)


def lists(groups):
    return [part.tolist() for part in np.split(groups.members, groups.splits[1:-1])] if len(groups) else []


class TestPacks:
    @given(lengths=LENGTHS, capacity=st.integers(60, 100))
    @settings(max_examples=100, deadline=None)
    def test_hold_every_item_once_and_never_too_much(self, lengths, capacity):
        """Seen red with `bisect_left(rooms, (length - 1, -1))`: a group then takes one too many."""
        groups = lists(packed(lengths, capacity))
        assert sorted(item for group in groups for item in group) == list(range(len(lengths)))
        assert all(len(group) > 0 for group in groups)
        assert all(lengths[group].sum() <= capacity for group in groups)

    @given(lengths=LENGTHS, capacity=st.integers(60, 100))
    @settings(max_examples=50, deadline=None)
    def test_leave_no_two_groups_that_would_go_into_one(self, lengths, capacity):
        """Seen red with a search that takes the first group of all instead of the first with room."""
        totals = sorted(int(lengths[group].sum()) for group in lists(packed(lengths, capacity)))
        assert len(totals) < 2 or totals[0] + totals[1] > capacity

    def test_follow_the_order_of_the_block(self):
        groups = lists(packed(documents(500) % 4096, 4096))
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)
        assert all(group == sorted(group) for group in groups)

    def test_fill_a_block_of_1024_by_99_per_cent(self):
        filled = []
        for seed in range(5):
            pieces = pieces_of(documents(1024, seed), 4096, "split")
            groups = packed(pieces.lengths, 4096)
            filled.append(pieces.lengths.sum() / (4096 * (len(groups.splits) - 1)))
        assert np.mean(filled) > 0.99

    def test_are_those_that_one_would_write(self):
        assert lists(packed(np.array([5, 7, 3, 4, 6, 5]), 10)) == [[0, 5], [1, 2], [3, 4]]
        assert lists(packed(np.array([], np.int64), 10)) == []


class TestPacksWithinSeveralBudgets:
    @given(data=st.data(), n=st.integers(0, 60), limits=st.lists(st.integers(1, 30), min_size=2, max_size=4))
    @settings(max_examples=100, deadline=None)
    def test_hold_every_item_once_never_too_much_and_no_two_would_go_into_one(self, data, n, limits):
        """Seen to fail: with what is left compared for the first budget only; a group that is left while something
        fits."""
        rows = data.draw(
            st.lists(st.tuples(*(st.integers(0, limit) for limit in limits)), min_size=n, max_size=n), label="takes"
        )
        takes = np.array(rows, np.int64).reshape(n, len(limits))
        groups = lists(packed_within(takes, np.array(limits)))
        assert sorted(item for group in groups for item in group) == list(range(n))
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)
        totals = [takes[group].sum(0) for group in groups]
        assert all((total <= limits).all() for total in totals)
        assert not any((one + other <= limits).all() for at, one in enumerate(totals) for other in totals[:at])

    @pytest.mark.parametrize(("most", "least"), [(16, 0.99), (10, 0.86), (4, 0.96)])
    def test_fill_a_block_of_1024_well(self, most, least):
        """With up to 3 pictures in a document: a limit that rarely matters, one as scarce as the tokens, and one that
        is all that matters. Seen to fail: with the longest that fits."""
        rng = np.random.default_rng(0)
        takes = np.stack([documents(1024) % 4096, rng.integers(0, 4, 1024)], 1)
        limits = np.array([4096, most])
        assert (takes.sum(0) / limits).max() / len(packed_within(takes, limits)) > least


def padded(lengths, groups):
    return np.array([lengths[group].max() * len(group) for group in groups])


class TestBuckets:
    @given(
        lengths=st.lists(st.integers(1, 50), max_size=120).map(lambda lengths: np.array(lengths, np.int64)),
        budget=st.integers(50, 300),
        most=st.integers(1, 20),
        alike=st.integers(1, 9),
    )
    @settings(max_examples=150, deadline=None)
    def test_hold_every_item_once_within_the_budget(self, lengths, budget, most, alike):
        """And in whole runs, wherever there are items enough. Seen red without the cutting anew."""
        groups = lists(bucketed(lengths, budget, most, alike, words()))
        assert sorted(item for group in groups for item in group) == list(range(len(lengths)))
        assert all(0 < len(group) <= most for group in groups)
        assert (padded(lengths, groups) <= budget).all()
        assert len(groups) % alike == 0 or -(-len(groups) // alike) * alike > len(lengths)

    @pytest.mark.parametrize(
        ("n", "most", "batches"), [(5, 1, 5), (8, 1, 8), (9, 8, 4), (3, 8, 1), (17, 4, 8), (4, 4, 4), (9, 2, 8)]
    )
    def test_are_whole_runs_if_there_are_items_enough(self, n, most, batches):
        groups = lists(bucketed(np.ones(n, np.int64), 100, most, 4, words()))
        assert len(groups) == batches
        assert min(map(len, groups)) > 0

    def test_of_nothing_are_none(self):
        assert lists(bucketed(np.array([], np.int64), 30, 8, 4, words())) == []

    @given(
        lengths=st.lists(st.integers(0, 50), max_size=120).map(lambda lengths: np.array(lengths, np.int64)),
        limit=st.integers(50, 300),
        most=st.integers(1, 20),
        alike=st.sampled_from([1, 1, 3, 9]),
    )
    @settings(max_examples=150, deadline=None)
    def test_may_limit_the_sum(self, lengths, limit, most, alike):
        """Seen to fail: with the padded size."""
        groups = lists(
            Buckets(lengths, max_tokens=limit, max_samples=most, same_size_run=alike, block=999).plan(
                np.arange(len(lengths))
            )
        )
        assert sorted(item for group in groups for item in group) == list(range(len(lengths)))
        sums = [sum(lengths[group]) for group in groups]
        assert all(total <= limit and 0 < len(group) <= most for total, group in zip(sums, groups, strict=True))
        if alike == 1:  # each takes as many as fit, from the shortest on
            assert len(groups) == len(by_hand(lengths, limit, most))

    @given(
        lengths=st.lists(st.integers(1, 50), max_size=120).map(lambda lengths: np.array(lengths, np.int64)),
        limit=st.sampled_from(["max_tokens", "max_padded_size"]),
        most=st.sampled_from([None, 3, 8]),
        alike=st.integers(1, 4),
    )
    @settings(max_examples=150, deadline=None)
    def test_that_are_full_leave_out_the_rest(self, lengths, limit, most, alike):
        """The end of the block in the order, whatever its lengths; with one sample more of it another batch would
        begin. Seen to fail: with the longest left out."""
        words = {limit: 90, "max_samples": most, "same_size_run": alike, "block": 999}
        buckets = Buckets(lengths, drop_last=True, **words)
        groups = lists(buckets.plan(np.arange(len(lengths))))
        kept = sum(map(len, groups))
        assert sorted(item for group in groups for item in group) == list(range(kept))
        every = by_hand(lengths, 90, most or 999, padded=limit == "max_padded_size")
        assert len(groups) % alike == 0
        assert (
            all(padded(lengths, groups) <= 90)
            if limit == "max_padded_size"
            else all(sum(lengths[group]) <= 90 for group in groups)
        )
        assert len(every) - 1 - alike < len(groups) <= len(every)
        if kept < len(lengths):
            assert len(by_hand(lengths[: kept + 1], 90, most or 999, padded=limit == "max_padded_size")) > len(groups)
        else:  # one more of the longest would not have fitted
            assert not len(lengths) or len(
                by_hand([*lengths, max(lengths)], 90, most or 999, padded=limit == "max_padded_size")
            ) > len(groups)
        assert buckets.settings()["full"] is True
        assert "full" not in Buckets(lengths, **words).settings()


def by_hand(lengths, limit, most, *, padded=False):
    """Batches from the shortest sample on."""
    batches = [[]]
    for length in sorted(lengths):
        batch = [*batches[-1], length]
        if len(batch) > most or (length * len(batch) if padded else sum(batch)) > limit:
            batches.append([])
        batches[-1].append(length)
    return [batch for batch in batches if batch]


@pytest.mark.parametrize(
    ("lengths", "oversize", "items", "starts", "pieces"),
    [
        ([3, 0, 10, 4, 9], "split", [0, 2, 2, 2, 3, 4, 4, 4], [0, 0, 4, 8, 0, 0, 4, 8], [3, 4, 4, 2, 4, 4, 4, 1]),
        ([3, 0, 10, 1, 9], "truncate", [0, 2, 3, 4], [0, 0, 0, 0], [3, 4, 1, 4]),
        ([3, 0, 4, 1], "error", [0, 2, 3], [0, 0, 0], [3, 4, 1]),
        ([], "split", [], [], []),
        ([], "error", [], [], []),
        ([0], "truncate", [], [], []),
    ],
)
def test_pieces_are_those_that_one_would_cut(lengths, oversize, items, starts, pieces):
    """Seen to fail: an empty item with a piece, and one of exactly the capacity refused."""
    found = pieces_of(np.array(lengths, np.int64), 4, oversize)
    assert [part.tolist() for part in found] == [items, starts, pieces]
    assert all(part.dtype == np.int64 for part in found)


def test_an_item_that_is_too_long_is_named():
    with pytest.raises(
        ValueError,
        match=(
            "^item 1 has length 5, but the capacity is 4. Raise the capacity, or use oversize='split' or 'truncate'.$"
        ),
    ):
        pieces_of(np.array([3, 5, 4]), 4, "error")


def test_packs_within_budgets_are_those_of_a_loop():
    """The rule in plain loops. Seen to fail: with a sort that is not stable, and with another power of what is left."""
    rng = np.random.default_rng(1)
    for n, limits in ((0, [3, 3]), (1, [3, 3]), (60, [9, 7]), (200, [64, 3, 5])):
        takes = np.stack([rng.integers(0, limit + 1, n) for limit in limits], 1)
        takes[n // 2 :] = takes[: n - n // 2]  # many alike
        found = lists(packed_within(takes, np.array(limits)))
        scarcity = [sum(column) / limit for column, limit in zip(takes.T.tolist(), limits, strict=True)]
        cost = [
            -sum(one / limit * scarce for one, limit, scarce in zip(row, limits, scarcity, strict=True))
            for row in takes.tolist()
        ]
        rest, expected = sorted(range(n), key=lambda item: (cost[item], item)), []
        while rest:
            group = [rest[member] for member in companions(takes[rest], np.array(limits), 0)]
            scarce = takes[rest].sum(0) / np.array(limits)
            by_hand, space = [rest[0]], np.array(limits) - takes[rest[0]]
            while fitting := [item for item in rest if item not in by_hand and (takes[item] <= space).all()]:
                left = [float(sum(((space - takes[item]) / np.array(limits)) ** 2 * scarce)) for item in fitting]
                by_hand.append(fitting[left.index(min(left))])
                space = space - takes[by_hand[-1]]
            assert group == by_hand
            expected.append(sorted(group))
            rest = [item for item in rest if item not in group]
        assert found == sorted(expected)


OF_WHOLE = "77ba1ae68d5afbb4"
OF_HALVES = "9dcc9e2865cbcb00"
WORDS = [
    (
        {"max_padded_size": 9, "batch_size": 2},
        "^batch_size and max_padded_size exclude each other. Leave it out, or pass keys",
    ),
    (
        {"max_padded_size": 9, "batch_size": 2, "short": "pad"},
        "^batch_size and short and max_padded_size exclude each other. Leave them out, or pass keys",
    ),
    (
        {"keys": "ab", "lengths": None, "count": True},
        (
            "^count and keys exclude each other. Leave it out: short says what happens to samples that fill no round, "
            "and an epoch of one block has a length.$"
        ),
    ),
    (
        {"keys": "ab", "lengths": None, "block": 2**40},
        "^block=1099511627776 must be a whole number below 1099511627776",
    ),
    ({"max_tokens": 9, "block": 2**24 + 1}, "^block=16777217 must be a whole number below 16777217"),
    ({"max_tokens": 0}, "^max_tokens=0 must be a number above 0: the sum of the lengths in a batch.$"),
    (
        {"max_padded_size": 2**62},
        (
            "^max_padded_size=4611686018427387904 must be a number above 0: the longest length in a batch times its "
            "number of samples.$"
        ),
    ),
    ({"max_padded_size": True}, "^max_padded_size=True must be"),
    ({"max_tokens": "9"}, "^max_tokens='9' must be"),
    (
        {"max_tokens": 2},
        r"^lengths\[2\] is 3, but a batch is limited to max_tokens=2. Raise the limit, or drop that sample.$",
    ),
    (
        {"max_tokens": 9, "lengths": None},
        "^max_tokens limits lengths, but there are none. Pass the length of each sample as lengths.$",
    ),
    ({"max_tokens": 9, "max_samples": 0}, "^max_samples=0"),
    ({"max_tokens": 9, "same_size_run": 8193}, "^same_size_run=8193 must be a whole number below 8193"),
    (
        {"max_tokens": 9, "lengths": {"a": [1], "b": [-1]}},
        r"^lengths\['b'\]\[0\] is -1, but a length must be a number from 0",
    ),
    ({}, "^Buckets needs exactly one of .*, but got none.$"),
]


@pytest.mark.parametrize(("words", "why"), WORDS)
def test_buckets_that_make_no_sense_are_refused_in_these_words(words, why):
    with pytest.raises(ValueError, match=why):
        Buckets(**{"lengths": [1, 2, 3], **words})


def test_what_a_state_and_a_graph_say_of_buckets():
    """Never edit what is in a state. Seen to fail: each word changed."""
    padded, tokens = (
        Buckets([1, 2, 3], 9),
        Buckets([0.5, 2, 3], max_tokens=9, max_samples=4, same_size_run=2, drop_last=True, block=8),
    )
    assert padded.settings() == {
        "groups": "buckets",
        "budget": 9.0,
        "most": None,
        "alike": 1,
        "block": 8192,
        "lengths": OF_WHOLE,
    }
    assert tokens.settings() == {
        "groups": "buckets",
        "max_tokens": 9.0,
        "most": 4,
        "alike": 2,
        "block": 8,
        "full": True,
        "lengths": OF_HALVES,
    }
    assert padded.details() == {"lengths": 3, "max_padded_size": 9.0, "max_samples": None}
    assert tokens.details() == {"lengths": 3, "max_tokens": 9.0, "max_samples": 4}
    assert (padded.count, padded.drop_last, padded.groups_per_item, padded.sources) == (False, False, 1, None)
    assert Buckets({"a": [1.5], "b": [2, 3]}, 9).sources == {"a": 1, "b": 2}
    assert Buckets(keys="ab").block == 2**22
    assert Buckets(keys="ab", block=2**40 - 1).keys.sizes.tolist() == [1, 1]
    assert Buckets([1], 9, block=2**24, same_size_run=2**24).same_size_run == 2**24
    assert Buckets([3], max_tokens=3).settings()["max_tokens"] == Buckets([3], 3).settings()["budget"] == 3.0


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(
    ("n", "alike", "most", "budget"),
    [(40, 1, 7, 90), (61, 4, 9, 120), (30, 8, 30, 500), (17, 8, 3, 60), (5, 8, 3, 60), (64, 3, 64, 64)],
)
def test_buckets_are_cut_by_hand(n, alike, most, budget, summed):
    """The rest that fills no run is cut again as evenly as possible. Seen to fail: cut from elsewhere; shuffled by
    another sort; less even."""
    lengths = np.random.default_rng(n).integers(1, 25, n)
    groups = lists(bucketed(lengths, budget, most, alike, words(), summed))
    by_length = sorted(range(n), key=lambda item: (lengths[item], item))

    def cut(begin, limit):
        ends = []
        for end in range(begin, n):
            size = sum(lengths[by_length[begin : end + 1]]) if summed else lengths[by_length[end]] * (end + 1 - begin)
            if end > begin and (size > limit or end + 1 - begin > most):
                ends.append(end)
                begin = end
        return [*ends, n] if begin < n else ends

    ends = cut(0, budget)
    whole = -(-len(ends) // alike) * alike
    if len(ends) < whole <= n:
        for kept in range(whole - alike, -1, -alike):
            begin = ends[kept - 1] if kept else 0
            if n - begin >= whole - kept:
                break
        limit = next(size for size in range(1, 10**4) if len(cut(begin, size)) <= whole - kept)
        rest = cut(begin, limit)
        while len(rest) < whole - kept:
            sizes = np.diff([begin, *rest])
            largest = int(sizes.argmax())
            rest.insert(largest, [begin, *rest][largest] + int(sizes[largest]) // 2)
        ends = ends[:kept] + rest
    batches = [by_length[begin:end] for begin, end in pairwise([0, *ends])]
    runs = [batches[begin : begin + alike] for begin in range(0, len(batches), alike)]
    order = np.argsort(words()[: len(runs)], kind="stable").tolist()
    assert groups == [batch for run in order for batch in runs[run]]


def test_what_is_left_counts_by_its_square():
    """Of (8, 1) and (6, 6), the first is less. Seen to fail: by its cube."""
    takes = np.array([[1, 1], [1, 8], [3, 3], [10, 3]])
    assert companions(takes, np.array([10, 10]), 0) == [0, 1]
    assert companions(takes, np.array([10, 10]), 2) == [2, 0]
