"""A sampler without a length is read in blocks: by value and in order, resumed at every step, in bounded memory, and
ended when it is closed."""

from __future__ import annotations

from itertools import count, islice

import numpy as np
import pytest
import torch
from global_draws import draw, seeded
from samplers import Drawing, Remembering, Sampler, Told, following, plain
from torch.utils.data import BatchSampler, DataLoader

from penstock import GraphError, Loader
from penstock._nodes import sampler_reading
from penstock.nodes import SamplerWrapper

N, BLOCK = 7, 10


class Passes:
    """Permutation after permutation, as detectron2's ``TrainingSampler``: its randomness is its own, and it never
    ends."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        while True:
            yield from torch.randperm(N, generator=generator).tolist()


class Lent:
    """Draws from the generator that it is lent."""

    def __init__(self):
        self.generator = None

    def __iter__(self):
        while True:
            yield from torch.randperm(N, generator=self.generator).tolist()


class Words(Sampler):
    def item(self, k):
        return f"word {k}"


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of 10 items, or 10 samples in batches."""
    monkeypatch.setattr(sampler_reading, "CHUNK", BLOCK)
    monkeypatch.setattr(sampler_reading, "LARGE", BLOCK)
    monkeypatch.setattr(sampler_reading, "BATCHES", 2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "words",
    [
        lambda: {"batch_size": 4, "sampler": Passes()},
        lambda: {"batch_sampler": BatchSampler(Passes(), 3, drop_last=False)},
    ],
    ids=["sampler", "batch_sampler"],
)
def test_an_endless_sampler_gives_what_dataloader_gives(blocks, words, workers):
    """Seen to fail: the first ``next`` never returned, and read on until the memory was full; the error of a
    ``BatchSampler`` without a length."""
    theirs = islice(DataLoader(range(N), **words()), 9)
    with Loader.from_dataset(range(N), **words(), num_workers=workers, method="thread") as loader:
        ours = [batch.tolist() for batch in islice(loader, 5)]
        assert loader.remaining is None
        with pytest.raises(TypeError):
            len(loader)
        state = loader.state_dict()
    with Loader.from_dataset(range(N), **words()) as resumed:
        resumed.load_state_dict(state)
        ours += [batch.tolist() for batch in islice(resumed, 4)]
    assert ours == [batch.tolist() for batch in theirs]


ENDLESS = {
    "passes": (Passes, None),
    "draws": (Drawing, None),
    "draws, in batches": (lambda: BatchSampler(Drawing(), 3, drop_last=False), True),
    "is lent a generator": (Lent, None),
    "words": (Words, None),
    "remembers": (Remembering, None),
}


@pytest.mark.parametrize(
    ("name", "plan_ahead"), [*((name, False) for name in ENDLESS), ("draws, in batches", True), ("remembers", True)]
)
def test_an_endless_sampler_resumes_at_every_step(blocks, name, plan_ahead):
    """By another node. Seen to fail: with the samples before a block not counted."""
    make, batches = ENDLESS[name]

    def build():
        return SamplerWrapper(make(), seed=3, plan_ahead=plan_ahead, batches=batches)

    steps = 2 * BLOCK + 2
    whole = build()
    items, states = following(whole, steps)
    whole.shutdown()
    positions = np.concatenate([np.atleast_1d(item.positions) for item in items])
    assert positions.tolist() == list(range(len(positions)))
    for step in range(steps):
        node = build()
        node.reset(states[step])
        assert node.get_state() == states[step]
        assert following(node, min(steps - step - 1, 3)) == (items[step + 1 : step + 4], states[step + 1 : step + 4]), (
            f"after {step=}"
        )
        node.shutdown()


@pytest.mark.parametrize(("make", "plan_ahead"), [(Passes, False), (Drawing, True), (Drawing, False), (Lent, True)])
def test_blocks_give_what_the_whole_gives(blocks, wrap, monkeypatch, make, plan_ahead):
    """Also where the training loop draws between two items, which it does undisturbed. Seen to fail: without the
    sampler's own stream kept between two blocks; without the caller's put back."""

    class Ends(make):
        def __iter__(self):
            return islice(super().__iter__(), 55)

        def __len__(self):
            return 55

    whole = wrap(Ends(), seed=3, plan_ahead=False)
    expected = plain(whole)
    node = wrap(make(), seed=3, plan_ahead=plan_ahead)
    seeded()
    read, drawn = [], []
    for _ in range(55):
        read.append(next(node).plain())
        drawn.append(draw())
    seeded()
    assert drawn == [draw() for _ in drawn]
    assert read == expected


def test_it_is_said_once_that_a_sampler_is_read_in_blocks(blocks, wrap, caplog):
    node = wrap(Told(3 * BLOCK))
    following(node, 7 * BLOCK)
    assert [record.message for record in caplog.records] == [
        "Told has not ended after 10 items, so it is read in blocks while it is used. The number of items in an epoch "
        "stays unknown, and a resume reads the indices again from the epoch's start, but no sample."
    ]
    caplog.clear()
    following(wrap(Told(BLOCK - 1)), 3 * BLOCK)
    assert not caplog.records


# Ranks, epochs, and other samplers.


@pytest.mark.parametrize("tail", ["drop", "exact"])
def test_an_endless_sampler_is_dealt_to_the_ranks(blocks, tail):
    expected = list(islice(Passes(), 48))
    for rank in range(2):
        options = {"batch_size": 3, "sampler": Passes(), "tail": tail, "rank": rank, "world_size": 2}
        with Loader.from_dataset(range(N), **options) as loader:
            got = [batch.tolist() for batch in islice(loader, 4)]
            state = loader.state_dict()
        with Loader.from_dataset(range(N), **options) as resumed:
            resumed.load_state_dict(state)
            got += [batch.tolist() for batch in islice(resumed, 4)]
        assert [value for batch in got for value in batch] == expected[rank::2]


def test_padding_an_endless_sampler_is_refused(blocks):
    """Seen to fail: the refusal was the Sharder's, which names no sampler."""
    refused = pytest.raises(
        GraphError,
        match=(
            "Passes, which has no __len__, cannot be read by position, which tail='pad' needs. Use tail='drop' or "
            "tail='exact'"
        ),
    )
    with Loader.from_dataset(range(N), sampler=Passes(), rank=0, world_size=2) as loader, refused:
        next(iter(loader))


def test_after_an_error_it_goes_on_where_it_was(blocks):
    """Seen to fail: the items of the first block came again, as those of the second."""

    class Fails:
        def __init__(self):
            self.bad = {12}

        def set_epoch(self, epoch):
            pass

        def __iter__(self):
            for k in count():
                if k in self.bad:
                    self.bad.discard(k)
                    raise OSError("gone")
                yield k

    with Loader.from_dataset(range(99), batch_size=5, sampler=Fails()) as loader:
        batches = iter(loader)
        assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        with pytest.raises(OSError, match="gone"):
            next(batches)
        loader.load_state_dict(loader.state_dict())
        assert next(iter(loader)).tolist() == [10, 11, 12, 13, 14]
