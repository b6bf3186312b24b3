"""Sharder: which rank gets what; compared with DistributedSampler, and with dealing by hand."""

from __future__ import annotations

from itertools import islice
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dealing import TAILS, dealt
from pairwise import pairwise
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock import GraphError, Loader, Packs, StateError, StateMismatch
from penstock._fetch.indices import joined
from penstock._nodes.balance import Costs, together
from penstock._nodes.balance import dealt as by_cost
from penstock._nodes.index_node import Facts, FirstNode
from penstock._nodes.node import fields
from penstock._nodes.rank_checks import downstream_of_sharder, refuse_uneven_ranks, users, warn_if_all_read_everything
from penstock._nodes.sharder import ranks_of
from penstock.nodes import Batcher, Cycler, EndOfEpoch, Indices, IterableSource, Node, Prefetcher, Sampler, Sharder
from penstock.orders import SequentialOrder
from penstock.testing import Tagged


def hand(n, rank, world_size, tail, take=1):
    """One epoch of this rank's values, and their positions, taken ``take`` at a time."""
    node = Sharder(Cycler(Sampler(SequentialOrder(n))), rank, world_size, tail=tail)
    place, values, positions = node.start(0), [], []
    while True:
        block, place = node.read(place, take)
        if not len(block):
            break
        values += block.plain()
        positions += block.positions.tolist()
    assert node.over(place)[0] == EndOfEpoch(0)
    return values, positions


@pytest.mark.parametrize(("world_size", "n", "take"), pairwise([1, 2, 3, 5], [1, 2, 3, 7, 8, 12], [1, 2, 5, 100]))
def test_the_union_over_ranks_is_the_dataset_with_the_documented_tail(world_size, n, take):
    """Seen to fail when the padding began at the epoch's end instead of its start, and when take(100) padded more than
    one round."""
    for tail in TAILS:
        expected = dealt(n, world_size, tail)
        if not expected:
            continue
        hands = [hand(n, rank, world_size, tail, take) for rank in range(world_size)]
        total = sum(len(values) for values, _ in hands)
        assert [hands[k % world_size][0][k // world_size] for k in range(total)] == [
            position % n for position in expected
        ]
        assert [hands[k % world_size][1][k // world_size] for k in range(total)] == expected


def test_one_rank_of_many_costs_its_own_share_only():
    """16,384 ranks; seen to fail when take read every=1 and sliced."""
    asked = []

    class Watched:
        def __len__(self):
            return 10**12

        def settings(self):
            return {}

        def indices(self, epoch, positions):
            asked.append(len(positions))
            return positions.copy()

    for rank in (0, 1, 9999, 16383):
        node = Batcher(Sharder(Cycler(Sampler(Watched())), rank, 16384), 32)
        assert next(node).plain() == [rank + 16384 * k for k in range(32)]
        assert next(node).positions[0] == rank + 16384 * 32
    assert [n for n in asked if n] == [32, 64] * 4  # twice as many the second time, because the read continues


def test_split_within_deals_the_places_of_each_batch():
    node = Sharder(Batcher(Cycler(Sampler(SequentialOrder(8))), 4), 1, 2, split="within")
    assert [next(node) for _ in range(3)] == [
        Indices(0, torch.tensor([1, 3]).numpy(), torch.tensor([1, 3]).numpy()),
        Indices(0, torch.tensor([5, 7]).numpy(), torch.tensor([5, 7]).numpy()),
        EndOfEpoch(0),
    ]
    odd = Sharder(Batcher(Cycler(Sampler(SequentialOrder(9))), 3), 1, 2, split="within")
    with pytest.raises(ValueError, match="3 samples do not divide among 2 ranks"):
        next(odd)


def test_an_unsized_source_is_dealt_by_reading():
    for tail, expected in (("drop", [[0, 3], [1, 4], [2, 5]]), ("exact", [[0, 3, 6], [1, 4], [2, 5]])):
        for rank in range(3):
            node = Sharder(Cycler(IterableSource(range(7), split="items")), rank, 3, tail=tail)
            with Loader(node) as loader:
                assert list(loader) == expected[rank]
    with pytest.raises(GraphError, match="tail='pad' needs"):
        next(Sharder(Cycler(IterableSource(range(7), split="items")), 0, 3))


# The sources of rank and world size.


@pytest.fixture
def group(tmp_path):
    """A process group of one."""

    def begin():
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_process_group_comes_before_the_environment(monkeypatch, group):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Loader.from_dataset(Tagged(4), batch_size=4) as loader:
        group()
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1, "method": "thread", "prefetcher": True}],
    ids=["inline", "prefetcher"],
)
def test_a_group_that_is_made_again_with_other_numbers(monkeypatch, options):
    """1 -> 2 -> 3 -> 2 ranks in living loaders, with batches in flight: nothing lost, nothing twice, over two epochs
    of 40.

    Seen to fail when items were compared with the group as they were taken: with workers, 14 samples of 40 came twice,
    without an error. And when a loaded state was dealt by the old numbers.
    """
    here = [(0, 1)]
    monkeypatch.setattr("penstock._nodes.ranks.process_group", lambda: here[0])
    loaders, running = [rank_of_40(**options) for _ in range(3)], {}
    state, sequence = loaders[0].state_dict(), []
    for living, steps in (([0], 3), ([0, 1], 4), ([2, 0, 1], 4), ([1, 2], 9)):
        hands = []
        for rank, name in enumerate(living):
            here[0] = rank, len(living)
            if name in running:
                for batches in (running[name], over_and_over(loaders[name])):  # nothing but a loaded state ends it
                    with pytest.raises(
                        GraphError, match=rf"began as rank .* says rank {rank} of {len(living)}\..*load_state_dict"
                    ):
                        next(batches)
            loaders[name].load_state_dict(state)
            assert len(loaders[name]) == -(-40 // len(living) // 2)
            running[name] = over_and_over(loaders[name])
            hands.append([value for _ in range(steps) for value in next(running[name]).tolist()])
        states = [loaders[name].state_dict() for name in living]
        assert states == states[:1] * len(living)
        state = states[0]
        sequence += [value for place in zip(*hands, strict=True) for value in place]
    assert sequence == [*range(40), *range(1000, 1040)]
    for one in loaders:
        one.close()


def rank_of_40(prefetcher=False, **options):
    one = Loader.from_dataset(Tagged(40), batch_size=2, **options)
    return Loader(Prefetcher(one.root)) if prefetcher else one


def over_and_over(loader):
    while True:
        yield from loader


def test_a_mesh_of_a_group_that_was_made_again_is_refused(monkeypatch):
    """Seen to fail: nothing was compared, and the mesh still says the old numbers."""
    here = [(2, 4)]
    monkeypatch.setattr("penstock._nodes.ranks.process_group", lambda: here[0])
    mesh = mock.Mock(ndim=1, **{"get_local_rank.return_value": 1, "size.return_value": 2})
    with Loader.from_dataset(Tagged(8), batch_size=1, mesh=mesh) as loader:
        batches = over_and_over(loader)
        assert [next(batches).item() for _ in range(2)] == [1, 3]
        here[0] = 1, 3
        for _ in range(2):
            with pytest.raises(
                GraphError,
                match="rank 2 of 4, but torch.distributed now says rank 1 of 3.*build another loader, with a mesh",
            ):
                next(batches)
            loader.load_state_dict(loader.state_dict())  # into the same loader is no way out
            batches = over_and_over(loader)


@pytest.fixture(scope="session")  # so that it runs before the fixture that counts the open files of a test
def sockets_of_a_mesh(tmp_path_factory):
    """Open gloo's sockets now: torch 2.15 keeps them open for the life of the process once a dimension of a mesh was
    requested."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('mesh')}/rendezvous", rank=0, world_size=1
    )
    init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))["dp"]
    dist.destroy_process_group()


@pytest.mark.usefixtures("sockets_of_a_mesh")
def test_a_mesh_dimension(group):
    group()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with Loader.from_dataset(Tagged(4), batch_size=4, mesh=mesh["dp"]) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="2 dimensions"):
        Sharder(Cycler(Sampler(SequentialOrder(4))), mesh=mesh)


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": 0},
        {"world_size": 2},
        {"rank": 2, "world_size": 2},
        {"rank": -1, "world_size": 2},
        {"rank": 0.0, "world_size": 2},
        {"rank": True, "world_size": 2},
        {"rank": 0, "world_size": 0},
        {"tail": "cut"},
        {"split": "cards"},
    ],
)
def test_numbers_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="rank|world_size|tail|split"):
        Loader.from_dataset(Tagged(4), **bad)


def test_a_bad_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        Loader.from_dataset(Tagged(4)) as loader,
        pytest.raises(ValueError, match="rank=5 and world_size=2 from the environment"),
    ):
        next(iter(loader))


def test_a_graph_that_nothing_divides_is_said(monkeypatch):
    """Every rank would train on the same batches. Seen to fail: silence."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"this graph has no Sharder, so each of the 2 ranks reads all items"):
        assert list(Loader(Cycler(Sampler(SequentialOrder(3))))) == [0, 1, 2]
    given = Sharder(Cycler(Sampler(SequentialOrder(3))), 0, 1)
    assert list(Loader(given)) == [0, 1, 2]


# Each method by value.


class Shares(FirstNode):
    """Epoch e has ``n`` items (None: nobody knows): item i is ``1000 * e + i``. Notes how it is read."""

    def __init__(self, n=10, *, per_rank=False, peeks=True, unknown=False, **facts):
        super().__init__(Facts({}, **facts))
        self.n, self.per_rank, self.peeks, self.unknown = n, per_rank, peeks, unknown
        self.asked = []

    def state_is_per_rank(self):
        return self.per_rank

    def start(self, epoch, after=None):
        return {"epoch": epoch, "position": 0, **({} if after is None else {"after": after["position"]})}

    def left(self, place):
        return None if self.unknown else self.n - place["position"]

    def read(self, place, n, every=1, first=0):
        self.asked.append((n, every, first))
        end = min(place["position"] + n * every, self.n)
        return self._at(place["epoch"], range(place["position"] + first, end, every)), {**place, "position": end}

    def peek(self, place, positions):
        if not self.peeks:
            raise GraphError("Shares cannot be read by position")
        return self._at(place["epoch"], positions.tolist())

    def _at(self, epoch, positions):
        return Indices(
            epoch, np.array(positions, np.int64), np.array([1000 * epoch + one % self.n for one in positions], np.int64)
        )

    def check(self, state):
        fields(state, epoch=int, position=int)


def sharder(rank=0, world_size=2, *, split="items", tail="pad", balance=None, **facts):
    return Sharder(Shares(**facts), rank, world_size, split=split, tail=tail, balance=balance)


def test_what_a_state_and_a_graph_say_of_it():
    """Seen to fail: each word changed."""
    plain = sharder(1, 3, tail="drop")
    assert plain.facts.settings == {"split": "items"}
    assert plain.facts.rank_settings == {"dealt": {"split": "items", "tail": "drop"}}
    assert plain.details() == {"rank": 1, "world_size": 3, "split": "items", "tail": "drop"}
    assert (plain.split, plain.tail, plain.first.dealt_to.ranks.now(), plain.first.dealt_to.costs) == (
        "items",
        "drop",
        (1, 3),
        None,
    )
    costs = Costs(np.arange(10))
    for balance in (costs, np.arange(10)):
        balanced = sharder(balance=balance)
        assert balanced.facts.rank_settings == {
            "dealt": {"split": "items", "tail": "pad"},
            "balance": costs.checksum,
        }
        assert balanced.details() == {"rank": 0, "world_size": 2, "split": "items", "tail": "pad", "balance": True}
        assert balanced.first.dealt_to.costs.checksum == costs.checksum
    assert balanced.first.dealt_to.ranks.now() == balanced.ranks() == (0, 2)
    own = sharder(sharded_by="own")
    assert (own.facts.settings, own.details()["split"], own.split, own.first.dealt_to) == (
        {"split": "own"},
        "own",
        "items",
        None,
    )
    within = sharder(split="within")
    assert (within.facts.settings, within.first.dealt_to) == ({"split": "within"}, None)
    assert [node.counted(7) for node in (plain, sharder(1, 3, tail="pad"), own, within)] == [2, 3, 7, 7]
    assert (ranks_of(plain), ranks_of(Batcher(plain, 2)), ranks_of(Shares())) == ((1, 3), (1, 3), (0, 1))
    batcher = Batcher(plain, 2)
    prefetcher = Prefetcher(batcher)
    assert downstream_of_sharder(prefetcher) == [prefetcher, batcher]
    assert downstream_of_sharder(plain) == downstream_of_sharder(Batcher(Shares(), 2)) == []


@pytest.mark.parametrize(
    ("words", "kind", "why"),
    [
        ({"split": "cards"}, ValueError, "^split='cards' must be one of"),
        ({"tail": "cut"}, ValueError, "^tail='cut' must be"),
        (
            {"split": "within", "sharded_by": "own"},
            GraphError,
            (
                "^split='within' would split batches that already belong to one rank, because the source has "
                "split='own'. Leave split='within' out.$"
            ),
        ),
        (
            {"split": "within", "balance": [1.0]},
            GraphError,
            "^balance deals single items to the ranks, which split='within' does not. Leave one of them out.$",
        ),
        ({"sharded_by": "own", "balance": [1.0]}, GraphError, "which split='own' does not"),
    ],
)
def test_words_that_exclude_each_other_are_refused_when_built(words, kind, why):
    with pytest.raises(kind, match=why):
        sharder(**words)


def read(node, place, n=2):
    items, place = node.read(place, n)
    return [item.values for item in items], place


FIRST = {"epoch": 0, "position": 0}
AT = {"epoch": 1, "position": 0}


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize(("n", "rank", "at"), pairwise([4, 7, 9], [0, 1, 2], [0, 2, 5]))
def test_each_tail_is_dealt_by_hand_from_anywhere(n, rank, at, unknown):
    """Also of an unknown number of items. Seen to fail: one item more or less at the end; a place in the middle of a
    round."""
    for tail in TAILS:
        if unknown and tail == "pad":
            continue
        cards = dealt(n, 3, tail, at)[rank::3] if at < n else []
        node = sharder(rank, 3, n=n, tail=tail, unknown=unknown)
        values, place = read(node, {"epoch": 1, "position": min(at, n)}, 50)
        assert values == [1000 + card % n for card in cards]
        assert place == {"epoch": 1, "position": n}
        if not unknown:
            assert node.first.asked == [
                (0, 1, 0),
                (-(-(n - min(at, n)) // 3) if tail != "drop" else (n - min(at, n)) // 3, 3, rank),
            ] + ([(1, left, left)] if (left := (n - min(at, n)) % 3 if tail == "drop" else 0) else [])


def test_a_rank_without_a_share_of_the_rest_is_at_the_end():
    """After a block that leaves only a short round. Seen to fail: with ranks at different places, except as
    `tail="exact"` says."""
    places = {
        tail: [read(sharder(rank, 3, n=8, tail=tail), AT, 2)[1]["position"] for rank in range(3)] for tail in TAILS
    }
    assert places == {"pad": [6, 6, 6], "drop": [8, 8, 8], "exact": [6, 6, 8]}


def test_one_rank_reads_on_and_whole_rounds_are_left_to_the_source():
    one = sharder(0, 1)
    assert (read(one, AT, 3), one.first.asked) == (([1000, 1001, 1002], {"epoch": 1, "position": 3}), [(3, 1, 0)])
    rounds = sharder(1, 2, in_rounds=True, tail="drop")
    assert (read(rounds, AT, 3)[0], rounds.first.asked) == ([1001, 1003, 1005], [(3, 2, 1)])


def test_a_source_is_read_and_left_where_its_place_says():
    """Seen to fail: with each argument left out."""
    node = sharder(1, 2, n=5)
    assert (
        node.left({"source": {"epoch": 1, "position": 3}, "world_size": 2})
        == node.left({"epoch": 1, "position": 3})
        == 1
    )
    assert node.start(3) == {"epoch": 3, "position": 0}
    assert node.start(3, {"position": 2}) == {"epoch": 3, "position": 0, "after": 2}
    wrapped = {"source": AT, "world_size": 2}
    assert node.peek(wrapped, np.array([3])).values == node.peek(AT, np.array([3])).values == [1003]
    assert node.skip(wrapped) == {"epoch": 1, "position": 5}
    with pytest.raises(
        GraphError, match="^two Sharders in one graph would split the items twice. Remove one of them.$"
    ):
        node.read(AT, 1, 2)
    assert node.at(1, np.array([5])).positions == [5]  # padding has addresses past the end
    for words in ({"tail": "drop"}, {"tail": "exact"}, {"split": "within"}, {"sharded_by": "own"}):
        with pytest.raises(IndexError):
            sharder(n=5, **words).at(1, np.array([5]))
    node.check({"source": AT, "world_size": 2, "rank": 1})
    node.check({"source": AT, "world_size": 2})
    node.check(AT)
    for damaged in (
        {"source": AT, "world_size": "2"},
        {"source": AT, "world_size": 2, "rank": "1"},
        {"source": {}, "world_size": 2},
        {},
        7,
        {"world_size": 2},
    ):
        with pytest.raises(StateError):
            node.check(damaged)


def test_a_share_that_the_source_makes_is_handed_on_with_its_owner():
    """Seen to fail: without the owner; with it at the start or the end of an epoch, which any rank may load."""
    node = sharder(1, 2, sharded_by="own", n=5)
    values, place = read(node, AT, 3)
    assert (values, place) == ([1000, 1001, 1002], {"source": {"epoch": 1, "position": 3}, "world_size": 2})
    assert read(node, place, 1) == ([1003], {"source": {"epoch": 1, "position": 4}, "world_size": 2})
    assert node.first.asked == [(3, 1, 0), (1, 1, 0)]
    assert node.start(1, {"position": 3}) == {"source": {"epoch": 1, "position": 0, "after": 3}, "world_size": 2}
    assert node.skip(place) == {"source": {"epoch": 1, "position": 5}, "world_size": 2}
    assert read(node, AT, 0)[1] == AT
    of_rank = sharder(1, 2, sharded_by="own", n=5, per_rank=True)
    assert read(of_rank, AT, 3)[1] == {**place, "rank": 1}
    alone = sharder(0, 1, sharded_by="own", n=5, per_rank=True)
    assert read(alone, AT, 3)[1] == place["source"]
    cycled = Sharder(Cycler(Shares(5, sharded_by="own")), 1, 2)
    place = cycled.start(0)
    values, place = read(cycled, place, 9)
    assert values == list(range(5))
    assert cycled.over(place) == (EndOfEpoch(0), {"epoch": 1, "source": {"epoch": 1, "position": 0}})
    assert cycled.skip(cycled.start(0))["world_size"] == 2
    ended = {"epoch": 0, "source": None}
    assert cycled.over(ended) == (EndOfEpoch(0), cycled.start(1))
    assert cycled.skip(ended) == ended


@pytest.mark.parametrize("per_rank", [False, True])
def test_a_share_loads_on_its_owner_only(per_rank):
    """Seen to fail: without the comparison of each number; at the start of an epoch."""
    place = read(sharder(1, 2, sharded_by="own", per_rank=per_rank), AT, 3)[1]
    inner = {"epoch": 1, "position": 3}
    assert sharder(1, 2, sharded_by="own", per_rank=per_rank).seek(place) == place
    other = sharder(0, 2, sharded_by="own", per_rank=per_rank)
    whose = "by rank 1 of 2" if per_rank else "at a world size of 2"
    rest = "Load the state that this rank saved at" if per_rank else "Load it at"
    if not per_rank:
        assert other.seek(place) == place
    for node, here in ([(other, "rank 0 of 2")] if per_rank else []) + [
        (sharder(1, 3, sharded_by="own", per_rank=per_rank), "rank 1 of 3"),
        (sharder(1, 3), "rank 1 of 3"),
        (sharder(0, 1), "rank 0 of 1"),
    ]:
        with pytest.raises(
            StateMismatch,
            match=(
                f"^this state was saved {whose} and counts the items of a share that the source made itself, but this "
                f"is {here}. {rest} the same world size, or"
            ),
        ):
            node.seek(place)
    with pytest.raises(StateMismatch, match="^this state was saved at a world size of 1 and"):
        sharder(1, 2, sharded_by="own").seek(inner)
    assert sharder(1, 2).seek(inner) == inner
    assert sharder(0, 1, sharded_by="own").seek(inner) == inner
    assert sharder(1, 2, sharded_by="own").seek(AT) == AT


def test_a_share_at_the_start_of_an_epoch_that_goes_on_begins_it_anew():
    """What the source had read before is of another rank. Seen to fail: loaded as it is."""

    class Going(Shares):
        def start(self, epoch, after=None):
            return {"epoch": epoch, "position": 0, "from": 0 if after is None else after["from"]}

        def check(self, state):
            pass

    node = Sharder(Going(sharded_by="own"), 1, 2)
    begun = {"source": {"epoch": 1, "position": 0, "from": 7}, "world_size": 3}
    assert node.seek(begun) == {"epoch": 1, "position": 0, "from": 0}
    with pytest.raises(StateMismatch):
        node.seek({"source": {"epoch": 1, "position": 1, "from": 7}, "world_size": 3})
    with pytest.raises(StateMismatch):
        node.seek({"source": {"position": 1, "from": 7}, "world_size": 3})


SAID_OF_OWN = (
    "split='own', and the source has its own state_dict: the state of a rank loads only on that rank and at this world "
    "size. Save the states of all ranks."
)
SAID_OF_EXACT = (
    "tail='exact' on several ranks: the state of a rank that has run out of items says that the epoch is over. Save "
    "the state of rank 0."
)


@pytest.mark.parametrize(
    ("words", "world_size", "said"),
    [
        ({"sharded_by": "own", "per_rank": True}, 2, [("WARNING", SAID_OF_OWN)]),
        ({"sharded_by": "own", "per_rank": True, "tail": "exact"}, 2, [("WARNING", SAID_OF_OWN)]),
        ({"sharded_by": "own", "per_rank": True}, 1, []),
        ({"sharded_by": "own"}, 2, []),
        ({"tail": "exact", "per_rank": True}, 2, [("INFO", SAID_OF_EXACT)]),
        ({"tail": "exact"}, 1, []),
        ({"tail": "exact", "split": "within"}, 2, []),
        ({"tail": "drop"}, 2, []),
    ],
)
def test_what_states_to_save_is_said_when_a_reader_begins(words, world_size, said, caplog):
    caplog.set_level("INFO", "penstock")
    node = sharder(0, world_size, **words)
    node.seek(AT)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == said
    node.seek(AT)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == len(
        [one for one in said if one[0] == "WARNING"]
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            {"tail": "exact", "carries_over_epochs": True},
            "^tail='exact' lets some ranks end an epoch before the others, but this source begins the next epoch where "
            "it was left, so the ranks would begin at different places. Use tail='drop': the items it leaves out begin "
            "the next epoch.$",
        ),
        (
            {"peeks": False},
            "^Shares cannot be read by position, which tail='pad' needs. Use tail='drop' or tail='exact'. If it "
            "already yields the share of this rank only, pass split='own' instead.$",
        ),
        (
            {"peeks": False, "carries_over_epochs": True},
            "^Shares cannot be read by position, which tail='pad' needs. Use tail='drop'.$",
        ),
        (
            {"unknown": True},
            "^tail='pad' needs a source that knows how many items an epoch has. Use tail='drop' or tail='exact'.$",
        ),
        (
            {"sharded_by": None},
            (
                r"^the source can only be read from its beginning, so 2 ranks need to know who splits it. .* Pass "
                r"split to from_dataset"
            ),
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused_before_an_epoch(words, why):
    with pytest.raises(GraphError, match=why):
        sharder(**words).read(AT, 1)


def test_a_source_that_nobody_was_told_about_is_named():
    node = sharder(sharded_by=None)
    node.facts.settings["source"] = "Mine"
    with pytest.raises(GraphError, match="^Mine can only be read from its beginning, so 2 ranks"):
        node.read(AT, 1)


def test_an_epoch_is_opened_once():
    """A source that plans its epoch does so before it is asked how long that is. Seen to fail: opened at each read; not
    after a `seek`."""
    node = sharder(0, 2, tail="drop")
    place = AT
    for _ in range(3):
        place = node.read(place, 1)[1]
    node.read({"epoch": 2, "position": 0}, 1)
    node.read(AT, 1)
    node.read(node.seek(AT), 1)
    assert node.first.asked == [(0, 1, 0), *[(1, 2, 0)] * 3, *[(0, 1, 0), (1, 2, 0)] * 3]
    first = sharder(0, 2, tail="drop")
    first.read({"epoch": 0, "position": 0}, 1)
    assert first.first.asked == [(0, 1, 0), (1, 2, 0)]


def test_the_places_of_a_batch_are_dealt():
    node = Sharder(Batcher(Cycler(Shares(9)), 4), 1, 2, split="within")
    assert [item.values.tolist() if isinstance(item, Indices) else item for item in islice(node, 2)] == [[1, 3], [5, 7]]
    with pytest.raises(
        ValueError,
        match=(
            "^split='within' needs batches that divide evenly, but 1 samples do not divide among 2 ranks. Use "
            "split='items'.$"
        ),
    ):
        next(node)
    with pytest.raises(
        GraphError,
        match=(
            "^split='within' splits each batch, but the source yields single items. Pass a batch_sampler, or in a "
            "hand-built graph put the Batcher first.$"
        ),
    ):
        sharder(split="within").read(AT, 1)


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize(("n", "ranks", "take"), [*pairwise([12, 13, 17], [2, 3, 4], [2, 3, 30]), (17, 3, 30)])
def test_balanced_ranks_get_the_samples_of_whole_rounds_by_cost(n, ranks, take, unknown):
    """And those of a short last round as without it. Seen to fail: with each number one off."""
    costs = np.array([(7 * k) % 11 for k in range(n)])
    for tail in TAILS:
        if unknown and tail == "pad":
            continue
        whole = min(take, n // ranks) * ranks
        for rank in range(ranks):
            node = sharder(rank, ranks, n=n, tail=tail, balance=costs, unknown=unknown)
            values, place = read(node, FIRST, take)
            mine = by_cost(costs[:whole], ranks, rank).tolist()
            rest = dealt(n, ranks, tail, whole)[rank::ranks]
            assert values == mine + [card % n for card in rest[: max(0, take - whole // ranks)]]
            assert place["position"] == (n if take > n // ranks or not (rest or unknown) else whole)


def test_many_ranks_are_balanced_in_groups():
    """Rank r is in group ``r % groups``, which gets the items that its ranks would get. Seen to fail: neighbours in a
    group."""
    n, ranks, take = 512, 128, 2
    costs = np.array([(37 * k) % 101 for k in range(n)])
    groups = ranks // together(ranks, take)
    assert groups == 2
    for unknown in (False, True):
        for rank in (0, 1, 5, 126, 127):
            node = sharder(rank, ranks, n=n, tail="drop", balance=costs, unknown=unknown)
            of_group = np.arange(rank % groups, take * ranks, groups)
            values, _ = read(node, FIRST, take)
            assert values == of_group[by_cost(costs[of_group], ranks // groups, rank // groups)].tolist()


def test_items_of_any_kind_are_joined():
    """Seen to fail: with positions of one part only."""
    one, other = (
        Indices(3, np.array(positions), np.array(values)) for positions, values in (([1, 2], [5, 6]), ([4], [7]))
    )
    both = joined(one, other)
    assert (both, type(both.values)) == (Indices(3, np.array([1, 2, 4]), np.array([5, 6, 7])), np.ndarray)
    listed = joined(Indices(3, np.array([1]), ["a"]), Indices(3, np.array([4]), ["b"]))
    assert (listed.positions.tolist(), listed.values) == ([1, 4], ["a", "b"])
    assert joined(one, []) is one
    assert joined([1], [2]) == [1, 2]
    assert [item.values for item in joined(one, [other[0]])] == [5, 6, 7]


def test_members_are_those_of_the_group(monkeypatch):
    """Seen to fail: of a source that splits itself."""
    monkeypatch.setattr("penstock._nodes.ranks.process_group", lambda: (1, 3))
    found, given, own = Sharder(Shares()), sharder(), Sharder(Shares(sharded_by="own"))
    assert [list(node.members()) for node in (found, given, own)] == [[0, 1, 2], [], []]
    assert [node.may_have_members for node in (found, given, own)] == [True, False, False]


def test_members_are_those_of_the_whole_mesh():
    """Whatever dimension deals, because peers along the others get the same. Seen to fail: those along that dimension
    only."""
    dist.init_process_group("fake", rank=1, world_size=8, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        meshes = mesh["dp"], mesh["tp"], mesh["dp", "tp"]._flatten("all"), DeviceMesh("cpu", [0, 1])
        assert [list(Sharder(Shares(), mesh=one).members()) for one in meshes] == [[0, 1, 2, 3]] * 3 + [[0, 1]]
    finally:
        dist.destroy_process_group()


class Fewer(Node):
    """Delivers what it likes."""

    def counted(self, items):
        return None


class Twice(Node):
    def counted(self, items):
        return 2 * items


def test_a_node_that_delivers_what_it_likes_is_refused_on_several_ranks():
    """Downstream of the `Sharder` only. Seen to fail: upstream too; where each rank loads its own state."""
    for kind, shares in ((Fewer, sharder(0, 1)), (Twice, sharder()), (Fewer, sharder(sharded_by="own"))):
        refuse_uneven_ranks(kind(shares), shares)
    refuse_uneven_ranks(Batcher(shares := Sharder(Fewer(Shares()), 0, 2), 1), shares)
    with pytest.raises(
        GraphError, match="^Fewer delivers a number of items .* On 2 ranks, each would be at another position, and"
    ) as refused:
        refuse_uneven_ranks(Twice(Fewer(shares := sharder())), shares)
    assert "penstock.filtered(dataset, predicate), or the step Filter of a stream." in str(refused.value)
    nodes = list(Twice(Batcher(Fewer(Shares()), 1)).chain())
    assert [type(node) for node in users(nodes, "counted")] == [Twice, Fewer]
    assert users(nodes, "transform") == []


def test_who_reads_everything_is_warned_where_there_are_ranks(monkeypatch):
    """Seen to fail: with a `Sharder`; of a source that splits itself."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for root in (Batcher(sharder(), 1), Batcher(Shares(sharded_by="own"), 1), Fewer(Shares(sharded_by="own"))):
        warn_if_all_read_everything(root)
    with pytest.warns(
        UserWarning,
        match=(
            "^this graph has no Sharder, so each of the 2 ranks reads all items, and all train on the same batches. Put"
        ),
    ):
        warn_if_all_read_everything(Fewer(Shares()))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    warn_if_all_read_everything(Fewer(Shares()))


def test_what_is_left_out_at_the_end_of_an_epoch_is_said_once(caplog):
    """Seen to fail: where the items divide by the ranks; in each epoch."""
    caplog.set_level("INFO", "penstock")
    for items, tail, said in ((11, "drop", True), (12, "drop", False), (11, "exact", False)):
        caplog.clear()
        with Loader.from_dataset(range(items), tail=tail, rank=1, world_size=3) as loader:
            for _ in range(2):
                list(loader)
        found = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
        assert [("2 of 11 items" in one, "3 ranks" in one) for one in found] == [(True, True)] * said
    assert "WARNING" not in {record.levelname for record in caplog.records}
    with Loader.from_dataset([[1]] * 7, groups=Packs([1] * 7, 1, count=True), rank=1, world_size=3) as loader:
        list(loader)  # nobody has asked for that
    assert [record.levelname for record in caplog.records if "1 of 7 items" in record.getMessage()] == ["WARNING"]
