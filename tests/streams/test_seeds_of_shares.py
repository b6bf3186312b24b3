"""The seeds that a dataset finds while it is read in lanes: as in the workers of a DataLoader, and the same however it
is read."""

from __future__ import annotations

import os
import random
import signal
from itertools import islice

import numpy as np
import pytest
import torch
from by_worker import Saved, Split
from global_draws import draw, generators, seeded
from pairwise import mostly_soak
from torch.utils.data import IterableDataset, get_worker_info
from worker_pids import worker_pids

import penstock
from penstock import Loader
from penstock._streams import worker_shares

LANES = 4
LENGTHS = [90, 70, 80, 60]


def fork(workers):
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


SPAWNED = {"num_workers": 2, "multiprocessing_context": "spawn"}


def in_lanes(data, **words):
    return Loader.from_dataset(data, **{"lanes": LANES, "batch_size": 8, "collate_fn": list, "seed": 3, **words})


def endless(data, **words):
    stream = penstock.Stream(data, lanes=LANES, epoch_size=sum(LENGTHS), bookmarks=words.pop("bookmarks", True))
    return Loader.from_dataset(stream, **{"batch_size": 8, "collate_fn": list, "seed": 3, **words})


WAYS = [in_lanes, endless]


def read(loader, n=600):
    """The first ``n`` items, over epochs."""
    return [*islice((item for _ in range(3) for batch in loader for item in batch), n)]


class Looks(Split):
    """What is found at each item, without drawing; from number ``quiet`` of a share on, every other item draws."""

    def __init__(self, lengths, quiet=10**9):
        super().__init__(lengths)
        self.quiet = quiet

    def __iter__(self):
        for number, item in enumerate(self.own()):
            found = get_worker_info().seed, torch.initial_seed(), first_words()
            yield item, found, draw() if number >= self.quiet and number % 2 else None


def first_words():
    """Of the states of NumPy and Python, as many a program takes for a seed."""
    return int(np.random.get_state()[1][0]), random.getstate()[1][0]


@pytest.mark.parametrize("quiet", [10**9, 0, 21], ids=["never draws", "draws", "draws late"])
@pytest.mark.parametrize("way", WAYS)
def test_while_a_share_is_read_the_seeds_stay(way, quiet):
    """Seen to fail: each of the seeds, with items that are seeded one by one; torch's, once an item has drawn; with a
    hash for each worker; and with one number for all passes."""
    with way(Looks(LENGTHS, quiet)) as loader:
        found = read(loader)
    assert len({item for item, _, _ in found}) == len(found)
    bases, states = {}, {}
    for number, ((address, worker), (seed, initial, words), drawn) in enumerate(found):
        assert seed == initial, number
        pass_ = address // 1000
        assert bases.setdefault(pass_, seed - worker) == seed - worker, number
        if (pass_, worker) not in states or not states[pass_, worker][1]:
            words_before, _ = states.setdefault((pass_, worker), (words, False))
            assert words == words_before, number
            states[pass_, worker] = words, drawn is not None
    assert len({*bases.values()}) == len(bases) > 1
    assert len({words for words, _ in states.values()}) == len(states)
    assert all(0 <= base < 2**62 for base in bases.values())
    draws = [drawn for _, _, drawn in found if drawn is not None]
    assert len({*draws}) == len(draws)


@pytest.mark.parametrize("quiet", [10**9, 0, 21], ids=["never draws", "draws", "draws late"])
@pytest.mark.parametrize(
    ("way", "how"),
    mostly_soak(
        ((way, how) for way in WAYS for how in [fork(1), fork(2), fork(3), SPAWNED]),
        [(in_lanes, fork(2)), (endless, fork(3))],
    ),
)
def test_any_number_of_processes_finds_the_same(way, how, quiet):
    """Seen to fail: items that are no longer seeded once 64 in a row have drawn nothing in a process."""
    seeded(1)
    with way(Looks(LENGTHS, quiet)) as loader:
        whole = read(loader)
    seeded(2)
    with way(Looks(LENGTHS, quiet), **how) as loader:
        assert read(loader) == whole


class ByFile(Split):
    """Each file has a generator of its own, made of torch's seed when its turn comes."""

    def __iter__(self):
        for record, worker in self.own():
            rng = random.Random(torch.initial_seed() + record // 10)
            yield record, worker, rng.random(), first_words()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("before", "after"),
    mostly_soak([(before, after) for before in range(4) for after in range(4) if before != after], [(2, 0), (0, 2)]),
)
def test_resumed_in_the_middle_of_a_pass_with_other_processes(way, before, after):
    """Seen to fail: a state of 2 processes, loaded with 0, gave other items."""
    with way(ByFile(LENGTHS)) as loader:
        whole = read(loader)
    with way(ByFile(LENGTHS), **fork(before)) as loader:
        found = [item for batch in islice(iter(loader), 21) for item in batch]
        state = loader.state_dict()
    with way(ByFile(LENGTHS), **fork(after)) as loader:
        loader.load_state_dict(state)
        assert found + read(loader, len(whole) - len(found)) == whole


@pytest.mark.slow
def test_a_process_that_is_killed_in_the_middle_of_a_pass_changes_nothing():
    """Seen to fail as above: the new process seeded its first items again, as the old one no longer did."""
    with in_lanes(ByFile(LENGTHS)) as loader:
        whole = [*loader]
    with in_lanes(ByFile(LENGTHS), **fork(2)) as loader:
        batches = iter(loader)
        found = [*islice(batches, 20)]
        os.kill(worker_pids()[0], signal.SIGKILL)
        assert [*found, *batches] == whole


class ShuffledAlike(IterableDataset):
    """Shuffles by the seed that all workers have in common, in the same way in each of them, and takes every n-th."""

    def __init__(self, base):
        self.base = base
        self.found = None  # by a ``worker_init_fn``

    def __iter__(self):
        info = get_worker_info()
        items = random.Random(self.base() if self.found is None else self.found).sample(range(120), 120)
        yield from items[info.id :: info.num_workers]


def of_info():
    return get_worker_info().seed - get_worker_info().id


def of_torch():
    return torch.initial_seed() - get_worker_info().id


def no_seed():
    raise AssertionError


def backed_out(worker):
    """As Lightning's ``pl_worker_init_function`` finds the base seed."""
    get_worker_info().dataset.found = torch.initial_seed() - worker
    seeded(worker)


BASES = [(of_info, None), (of_torch, None), (no_seed, backed_out)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("base", "init"), BASES, ids=["info", "torch", "worker_init_fn"])
def test_workers_that_shuffle_by_the_base_seed_lose_and_repeat_nothing(base, init, workers):
    """In another order in each epoch. Seen to fail: 85 of 120 records, others twice."""
    data = ShuffledAlike(base)
    before = generators()
    with in_lanes(data, worker_init_fn=init, **fork(workers)) as loader:
        epochs = [[item for batch in loader for item in batch] for _ in range(3)]
    assert [sorted(items) for items in epochs] == [[*range(120)]] * 3
    assert len({*map(tuple, epochs)}) == 3
    assert generators() == before


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("base", [of_info, of_torch])
def test_ranks_that_shuffle_by_the_base_seed_lose_and_repeat_nothing(base, ranks):
    """All ranks have the base seed in common too, and each lane belongs to one of them. Seen to fail: each record came
    0 to 4 times."""
    read = []
    for rank in range(ranks):
        stream = penstock.Stream(ShuffledAlike(base), lanes=LANES, epoch_size=120)
        with Loader.from_dataset(
            stream, 6, collate_fn=list, rank=rank, world_size=ranks, seed=3, num_workers=0
        ) as loader:
            read.append([[item for batch in loader for item in batch] for _ in range(2)])
    for epoch in range(2):
        assert sorted(item for of_rank in read for item in of_rank[epoch]) == [*range(120)]


def test_another_seed_of_the_loader_is_another_base_seed():
    """Seen to fail with a base seed of the pass alone."""
    found = set()
    for seed in range(4):
        with in_lanes(Looks(LENGTHS), seed=seed) as loader:
            found.add(next(iter(loader))[0][1])
    assert len(found) == 4


class Normal(Split):
    """Draws one normal number of NumPy for each item, which keeps a second one for the next call."""

    def __iter__(self):
        for item in self.own():
            yield item, np.random.standard_normal()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", [0, 1])
def test_a_deviate_that_numpy_keeps_belongs_to_who_drew_it(way, kept):
    """Seen to fail: the loop got one that the dataset had drawn, and the dataset one of the loop's."""
    seeded(5)
    np.random.standard_normal(kept)
    before = generators()
    words = {"batch_size": None, "collate_fn": None}  # nothing else draws, so nothing else restores the generators
    with way(Normal(LENGTHS), **words) as loader:
        whole = []
        for item in islice(iter(loader), 100):
            whole.append(item)
            assert generators() == before
    seeded(6)
    np.random.standard_normal(1 - kept)
    with way(Normal(LENGTHS), **words) as loader:
        assert [*islice(iter(loader), 100)] == whole
    assert len({number for _, number in whole}) == 100


class SavedLooks(Saved):
    """Has a state, looks at the generators, and draws for every third item from ``quiet`` on."""

    quiet = 10**9

    def __iter__(self):
        for item in super().__iter__():
            found = torch.initial_seed(), first_words()
            yield item, found, draw() if self.at > self.quiet and not self.at % 3 else None


class SavedDraws(SavedLooks):
    quiet = 12


@pytest.mark.parametrize("kind", [SavedLooks, SavedDraws])
@pytest.mark.parametrize("way", WAYS)
def test_a_state_of_the_dataset_knows_whether_something_drew_before_it(tmp_path, monkeypatch, kind, way):
    """Seen to fail with a mark without that: items behind it were seeded as if nothing had drawn."""
    monkeypatch.setattr(worker_shares, "LEAST_S", 0.0)
    monkeypatch.setattr(worker_shares, "SHARE_OF_TIME", float("inf"))
    with way(kind(LENGTHS), bookmarks=tmp_path / "other") as loader:
        whole = read(loader)
    log = tmp_path / "log"
    with way(kind(LENGTHS), bookmarks=tmp_path / "marks") as loader:
        found = [item for batch in islice(iter(loader), 20) for item in batch]
        state = loader.state_dict()
    with way(kind(LENGTHS, log), bookmarks=tmp_path / "marks") as loader:
        loader.load_state_dict(state)
        assert found + read(loader, 40) == whole[:200]
    assert len(log.read_text().splitlines()) < 120, "it was read again from the beginning"


class DrawsForItsState(SavedLooks):
    def state_dict(self):
        draw()
        return super().state_dict()


def test_draws_of_a_state_dict_are_no_draws_of_an_item(tmp_path, monkeypatch):
    """Seen to fail: the rest of the batch was read with what it had left."""
    monkeypatch.setattr(worker_shares, "LEAST_S", 0.0)
    monkeypatch.setattr(worker_shares, "SHARE_OF_TIME", float("inf"))
    with in_lanes(DrawsForItsState(LENGTHS), bookmarks=tmp_path) as loader:
        found = read(loader, 300)
    assert len({(worker, seeds) for (_, worker), seeds, _ in found}) == LANES


class DrawsNothing(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, 40, info.num_workers)


def test_nothing_is_said_of_a_stream_that_draws_nothing(monkeypatch, caplog):
    """Seen to fail: the seeds of the share, in which worker 0 is begun for comparison, were taken for draws."""
    monkeypatch.setattr("penstock._errors.first_time.said", set())
    with Loader.from_dataset(penstock.Stream(DrawsNothing(), lanes=2, epoch_size=40), batch_size=4) as loader:
        assert [batch.tolist() for batch in loader] == [[*range(n, n + 4)] for n in range(0, 40, 4)]
    assert caplog.messages == []
