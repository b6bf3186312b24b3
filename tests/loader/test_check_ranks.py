"""What `check_ranks` compares on each rank, asked of one alone: that it is what comes, and that asking changes
nothing."""

from __future__ import annotations

import json
import random
import zlib
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler, Subset, random_split

from penstock import Loader, Resident, StateMismatch
from penstock._loader.check_ranks import _fingerprint
from penstock.nodes import Batcher, Cycler, Prefetcher, SamplerWrapper, Sharder
from penstock.testing import Tagged

N = 12
END = "end of epoch"


class Remembers:
    """Draws on from where it was left, and not from anything that is seeded for it."""

    def __init__(self):
        self.rng = random.Random(7)

    def __len__(self):
        return N

    def __iter__(self):
        return iter(self.rng.sample(range(N), N))


class Draws:
    """Cannot be pickled, and draws from the global generator."""

    def __init__(self):
        self.cannot = lambda: None

    def __len__(self):
        return N

    def __iter__(self):
        return iter(np.random.permutation(N).tolist())


class IsTold(Draws):
    """Has a ``set_epoch``."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(k + self.epoch) % N for k in range(N)])


SAMPLERS = {
    "is told": IsTold,
    "torch's": lambda: RandomSampler(range(N)),
    "remembers": Remembers,
    "draws": Draws,
}


def looked_at(loader: Loader) -> int | None:
    what = _fingerprint(loader)["what"].get("the checksum of the sampler's indices")
    return None if what is None else int(what)


def walk(build, *, look: bool):
    """The batches, with an epoch that is left early, a state that is loaded, and ends of epochs between them; and what
    was seen at each step."""
    items, seen = [], []

    def step(item=None):
        seen.append(looked_at(loader) if look else None)
        items.append(item if item is None or isinstance(item, str) else [int(value) for value in item])

    with build() as loader:
        step()
        for _ in range(2):
            for batch in loader:
                step(batch)
            step(END)
        for batch in islice(loader, 2):
            step(batch)
        loader.end_epoch()
        step(END)
        step(next(iter(loader)))
        state = loader.state_dict()
    with build() as loader:
        loader.load_state_dict(state)
        for _ in range(2):
            step()
            for batch in loader:
                step(batch)
            step(END)
        loader.set_epoch(2)
        step(next(iter(loader)))
    return items, seen


def canonical(sampler, **words):
    return Loader.from_dataset(Tagged(N), batch_size=5, sampler=sampler, **words)


WAYS = {
    "inline": {},
    "threads": {"num_workers": 2, "method": "thread"},
    "not run ahead": {"num_workers": 1, "method": "thread", "prefetch_next_epoch": False},
    "not planned ahead": {"plan_ahead": False},
}


@pytest.mark.filterwarnings("ignore:Draws draws from the global random numbers")
@pytest.mark.parametrize("way", [*WAYS, "a thread reads"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_looking_shows_what_comes_and_changes_nothing(name, way):
    """At every step; of a sampler that may remember what it has yielded, only what was read. Seen to fail: a sampler
    that remembers was asked for the same epoch twice; the thread that reads was not put back."""
    build = (
        (lambda: indices_of(SAMPLERS[name]()))
        if way == "a thread reads"
        else lambda: canonical(SAMPLERS[name](), **WAYS[way])
    )
    expected, _ = walk(build, look=False)
    items, seen = walk(build, look=True)
    assert items == expected
    assert (None in seen) == (name not in ("torch's", "is told"))
    for epoch, (said, whole) in enumerate(whole_epochs(items, seen)):
        said = [checksum for checksum in said if checksum is not None]
        assert said
        assert said == [zlib.crc32(np.array(whole, "<i8").tobytes())] * len(said), epoch


def indices_of(sampler, **words):
    return Loader(Prefetcher(Batcher(Sharder(Cycler(SamplerWrapper(sampler, **words))), 5)))


def whole_epochs(items, seen):
    """Of each epoch that was read to its end: what was seen before that, and its indices. At its last batch, the next
    epoch was seen."""
    said, whole = [], []
    for item, one in zip(items, seen, strict=True):
        if item != END:
            whole += [value % 1000 for value in item or []]
        elif len(whole) == N:
            yield said[:-1], whole
            said, whole = said[-1:], []
        else:
            said, whole = [], []
        said.append(one)


def test_of_a_sampler_that_is_updated_the_present_one_counts():
    """It may be updated once more before the epoch begins."""
    given = list(range(N))
    with canonical(given, plan_ahead=False) as loader:
        first = looked_at(loader)
        given.reverse()
        assert looked_at(loader) != first
        given.reverse()
        assert looked_at(loader) == first
        start = loader.state_dict()
        assert next(iter(loader)).tolist() == [0, 1, 2, 3, 4]
        given.reverse()
        assert looked_at(loader) == first  # this epoch's plan is made
        list(loader)
        loader.load_state_dict(start)
        assert looked_at(loader) != first  # and will be made again


def test_which_samples_a_subset_has_is_compared():
    """On other ranks and in a saved state. Seen to fail: `random_split` without a generator gave each rank samples of
    its own, and each life."""

    def build(seed, inside=lambda subset: subset):
        part, _ = random_split(range(100), [30, 70], torch.Generator().manual_seed(seed))
        return Loader.from_dataset(inside(part), batch_size=5)

    for inside in (
        lambda subset: subset,
        lambda subset: ConcatDataset([range(3), subset]),
        by_a_tensor,
        partial(Resident),
    ):
        whats = [_fingerprint(build(seed, inside))["what"] for seed in (1, 1, 2)]
        assert whats[0] == whats[1]
        assert {name for name in whats[0] if whats[0][name] != whats[2][name]} == {"subset_indices"}
    state = build(1).state_dict()
    build(1).load_state_dict(state)
    with pytest.raises(
        StateMismatch, match=r"subset_indices was '\w+' and is '\w+' \(checksums of the indices of the Subset\)\. Load"
    ):
        build(2).load_state_dict(state)
    without = json.loads(state["penstock"])
    del without["settings"]["subset_indices"]
    with pytest.raises(StateMismatch, match="subset_indices was missing and is"):
        build(1).load_state_dict({"penstock": json.dumps(without)})


def by_a_tensor(subset):
    return Subset(subset.dataset, torch.tensor(subset.indices))


def test_where_batches_begin_counts():
    def said(batches):
        with Loader.from_dataset(Tagged(N), batch_sampler=batches) as loader:
            return looked_at(loader)

    assert said([[0, 1], [2]]) == said([[0, 1], [2]]) != said([[0], [1, 2]])
    assert (
        said(BatchSampler(RandomSampler(range(N)), 4, True))
        == said(BatchSampler(RandomSampler(range(N)), 4, True))
        is not None
    )


def test_the_lengths_of_own_shares_are_not_compared():
    """They may differ. Seen to fail: ranks with unequal shares were refused."""
    with Loader.from_dataset(Tagged(N), sampler=range(5), split="own", rank=0, world_size=2) as loader:
        assert "items in an epoch" not in _fingerprint(loader)["what"]
    with Loader.from_dataset(Tagged(N), sampler=range(5), rank=0, world_size=2) as loader:
        assert _fingerprint(loader)["what"]["items in an epoch"] == "5"
