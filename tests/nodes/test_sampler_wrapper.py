"""Sampler and SamplerWrapper: by value and in order, resumed at every step, ahead of time, and without a trace in the global generators."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import select
import signal
import threading
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data import Sampler as TorchSampler
from torchdata.nodes import Loader

from penstock._errors import ClosedError, GraphError, StateError, StateMismatch, WorkerDied
from penstock._fetch.indices import Indices, pack
from penstock._nodes.distributed_sampler import refuse_sharded, taken_over
from penstock._nodes.sampler import Sampler
from penstock._nodes.sampler_traits import can_be_pickled, owns_its_randomness, wrapped
from penstock._nodes.sampler_wrapper import SamplerWrapper
from penstock._random.orders import SequentialOrder, ShuffledOrder, TorchOrder, WeightedOrder
from penstock._workers.thread_pool import ThreadPool

N = 11


class Mixed(TorchSampler):
    """A user's sampler that draws from all three global generators."""

    def __init__(self, n=N):
        self.n = n

    def __iter__(self):
        for _ in range(self.n):
            yield random.randrange(100) * 10**6 + int(np.random.randint(100)) * 10**3 + int(torch.randint(100, ()))

    def __len__(self):
        return self.n


class OfEpoch(TorchSampler):
    """Epoch e, item i is 1000 * e + i, by `set_epoch`."""

    def __init__(self, n=N):
        self.n = n
        self.epoch = None
        self.asked = []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.asked.append(epoch)

    def __iter__(self):
        return iter(range(1000 * self.epoch, 1000 * self.epoch + self.n))

    def __len__(self):
        return self.n


class Hidden(TorchSampler):
    """Remembers: a generator of its own that nobody can seed."""

    def __init__(self, n=N, seed=5):
        self.n = n
        self.rng = np.random.Philox(seed)

    def __iter__(self):
        return iter((self.rng.random_raw(self.n) % 1000).tolist())

    def __len__(self):
        return self.n


class Batches(TorchSampler):
    """Batches of 1, 2, 3, … samples, of a length that nobody knows before."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        values, size = list(self.sampler), 1
        while values:
            yield values[:size]
            values, size = values[size:], size + 1


class Gated(TorchSampler):
    """Waits at a gate before it yields an epoch after the first; cannot be pickled, draws nothing."""

    def __init__(self):
        self.gate, self.entered = threading.Event(), threading.Event()
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        if self.epoch:
            self.entered.set()
            assert self.gate.wait(100)
        return iter(range(1000 * self.epoch, 1000 * self.epoch + 4))


class Unpicklable(Mixed):
    def __reduce__(self):
        raise TypeError("stays here")

    __deepcopy__ = None


class Steered(TorchSampler):
    """Yields what the training loop set last."""

    def __init__(self):
        self.offset = 0

    def __iter__(self):
        return iter(range(self.offset, self.offset + 3))


class Broken(TorchSampler):
    def __iter__(self):
        yield 0
        raise KeyError("no such bucket")


class Fatal(TorchSampler):
    def __iter__(self):
        os.kill(os.getpid(), signal.SIGKILL)
        yield 0


class Stuck(OfEpoch):
    """Says that it is at epoch 1, and stays there forever."""

    def __init__(self, says):
        super().__init__()
        self.says = says

    def __iter__(self):
        if self.epoch:
            os.write(self.says, b".")
            signal.pause()
        return super().__iter__()


class WithStop(TorchSampler):
    def set_epoch(self, epoch):
        raise StopIteration

    def __iter__(self):
        return iter([1])


@pytest.fixture
def wrap():
    """A `SamplerWrapper`, shut down behind the test."""
    made = []

    def build(*args, **kwargs):
        made.append(SamplerWrapper(*args, **kwargs))
        return made[-1]

    yield build
    for node in made:
        node.shutdown()


def epoch_of(node):
    """The rest of an epoch."""
    return list(node)


def plain(items):
    return [item.plain() for item in items]


def epochs(node, count):
    """The values of the first ``count`` epochs, read as a `Cycler` does."""
    read = []
    for epoch in range(count):
        node.reset(node.start_of(epoch))
        read.append(plain(epoch_of(node)))
    return read


def following(node, count):
    """The next ``count`` items with the states after them, over the ends of epochs, as a `Cycler` does."""
    items, states = [], []
    while len(items) < count:
        try:
            items.append(next(node))
        except StopIteration:
            node.reset(node.start_of(node.get_state()["epoch"] + 1))
        else:
            states.append(json.loads(json.dumps(node.get_state())))
    return items, states


def assert_resumes(build, steps):
    """Stopped after any step, and resumed by a new one, nothing differs: items, addresses and states."""
    whole = build()
    items, states = following(whole, steps)
    whole.shutdown()
    for step in range(steps):
        node = build()
        node.reset(states[step])
        assert node.get_state() == states[step]
        assert following(node, steps - step - 1) == (items[step + 1 :], states[step + 1 :]), f"differs when resumed after {step=}"
        node.shutdown()


class TestSampler:
    def test_walks_through_its_order(self):
        order = ShuffledOrder(2000, 3)
        node = Sampler(order)
        items = epoch_of(node)
        assert [item.values for item in items] == order.indices(0, np.arange(2000)).tolist()
        assert [item.positions for item in items] == list(range(2000))
        assert all(type(item.values) is int and item.epoch == 0 for item in items)
        with pytest.raises(StopIteration):
            next(node)

    def test_takes_a_rank_s_share_at_once(self):
        order, node = ShuffledOrder(100, 3), Sampler(ShuffledOrder(100, 3))
        node.reset(None)
        block = node.take(4, every=3, first=2)
        assert block == Indices(0, np.array([2, 5, 8, 11]), order.indices(0, np.array([2, 5, 8, 11])))
        assert node.get_state() == {"epoch": 0, "position": 12}
        assert next(node) == Indices(0, 12, int(order.indices(0, np.array([12]))[0]))

    def test_takes_less_where_the_epoch_ends(self):
        """Seen red with the end not bounded: the state ran past the epoch."""
        node = Sampler(SequentialOrder(10))
        node.reset(None)
        assert node.take(3, every=4, first=1).plain() == [1, 5, 9]
        assert node.get_state() == {"epoch": 0, "position": 10}
        assert node.remaining() == 0
        assert len(node.take(3)) == 0

    def test_reads_past_the_end_by_wrapping(self):
        """Values wrap, positions do not. Seen red with wrapped positions."""
        node = Sampler(ShuffledOrder(10, 1))
        node.reset(node.start_of(3))
        values = node.at(np.arange(10)).plain()
        assert node.at(np.array([9, 10, 25])) == Indices(3, np.array([9, 10, 25]), np.array([values[9], values[0], values[5]]))
        assert node.get_state() == {"epoch": 3, "position": 0}

    def test_counts(self):
        node = Sampler(SequentialOrder(10))
        assert node.items_per_epoch() == node.remaining() == 10
        node.reset({"epoch": 2, "position": 7})
        assert node.remaining() == 3
        assert node.remaining({"epoch": 5, "position": 1}) == 9
        assert node.settings() == {"order": "sequential", "length": 10}

    @pytest.mark.parametrize("order", [SequentialOrder(5), ShuffledOrder(5, 1), TorchOrder(5, 1), WeightedOrder([1, 2, 3], 5)])
    def test_resumes_everywhere(self, order):
        assert_resumes(lambda: Sampler(order), 12)

    def test_resumes_over_the_edge_of_a_block(self):
        node = Sampler(ShuffledOrder(1200, 1))
        items = epoch_of(node)
        for position in (0, 1, 511, 512, 513, 1023, 1024, 1199, 1200):
            node.reset({"epoch": 0, "position": position})
            assert epoch_of(node) == items[position:]

    def test_begins_the_next_epoch_once_something_was_read(self):
        node = Sampler(SequentialOrder(3))
        node.reset(None)
        node.reset(None)
        assert next(node).epoch == 0
        node.reset(None)
        assert [(item.epoch, item.values) for item in node] == [(1, 0), (1, 1), (1, 2)]
        node.reset(None)
        assert node.get_state() == {"epoch": 2, "position": 0}

    def test_is_a_source_for_torchdata_s_loader(self):
        loader = Loader(Sampler(TorchOrder(5, 1)))
        read = [plain(loader) for _ in range(3)]
        assert read == [TorchOrder(5, 1).indices(epoch, np.arange(5)).tolist() for epoch in range(3)]
        loader.root.shutdown()

    @pytest.mark.parametrize(
        "state",
        [
            {"epoch": 0},
            {"epoch": 0, "position": 4},
            {"epoch": -1, "position": 0},
            {"epoch": 0, "position": "1"},
            {"epoch": 0, "position": True},
            None,
            [],
        ],
    )
    def test_refuses_a_state_that_it_cannot_stand_at(self, state):
        node = Sampler(SequentialOrder(3))
        with pytest.raises(StateError):
            node.check(state)
        if state is not None:
            with pytest.raises(StateError):
                node.reset(state)

    def test_refuses_what_is_no_order(self):
        with pytest.raises(GraphError, match="Wrap a torch sampler in SamplerWrapper"):
            Sampler(RandomSampler(range(3)))

    def test_makes_the_next_permutation_of_torch_meanwhile(self, monkeypatch):
        """Seen red with the next epoch not ordered."""
        made, gate = threading.Event(), threading.Event()
        plan = TorchOrder.plan

        def gated(self, epoch):
            if epoch == 1:
                assert gate.wait(100)
                made.set()
            return plan(self, epoch)

        monkeypatch.setattr(TorchOrder, "plan", gated)
        node = Sampler(TorchOrder(5, 1))
        assert plain(epoch_of(node)) == TorchOrder(5, 1).indices(0, np.arange(5)).tolist()
        gate.set()
        assert made.wait(5), "epoch 1 is made although nobody has asked for it"
        node.reset(None)
        assert plain(epoch_of(node)) == TorchOrder(5, 1).indices(1, np.arange(5)).tolist()
        node.shutdown()

    def test_that_is_never_read_starts_nothing(self):
        before = threading.enumerate()
        node = Sampler(TorchOrder(5))
        node.state_dict(), node.remaining(), node.items_per_epoch()
        assert threading.enumerate() == before


class TestSamplerWrapperReads:
    def test_single_indices_by_set_epoch(self, wrap):
        node = wrap(OfEpoch(4))
        read = [item for epoch in range(3) for item in (node.reset(node.start_of(epoch)), *epoch_of(node))[1:]]
        assert read == [Indices(epoch, i, 1000 * epoch + i) for epoch in range(3) for i in range(4)]

    def test_batches_with_the_positions_of_their_samples(self, wrap):
        node = wrap(BatchSampler(OfEpoch(5), 2, drop_last=False))
        node.reset(node.start_of(2))
        assert epoch_of(node) == [
            Indices(2, np.array([0, 1]), np.array([2000, 2001])),
            Indices(2, np.array([2, 3]), np.array([2002, 2003])),
            Indices(2, np.array([4]), np.array([2004])),
        ]
        assert epochs(wrap(Batches(list(range(6))), batches=True), 2) == [[[0], [1, 2], [3, 4, 5]]] * 2

    def test_set_epoch_reaches_all_that_is_wrapped(self, wrap):
        """Seen red with only the outermost called."""
        inner = OfEpoch(6)
        inner.sampler = Batches(None)
        inner.sampler.sampler = inner  # a circle
        node = wrap(Batches(Batches(inner)), plan_ahead=False, batches=True)
        assert [type(one) for one in wrapped(node.sampler)] == [Batches, Batches, OfEpoch, Batches]
        assert epochs(node, 2)[1][0] == [[1000]]
        assert inner.asked[:2] == [0, 1]

    def test_a_share_of_single_indices_at_once(self, wrap):
        node = wrap(OfEpoch(10))
        node.reset(None)
        assert node.take(3, every=4, first=1) == Indices(0, np.array([1, 5, 9]), np.array([1, 5, 9]))
        assert node.remaining() == 0
        assert len(node.take(2)) == 0

    def test_a_share_of_batches_at_once(self, wrap):
        node = wrap(Batches(list(range(10))), batches=True)
        node.reset(None)
        assert node.take(2, every=2, first=1) == [
            Indices(0, np.array([1, 2]), np.array([1, 2])),
            Indices(0, np.arange(6, 10), np.arange(6, 10)),
        ]
        assert node.get_state()["position"] == 4

    def test_past_the_end_by_wrapping(self, wrap):
        single, batches = wrap([7, 8, 9]), wrap([[7, 8], [9]], batches=True)
        single.reset(None), batches.reset(None)
        assert single.at(np.array([2, 3, 7])) == Indices(0, np.array([2, 3, 7]), np.array([9, 7, 8]))
        assert batches.at(np.array([1, 2, 5])) == [
            Indices(0, np.array([2]), np.array([9])),
            Indices(0, np.array([3, 4]), np.array([7, 8])),
            Indices(0, np.array([8]), np.array([9])),
        ]

    def test_whatever_a_sampler_may_yield(self, wrap):
        assert epochs(wrap(np.arange(3)), 1) == epochs(wrap(torch.arange(3)), 1) == epochs(wrap(range(3)), 1) == [[0, 1, 2]]
        assert epochs(wrap([torch.arange(2), np.arange(2, 4), (4, 5)], batches=True), 1) == [[[0, 1], [2, 3], [4, 5]]]
        assert epochs(wrap(["b", "a"]), 2) == [["b", "a"]] * 2
        assert epochs(wrap([["b", 3], ["a"]], batches=True), 1) == [[["b", 3], ["a"]]]
        single = wrap(["b", "a"])
        assert pack(epoch_of(single)) == Indices(0, np.arange(2), ["b", "a"])
        assert type(next(wrap([np.int32(3)])).values) is int

    def test_counts_from_the_plan_where_it_was_made(self, wrap):
        node = wrap(Batches(list(range(6))), batches=True)
        assert node.items_per_epoch() is None
        assert node.remaining() is None
        next(node)
        assert node.items_per_epoch() == 3
        assert node.remaining() == 2
        assert node.remaining({"epoch": 1, "position": 0, "checksum": 0}) is None
        sized = wrap(OfEpoch(4))
        assert sized.items_per_epoch() == sized.remaining() == 4
        assert sized.remaining({"epoch": 9, "position": 3, "checksum": 0}) == 1
        assert sized.sampler.asked == [], "counting starts nothing"

    def test_a_length_that_is_not_true_counts_no_more(self, wrap):
        sampler = OfEpoch(4)
        sampler.__class__ = type("Lies", (OfEpoch,), {"__len__": lambda self: 7, "__reduce__": None})
        node = wrap(sampler)
        assert node.items_per_epoch() == 7
        node.reset(None)
        with pytest.warns(UserWarning, match="Lies has a length of 7, and epoch 0 has 4 items"):
            assert len(node.take(10)) == 4
        assert node.items_per_epoch() is None
        assert node.remaining() is None

    def test_an_endless_sampler_is_an_error(self, wrap):
        class Endless(OfEpoch):
            def __iter__(self):
                while True:
                    yield 0

        with pytest.raises(ValueError, match="An epoch must end"):
            next(wrap(Endless(10), plan_ahead=False))

    def test_reset_begins_the_next_epoch_once_something_was_read(self, wrap):
        node = wrap(OfEpoch(2))
        loader = Loader(node)
        assert [plain(loader) for _ in range(3)] == [[0, 1], [1000, 1001], [2000, 2001]]


def seeded_samplers():
    return {
        "RandomSampler": RandomSampler(range(N)),
        "RandomSampler, replacement": RandomSampler(range(N), replacement=True, num_samples=40),
        "RandomSampler, generator": RandomSampler(range(N), generator=torch.Generator()),
        "RandomSampler, the default generator": RandomSampler(range(N), generator=torch.default_generator),
        "SubsetRandomSampler": SubsetRandomSampler(range(10, 10 + N)),
        "WeightedRandomSampler": WeightedRandomSampler(np.arange(1.0, N), 20),
        "BatchSampler": BatchSampler(RandomSampler(range(N)), 3, drop_last=True),
        "a user's": Mixed(),
        "a user's in batches": Batches(Mixed()),
    }


def in_batches(name):
    return "batch" in name.lower()


@pytest.mark.parametrize("name", seeded_samplers())
class TestSamplerWrapperSeeds:
    def test_all_that_a_sampler_draws_from(self, wrap, name):
        """The same in two processes' worth of other draws, another order with another seed, or epoch. Seen red with each of the seedings left out."""
        read = epochs(wrap(seeded_samplers()[name], batches=in_batches(name), seed=3), 3)
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        assert epochs(wrap(seeded_samplers()[name], batches=in_batches(name), seed=3), 3) == read
        assert read[0] != read[1] != read[2] != read[0]
        assert epochs(wrap(seeded_samplers()[name], batches=in_batches(name), seed=4), 1) != read[:1]

    def test_wherever_it_runs(self, wrap, name):
        assert epochs(wrap(seeded_samplers()[name], batches=in_batches(name), plan_ahead=False), 3) == epochs(
            wrap(seeded_samplers()[name], batches=in_batches(name)), 3
        )

    @pytest.mark.parametrize("plan_ahead", [True, False])
    def test_and_leaves_no_trace_of_it(self, wrap, name, plan_ahead):
        before = global_states()
        epochs(wrap(seeded_samplers()[name], batches=in_batches(name), plan_ahead=plan_ahead), 3)
        assert global_states() == before

    def test_also_while_another_thread_draws(self, wrap, name):
        """Every draw of the other thread is the one it would have been. Seen red with a user's sampler read here instead of in a helper process."""
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        done, drawn = threading.Event(), []

        def draw():
            while not done.is_set():
                drawn.append((random.random(), np.random.random(), float(torch.rand(()))))

        thread = threading.Thread(target=draw)
        thread.start()
        try:
            epochs(wrap(seeded_samplers()[name], batches=in_batches(name)), 4)
        finally:
            done.set()
            thread.join()
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        assert drawn == [(random.random(), np.random.random(), float(torch.rand(()))) for _ in drawn]


HELPED = ("a user's", "a user's in batches", "RandomSampler, the default generator")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in HELPED else []) for name in seeded_samplers()])
def test_every_sampler_resumes_everywhere(name):
    assert_resumes(
        lambda: SamplerWrapper(seeded_samplers()[name], batches=in_batches(name), seed=2), 26 if "replacement" not in name else 45
    )


def global_states():
    return random.getstate(), [str(part) for part in np.random.get_state()], torch.get_rng_state().tolist()


class TestSamplerWrapperResumes:
    @pytest.mark.parametrize("plan_ahead", [pytest.param(True, marks=pytest.mark.slow), False])
    @pytest.mark.parametrize(
        ("build", "batches"),
        [(OfEpoch, None), (Hidden, None), (lambda: Batches(OfEpoch()), True), (lambda: BatchSampler(Hidden(), 4, True), None)],
    )
    def test_everywhere(self, build, batches, plan_ahead):
        """Over two ends of epochs. `Hidden` was seen red without the replay."""
        assert_resumes(lambda: SamplerWrapper(build(), plan_ahead=plan_ahead, batches=batches), 2 * N + 2)

    @pytest.mark.parametrize("plan_ahead", [True, False])
    def test_a_memory_also_from_the_start_of_an_epoch(self, wrap, plan_ahead):
        """Where no checksum can tell. Seen red without the second look at a copy."""
        read = epochs(wrap(Hidden()), 3)
        node = wrap(Hidden(), plan_ahead=plan_ahead)
        node.reset(node.start_of(2))
        assert plain(epoch_of(node)) == read[2]

    def test_a_memory_also_where_it_stood_elsewhere_before(self, wrap):
        items, states = following(wrap(Hidden()), 4 * N)
        node = wrap(Hidden())
        for step in (3 * N + 2, 1, N + 5, 2 * N - 1):
            node.reset(states[step])
            assert following(node, 4 * N - step - 1)[0] == items[step + 1 :]

    def test_nothing_is_replayed_for_a_sampler_without_a_memory(self, wrap):
        sampler = OfEpoch()
        node = wrap(sampler, plan_ahead=False)
        first = following(wrap([50_000]), 1)[1][0]["checksum"]
        node.reset({"epoch": 50, "position": 1, "checksum": first})
        assert next(node) == Indices(50, 1, 50_001)
        assert sampler.asked == [50]

    @pytest.mark.parametrize("changed", [OfEpoch(N - 1), Hidden(seed=6), [0, 2, 1]])
    def test_never_into_another_plan(self, wrap, changed):
        """Seen red with the checksum not compared."""
        _, states = following(wrap(OfEpoch()), N + 4)
        node = wrap(changed)
        node.reset(states[2])
        if isinstance(changed, OfEpoch):
            assert next(node).values == 3, "what is the same up to there is taken for the same"
        else:
            with pytest.raises(StateMismatch, match=rf"the checksum {states[2]['checksum']}, and now there is \d+"):
                next(node)
        node.reset(node.start_of(1))
        assert next(node).epoch == 1, "one can go on"

    def test_never_beyond_a_plan(self, wrap):
        _, states = following(wrap(OfEpoch()), N)
        node = wrap(OfEpoch(N - 2))
        node.reset(states[-1])
        with pytest.raises(StateMismatch, match="now there is only 9 items"):
            next(node)

    def test_not_from_what_is_no_state(self, wrap):
        node = wrap(OfEpoch())
        for state in (
            {"epoch": 0, "position": 0},
            {"epoch": 0, "position": -1, "checksum": 0},
            [],
            {"epoch": 0, "position": 0, "checksum": "0"},
        ):
            with pytest.raises(StateError):
                node.check(state)
        next(node)
        with pytest.raises(StateError, match="out of bounds: epoch 0 has 11 items"):
            node.check({"epoch": 0, "position": 12, "checksum": 0})

    def test_from_a_state_that_was_not_changed_since(self, wrap):
        node = wrap(OfEpoch())
        next(node)
        state = node.get_state()
        kept = dict(state)
        next(node)
        assert state == kept


class TestSamplerWrapperPlansAhead:
    def test_so_that_a_slow_sampler_makes_no_gap(self, wrap):
        """The epoch is in the making before the first sample of the one before is used. Seen red with the order for it left out."""
        sampler = Gated()
        node = wrap(sampler)
        assert next(node) == Indices(0, 0, 0)
        assert sampler.entered.wait(5)
        assert plain(epoch_of(node)) == [1, 2, 3]
        sampler.gate.set()
        node.reset(None)
        assert plain(epoch_of(node)) == [1000, 1001, 1002, 1003]

    def test_where_the_randomness_is(self):
        assert owns_its_randomness(BatchSampler(RandomSampler(range(3)), 2, False))
        assert owns_its_randomness(SequentialSampler(range(3)))
        assert owns_its_randomness([[1, 2], [3]])
        assert not owns_its_randomness(RandomSampler(range(3), generator=torch.default_generator))
        assert not owns_its_randomness(Mixed())
        assert not owns_its_randomness(BatchSampler(Mixed(), 2, False))
        assert can_be_pickled(Mixed())
        assert not can_be_pickled(Unpicklable())
        assert not can_be_pickled(Gated())

    def test_in_a_thread_and_no_process_for_torch_s_own(self, wrap):
        node = wrap(RandomSampler(range(N)))
        epochs(node, 2)
        assert isinstance(node._plans._pool, ThreadPool)

    def test_between_two_epochs_with_one_warning_where_nothing_else_is_left(self, wrap):
        node = wrap(Unpicklable())
        with pytest.warns(UserWarning, match="cannot be pickled") as caught:
            read = epochs(node, 3)
        assert len(caught) == 1
        assert read == epochs(wrap(Mixed()), 3)
        before = global_states()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            node.reset(node.start_of(3))
            next(node)
        assert global_states() == before

    def test_not_where_the_loop_updates_the_sampler(self, wrap):
        sampler = Steered()
        node = wrap(sampler, plan_ahead=False)
        read = []
        for epoch in range(3):
            node.reset(node.start_of(epoch))
            sampler.offset = 100 * epoch  # also after the reset: the epoch is read when its first item is
            read.append(next(node).values)
            sampler.offset = -1
            read += plain(epoch_of(node))
        assert read == [0, 1, 2, 100, 101, 102, 200, 201, 202]

    def test_nothing_before_the_first_item(self, wrap):
        before = threading.enumerate()
        node = wrap(Mixed())
        node.state_dict(), node.remaining(), node.items_per_epoch(), node.reset({"epoch": 3, "position": 0, "checksum": 0})
        assert threading.enumerate() == before

    def test_with_the_same_process_forever(self, wrap):
        node = wrap(Mixed())
        next(node)
        made = node._plans._pool.pids
        for state in (node.start_of(1), node.start_of(7), node.start_of(0)):
            node.reset(state)
            next(node)
        assert node._plans._pool.pids == made


class TestSamplerWrapperFails:
    @pytest.mark.parametrize("plan_ahead", [True, False])
    def test_with_the_sampler_s_error_and_its_epoch(self, wrap, plan_ahead):
        node = wrap(Broken(), plan_ahead=plan_ahead)
        node.reset(node.start_of(4))
        for _ in range(2):
            with pytest.raises(KeyError, match="no such bucket") as caught:
                next(node)
            assert any("Broken was asked for the indices of epoch 4" in note for note in caught.value.__notes__)

    @pytest.mark.parametrize("plan_ahead", [True, False])
    def test_with_an_error_where_stop_iteration_leaks(self, wrap, plan_ahead):
        """Seen red without it: an epoch with no item."""
        with pytest.raises(RuntimeError, match="WithStop raised StopIteration outside of its iterator"):
            next(wrap(WithStop(), plan_ahead=plan_ahead))

    def test_with_worker_died_where_the_helper_is_killed(self, wrap):
        with pytest.raises(WorkerDied, match=r"signal SIGKILL.*plan_ahead=False"):
            next(wrap(Fatal()))

    def test_with_closed_error_once_it_is_shut_down_or_interrupted(self, wrap):
        sampler = Gated()
        node = wrap(sampler)
        next(node)
        node.reset(node.start_of(1))
        assert sampler.entered.wait(100)
        told = []

        def read():
            try:
                next(node)
            except ClosedError as error:
                told.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        node.interrupt()
        reader.join(100)
        assert len(told) == 1
        node.reset(node.get_state())
        sampler.gate.set()
        assert next(node).values == 1000
        node.shutdown()
        node.reset(node.start_of(9))
        with pytest.raises(ClosedError):
            next(node)

    @pytest.mark.parametrize(
        "sampler",
        [
            DistributedSampler(range(8), 2, 0),
            BatchSampler(DistributedSampler(range(8), 2, 0), 2, False),
            Batches(Batches(DistributedSampler(range(8), 2, 0))),
        ],
    )
    def test_when_it_is_given_what_shards_by_itself(self, sampler):
        with pytest.raises(GraphError, match=r"DistributedSampler deals out .*from_dataset.*TorchOrder"):
            SamplerWrapper(sampler)

    @pytest.mark.parametrize("sampler", [iter([1, 2]), (i for i in range(3)), 5, None])
    def test_when_it_is_given_what_cannot_be_read_again(self, sampler):
        with pytest.raises(GraphError, match="cannot be read once for each epoch"):
            SamplerWrapper(sampler)

    def test_when_it_is_given_a_bad_seed(self):
        with pytest.raises(ValueError, match="seed=-1"):
            SamplerWrapper([1], seed=-1)


class TestLife:
    def test_an_abandoned_node_takes_its_thread_and_process_along(self):
        """`nothing_left_behind` looks. Seen red with the thread holding the planner."""
        for sampler in (RandomSampler(range(N)), Mixed()):
            node = SamplerWrapper(sampler)
            next(node)
            del node

    @pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="the helper says something through a file of its parent's")
    def test_a_sampler_that_is_stuck_is_ended_and_leaves_nothing_open(self, wrap):
        """The pool ends it by force. `nothing_left_behind` looks for its files."""
        ours, theirs = os.pipe()
        node = wrap(Stuck(theirs))
        next(node)
        assert os.read(ours, 1) == b"."
        node.shutdown()
        os.close(ours), os.close(theirs)

    @pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="without it, a process waits for the end of its pipe")
    def test_the_helper_dies_with_its_parent(self):
        """Also where a brother holds copies of every pipe's end. Seen red without `_end_with`."""
        ours, theirs = os.pipe()
        parent = os.fork()
        if parent == 0:
            try:
                node = SamplerWrapper(Mixed())
                next(node)
                if (brother := os.fork()) == 0:
                    signal.pause()
                os.write(theirs, f"{node._plans._pool.pids[0]} {brother}".encode())
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.close(theirs)
        helper, brother = (os.pidfd_open(int(pid)) for pid in os.read(ours, 100).split())
        os.waitpid(parent, 0)
        ended = select.select([helper], [], [], 5)[0]
        for fd in (helper, brother):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        os.close(ours)
        assert ended, "the helper lives on"


class Own(DistributedSampler):
    def __iter__(self):
        return iter([1])


class Longer(DistributedSampler):
    """Overrides nothing that the order depends on."""

    def note(self):
        return "hello"


class TestTakenOver:
    @pytest.mark.parametrize("kind", [DistributedSampler, Longer])
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_seed_shuffle_and_drop_last(self, kind, shuffle, drop_last):
        found = taken_over(kind(range(10), 4, 3, shuffle=shuffle, seed=6, drop_last=drop_last))
        assert found.order.settings() == (TorchOrder(10, 6) if shuffle else SequentialOrder(10)).settings()
        assert found.tail == ("drop" if drop_last else "pad")
        assert (found.batch_size, found.drop_last, found.share) == (None, False, (3, 4))

    def test_in_a_batch_sampler_too(self):
        found = taken_over(None, BatchSampler(DistributedSampler(range(10), 4, 3, drop_last=True), 5, drop_last=False))
        assert (found.batch_size, found.drop_last, found.tail) == (5, False, "drop")
        assert taken_over(None, BatchSampler(DistributedSampler(range(10), 4, 3), 5, drop_last=True)).drop_last

    @pytest.mark.parametrize("batch_size", [None, 2])
    def test_gives_every_rank_the_same_samples_as_torch(self, batch_size):
        for epoch in (0, 1):
            samplers = [DistributedSampler(range(11), 3, rank, seed=6) for rank in range(3)]
            found = taken_over(samplers[0])
            dealt = found.order.indices(epoch, np.arange(12) % 11)
            for rank, sampler in enumerate(samplers):
                sampler.set_epoch(epoch)
                assert dealt[rank::3].tolist() == list(sampler)

    @pytest.mark.parametrize("sampler", [None, RandomSampler(range(3)), [1, 2], BatchSampler(RandomSampler(range(3)), 2, False), Mixed()])
    def test_is_nothing_else(self, sampler):
        assert taken_over(sampler, None) is None
        assert taken_over(None, sampler) is None
        refuse_sharded(sampler)

    def test_refuses_a_distributed_sampler_with_an_order_of_its_own(self):
        for sampler in (Own(range(4), 2, 0), BatchSampler(Own(range(4), 2, 0), 2, False)):
            with pytest.raises(
                GraphError, match=r"Own deals out .* the loader would .* Pass the sampler that it shards, or build it with num_replicas=1"
            ):
                taken_over(sampler)

    def test_refuses_any_other_that_shards(self):
        sampler = OfEpoch()
        sampler.rank = 0
        with pytest.raises(GraphError, match="OfEpoch deals out"):
            refuse_sharded(Batches(Batches(sampler)))
        assert taken_over(Batches(DistributedSampler(range(4), 2, 0))) is None, "whose batches are its own: refuse_sharded has the word"


def test_values_are_read_once_each(wrap):
    """A plan is made once for an epoch, whoever asks how often."""
    sampler = OfEpoch()
    node = wrap(sampler, plan_ahead=False)
    for _ in range(3):
        node.reset(node.start_of(0))
        node.take(5), node.at(np.arange(3)), node.remaining()
    assert sampler.asked == [0]
    assert all(left < right for left, right in pairwise(node.at(np.arange(N)).plain()))
