"""What ranks note for each other, on as many ranks as torchrun started; see rank_notes.py. Index i is sample i of epoch
0, and 1000 * e + i of epoch e.

Answers are awaited for as long as they take here, so that no check depends on the speed of the machine.
"""

from __future__ import annotations

import random
from datetime import timedelta
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
import torchdata.nodes
from ranks import RANK, WORLD_SIZE, error, flat, gathered, in_order, run
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from penstock import Loader, Stream
from penstock._loader import note_board
from penstock.nodes import Batcher, Cycler, IterableSource, Prefetcher, Sharder
from penstock.testing import Tagged

N = 20 * WORLD_SIZE**2
MISMATCH = "StateMismatch: {} yields other items on rank "


class Deals:
    """A sampler that deals to the ranks itself, and does not say so."""

    def __init__(self, n=N, rank=None):
        self.mine = range(RANK if rank is None else rank, n, WORLD_SIZE)

    def __len__(self):
        return len(self.mine)

    def __iter__(self):
        return iter(self.mine)


class Asks(Deals):
    """One that asks for its rank only when it is read."""

    def __init__(self):
        pass

    def __len__(self):
        return N // WORLD_SIZE

    def __iter__(self):
        return iter(range(dist.get_rank(), N, dist.get_world_size()))


class Blocks(Deals):
    """Consecutive shares, of which the last is shorter."""

    def __init__(self, n=N + 1):
        each = -(-n // WORLD_SIZE)
        self.mine = range(RANK * each, min(n, RANK * each + each))


class Seeded:
    """A sampler with its own generator."""

    def __init__(self, seed):
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return N

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(random.Random(self.seed + self.epoch).sample(range(N), N))


class Remembers(Seeded):
    """Draws on from where it was left."""

    def __init__(self, seed):
        super().__init__(seed)
        self.rng = random.Random(seed)

    def __iter__(self):
        return iter(self.rng.sample(range(N), N))


class Thing:
    """An index whose text has its address in memory."""

    def __init__(self, index):
        self.index = index


class Made:
    """A sampler of indices that are made of numbers."""

    def __init__(self, make, seed=None):
        self.make, self.seed = make, seed

    def __len__(self):
        return N

    def __iter__(self):
        return map(self.make, range(N) if self.seed is None else random.Random(self.seed).sample(range(N), N))


class Records(IterableDataset):
    """Records, all of them or this rank's own, augmented on each rank in its own way."""

    def __init__(self, make, *, own=False):
        self.make, self.own = make, own

    def __iter__(self):
        rng = np.random.default_rng()
        return (self.make(k, rng) for k in (range(RANK, N, WORLD_SIZE) if self.own else range(N)))


class ByWorker(IterableDataset):
    """Numbers that are split by worker, all of them or those that are this rank's, as ``dist.get_rank`` says when they
    are read."""

    def __init__(self, *, own=False):
        self.own = own

    def __iter__(self):
        info = get_worker_info()
        mine = range(dist.get_rank(), 8 * N, WORLD_SIZE) if self.own else range(8 * N)
        yield from mine[info.id :: info.num_workers]


def number(k, rng):
    return k


def augmented(k, rng):
    return {"picture": rng.integers(0, 255, (3, 4)), "weight": rng.random(), "label": k % 7, "path": f"/rank{RANK}/{k}"}


def only_floats(k, rng):
    return torch.full((2, 2), float(k))


class Things(Tagged):
    def __getitem__(self, index):
        return super().__getitem__(index.start if isinstance(index, slice) else getattr(index, "index", index))


def loader(sampler=None, **options) -> Loader:
    place = {} if sampler is None else {"sampler": sampler}
    return Loader.from_dataset(Things(N + 1), **{"batch_size": 2, **place, **options})


def stream(make, *, own=False, **options) -> Loader:
    return Loader.from_dataset(Records(make, own=own), **{"batch_size": 2, "split": "items", "tail": "drop", **options})


def in_lanes(*, own=False, **options) -> Loader:
    return Loader.from_dataset(
        Stream(ByWorker(own=own), lanes=2 * WORLD_SIZE, epoch_size=N), **{"batch_size": 2, **options}
    )


def by_hand(own) -> Loader:
    values = range(RANK * own, N, WORLD_SIZE if own else 1)
    source = IterableSource(torchdata.nodes.IterableWrapper(values), split="items")
    return Loader(Prefetcher(Batcher(Sharder(Cycler(source), tail="drop"), 2)))


def notes_of(one: Loader):
    return one._reader.notes


def compared(one: Loader) -> bool:
    """Whether this loader has sent a note that counts."""
    notes = notes_of(one)
    return (
        notes is not None
        and notes._clerk is not None
        and notes._clerk.answered > 0
        and notes._name not in note_board.given_up
    )


# Nothing differs.


def whole(one: Loader):
    for _ in range(3):
        yield from one


def left_early(one: Loader):
    for _ in range(3):
        yield from islice(one, 3)
        one.end_epoch()


def jumps(one: Loader):
    for epoch in (3, 1, 1, 0):
        one.set_epoch(epoch)
        yield from islice(one, 3)


def resumed(one: Loader):
    yield from islice(one, 3)
    one.load_state_dict(one.state_dict())
    yield from one
    yield from one


HEALTHY = {
    "RandomSampler": lambda **more: loader(RandomSampler(range(N)), **more),
    "WeightedRandomSampler": lambda **more: loader(WeightedRandomSampler([1.0, 2.0] * (N // 2), N), **more),
    "SubsetRandomSampler": lambda **more: loader(SubsetRandomSampler(range(N // 2)), **more),
    "BatchSampler": lambda **more: loader(
        batch_size=1, batch_sampler=BatchSampler(RandomSampler(range(N)), 2, True), **more
    ),
    "split within": lambda **more: loader(
        batch_size=1, batch_sampler=BatchSampler(RandomSampler(range(N)), 4, True), split="within", **more
    ),
    "a list": lambda **more: loader([*range(N)], **more),
    "seeded alike": lambda **more: loader(Seeded(3), **more),
    "remembers": lambda **more: loader(Remembers(3), **more),
    "read between two epochs": lambda **more: loader(Seeded(3), plan_ahead=False, **more),
    "a stream": lambda **more: stream(number, **more),
    "an augmented stream": lambda **more: stream(augmented, collate_fn=list, **more),
}
WAYS = {
    "inline": {},
    "threads": {"num_workers": 2, "method": "thread"},
    "processes": {"num_workers": 2},
}


def healthy_loaders_raise_no_alarm():
    """Seen to fail: a stream whose pictures were compared too; and the texts of things, which have addresses in
    them."""
    for name, build in HEALTHY.items():
        for walk in (whole, left_early, jumps, resumed):
            with build() as one:
                assert len(list(walk(one))) > 3
                assert compared(one) is (WORLD_SIZE > 1), name
        with build(infinite=True, num_workers=2, method="thread") as one:
            assert len(list(islice(one, N))) == N
            assert compared(one) is (WORLD_SIZE > 1), name
    for way in (WAYS["threads"], WAYS["processes"]):
        with HEALTHY["RandomSampler"](**way) as one:
            assert in_order(gathered(flat(whole(one))))
            assert compared(one) is (WORLD_SIZE > 1)
    for way in (WAYS["inline"], WAYS["processes"]):
        with in_lanes(**way) as one:
            assert in_order(gathered(flat(whole(one)))) == list(range(3 * N))
            assert compared(one) is (WORLD_SIZE > 1)
    with by_hand(own=False) as one:
        list(whole(one))
        assert compared(one) is (WORLD_SIZE > 1)
    with loader(Made(Thing)) as one:
        list(whole(one))
        assert notes_of(one) is None or notes_of(one)._clerk is None


def loaders_that_are_built_again_and_again_raise_no_alarm():
    """And are compared, although the closed ones are still there. Seen to fail when closed ones counted."""
    closed = []
    for _ in range(5):
        one = loader(RandomSampler(range(N)), seed=9)
        list(islice(one, 2))
        assert compared(one) is (WORLD_SIZE > 1)
        one.close()
        closed.append(one)


def loaders_of_other_numbers_write_no_notes():
    """Seen to fail with notes of all loaders."""
    for one in (
        loader(Deals(), rank=RANK, world_size=WORLD_SIZE),
        loader(Deals(), rank=0, world_size=1),
        loader(shuffle=True),
    ):
        with one:
            list(one)
        assert notes_of(one) is None
    with stream(number, own=True, split="own") as one:
        assert in_order(gathered(flat(one))) == list(range(N))
    assert notes_of(one) is None


# Something differs.

DIFFER = {
    "a sampler": lambda: loader(Deals()),
    "a sampler that asks": lambda: loader(Asks()),
    "shares of different lengths": lambda: loader(Blocks()),
    "a batch sampler": lambda: loader(batch_size=1, batch_sampler=BatchSampler(Deals(), 2, False)),
    "other seeds": lambda: loader(Seeded(RANK)),
    "seeds of loaders": lambda: loader(RandomSampler(range(N)), seed=RANK),
    "other slices": lambda: loader(Made(lambda k: slice(k, k + 1), RANK), collate_fn=list),
    "in processes": lambda: loader(Deals(), num_workers=2, tail="exact"),
    "in threads": lambda: loader(Deals(), num_workers=2, method="thread", tail="drop"),
    "a stream": lambda: stream(number, own=True),
    "a stream of dicts": lambda: stream(lambda k, rng: {"x": rng.random(), "id": k}, own=True, seed=1),
    "a stream of floats": lambda: stream(only_floats, own=True, seed=2),
    "a stream of pictures of a class": lambda: stream(lambda k, rng: (only_floats(k, rng), 1), own=True, seed=3),
    "lanes": lambda: in_lanes(own=True, seed=4),
    "a node": lambda: by_hand(own=True),
    "infinite": lambda: loader(Deals(), infinite=True),
}


def every_rank_hears_of_a_difference_whoever_is_late():
    """The early rank has read four batches before the others begin. It goes on when all of them have seen the
    difference.

    Seen to fail: without the look at the alarm, the early rank read to the end.
    """
    for name, build in DIFFER.items():
        for early in {0, WORLD_SIZE - 1}:
            one = build()
            one.set_epoch(early)  # another epoch, because notes of the first one are still there
            said = "no error"
            iterator = iter(one)
            if early == RANK:
                list(islice(iterator, 4))  # 8 items of a stream
            dist.barrier()
            if early != RANK:
                said = error(lambda: list(islice(iterator, N)))  # noqa: B023
            dist.barrier()
            if early == RANK:
                said = error(lambda: list(islice(iterator, N)))  # noqa: B023
            one.close()
            assert said.startswith("StateMismatch: "), (name, early, said)
            remedies = (
                ("A Stream", "get_rank()", "the same items")
                if name == "lanes"
                else ("split='own'", "num_replicas=1", "the same seed")
            )
            assert all(part in said for part in (f"on rank {early}", *remedies)), (name, said)


def a_difference_in_a_later_epoch_is_seen():
    class Later(Seeded):
        def __iter__(self):
            return iter(np.roll(range(N), self.epoch // 2 * RANK).tolist())

    with loader(Later(0)) as one:
        read = [flat(one), flat(one)]
        assert [{value % 1000 for hand in gathered(hands) for value in hand} for hands in read] == [{*range(N)}] * 2
        said = gathered(error(lambda: list(one)))
    # The first rank hears of it too, unless it has read the whole epoch before the second has begun.
    assert any(text.startswith(MISMATCH.format("Later")) and "in epoch 2" in text for text in said), said


# Programs that differ.


def a_rank_that_reads_nothing_delays_nobody():
    with loader(RandomSampler(range(N)), seed=21) as one:
        if RANK:
            list(whole(one))
        assert RANK == 0 or compared(one)


def a_rank_that_reads_a_single_batch_raises_no_alarm():
    with loader(RandomSampler(range(N)), seed=22) as one:
        list(islice(one, None if RANK else 1))
        list(islice(one, None if RANK else 1))
        assert compared(one)


def more_loaders_of_the_same_place_on_a_rank_raise_no_alarm():
    """Rank 0 reads one of two more first. Nobody knows which of them the other ranks have, so none is compared.

    Seen to fail: when no name was given up.
    """
    several = [loader(SubsetRandomSampler(range(k, k + 20)), seed=23) for k in range(2 if RANK else 0, 3)]
    for early in (True, False):
        if (RANK == 0) is early:
            for one in several:
                assert len(list(whole(one))) == 3 * (-(-20 // WORLD_SIZE) // 2 + (-(-20 // WORLD_SIZE) % 2))
        dist.barrier()
    for one in several:
        one.close()


def loaders_built_in_another_order_raise_no_alarm():
    """Two of the same place and length, and two of different lengths, which are compared."""
    for lengths, are_compared in (((20, 20), False), ((20, 24), True)):
        ks = (0, 1) if RANK else (1, 0)
        several = [loader(SubsetRandomSampler(range(k, k + lengths[k])), seed=24 + are_compared) for k in ks]
        for one in several:
            list(whole(one))
            assert compared(one) is are_compared, (RANK, lengths)
        for one in several:
            one.close()
        dist.barrier()


def a_mesh_is_compared_along_its_dimension():
    """Ranks 0 and 1 are replicas of each other's neighbours: two samplers along "tp" are no fault of "dp". Seen to fail
    without the ranks in the name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with loader(Seeded(RANK % 2), mesh=mesh["dp"]) as one:
        list(whole(one))
        assert compared(one)
    dist.barrier()
    one = loader(Seeded(RANK // 2), mesh=mesh["dp"])
    said = gathered(error(lambda: list(whole(one))))
    one.close()
    for rank, text in enumerate(said):
        if text != "no error":
            assert text.startswith(MISMATCH.format("Seeded")), text
            assert (
                f"on rank {rank % 2 + 2} than on rank {rank % 2} " in text
                or f"on rank {rank % 2} than on rank {rank % 2 + 2} " in text
            )
    assert all({said[rank], said[rank + 2]} != {"no error"} for rank in (0, 1)), said


def main() -> None:
    note_board.AT_MOST_S = 100.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    checks = [
        healthy_loaders_raise_no_alarm,
        loaders_that_are_built_again_and_again_raise_no_alarm,
        loaders_of_other_numbers_write_no_notes,
    ]
    if WORLD_SIZE > 1:
        checks += [
            every_rank_hears_of_a_difference_whoever_is_late,
            a_difference_in_a_later_epoch_is_seen,
            a_rank_that_reads_nothing_delays_nobody,
            a_rank_that_reads_a_single_batch_raises_no_alarm,
            more_loaders_of_the_same_place_on_a_rank_raise_no_alarm,
            loaders_built_in_another_order_raise_no_alarm,
        ]
    if WORLD_SIZE == 4:
        checks.append(a_mesh_is_compared_along_its_dimension)
    run(checks)


if __name__ == "__main__":
    main()
