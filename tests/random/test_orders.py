"""The orders: bijections, statistics, frozen values, torch's own order, weights.

The statistics are deterministic: the seeds are fixed. `surprise` is how far a chi-square lies above its mean, in its
standard deviations; a sound order stays within 5, which chance alone exceeds once in a million.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._random import permutation, weighted_order
from penstock._random.orders import LONGEST, ShuffledOrder, TorchOrder
from penstock._random.permutation import SHORT, by_group, stable_argsort
from penstock._random.weighted_order import WeightedOrder

SOUND = 5.0
SEEDS = st.integers(0, 2**63 - 1)


def whole(order, epoch=0):
    return order.indices(epoch, np.arange(len(order)))


def surprise(counts):
    """Of ``counts``, if all outcomes are equally likely."""
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2).sum() / expected - (counts.size - 1)) / np.sqrt(2 * (counts.size - 1)))


def epochs(n, seeds, n_epochs):
    """Whole epochs, shape (seeds, epochs, n)."""
    return np.array(
        [
            [whole(order, epoch) for epoch in range(n_epochs)]
            for order in (ShuffledOrder(n, seed) for seed in range(seeds))
        ]
    )


def pairs(left, right, n, cells):
    """How surprising the pairs (left, right) are, sorted into cells x cells boxes."""
    box = (left * cells // n) * cells + right * cells // n
    return surprise(np.bincount(box.ravel(), minlength=cells * cells))


def steps(left, right, n):
    """How surprising the differences right - left are; none of them may be 0."""
    return surprise(np.bincount(((right - left) % n).ravel(), minlength=n)[1:])


class TestShuffledOrderIsAPermutation:
    @given(n=st.integers(0, 3 * SHORT), seed=SEEDS, epoch=st.integers(0, 2**40))
    @settings(max_examples=50, deadline=None)
    def test_of_every_length(self, n, seed, epoch):
        """Seen to fail: `np.minimum(left, h)` left out of the network, which gives numbers beyond n and an endless
        walk."""
        assert np.array_equal(np.sort(whole(ShuffledOrder(n, seed), epoch)), np.arange(n))

    @given(n=st.integers(1, 3000), seed=SEEDS)
    @settings(max_examples=50, deadline=None)
    def test_as_a_network_also_where_sorting_is_used(self, n, seed):
        assert np.array_equal(np.sort(permutation.FeistelPermutation(0, seed, n)(np.arange(n))), np.arange(n))

    @pytest.mark.parametrize("n", [10**9 + 7, 10**12, 2**48, 2**48 + 1, LONGEST])
    def test_of_huge_lengths_as_far_as_one_can_look(self, n):
        positions = np.unique(
            np.concatenate(
                [np.arange(20_000), np.arange(n - 20_000, n), np.random.default_rng(0).integers(0, n, 20_000)]
            )
        )
        values = ShuffledOrder(n, 1).indices(2, positions)
        assert values.min() >= 0
        assert values.max() < n
        assert np.unique(values).size == positions.size


class TestShuffledOrderIsRandom:
    @pytest.mark.parametrize(
        ("n", "seeds", "n_epochs", "cells"), [(101, 40, 50, 101), (1009, 15, 30, 101), (4099, 10, 16, 101)]
    )
    def test_like_torch_randperm(self, n, seeds, n_epochs, cells):
        """Places, neighbours, steps, consecutive epochs, adjacent seeds. Seen to fail: the epoch left out of the key;
        round keys of 0."""
        read = epochs(n, seeds, n_epochs)
        places = np.broadcast_to(np.arange(n), read.shape)
        found = {
            "places": pairs(places, read, n, cells),
            "epochs": pairs(read[:, :-1], read[:, 1:], n, cells),
            "seeds": pairs(read[:-1], read[1:], n, cells),
            "steps": steps(read[..., :-1], read[..., 1:], n),
            "steps over a row": steps(read[..., : -(int(n**0.5) + 1)], read[..., int(n**0.5) + 1 :], n),
        }
        torches = np.array(
            [torch.randperm(n, generator=torch.Generator().manual_seed(k)).numpy() for k in range(seeds * n_epochs)]
        )
        peer = steps(torches[:, :-1], torches[:, 1:], n)
        assert max(found.values()) < SOUND, found
        assert peer < SOUND


class TestTorchOrder:
    def test_takes_a_plan_made_elsewhere(self):
        order, other = TorchOrder(50, 1), TorchOrder(50, 1)
        assert not order.keeps(3)
        plan = order.plan(3)
        assert plan.dtype == np.int32
        assert not order.keeps(3)
        order.keep(3, plan)
        assert order.keeps(3)
        assert np.array_equal(whole(order, 3), whole(other, 3))
        assert np.array_equal(whole(order, 2), whole(other, 2))
        assert not order.keeps(3), "one permutation is kept, not more"
        order.keep(4, plan)
        assert np.array_equal(whole(order, 4), whole(other, 3)), "the plan was made again"

    def test_warns_where_it_gets_expensive(self):
        with pytest.warns(UserWarning, match="about 0.4 s and 114 MiB on every rank. Unless .* use ShuffledOrder"):
            TorchOrder(10**7 + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            TorchOrder(10**7)

    def test_is_torchs_of_the_sum_of_seed_and_epoch_on_any_default_device(self):
        """Seen to fail: another sum; a permutation that torch makes where it makes tensors."""
        expected = torch.randperm(7, generator=torch.Generator().manual_seed(8)).tolist()
        with torch.device("meta"):
            order = TorchOrder(7, 5)
            assert whole(order, 3).tolist() == expected

    @pytest.mark.filterwarnings("ignore:TorchOrder")
    def test_keeps_four_bytes_for_each_index_or_eight(self, monkeypatch):
        monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(3))
        assert [TorchOrder(n).plan(0).dtype for n in (7, 2**31 - 1, 2**31)] == [np.int32, np.int32, np.int64]


class TestWeightedOrder:
    def test_takes_any_numbers_for_weights(self):
        assert whole(WeightedOrder([0, 2**70], 3)).tolist() == [1, 1, 1]

    def test_draws_by_weight(self):
        weights = np.array([0, 1, 2, 0, 3.5, 0.5, 0])
        order = WeightedOrder(weights, 60_000, seed=3)
        for epoch in (0, 1):
            counts = np.bincount(whole(order, epoch), minlength=7)
            assert counts[weights == 0].sum() == 0
            expected = 60_000 * weights[weights > 0] / weights.sum()
            assert ((counts[weights > 0] - expected) ** 2 / expected).sum() < 21.1, (
                "chi-square of 3 degrees, p = 0.0001"
            )

    @pytest.mark.parametrize("word", [0, 2**64 - 1])
    def test_never_draws_a_weight_of_zero(self, monkeypatch, word):
        """At both ends of the uniform numbers. Seen to fail: ``side="left"``."""
        monkeypatch.setattr(weighted_order, "splitmix64_stream", lambda counter, *_: np.full_like(counter, word))
        for weights in ([0, 0.1, 0.2, 0], [0, 1e-300, 0], [0, 0, 1e308, 1e308, 0]):
            drawn = WeightedOrder(weights, 3).indices(0, np.arange(3))
            assert (np.array(weights)[drawn] > 0).all()

    def test_its_settings_tell_weights_apart(self):
        assert WeightedOrder([1, 2], 5).settings() != WeightedOrder([1, 2.5], 5).settings()
        assert WeightedOrder([1, 2], 5).settings() == WeightedOrder(torch.tensor([1.0, 2.0]), 5).settings()


@pytest.mark.parametrize("n", [0, 1, 2, 5, 64, 65, 4096])
def test_random_words_are_sorted_as_argsort_does(n):
    """Also words that differ in the lowest bits only, or not at all. Seen to fail: without looking for those, or only
    among the smallest."""
    random = np.random.default_rng(n).integers(0, 2**64, n, dtype=np.uint64)
    alike = random & np.uint64(15)
    but_one = np.where(np.arange(n) == 1, 0, alike | np.uint64(2**63))
    for words in (random, random[:1].repeat(n), alike, but_one, (random << np.uint64(60)) | (random >> np.uint64(62))):
        found = stable_argsort(words)
        assert found.dtype == np.int64
        assert found.tolist() == np.argsort(words, kind="stable").tolist()


@pytest.mark.parametrize("n", [1, 2, 5, 64, 65, 4096])
def test_words_that_differ_above_the_lowest_bits_need_no_slow_sort(n, monkeypatch):
    """Seen to fail: more bits taken away than an index needs; a comparison of the indices."""
    words = np.arange(n, dtype=np.uint64)[::-1] << np.uint64((n - 1).bit_length())
    monkeypatch.delattr(np, "argsort")
    assert stable_argsort(words).tolist() == list(range(n))[::-1]


@pytest.mark.parametrize("n", [100, 5000])
def test_the_permutations_of_two_epochs_are_kept(n, monkeypatch):
    """Of the epoch that is read, and of the next, which is read ahead. Seen to fail: each change of epoch makes the
    keys again."""
    made = []
    words = permutation.philox_words
    monkeypatch.setattr(
        permutation, "philox_words", lambda seed, epoch, *rest: made.append(epoch) or words(seed, epoch, *rest)
    )
    order = ShuffledOrder(n, 1)
    for epoch in (0, 1, 0, 1, 2, 1, 2, 1, 0):
        order.indices(epoch, np.arange(2))
    assert made == [0, 1, 2, 0]


def test_groups_have_their_members_in_order():
    """Seen to fail: a sort that is not stable, which only many members show."""
    group_of = np.random.default_rng(0).choice([0, 2, 300, 2**16 - 1], 5000)
    found = [(group, members.tolist()) for group, members in by_group(group_of)]
    assert found == [(group, np.flatnonzero(group_of == group).tolist()) for group in (0, 2, 300, 2**16 - 1)]
