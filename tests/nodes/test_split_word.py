"""Who deals an iterable to several ranks: the Sharder, or the iterable itself. Two loaders in one process are two
ranks."""

from __future__ import annotations

import functools
import json
from itertools import islice

import pytest
import torchdata.nodes
from pairwise import pairwise
from resumable import Resumable
from torch.utils.data import DistributedSampler, IterableDataset

from penstock import GraphError, Loader, StateMismatch
from penstock.nodes import Batcher, Cycler, IterableSource, Sampler, Sharder
from penstock.orders import SequentialOrder
from penstock.testing import Tagged, assert_resumes_everywhere

N = 10


class Stream(IterableDataset):
    """The same on every rank."""

    def __iter__(self):
        return iter(range(N))


class Own(IterableDataset):
    """Splits itself: rank r yields 100 * r, 100 * r + 1, and so on; rank 0 one item more than the others."""

    def __init__(self, r, n=5):
        self.r, self.n = r, n

    def __iter__(self):
        return iter(range(100 * self.r, 100 * self.r + self.n + (self.r == 0)))


def stateful(r):
    """Splits itself, and stores its own position."""
    return Resumable(5, lambda at: 100 * r + at)


def canonical(dataset, rank=0, world_size=2, **options):
    return Loader.from_dataset(dataset, batch_size=None, rank=rank, world_size=world_size, **options)


def by_hand(dataset, rank=0, world_size=2, *, split=None, tail="pad"):
    return Loader(Sharder(Cycler(IterableSource(dataset, split=split)), rank, world_size, tail=tail))


def foreign(dataset, rank=0, world_size=2, **options):
    return canonical(torchdata.nodes.IterableWrapper(dataset), rank, world_size, **options)


def foreign_by_hand(dataset, rank=0, world_size=2, **options):
    return by_hand(torchdata.nodes.IterableWrapper(dataset), rank, world_size, **options)


every_way = pytest.mark.parametrize("build", [canonical, by_hand, foreign, foreign_by_hand])


def state_of(loader):
    return json.loads(loader.state_dict()["penstock"])["state"]


@every_way
def test_several_ranks_have_to_be_told_who_deals(build):
    """Seen to fail: each rank was dealt a share of its share, so that half of the items were never seen."""
    said = []
    for rank in range(2):
        # building raises nothing, because the ranks are not known yet
        with build(Own(rank), rank, tail="drop") as loader:
            with pytest.raises(GraphError) as raised:
                next(iter(loader))
            said.append(str(raised.value))
    assert said[0] == said[1]
    assert "2 ranks need to know who splits it. With split='items', every rank reads all of it" in said[0]
    assert "With split='own', it gives each rank its own share" in said[0]


@pytest.mark.parametrize(("build", "split"), [(canonical, None), (by_hand, "own"), (foreign, "items")])
def test_one_rank_needs_no_word_and_keeps_its_state(build, split):
    """Seen to fail: split="own" was refused by name."""
    with build(Own(0), 0, 1, split=split) as loader:
        assert list(islice(loader, 2)) == [0, 1]
        state = state_of(loader)
        assert {*state} == {"epoch", "source"}
        assert {*state["source"]} == {
            "epoch",
            "position",
            "ended",
            "node" if build in (foreign, foreign_by_hand) else "iterable",
        }
        assert json.loads(loader.state_dict()["penstock"])["settings"]["split"] == (
            "own" if split == "own" else "items"
        )


@every_way
def test_split_items_deals_what_every_rank_reads(build):
    """Seen to fail: no such word of the source."""
    for rank in range(2):
        with build(Stream(), rank, split="items", tail="drop") as loader:
            assert [list(loader) for _ in range(2)] == [list(range(rank, N, 2))] * 2
            assert json.loads(loader.state_dict()["penstock"])["settings"]["split"] == "items"


@pytest.mark.parametrize(
    ("build", "tail"), pairwise([canonical, by_hand, foreign, foreign_by_hand], ["pad", "drop", "exact"])[:6]
)
def test_split_own_hands_everything_on(build, tail):
    """Whatever the tail. Seen to fail: every second item was left out; and tail="pad", the default, refused the
    source."""
    for rank in range(2):
        with build(Own(rank), rank, split="own", tail=tail) as loader:
            assert [list(loader) for _ in range(2)] == [[100 * rank + k for k in range(5 + (rank == 0))]] * 2
            assert json.loads(loader.state_dict()["penstock"])["settings"]["split"] == "own"


def test_sources_that_are_indexed_need_no_word():
    for split in (None, "items"):
        with canonical(Tagged(4), 1, split=split) as loader:
            assert list(loader) == [1, 3]
            assert json.loads(loader.state_dict()["penstock"])["settings"]["split"] == "items"


# Iterables that are known to split themselves.


def holding(name="Holding", module=__name__, **attributes):
    """An iterable dataset of such a type, with these attributes."""
    made = type(name, (IterableDataset,), {"__module__": module, "__iter__": lambda self: iter(())})()
    vars(made).update(attributes)
    return made


def split_by_node(urls):
    return urls


def single_node_only(urls):
    return urls


HF = holding(_distributed=("rank", "world_size"))
REPLICA = holding(num_replicas=2)
SUBCLASS = type("Subclass", (type(holding("StreamingDataset", "streaming.base.dataset")),), {})
SHARDED = torchdata.nodes.SamplerWrapper(DistributedSampler(range(4), 2, 0))


@pytest.mark.parametrize(
    ("dataset", "how"),
    [
        (HF, "split_dataset_by_node"),
        (holding(dataset=HF), "split_dataset_by_node"),
        (REPLICA, "the attribute 'num_replicas'"),
        (holding(dataset=REPLICA), "the attribute 'num_replicas'"),
        (holding(pipeline=[single_node_only, split_by_node]), "the stage split_by_node"),
        (holding(pipeline=[[], functools.partial(split_by_node)]), "the stage split_by_node"),
        (holding(pipeline=[holding(pipeline=[split_by_node])]), "the stage split_by_node"),
        (holding(nodesplitter=split_by_node), "the stage split_by_node"),
        (SUBCLASS(), "a StreamingDataset of streaming"),
        (holding("StreamingDataset", "litdata.streaming.dataset"), "a StreamingDataset of litdata"),
        (SHARDED, "DistributedSampler has the attribute 'rank'"),
        (torchdata.nodes.Mapper(SHARDED, str), "DistributedSampler has the attribute 'rank'"),
        (torchdata.nodes.IterableWrapper(HF), "split_dataset_by_node"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_splits_itself_is_not_dealt_again(dataset, how):
    """Seen to fail: it was dealt again."""
    for build in (canonical, by_hand):
        with pytest.raises(GraphError, match=f"share of its share: .*{how}.*Use split='own'"):
            build(dataset, split="items")
        build(dataset, split="own").close()


def test_what_does_not_split_itself_may_be_dealt():
    others = [
        holding(pipeline=[single_node_only]),
        holding(nodesplitter=single_node_only),
        holding("StreamingDataset", "mine"),
    ]
    # Told of one rank only. Seen to fail: refused.
    others += [
        holding(num_replicas=1),
        holding(rank=0, world_size=1),
        holding(_distributed=holding(rank=0, world_size=1)),
    ]
    for dataset in (Stream(), holding(dataset=Stream()), *others):
        canonical(dataset, split="items").close()


# Its state.


def test_an_own_split_without_a_state_counts_items_on_any_rank():
    """Rank 0's checkpoint is enough. Seen to fail: each rank was dealt a share of its share."""
    with canonical(Own(0), 0, split="own") as loader:
        assert list(islice(loader, 2)) == [0, 1]
        saved = loader.state_dict()
        assert state_of(loader) == {
            "source": {"epoch": 0, "source": {"epoch": 0, "position": 2, "ended": False, "iterable": None}},
            "world_size": 2,
        }
    with canonical(Own(1), 1, split="own") as loader:
        loader.load_state_dict(saved)
        assert loader.remaining is None
        with pytest.warns(UserWarning, match="reads its first 2 items again"):
            assert list(loader) == [102, 103, 104]
        assert list(loader) == [100, 101, 102, 103, 104]


@pytest.mark.filterwarnings("ignore:Own has no state_dict")
def test_a_state_that_counts_more_than_this_ranks_share_is_refused():
    """Nobody can tell where this rank was. Seen to fail: it counted as the end of the epoch, although the rank may have
    been in the next one, whose start then came twice."""
    with canonical(Own(0), 0, split="own") as loader:
        assert len(list(islice(loader, 6))) == 6
        saved = loader.state_dict()
    with canonical(Own(1), 1, split="own") as loader:
        loader.load_state_dict(saved)
        with pytest.raises(
            StateMismatch,
            match=(
                r"after 6 items of epoch 0, but here Own ends after 5: .*load the state that this rank saved; or load "
                r"none, and"
            ),
        ):
            next(iter(loader))
    with canonical(Own(1), 1, split="own") as loader:
        loader.set_epoch(1)  # as the message says
        assert list(loader) == [100, 101, 102, 103, 104]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (2, 1), (1, 2)])
def test_an_own_split_loads_at_the_same_world_size_only(saved_by, loaded_by):
    """Seen to fail: it went on in another share."""
    with canonical(Own(0), 0, saved_by, split="own") as loader:
        next(iter(loader))
        saved = loader.state_dict()
    with canonical(Own(0), 0, loaded_by, split="own") as loader:
        loader.load_state_dict(saved)
        with pytest.raises(
            StateMismatch,
            match=f"saved at a world size of {saved_by} and .*rank 0 of {loaded_by}. Load it at the same world size",
        ):
            next(iter(loader))


def test_an_own_split_with_a_state_is_bound_to_its_rank(caplog):
    """And the first item says so, once. Seen to fail: another rank's state was loaded."""
    with canonical(stateful(1), 1, split="own") as loader:
        assert list(islice(loader, 2)) == [100, 101]
        assert [record.name for record in caplog.records] == ["penstock"]
        assert "the state of a rank loads only on that rank" in caplog.text
        saved, state = loader.state_dict(), state_of(loader)
        assert (state["rank"], state["world_size"]) == (1, 2)
        assert state["source"]["source"]["iterable"] == {"at": 2}
        assert list(loader) == [100, 101, 102, 103, 104]
        assert len(caplog.records) == 2
        assert "means reading from epoch 0 on" in caplog.text
    for rank, world_size in ((0, 2), (1, 3)):
        with canonical(stateful(rank), rank, world_size, split="own") as loader:
            loader.load_state_dict(saved)
            with pytest.raises(
                StateMismatch,
                match=(
                    f"saved by rank 1 of 2 and .*this is rank {rank} of {world_size}. Load the state that this rank "
                    f"saved"
                ),
            ):
                next(iter(loader))
    with canonical(stateful(1), 1, split="own") as loader:
        loader.load_state_dict(saved)
        assert list(loader) == [102, 103, 104]


@pytest.mark.filterwarnings("ignore:Own has no state_dict")
@pytest.mark.parametrize("make", [Own, stateful, lambda r: torchdata.nodes.IterableWrapper(stateful(r))])
def test_an_own_split_resumes_everywhere(make):
    """Seen to fail: split="own" was refused by name."""
    assert_resumes_everywhere(lambda: Batcher(Sharder(Cycler(IterableSource(make(1), split="own")), 1, 2), 2), steps=9)


# Words that make no sense.


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: IterableSource(Stream(), split="within"), ValueError, "split='within' must be 'items'"),
        (lambda: canonical(Stream(), split="cards"), ValueError, "must be 'items', 'batches', 'own' or 'within'"),
        (lambda: canonical(Stream(), split="within"), ValueError, "there is no batch_sampler"),
        (lambda: canonical(Tagged(4), split="own"), ValueError, "Tagged is read by index"),
        (
            lambda: canonical(IterableSource(Stream(), split="items"), split="own"),
            ValueError,
            "split='own' conflicts with split='items' of the IterableSource",
        ),
        (lambda: IterableSource(Sampler(SequentialOrder(3))), GraphError, "Sampler is already a penstock node"),
        (
            lambda: Sharder(Batcher(Cycler(IterableSource(Stream(), split="own")), 2), 0, 2, split="within"),
            GraphError,
            "already belong to one rank",
        ),
    ],
)
def test_a_word_that_makes_no_sense_is_refused_when_built(build, error, text):
    """Seen to fail: no such words."""
    with pytest.raises(error, match=text):
        build()
