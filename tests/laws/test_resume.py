"""The laws of state: resume, small, transparent, one state. On every node, in order, by value."""

from __future__ import annotations

import json
import random
import threading
from itertools import islice

import pytest
import torch
import torchdata.nodes
from dealing import EVEN, TAILS
from fleets import chain
from pairwise import engines
from resumable import Resumable
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from ways import NAMED

import penstock
from penstock import Loader
from penstock.nodes import (
    Batcher,
    Cycler,
    Fetch,
    IterableSource,
    Mapper,
    Node,
    ParallelMapper,
    Prefetcher,
    Sampler,
    Sharder,
)
from penstock.orders import SequentialOrder, ShuffledOrder, TorchOrder, WeightedOrder
from penstock.testing import Tagged, assert_resumes_everywhere

N = 11
ORDERS = {
    "sequential": lambda: SequentialOrder(N),
    "shuffled": lambda: ShuffledOrder(N, seed=3),
    "torch": lambda: TorchOrder(N, seed=3),
    "weighted": lambda: WeightedOrder(list(range(1, N + 1)), N, seed=3),
}


class Doubled(Node):
    """A user's node: a transform and nothing else."""

    def transform(self, item):
        return item * 2


class Counting(Node):
    """A user's node with a state: it counts the items, and the count changes what it delivers."""

    def __init__(self, source) -> None:
        super().__init__(source)
        self.count = 0

    def reset(self, initial_state=None) -> None:
        super().reset(initial_state["source"] if initial_state else None)
        self.count = initial_state["count"] if initial_state else 0

    def next(self):
        item = next(self.source)
        if isinstance(item, penstock.nodes.EndOfEpoch):
            self.count = 0
            return item
        self.count += 1
        return (self.count, item)

    def get_state(self):
        return {"count": self.count, "source": self.source.get_state()}

    def start_of(self, epoch, after=None):
        return {"count": 0, "source": self.source.start_of(epoch, after)}

    def check(self, state) -> None:
        self.source.check(state["source"])


def graph(order="shuffled", **shard) -> Sharder:
    return Sharder(Cycler(Sampler(ORDERS[order]())), **shard)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_resumes_everywhere(order):
    assert_resumes_everywhere(lambda: Batcher(graph(order), 4), steps=11)


def test_cycler_resumes_everywhere():
    """Seen to fail when reset forgot `_ended`, and when the mark's state was that of the epoch before."""
    assert_resumes_everywhere(lambda: Cycler(Sampler(ShuffledOrder(4))), steps=14)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_sharder_resumes_everywhere(tail, rank):
    """Seen to fail when the state was taken in mid-round, and when "drop" did not skip the remainder."""
    assert_resumes_everywhere(lambda: graph(rank=rank, world_size=3, tail=tail), steps=12)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_batcher_resumes_everywhere(drop_last, rank):
    assert_resumes_everywhere(lambda: Batcher(graph(rank=rank, world_size=2), 4, drop_last), steps=9)


@pytest.mark.parametrize("wrap", [Doubled, Counting, lambda source: Mapper(source, str), Prefetcher])
def test_nodes_above_the_cycler_resume_everywhere(wrap):
    assert_resumes_everywhere(lambda: wrap(Cycler(Sampler(ShuffledOrder(5)))), steps=14)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetcher_resumes_everywhere(depth):
    """Seen to fail when the reader's state was read after the item had gone on."""
    assert_resumes_everywhere(lambda: Prefetcher(Batcher(graph(), 4), depth), steps=11)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_thread_mapper_resumes_everywhere(in_order, workers):
    """Out of order, one worker at a time, so that the order of delivery repeats; any order: test_parallel_mapper."""
    workers = min(workers, 1) if not in_order else workers
    assert_resumes_everywhere(
        lambda: ParallelMapper(Batcher(graph(), 4), Fetch(Tagged(N)), workers, in_order), steps=11
    )


SAMPLERS = {
    "SequentialSampler": lambda: SequentialSampler(range(N)),
    "RandomSampler": lambda: RandomSampler(range(N)),
    "RandomSampler with replacement": lambda: RandomSampler(range(N), replacement=True, num_samples=8),
    "RandomSampler with a generator": lambda: RandomSampler(range(N), generator=torch.Generator().manual_seed(5)),
    "SubsetRandomSampler": lambda: SubsetRandomSampler([1, 3, 5, 7, 9]),
    "WeightedRandomSampler": lambda: WeightedRandomSampler(range(1, N + 1), 9),
    "a list": lambda: [3, 1, 4, 1, 5],
}
BATCH_SAMPLERS = {
    "BatchSampler": lambda: BatchSampler(RandomSampler(range(N)), 4, False),
    "BatchSampler that drops": lambda: BatchSampler(SequentialSampler(range(N)), 4, True),
    "lists of other lengths": lambda: [[1, 2], [3], [4, 5, 6], [0]],
}


@pytest.mark.parametrize(("sampler", "method"), engines(SAMPLERS))
def test_every_sampler_of_torchs_resumes_everywhere(sampler, method):
    options = NAMED[method]
    assert_resumes_everywhere(
        lambda: Loader.from_dataset(Tagged(N), batch_size=4, sampler=SAMPLERS[sampler](), **options), steps=8
    )


@pytest.mark.parametrize(("sampler", "method"), engines(BATCH_SAMPLERS))
def test_every_batch_sampler_resumes_everywhere(sampler, method):
    options = NAMED[method]
    assert_resumes_everywhere(
        lambda: Loader.from_dataset(Tagged(N), batch_sampler=BATCH_SAMPLERS[sampler](), **options), steps=9
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tail", EVEN)
def test_batch_samplers_under_ranks_resume_everywhere(rank, tail):
    options = {"rank": rank, "world_size": 2, "tail": tail}
    for sampler in BATCH_SAMPLERS.values():
        assert_resumes_everywhere(
            lambda make=sampler: Loader.from_dataset(Tagged(N), batch_sampler=make(), **options), steps=6
        )


def canonical(**options) -> Loader:
    return Loader.from_dataset(Tagged(N), batch_size=4, shuffle=True, **options)


@pytest.mark.slow
def test_canonical_graph_with_processes_resumes_everywhere():
    options = {"num_workers": 2, "world_size": 2, "rank": 1}
    assert_resumes_everywhere(lambda: canonical(**options), steps=5)
    graphs = []
    assert_resumes_everywhere(lambda: graphs.append(canonical(**options)) or graphs[-1].root, steps=7)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 3, "rank": 1, "world_size": 2, "drop_last": True}]
)
def test_canonical_graph_with_threads_resumes_everywhere(options):
    assert_resumes_everywhere(lambda: canonical(method="thread", **options), steps=9)


@pytest.mark.parametrize(
    "source",
    [
        lambda: torchdata.nodes.IterableWrapper(range(7)),
        lambda: torchdata.nodes.Batcher(torchdata.nodes.IterableWrapper(range(7)), 2, drop_last=False),
        lambda: torchdata.nodes.Mapper(torchdata.nodes.IterableWrapper(range(5)), str),
        lambda: torchdata.nodes.SamplerWrapper(torch.utils.data.SequentialSampler(range(5))),
        lambda: IterableSource(Resumable(7)),
        lambda: Counting(torchdata.nodes.IterableWrapper(range(5))),
    ],
)
def test_foreign_sources_below_the_cycler_resume_everywhere(source):
    assert_resumes_everywhere(
        lambda: Prefetcher(ParallelMapper(Batcher(Sharder(Cycler(source()), tail="drop"), 2), str, 2)), steps=13
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_unsized_source_is_dealt_and_resumes_everywhere(rank):
    assert_resumes_everywhere(
        lambda: Batcher(Sharder(Cycler(IterableSource(Resumable(7), split="items")), rank, 2, tail="drop"), 2), steps=9
    )


@pytest.mark.filterwarnings("ignore:list has no state_dict")
def test_iterable_without_a_state_is_read_again():
    assert_resumes_everywhere(lambda: Batcher(Cycler(IterableSource([0, None, {}, "x", 4])), 2), steps=12)


def test_reading_again_is_said():
    source = IterableSource(list(range(5)))
    with pytest.warns(UserWarning, match="reads its first 3 items again"):
        source.reset({"epoch": 0, "position": 3, "ended": False, "iterable": None})
    assert next(source).values == 3


# The law itself must be able to fail: one planted fault for each thing it looks at.


class Planted(Node):
    """Adds its own count to items, with a selectable fault."""

    fault = ""

    def __init__(self, source) -> None:
        super().__init__(source)
        self.count = 0

    def reset(self, initial_state=None) -> None:
        super().reset(initial_state["source"] if initial_state else None)
        self.count = 0 if self.fault == "forgets" or not initial_state else initial_state["count"]

    def next(self):
        item = next(self.source)
        if isinstance(item, penstock.nodes.EndOfEpoch):
            self.count = self.count if self.fault == "goes on" else 0
            return item
        self.count += 1
        return item.values + 100 * (self.count if self.fault in ("forgets", "goes on") else 0)

    def get_state(self):
        live = self.__dict__.setdefault("live", {})
        state = live if self.fault == "live" else {}
        hidden = self.fault == "hides" and self.count % 3 == 1
        state.update(count=0 if hidden else self.count, source=self.source.get_state())
        return state

    def start_of(self, epoch, after=None):
        return {"count": 0, "source": self.source.start_of(epoch, after)}

    def check(self, state) -> None:
        pass


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("forgets", r"reset to the state after 1 steps reports a different one at once: count was 1 and is 0$"),
        ("hides", r"the state after 1 steps|resumed after 1 steps"),
        ("goes on", r"left after one item, and item 0 of the second .*: was 500 and is 100\. .*Look at Faulty"),
    ],
)
def test_the_law_sees_a_planted_fault(fault, says):
    class Faulty(Planted):
        pass

    Faulty.fault = fault
    with pytest.raises(AssertionError, match=says):
        assert_resumes_everywhere(lambda: Faulty(Cycler(Sampler(SequentialOrder(4)))), steps=11)
    Faulty.fault = ""
    assert_resumes_everywhere(lambda: Faulty(Cycler(Sampler(SequentialOrder(4)))), steps=11)


class Restless(Mapper):
    """Gives other items each time that it is built."""

    built = 0

    def __init__(self, source, gives) -> None:
        Restless.built += 1
        super().__init__(source, lambda _, built=Restless.built: gives(built))


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (lambda built: "{not JSON" + "!" * built, r"another item: was '{not JSON!+' and is '{not JSON!+'$"),
        (lambda built: {1: built, "a": 0}, r"another item: 1 was \d+ and is \d+$"),
        (
            lambda built: {"x": 0, "label": torch.full((50,), built)},
            r"another item: label\[1\]\[0\] was \d+ and is \d+, and 49 more differences$",
        ),
    ],
)
def test_the_law_names_what_differs(gives, says):
    """Seen to fail: texts that were parsed, and keys of two types."""
    with pytest.raises(AssertionError, match=says):
        assert_resumes_everywhere(lambda: Restless(Cycler(Sampler(SequentialOrder(4))), gives), steps=11)


def test_the_law_names_the_field_of_a_loaders_state():
    """Seen to fail: a state's first 80 characters, which are those of every state."""

    class Faulty(Planted):
        fault = "hides"

    with pytest.raises(AssertionError, match=r"is another: state\.count was 2 and is 0$"):
        assert_resumes_everywhere(lambda: Loader(Faulty(Cycler(Sampler(SequentialOrder(4))))), steps=11)


def test_the_law_sees_draws_that_nothing_seeds():
    """What a mapper behind another draws has no seed. Seen to fail: the resumed graph found the generators as the first
    one had."""
    before = random.getstate()
    with pytest.raises(AssertionError, match="resumed after 0 steps, step 0 gives another item") as raised:
        assert_resumes_everywhere(
            lambda: Mapper(Mapper(Cycler(Sampler(SequentialOrder(4))), int), lambda item: item + random.random()),
            steps=11,
        )
    assert "seed in build what it draws" in raised.value.__notes__[0]
    assert random.getstate() == before


def test_the_law_sees_data_that_build_draws():
    """Seen to fail: an error that did not say what differed."""
    build = lambda: Loader.from_dataset(range(8), 2, shuffle=True, seed=random.getrandbits(20))  # noqa: E731
    with pytest.raises(penstock.StateMismatch, match="seed was") as raised:
        assert_resumes_everywhere(build, steps=9)
    assert "seed in build what it draws" in raised.value.__notes__[0]


class Divides:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return 1 // (2 - index)


def test_the_law_closes_a_graph_that_raises():
    """Seen to fail: the threads of the first graph stayed, as long as the error was kept."""
    with pytest.raises(ZeroDivisionError) as kept:
        assert_resumes_everywhere(lambda: Loader.from_dataset(Divides(), 1, num_workers=2, method="thread"), steps=9)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("penstock")] == []
    assert kept.value.args


def test_the_law_begins_where_the_graph_does():
    """Seen to fail: the second epoch was always epoch 1."""

    def build():
        node = Counting(Cycler(Sampler(ShuffledOrder(5))))
        node.reset(node.start_of(3))
        return node

    assert_resumes_everywhere(build, steps=14)


def test_the_law_wants_two_ends_of_an_epoch():
    with pytest.raises(AssertionError, match="at least 2"):
        assert_resumes_everywhere(lambda: Cycler(Sampler(SequentialOrder(9))), steps=12)


class Once(Node):
    """Gives the items of epoch 0, and of every later epoch nothing but its end."""

    def next(self):
        while not isinstance(item := next(self.source), penstock.nodes.EndOfEpoch) and item.epoch:
            pass
        return item


@pytest.mark.parametrize("roof", [Once, lambda source: Loader(Once(source))], ids=["node", "loader"])
def test_the_law_wants_items_in_two_epochs(roof):
    """Seen to fail: a node that has ended for good resumes everywhere, and a loader of it ended in a
    `RecursionError`."""
    with pytest.raises(AssertionError, match=r"only 1 of the first \d epochs had an item|epochs 1 and 2 had no batch"):
        assert_resumes_everywhere(lambda: roof(Cycler(Sampler(SequentialOrder(4)))), steps=11)


# Transparent law.

SAVE = {"num_workers": 0}
LOAD = [
    {"num_workers": 3, "method": "thread"},
    {"num_workers": 1, "method": "process"},
    {"num_workers": 2, "method": "thread", "prefetch_factor": 8},
    {"num_workers": 2, "method": "thread", "prefetch_factor": 1},
    {"pin_memory": True},
    {"in_order": False},
]


@pytest.mark.parametrize("other", LOAD)
def test_state_survives_another_engine(other):
    """Seen to fail when ParallelMapper nested its source's state."""
    with canonical(**SAVE) as batches:
        expected = [batch.tolist() for batch in islice(iter(batches), 3)]
        state = batches.state_dict()
        expected = [batch.tolist() for _ in range(2) for batch in batches]
    for first, second in ((SAVE, other), (other, SAVE)):
        with canonical(**first) as batches:
            list(islice(batches, 3))
            assert batches.state_dict() == state
        with canonical(**second) as batches:
            batches.load_state_dict(state)
            assert [batch.tolist() for _ in range(3) for batch in batches] == expected


def test_adding_and_removing_transparent_nodes_keeps_the_state():
    plain = Mapper(Batcher(graph(), 4), list)
    list(islice(plain, 2))
    state = plain.state_dict()
    full = Prefetcher(Prefetcher(ParallelMapper(Batcher(graph(), 4), list, 2), 3))
    full.reset(json.loads(json.dumps(state)))
    assert full.state_dict() == state
    assert list(islice(full, 4)) == list(islice(plain, 4))
    full.shutdown()


# One-state law.


@pytest.mark.parametrize("tail", EVEN)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_all_ranks_have_the_same_state_at_every_step(tail, world_size, drop_last):
    """Seen to fail when a rank that got a short last batch alone noted the end of the source."""

    def states(rank):
        with Loader.from_dataset(
            Tagged(23), batch_size=2, shuffle=True, rank=rank, world_size=world_size, tail=tail, drop_last=drop_last
        ) as batches:
            return [batches.state_dict()] + [batches.state_dict() for _ in range(3) for _ in batches]

    assert [states(rank) for rank in range(world_size)] == [states(0)] * world_size


@pytest.mark.parametrize("ranks", [[1, 2, 4, 3, 1], [4, 1, 3], [3, 2]])
def test_a_change_of_world_size_goes_on_with_the_same_sequence(ranks):
    """The same global batch of 12, dealt to different numbers of ranks, across the end of an epoch: the global batches
    are the same, in order."""

    def build(**words):
        return Loader.from_dataset(Tagged(60), shuffle=True, **words)

    whole = chain(build, [(1, 12, 3 * len(ranks))], torch.Tensor.tolist)
    assert chain(build, [(world_size, 12 // world_size, 3) for world_size in ranks], torch.Tensor.tolist) == whole
