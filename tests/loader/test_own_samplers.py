"""Samplers that shard by themselves: refused with both ways out, or taken as they are with ``split="own"``. And
samplers with a length and no end."""

from __future__ import annotations

import json
import random
import threading
from itertools import chain, count, islice, repeat

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

import penstock
from penstock import GraphError, Loader, StateMismatch
from penstock.testing import Tagged

N = 14
METHODS = {"inline": {}, "processes": {"num_workers": 2}}


class Private(Sampler):
    """Its rank is where nobody looks for it, as in detectron2. Its own generator decides the order of each pass."""

    def __init__(self, rank, world_size):
        self._rank, self._world_size = rank, world_size

    def __iter__(self):
        return iter(
            torch.randperm(N, generator=torch.Generator().manual_seed(5)).tolist()[self._rank :: self._world_size]
        )

    def __len__(self):
        return len(range(self._rank, N, self._world_size))


class Endless(Private):
    """mmengine's ``InfiniteSampler``: it has a length and no end."""

    def __iter__(self):
        return (k % N for k in count(self._rank, self._world_size))

    def __len__(self):
        return N


def distributed(rank, world_size):
    return DistributedSampler(range(N), world_size, rank, seed=2)


SHARES = {
    "a private rank": lambda rank, size: {"batch_size": 3, "sampler": Private(rank, size)},
    "a DistributedSampler": lambda rank, size: {"batch_size": 3, "sampler": distributed(rank, size)},
    "batches": lambda rank, size: {"batch_sampler": BatchSampler(distributed(rank, size), 3, False)},
    "an infinite one": lambda rank, size: {"batch_size": 3, "sampler": Endless(rank, size), "infinite": True},
}


def build(what, rank, size=2, how="inline"):
    return Loader.from_dataset(
        Tagged(N), **SHARES[what](rank, size), rank=rank, world_size=size, split="own", **METHODS[how]
    )


def batches(loader, n):
    """The next ``n`` batches, over the ends of epochs."""
    read = []
    while len(read) < n:
        read += [batch.tolist() for batch in islice(loader, n - len(read))]
    return read


def expected(what, rank, size, n):
    words = SHARES[what](rank, size)
    sampler, read = words.get("sampler") or words["batch_sampler"], []
    told = getattr(sampler, "sampler", sampler)
    for epoch in range(4):
        if hasattr(told, "set_epoch"):
            told.set_epoch(epoch)
        items = iter(sampler)
        pieces = items if isinstance(sampler, BatchSampler) else iter(lambda items=items: [*islice(items, 3)], [])
        read += [[1000 * epoch + k for k in piece] for piece in islice(pieces, n - len(read))]
    return read[:n]


@pytest.mark.parametrize("what", SHARES)
class TestOwn:
    def test_the_share_is_taken_as_it_is(self, what):
        """Seen to fail: refused, for data that is read by index."""
        for rank in range(2):
            with build(what, rank) as loader:
                assert batches(loader, 8) == expected(what, rank, 2, 8)

    def test_it_resumes_on_any_rank_of_as_many(self, what):
        """Rank 0's state on each rank, at every step of two epochs. Seen to fail: with a checksum of the share in the
        state."""
        with build(what, 0) as first, build(what, 1) as second:
            ours, theirs = (chain.from_iterable(repeat(one)) for one in (first, second))
            for step in range(7):
                states = [json.loads(json.dumps(one.state_dict())) for one in (first, second)]
                assert states[0] == states[1]
                for rank in range(2):
                    how = "processes" if (what, step, rank) == ("batches", 2, 1) else "inline"
                    with build(what, rank, how=how) as resumed:
                        resumed.load_state_dict(states[0])
                        assert batches(resumed, 4) == expected(what, rank, 2, step + 4)[step:]
                next(ours), next(theirs)

    def test_not_at_another_world_size(self, what):
        with build(what, 0) as loader:
            next(iter(loader))
            state = loader.state_dict()
        with build(what, 0, 1) as other:
            other.load_state_dict(state)
            with pytest.raises(StateMismatch, match=r"saved at a world size of 2 and counts the items of a share"):
                next(iter(other))


def test_a_state_that_counts_more_than_this_share_has_is_refused():
    class Uneven(Private):
        def __iter__(self):
            return iter(range(8 if self._rank == 0 else 2))

        def __len__(self):
            return 8 if self._rank == 0 else 2

    def uneven(rank):
        return Loader.from_dataset(Tagged(N), 2, sampler=Uneven(rank, 2), rank=rank, world_size=2, split="own")

    with uneven(0) as loader:
        next(batches := iter(loader)), next(batches)
        state = loader.state_dict()
    with uneven(1) as other:
        other.load_state_dict(state)
        with pytest.raises(
            StateMismatch,
            match=(
                r"counts 4 items of epoch 0, but the share that Uneven yields on this rank has 2.* save the states of "
                r"all ranks"
            ),
        ):
            next(iter(other))


def test_split_own_is_for_a_sampler_that_shards():
    with pytest.raises(ValueError, match="or pass a sampler or a batch sampler that yields the indices of this rank"):
        Loader.from_dataset(range(N), split="own")
    with pytest.raises(ValueError, match="split='own' is for|splits each batch"):
        Loader.from_dataset(range(N), sampler=RandomSampler(range(N)), split="within")


class Grouped(BatchSampler):
    """Batches of one parity, as torchvision's ``GroupedBatchSampler``."""

    def __init__(self, sampler, name="sampler"):
        setattr(self, name, sampler)
        self.name, self.batch_size, self.drop_last = name, 2, True

    def __iter__(self):
        waiting = {0: [], 1: []}
        for index in getattr(self, self.name):
            waiting[index % 2].append(index)
            if len(waiting[index % 2]) == 2:
                yield waiting[index % 2]
                waiting[index % 2] = []

    def __len__(self):
        parities = [index % 2 for index in getattr(self, self.name)]
        return parities.count(0) // 2 + parities.count(1) // 2


@pytest.mark.parametrize("name", ["sampler", "base"])
def test_a_batch_sampler_over_a_distributed_sampler_is_told_how_to_keep_its_groups(name):
    """Whatever it calls it. Seen to fail: the advice was to pass the DistributedSampler itself, which loses the groups;
    under another name, half of the data."""
    said = (
        "DistributedSampler shards .* Build it with num_replicas=1, rank=0, so that Grouped yields what all ranks get, "
        "and pass Grouped as before. Or pass split='own'"
    )
    words = {"dataset": Tagged(N), "world_size": 2}
    with pytest.raises(GraphError, match=said):
        Loader.from_dataset(**words, rank=0, batch_sampler=Grouped(distributed(0, 2), name))
    hands = []
    for rank in range(2):
        with Loader.from_dataset(**words, rank=rank, batch_sampler=Grouped(distributed(0, 1), name)) as loader:
            hands += [batch.tolist() for batch in loader]
    assert all(len({value % 2 for value in batch}) == 1 for batch in hands)
    assert sorted(hands) == sorted(Grouped(distributed(0, 1)))
    own = []
    for rank in range(2):
        with Loader.from_dataset(
            **words, rank=rank, batch_sampler=Grouped(distributed(rank, 2), name), split="own"
        ) as loader:
            own += [batch.tolist() for batch in loader]
    assert own == [batch for rank in range(2) for batch in Grouped(distributed(rank, 2), name)]


def test_the_advice_to_a_sampler_without_an_end_names_its_share():
    """Seen to fail: it named only tail='drop', with which a sampler that shards loses a quarter."""

    class Unsized(Endless):
        __len__ = None

    with (
        Loader.from_dataset(range(N), sampler=Unsized(0, 2), rank=0, world_size=2) as loader,
        pytest.raises(
            GraphError,
            match=(
                r"which has no __len__, cannot be read .*If it already yields the share of this rank only, pass "
                r"split='own' instead"
            ),
        ),
    ):
        next(iter(loader))


def test_a_sampler_with_a_length_and_no_end():
    """Seen to fail: refused with infinite=True, too."""
    words = {"dataset": Tagged(N), "batch_size": 4, "sampler": Endless(0, 1)}
    with (
        Loader.from_dataset(**words) as loader,
        pytest.raises(ValueError, match="An epoch must end.*pass infinite=True"),
    ):
        next(iter(loader))
    with Loader.from_dataset(**words, infinite=True) as loader:
        read = [value for batch in islice(loader, 5) for value in batch.tolist()]
        state = loader.state_dict()
    assert read == [k % N for k in range(20)]
    with Loader.from_dataset(**words, infinite=True) as resumed:
        resumed.load_state_dict(state)
        assert next(iter(resumed)).tolist() == [k % N for k in range(20, 24)]


class Cut:
    """What a sampler of speech recordings yields: no index."""

    def __init__(self, number):
        self.number = number


class Cuts:
    """Its own iterator, as lhotse's samplers are: it begins anew whenever somebody asks for an iterator."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.rest = [*range(N)]
        random.Random(self.epoch).shuffle(self.rest)
        return self

    def __next__(self):
        if not self.rest:
            raise StopIteration
        return Cut(1000 * self.epoch + self.rest.pop())


class OfCuts:
    def __getitem__(self, cut):
        return cut.number


@pytest.mark.parametrize(("length", "how"), [(None, "processes"), (N, "inline")])
def test_a_sampler_that_is_its_own_iterator(length, how):
    """And yields objects, which are told apart by what they hold, not by an address. It is resumed in the middle of an
    epoch; another dataset is refused. Seen to fail: "cannot be read once for each epoch"."""

    class Sized(Cuts):
        def __len__(self):
            return length

    def build():
        sampler = Cuts() if length is None else Sized()
        return Loader.from_dataset(OfCuts(), None, sampler=sampler, **METHODS[how])

    def in_order(epoch):
        sampler = Cuts()
        sampler.set_epoch(epoch)
        return [cut.number for cut in sampler]

    expected = [in_order(epoch) for epoch in range(3)]
    with build() as loader:
        assert [list(loader), list(loader)] == expected[:2]
        rest = iter(loader)
        assert [next(rest), next(rest)] == expected[2][:2]
        state = loader.state_dict()
    with build() as again:
        again.load_state_dict(state)
        assert list(again) == expected[2][2:]
    other = dict(state, penstock=state["penstock"].replace('"checksum": ', '"checksum": 1'))
    with build() as again:
        again.load_state_dict(other)
        with pytest.raises(StateMismatch, match="did not reproduce what it yielded in epoch 2 up to position 2"):
            next(iter(again))


class Goes:
    """Counts its passes."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([100 * self.passes + k for k in range(4)])


class Interrupted:
    strikes = 0

    def __getitem__(self, index):
        if self.strikes:
            self.strikes -= 1
            raise KeyboardInterrupt
        return index


def test_an_interrupt_moves_no_sampler_that_remembers():
    """Seen to fail: after Ctrl-C in the first batch of epoch 1, epoch 1 came as epoch 2."""

    data = Interrupted()
    with Loader.from_dataset(data, None, sampler=Goes()) as loader:
        assert list(loader) == [100, 101, 102, 103]
        data.strikes = 1
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert list(loader) == [200, 201, 202, 203]
        assert list(loader) == [300, 301, 302, 303]


def test_after_an_interrupt_a_sampler_is_what_it_is_then():
    """Seen to fail: a change after Ctrl-C in the first batch came an epoch late."""

    class Told:
        order = (0, 1, 2, 3)

        def set_epoch(self, epoch):
            pass

        def __iter__(self):
            return iter(self.order)

    data, told, weighted = Interrupted(), Told(), WeightedRandomSampler([1.0, 0.0], 4)
    for sampler, change in (
        (told, lambda: setattr(told, "order", (3, 2, 1, 0))),
        (weighted, lambda: setattr(weighted, "weights", torch.tensor([0.0, 1.0]))),
    ):
        with Loader.from_dataset(data, None, sampler=sampler) as loader:
            before, data.strikes = list(loader), 1
            with pytest.raises(KeyboardInterrupt):
                next(iter(loader))
            change()
            assert list(loader) == ([3, 2, 1, 0] if sampler is told else [1, 1, 1, 1]) != before


def test_a_refresh_between_two_epochs_moves_no_sampler_that_remembers():
    """Also where a thread reads the graph ahead. Seen to fail: an epoch was left out."""

    nodes = penstock.nodes
    graph = nodes.ParallelMapper(nodes.Batcher(nodes.Cycler(nodes.SamplerWrapper(Goes())), 2), lambda batch: batch, 1)
    with Loader(nodes.Prefetcher(graph)) as loader:
        for epoch in range(1, 4):
            assert list(loader) == [[100 * epoch, 100 * epoch + 1], [100 * epoch + 2, 100 * epoch + 3]]
            loader.refresh()
            threading.Event().wait(0.05)  # a thread that wrongly reads has the time to


def test_a_finite_sampler_may_be_read_forever():
    """Its length counts: a short last round is filled up."""
    with Loader.from_dataset(Tagged(5), sampler=[0, 1, 2, 3, 4], infinite=True, rank=1, world_size=2) as loader:
        assert [batch.item() for batch in islice(loader, 7)] == [1, 3, 0, 1001, 1003, 1000, 2001]


def test_the_names_are_public():
    node = penstock.nodes.SamplerWrapper([0, 1], split="own", infinite=True)
    assert node.facts.sharded_by == "own"
    with pytest.raises(ValueError, match="split='mine' must be 'items' or 'own'"):
        penstock.nodes.SamplerWrapper([0, 1], split="mine")
