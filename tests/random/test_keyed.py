"""Keys, and the rounds of a block by key: they are those of a plain walk along the order, and what cannot be right is
refused when it is told."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from key_model import KeyModel

from penstock import Buckets
from penstock._random.keyed import KeyBlock, Keys

SIZES = [(512, 512), (512, 768), (512, 512), (768, 512)]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), short=st.sampled_from(["carry", "pad", "drop"]))
def test_rounds_are_those_of_a_walk_along_the_order(data, short):
    """On any chain of numbers of ranks. Seen to fail: with rounds in the order of their first samples; without the
    rounds that others took."""
    keys = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=50))
    order = data.draw(st.permutations(range(len(keys))))
    sizes = {key: data.draw(st.integers(1, 4)) for key in sorted(set(keys))}
    described, model = Keys(keys, sizes, short), KeyModel(order, keys, sizes, short)
    block, past = KeyBlock(described, np.array(order)), []
    for ranks, steps in data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=4)):
        if past and past[-1][0] == ranks:
            continue
        rounds, expected = block.rounds(past, ranks), model.rounds(ranks)
        assert [described.names[key] for key in rounds.keys] == [key for key, _ in expected]
        dealt = sum(len(offsets) for _, offsets in expected)
        assert rounds.left_out.sum() == len(keys) - len(model.done) - dealt
        hands = [model.hands(key, offsets, ranks) for key, offsets in expected]
        assert rounds.repeated.sum() == sum(len(hand) for one in hands for hand in one) - dealt
        for number, (_, offsets) in enumerate(expected[:steps]):
            for rank in range(ranks):
                found, before = block.hand(rounds, number, rank, ranks, None)
                assert (
                    list(zip(found.tolist(), np.broadcast_to(before, found.shape).tolist(), strict=True))
                    == hands[number][rank]
                )
            model.done.update(offsets)
        if taken := min(steps, len(expected)):
            past = [*past, [ranks, taken]]
    assert block.rounds([[1, 51]], 1) is None, "more rounds than there are samples"


@pytest.mark.parametrize(
    "keys",
    [
        SIZES,
        np.array(SIZES, np.int32),
        torch.tensor(SIZES),
        ["a", "b", "a", "c"],
        np.array(["a", "b", "a", "c"]),
        np.array(["a", "b", "a", "c"], object),
        [1.5, 0, 1.5, -1],
        np.array([3, 1, 3, 0], np.uint8),
        (None, "x", None, 3),
        np.array([b"q", b"p", b"q", b"r"]),
    ],
)
def test_keys_may_be_anything_hashable(keys):
    """The same partition is the same plan, and the same state."""
    buckets = Buckets(keys=keys)
    assert buckets.keys.codes.tolist() == [0, 1, 0, 2]
    assert buckets.settings() == Buckets(keys=list("xyxz")).settings()
    assert len(buckets.keys) == 4
    for other in (copy.deepcopy(buckets), pickle.loads(pickle.dumps(buckets))):
        assert (other.keys.names, other.settings()) == (buckets.keys.names, buckets.settings())


def test_the_names_of_keys_are_plain():
    assert Buckets(keys=np.array(SIZES)).keys.names == [(512, 512), (512, 768), (768, 512)]
    assert Buckets(keys=np.array(["b", "a"])).keys.names == ["b", "a"]


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        ({"batch_size": {"a": 2}}, ValueError, r"without one: 'b', 'c'; no key: none\. Correct"),
        ({"batch_size": {"a": 2, "b": 1, "c": 1, "d": 4}}, ValueError, "without one: none; no key: 'd'"),
        ({"batch_size": {"a": 2, "x": 4}}, ValueError, "without one: 'b', 'c'; no key: 'x'"),
        (
            {"batch_size": {"a": 2, "b": 0, "c": 1}},
            ValueError,
            r"batch_size\['b'\]=0 must be a whole number of at least 1",
        ),
        ({"batch_size": 0}, ValueError, "batch_size=0 must be"),
        ({"batch_size": 1.0}, ValueError, "batch_size=1.0, a float, must be"),
        ({"short": "carry on"}, ValueError, "short='carry on' must be 'carry', 'pad' or 'drop'"),
        ({"block": 0}, ValueError, "block=0"),
        ({"lengths": [1, 2, 3]}, ValueError, "^lengths and keys exclude each other. Leave it out"),
        ({"max_samples": 3}, ValueError, "^max_samples and keys exclude"),
        (
            {"same_size_run": 2, "drop_last": True, "count": True},
            ValueError,
            "^same_size_run and drop_last and count and keys exclude",
        ),
        ({"max_tokens": 3}, ValueError, "exactly one of .*, but got max_tokens and keys"),
        ({"max_padded_size": 3, "max_tokens": 3}, ValueError, "but got max_padded_size and max_tokens and keys"),
        ({"keys": None}, ValueError, "exactly one of .*, but got none"),
        (
            {"keys": [[1, 2], [3, 4]]},
            TypeError,
            "one hashable value for each sample, such as .*unhashable type: 'list'",
        ),
        ({"keys": 7}, TypeError, "not iterable"),
        ({"keys": np.zeros((2, 2))}, ValueError, r"shape \(2, 2\) and dtype float64"),
        ({"keys": np.zeros((2, 2, 2), int)}, ValueError, r"shape \(2, 2, 2\)"),
        ({"keys": [1.0, float("nan")]}, ValueError, "nan is no key"),
        ({"keys": np.array([1.0, np.nan])}, ValueError, "nan is no key"),
        ({"keys": list(torch.tensor([1, 1]))}, ValueError, r"tensor\(1\) is no key"),
    ],
)
def test_what_is_no_key_or_no_batch_size_is_refused(words, kind, told):
    with pytest.raises(kind, match=told):
        Buckets(**{"keys": ["a", "b", "a", "c"], **words})


@pytest.mark.parametrize("name", ["batch_size", "short"])
def test_words_for_keys_need_keys(name):
    with pytest.raises(ValueError, match=f"^{name} and max_padded_size exclude each other. Leave it out, or pass keys"):
        Buckets([1], 2, **{name: 1})


def test_is_frozen():
    """A release that changes these changes what states load: never edit them."""
    assert Buckets(keys="abca", batch_size=3).settings() == {
        "groups": "keys",
        "keys": "3decc6e651aece59",
        "batch_size": 3,
        "short": "carry",
        "block": 2**22,
    }
    other = Buckets(keys="abca", batch_size={"a": 2, "b": 1, "c": 1}, short="pad", block=8)
    assert other.settings() | {"keys": 0} == {
        "groups": "keys",
        "keys": 0,
        "batch_size": "a3147c0ebe39356f",
        "short": "pad",
        "block": 8,
    }
    assert other.details() == {"keys": 3, "batch_size": "a3147c0ebe39356f", "short": "pad"}


@pytest.mark.parametrize("size", [2**31 - 1, {"a": 2**31 - 1}])
def test_the_largest_batch(size):
    """Seen to fail: one more, and one less."""
    assert Keys("a", size, "drop").sizes.tolist() == [2**31 - 1]
    assert Keys("a", size, "pad").sizes.dtype == np.int64
    more = {"a": 2**31} if isinstance(size, dict) else 2**31
    with pytest.raises(ValueError, match=r"^batch_size(\['a'\])?=2147483648 must be a whole number below 2147483648"):
        Keys("a", more, "carry")


def test_keys_are_named_in_a_few_words():
    """First those that do not come at all. Seen to fail: in the order of the keys; the ninth named."""
    keys = Keys("abcd", 1, "carry")
    assert keys.named(np.array([1234, 0, 7, 1]), np.array([0, 3])) == "'c': 7 (all of them), 'a': 1,234, 'd': 1"
    assert keys.named(np.array([0, 0, 0, 0]), np.array([0])) == "none"
    many = Keys("abcdefghij", 1, "carry")
    eight = ", ".join(f"'{key}': 2" for key in "abcdefgh")
    assert many.named(np.array([2] * 8 + [0, 0]), np.arange(10)) == eight
    assert many.named(np.array([2] * 9 + [0]), np.arange(10)) == f"{eight} and 1 more"
    assert many.named(np.array([2] * 10), np.arange(10)) == f"{eight} and 2 more"


def test_codes_take_as_few_bytes_as_they_can():
    for n, kind in ((0, np.uint8), (1, np.uint8), (256, np.uint8), (257, np.uint16)):
        assert Keys(range(n), 1, "carry").codes.dtype == kind
    block = KeyBlock(Keys([5, 6, 5], 1, "carry"), np.array([2, 0, 1]))
    assert (block.indices.tolist(), block.indices.dtype) == ([2, 0, 1], np.int32)


def rounds_of(block, past, ranks):
    found = block.rounds(past, ranks)
    return (
        None
        if found is None
        else [fields.tolist() for fields in (found.keys, found.begins, found.ends, found.left_out, found.repeated)]
    )


BLOCK_KEYS = "aabaabbcaaab"  # a: 7, b: 4, c: 1


@pytest.mark.parametrize(
    ("short", "expected"),
    [
        ("carry", [[0, 1, 2, 0, 1], [0, 7, 11, 4, 9], [4, 9, 12, 7, 11], [0, 0, 0], [0, 0, 1]]),
        ("pad", [[0, 1, 2, 0, 1], [0, 7, 11, 4, 9], [4, 9, 12, 7, 11], [0, 0, 0], [1, 0, 5]]),
        ("drop", [[0, 1, 1], [0, 7, 9], [4, 9, 11], [3, 0, 1], [0, 0, 0]]),
    ],
)
def test_rounds_are_those_that_one_would_write(short, expected):
    """Two ranks: rounds of four of a, of two of b, of six of c. Seen to fail: each number one off."""
    block = KeyBlock(Keys(BLOCK_KEYS, {"a": 2, "b": 1, "c": 3}, short), np.arange(12))
    assert rounds_of(block, [], 2) == expected


def test_rounds_after_others_are_of_what_is_left():
    """Computed once. Seen to fail: the first ones again; more rounds than there were."""
    block, past = KeyBlock(Keys("aaaaaaaa", 1, "carry"), np.arange(8)), [[2, 1], [3, 1]]
    assert rounds_of(block, past, 1)[1:3] == [[5, 6, 7], [6, 7, 8]]
    kept = block.rounds(past, 1)
    assert kept is not None
    assert block.rounds([*past], 1) is kept
    assert rounds_of(block, [[2, 4]], 1)[:3] == [[], [], []]
    assert block.rounds([[2, 5]], 1) is None
    assert block.rounds([[2, 5]], 1) is None


def test_a_whole_round_is_dealt_by_a_function():
    """A smaller one, or one with repeats, is not. Seen to fail: given offsets and not indices."""
    block = KeyBlock(Keys("ababab", 1, "pad"), np.array([5, 4, 3, 2, 1, 0]))
    rounds, given = block.rounds([], 2), []

    def deal(indices):
        given.append(indices.tolist())
        return np.array([1])

    dealt = [block.hand(rounds, number, 0, 2, deal) for number in range(len(rounds))]
    assert given == [[5, 3], [4, 2]]  # b is at the odd indices, and comes first
    assert [(offsets.tolist(), np.max(before)) for offsets, before in dealt] == [([2], 0), ([3], 0), ([4], 0), ([5], 0)]
    plain = [
        [block.hand(rounds, number, rank, 2, None)[0].tolist() for rank in range(2)] for number in range(len(rounds))
    ]
    assert plain == [[[0], [2]], [[1], [3]], [[4], [0]], [[5], [1]]]


def test_what_comes_again_begins_with_the_first_of_its_key():
    """As often as needed. Seen to fail: with the first of the block, and without the number of times."""
    block = KeyBlock(Keys("bbaab", {"a": 3, "b": 1}, "pad"), np.arange(5))
    rounds = block.rounds([], 4)
    assert [(*map(np.ndarray.tolist, block.hand(rounds, 0, rank, 4, None)),) for rank in range(4)] == [
        ([2, 2, 2], [0, 2, 4]),
        ([3, 3, 3], [0, 2, 4]),
        ([2, 2, 2], [1, 3, 5]),
        ([3, 3, 3], [1, 3, 5]),
    ]


@pytest.mark.parametrize(
    ("n", "size", "ranks", "begins", "ends", "repeated"),
    [
        (9, 2, 4, [0, 4], [4, 9], 0),
        (12, 2, 4, [0, 8], [8, 12], 0),
        (11, 2, 4, [0, 5], [5, 11], 0),
        (5, 1, 4, [0, 4], [4, 5], 3),
        (17, 2, 4, [0, 8, 12], [8, 12, 17], 0),
        (3, 2, 4, [0], [3], 1),
    ],
)
def test_a_rest_of_less_than_a_sample_for_each_rank_is_shared(n, size, ranks, begins, ends, repeated):
    """With the round before, of the same key; not where a batch is one sample. Seen to fail: a rest of one for each; of
    another key."""
    block = KeyBlock(Keys("a" * n + "b" * n, size, "carry"), np.arange(2 * n))
    found = rounds_of(block, [], ranks)
    rounds = len(begins)
    assert found == [
        [0] * rounds + [1] * rounds,
        begins + [n + begin for begin in begins],
        ends + [n + end for end in ends],
        [0, 0],
        [repeated, repeated],
    ]


def test_a_batch_of_a_short_round_is_dealt_in_turn():
    """Or, if there is none for a rank, the key's first again. Seen to fail: with as many as in a whole round."""
    block = KeyBlock(Keys("aaab", {"a": 2, "b": 2}, "carry"), np.arange(4))
    rounds = block.rounds([], 2)
    hands = [[block.hand(rounds, number, rank, 2, None) for rank in range(2)] for number in range(2)]
    assert [[offsets.tolist() for offsets, _ in round_] for round_ in hands] == [[[0, 2], [1]], [[3], [3]]]
    assert [[np.max(before) for _, before in round_] for round_ in hands] == [[0, 0], [0, 1]]


def test_a_block_keeps_the_order_and_may_lack_keys():
    """Seen to fail: sorted by an algorithm that is not stable; without the keys that come last in the dataset."""
    keys = np.arange(3000) * 7 % 5
    block = KeyBlock(Keys(keys, 600, "drop"), np.arange(3000))
    rounds = block.rounds([], 1)
    dealt = [block.hand(rounds, number, 0, 1, None)[0] for number in range(5)]
    assert [offsets.dtype for offsets in (block.indices, *dealt)] == [np.int32] * 6
    assert sorted(offsets.tolist() for offsets in dealt) == [
        np.flatnonzero(keys == key).tolist() for key in dict.fromkeys(keys.tolist())
    ]
    assert rounds_of(KeyBlock(Keys("abc", 1, "carry"), np.array([0, 0])), [], 1) == [
        [0, 0],
        [0, 1],
        [1, 2],
        [0, 0, 0],
        [0, 0, 0],
    ]


def test_keys_by_source_are_those_of_the_mix():
    """Sources sorted by name, whatever their kinds. Seen to fail: in the order given."""
    keys = Keys({"b": ["x", "y"], "a": np.array([[1, 2], [3, 4], [1, 2]]), 1: torch.tensor([5])}, 1, "carry")
    assert keys.names == [5, (1, 2), (3, 4), "x", "y"]
    assert keys.codes.tolist() == [0, 1, 2, 1, 3, 4]
    assert keys.sources == {1: 1, "a": 3, "b": 2}
    assert Keys("ab", 1, "carry").sources is None
