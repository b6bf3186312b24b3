"""Packs, buckets and keep over data in shards: all of it once, and resumed anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from pairwise import pairwise

from penstock import Buckets, Loader, Packs, Shards, filtered
from penstock.testing import assert_resumes_everywhere

COUNTS = [40, 0, 25, 60, 35]
N = sum(COUNTS)
STARTS = np.cumsum(COUNTS) - COUNTS
LENGTHS = np.random.default_rng(2).lognormal(2, 0.9, N).astype(np.int64) + 1


class Forward:
    """Opens a shard that is read forward."""

    def __call__(self, shard):
        for index in range(STARTS[shard], STARTS[shard] + COUNTS[shard]):
            yield document(index)


def indexed(shard):
    return [document(index) for index in range(STARTS[shard], STARTS[shard] + COUNTS[shard])]


def document(index):
    return 1000 * index + np.arange(LENGTHS[index])


def shards(open=indexed, **words):
    return Shards(len(COUNTS), open, counts=COUNTS, **words)


EVERY = [token for index in range(N) for token in document(index).tolist()]
GROUPS = {
    "packs": lambda: {"groups": Packs(LENGTHS, 30, block=32, pad=-1), "batch_size": 4},
    "buckets": lambda: {"groups": Buckets(LENGTHS, 240, block=64), "collate_fn": flat},
}


def flat(documents):
    return {"tokens": np.concatenate(documents)}


def tokens_in(batches):
    return sorted(token for batch in batches for token in np.asarray(batch["tokens"]).ravel().tolist() if token >= 0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers", "open"), pairwise(GROUPS, [0, 2], [indexed, Forward()]))
def test_each_resumes_everywhere(kind, workers, open):
    words = {"groups": GROUPS[kind]()["groups"], "batch_size": 16} if kind == "packs" else GROUPS[kind]()
    steps = 11 if kind == "packs" else 34
    assert_resumes_everywhere(
        lambda: Loader.from_dataset(shards(open, lanes=2), shuffle=True, num_workers=workers, method="thread", **words), steps=steps
    )


@pytest.mark.parametrize("open", [indexed, Forward()])
def test_packs_and_keep_take_shards(open):
    packs = Packs(LENGTHS, 30, block=32, pad=-1)
    with Loader.from_dataset(shards(open), 4, groups=packs, shuffle=True) as loader:
        assert tokens_in(loader) == EVERY
    kept = filtered(shards(open), is_even)
    assert list(kept.indices) == list(range(0, N, 2))
    with Loader.from_dataset(kept, 1) as loader:
        assert [batch[0, 0].item() for batch in loader] == [1000 * index for index in range(0, N, 2)]


def is_even(sample):
    return bool(sample[0] // 1000 % 2 == 0)
