"""What a loop changes between epochs counts for the epoch that it then asks for, as with a ``DataLoader``, whatever was
loaded ahead. By value and in order."""

from __future__ import annotations

import copy
import ctypes
import enum
import inspect
import json
import logging
import mmap
import multiprocessing
import multiprocessing.managers
import os
import pickle
import random
import tempfile
import threading
import time
import types
from functools import cache, partial
from itertools import islice, product
from os import listdir
from pathlib import Path

import numpy as np
import pytest
import torch
from pairwise import by_turns, mostly_soak
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler

import penstock
from penstock import Loader, StateError
from penstock.nodes import Batcher, Cycler, IterableSource, ParallelMapper, Prefetcher, SamplerWrapper, Sharder
from penstock.testing import Tagged

N = 12
kept_in_worker = []
KEPT = multiprocessing.Value("i", 0)
"""The first one opens a file, which stays open as long as the process lives."""
METHODS = {
    "inline": {},
    "threads": {"num_workers": 2, "method": "thread"},
    "processes": {"num_workers": 2},
    "threads, not planned ahead": {"num_workers": 2, "method": "thread", "plan_ahead": False},
}
HOW = [how for how in METHODS if "planned" not in how]
by_every_method = pytest.mark.parametrize("how", HOW)


def values(loader):
    """One epoch."""
    return [value for batch in loader for value in torch.as_tensor(batch).flatten().tolist()]


# The epoch that the loop sets on its own objects.


class Epochs(torch.utils.data.Sampler):
    """Item k of epoch e is (k + e) mod N."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(k + int(self.epoch)) % N for k in range(N)])

    def __len__(self):
        return N


class Hidden(Epochs):
    def __init__(self):
        self._e = 0

    epoch = property(lambda self: self._e)

    def set_epoch(self, epoch):
        self._e = int(epoch)


class Derived(Epochs):
    """Keeps something that it makes of the number."""

    epoch = None
    shift = 70

    def set_epoch(self, epoch):
        self.shift = 70 + epoch

    def __iter__(self):
        return iter([(k + self.shift) % N for k in range(N)])


class Base(Epochs):
    """Holds another sampler under another name."""

    def __init__(self, base):
        self.base = base

    def set_epoch(self, epoch):
        self.base.set_epoch(epoch)

    def __iter__(self):
        return iter(self.base)


class Slotted:
    __slots__ = ("current_epoch",)

    def __init__(self):
        self.current_epoch = 0

    def set_epoch(self, epoch):
        self.current_epoch = epoch

    def __iter__(self):
        return iter([(k + self.current_epoch) % N for k in range(N)])

    def __len__(self):
        return N


class Outer(torch.utils.data.Sampler):
    """Batches of a sampler that alone has a ``set_epoch``."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(torch.tensor([*self.sampler]).reshape(-1, 4).tolist())

    def __len__(self):
        return len(self.sampler) // 4


class Stream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(1000 * self.epoch, 1000 * self.epoch + N))


class SharedEpoch(Stream):
    """Keeps its epoch in shared memory, as those of Hugging Face do, and is read ahead."""

    def __init__(self):
        self._epoch = torch.tensor(0).share_memory_()

    epoch = property(lambda self: int(self._epoch))

    def set_epoch(self, epoch):
        self._epoch += epoch - self._epoch


class Rotated(Tagged):
    """A dataset with a ``set_epoch``."""

    def __init__(self):
        super().__init__(N)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return super().__getitem__((index + self.epoch) % N)


def one_rank():
    return DistributedSampler(range(N), num_replicas=1, rank=0, seed=3)


SET_ON = {  # what `from_dataset` gets, and the object whose epoch is set
    "DistributedSampler": lambda: ({"batch_size": 4, "sampler": (sampler := one_rank())}, sampler),
    "BatchSampler of one": lambda: ({"batch_sampler": BatchSampler(sampler := one_rank(), 4, False)}, sampler),
    "a batch sampler over one": lambda: ({"batch_sampler": Outer(sampler := one_rank())}, sampler),
    "its own sampler": lambda: ({"batch_size": 4, "sampler": (sampler := Epochs())}, sampler),
    "an attribute of another name, as int": lambda: ({"batch_size": 4, "sampler": (sampler := Hidden())}, sampler),
    "a sum": lambda: ({"batch_size": 4, "sampler": (sampler := Derived())}, sampler),
    "a sampler in another": lambda: ({"batch_size": 4, "sampler": Base(sampler := Epochs())}, sampler),
    "a slot": lambda: ({"batch_size": 4, "sampler": (sampler := Slotted())}, sampler),
    "an IterableDataset": lambda: ({"dataset": (stream := Stream()), "batch_size": 4}, stream),
    "a shared tensor": lambda: ({"dataset": (stream := SharedEpoch()), "batch_size": 4}, stream),
    "the dataset": lambda: ({"dataset": (data := Rotated()), "batch_size": 4, "shuffle": True}, data),
}
DATA_IN_THREADS, DATA_IN_PROCESSES = ("the dataset", "threads"), ("the dataset", "processes")


def build(on, how, **more):
    words, one = SET_ON[on]()
    if (on, how.partition(",")[0]) == DATA_IN_THREADS:
        pytest.skip("such a dataset is refused with threads")
    return Loader.from_dataset(**{"dataset": Tagged(N), **words, **METHODS[how], **more}), one


def resumed(on, how, start, **more):
    loader, one = build(on, how, **more)
    with loader:
        read = []
        for epoch in range(start, 5):
            one.set_epoch(epoch)
            read.append(values(loader))
    return read


@cache
def in_order(on):
    """Five epochs, by no worker."""
    return resumed(on, "inline", 0)


@pytest.mark.parametrize(
    ("on", "how"),
    mostly_soak(
        product(SET_ON, HOW),
        [*by_turns(SET_ON, HOW), ("its own sampler", "threads"), ("an IterableDataset", "threads"), DATA_IN_PROCESSES],
    ),
)
class TestSetEpochOnTheUsersObject:
    def test_it_starts_there(self, on, how):
        """With the samples and the random numbers of that epoch. Seen to fail: the orders of epochs 0 and 1 again,
        without a word."""
        whole = resumed(on, how, 0)
        assert resumed(on, how, 3) == whole[3:]
        assert whole == in_order(on)
        assert len({*map(str, whole)}) == 5
        assert [{value // 1000 for value in read} for read in whole] == [{epoch} for epoch in range(5)]

    def test_it_says_which_epoch_runs(self, on, how):
        """With no call of the loop's. An epoch that is read ahead is told to a copy. Seen to fail: never told; told an
        epoch ahead."""
        loader, one = build(on, how)
        if on == "a shared tensor":
            pytest.skip("it is read ahead")
        with loader:
            for epoch in range(3):
                for _ in loader:
                    said = next(
                        int(getattr(one, name)) for name in ("shift", "epoch", "current_epoch") if hasattr(one, name)
                    )
                    assert said in (epoch, 70 + epoch) or (on, how) == ("the dataset", "processes")

    def test_a_repeated_number_repeats_the_epoch(self, on, how):
        """As with ``loader.set_epoch``. Seen to fail: epochs 0, 1, 0, where the number was compared with the one that
        the object held."""
        whole = in_order(on)
        loader, one = build(on, how)
        with loader:
            read = []
            for epoch in (0, 0, 0, 1, 1, 4, 2):
                one.set_epoch(epoch)
                read.append(values(loader))
        assert read == [whole[epoch] for epoch in (0, 0, 0, 1, 1, 4, 2)]

    def test_a_loaded_state_is_contradicted_as_by_the_loader(self, on, how):
        """Seen to fail: the loop's numbers and the loader's were of different epochs from then on."""
        if on in ("an IterableDataset", "a shared tensor"):
            pytest.skip("without a length, the state wins")
        whole = in_order(on)
        loader, one = build(on, how)
        with loader:
            loader.set_epoch(2)
            first = next(iter(loader))
            state = json.loads(json.dumps(loader.state_dict()))
        again, one = build(on, how)
        with again:
            again.load_state_dict(state)
            one.set_epoch(2)
            assert values([first]) + values(again) == whole[2]
            one.set_epoch(3)
            assert values(again) == whole[3]
        other, one = build(on, how)
        with other:
            other.load_state_dict(state)
            one.set_epoch(1)
            with pytest.raises(StateError, match=r"set_epoch\(1\) was called, but the loaded state is in epoch 2"):
                next(iter(other))
            assert values(other) == whole[2][4:]


def test_it_comes_before_the_number_of_a_trainer():
    """Lightning sets its own number on ``loader.sampler`` before each epoch. Seen to fail: the user's call counted for
    nothing."""
    sampler = Epochs()
    with Loader.from_dataset(Tagged(N), 4, sampler=sampler, num_workers=2) as loader:
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            sampler.set_epoch(epoch + 2)
            assert values(loader)[0] == 1000 * (epoch + 2) + epoch + 2
        loader.set_epoch(1)
        sampler.set_epoch(7)
        assert values(loader)[0] == 1001


def test_an_interrupted_next_leaves_the_call_to_the_following_one():
    """Seen to fail: after Ctrl-C in the first batch, the loader began at epoch 0."""

    class Interrupted(Tagged):
        strikes = 1

        def __getitem__(self, index):
            if self.strikes:
                self.strikes -= 1
                raise KeyboardInterrupt
            return super().__getitem__(index)

    sampler = Epochs()
    with Loader.from_dataset(Interrupted(N), 4, sampler=sampler) as loader:
        sampler.set_epoch(3)
        batches = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert values(batches) == [3000 + (k + 3) % N for k in range(N)]
        assert values(loader)[0] == 4004


def test_a_copy_of_a_loader_hears_the_calls_on_its_own_sampler():
    """Seen to fail: nobody listened to the copy of the sampler."""
    with Loader.from_dataset(Tagged(N), 4, sampler=Derived()) as loader:
        for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            with other:
                [*other.root.chain()][-1].sampler.set_epoch(3)
                assert values(other)[0] // 1000 == 3
        assert values(loader)[0] // 1000 == 0


def test_an_epoch_may_be_assigned():
    sampler = Epochs()
    with Loader.from_dataset(Tagged(N), 4, sampler=sampler) as loader:
        sampler.epoch = 3
        assert values(loader) == [3000 + (k + 3) % N for k in range(N)]


def test_the_usual_loop_loads_every_sample_once():
    """The calls ask for what comes anyway. Seen to fail: what was loaded ahead was dropped at each call; nothing was
    loaded ahead."""
    loaded, ahead = [], [threading.Event() for _ in range(5)]

    class Counted(Tagged):
        def __getitem__(self, index):
            loaded.append(value := super().__getitem__(index))
            ahead[value // 1000].set()
            return value

    sampler = Epochs()
    with Loader.from_dataset(
        Counted(N), 4, sampler=sampler, num_workers=2, method="thread", prefetch_factor=1, seed_global_rngs=False
    ) as loader:
        for epoch in range(4):
            sampler.set_epoch(epoch)
            values(loader)
            assert ahead[epoch + 1].wait(30)  # so that there is something to drop
    assert len(loaded) == len({*loaded})


def test_a_state_in_another_epoch_is_contradicted_by_a_call_with_0():
    """Seen to fail: the object held 0 already, so the call was not seen."""
    with Loader.from_dataset(Tagged(N), 4, sampler=Epochs()) as loader:
        loader.set_epoch(2)
        next(iter(loader))
        state = loader.state_dict()
    sampler = Epochs()
    with Loader.from_dataset(Tagged(N), 4, sampler=sampler) as other:
        other.load_state_dict(state)
        sampler.set_epoch(0)
        with pytest.raises(StateError, match=r"set_epoch\(0\) was called, but the loaded state is in epoch 2"):
            next(iter(other))


def test_what_an_object_makes_of_the_number_is_no_call():
    """Seen to fail: epochs 0 1 2 3 4 3 4 3, where the number that it held was compared."""

    class Clipped(Epochs):
        def set_epoch(self, epoch):
            self.epoch = min(epoch, 3)

    class OfTheClass(Epochs):
        def set_epoch(self, epoch):
            type(self).epoch = epoch

    for sampler in (Clipped(), OfTheClass()):
        with Loader.from_dataset(Tagged(N), 4, sampler=sampler, num_workers=2, method="thread") as loader:
            assert [values(loader)[0] // 1000 for _ in range(7)] == [*range(7)]


def test_a_class_that_is_heard_can_be_pickled_by_value():
    """As Ray and joblib pickle the classes of a notebook. Seen to fail: "cannot pickle '_contextvars.ContextVar'
    object"."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")

    class Local(Rotated):
        def set_epoch(self, epoch):
            super().set_epoch(epoch)

    data = Local()
    with Loader.from_dataset(data, 4) as loader:
        values(loader)
    other = pickle.loads(cloudpickle.dumps(data))
    other.set_epoch(5)
    assert (other.epoch, data.epoch) == (5, 0)
    assert inspect.signature(data.set_epoch) == inspect.signature(Rotated().set_epoch)
    assert copy.deepcopy(data).set_epoch.__self__ is not data


def test_two_loaders_may_share_a_sampler():
    """What one tells it is no call. Seen to fail: epochs 1, 3, 5."""
    sampler = Epochs()
    with (
        Loader.from_dataset(Tagged(N), 4, sampler=sampler) as first,
        Loader.from_dataset(Tagged(N), 4, sampler=sampler) as second,
    ):
        for epoch in range(3):
            values(first), values(first)
            assert values(second)[0] // 1000 == epoch
        sampler.set_epoch(7)
        assert values(first)[0] // 1000 == values(second)[0] // 1000 == 7


def test_a_dataset_is_not_told_ahead_where_a_thread_reads():
    """Seen to fail: a `Prefetcher` told the user's own dataset the next epoch while the loop was in this one."""
    data, calls = Rotated(), []
    loader = Loader.from_dataset(data, 4)
    with Loader(Prefetcher(loader.root, 2)) as ahead:
        for _ in range(3):
            calls += [(data.epoch, ahead.epoch) for _ in ahead]
    assert calls == [(epoch, epoch) for epoch in range(3) for _ in range(3)]


@pytest.mark.parametrize("size", [1, 4, 12])
@pytest.mark.parametrize("by_thread", [False, True])
def test_the_shared_epoch_of_hugging_face_is_no_change_by_the_loop(by_thread, size, caplog):
    """It is in a tensor that is set for an epoch that is read ahead. Seen to fail: read before that, it was called one,
    and nothing was loaded ahead; read after it, with epochs that are shorter than what is in progress, so that the
    tensor held the epoch after the next."""
    ahead, data = threading.Event(), SharedEpoch()

    def loaded(batch):
        if batch[0] == 3000:
            ahead.set()
        return batch

    graph = ParallelMapper(Batcher(Cycler(IterableSource(data)), size), loaded, 2)
    with Loader(Prefetcher(graph, 4) if by_thread else graph) as loader:
        for epoch in range(3):
            data.set_epoch(epoch)
            assert values(loader) == [*range(1000 * epoch, 1000 * epoch + N)]
        assert ahead.wait(50)
    assert not caplog.records


# What a sampler holds.

A, B = [1.0] * N + [0.0] * N, [0.0] * N + [1.0] * N
WANTED = "ABABB"
ORDER = [*range(N)]
"""A global that `Global` reads."""


class Global:
    def __iter__(self):
        return iter(ORDER)

    def __len__(self):
        return N


class Of:
    """Reads what it is given: a list, an object with a list, or a function."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return iter(self.source() if callable(self.source) else getattr(self.source, "order", self.source))

    def __len__(self):
        return N


class Drawn(Of):
    """From the global generators."""

    def __iter__(self):
        return iter(random.sample(self.source, N))


class Remembers(Of):
    """From a generator of its own, which nobody seeds."""

    def __init__(self, source):
        super().__init__(source)
        self.rng = random.Random(5)

    def __iter__(self):
        return iter(self.rng.sample(self.source, N))


class Locked(Of):
    """Can be neither copied nor compared."""

    def __init__(self, source):
        super().__init__(source)
        self.lock = threading.Lock()


class Holder:
    def __init__(self):
        self.order = [*range(N)]


def half(which):
    return [*range(N)] if which == "A" else [*range(N, 2 * N)]


def in_place(kind):
    def make():
        held = half("A")
        return kind(held), lambda which: held.__setitem__(slice(None), half(which))

    return make


def weighted(in_batches):
    def make():
        sampler = WeightedRandomSampler(A, N)

        def change(which):
            sampler.weights = torch.tensor(A if which == "A" else B, dtype=torch.double)

        return BatchSampler(sampler, 4, False) if in_batches else sampler, change

    return make


def weights_in_place():
    sampler = WeightedRandomSampler(A, N)
    return sampler, lambda which: sampler.weights.copy_(torch.tensor(A if which == "A" else B))


def a_global():
    ORDER[:] = half("A")
    return Global(), lambda which: ORDER.__setitem__(slice(None), half(which))


def a_closure():
    held = half("A")

    class Local(Of):
        def __iter__(self):
            return iter(held)

    return Local(None), lambda which: held.__setitem__(slice(None), half(which))


def a_function():
    held = half("A")
    return Of(lambda: [*held]), lambda which: held.__setitem__(slice(None), half(which))


def an_object():
    holder = Holder()
    return Of(holder), lambda which: setattr(holder, "order", half(which))


def a_file():
    path = Path(tempfile.mkdtemp()) / "order"

    class Local(Of):
        def __iter__(self):
            return map(int, path.read_text().split())

    return Local(None), lambda which: path.write_text(" ".join(map(str, half(which))))


def a_lookup():
    scores = dict(enumerate(half("A")))

    class Local(Of):
        def __iter__(self):
            return map(self.source, range(N))

    return Local(scores.get), lambda which: scores.update(enumerate(half(which)))


def an_own_copy():
    class Shared:
        order = half("A")

        def __deepcopy__(self, memo):
            return self

    shared = Shared()
    return Of(shared), lambda which: setattr(shared, "order", half(which))


def not_in_its_state():
    class Local(Of):
        def __getstate__(self):
            return {}

    sampler = Local(half("A"))
    return sampler, lambda which: setattr(sampler, "source", half(which))


def a_class():
    class Local(Of):
        order = half("A")

        def __iter__(self):
            return iter(type(self).order)

    return Local(None), lambda which: setattr(Local, "order", half(which))


def late(read, held=None):
    """A sampler that begins at N if ``read`` of what it holds is 1."""

    class Local(Of):
        def __iter__(self):
            start = N * int(read(self.source))
            return iter(range(start, start + N))

    return Local(held)


def attribute_of(held):
    return late(lambda held: held.late, held), lambda which: setattr(held, "late", which == "B")


class Singleton:
    def __reduce__(self):
        return "SINGLETON"


SINGLETON = Singleton()


class Phase(enum.Enum):
    TRAIN = 1


def a_lightning_module():
    module = pytest.importorskip("lightning.pytorch").LightningModule()
    module._trainer = types.SimpleNamespace(current_epoch=0)
    return (
        late(lambda held: held.current_epoch, module),
        lambda which: setattr(module._trainer, "current_epoch", which == "B"),
    )


def a_gradient():
    weight = torch.nn.Parameter(torch.zeros(1))
    return late(lambda held: held.grad, weight), lambda which: setattr(
        weight, "grad", torch.full((1,), which == "B") + 0.0
    )


def a_number_in_a_file():
    path = Path(tempfile.mkdtemp()) / "late"
    return late(lambda path: np.genfromtxt(path), path), lambda which: path.write_text(str(int(which == "B")))


def a_folder():
    path = Path(tempfile.mkdtemp())

    def change(which):
        (path / "late").touch()
        if which == "A":
            (path / "late").unlink()

    return late(lambda path: len(listdir(path)), path), change


def an_ordinary_sampler():
    """Holds, and names, what many do."""
    held = half("A")

    class Local(Of):
        def __iter__(self):
            logging.getLogger("a").debug("%s", self.root)
            order = np.random.default_rng(3).permutation(self.source)
            return iter(order.tolist())

        def own(self, index):
            return index

    sampler = Local(held)
    sampler.bound = sampler.own
    sampler.root, sampler.data, sampler.phase = Path("a"), torch.utils.data.TensorDataset(torch.zeros(3)), Phase.TRAIN
    sampler.rng, sampler.key, sampler.log = np.random.default_rng(3), partial(max, 3), logging.getLogger("a")
    return sampler, lambda which: held.__setitem__(slice(None), half(which))


READ_LATE = {
    "a file": a_file,
    "what copies itself": an_own_copy,
    "what its state leaves out": not_in_its_state,
    "what the state of a model leaves out": a_lightning_module,
    "an attribute of a singleton": lambda: attribute_of(SINGLETON),
    "an attribute of an optimizer": lambda: attribute_of(torch.optim.SGD([torch.zeros(1)])),
    "a gradient": a_gradient,
    "a file that NumPy reads": a_number_in_a_file,
    "a folder": a_folder,
}
CHANGED = {
    "weights": weighted(False),
    "weights in a BatchSampler": weighted(True),
    "weights in place": weights_in_place,
    "a list itself": in_place(lambda held: held),
    "a list in a sampler": in_place(Of),
    "that draws": in_place(Drawn),
    "that remembers": in_place(Remembers),
    "that cannot be compared": in_place(Locked),
    "a global": a_global,
    "a closure": a_closure,
    "a function": a_function,
    "an object": an_object,
    "a class": a_class,
    "a bound method": a_lookup,
    "an attribute of an enum member": lambda: attribute_of(Phase.TRAIN),
    "an attribute of a tensor": lambda: attribute_of(torch.zeros(2)),
    "ordinary parts": an_ordinary_sampler,
    **READ_LATE,
}


def source_of(sampler):
    return {"batch_sampler": sampler} if isinstance(sampler, BatchSampler) else {"batch_size": 4, "sampler": sampler}


def letters(read):
    return "".join("A" if {*(value % 1000 for value in epoch)} <= {*range(N)} else "B" for epoch in read)


def drawn(what, how, change=WANTED):
    sampler, to = CHANGED[what]()
    read = []
    with Loader.from_dataset(Tagged(2 * N), **source_of(sampler), **METHODS[how]) as loader:
        for which in change:
            to(which)
            read.append(values(loader))
    return read


@cache
def unplanned(what):
    return drawn(what, "threads, not planned ahead")


@pytest.mark.parametrize(
    ("what", "how"),
    mostly_soak(
        product(CHANGED, HOW), [*by_turns(CHANGED, HOW), ("a global", "processes"), ("what copies itself", "threads")]
    ),
)
def test_a_sampler_is_what_it_is_when_its_epoch_begins(what, how):
    """Seen to fail: wanted A B A B B, drew A A A A B with workers, A A B A B inline. A A A A A with
    a model's state, an attribute of a tensor, and a file only, where those were not looked for."""
    read = drawn(what, how)
    assert letters(read) == WANTED
    assert [{value // 1000 for value in epoch} for epoch in read] == [{epoch} for epoch in range(5)]
    assert read == unplanned(what) or what == "that remembers"  # the sampler itself goes on; a copy begins anew


@by_every_method
def test_the_size_of_its_batches_too(how):
    batches = BatchSampler(RandomSampler(range(N)), 2, False)
    with Loader.from_dataset(range(N), batch_sampler=batches, **METHODS[how]) as loader:
        for size in (2, 3, 6, 3):
            batches.batch_size = size
            assert len(loader) == N // size
            assert [len(batch) for batch in loader] == [size] * (N // size)
            assert loader.position in (0, None)


def test_what_is_dropped_is_said_once(caplog):
    drawn("weights", "threads", change="ABBBABAB")
    said = [record.message for record in caplog.records]
    assert said == [
        "WeightedRandomSampler was changed after batches of epoch 1 had been loaded from a copy of it. They were "
        "dropped, and are loaded again. To load nothing ahead of such an epoch, pass plan_ahead=False."
    ]


@pytest.mark.parametrize(
    "what",
    sorted({*CHANGED} - {"that cannot be compared", *READ_LATE}),
)
def test_nothing_is_dropped_of_a_sampler_that_is_not_changed(what, caplog):
    """And its next epoch is loaded before the loop asks for it. Seen to fail: with copies that are told another epoch
    than the sampler."""
    sampler, to = CHANGED[what]()
    to("A")
    loaded, ahead = [], threading.Event()

    class Counted(Tagged):
        def __getitem__(self, index):
            loaded.append((penstock.sample().epoch, penstock.sample().position))
            if penstock.sample().epoch == 1:
                ahead.set()
            return super().__getitem__(index)

    words = {**source_of(sampler), "seed": 0}  # given, because one line builds several
    with Loader.from_dataset(Counted(2 * N), **words, num_workers=2, method="thread", seed_global_rngs=False) as loader:
        values(loader)
        assert ahead.wait(50)
        for _ in range(3):
            values(loader)
    assert len(loaded) == len({*loaded})
    assert not caplog.records


step = 0


def test_a_global_with_the_name_of_an_attribute_is_another_thing(caplog):
    """As a script's ``epoch``, beside a sampler that keeps its own. Seen to fail: each epoch of the sampler counted as
    changed."""
    global step

    class Steps(Of):
        step = 0

        def set_epoch(self, epoch):
            self.step = epoch

        def __iter__(self):
            return iter([(k + self.step) % N for k in self.source])

    with Loader.from_dataset(range(N), 4, sampler=Steps(half("A")), num_workers=2, method="thread") as loader:
        for step in range(4):
            assert values(loader) == [(k + step) % N for k in range(N)]
    assert not caplog.records


# or the thread that reads the sampler
@pytest.mark.filterwarnings("ignore:.* from the global random numbers in worker threads")
@pytest.mark.parametrize("kept", [False, True])
def test_a_sampler_that_begins_to_draw_late_is_seeded(kept):
    """Its first epochs draw nothing, so a thread reads it ahead. Seen to fail: the thread drew what the loop would have
    drawn, and nothing was seeded. Also where NumPy keeps a deviate for later: then its generator's state is not all in
    one place, and nothing was compared."""

    class Late(Of):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(random.sample(self.source, N) if self.epoch > 1 else self.source)

    def read(**options):
        np.random.seed(1)
        np.random.standard_normal(1 + (not kept))
        with Loader.from_dataset(range(N), 4, sampler=Late(half("A")), **options) as loader:
            return [values(loader) for _ in range(4)]

    expected = read(plan_ahead=False)
    assert read() == read(num_workers=2, method="thread") == expected
    assert expected[2] != expected[3] != expected[1]


SHARED_ORDER = [*range(N)]


class Waits(Epochs):
    """Reads a global, in epoch 1 after somebody has opened a gate."""

    read, write = os.read, os.write  # a sampler that names them counts as one that reads files

    def __init__(self, pipes):
        self.began, self.gate = pipes

    def __iter__(self):
        if self.epoch == 1:
            self.write(self.began, b".")
            self.read(self.gate, 1)
        return iter([*SHARED_ORDER])


def test_a_global_that_is_another_one_while_a_thread_reads_it():
    """As during a validation; then it is as before. Seen to fail: the next epoch had the order of the validation."""
    (began, begin), (gate, key) = os.pipe(), os.pipe()
    # unseeded, because seeding a batch meanwhile would look like a draw, and the plan would be made again for that
    with Loader.from_dataset(range(N), 4, sampler=Waits((begin, gate)), seed_global_rngs=False) as loader:
        assert values(loader) == [*range(N)]
        os.read(began, 1)
        SHARED_ORDER.reverse()
        os.close(key)
        (wrapper,) = [node for node in loader.root.chain() if isinstance(node, SamplerWrapper)]
        _, _, job = wrapper._plans._ordered
        while not job.done:  # nothing else shows that the thread has the plan, and has compared
            time.sleep(0.001)
        SHARED_ORDER.reverse()
        assert values(loader) == [*range(N)]
    for end in (began, begin, gate):
        os.close(end)


def test_a_private_generator_that_a_copy_would_share():
    """Of a module or a class. Seen to fail: each plan that was made ahead or dropped moved it."""

    class Shared(Of):
        rng = random.Random(4)

        def __iter__(self):
            return iter(self.rng.sample(range(N), N))

    rng = random.Random(4)
    expected = [rng.sample(range(N), N) for _ in range(5)]
    for how in ({}, {"num_workers": 2, "method": "thread"}):
        Shared.rng = random.Random(4)
        with Loader.from_dataset(range(N), 4, sampler=Shared(None), **how) as loader:
            assert [values(loader) for _ in range(5)] == expected
    Shared.rng = random.Random(4)
    with Loader.from_dataset(range(N), 4, sampler=Shared(None)) as loader:
        loader.set_epoch(3)
        assert values(loader) == expected[3]


def test_a_set_epoch_that_draws_leaves_the_loops_numbers_alone():
    class Draws(Of):
        def set_epoch(self, epoch):
            self.source = torch.randperm(N).tolist()

    before = torch.get_rng_state()
    with Loader.from_dataset(range(N), 4, sampler=Draws(None)) as loader:
        read = [values(loader), len(loader), values(loader)]
    assert torch.equal(before, torch.get_rng_state())
    assert read[0] != read[2]


@pytest.mark.parametrize("what", ["weights", "that draws", "a list in a sampler", "that cannot be compared"])
def test_a_thread_that_reads_the_graph_ahead_changes_nothing(what):
    """Seen to fail: the thread of a `Prefetcher` read past the end of an epoch although the sampler may be changed."""
    sampler, to = CHANGED[what]()
    graph = Prefetcher(
        ParallelMapper(Batcher(Sharder(Cycler(SamplerWrapper(sampler))), 4), penstock.nodes.Fetch(Tagged(2 * N)), 2)
    )
    read = []
    with Loader(graph) as loader:
        for which in WANTED:
            to(which)
            read.append(values(loader))
    assert read == drawn(what, "inline")


def test_a_changed_sampler_resumes_in_mid_epoch():
    sampler, to = CHANGED["weights"]()
    with Loader.from_dataset(Tagged(2 * N), 4, sampler=sampler, num_workers=2) as loader:
        values(loader)
        to("B")
        first = next(batches := iter(loader))
        state = loader.state_dict()
        whole = [value for batch in (first, *batches) for value in batch.tolist()]
    sampler, to = CHANGED["weights"]()
    to("B")
    with Loader.from_dataset(Tagged(2 * N), 4, sampler=sampler) as resumed:
        resumed.load_state_dict(state)
        assert first.tolist() + values(resumed) == whole


def test_an_infinite_loader_sees_changes_at_the_end_of_an_epoch():
    sampler, to = CHANGED["a list in a sampler"]()
    read = []
    with Loader.from_dataset(
        Tagged(2 * N), 4, sampler=sampler, infinite=True, num_workers=2, method="thread"
    ) as loader:
        for k, batch in enumerate(islice(loader, 4 * N // 4)):
            read += batch.tolist()
            if k % 3 == 2:
                to("AB"[(k // 3 + 1) % 2])
    assert letters([read[start : start + N] for start in range(0, 4 * N, N)]) == "ABAB"
    assert [value // 1000 for value in read] == [k // N for k in range(4 * N)]


# Small values that the loop shares with the workers.


class Reads:
    """Sample k is 1000 * what it reads + k."""

    def __init__(self, cell, read):
        self.cell, self.read = cell, read

    def __getitem__(self, index):
        return 1000 * self.read(self.cell) + index

    def __len__(self):
        return N


def keep(reads, worker):
    kept_in_worker.append(reads)


def of_the_worker(index):
    return globals()["kept_in_worker"][0][index]  # a place that no name leads to


def of_value(cell):
    return int(cell.value)


def of_array(cell):
    return int(cell[0])


def of_dict(cell):
    return int(cell["epoch"])


def put_value(cell, epoch):
    cell.value = epoch


def put_array(cell, epoch):
    cell[0] = epoch


def put_dict(cell, epoch):
    cell["epoch"] = epoch


def put_in_dict(cell, epoch):
    cell["epoch"].fill_(epoch)


SHARED = {
    "Value": (lambda manager: multiprocessing.Value("i", 0), of_value, put_value),
    "RawValue": (lambda manager: multiprocessing.sharedctypes.RawValue(ctypes.c_long, 0), of_value, put_value),
    "Array": (lambda manager: multiprocessing.Array("d", 3), of_array, put_array),
    "RawArray seen as an array": (
        lambda manager: np.frombuffer(multiprocessing.RawArray("l", 4), "l"),
        of_array,
        put_array,
    ),
    "a shared tensor": (lambda manager: torch.zeros(3).share_memory_(), of_array, put_array),
    "a tensor in a dict": (lambda manager: {"epoch": torch.zeros(()).share_memory_()}, of_dict, put_in_dict),
    "a mapped page": (lambda manager: mmap.mmap(-1, 100), of_array, put_array),
    "a Manager's Value": (lambda manager: manager.Value("i", 0), of_value, put_value),
    "a Manager's dict with more": (lambda manager: manager.dict(epoch=0, more="x" * 5000), of_dict, put_dict),
    "a Manager's dict": (lambda manager: manager.dict(epoch=0), of_dict, put_dict),
}


def collated(reads, samples):
    return torch.tensor([reads[k] for k in samples])


PLACES = [*((what, "dataset") for what in SHARED), ("Value", "transform"), ("Value", "collate_fn")]


@pytest.fixture(scope="module")
def manager():
    with multiprocessing.Manager() as manager:
        yield manager


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="the values are inherited")
@pytest.mark.parametrize(
    ("what", "where", "how"),
    mostly_soak(
        ((*place, how) for how in HOW for place in PLACES),
        [
            *(("Value", "dataset", how) for how in HOW),
            ("Value", "transform", "threads"),
            ("Value", "collate_fn", "processes"),
            ("a tensor in a dict", "dataset", "processes"),
            ("a Manager's dict", "dataset", "threads"),
        ],
    ),
)
def test_a_shared_value_is_that_of_the_epoch(what, how, where, manager, caplog):
    """Seen to fail: up to a whole epoch was made with the old value."""
    caplog.set_level(logging.INFO)
    make, read, put = SHARED[what]
    cell = make(manager)
    reads = Reads(cell, read)
    words = {
        "dataset": {"dataset": reads},
        "transform": {"dataset": range(N), "transform": reads.__getitem__},
        "collate_fn": {"dataset": range(N), "collate_fn": partial(collated, reads)},
    }
    got = []
    with Loader.from_dataset(**words[where], batch_size=4, **METHODS[how]) as loader:
        for epoch in (0, 0, 1, 2, 2, 3):
            put(cell, epoch)
            got.append(values(loader))
    assert got == [[1000 * epoch + k for k in range(N)] for epoch in (0, 0, 1, 2, 2, 3)]
    said = [record.message for record in caplog.records if "is shared memory" in record.message]
    assert len(said) == (how != "inline")
    assert all(part in one for one in said for part in (where, "set_epoch(epoch)", "penstock.sample().epoch"))


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="the values are inherited")
def test_so_is_one_that_a_worker_is_given_as_it_starts(caplog):
    """Seen to fail: ``worker_init_fn`` was not looked into."""
    caplog.set_level(logging.INFO)
    cell, got = multiprocessing.Value("i", 0), []
    init = partial(keep, Reads(cell, of_value))
    with Loader.from_dataset(range(N), 4, transform=of_the_worker, worker_init_fn=init, num_workers=2) as loader:
        for cell.value in range(3):
            got.append(values(loader))
    assert got == [[1000 * epoch + k for k in range(N)] for epoch in range(3)]
    assert "worker_init_fn" in caplog.text


def test_a_sampler_may_read_a_manager(manager):
    """Through a closure, which a copy shares. Seen to fail: wanted A B A B B, drew A A A A A."""
    shared = manager.list([0])
    read = []
    with Loader.from_dataset(Tagged(2 * N), 4, sampler=late(lambda _: shared[0]), num_workers=2) as loader:
        for which in WANTED:
            shared[0] = which == "B"
            read.append(values(loader))
    assert letters(read) == WANTED


def test_no_epoch_is_loaded_ahead():
    """Seen to fail: the batches of every epoch were loaded twice."""
    cell, loaded = multiprocessing.Value("i", 0), []

    def read(cell):
        loaded.append(penstock.sample().epoch)
        return cell.value

    with Loader.from_dataset(Reads(cell, read), 4, num_workers=2, method="thread", prefetch_factor=1) as loader:
        for cell.value in range(5):
            values(loader)
    assert [loaded.count(epoch) for epoch in range(1, 6)] == [*[N] * 4, 0]


@pytest.mark.parametrize("how", ["inline", "threads", "processes"])
def test_so_is_one_that_an_iterable_reads(how):
    """It is read in this process, ahead of the workers."""
    cell = multiprocessing.Value("i", 0)

    class Shared(IterableDataset):
        def __init__(self):
            self.cell = cell

        def __iter__(self):
            return (1000 * self.cell.value + k for k in range(N))

    with Loader.from_dataset(Shared(), 4, **METHODS[how]) as loader:
        for epoch in (0, 1, 2):
            cell.value = epoch
            assert values(loader) == [1000 * epoch + k for k in range(N)]


def test_a_large_shared_tensor_is_data():
    shared = torch.zeros(1000).share_memory_()
    with Loader.from_dataset(Reads(shared, of_array), 4, num_workers=1, method="thread", prefetch_factor=3) as loader:
        values(loader)
        shared[0] = 7
        assert values(loader)[0] in (0, 7000)
