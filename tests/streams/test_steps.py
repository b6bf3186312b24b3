"""Steps over one shard: what comes out, in which order, with which random numbers, and what is left open."""

from __future__ import annotations

import contextlib
import gc
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock import ClosedError, Filter, Pack, Shuffle
from penstock._fetch.sample import current
from penstock._random.permutation import SLID, philox_words
from penstock._random.sliding_order import SlidingPermutation
from penstock._streams.forward_reader import Unreadable
from penstock._streams.run_cursor import PassFacts
from penstock._streams.steps import run_steps, step_settings


def run(records, *steps, seed=1, pass_=0, shard=3):
    return run_steps(records, steps, seed=seed, pass_=pass_, shard=shard)


def twice(records):
    """Makes two outputs of each record."""
    for record in records:
        yield record
        yield -record


def drawn(records):
    """Adds the record's number and its first draw."""
    for record in records:
        yield record, penstock.sample().index, penstock.sample().rng.random()


class Records:
    """Counts what is read, and knows whether it was closed."""

    def __init__(self, n):
        self.n = n
        self.read = self.closed = 0

    def __iter__(self):
        for record in range(self.n):
            self.read += 1
            yield record

    def close(self):
        self.closed += 1


def is_odd(record):
    return record % 2


def stray(record):
    return next(iter(()))


# What comes out


def test_no_steps_give_the_records() -> None:
    assert list(run(range(5))) == [0, 1, 2, 3, 4]
    assert list(run([])) == []


def test_a_filter_keeps_what_its_predicate_says() -> None:
    assert list(run(range(6), Filter(is_odd))) == [1, 3, 5]


def test_steps_follow_one_another_and_are_flushed_at_the_end() -> None:
    def summed(records):
        total = 0
        for record in records:
            total += record
        yield total

    assert list(run(range(6), Filter(is_odd), summed)) == [9]
    assert list(run([], twice, summed)) == [0]


def test_a_step_may_be_any_callable_from_an_iterator_to_an_iterable() -> None:
    assert list(run(range(6), lambda records: map(str, records), lambda records: itertools.islice(records, 2))) == ["0", "1"]
    assert list(run(range(6), sorted)) == [0, 1, 2, 3, 4, 5]


def test_records_are_counted_as_they_are_read() -> None:
    outputs = run(range(6), Filter(is_odd))
    assert outputs.records == 0
    assert next(outputs) == 1
    assert outputs.records == 2
    list(outputs)
    assert outputs.records == 6


# Order


@given(n=st.integers(0, 3000), window=st.integers(0, 1500), pass_=st.integers(0, 3))
def test_shuffle_is_the_sliding_shuffle(n, window, pass_) -> None:
    """Seen to fail: releasing a record one place too early; ties by record; the offsets of the block before."""
    keys = philox_words(PassFacts(1, pass_, 3).seed, pass_, SLID, 2)
    expected = SlidingPermutation(pass_, n, window, keys)(np.arange(n))
    assert list(run(range(n), Shuffle(window), pass_=pass_)) == expected.tolist()


def test_shuffle_holds_no_more_than_its_window() -> None:
    records = Records(10_000)
    outputs = run(records, Shuffle(100))
    most = max(records.read - given for given, _ in enumerate(outputs, 1))
    assert 30 <= most <= 100
    outputs.close()


@given(n=st.integers(0, 300), window=st.integers(0, 100), kept=st.sets(st.integers(0, 299)))
def test_a_filter_does_not_change_the_order_of_the_rest(n, window, kept) -> None:
    """Seen to fail: keys by the place among what was kept."""
    everything = list(run(range(n), Shuffle(window)))
    filtered = list(run(range(n), Filter(kept.__contains__), Shuffle(window)))
    assert filtered == [record for record in everything if record in kept]
    doubled = list(run(range(n), twice, Shuffle(window)))
    assert list(run(range(n), twice, Filter(lambda x: x in kept), Shuffle(window))) == [record for record in doubled if record in kept]


def test_shuffles_differ_by_seed_pass_shard_and_place_among_the_steps() -> None:
    def order(**words):
        return tuple(run(range(50), Shuffle(50), **words))

    assert len({order(), order(seed=2), order(pass_=1), order(shard=4), tuple(run(range(50), Shuffle(50), Shuffle(50)))}) == 5
    assert order() == order()


def test_what_comes_does_not_depend_on_where_the_shard_ends() -> None:
    assert list(run(range(1000), Shuffle(64)))[:936] == list(run(range(2000), Shuffle(64)))[:936]


# Random numbers


def test_sample_is_the_record_also_behind_filter_and_shuffle() -> None:
    """Seen to fail: numbers counted behind the filter; the shuffle not putting the record's number back."""
    plain = {record: draw for record, _, draw in run(range(40), drawn)}
    assert len(set(plain.values())) == 40
    for record, number, draw in run(range(40), Filter(is_odd), Shuffle(10), drawn):
        assert (number, draw) == (record, plain[record])


def test_a_record_goes_on_drawing_where_it_stopped() -> None:
    """A filter that drew must not decide what the steps after it draw. Seen to fail: a sample made anew behind the shuffle."""
    both = {}

    def first(records):
        for record in records:
            both[record] = [penstock.sample().rng.random()]
            yield record

    def second(records):
        for record in records:
            both[record].append(penstock.sample().rng.random())
            yield record

    list(run(range(30), first, Shuffle(8), second))
    assert all(one != other for one, other in both.values())


def test_a_step_that_is_resumed_is_at_its_own_record() -> None:
    """Seen to fail: without the tag put back, the second half of a record drew for whichever record the shuffle had given last."""

    def halves(records):
        for record in records:
            yield record, penstock.sample().index
            yield record, penstock.sample().index

    assert all(record == index for record, index in run(range(50), halves, Shuffle(20)))


def test_draws_differ_by_seed_pass_and_shard() -> None:
    def draws(**words):
        return tuple(draw for _, _, draw in run(range(5), drawn, **words))

    assert len({draws(), draws(seed=2), draws(pass_=1), draws(shard=4)}) == 4
    assert draws() == draws()


def test_draws_are_frozen() -> None:
    assert [round(draw, 6) for _, _, draw in run(range(2), drawn, seed=5, pass_=2, shard=7)] == [0.678148, 0.702231]
    assert list(run(range(8), Shuffle(8), seed=5, pass_=2, shard=7)) == [0, 2, 3, 4, 1, 5, 7, 6]


def test_sample_outside_is_untouched() -> None:
    outputs = run(range(5), drawn)
    with pytest.raises(RuntimeError, match="only while a sample is being loaded"):
        penstock.sample()
    token = current.set(None)
    next(outputs)
    assert current.get() is None
    current.reset(token)
    outputs.close()


@pytest.mark.parametrize(
    ("steps", "depends"),
    [
        ([], False),
        ([Filter(is_odd), twice, Pack(4)], False),
        ([twice, Shuffle(4)], False),
        ([Shuffle(4), Filter(is_odd)], True),
        ([Shuffle(1), Filter(is_odd)], False),
        ([drawn], True),
        ([lambda records: (penstock.sample().index + record for record in records)], False),
        ([lambda records: (penstock.sample().epoch + record for record in records)], True),
        ([lambda records: (torch.rand(1, generator=penstock.sample().torch_generator) for _ in records)], True),
        ([lambda records: Shuffle(4)(records)], True),
    ],
)
def test_dependence_on_the_pass_is_seen(steps, depends) -> None:
    outputs = run([np.array([record]) for record in range(9)] if any(type(step) is Pack for step in steps) else range(9), *steps)
    list(outputs)
    assert outputs.depends_on_pass is depends


# Errors and the end


def test_an_error_names_the_record() -> None:
    """Seen to fail: the number behind a shuffle, where the record read last is another one."""

    def picky(records):
        for record in records:
            if record == 17:
                raise KeyError(record)
            yield record

    with pytest.raises(KeyError) as caught:
        list(run(range(40), Filter(is_odd), Shuffle(10), picky))
    assert caught.value.__notes__ == ["at record 17 of shard 3"]


def test_a_record_that_cannot_be_read_raises_its_error() -> None:
    with pytest.raises(UnicodeError) as caught:
        list(run([1, Unreadable(UnicodeError("bad"))], Filter(bool)))
    assert caught.value.__notes__ == ["at record 1 of shard 3"]


def test_a_run_that_failed_does_not_look_like_one_that_ended() -> None:
    """Seen to fail: Python's generators are at their end after an error, so the shard would have been taken for a short one."""
    outputs = run([1, 0, 2], lambda records: (1 / record for record in records))
    assert next(outputs) == 1
    with pytest.raises(ZeroDivisionError):
        next(outputs)
    with pytest.raises(ClosedError, match="shard 3 is closed, or has failed"):
        next(outputs)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda records: map(stray, records), id="map"),
        pytest.param(lambda records: (stray(record) for record in records), id="generator"),
        pytest.param(Filter(stray), id="Filter"),
        pytest.param(lambda records: iter([stray(record) for record in records]), id="eager"),
    ],
)
def test_a_stray_stop_iteration_does_not_end_the_shard(step) -> None:
    """Seen to fail: ``map`` passes it on, and the shard would have been over."""
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(run(range(5), step))


class Pairs:
    """An iterator of its own; ends by StopIteration, as the protocol has it."""

    def __init__(self, records):
        self.records = records

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.records), next(self.records)


class First:
    def __init__(self, records):
        self.records = records
        self.left = 2

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return next(self.records)


def test_an_iterator_may_end_where_it_wants() -> None:
    assert list(run(range(5), Pairs)) == [(0, 1), (2, 3)]
    assert list(run(range(5), First)) == [0, 1]


def test_what_is_no_step_is_refused() -> None:
    with pytest.raises(TypeError, match=r"steps\[1\] is 5"):
        step_settings([twice, 5])
    with pytest.raises(TypeError, match=r"steps\[0\], .*lambda.*, returned None\. It must return an iterator"):
        list(run(range(5), lambda records: None))
    with pytest.raises(TypeError, match="predicate must be a function"):
        Filter(3)
    with pytest.raises(ValueError, match="window=-1"):
        Shuffle(-1)
    with pytest.raises(RuntimeError, match=r"Pass it in steps="):
        list(Shuffle(8)(iter(range(5))))


def test_everything_is_closed_at_the_end_after_an_error_and_by_close() -> None:
    """Seen to fail: the user's generator left to the garbage collector; a second close."""
    closed = []

    def noisy(name):
        def step(records):
            try:
                for record in records:
                    if record == 4:
                        raise ValueError
                    yield record
            finally:
                closed.append(name)

        return step

    for n, reads in ((3, 9), (3, 2), (9, 9)):
        records = Records(n)
        outputs = run(records, noisy("a"), Shuffle(1), noisy("b"))
        gc.disable()
        with contextlib.suppress(ValueError):
            list(itertools.islice(outputs, reads))
        outputs.close()
        outputs.close()
        gc.enable()
        assert sorted(closed) == ["a", "b"]
        assert records.closed == 1
        closed.clear()
    outputs = run(records := Records(3), noisy("a"))
    outputs.close()
    assert (records.closed, records.read, closed) == (1, 0, [])
    with pytest.raises(ClosedError):
        next(outputs)


def test_an_error_while_closing_closes_the_rest() -> None:
    def bad(records):
        try:
            yield from records
        finally:
            raise OSError("disk")

    records = Records(5)
    outputs = run(records, twice, bad)
    next(outputs)
    with pytest.raises(OSError, match="disk"):
        outputs.close()
    assert records.closed == 1


def test_a_run_is_no_cycle() -> None:
    """What is dropped is closed at once, without the garbage collector."""
    closed = []

    def step(records):
        try:
            for record in records:
                yield record, penstock.sample()
        finally:
            closed.append(1)

    gc.disable()
    try:
        outputs = run(range(100), step, Shuffle(10), Filter(bool))
        next(outputs)
        del outputs
        assert closed == [1]
    finally:
        gc.enable()


def test_ours_can_be_pickled() -> None:
    for step in (Filter(is_odd), Shuffle(5), Pack(7, pad={"tokens": 1})):
        assert step_settings([pickle.loads(pickle.dumps(step))]) == step_settings([step])
