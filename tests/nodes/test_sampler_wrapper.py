"""Sampler and SamplerWrapper: by value and in order, resumed at every step, ahead of time, and without a trace in the
global generators."""

from __future__ import annotations

import os
import select
import threading

import pytest
import torch
from global_draws import draw, generators, seeded
from samplers import Drawing, Remembering, Told, following, plain
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from torch.utils.data import Sampler as TorchSampler

from penstock._errors import ClosedError, GraphError, StateMismatch
from penstock._fetch.indices import Indices
from penstock._nodes.distributed_sampler import taken_over
from penstock._nodes.sampler_traits import wrapped
from penstock._nodes.sampler_wrapper import SamplerWrapper

N = 11


class OfEpoch(Told):
    """Says how many items it has, and keeps the epochs that it was told."""

    def __init__(self, n=N):
        super().__init__(n)
        self.asked = []

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.asked.append(epoch)

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
    """Waits at a gate before it yields an epoch after the first. It is a pipe, so that a copy waits at the same
    gate."""

    epoch = 0
    read, write = os.read, os.write

    def __init__(self):
        (self.entered, self.enter), (self.gate, self.key) = os.pipe(), os.pipe()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        if self.epoch:
            self.write(self.enter, b".")
            self.read(self.gate, 1)
        return iter(range(1000 * self.epoch, 1000 * self.epoch + 4))


@pytest.fixture
def gated():
    """Close its ``key`` to open the gate."""
    sampler = Gated()
    yield sampler
    for end in (sampler.entered, sampler.enter, sampler.gate):
        os.close(end)


class Unpicklable(Drawing):
    def __reduce__(self):
        raise TypeError("stays here")

    __deepcopy__ = None


class Broken(TorchSampler):
    def __iter__(self):
        yield 0
        raise KeyError("no such bucket")


class WithStop(TorchSampler):
    def set_epoch(self, epoch):
        raise StopIteration

    def __iter__(self):
        return iter([1])


def epoch_of(node):
    """The rest of an epoch."""
    return list(node)


def epochs(node, count):
    """The values of the first ``count`` epochs, read as a `Cycler` does."""
    read = []
    for epoch in range(count):
        node.reset(node.start_of(epoch))
        read.append(plain(epoch_of(node)))
    return read


class TestSamplerWrapperReads:
    def test_set_epoch_reaches_all_that_is_wrapped(self, wrap):
        """Seen red with only the outermost called."""
        inner = OfEpoch(6)
        inner.sampler = Batches(None)
        inner.sampler.sampler = inner  # a circle
        node = wrap(Batches(Batches(inner)), plan_ahead=False, batches=True)
        assert [type(one) for one in wrapped(node.sampler)] == [Batches, Batches, OfEpoch, Batches]
        assert epochs(node, 2)[1][0] == [[1000]]
        assert inner.asked[:2] == [0, 1]


def seeded_samplers():
    return {
        "RandomSampler": RandomSampler(range(N)),
        "RandomSampler, generator": RandomSampler(range(N), generator=torch.Generator()),
        "RandomSampler, the default generator": RandomSampler(range(N), generator=torch.default_generator),
        "BatchSampler": BatchSampler(RandomSampler(range(N)), 3, drop_last=True),
        "a user's": Drawing(N),
        "a user's in batches": Batches(Drawing(N)),
    }


def in_batches(name):
    return "batch" in name.lower()


class TestSamplerWrapperSeeds:
    @pytest.mark.parametrize("name", seeded_samplers())
    def test_all_that_a_sampler_draws_from(self, wrap, name):
        """Another order with another seed, or epoch, and no trace in the global generators. Seen red with each of the
        seedings left out."""
        read = epochs(wrap(seeded_samplers()[name], batches=in_batches(name), seed=3), 3)
        seeded(1)
        before = generators()
        assert epochs(wrap(seeded_samplers()[name], batches=in_batches(name), seed=3, plan_ahead=True), 3) == read
        assert generators() == before
        assert read[0] != read[1] != read[2] != read[0]
        assert epochs(wrap(seeded_samplers()[name], batches=in_batches(name), seed=4), 1) != read[:1]

    def test_also_while_another_thread_draws(self, wrap):
        """Every draw of the other thread is the one it would have been, because torch's own sampler draws from a
        generator that it is lent."""
        seeded(7)
        done, drawn = threading.Event(), []

        def keep_drawing():
            while not done.is_set():
                drawn.append(draw())

        thread = threading.Thread(target=keep_drawing)
        thread.start()
        try:
            epochs(wrap(BatchSampler(RandomSampler(range(N)), 3, drop_last=True)), 4)
        finally:
            done.set()
            thread.join()
        seeded(7)
        assert drawn == [draw() for _ in drawn]

    def test_the_generator_of_torchs_sampler_is_the_users(self, wrap):
        """Two loaders may share it, and neither moves it."""
        given = torch.Generator().manual_seed(3)
        before, sampler = given.get_state(), RandomSampler(range(N), generator=given)
        one, other = wrap(sampler, seed=4), wrap(sampler, seed=4)
        assert next(one) == next(other)
        assert epochs(one, 2) == epochs(other, 2) == epochs(wrap(RandomSampler(range(N)), seed=4), 2)
        assert torch.equal(given.get_state(), before)


class TestSamplerWrapperResumes:
    @pytest.mark.parametrize("changed", [OfEpoch(N - 1), Remembering(N, seed=6), [0, 2, 1]])
    def test_never_into_another_plan(self, wrap, changed):
        """Seen red with the checksum not compared."""
        _, states = following(wrap(OfEpoch()), N + 4)
        node = wrap(changed)
        node.reset(states[2])
        if isinstance(changed, OfEpoch):
            assert next(node).values == 3, "what is the same up to there is taken for the same"
        else:
            with pytest.raises(StateMismatch, match=rf"the checksum {states[2]['checksum']}, and now it is \d+"):
                next(node)
        node.reset(node.start_of(1))
        assert next(node).epoch == 1, "one can go on"

    def test_not_from_behind_the_end(self, wrap):
        node = wrap(OfEpoch())
        next(node)
        node.reset({"epoch": 0, "position": 12, "checksum": 0})
        with pytest.raises(StateMismatch, match="there are only 11 items"):
            next(node)


class TestSamplerWrapperPlansAhead:
    def test_so_that_a_slow_sampler_makes_no_gap(self, wrap, gated):
        """The epoch is in the making before the first sample of the one before is used. Seen red with the order for it
        left out."""
        node = wrap(gated, plan_ahead=True)
        assert next(node) == Indices(0, 0, 0)
        assert select.select([gated.entered], [], [], 5)[0]
        assert plain(epoch_of(node)) == [1, 2, 3]
        os.close(gated.key)
        node.reset(None)
        assert plain(epoch_of(node)) == [1000, 1001, 1002, 1003]

    def test_not_where_it_cannot_be_copied(self, wrap):
        node = wrap(Unpicklable(N), plan_ahead=True)
        assert epochs(node, 3) == epochs(wrap(Drawing(N)), 3)
        before = generators()
        node.reset(node.start_of(3))
        next(node)
        assert generators() == before


class TestSamplerWrapperFails:
    def test_with_the_sampler_s_error_and_its_epoch(self, wrap):
        node = wrap(Broken())
        for _ in range(2):
            node.reset(node.start_of(0))
            with pytest.raises(KeyError, match="no such bucket") as caught:
                next(node)
            assert any("while reading the indices of epoch 0 from Broken" in note for note in caught.value.__notes__)

    def test_with_an_error_where_stop_iteration_leaks(self, wrap):
        """Seen red without it: an epoch with no item."""
        with pytest.raises(RuntimeError, match=r"WithStop.set_epoch\(0\) raised StopIteration"):
            next(wrap(WithStop()))

    def test_with_closed_error_once_it_is_shut_down_or_interrupted(self, wrap, gated):
        node = wrap(gated, plan_ahead=True)
        next(node)
        node.reset(node.start_of(1))
        assert os.read(gated.entered, 1) == b"."
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
        os.close(gated.key)
        assert next(node).values == 1000
        node.shutdown()
        node.reset(node.start_of(9))
        with pytest.raises(ClosedError):
            next(node)

    @pytest.mark.parametrize("sampler", [iter([1, 2]), (i for i in range(3)), 5, None])
    def test_when_it_is_given_what_cannot_be_read_again(self, sampler):
        with pytest.raises(GraphError, match="cannot be read once for each epoch"):
            SamplerWrapper(sampler)


class TestLife:
    def test_an_abandoned_node_takes_its_thread_along(self):
        """`nothing_left_behind` looks. Seen red with the thread holding the planner."""
        for sampler in (RandomSampler(range(N)), Drawing(N)):
            node = SamplerWrapper(sampler)
            next(node)
            del node


class Own(DistributedSampler):
    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda: SamplerWrapper(Batches(DistributedSampler(range(8), 2, 0))),
            r"DistributedSampler shards .*num_replicas=1, rank=0, so that Batches yields .*split='own'",
        ),
        (
            lambda: SamplerWrapper(DistributedSampler(range(8), 2, 0)),
            r"DistributedSampler shards .*from_dataset.*TorchOrder",
        ),
        (lambda: taken_over(Own(range(4), 2, 0)), r"Own shards .* the loader would .*num_replicas=1.*split='own'"),
        (
            lambda: taken_over(BatchSampler(Own(range(4), 2, 0), 2, False)),
            r"Own shards .* the loader would .*num_replicas=1.*split='own'",
        ),
    ],
)
def test_a_sampler_that_shards_is_refused(build, said):
    with pytest.raises(GraphError, match=said):
        build()
