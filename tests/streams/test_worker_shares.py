"""The laws of a Stream over an IterableDataset: as so many workers of a DataLoader would read it, whoever reads it, and resumed anywhere."""

from __future__ import annotations

import json
from itertools import islice

import hypothesis.strategies as st
import pytest
from by_worker import Draws, Split, share, stream
from hypothesis import given, settings
from pairwise import pairwise
from torch.utils.data import DataLoader
from ways import FORK, INLINE, SPAWN

from penstock import Loader, Stream
from penstock.testing import assert_resumes_everywhere

LENGTHS = [7, 3, 1, 5, 4, 9, 2, 6, 4, 4, 3, 5]


def loader(lengths=LENGTHS, lanes=4, size=24, kind=Split, steps=(), **words):
    data = Stream(kind(lengths), lanes=lanes, epoch_size=size, steps=steps)
    return Loader.from_dataset(data, **{"batch_size": None, "collate_fn": tuple, "seed": 3, **words})


def epochs(batches, n):
    """That many items, over as many epochs as it takes."""
    found = []
    while len(found) < n:
        found += islice(batches, n - len(found))
    return found


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("way", [INLINE, FORK, SPAWN])
@pytest.mark.parametrize("lanes", [1, 4, 6])
def test_the_first_pass_is_that_of_a_data_loader(way, lanes):
    """Seen to fail with lane k + 1 in place of lane k."""
    lengths = [8] * 12
    expected = list(DataLoader(Split(lengths), num_workers=lanes, batch_size=None, collate_fn=tuple))
    with loader(lengths, lanes, 96, **way) as batches:
        assert list(batches) == expected
    assert sorted(expected) == sorted(item for worker in range(lanes) for item in share(lengths, lanes, worker, 0))


@pytest.mark.parametrize(("ranks", "workers", "lanes"), pairwise([1, 2, 3, 4], [0, 1, 2, 3], [1, 4, 6]))
def test_all_ranks_and_workers_together_read_one_sequence(ranks, workers, lanes):
    """Over two epochs that end within passes. Seen to fail with shares in which ``info.id`` is the number of the lane in every pass."""
    read = []
    for rank in range(ranks):
        with loader(lanes=lanes, rank=rank, world_size=ranks, num_workers=workers, multiprocessing_context="fork" if workers else None) as own:
            read.append(epochs(own, 48 // ranks))
    assert [item for dealt in zip(*read, strict=True) for item in dealt] == list(islice(stream(LENGTHS, lanes), 48))


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_saved_and_loaded_anywhere_it_is_one_sequence(data):
    """Any lengths, lanes, ranks, and ways to leave an epoch, in lives with other numbers of ranks. Seen to fail with a seek that forgets the pass."""
    lanes = data.draw(st.integers(1, 6), label="lanes")
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=lanes, max_size=12), label="lengths")
    size, kind = data.draw(st.integers(4, 40), label="epoch_size"), data.draw(st.sampled_from([Split, Draws]), label="dataset")
    found, state = [], None
    for _ in range(data.draw(st.integers(1, 4), label="lives")):
        ranks = data.draw(st.integers(1, 4), label="ranks")
        fleet = [loader(lengths, lanes, size, kind, rank=rank, world_size=ranks) for rank in range(ranks)]
        if state is not None:
            for one in fleet:
                one.load_state_dict(json.loads(state))
        for _ in range(data.draw(st.integers(1, 3), label="epochs")):
            stop = data.draw(st.integers(1, 12), label="items")
            read = [list(islice(one, stop)) for one in fleet]
            found += [item for dealt in zip(*read, strict=True) for item in dealt]
            leave = data.draw(st.sampled_from(["break", "end_epoch", "set_epoch"])) if len(read[0]) == stop else "it ended"
            for one in fleet:
                if leave == "end_epoch":
                    one.end_epoch()
                elif leave == "set_epoch":
                    one.set_epoch(one.epoch + 1)
        (state,) = {json.dumps(one.state_dict()) for one in fleet}
    for one in fleet:
        one.close()
    if kind is Split:
        assert found == list(islice(stream(lengths, lanes), len(found)))
    else:
        with loader(lengths, lanes, max(len(found), lanes), kind) as whole:
            assert found == list(islice(whole, len(found)))


@pytest.mark.parametrize("kind", [Split, Draws])
@pytest.mark.parametrize("way", [INLINE, pytest.param(*FORK.values, id="fork", marks=pytest.mark.slow)])
def test_resume_at_every_item_of_two_passes(kind, way):
    """Seen to fail with items whose draws are keyed by the item's number in the lane."""
    assert_resumes_everywhere(lambda: loader([5, 3, 2, 4], 3, 10, kind, **way), steps=28)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_record_comes_once_in_a_pass(data):
    """Seen to fail with a lane that stays with its worker: short shares come more often than long ones."""
    lanes = data.draw(st.integers(1, 6), label="lanes")
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=lanes, max_size=12), label="lengths")
    passes = 3
    longest = max(len(share(lengths, lanes, worker, 0)) for worker in range(lanes))
    with loader(lengths, lanes, lanes * (passes * longest + 1)) as batches:
        found = list(batches)
    in_lanes = [found[k::lanes] for k in range(lanes)]
    for k, items in enumerate(in_lanes):
        expected = [item for p in range(passes) for item in share(lengths, lanes, (k + p) % lanes, p)]
        assert items[: len(expected)] == expected
    came = [item for k, items in enumerate(in_lanes) for item in items if item[0] < 1000 * passes]
    assert sorted(came) == sorted(item for p in range(passes) for worker in range(lanes) for item in share(lengths, lanes, worker, p))


def test_a_state_is_small_and_holds_nothing_of_the_dataset():
    with loader([1] * 4096, 4096, 10_000) as batches:
        assert len(json.dumps(batches.state_dict())) < 1024
