"""`Loader.last`, `load` and `locate`: any batch again, by its address."""

from __future__ import annotations

import json
from itertools import islice, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from global_draws import generators
from pairwise import mostly_soak
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler

import penstock
from penstock import Address, Buckets, ClosedError, GraphError, Loader, Mix, Packs, StateError, StateMismatch, orders
from penstock._random.global_rng import seed_globals
from penstock.nodes import Batcher, Cycler, Fetch, Node, ParallelMapper, Prefetcher, Sampler

N = 23
EPOCHS = 2


class Draws(Dataset[Any]):
    """A sample says where it is, and what it has drawn from each generator there is."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        sample = penstock.sample()
        own = [float(sample.rng.random()), float(torch.rand((), generator=sample.torch_generator))]
        everyones = [float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([index, sample.epoch, sample.position, *own, *everyones], dtype=torch.float64)


class OwnDraws(Draws):
    """Draws only from what belongs to the sample: the global generators are shared by worker threads."""

    def __getitem__(self, index: int) -> Any:
        sample = penstock.sample()
        return torch.tensor([index, sample.epoch, sample.position, float(sample.rng.random())], dtype=torch.float64)


class Tokens(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return torch.arange(1 + index % 5) + 100 * index + penstock.sample().rng.integers(50)


LENGTHS = [1 + index % 5 for index in range(N)]


def dataset(more: dict[str, Any]) -> Any:
    return OwnDraws() if more.get("method") == "thread" else Draws()


def samples(**words: Any) -> Any:
    return lambda **more: Loader.from_dataset(dataset(more), **{"shuffle": True, "seed": 3, **words, **more})


def sampler(**words: Any) -> Any:
    def build(**more: Any) -> Any:
        return Loader.from_dataset(dataset(more), sampler=RandomSampler(range(N)), seed=3, **words, **more)

    return build


def batch_sampler(**more: Any) -> Any:
    return Loader.from_dataset(
        dataset(more), batch_sampler=BatchSampler(RandomSampler(range(N)), 4, drop_last=False), seed=3, **more
    )


def grouped(groups: Any, **words: Any) -> Any:
    return lambda **more: Loader.from_dataset(Tokens(), groups=groups, shuffle=True, seed=3, **words, **more)


def mixed(**more: Any) -> Any:
    return Loader.from_dataset(
        Mix({"a": dataset(more), "b": dataset(more)}, {"a": 1, "b": 2}), batch_size=5, shuffle=True, seed=3, **more
    )


KINDS = {
    "batches": samples(batch_size=4),
    "samples": samples(batch_size=None),
    "a rank of three": samples(batch_size=3, rank=1, world_size=3),
    "a padded rank": samples(batch_size=5, rank=1, world_size=2, tail="pad"),
    "sampler": sampler(batch_size=4),
    "batch sampler": batch_sampler,
    "mix": mixed,
    "packs": grouped(Packs(LENGTHS, 8), batch_size=2),
    "packs with borders": grouped(Packs(LENGTHS, 8, cu_seqlens=True), batch_size=2),
    "buckets": grouped(Buckets(LENGTHS, 12), collate_fn=penstock.pad(0)),
}
WAYS = {
    "inline": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "method": "thread"},
}


def leaves(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [leaf for name in sorted(batch) for leaf in leaves(batch[name])]
    return [batch if isinstance(batch, int) else batch.tolist()]


@pytest.mark.parametrize(
    ("kind", "way"),
    mostly_soak(
        product(KINDS, WAYS),
        [
            *product(KINDS, ["inline"]),
            *product(["batches", "a padded rank", "packs with borders"], ["processes"]),
            *product(["samples", "batch sampler", "mix"], ["threads"]),
        ],
    ),
)
def test_a_batch_is_loaded_again_bit_for_bit(kind: str, way: str) -> None:
    """By this loader, between two batches, and by another one that has not started. Seen to fail: with the positions of
    the rank in place of those before sharding; the indices of packs, once they were logged as JSON, taken for
    others."""
    with KINDS[kind](**WAYS[way]) as loader, KINDS[kind](**WAYS[way]) as fresh:
        seen: list[tuple[Address, list[Any]]] = []
        for _ in range(EPOCHS):
            for batch in loader:
                assert loader.last is not None
                seen.append((loader.last, leaves(batch)))
        for address, batch in seen[::3]:
            assert leaves(loader.load(address)) == batch
        assert all(one != other for (one, _), (other, _) in pairwise(seen))
        for address, batch in seen:
            saved = Address.from_json(json.loads(json.dumps(address.json())))
            assert saved == address
            assert leaves(fresh.load(saved)) == batch
            logged = Address(address.epoch, address.position, json.loads(json.dumps(address.indices)))
            assert leaves(fresh.load(logged)) == batch
            assert fresh.locate(saved).indices == address.indices
        assert fresh.last is None


@pytest.mark.parametrize("way", WAYS)
def test_nothing_moves(way: str) -> None:
    """Seen to fail: a load of another epoch left a dataset's ``set_epoch`` there; the caller's generators had moved
    on."""
    build = KINDS["batches"]
    with build(**WAYS[way]) as quiet, build(**WAYS[way]) as loader:
        seed_globals(1, 0, 0)
        batches, state, last = iter(loader), loader.state_dict(), loader.last
        for place, wanted in enumerate(islice(quiet, 5)):
            before = generators()
            if place:
                loader.load(Address(7, (place, 2, 3)))
                loader.locate(Address(1, place))
                assert generators() == before
                assert loader.state_dict() == state
                assert loader.last == last
            assert leaves(next(batches))[0][0][0] == leaves(wanted)[0][0][0]
            state, last = loader.state_dict(), loader.last


class Told(Draws):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_the_users_dataset_stays_in_its_epoch() -> None:
    """Seen to fail: it was left in the epoch of the address."""
    dataset = Told()
    with Loader.from_dataset(dataset, batch_size=4) as loader:
        loader.set_epoch(3)
        batches = iter(loader)
        next(batches)
        loader.load(Address(1, (0, 1)))
        assert dataset.epoch == 3
        assert float(next(batches)[0, 1]) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reader_thread_is_kept_out_meanwhile(workers: int) -> None:
    """Seen to fail: the thread read the graph at the same time, and a batch was lost."""

    def build() -> Any:
        mapper = ParallelMapper(Batcher(Cycler(Sampler(orders.ShuffledOrder(N, 3))), 4), Fetch(OwnDraws()), workers)
        return Loader(Prefetcher(mapper, 2))

    with build() as loader, build() as other:
        want = [leaves(batch) for batch in other]
        got, addresses = [], []
        for batch in loader:
            got.append(leaves(batch))
            addresses.append(loader.last)
            assert leaves(loader.load(addresses[len(got) // 2])) == got[len(got) // 2]
        assert got == want


def test_what_skipped_samples_were_in_it_is_said() -> None:
    class Fails(Draws):
        def __getitem__(self, index: int) -> Any:
            if index % 5 == 0:
                raise ValueError(index)
            return super().__getitem__(index)

    with Loader.from_dataset(Fails(), batch_size=6, on_error="skip") as loader:
        batch = next(iter(loader))
        assert loader.last is not None
        assert loader.last.indices == [0, 1, 2, 3, 4, 5]
        assert len(batch) == 4
        failed = loader.statistics().nodes[-1].errors
        assert leaves(loader.load(loader.last)) == leaves(batch)
        assert loader.statistics().nodes[-1].errors == failed == 2


def test_last_is_undone_with_an_interrupted_next_and_stays_at_the_end() -> None:
    with KINDS["batches"]() as loader:
        assert loader.last is None
        for _ in loader:
            pass
        assert loader.last is not None
        assert loader.last.position == (20, 21, 22)
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert loader.last is None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(N))


class OwnNext(Node[Any]):
    def next(self) -> Any:
        return self.source.next()


def test_a_stream_says_where_but_not_what() -> None:
    """And keeps none of its items alive."""
    with Loader.from_dataset(Stream(), batch_size=4) as loader:
        next(iter(loader))
        assert loader.last == Address(0, (0, 1, 2, 3))
        assert loader.last is not None
        assert loader.last.indices is None
        with pytest.raises(GraphError, match="Stream cannot be read by position"):
            loader.load(loader.last)


def refused(loader: Loader[Any], address: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        loader.load(address)
    with pytest.raises(kind, match=message):
        loader.locate(address)


def test_what_is_no_address_of_this_loader_is_refused() -> None:
    """Seen to fail: a position past the end came from the next epoch's beginning, in silence."""
    with KINDS["batches"](tail="drop") as loader:
        refused(loader, (0, 1), TypeError, r"\(0, 1\) is not an Address")
        refused(loader, Address(0, N), IndexError, f"position {N} is not in epoch 0, which has {N} items")
        refused(loader, Address(0, (1, N + 5)), IndexError, f"position {N + 5} is not in epoch 0")
        refused(loader, Address(0, 0, indices=99), StateMismatch, "has other indices than this loader at that position")
        loader.load_ahead([Address(0, 0)])  # seen to fail: what was looked up already was not compared
        refused(loader, Address(0, 0, indices=99), StateMismatch, "has other indices than this loader at that position")
        with pytest.raises(ValueError, match="no samples"):
            loader.load(Address(0, ()))
        assert loader.load(Address(np.int64(0), np.int64(2))).shape == (7,)  # type: ignore[arg-type]
        assert loader.load(Address(0, np.arange(3))).shape == (3, 7)  # type: ignore[arg-type]
    with KINDS["packs"]() as packs:
        refused(
            packs,
            Address(0, 0, indices=[[1, 0, 2]]),
            StateMismatch,
            "has other indices than this loader at that position",
        )
    refused(loader, Address(0, 0), ClosedError, "closed")
    # The large ones: seen to fail with an OverflowError, much later.
    for epoch, position in ((-1, 0), (0, -1), (0, (1, -1)), (2**62, 0), (0, 2**63), (0, (1, 2**63))):
        with pytest.raises(ValueError, match="count from 0"):
            Address(epoch, position)
    for damaged in (
        None,
        [],
        [0],
        [0, [1]],
        [0, [0, 0]],
        [-1, 0],
        [0, "x"],
        [0, [0, 2**40]],
        [0, -1],
        {"a": 1},
        [0, True, 1],
    ):
        with pytest.raises(StateError, match="not the JSON of an Address"):
            Address.from_json(damaged)
    with Loader(OwnNext(ParallelMapper(Cycler(Sampler(orders.SequentialOrder(N))), Fetch(Draws()), 0))) as own:
        next(iter(own))
        assert own.last is None
        with pytest.raises(GraphError, match="OwnNext overrides next"):
            own.load(Address(0, 0))
        assert own.locate(Address(0, 4)).indices == 4
