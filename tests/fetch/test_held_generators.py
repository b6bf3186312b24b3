"""Generators that the user's objects hold: a sample draws the same from them whoever loads it, and their owner's states
stay as they were.

*Alone* is the reference: each sample is loaded by a new task over a new dataset, so that no other sample can have moved
a generator.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import time
import warnings
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, get_worker_info

from penstock import Loader
from penstock._fetch import held_generators
from penstock._fetch.fetch_task import FetchTask
from penstock._fetch.held_generators import HeldGenerators
from penstock._random.global_rng import global_rngs_kept
from penstock._workers.pool import IDLE
from penstock.nodes import Batcher, Cycler, Fetch, Indices, Mapper, ParallelMapper, Prefetcher, Sampler
from penstock.orders import SequentialOrder

N = 48
BATCH = 8


def numpys(kind):
    return lambda: np.random.Generator(kind(7))


KINDS = {  # how to make it, and how to draw; each draw but the first of a sample may use what the one before kept
    "random": (lambda: random.Random(7), lambda rng: rng.random()),
    "a deviate of random": (lambda: random.Random(7), lambda rng: rng.gauss(0, 1)),
    "PCG64": (numpys(np.random.PCG64), lambda rng: rng.random()),
    "half a word of PCG64": (numpys(np.random.PCG64), lambda rng: float(rng.integers(2**20, dtype=np.uint32))),
    "half a word of PCG64DXSM": (numpys(np.random.PCG64DXSM), lambda rng: float(rng.integers(2**20, dtype=np.uint32))),
    "half a word of Philox": (numpys(np.random.Philox), lambda rng: float(rng.integers(2**20, dtype=np.uint32))),
    "half a word of SFC64": (numpys(np.random.SFC64), lambda rng: float(rng.integers(2**20, dtype=np.uint32))),
    "MT19937": (numpys(np.random.MT19937), lambda rng: rng.random()),
    "a deviate of RandomState": (lambda: np.random.RandomState(7), lambda rng: rng.randn()),
    "a deviate of RandomState over PCG64": (lambda: np.random.RandomState(np.random.PCG64(7)), lambda rng: rng.randn()),
    "a bare PCG64": (lambda: np.random.PCG64(7), lambda rng: float(rng.random_raw() % 2**20)),
    "torch": (lambda: torch.Generator().manual_seed(7), lambda rng: torch.rand((), generator=rng).item()),
    "a deviate of torch": (lambda: torch.Generator().manual_seed(7), lambda rng: torch.randn((), generator=rng).item()),
}


class Drawing:
    """Sample i is (i, what it draws)."""

    def __init__(self, n=N):
        self.n = n
        self.rng = np.random.default_rng(7)
        self.calls = 0

    def __len__(self):
        return self.n

    def draw(self):
        return self.rng.random()

    def __getitem__(self, index):
        self.calls += 1
        return index, self.draw()


class OfEachKind(Drawing):
    """Holds a generator of each kind, and has used it once, so that some keep a deviate, or half a word."""

    def __init__(self):
        super().__init__()
        self.rngs = {kind: make() for kind, (make, _) in KINDS.items()}
        self.draws()

    def draws(self):
        return [draw(self.rngs[kind]) for kind, (_, draw) in KINDS.items()]

    def __getitem__(self, index):
        return index, *self.draws()


class Lazily(Drawing):
    """Makes its generator when it first draws, in whatever process that is."""

    def __init__(self, n=N):
        super().__init__(n)
        del self.rng

    def draw(self):
        if not hasattr(self, "rng"):
            self.rng = np.random.default_rng()
        return super().draw()


class PerProcess(Drawing):
    """Replaces its generator in each process, as one does who knows that copies draw alike."""

    pid = None

    def draw(self):
        if self.pid != os.getpid():
            self.pid, self.rng = os.getpid(), np.random.default_rng()
        return super().draw()


class PerEpoch(Drawing):
    """Makes what holds a generator anew."""

    def set_epoch(self, epoch):
        self.noise = Noise()

    def draw(self):
        return self.noise(super().draw())


class Mixture(Drawing):
    """Holds generators in many places, all seeded alike."""

    def __init__(self):
        super().__init__()
        self.transforms = [Noise(), partial(noise, rng=np.random.default_rng(7)), closed(np.random.default_rng(7))]
        self.by_name = {"a": np.random.default_rng(7)}

    def __getitem__(self, index):
        draws = [rng.random() for rng in (self.rng, self.by_name["a"])]
        return index, *draws, *(transform(0.0) for transform in self.transforms)


class Noise:
    def __init__(self):
        self.rng = np.random.default_rng(7)

    def __call__(self, value):
        return value + self.rng.random()

    def of_all(self, values):
        return [self(value) for value in values]


def noise(value, rng):
    return value + rng.random()


def closed(rng):
    return Closed(rng)  # a class, because a closure cannot be sent to a spawned process


class Closed:
    __slots__ = ("rng",)

    def __init__(self, rng):
        self.rng = rng

    def __call__(self, value):
        return value + self.rng.random()


def rows(batches):
    return [list(row) for batch in batches for row in zip(*(column.tolist() for column in batch), strict=True)]


def indices(values, epoch=0):
    return Indices(epoch, np.array(values), np.array(values))


def alone(make, n=N, epoch=0):
    return rows(FetchTask(Fetch(make()), 3, True)(indices([value], epoch), [IDLE]) for value in range(n))


def read(dataset, **words):
    with Loader.from_dataset(dataset, words.pop("batch_size", BATCH), seed=3, **words) as loader:
        return rows(loader)


WORKERS = [{}, {"num_workers": 3, "multiprocessing_context": "fork"}]


@pytest.mark.parametrize("make", [OfEachKind, Mixture, Lazily, PerProcess, PerEpoch])
def test_a_sample_draws_the_same_whoever_loads_it(make):
    """Of each kind, wherever the generator is, and whenever it was made. Seen to fail: `HeldGenerators.seed` that does
    nothing; for the kinds with a deviate or half a word, a seed that keeps it; a first sample that is not loaded again.
    """
    expected = alone(make)
    for words in WORKERS:
        assert read(make(), **words) == expected


@pytest.mark.soak
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("make", [Mixture, PerEpoch])
def test_and_in_an_interpreter_for_each_worker(make, context):
    assert read(make(), num_workers=1, multiprocessing_context=context) == alone(make)


def test_in_every_epoch():
    """Seen to fail: `_set_epoch` without `expire`."""
    with Loader.from_dataset(PerEpoch(), BATCH, seed=3) as loader:
        for epoch in range(3):
            assert rows(loader) == alone(PerEpoch, epoch=epoch)


def test_no_two_draw_alike():
    """Although all were seeded with 7. Seen to fail: a key without the path."""
    for _, *draws in read(Mixture()):
        assert len(set(draws)) == len(draws) == 5
    assert len({row[1] for row in read(Drawing())}) == N


def test_two_generators_over_one_source_are_one():
    """Seen to fail: compared by the generators, so that the second began where the first had."""

    class Twice(Drawing):
        def __init__(self):
            super().__init__()
            self.other = np.random.Generator(self.rng.bit_generator)

        def __getitem__(self, index):
            return index, self.rng.random(), self.other.random()

    task = FetchTask(Fetch(Twice()), 3, True)
    assert rows([task(indices(range(9)), [IDLE])]) == alone(Twice, 9)
    assert [one.where.path for one in task.generators.found] == ["dataset.rng"]


def test_the_first_batch_in_parts_and_any_order_of_tasks():
    """Seen to fail: `_row_by_row` that seeds the first row only."""
    expected = alone(Drawing)
    task = FetchTask(Fetch(Drawing()), 3, True)
    for start in (40, 8, 24, 8):
        assert rows([task(indices(range(start, start + 8)), [IDLE])]) == expected[start : start + 8]
    parts = task.parts(indices(range(8)), 3)
    assert [list(row) for part in parts for row in task(part, [IDLE])] == expected[:8]


def test_a_substitute_has_the_numbers_of_its_sample():
    """Seen to fail: ``reseed`` of the global generators only."""

    class Failing(Drawing):
        def __getitem__(self, index):
            index, draw = super().__getitem__(index)
            if index % 5 == 0:
                raise ValueError(index)
            return index, draw

    dataset = Failing()
    assert read(dataset, on_error=lambda exc, index, epoch, position: (index, dataset.draw())) == alone(Drawing)


def test_a_collate_fn_has_its_own_numbers():
    """By the first position of its batch. Seen to fail: `_seed_collate` without them, where they went on from those of
    the last sample."""

    class Collate(Noise):
        def __call__(self, samples):
            return torch.tensor([one[0] for one in samples]), torch.tensor(
                [self.rng.random()] * len(samples), dtype=torch.float64
            )

        def transform(self, sample):
            self.rng.random()
            return sample

    runs = [read(Drawing(), collate_fn=Collate(), **words) for words in WORKERS]
    assert runs[0] == runs[1]
    assert len({row[1] for row in runs[0]}) == N // BATCH
    collate = Collate()
    assert read(Drawing(), collate_fn=collate, transform=collate.transform) == read(
        Drawing(), collate_fn=collate, transform=list
    )


def test_samples_loaded_together():
    """Seeded by the first position, as the global generators. Seen to fail: `_begin` without them."""

    class Together(Drawing):
        def __getitems__(self, wanted):
            return [self[index] for index in wanted]

    runs = [read(Together(), **words) for words in WORKERS]
    assert runs[0] == runs[1]
    assert runs[0][::BATCH] == alone(Drawing)[::BATCH]


def test_a_function_that_is_mapped():
    """Seen to fail: `FunctionTask` that seeds nothing."""

    class Function(Noise):
        def __call__(self, wanted):
            return [(index, self.rng.random()) for index in wanted]

    def build(workers):
        mapped = Batcher(Cycler(Sampler(SequentialOrder(N))), BATCH)
        if workers is None:
            return Loader(Mapper(mapped, Function(), seed=3))
        return Loader(
            ParallelMapper(mapped, Function(), workers, method="process", multiprocessing_context="fork", seed=3)
        )

    runs = []
    for workers in (None, 0, 2):
        with build(workers) as loader:
            runs.append(list(loader))
    assert runs[0] == runs[1] == runs[2]
    assert len({draw for batch in runs[0] for _, draw in batch}) == N


def test_an_item_without_an_address_is_named(caplog):
    """Nothing can seed its draws. Seen to fail: only the global generators compared."""
    held = Noise()
    mapped = Mapper(Mapper(Cycler(Sampler(SequentialOrder(8))), int), held)
    with Loader(Mapper(Prefetcher(mapped, 2), held)) as loader:
        assert len(list(loader)) == 8
    assert "seems to draw from function.rng" in caplog.text


# Their owner.


def test_inline_the_states_stay_as_they_were():
    """To the bit, also after an exception. Seen to fail: `run` without ``kept``."""

    class Failing(OfEachKind):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            if index == 20:
                raise ValueError(index)
            return sample

    dataset, same = Failing(), OfEachKind()
    before = states(dataset)
    with Loader.from_dataset(dataset, BATCH) as loader:
        batches = iter(loader)
        for number in range(N // BATCH):
            with pytest.raises(ValueError, match="20") if number == 20 // BATCH else nullcontext():
                next(batches)
            assert states(dataset) == before
    assert dataset.draws() == same.draws()


def states(dataset):
    return HeldGenerators(0, {"dataset": dataset}, False).states()


@pytest.mark.slow
def test_ctrl_c_at_any_line_leaves_the_states():
    """Seen to fail: without ``also_kept``."""
    dataset = Drawing(16)
    place, raised = 0, True
    while raised:
        raised, left = False, place
        before = states(dataset)

        def trace(frame, event, argument):
            nonlocal left, raised
            if frame.f_code.co_filename != held_generators.__file__:
                return None
            if event == "line" and frame.f_code.co_name in ("run", "seed", "kept", "restore"):
                left -= 1
                if left == -1:
                    raised = True
                    raise KeyboardInterrupt
            return trace

        with Loader.from_dataset(dataset, 8, seed=3) as loader:
            batches = iter(loader)
            outer = sys.gettrace()
            sys.settrace(trace)
            try:
                next(batches)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(outer)
            assert states(dataset) == before, place
        place += 1
    assert place > 20


class Two(Drawing):
    def __init__(self, generator):
        super().__init__()
        self.mine = self.other = generator


def test_what_a_sampler_holds_too_is_left_alone():
    """A sampler usually holds the dataset as well, whose other generators are seeded. Seen to fail: `leave` that does
    nothing; one without ``data``."""

    def found(dataset, **words):
        with Loader.from_dataset(dataset, BATCH, **words) as loader:
            next(iter(loader))
            return [one.where.path for one in loader.root.executor.generators.found]

    generator = torch.Generator().manual_seed(7)
    dataset = Two(generator)
    assert found(dataset) == ["dataset.rng", "dataset.mine"]
    assert found(dataset, sampler=RandomSampler(dataset, generator=generator)) == ["dataset.rng"]
    assert found(dataset, generator=generator) == ["dataset.rng"]
    assert found(dataset, sampler=RandomSampler(dataset)) == ["dataset.rng", "dataset.mine"]
    with Loader.from_dataset(
        dataset, BATCH, generator=generator, num_workers=1, multiprocessing_context="fork"
    ) as loader:
        in_a_worker = pickle.loads(pickle.dumps(loader.root.executor.generators))
    assert [one.where.path for one in in_a_worker.look_again()] == ["dataset.rng"]


def test_the_global_ones_are_not_among_them():
    """Seen to fail: each without its exception in `ways_of`."""

    class Global(Drawing):
        def __init__(self):
            self.n = N
            self.held = [
                random._inst,
                np.random.mtrand._rand,
                np.random.get_bit_generator(),
                torch.default_generator,
                random.SystemRandom(),
            ]

    assert states(Global()) == {}


@pytest.mark.parametrize("make", [Drawing, PerEpoch])
def test_off(make):
    """Seen to fail: ``on`` ignored."""
    dataset, other = make(), make()
    other.set_epoch(0) if make is PerEpoch else None
    assert read(dataset, seed_global_rngs=False) == [[k, other.draw()] for k in range(N)]


# Found late, or not at all.


@pytest.mark.parametrize(("make", "calls"), [(Drawing, N + 1), (Lazily, N + 2), (PerProcess, N + 2)])
def test_the_first_sample_is_loaded_again(make, calls):
    """And a third time if one appeared, which was not seeded. Seen to fail: each batch's first sample."""
    dataset = make()
    read(dataset)
    assert dataset.calls == calls
    read(dataset, seed_global_rngs=False)
    assert dataset.calls == calls + N


def test_one_that_is_made_for_each_sample_is_left_alone():
    class PerSample(Drawing):
        def draw(self):
            self.rng = np.random.default_rng(7)
            return super().draw()

    dataset = PerSample()
    assert {row[1] for row in read(dataset)} == {np.random.default_rng(7).random()}
    assert dataset.calls == N + 2


def test_a_worker_init_fn_may_make_one():
    """Seen to fail: looked for when the work is made, in the parent."""

    def init(worker):
        get_worker_info().dataset.rng = np.random.default_rng(worker)

    assert read(Drawing(), num_workers=2, multiprocessing_context="fork", worker_init_fn=init) == alone(Drawing)


def test_what_changes_the_order_of_the_epoch_is_seeded_too():
    """Workers that call ``set_epoch`` after other samples permute alike. Seen to fail: `_set_epoch` that does not
    seed."""

    class Permuting(Drawing):
        def set_epoch(self, epoch):
            self.order = self.rng.permutation(1000)

        def __getitem__(self, index):
            return index, self.order[0] + self.draw()

    def epochs(**words):
        with Loader.from_dataset(Permuting(), BATCH, seed=3, **words) as loader:
            return [rows(loader) for _ in range(3)]

    runs = [epochs(**words) for words in WORKERS]
    assert runs[0] == runs[1]


def test_one_that_cannot_be_seeded_is_named(caplog):
    """Seen to fail: without `_can_seed`, where every batch raised."""

    class Stubborn(random.Random):
        def seed(self, *_):
            if hasattr(self, "begun"):
                raise NotImplementedError("no seed")
            self.begun = True

    dataset = Drawing()
    dataset.rng = Stubborn()
    read(dataset)
    assert caplog.text.count("dataset.rng, a Stubborn, cannot be seeded") == 1


# Threads.


class Slow(Lazily):
    """Each batch sleeps a little, so that the loop waits."""

    def __init__(self, begins=0):
        super().__init__(400)
        self.begins = begins

    def __getitem__(self, index):
        if index % BATCH == 0:
            time.sleep(0.001)
        return index, self.draw() if index >= self.begins else 0.0


def said_by(dataset, step=lambda: None, **words):
    with (
        Loader.from_dataset(dataset, BATCH, num_workers=2, method="thread", **words) as loader,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in loader:
            step()
    return [str(one.message) for one in caught]


def test_draws_in_threads_are_said_once():
    """Also if they begin late, and of one that is made late. Seen to fail: `looker` without ``others``; states looked
    for only once.
    """
    late = Slow(200)
    late.draw()
    for dataset in (late, Slow()):
        (said,) = said_by(dataset)
        assert ".__getitem__ drew from a shared generator in worker threads (dataset.rng)." in said
        assert "penstock.sample().rng" in said
        assert 'method="process"' in said


def test_both_kinds_are_said_together():
    """Seen to fail: names of `GENERATORS` only."""
    dataset = Slow()
    dataset.draw()
    (said,) = said_by(dataset, transform=lambda one: (*one, random.random(), dataset.draw()))
    both = "drew from the global random numbers and from a shared generator in worker threads (random, dataset.rng)."
    assert both in said


def test_threads_that_draw_nothing_are_left_in_peace():
    """The loop may draw from what the dataset holds. Seen to fail: a look after the thread has left its place."""
    dataset = Slow(begins=1000)
    assert said_by(dataset, dataset.draw) == []
    assert said_by(Slow(), seed_global_rngs=False) == []


def test_a_reader_thread_seeds_them_and_puts_them_back():
    """There is one thread that loads. Seen to fail: `InlineWork` whose unseeded task looks for none."""
    dataset = Drawing()
    before = states(dataset)
    mapped = ParallelMapper(Batcher(Cycler(Sampler(SequentialOrder(N))), BATCH), Fetch(dataset), 0, seed=3)
    with Loader(Prefetcher(mapped, 2)) as loader, global_rngs_kept():
        assert rows(loader) == alone(Drawing)
    assert states(dataset) == before
