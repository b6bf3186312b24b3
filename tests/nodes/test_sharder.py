"""Sharder: which rank gets what; compared with DistributedSampler, and with dealing by hand."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dealing import TAILS, dealt
from pairwise import pairwise
from torch.distributed.device_mesh import init_device_mesh

from penstock import GraphError, Loader
from penstock.nodes import Batcher, Cycler, EndOfEpoch, Indices, IterableSource, Prefetcher, Sampler, Sharder
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
    """Seen to fail when the padding began at the epoch's end instead of its start, and when take(100) padded more than one round."""
    for tail in TAILS:
        expected = dealt(n, world_size, tail)
        if not expected:
            continue
        hands = [hand(n, rank, world_size, tail, take) for rank in range(world_size)]
        total = sum(len(values) for values, _ in hands)
        assert [hands[k % world_size][0][k // world_size] for k in range(total)] == [position % n for position in expected]
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
    """1 -> 2 -> 3 -> 2 ranks in living loaders, with batches in flight: nothing lost, nothing twice, over two epochs of 40.

    Seen to fail when items were compared with the group as they were taken: with workers, 14 samples of 40 came twice, without an error. And when a
    loaded state was dealt by the old numbers.
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
                    with pytest.raises(GraphError, match=rf"began as rank .* says rank {rank} of {len(living)}\..*load_state_dict"):
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
                GraphError, match="rank 2 of 4, but torch.distributed now says rank 1 of 3.*build another loader, with a mesh"
            ):
                next(batches)
            loader.load_state_dict(loader.state_dict())  # into the same loader is no way out
            batches = over_and_over(loader)


@pytest.fixture(scope="session")  # so that it runs before the fixture that counts the open files of a test
def sockets_of_a_mesh(tmp_path_factory):
    """Open gloo's sockets now: torch 2.15 keeps them open for the life of the process once a dimension of a mesh was requested."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('mesh')}/rendezvous", rank=0, world_size=1)
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
        {"split": "batches"},
    ],
)
def test_numbers_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="rank|world_size|tail|split"):
        Loader.from_dataset(Tagged(4), **bad)


def test_a_bad_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Loader.from_dataset(Tagged(4)) as loader, pytest.raises(ValueError, match="rank=5 and world_size=2 from the environment"):
        next(iter(loader))


def test_a_graph_that_nothing_divides_is_said(monkeypatch):
    """Every rank would train on the same batches. Seen to fail: silence."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"this graph has no Sharder, so each of the 2 ranks reads all items"):
        assert list(Loader(Cycler(Sampler(SequentialOrder(3))))) == [0, 1, 2]
    given = Sharder(Cycler(Sampler(SequentialOrder(3))), 0, 1)
    assert list(Loader(given)) == [0, 1, 2]
