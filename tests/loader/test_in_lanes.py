"""Loader.from_dataset(dataset, lanes=L) is DataLoader(dataset, num_workers=L), batch for batch and epoch after epoch,
with any workers, and resumes anywhere."""

from __future__ import annotations

import json
import os
import random
import signal
from functools import partial
from itertools import islice, product
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from by_worker import Draws, Split, share
from hypothesis import given, settings
from pairwise import mostly_soak
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from ways import SPAWN
from worker_pids import worker_pids

import penstock
from penstock import GraphError, Loader
from penstock.testing import assert_resumes_everywhere, plain

LANES = 4
SHARES = {
    "unequal": [7, 3, 12, 5],
    "empty workers": [0, 6, 0, 3],
    "all empty": [0, 0, 0, 0],
    "shorter than the lanes": [2, 1],
    "several shards": [3, 1, 4, 1, 5, 9, 2, 6],
}
BATCHES = {
    "None": {"batch_size": None},
    "1": {"batch_size": 1},
    "4": {"batch_size": 4},
    "4, drop_last": {"batch_size": 4, "drop_last": True},
}


def fork(workers):
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


AROUND = [(4, 96), (4, 98), (4, 99), (7, 70), (1, 64), (128, 65)]
"""The size of a batch, and the first item that draws: at the beginning of a batch, in its middle, at its end."""


def own(lengths, kind=Split, **words):
    return Loader.from_dataset(
        kind(lengths),
        **{"lanes": LANES, "collate_fn": list if words.get("batch_size", 1) else tuple, "seed": 3, **words},
    )


def expected(lengths, epoch, batch_size, drop_last=False):
    """The batches of an epoch by the rule alone: the workers yield batches in turn, and one that has ended is left
    out."""
    size, dealt = batch_size or 1, []
    for worker in range(LANES):
        items = share(lengths, LANES, worker, epoch)
        batches = [items[k : k + size] for k in range(0, len(items), size)]
        dealt.append([one for one in batches if len(one) == size or not drop_last])
    turns = [batches[j] for j in range(max(map(len, dealt))) for batches in dealt if j < len(batches)]
    return turns if batch_size else [one for (one,) in turns]


@pytest.mark.parametrize(
    ("size", "quiet", "workers"),
    mostly_soak(
        ((*case, workers) for workers in (0, 2) for case in AROUND),
        [*((*case, 0) for case in AROUND), (4, 98, 2), (128, 65, 2)],
    ),
)
def test_the_first_draw_is_of_the_share_and_those_behind_it_of_the_items(size, quiet, workers):
    """In the middle of a batch, too. Seen to fail with a draw that is noticed by the process instead of the share, and
    with a batch whose items are all seeded as the first one is."""
    lengths = [150, 140, 130, 40]
    with own(lengths, Draws, batch_size=size) as loader:
        seeded = dict(item for batch in loader for item in batch)
    with own(lengths, partial(Draws, quiet=quiet), batch_size=size, **fork(workers)) as loader:
        found = dict(item for batch in loader for item in batch)
    for worker in range(LANES):
        items = share(lengths, LANES, worker, 0)
        assert {found[item] for item in items[:quiet]} <= {None}
        if len(items) > quiet:
            assert found[items[quiet]] == seeded[items[0]]
            assert [found[item] for item in items[quiet + 1 :]] == [seeded[item] for item in items[quiet + 1 :]]
    assert len({*found.values()}) > 20


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("shares", "batches"), mostly_soak(product(SHARES, BATCHES), zip(SHARES, [*BATCHES, "4"], strict=True))
)
def test_the_rule_is_that_of_a_data_loader(shares, batches):
    data = Split(SHARES[shares])
    theirs = DataLoader(
        data, num_workers=LANES, collate_fn=list if BATCHES[batches]["batch_size"] else tuple, **BATCHES[batches]
    )
    for epoch in (0, 2):
        data.set_epoch(epoch)
        assert list(theirs) == expected(SHARES[shares], epoch, **BATCHES[batches])


@pytest.mark.parametrize(
    ("shares", "batches", "workers"),
    mostly_soak(
        product(SHARES, BATCHES, [0, 1, 2, 3]),
        [
            *product(SHARES, BATCHES, [0]),
            *zip(SHARES, ["4", "1", "None", "4, drop_last", "4"], [1, 2, 3, 1, 2], strict=True),
        ],
    ),
)
def test_batch_for_batch_in_several_epochs(shares, batches, workers):
    """Seen to fail with slots past the end of one lane that end the epoch, and with ends of the epoch before."""
    with own(SHARES[shares], **BATCHES[batches], **fork(workers)) as loader:
        for epoch in range(3):
            assert list(loader) == expected(SHARES[shares], epoch, **BATCHES[batches])
        loader.set_epoch(0)
        assert list(loader) == expected(SHARES[shares], 0, **BATCHES[batches])


@pytest.mark.parametrize("way", [SPAWN])
def test_in_new_interpreters(way):
    with own(SHARES["unequal"], batch_size=4, **way) as loader:
        for epoch in range(2):
            assert list(loader) == expected(SHARES["unequal"], epoch, 4)


@pytest.mark.parametrize("kind", [Split, Draws])
def test_resumes_everywhere(kind):
    """Seen to fail with a lane that begins an item late."""
    assert_resumes_everywhere(lambda: own([5, 3, 0, 6], kind, batch_size=2), steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(Split, marks=pytest.mark.soak), Draws])
def test_resumes_everywhere_with_workers(kind):
    """Seen to fail as above. Each step starts workers, so the epochs are short."""
    assert_resumes_everywhere(lambda: own([1, 2, 0, 3], kind, batch_size=2, **fork(2)), steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("shares", SHARES)
def test_resumed_with_other_workers_at_every_batch_and_in_the_epoch_after(shares, every):
    """On every change at every third batch, inline, and with workers at one."""
    lengths, states = SHARES[shares], []
    with own(lengths, batch_size=2) as loader:
        states.append(json.dumps(loader.state_dict()))
        states += [json.dumps(loader.state_dict()) for _ in loader]
    whole = expected(lengths, 0, 2)
    first = [*SHARES].index(shares) % min(every, len(states))
    for workers in (0, 1, 3):
        for done, state in list(enumerate(states))[first :: every if not workers else max(1, every * len(states) // 3)]:
            with own(lengths, batch_size=2, **fork(workers)) as resumed:
                resumed.load_state_dict(json.loads(state))
                assert list(resumed) == whole[done:]
                assert list(resumed) == expected(lengths, 1, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_left_early_the_next_epoch_is_whole(workers):
    lengths = SHARES["unequal"]
    with own(lengths, batch_size=2, **fork(workers)) as loader:
        for epoch, stop in enumerate((1, 5, 3, 100)):
            assert list(islice(loader, stop)) == expected(lengths, epoch, 2)[:stop]
            loader.end_epoch()


@pytest.mark.parametrize("workers", [0, 2])
def test_infinite(workers):
    lengths = SHARES["empty workers"]
    with own(lengths, batch_size=2, infinite=True, **fork(workers)) as loader:
        whole = [batch for epoch in range(4) for batch in expected(lengths, epoch, 2)]
        assert list(islice(loader, len(whole))) == whole


class Long(Split):
    def __len__(self):
        return sum(self.lengths)


@pytest.mark.parametrize("batches", BATCHES)
def test_its_length_is_that_of_a_data_loader(batches):
    words = BATCHES[batches]
    assert len(own([7, 3, 12, 5], Long, **words)) == len(DataLoader(Long([7, 3, 12, 5]), num_workers=0, **words))
    with pytest.raises(TypeError):
        len(own([7, 3], **words))


def transformed(item):
    return (*item, penstock.sample().index, penstock.sample().epoch, penstock.sample().rng.random())


def collated(samples):
    info = get_worker_info()
    return info.id, info.num_workers, samples


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_transform_sees_the_item_and_collate_fn_the_worker(workers):
    """Seen to fail with a transform in the sample of the whole batch, and with a collate_fn outside of `seen_as`."""
    lengths = SHARES["unequal"]
    with own(lengths, batch_size=3, transform=transformed, collate_fn=collated, **fork(workers)) as loader:
        first, second = list(loader), list(loader)
    for epoch, read in ((0, first), (1, second)):
        assert [[sample[:2] for sample in samples] for _, _, samples in read] == expected(lengths, epoch, 3)
        for worker, lanes, samples in read:
            assert lanes == LANES
            items = share(lengths, LANES, worker, epoch)
            assert [sample[2:4] for sample in samples] == [(items.index(sample[:2]), epoch) for sample in samples]
    drawn = [sample[4] for _, _, samples in first + second for sample in samples]
    assert len({*drawn}) == len(drawn)
    with own(lengths, batch_size=3, transform=transformed, collate_fn=collated) as loader:
        assert [list(loader), list(loader)] == [first, second]


class Range(IterableDataset):
    """The example of torch's page about ``IterableDataset`` that is split by `halve`."""

    def __init__(self):
        self.start, self.end = 3, 32

    def __iter__(self):
        return iter(range(self.start, self.end))


def halve(worker):
    info = get_worker_info()
    dataset, size = info.dataset, -(-29 // info.num_workers)
    assert worker == info.id
    random.seed(worker)  # as many do
    dataset.start, dataset.end = 3 + worker * size, min(3 + (worker + 1) * size, 32)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_worker_init_fn_may_split_the_dataset(workers, caplog):
    """It is called for each copy, and leaves the generators of the process alone. Seen to fail: called in the worker
    processes alone; and with the copies' attributes compared with those of the dataset, a warning."""
    words = {"batch_size": 3, "worker_init_fn": halve, "collate_fn": list}
    theirs = list(DataLoader(Range(), num_workers=LANES, **words))
    assert len(theirs) == 11
    random.seed(1)
    before = random.getstate()
    with Loader.from_dataset(Range(), lanes=LANES, **words, **fork(workers)) as loader:
        assert [list(loader), list(loader)] == [theirs, theirs]
    assert random.getstate() == before
    assert not caplog.text


class Files(IterableDataset):
    """In another order in each epoch, and split by `sliced`."""

    def set_epoch(self, epoch):
        self.files = random.Random(epoch).sample(range(12), 12)

    def __iter__(self):
        return iter(self.files)


def sliced(worker):
    dataset = get_worker_info().dataset
    dataset.files = dataset.files[worker :: get_worker_info().num_workers]  # by the argument


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_init_fn_is_called_after_set_epoch(workers, caplog):
    """Seen to fail: before it, so that each item came twice; and the dataset was refused, because it had not asked for
    its worker's id."""
    with Loader.from_dataset(Files(), batch_size=None, lanes=2, worker_init_fn=sliced, **fork(workers)) as loader:
        found = [list(loader) for _ in range(3)]
    assert found == [random.Random(epoch).sample(range(12), 12) for epoch in range(3)]
    assert not caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_init_fn_that_does_not_split_is_no_split(workers):
    """Whichever share begins first. Seen to fail: each item came twice; worker 0, which nobody compared, was read."""

    class Unsplit(IterableDataset):
        def __iter__(self):
            yield from range(9)

    found = []
    words = {"batch_size": None, "lanes": 2, "worker_init_fn": random.seed}
    with (
        Loader.from_dataset(Unsplit(), **words, **fork(workers)) as loader,
        pytest.raises(GraphError, match="never asks"),
    ):
        found.extend(loader)
    assert [*map(int, found)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("workers", "mixed"), [(0, False), (0, True), pytest.param(2, True, marks=pytest.mark.slow)])
def test_worker_init_fn_is_called_for_the_lanes_of_a_stream(workers, mixed):
    """On each of two ranks, which share the lanes. Seen to fail: it was called with the `Stream` as the dataset in
    worker processes, and not at all inline.
    """
    found = []
    for rank in range(2):
        data = penstock.Stream(Range(), lanes=2, epoch_size=28)
        if mixed:
            data = penstock.Mix({"only": data}, {"only": 1}, epoch_size=28)
        words = {"worker_init_fn": halve, "rank": rank, "world_size": 2, **fork(workers)}
        with Loader.from_dataset(data, batch_size=None, **words) as loader:
            found += [*loader]
    assert sorted(map(int, found)) == [*range(3, 17), *range(18, 32)]


def test_loaders_of_one_stream_have_one_worker_init_fn():
    """It changes the copies that they share. Seen to fail: the second one's was called for both."""
    stream = penstock.Stream(Range(), lanes=2, epoch_size=28)
    Loader.from_dataset(stream, None, worker_init_fn=halve).close()
    Loader.from_dataset(stream, None, worker_init_fn=halve).close()
    with pytest.raises(ValueError, match="worker_init_fn=None: this Stream is already used by a loader with worker_in"):
        Loader.from_dataset(stream, None)


def test_loaders_of_one_stream_seed_alike():
    """Seen to fail: the second told the first."""
    stream = penstock.Stream(Seeds(random.random), lanes=2, epoch_size=80)
    Loader.from_dataset(stream, None).close()
    Loader.from_dataset(stream, None).close()
    with pytest.raises(ValueError, match="already used by a loader with seed_global_rngs=True"):
        Loader.from_dataset(stream, None, seed_global_rngs=False)


def test_a_worker_init_fn_without_a_dataset_is_told_why():
    """Where a ``collate_fn`` of the user's needs workers. Seen to fail without the note."""
    with (
        Loader.from_dataset(Range(), batch_size=3, worker_init_fn=halve, collate_fn=list, **fork(2)) as loader,
        pytest.raises(AttributeError) as caught,
    ):
        list(loader)
    assert "with lanes=, worker_init_fn is called for each lane" in "".join(caught.value.__notes__)


class Seeds(IterableDataset):
    """Asks for a seed, without drawing: once, or for each item."""

    def __init__(self, of, each=False):
        self.of = of
        self.each = each

    def __iter__(self):
        info = get_worker_info()
        rng = random.Random(self.of())
        for _ in range(40):
            yield info.id, self.of() if self.each else rng.random()


def of_worker():
    return get_worker_info().seed


@pytest.mark.parametrize(
    ("of", "each", "how"),
    [
        (torch.initial_seed, False, True),
        (torch.initial_seed, True, True),
        (torch.initial_seed, True, "always"),
        (of_worker, False, True),
        (of_worker, False, False),
    ],
)
@pytest.mark.parametrize("endless", [False, True])
def test_a_seed_that_is_asked_for_belongs_to_the_pass_and_the_worker(of, each, how, endless):
    """It is one number for a share, whether it is asked for once or for each item. Seen to fail: with items that are
    not seeded once 64 have drawn nothing, and with one seed for all passes."""

    def new(**words):
        data = Seeds(of, each)
        lanes = {} if endless else {"lanes": 2}
        data = penstock.Stream(data, lanes=2, epoch_size=80) if endless else data
        return Loader.from_dataset(
            data, batch_size=None, collate_fn=tuple, seed=3, seed_global_rngs=how, **lanes, **words
        )

    torch.manual_seed(1)
    with new() as loader:
        whole = [item for _ in range(3) for item in loader]
    assert len({*whole}) == (6 if each else 240)
    torch.manual_seed(2)
    with new(**fork(2)) as loader:
        assert [item for _ in range(3) for item in loader] == whole
    with new() as loader:
        list(loader)
        head = list(islice(loader, 13))
        state = loader.state_dict()
    torch.manual_seed(3)
    with new(**fork(1)) as loader:
        loader.load_state_dict(state)
        assert head + [item for _ in range(2) for item in loader] == whole[80:]


@pytest.mark.parametrize("workers", [0, 2])
def test_transform_and_collate_fn_see_the_worker_info_that_the_dataset_saw(workers):
    """Seen to fail: a transform saw none, or that of the process, and the seed for a collate_fn was 0."""

    def seen(item):
        worker, seed = item
        assert (get_worker_info().id, of_worker()) == (worker, seed)
        return item

    def all_seen(items):
        return {*map(seen, items)}

    words = {"batch_size": 5, "lanes": 3, "transform": seen, "collate_fn": all_seen}
    with Loader.from_dataset(Seeds(of_worker, each=True), **words, **fork(workers)) as loader:
        found = [seeds for _ in range(2) for seeds in loader]
    assert ([len(seeds) for seeds in found], len(set().union(*found))) == ([1] * 48, 6)


@pytest.mark.parametrize("endless", [False, True])
def test_the_user_may_leave_the_generators_unseeded(endless):
    """Seen to fail with a Stream that seeds nevertheless."""
    data = penstock.Stream(Seeds(random.random), lanes=2, epoch_size=80) if endless else Seeds(random.random)
    random.seed(1)
    before = random.getstate()
    with Loader.from_dataset(data, None, seed_global_rngs=False, **({} if endless else {"lanes": 2})) as loader:
        next(iter(loader))
    assert random.getstate() != before


class Headless(IterableDataset):
    """Skips the header of a file that is empty."""

    def __iter__(self):
        lines = iter([] if get_worker_info().id else ["header", "1", "2"])
        next(lines)
        return map(int, lines)


def test_a_stop_iteration_before_the_first_item_is_no_end():
    """Seen to fail: the share had no items, and nobody was told."""
    with (
        Loader.from_dataset(Headless(), lanes=2, batch_size=None) as loader,
        pytest.raises(penstock.SampleError, match="Headless raised StopIteration before its first item"),
    ):
        list(loader)


class Told(IterableDataset):
    """What the loop has written into shared memory."""

    def __init__(self):
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __iter__(self):
        for _ in range(get_worker_info().id, 4, get_worker_info().num_workers):
            yield int(self.epoch)


@pytest.mark.parametrize(("blocks", "says"), [(400, False), (450, True)])
def test_a_large_copy_for_each_lane_is_said_once(blocks, says, caplog):
    """Copies do not share arrays of up to 64 KB: 24 and 27 MB of them. Seen to fail without a word."""

    class Many(Split):
        def __init__(self):
            super().__init__([3, 3, 3])
            self.blocks = [np.zeros(60_000, np.uint8) for _ in range(blocks)]

    with Loader.from_dataset(Many(), lanes=3, batch_size=2) as loader:
        assert len(list(loader)) == 6
    assert caplog.text.count("each of lanes=3 reads a copy of Many, of 27 MB when pickled") == says
    assert len(caplog.messages) == says


def test_a_small_value_in_shared_memory_that_the_loop_changes_is_said(caplog):
    """Seen to fail: nobody was told that the copies have the old one."""
    data = Told()
    with Loader.from_dataset(data, lanes=2, batch_size=4) as loader:
        for epoch in range(2):
            data.epoch[0] = epoch
            list(loader)
    assert "Told was changed after its first copy was made" in caplog.text


def test_default_collate_and_convert():
    for words in ({"batch_size": 3}, {"batch_size": None}):
        with Loader.from_dataset(Split([4, 4]), lanes=1, **words) as loader:
            theirs = list(DataLoader(Split([4, 4]), num_workers=1, **words))
            assert plain(list(loader)) == plain(theirs)


class Fails(Split):
    """Raises at an item, as long as ``failing`` is there."""

    def __init__(self, lengths, failing):
        super().__init__(lengths)
        self.failing = failing

    def __iter__(self):
        for item in self.own():
            if item == (3, 0) and self.failing.exists():
                raise ValueError("damaged")
            yield item


def damaged_in(items):
    if (3, 0) in items:
        raise ValueError("damaged")
    return items


WRONG = {
    "dataset": {"kind": lambda lengths: Fails(lengths, Path(__file__))},
    "transform": {"transform": lambda item: damaged_in([item])[0]},
    "collate_fn": {"collate_fn": damaged_in},
}


@pytest.mark.parametrize(
    ("wrong", "batch_size", "name"),
    [*((wrong, 2, "batch 1") for wrong in WRONG), ("dataset", None, "item 3"), ("collate_fn", None, None)],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_batch_of_the_worker(wrong, batch_size, name, workers):
    """In the words of the user, who knows no slots. Seen to fail: "dataset index 4"."""
    with own([7, 3, 12, 5], batch_size=batch_size, **WRONG[wrong], **fork(workers)) as loader:
        if name is None:  # an item that is no batch is not collated
            assert len(list(loader)) == 27
            return
        with pytest.raises(ValueError, match="damaged") as caught:
            list(loader)
    kind = "Fails" if wrong == "dataset" else "Split"
    assert f"while loading {name} of worker 0 of {LANES} of {kind} (epoch 0)" in caught.value.__notes__


class AsksForItsRank(Split):
    def __iter__(self):
        torch.distributed.get_rank()
        return super().__iter__()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=[pytest.mark.slow, pytest.mark.soak])])
def test_a_dataset_that_asks_for_its_rank_in_a_worker_process_is_told_the_way(start):
    """Seen to fail: torch's "Default process group has not been initialized", although the job has one."""
    loader = own([7, 3], AsksForItsRank, lanes=2, batch_size=2, num_workers=1, multiprocessing_context=start)
    with loader, pytest.raises(ValueError, match="process group") as caught:
        list(loader)
    assert "worker processes belong to no process group: ask for the rank in" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_raised_once_and_is_no_end(tmp_path, workers):
    """Seen to fail: the batches of that worker behind the error were refused, even after a state from before it had
    been loaded."""
    failing = tmp_path / "failing"
    failing.touch()
    whole = expected(SHARES["unequal"], 0, 2)
    with own(SHARES["unequal"], lambda lengths: Fails(lengths, failing), batch_size=2, **fork(workers)) as loader:
        found, errors = [], []
        batches = iter(loader)
        before = loader.state_dict()
        for _ in range(30):
            try:
                found.append(next(batches))
            except (ValueError, penstock.SourceError) as exc:
                errors.append(type(exc))
        assert errors[0] is ValueError
        assert {*errors[1:]} == {penstock.SourceError}
        assert found == [batch for batch in whole if batch[0][1] != 0 or batch == [(0, 0), (1, 0)]]
        failing.unlink()
        loader.load_state_dict(before)
        assert list(loader) == whole
        assert list(loader) == expected(SHARES["unequal"], 1, 2)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_shares_left_and_resumed_anywhere(data):
    """In lives that each go on from the state of the one before. Seen to fail with ends of an epoch that are kept for
    the next one."""
    lengths = data.draw(st.lists(st.integers(0, 7), max_size=8), label="lengths")
    words = {"batch_size": data.draw(st.sampled_from([None, 1, 2, 3]), label="batch_size")}
    words["drop_last"] = words["batch_size"] is not None and data.draw(st.booleans(), label="drop_last")
    state, epoch, done = None, 0, 0
    for _ in range(data.draw(st.integers(1, 3), label="lives")):
        with own(lengths, **words) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            for left in reversed(range(data.draw(st.integers(1, 3), label="epochs"))):
                whole = expected(lengths, epoch, **words)
                stop = data.draw(st.integers(1, 9), label="batches")
                read = list(islice(loader, stop))
                assert read == whole[done : done + stop]
                done += len(read)
                if len(read) < stop:
                    epoch, done = epoch + 1, 0
                    continue
                # A request for an epoch is not in the state until an iterator has begun there.
                leave = data.draw(st.sampled_from(["save", "end_epoch", "set_epoch", "back"][: 4 if left else 2]))
                if leave == "save":
                    break
                if leave == "end_epoch":
                    loader.end_epoch()
                epoch, done = {"end_epoch": epoch + 1, "set_epoch": epoch + 2, "back": 0}[leave], 0
                if leave != "end_epoch":
                    loader.set_epoch(epoch)
            state = loader.state_dict()


def test_a_killed_worker_changes_nothing():
    whole = [batch for epoch in range(2) for batch in expected([30, 20, 25, 5], epoch, 2)]
    with own([30, 20, 25, 5], batch_size=2, **fork(2)) as loader:
        batches, found = iter(loader), []
        for kill in (1, 7, 20):
            found += islice(batches, kill - len(found))
            os.kill(worker_pids()[0], signal.SIGKILL)
        found += [*batches, *loader]
    assert found == whole


def test_the_number_of_a_batch_is_no_dataset_index():
    """Seen to fail: with `SlotSource.has_indices`."""
    with own([7, 3, 12, 5], batch_size=4) as loader:
        next(iter(loader))
        assert loader.last.epoch == 0
        assert loader.last.indices is None
