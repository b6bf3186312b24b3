"""The laws of many ranks, run on as many ranks as torchrun started. Data carries its address: item i of epoch e is
1000 * e + i."""

from __future__ import annotations

import copy
import os
import warnings
from datetime import timedelta
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from dealing import TAILS, dealt
from ranks import RANK, WORLD_SIZE, error, flat, gathered, in_order, run
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, RandomSampler

from penstock import Loader
from penstock._loader.check_ranks import check_ranks
from penstock.nodes import Cycler, IterableSource, Node, SamplerWrapper, Sharder
from penstock.orders import TorchOrder
from penstock.testing import Tagged

N = 23


def loader(n: int = N, batch_size: int = 4, **options) -> Loader:
    return Loader.from_dataset(Tagged(n), batch_size=batch_size, **options)


# Before there is a process group. Run once, by main().


def numbers_of_another_world() -> Loader:
    """A loader that began as the only rank."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    alone = loader()
    assert next(iter(alone)).tolist() == [0, 1, 2, 3]
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(WORLD_SIZE)}
    return alone


def no_numbers() -> Loader:
    """A loader that was built, and asked for its length, before its rank was known."""
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    early = loader(24)
    assert len(early) == 6
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(WORLD_SIZE)}
    return early


ALONE, EARLY = numbers_of_another_world(), no_numbers()


def the_process_group_may_start_after_the_loader_was_built():
    assert in_order(gathered(flat(EARLY))) == list(range(24))
    assert len(EARLY) == -(-24 // WORLD_SIZE // 4)


def a_process_group_that_comes_later_with_other_numbers_is_an_error():
    iterator = iter(ALONE)
    said = gathered(error(lambda: next(iterator)))
    if WORLD_SIZE == 1:
        assert said == ["no error"]
    else:
        ours = (
            "GraphError: this loader began as rank 0 of 1, but torch.distributed now says rank {} of {}. Call "
            "init_process_group"
        )
        assert all(text.startswith(ours.format(rank, WORLD_SIZE)) for rank, text in enumerate(said))
    ALONE.close()


# Who gets what.


def the_union_over_ranks_is_the_dataset_with_the_documented_tail():
    for tail in TAILS:
        indices = [position % N for position in dealt(N, WORLD_SIZE, tail)]
        for options in ({}, {"num_workers": 2, "method": "thread"}):
            with loader(tail=tail, **options) as batches:
                for epoch in range(3):
                    assert in_order(gathered(flat(batches))) == [1000 * epoch + index for index in indices], (
                        tail,
                        epoch,
                    )
    with loader(tail="exact", shuffle=True, num_workers=1) as batches:
        for epoch in range(2):
            assert sorted(value for hand in gathered(flat(batches)) for value in hand) == [
                1000 * epoch + index for index in range(N)
            ]


def all_ranks_have_the_same_state_at_every_step():
    batch_sampler = BatchSampler(RandomSampler(range(N), generator=torch.Generator()), 3, False)
    for options in (
        {"shuffle": True},
        {"shuffle": True, "num_workers": 2, "method": "thread"},
        {"tail": "drop", "order": TorchOrder(N)},
        {"drop_last": True},
        {"batch_size": 1, "batch_sampler": batch_sampler},
        {"batch_size": 1, "batch_sampler": batch_sampler, "tail": "drop"},
    ):
        with loader(**options) as batches:
            for state in (batches.state_dict() for _ in range(3) for _ in batches):
                assert gathered(state) == [state] * WORLD_SIZE
            check_ranks(batches)


def at_the_end_of_an_exact_epoch_all_ranks_have_the_same_state():
    """And before the end, the first rank's state is right. Seen to fail when the state of a rank without items stood
    before the items of the others."""
    for n, batch_size in ((7, 1), (7, 2), (1, 1), (2, 2), (N, 4)):
        with loader(n, batch_size, tail="exact") as batches:
            for _ in range(2):
                mine = flat(batches)
                everyones = gathered((mine, batches.state_dict()))
                assert sorted(value % 1000 for hand, _ in everyones for value in hand) == list(range(n))
                said = [state for hand, state in everyones if hand]
                assert said == [said[0]] * len(said)


def ranks_of_one_tensor_parallel_group_get_the_same_data():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with loader(24, mesh=mesh["dp"], shuffle=True) as batches:
        check_ranks(batches)
        hands = gathered(flat(batches))
    assert hands[0] == hands[1]
    assert hands[2] == hands[3]
    assert sorted(hands[0] + hands[2]) == list(range(24))


def a_rank_outside_of_the_mesh_is_told_so():
    """Seen to fail with IndexError: list index out of range."""
    with loader(24, mesh=DeviceMesh("cpu", [0, 1])) as batches:
        said = gathered(error(lambda: flat(batches)))
    text = "ValueError: mesh has the ranks [0, 1], but this is rank {}, which is not in it and so has no share."
    assert said[:2] == ["no error"] * 2
    assert all(said[rank].startswith(text.format(rank)) for rank in (2, 3)), said


def whole_batches_of_a_batch_sampler_are_dealt():
    sampler = BatchSampler(RandomSampler(range(N), generator=torch.Generator()), 3, False)
    with Loader.from_dataset(Tagged(N), batch_sampler=sampler, tail="exact") as batches:
        for epoch in range(2):
            dealt = gathered([batch.tolist() for batch in batches])
            assert sorted(value for hand in dealt for batch in hand for value in batch) == [
                1000 * epoch + index for index in range(N)
            ]
            assert sum(map(len, dealt)) == 8
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def a_batch_sampler_without_a_length_is_padded_too():
    """Seen to fail: without a length, the last round stayed short, and a single rank had one more batch."""
    with Loader.from_dataset(Tagged(N), batch_sampler=WithoutLength(), tail="pad") as batches:
        for epoch in range(2):
            dealt = gathered([batch.tolist() for batch in batches])
            assert {len(hand) for hand in dealt} == {-(-5 // WORLD_SIZE)}
            expected = [
                [1000 * epoch + (2 * k + j) % 10 for j in range(2)] for k in range(-(-5 // WORLD_SIZE) * WORLD_SIZE)
            ]
            assert [dealt[k % WORLD_SIZE][k // WORLD_SIZE] for k in range(len(expected))] == expected


class WithoutLength:
    def __iter__(self):
        return ([2 * k, 2 * k + 1] for k in range(5))


# Evaluation.


def in_step(batches):
    """The pattern of docs/distributed.md: the same number of rounds on every rank; None if this rank has no batch
    left."""
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        anyone = torch.tensor(int(batch is not None))
        dist.all_reduce(anyone, op=dist.ReduceOp.MAX)
        if not anyone:
            return
        yield batch


def ranks_that_run_out_first_or_get_nothing_stay_in_step():
    for n in (1, 2, 5, 7):
        seen = torch.zeros(n, dtype=torch.int64)
        with loader(n, 1, tail="exact") as batches:
            rounds = 0
            for batch in in_step(batches):
                mine = torch.zeros(n, dtype=torch.int64)
                if batch is not None:
                    mine[batch] = 1
                dist.all_reduce(mine)  # a collective inside the loop
                seen += mine
                rounds += 1
        assert seen.tolist() == [1] * n
        assert rounds == -(-n // WORLD_SIZE)


def uneven_training_joins():
    """DistributedDataParallel over ``tail="exact"``, with torch's own ``Join``."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    steps = 0
    with loader(7, 1, tail="exact") as batches, Join([model]):
        for batch in batches:
            model(batch.float()[:, None]).sum().backward()
            steps += 1
    assert sum(gathered(steps)) == 7


# Bad input: the same clear error on every rank, and no rank waits.


def on_every_rank(action, text: str, *more: str) -> None:
    """Check that ``action`` raises the same error on all ranks, which begins with ``text`` and contains ``more``."""
    said = gathered(error(action))
    assert said == [said[0]] * WORLD_SIZE, said
    assert said[0].startswith(text), said
    assert all(part in said[0] for part in more), said


def first(root_or_loader):
    batches = root_or_loader if isinstance(root_or_loader, Loader) else Loader(root_or_loader)
    try:
        return next(iter(batches))
    finally:
        batches.close()


def nothing_of(root_or_loader):
    """The result of two epochs without items."""
    batches = root_or_loader if isinstance(root_or_loader, Loader) else Loader(root_or_loader)
    with batches:
        return list(batches), list(batches), batches.epoch


NOTHING = [], [], 2


def more_ranks_than_items_under_drop_is_an_empty_epoch():
    """The same on every rank, because the total count decides."""
    few = WORLD_SIZE - 1
    assert gathered(nothing_of(loader(few, 1, tail="drop"))) == [NOTHING] * WORLD_SIZE
    for source in (IterableSource(range(few), split="items"), SamplerWrapper(range(few))):
        assert gathered(nothing_of(Sharder(Cycler(source), tail="drop"))) == [NOTHING] * WORLD_SIZE


def a_length_that_lies_gives_no_rank_more_than_its_share():
    """Seen to fail when the length was trusted until the sampler had been read: some ranks got a batch, and others
    none."""

    class Lying(WithoutLength):
        def __len__(self):
            return 7

    def batches_of(tail):
        with (
            warnings.catch_warnings(action="ignore"),
            Loader.from_dataset(Tagged(N), batch_sampler=Lying(), tail=tail) as batches,
        ):
            return [batch.tolist() for batch in batches]

    on_every_rank(
        lambda: batches_of("pad"), "GraphError: tail='pad' needs a source that knows how many items an epoch has"
    )
    assert gathered(len(batches_of("drop"))) == [5 // WORLD_SIZE] * WORLD_SIZE
    assert sorted(batch for hand in gathered(batches_of("exact")) for batch in hand) == [
        [2 * k, 2 * k + 1] for k in range(5)
    ]


def an_empty_epoch_yields_nothing():
    assert (
        gathered(nothing_of(Sharder(Cycler(IterableSource([], split="items")), tail="exact"))) == [NOTHING] * WORLD_SIZE
    )
    with loader(1, 1, tail="exact") as batches:
        assert sum(gathered(len(list(batches)))) == 1  # not empty on all ranks together, so no rank raises


class Pieces:
    """An order whose settings are long."""

    def __init__(self, pieces):
        self.pieces = pieces

    def __len__(self):
        return N

    def settings(self):
        return {"pieces": self.pieces}

    def indices(self, epoch, positions):
        return positions


class OfTheRank(Node):
    """A user's node whose state depends on the rank."""

    def reset(self, initial_state=None):
        super().reset(initial_state and initial_state["source"])

    def get_state(self):
        return {"rank": RANK, "source": self.source.get_state()}

    def start_of(self, epoch, after=None):
        return {"rank": RANK, "source": self.source.start_of(epoch, after)}

    def check(self, state):
        self.source.check(state["source"])


def ranks_that_disagree_are_told_so():
    """Seen to fail: settings of which the first 200 characters were compared."""
    last = WORLD_SIZE - 1
    others = "rank 0" if last == 1 else f"ranks {', '.join(map(str, range(last)))}"
    mismatch = "StateMismatch: the ranks do not load parts of one sequence: "
    mine = last == RANK

    def check(**options):
        with loader(**{"n": N, **options}) as batches:
            check_ranks(batches)

    check()
    lengths = f"is {N} on {others} and {N - 1} on rank {last}"
    on_every_rank(
        lambda: check(shuffle=True, seed=3 if mine else 0),
        f"{mismatch}sample_seed is 0 on {others} and 3 on rank {last}; seed is 0 on {others} and 3 on rank {last}. "
        f"Build",
    )
    on_every_rank(lambda: check(n=N - mine), mismatch, f"; length {lengths}. Build", f"items in an epoch {lengths}")
    on_every_rank(lambda: check(batch_size=4 + mine), f"{mismatch}batch_size is 4 on {others} and 5 on rank {last}")
    on_every_rank(
        lambda: check(tail="drop" if mine else "pad"), f"{mismatch}tail is 'pad' on {others} and 'drop' on rank {last}"
    )
    on_every_rank(lambda: check(sampler=range(N - mine)), mismatch, f"items in an epoch {lengths}")
    lacking = ", ".join(map(str, range(1, WORLD_SIZE)))
    on_every_rank(
        lambda: check(rank=0, world_size=WORLD_SIZE),
        f"{mismatch}no rank loads share {lacking} of {WORLD_SIZE}; loaded are 0 by ranks ",
    )
    with loader() as batches:
        if mine:
            next(iter(batches))
        on_every_rank(lambda: check_ranks(batches), mismatch + "state.")
    with Loader(OfTheRank(loader().root)) as batches:
        on_every_rank(
            lambda: check_ranks(batches),
            mismatch + "state.rank is ",
            "What OfTheRank keeps in its state must be the same on every rank",
        )

    order = Pieces([10] * 40 + [5 if mine else 6])
    on_every_rank(lambda: check(order=order), f"{mismatch}pieces[40] is 6 on {others} and 5 on rank {last}. Build")

    class Broken:
        def __len__(self):
            return N

        def __iter__(self):
            return iter(range(N))

        def settings(self):
            return {}

        def indices(self, epoch, positions):
            return positions

    with loader(order=Broken()) as batches:
        if mine:
            batches._reader.positions.settings = lambda: 1 / 0
        on_every_rank(lambda: check_ranks(batches), f"{mismatch}rank {last} failed with ZeroDivisionError")


def a_step_is_the_same_with_balance():
    """To 1e-6 in float32, over three steps, and with the same state. Seen to fail: with costs in the place of another
    rank's."""
    torch.manual_seed(0)
    inputs, start = torch.randn(96, 5), torch.nn.Linear(5, 1)
    costs = np.random.default_rng(1).lognormal(3, 1, 96)
    found = []
    for balance in (None, costs):
        model = DistributedDataParallel(copy.deepcopy(start))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Loader.from_dataset(list(inputs), batch_size=4, shuffle=True, seed=2, balance=balance) as batches:
            for batch in islice(batches, 3):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            found.append((batches.state_dict(), [parameter.detach() for parameter in model.parameters()], batches.last))
            check_ranks(batches)
    (state, plain, one), (other, balanced, another) = found
    assert state == other
    assert (one == another) == (WORLD_SIZE == 1)
    torch.testing.assert_close(balanced, plain, atol=1e-6, rtol=0)
    if WORLD_SIZE > 1:
        with Loader.from_dataset(list(inputs), batch_size=4, balance=costs + (RANK == 1)) as differing:
            assert "balance is " in error(lambda: check_ranks(differing))


def a_loader_is_stateful():
    assert isinstance(EARLY, Stateful)
    EARLY.close()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=400))
    checks = [
        the_process_group_may_start_after_the_loader_was_built,
        a_process_group_that_comes_later_with_other_numbers_is_an_error,
        the_union_over_ranks_is_the_dataset_with_the_documented_tail,
        all_ranks_have_the_same_state_at_every_step,
        at_the_end_of_an_exact_epoch_all_ranks_have_the_same_state,
        whole_batches_of_a_batch_sampler_are_dealt,
        a_batch_sampler_without_a_length_is_padded_too,
        ranks_that_run_out_first_or_get_nothing_stay_in_step,
        uneven_training_joins,
        an_empty_epoch_yields_nothing,
        a_step_is_the_same_with_balance,
        a_loader_is_stateful,
    ]
    if WORLD_SIZE > 1:
        checks += [
            a_length_that_lies_gives_no_rank_more_than_its_share,
            ranks_that_disagree_are_told_so,
            more_ranks_than_items_under_drop_is_an_empty_epoch,
        ]
    if WORLD_SIZE == 4:
        checks += [ranks_of_one_tensor_parallel_group_get_the_same_data, a_rank_outside_of_the_mesh_is_told_so]
    run(checks)


if __name__ == "__main__":
    main()
