"""Epochs that differ in length: what a loader's numbers are about, how many batches a run has, and what is said to a
loop that leaves some behind."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from penstock import Buckets, Loader, Mix, Packs, Ramp, StateError
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Iterator

N = 60
LENGTHS = np.random.default_rng(2).lognormal(3, 1, N).astype(int).clip(1, 200)
COUNTS = [13, 12, 14, 12]


def loader(**options: Any) -> Loader[Any]:
    """The epochs have as many batches as `COUNTS` says."""
    groups = Buckets(LENGTHS, 300, block=16, count=True)
    return Loader.from_dataset(Tagged(N), groups=groups, shuffle=True, seed=0, **options)


def packs(**options: Any) -> Loader[Any]:
    groups = Packs(LENGTHS, 200, block=16, count=True)
    data = [np.full(length, i) for i, length in enumerate(LENGTHS.tolist())]
    return Loader.from_dataset(data, 1, groups=groups, shuffle=True, seed=0, **options)


class Grows:
    """Epoch e has e + 2 batches, which begin at 10 * e."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.epoch + 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[10 * self.epoch + k] for k in range(len(self))])


class Claims(IterableDataset):
    """A stream that says how long it is."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))

    def __len__(self) -> int:
        return 7


def numbers(one: Loader[Any]) -> tuple[Any, ...]:
    """The epoch, its length, and where in it the loader is."""
    return one.epoch, len(one), one.position, one.remaining, one.is_last


def at(epoch: int, position: int = 0) -> tuple[Any, ...]:
    return epoch, COUNTS[epoch], position, COUNTS[epoch] - position, position == COUNTS[epoch]


def epoch_of(batches: Any) -> set[int]:
    return {value // 1000 for batch in batches for value in batch.tolist()}


# What the numbers are about.


@pytest.mark.parametrize("by", ["loader", "sampler"])
def test_the_numbers_are_those_of_the_requested_epoch(by: str) -> None:
    """Seen to fail: the length was that of epoch 0 until the first batch (22 for 24)."""
    with loader() as one:
        state = one.state_dict()
        for epoch in (0, 3, 2, 1):
            (one if by == "loader" else one.sampler).set_epoch(epoch)
            assert numbers(one) == at(epoch)
            assert f"{COUNTS[epoch]} batches an epoch" in repr(one)
            assert one.state_dict() == state
        batches = list(one)
        assert (len(batches), epoch_of(batches)) == (COUNTS[1], {1})
        assert numbers(one) == at(2)


def test_a_batch_samplers_own_epoch_counts_as_a_request() -> None:
    """As with a DataLoader, whose length is that of its batch sampler. Seen to fail: 2 batches until the first."""
    sampler = Grows()
    with Loader.from_dataset(range(99), batch_sampler=sampler) as one:
        for epoch in (0, 3, 1):
            sampler.set_epoch(epoch)
            assert (one.epoch, len(one)) == (epoch, epoch + 2)
            assert [batch.tolist() for batch in one] == [[10 * epoch + k] for k in range(epoch + 2)]
            assert (one.epoch, len(one)) == (epoch + 1, epoch + 3)


def test_the_numbers_are_those_of_an_iterator_that_is_inside() -> None:
    """Fails if a request counts at once, or only at the next batch."""
    with loader() as one:
        batches = iter(one)
        one.set_epoch(0)
        assert epoch_of([next(batches)]) == {0}
        one.set_epoch(2)
        for position in range(1, COUNTS[0]):
            assert numbers(one) == at(0, position)
            next(batches)
        assert numbers(one) == at(2)  # it has its last batch: a loop that counts holds such an iterator
        assert next(batches, None) is None
        assert numbers(one) == at(2)
        assert epoch_of(one) == {2}


def test_a_loop_that_was_left_does_not_hold_the_request_up() -> None:
    """Fails if the loader takes every begun epoch for one that somebody reads."""
    with loader() as one:
        for _ in islice(one, 5):
            pass
        assert numbers(one) == at(0, 5)
        state = one.state_dict()
        one.set_epoch(2)
        assert numbers(one) == at(2)
        assert one.state_dict() == state
        assert sum(1 for _ in one) == COUNTS[2]


def test_the_numbers_of_a_loaded_state_are_those_of_the_start() -> None:
    """A trainer's sampler does not move a loaded state, and a request that the state refuses changes no number.

    Fails if the requested epoch is taken as it is.
    """
    with loader() as one, loader() as again:
        for _ in one:
            pass
        for _ in islice(one, 12):
            pass
        at_the_end = one.state_dict()  # of epoch 1, which nobody has seen
        for _ in islice(one, 4):
            pass
        inside = one.state_dict()
        again.load_state_dict(inside)
        for asked in (0, 2, 3):
            again.sampler.set_epoch(asked)
            assert numbers(again) == at(2, 4)
        again.set_epoch(1)
        assert numbers(again) == at(2, 4)
        assert again.state_dict() == inside
        with pytest.raises(StateError, match=r"set_epoch\(1\) was called, but the loaded state is in epoch 2"):
            next(iter(again))
        again.load_state_dict(at_the_end)
        assert numbers(again) == at(1, 12)
        again.set_epoch(1)
        assert numbers(again) == at(1, 12)
        assert list(again) == []
        again.load_state_dict(at_the_end)
        again.set_epoch(2)
        assert numbers(again) == at(2)
        assert sum(1 for _ in again) == COUNTS[2]


def test_an_iterator_that_has_been_ended_does_not_hold_the_request_up() -> None:
    """Fails if an iterator counts as inside until somebody lets it go."""
    with loader() as one:
        batches = iter(one)
        next(batches)
        one.end_epoch()
        one.set_epoch(3)
        assert numbers(one) == at(3)
        assert next(batches, None) is None


@pytest.mark.filterwarnings("ignore:Claims has no state_dict")
def test_a_trainers_sampler_moves_the_loaded_state_of_a_stream() -> None:
    """To the next epoch, because only reading would show whether the state is at its end. Fails if the request is taken
    for one of the user's, which the state overrides."""
    with Loader.from_dataset(Claims(), 2) as one, Loader.from_dataset(Claims(), 2) as again:
        for _ in islice(one, 2):
            pass
        for asked, by, epoch in ((1, "sampler", 1), (1, "loader", 0), (0, "sampler", 0), (7, "sampler", 0)):
            again.load_state_dict(one.state_dict())
            (again if by == "loader" else again.sampler).set_epoch(asked)
            assert again.epoch == epoch
            batch = next(iter(again))
            assert (again.epoch, len(again), batch.tolist()) == (epoch, 4, [0, 1] if epoch else [4, 5])


def test_the_length_of_a_requested_epoch_is_asked_anew() -> None:
    """Seen to fail: the answer for an epoch that had not begun was kept, because another one had."""
    sampler = list(range(20))
    with Loader.from_dataset(range(99), 4, sampler=sampler) as one:
        for _ in islice(one, 2):
            pass
        one.set_epoch(2)
        assert len(one) == 5
        sampler += range(20, 40)
        assert len(one) == 10
        assert sum(1 for _ in one) == 10


def test_a_request_is_forgotten_once_a_loop_has_begun_by_it() -> None:
    with loader() as one:
        one.set_epoch(3)
        for _ in islice(one, 2):
            pass
        assert numbers(one) == at(3, 2)


# How many batches a run has.


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_the_length_of_a_ramp_is_that_of_its_epoch(ranks: int, tail: Any) -> None:
    """Seen to fail: 20 for 15 before the first batch, because its first size was taken for that of all batches."""
    ramp = Ramp([(0, 2), (20, 4), (50, 8)])
    for epoch in range(3):
        words = {"shuffle": True, "seed": 1, "tail": tail, "rank": ranks - 1, "world_size": ranks}
        with Loader.from_dataset(Tagged(40), ramp, **words) as one:
            one.set_epoch(epoch)
            told = len(one)
            assert told == one.count_batches([epoch]) == sum(1 for _ in one)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("build", [loader, packs])
def test_the_batches_of_a_run_are_counted_exactly(build: Any, ranks: int) -> None:
    """Fails if epoch 0 is counted so many times: 88 for 93."""
    for rank in range(ranks):
        with build(rank=rank, world_size=ranks) as one:
            total, parts = one.count_batches(4), [one.count_batches(range(epoch, epoch + 1)) for epoch in range(4)]
            pickle.dumps(one)  # which a loader that was started refuses
            read = [sum(1 for _ in one) for _ in range(4)]
            assert parts == read
            assert total == sum(read) == one.count_batches(4)
            assert one.count_batches([3, 1]) == read[3] + read[1]
            assert (one.count_batches(0), one.count_batches([])) == (0, 0)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Loader.from_dataset(range(99), batch_sampler=Grows()),
        lambda: Loader.from_dataset(Tagged(50), Ramp([(0, 2), (60, 8)])),
        lambda: Loader.from_dataset(Tagged(50), 4, shuffle=True, skip=[(10, 70), (120, 130)], drop_last=True),
        lambda: Loader.from_dataset(Mix({"a": range(50), "b": range(20)}, {"a": 2, "b": 1}, epoch_size=30), 4),
        lambda: Loader.from_dataset(Tagged(50), 4, tail="exact", rank=1, world_size=3),
        lambda: Loader.from_dataset(Tagged(50), 4, sampler=[1, 2, 3]),
    ],
    ids=["sampler", "ramp", "skip", "mix", "exact", "list"],
)
def test_what_is_counted_does_not_depend_on_the_position(build: Any) -> None:
    """Fails if the position is counted from, or moved."""
    with build() as one, build() as other:
        counted, read = one.count_batches(5), [sum(1 for _ in other) for _ in range(5)]
        assert counted == sum(read)
        batches = [batch.tolist() for batch in islice(one, 1)]
        state = one.state_dict()
        assert one.count_batches(5) == counted
        assert one.state_dict() == state
        one.set_epoch(2)
        assert one.count_batches(range(2)) == sum(read[:2])
        one.set_epoch(0)
        assert [batch.tolist() for batch in islice(one, 1)] == batches


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (lambda: loader(infinite=True), "it is infinite"),
        (lambda: Loader.from_dataset(Tagged(N), 1, groups=Packs(LENGTHS, 200)), "how many items"),
        (lambda: Loader.from_dataset(Claims(), 2), "how many items"),
    ],
    ids=["infinite", "uncounted", "claimed"],
)
def test_what_nobody_knows_is_not_counted(one: Any, why: str) -> None:
    """Fails if the length that a stream claims is multiplied."""
    with one() as made, pytest.raises(TypeError, match=f"cannot be counted in advance: .*{why}"):
        made.count_batches(2)


@pytest.mark.parametrize("wrong", [-1, 2.5, True, None, [0, -1], ["a"]])
def test_what_is_no_number_of_epochs_is_refused(wrong: Any) -> None:
    with loader() as one, pytest.raises((TypeError, ValueError), match="epoch"):
        one.count_batches(wrong)


# Batches left behind.


def by_range(one: Loader[Any], n: int) -> None:
    batches = iter(one)
    for _ in range(min(n, one.count_batches([one.epoch]))):
        next(batches)


def by_break(one: Loader[Any], n: int) -> None:
    for number, _ in enumerate(one, 1):
        if number == n:
            break


def by_end_epoch(one: Loader[Any], n: int) -> None:
    by_range(one, n)
    one.end_epoch()


@pytest.mark.parametrize("leave", [by_range, by_break, by_end_epoch])
def test_batches_left_behind_are_said_once(leave: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that has asked for the length once; as ignite, Composer and ``for step in range(n)``.

    Seen to fail: without a word.
    """
    with loader() as one:
        n = len(one)
        for epoch in range(3):
            one.set_epoch(epoch)
            leave(one, n)
        assert caplog.text == "" or leave is by_end_epoch
        one.set_epoch(3)
        leave(one, n)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert "took 13 batches of epoch 2, as many as len(loader) gave for another epoch, and left 1 behind" in said[0]
        for epoch in (2, 3):
            one.set_epoch(epoch)
            leave(one, n)
        assert len(caplog.records) == 1


def asks_each_epoch(one: Loader[Any]) -> None:
    for epoch in range(4):
        one.set_epoch(epoch)
        by_range(one, len(one))


def reads_to_the_end(one: Loader[Any]) -> None:
    len(one)
    for epoch in range(4):
        one.set_epoch(epoch)
        assert sum(1 for _ in one) == COUNTS[epoch]


def breaks(one: Loader[Any]) -> None:
    len(one)
    for n in (3, 12, 9, 1):
        by_break(one, n)


def limits(one: Loader[Any]) -> None:
    for n in (6, 6, 13, 6):  # nobody has asked for a length
        by_end_epoch(one, n)


def goes_elsewhere(one: Loader[Any]) -> None:
    """To the same epoch again, or to another than the next."""
    len(one)
    for epoch in (2, 2, 0, 2):
        one.set_epoch(epoch)
        by_break(one, 13)


def saves_and_goes_on(one: Loader[Any]) -> None:
    len(one)
    one.set_epoch(2)
    by_break(one, 13)
    one.load_state_dict(one.state_dict())
    assert sum(1 for _ in one) == 1
    by_break(one, 1)


@pytest.mark.parametrize("loop", [asks_each_epoch, reads_to_the_end, breaks, limits, goes_elsewhere, saves_and_goes_on])
def test_a_loop_that_leaves_nothing_by_its_count_is_not_told(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if each ``break``, or each epoch that is not read to its end, is told."""
    with loader() as one:
        loop(one)
    assert caplog.text == ""


def test_an_endless_loader_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    with loader() as finite, loader(infinite=True) as one:
        for _ in range(3):
            by_break(one, len(finite))
    assert caplog.text == ""
