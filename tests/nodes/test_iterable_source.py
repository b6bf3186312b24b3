"""An iterable that draws from the global generators: its draws and the user's draws do not affect each other."""

from __future__ import annotations

import json
import random
import re
from itertools import islice

import pytest
import torchdata.nodes
from global_draws import draw, generators, seeded
from resumable import Resumable
from torch.utils.data import IterableDataset

from penstock import GraphError, Loader, SampleError, SourceError
from penstock._random.global_rng import global_rngs_kept
from penstock.nodes import Batcher, Cycler, IterableSource, Mapper, Prefetcher
from penstock.testing import assert_resumes_everywhere

N = 6


@pytest.fixture(autouse=True)
def _generators_kept():
    with global_rngs_kept():
        yield


class Draws(IterableDataset):
    """Draws for each item."""

    def __iter__(self):
        for _ in range(N):
            yield draw()


class DrawsAtOnce(IterableDataset):
    """Draws in ``set_epoch``, in ``__iter__``, and for each item."""

    def set_epoch(self, epoch):
        self.told = (epoch, *draw())

    def __iter__(self):
        begun = draw()
        return ((*self.told, *begun, *draw()) for _ in range(N))


def loaded(dataset, epochs=2, **options):
    """The data of some epochs, and the user's draws after each batch."""
    seeded()
    data, mine = [], []
    with Loader.from_dataset(dataset, **{"batch_size": 2, "collate_fn": list, **options}) as loader:
        for _ in range(epochs):
            for batch in loader:
                data += batch
                mine.append(draw())
    return data, mine


every_dataset = pytest.mark.parametrize(
    "make",
    [Draws, DrawsAtOnce, lambda: Resumable(N, lambda at: draw()), lambda: torchdata.nodes.IterableWrapper(Draws())],
    ids=["plain", "told", "stateful", "node"],
)


@every_dataset
@pytest.mark.parametrize(("workers", "size"), [(0, 2), (2, 2), (0, 5)])
def test_neither_the_data_nor_the_users_draws_depend_on_workers_and_batch_size(make, workers, size):
    """Each item is seeded, not each block. Seen to fail: both differed, because the iterable is read ahead among the
    user's draws."""
    data, mine = loaded(make(), num_workers=workers, batch_size=size)
    assert data == loaded(make())[0]
    assert len(set(data)) == 2 * N
    seeded()
    assert mine == [draw() for _ in mine]


@pytest.mark.filterwarnings("ignore:Draws.* has no state_dict")
@every_dataset
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_resuming_draws_the_same(make, steps):
    """By reading again, and from its own state. Seen to fail: the rest of the epoch was drawn anew."""
    want = loaded(make())[0]
    with Loader.from_dataset(make(), batch_size=2, collate_fn=list) as loader:
        got = [item for batch in islice(loader, steps) for item in batch]
        got += [item for batch in islice(loader, steps - 3) for item in batch] if steps > 3 else []
        saved = json.loads(json.dumps(loader.state_dict()))
    seeded(99)
    with Loader.from_dataset(make(), batch_size=2, collate_fn=list) as loader:
        loader.load_state_dict(saved)
        for _ in range(2 if steps <= 3 else 1):
            got += [item for batch in loader for item in batch]
    assert got[: len(want)] == want


def test_the_function_behind_draws_other_numbers_under_the_same_seed():
    """Seen to fail when the iterable's numbers were keyed as a sample's are: the same three came twice."""
    graph = Mapper(Cycler(IterableSource(Draws(), seed=5)), lambda drawn: (drawn, draw()), seed=5)
    with Loader(graph) as loader:
        assert all(a != b for pair in loader for a, b in zip(*pair, strict=True))


class Breaks(IterableDataset):
    """Draws, and raises: in ``set_epoch``, in ``__iter__``, or at its third item."""

    def __init__(self, where):
        self.where = where

    def step(self, place):
        draw()
        if self.where == place:
            raise KeyError(place)

    def set_epoch(self, epoch):
        self.step("set_epoch")

    def __iter__(self):
        self.step("iter")
        for k in range(N):
            self.step(k)
            yield k


@pytest.mark.parametrize("where", ["set_epoch", "iter", 2])
def test_the_users_generators_are_the_same_to_the_bit_after_an_exception(where):
    """Seen to fail: each draw of the iterable was one of the user's."""
    seeded()
    before = generators()
    loader = Loader.from_dataset(Breaks(where), batch_size=4)
    with loader, pytest.raises(KeyError):
        list(loader)
    assert generators() == before


def test_seeding_may_be_switched_off():
    """Seen to fail: no such word."""
    for build in (
        lambda: Loader.from_dataset(Draws(), batch_size=None, seed_global_rngs=False),
        lambda: Loader(IterableSource(Draws(), seed_global_rngs=False)),
    ):
        seeded()
        with build() as loader:
            data = list(map(tuple, loader))
        seeded()
        assert data == [draw() for _ in range(N)]


# In another thread.


class Looks(IterableDataset):
    """Yields the states of the generators, and draws nothing."""

    def __iter__(self):
        for _ in range(N):
            yield generators()


@pytest.mark.parametrize("wrap", [Prefetcher, lambda node: Prefetcher(Batcher(node, 2))])
def test_in_a_background_thread_the_generators_are_left_alone(wrap, caplog):
    """Because seeding would disturb the consumer's own draws. Seen to fail without `reads_ahead`."""
    seeded()
    before = generators()
    with Loader(wrap(Cycler(IterableSource(Looks())))) as loader:
        items = list(loader)
    assert generators() == before
    assert all(item == before for batch in items for item in (batch if isinstance(batch, list) else [batch]))
    assert caplog.records == []


@pytest.mark.parametrize("wrap", [Prefetcher, lambda node: Prefetcher(Batcher(node, 2))])
def test_drawing_in_a_background_thread_is_said_once(wrap, caplog):
    """Seen to fail: nothing was said."""
    with Loader(wrap(Cycler(IterableSource(Draws())))) as loader:
        for _ in range(2):
            list(loader)
    assert [(record.name, record.levelname) for record in caplog.records] == [("penstock", "WARNING")]
    assert "Draws draws from the global random numbers and is read in a background thread" in caplog.text


class Once(IterableDataset):
    """It can be read only once, and does not look like it."""

    def __init__(self):
        self.items = iter(range(6))

    def __iter__(self):
        yield from self.items


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "method": "thread"}])
def test_an_epoch_that_an_iterable_cannot_give_again_is_an_error(workers):
    """Seen to fail: the second loader, and the next epoch, were empty, with a warning."""
    stream = Once()
    with Loader.from_dataset(stream, 2, collate_fn=list, **workers) as loader:
        start = loader.state_dict()
        assert list(loader) == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises((GraphError, SourceError)) as caught:  # read ahead by workers, it was raised earlier
            list(loader)
        why = str(caught.value.__cause__ or caught.value)
        assert re.search(
            "Once yielded no item in epoch 1, although .*read only once.*Create its iterator in __iter__", why
        )
    with Loader.from_dataset(stream, 2, collate_fn=list, **workers) as loader:
        loader.load_state_dict(start)
        with pytest.raises(GraphError, match="Once yielded no item in epoch 0"):
            list(loader)


# Generators of its own.


class Shuffles(IterableDataset):
    """Its generator shuffles each pass, and draws for each item."""

    def __init__(self):
        self.rng = random.Random(7)

    def generator(self):
        return self.rng

    def __iter__(self):
        rng = self.generator()
        order = list(range(N))
        rng.shuffle(order)
        for k in order:
            yield k, rng.random()


class ShufflesAtOnce(Shuffles):
    def __iter__(self):
        return iter(list(super().__iter__()))


class ShufflesLazily(Shuffles):
    def __init__(self):
        pass

    def generator(self):
        if not hasattr(self, "rng"):
            self.rng = random.Random(7)
        return self.rng


class ShufflesAnew(Shuffles):
    def generator(self):
        self.rng = random.Random(7)
        return self.rng


class ShufflesTold(ShufflesAtOnce):
    def set_epoch(self, epoch):
        self.noise = self.rng.random()

    def __iter__(self):
        return ((*item, self.noise) for item in super().__iter__())


class HasPasses(ShufflesLazily):
    """Only its iterators have a state."""

    def __iter__(self):
        return Pass(list(super().__iter__()))


class Pass:
    def __init__(self, items):
        self.items, self.at = items, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class HasAState(Shuffles):
    """Saves its generator itself."""

    def __init__(self):
        super().__init__()
        self.at = 0

    def __iter__(self):
        if not self.at:
            self.before = self.rng.getstate()
        self.rng.setstate(self.before)
        items = list(super().__iter__())
        while self.at < N:
            self.at += 1
            yield items[self.at - 1]
        self.at = 0

    def state_dict(self):
        version, words, kept = getattr(self, "before", self.rng.getstate())
        return {"at": self.at, "rng": [version, list(words), kept]}

    def load_state_dict(self, state):
        version, words, kept = state["rng"]
        self.at, self.before = state["at"], (version, tuple(words), kept)
        self.rng.setstate(self.before)


every_shuffle = pytest.mark.parametrize(
    "make",
    [Shuffles, ShufflesAtOnce, ShufflesLazily, ShufflesAnew, ShufflesTold, HasPasses, HasAState],
)


@pytest.mark.filterwarnings("ignore:.* has no state_dict")
@every_shuffle
def test_one_with_its_own_generator_resumes_everywhere(make):
    """Seen to fail: a resume in epoch 1 repeated and lost items, because only the global generators were seeded; for
    one that makes its generator lazily, `made_one` that says False."""
    assert_resumes_everywhere(lambda: Loader.from_dataset(make(), 2, seed=3, collate_fn=list), steps=9)


@every_shuffle
def test_each_pass_has_every_item(make):
    """And the passes differ, except where the user begins anew. Seen to fail: a pass that was begun again without its
    first item."""
    with Loader.from_dataset(make(), 2, collate_fn=list) as loader:
        passes = [[k for batch in loader for k, *_ in batch] for _ in range(3)]
    assert all(sorted(one) == list(range(N)) for one in passes)
    assert len({*map(tuple, passes)}) == (1 if make is ShufflesAnew else 3)


def test_its_owner_goes_on_drawing():
    """Seen to fail: without `HeldGenerators.kept`."""
    dataset, other = Shuffles(), Shuffles()
    with Loader.from_dataset(dataset, 2, collate_fn=list) as loader:
        for _ in range(2):
            for _ in loader:
                assert dataset.rng.random() == other.rng.random()


def test_its_generator_is_left_alone_where_the_global_ones_are():
    """Seen to fail: `StreamRng` whose ``enabled`` does not count for it."""
    dataset, other = Shuffles(), Shuffles()
    with Loader.from_dataset(dataset, N, collate_fn=list, seed_global_rngs=False) as loader:
        assert [batch for _ in range(2) for batch in loader] == [list(other), list(other)]
    dataset, other = Shuffles(), Shuffles()
    with Loader(Prefetcher(Batcher(Cycler(IterableSource(dataset)), N), 1)) as loader:
        assert [[*map(tuple, batch)] for _ in range(2) for batch in loader] == [list(other), list(other)]


class Headless(IterableDataset):
    """Skips the header of a file, which is empty from ``epoch`` on."""

    def __init__(self, epoch):
        self.empty, self.begun = epoch, 0

    def __iter__(self):
        self.begun += 1
        lines = iter(["header", 1, 2] if self.begun <= self.empty else [])
        next(lines)
        return lines


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("batch_size", [2, None])
def test_a_stop_iteration_before_the_first_item_names_the_dataset(batch_size, epoch):
    """Seen to fail: "a node downstream of the Cycler ended"."""
    with Loader.from_dataset(Headless(epoch), batch_size) as loader:
        for _ in range(epoch):
            assert len(list(loader)) == (1 if batch_size else 2)
        with pytest.raises(SampleError, match=r"Headless raised StopIteration before its first item\. Catch it there"):
            list(loader)
