"""torchdata's nodes as sources: the samples of an epoch do not depend on how it was reached."""

from __future__ import annotations

import random
import threading

import pytest
import torch
import torchdata.nodes as tn
from resumable import Resumable
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, Sampler

from penstock import GraphError, Loader, StateMismatch
from penstock.nodes import Batcher, Cycler, IterableSource, SamplerWrapper
from penstock.nodes import Sampler as Sampler_
from penstock.orders import SequentialOrder
from penstock.testing import assert_resumes_everywhere

# The pass of a torchdata node joins its reader thread in a destructor, and the garbage collector may run that in this
# very thread, which cannot be joined.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function _SingleThreadedMapper.__del__:pytest.PytestUnraisableExceptionWarning"
)


N = 7


def sharded(**options):
    return tn.SamplerWrapper(DistributedSampler(range(N), num_replicas=1, rank=0), **options)


class Walks(Resumable):
    """Has its own generator, which continues from epoch to epoch, and no epoch count."""

    def __init__(self) -> None:
        super().__init__(4, self.walked)
        self.rng, self.read = random.Random(3), 0

    def walked(self, at):
        self.read += 1
        return self.rng.randrange(1000)

    def state_dict(self):
        return {"rng": self.rng.getstate(), "at": self.at}

    def load_state_dict(self, state):
        self.rng.setstate(state["rng"])
        self.at = state["at"]


class Passes(Resumable):
    """Counts the passes that it has read to the end."""

    def __init__(self) -> None:
        super().__init__(4, lambda at: 100 * self.epoch + at)
        self.epoch = 0

    def __iter__(self):
        yield from super().__iter__()
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at, "seed": 5, "name": "passes"}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


class EagerOrder(Sampler):
    """Draws its order in ``__iter__``, from the global generator."""

    def __iter__(self):
        return iter(torch.randperm(N).tolist())


def mixed(**options):
    sources = {"a": sharded(), "b": tn.Mapper(sharded(), lambda i: i + 100)}
    return tn.MultiNodeWeightedSampler(sources, {"a": 1.0, "b": 2.0}, seed=4, **options)


def own_generator():
    return tn.SamplerWrapper(RandomSampler(range(N), generator=torch.Generator().manual_seed(1)))


class Held(tn.BaseNode):
    """A user's node, whose source has a name of its own."""

    def __init__(self, held) -> None:
        super().__init__()
        self.held = held

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.held.reset(initial_state and initial_state["held"])

    def next(self):
        return self.held.next()

    def get_state(self):
        return {"held": self.held.state_dict()}


CHAINS = {
    "sampler": sharded,
    "sampler from epoch 5": lambda: sharded(initial_epoch=5),
    "sampler with an updater": lambda: sharded(epoch_updater=lambda epoch: 2 * epoch + 3),
    "mapper": lambda: tn.Mapper(sharded(), lambda i: 2 * i),
    "batcher": lambda: tn.Batcher(tn.Mapper(sharded(), str), 2, drop_last=False),
    "batcher that drops": lambda: tn.Batcher(sharded(), 2),
    "unbatcher": lambda: tn.Unbatcher(tn.Batcher(sharded(), 2, drop_last=False)),
    "weighted": lambda: tn.MultiNodeWeightedSampler({k: tn.IterableWrapper(k * 5) for k in "ab"}, {"a": 1.0, "b": 2.0}),
    "weighted samplers": mixed,
    "weighted samplers, each once": lambda: mixed(stop_criteria="ALL_DATASETS_EXHAUSTED"),
    "random": lambda: tn.SamplerWrapper(RandomSampler(range(N))),
    "random at once": lambda: tn.SamplerWrapper(EagerOrder()),
    "random, with its own generator": own_generator,
    "random, read ahead by threads": lambda: tn.ParallelMapper(own_generator(), int, num_workers=2, method="thread"),
    "random, read ahead, in a node of the user's": lambda: tn.Prefetcher(Held(own_generator()), 2),
    "plain": lambda: tn.IterableWrapper(range(N)),
    "walks": lambda: tn.IterableWrapper(Walks()),
    "passes": lambda: tn.IterableWrapper(Passes()),
    "iterable that walks": Walks,
    "iterable that counts": Passes,
}
FEW = ["sampler with an updater", "batcher that drops", "weighted samplers", "random", "walks", "iterable that counts"]
FEW += [name for name in CHAINS if name.startswith("random,")]


def build(make):
    return Loader.from_dataset(make(), batch_size=None)


def epochs(make, n=5):
    with build(make) as loader:
        return [list(loader) for _ in range(n)]


@pytest.mark.parametrize("name", [name for name in CHAINS if "random" not in name and "iterable" not in name])
def test_an_epoch_reached_by_running_is_torchdatas_own(name):
    loader = tn.Loader(CHAINS[name]())
    assert epochs(CHAINS[name], 3) == [list(loader) for _ in range(3)]


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.soak) for name in CHAINS]
)
def test_foreign_sources_resume_everywhere(name):
    """Seen to fail: at an epoch's boundary, and where a random order was drawn anew, from a generator that a pass
    before had used."""
    assert_resumes_everywhere(
        lambda: Cycler(IterableSource(CHAINS[name]())),
        steps=60 if "weighted" in name else 17 if "ahead" in name else 20,
    )


@pytest.mark.parametrize("name", [name for name in CHAINS if name.startswith("random,")])
def test_an_own_generator_gives_each_epoch_its_order(name):
    """The first is torchdata's. In the same loader too: after a state was loaded, and after a jump. Seen to fail: the
    generator as the last pass had left it."""
    want = epochs(CHAINS[name], 4)
    assert want[0] == list(tn.Loader(CHAINS[name]()))
    assert len({tuple(epoch) for epoch in want}) == 4
    with build(CHAINS[name]) as loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(3)] == want[0][:3]
        state = loader.state_dict()
        assert [list(iterator), list(loader)] == [want[0][3:], want[1]]
        loader.load_state_dict(state)
        assert list(loader) == want[0][3:]
        loader.set_epoch(3)
        assert list(loader) == want[3]
        loader.load_state_dict(state)
        assert [list(loader), list(loader)] == [want[0][3:], want[1]]


class Hesitant(RandomSampler):
    """Draws the order of a pass only when an item of it is asked for, or another generator is given; that would be too
    late."""

    def __init__(self) -> None:
        self.released, self.given, self.late = threading.Event(), 0, False
        super().__init__(range(N), generator=torch.Generator().manual_seed(1))

    @property
    def generator(self):
        return self._generator

    @generator.setter
    def generator(self, generator):
        self._generator, self.given = generator, self.given + 1
        self.released.set()

    def __iter__(self):
        given = self.given
        assert self.released.wait(60)
        self.late |= self.given != given
        yield from super().__iter__()


class Releases(Held):
    """Reads ahead of a `Hesitant`, and releases it."""

    def __init__(self) -> None:
        self.sampler = Hesitant()
        super().__init__(tn.Prefetcher(tn.SamplerWrapper(self.sampler), 2))

    def reset(self, initial_state=None):
        self.sampler.released = threading.Event()
        super().reset(initial_state)

    def next(self):
        self.sampler.released.set()
        return super().next()


def test_a_thread_that_has_not_begun_its_pass_keeps_its_generator():
    """Seen to fail: without the wait for its first item, the thread of the pass before drew from the generator of this
    one."""
    source = Releases()
    with Loader.from_dataset(source, batch_size=None) as loader:
        loader.set_epoch(2)
        assert list(loader) == epochs(own_generator, 3)[2]
    assert not source.sampler.late


def test_an_own_generator_may_be_seeded_until_it_is_read():
    """As torchdata's loader allows. Seen to fail: its state taken when the loader was built."""
    node = own_generator()
    with Loader.from_dataset(node, batch_size=None) as loader:
        node.sampler.generator.manual_seed(7)
        seeded = list(loader)
    again = own_generator()
    again.sampler.generator.manual_seed(7)
    assert seeded == list(tn.Loader(again)) != list(tn.Loader(own_generator()))


def test_a_state_is_refused_over_another_generator():
    """Seen to fail: it loaded, and the rest of the epoch came in another order."""

    def build(seed):
        return Loader.from_dataset(
            tn.SamplerWrapper(RandomSampler(range(N), generator=torch.Generator().manual_seed(seed))), 2
        )

    with build(1) as loader:
        fresh = loader.state_dict()
        iterator = iter(loader)
        next(iterator)
        states = [fresh, loader.state_dict(), (list(loader), loader.state_dict())[1]]
    for state in states:
        with build(2) as other, pytest.raises(StateMismatch, match="stream_seed"):
            other.load_state_dict(state)
        with build(1) as same:
            same.load_state_dict(state)
            next(iter(same))
            assert same.state_dict()["penstock"].partition('"state"')[0] == state["penstock"].partition('"state"')[0]


def test_reading_epochs_again_is_said_once(caplog):
    """Seen to fail: nothing was read again, and epoch 3 was epoch 0."""
    dataset = Walks()
    want = epochs(Walks, 4)
    with Loader.from_dataset(tn.IterableWrapper(dataset), batch_size=None) as loader:
        for _ in range(2):
            loader.set_epoch(3)
            assert list(loader) == want[3]
    assert dataset.read == 2 * 4 * 4
    assert [record.name for record in caplog.records] == ["penstock"]
    assert (
        "IterableWrapper has a state but no set_epoch, so reaching the start of epoch 3 means reading from epoch 0 on"
        in caplog.text
    )


# torchdata's nodes over ours.


@pytest.mark.parametrize(
    ("make", "ours"),
    [
        (lambda: tn.Mapper(Sampler_(SequentialOrder(4)), abs), "Sampler"),
        (lambda: tn.Batcher(tn.Mapper(Sampler_(SequentialOrder(4)), abs), 2), "Sampler"),
        (lambda: Held(tn.Mapper(Sampler_(SequentialOrder(4)), abs)), "Sampler"),
        (lambda: tn.Unbatcher(Batcher(tn.IterableWrapper(range(4)), 2)), "Batcher"),
        (lambda: tn.Prefetcher(SamplerWrapper([1, 2]), 1), "SamplerWrapper"),
    ],
)
def test_one_that_would_be_handed_indices_is_refused(make, ours):
    """Seen to fail: "Sampler has no source; it must override what the contract asks of it"; a node that has its source
    under another name."""
    with pytest.raises(
        GraphError, match=rf"(torchdata.nodes.*|Held) is downstream of a {ours} and would get Indices.*Put it upstream"
    ):
        Loader(make())


def test_one_that_holds_its_own_consumer_is_upstream_of_it():
    """Seen to fail: refused as downstream of the Cycler of the loader that it was read by."""
    node = Held(tn.IterableWrapper(range(4)))
    with Loader(node) as first:
        node.consumer = first.root
    with Loader(node) as second:
        assert list(second) == [0, 1, 2, 3]


def test_one_whose_source_is_a_property_is_refused():
    class Behind(Held):
        source = property(lambda self: self.held[0][0])

    with pytest.raises(GraphError, match=r"Behind is downstream of a Sampler"):
        Loader(Behind(((Sampler_(SequentialOrder(4)),),)))


# A node that was read before.


class CountsItsPasses(IterableDataset):
    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        first = 1000 * self.epoch
        self.epoch += 1
        return iter(range(first, first + 3))

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def weighted():
    return tn.MultiNodeWeightedSampler(
        {"a": tn.IterableWrapper(range(9)), "b": tn.IterableWrapper(range(10, 19))}, {"a": 0.5, "b": 0.5}
    )


@pytest.mark.parametrize("make", [CountsItsPasses, weighted, sharded])
def test_what_another_loader_has_read_begins_anew_in_this_one(make):
    """Seen to fail, in silence: the first epoch of the second loader counted from where the first one had left off, so
    a state loaded as a later epoch."""
    source = make()
    with Loader(IterableSource(source)) as loader:
        first, state, second = list(loader), loader.state_dict(), list(loader)
        list(loader)
    assert first != second
    for _ in range(2):
        with Loader(IterableSource(source)) as loader:
            loader.load_state_dict(state)
            assert list(loader) == second
        with Loader(IterableSource(source)) as loader:
            assert [list(loader), list(loader)] == [first, second]


def test_what_its_owner_has_moved_begins_where_it_stands():
    source = CountsItsPasses()
    with Loader(IterableSource(source)) as loader:
        assert list(loader) == [0, 1, 2]
    source.epoch = 7
    with Loader(IterableSource(source)) as loader:
        assert list(loader) == [7000, 7001, 7002]
