"""Steps over one shard: what comes out, in which order, with which random numbers, and what is left open."""

from __future__ import annotations

import configparser
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import operator
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import ClosedError, Filter, GraphError, Pack, Shuffle
from penstock._fetch.packing import PackIndex, PackView
from penstock._random.permutation import SLID, philox_words
from penstock._random.sliding_order import SlidingPermutation
from penstock._streams.run_cursor import PassFacts
from penstock._streams.step_identity import code_hash, step_settings, step_values
from penstock._streams.steps import ShardRun


def run(records, *steps, seed=1, pass_=0, shard=3):
    return ShardRun(records, steps, seed=seed, pass_=pass_, shard=shard)


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


def nothing(records):
    return None


# What comes out


def test_steps_follow_one_another_and_are_flushed_at_the_end() -> None:
    def summed(records):
        total = 0
        for record in records:
            total += record
        yield total

    assert list(run(range(6), Filter(is_odd), summed)) == [9]
    assert list(run([], twice, summed)) == [0]


# Order


@settings(deadline=None)
@given(n=st.integers(0, 3000), window=st.integers(0, 1500), pass_=st.integers(0, 3))
def test_shuffle_is_the_sliding_shuffle(n, window, pass_) -> None:
    """Seen to fail: a record released too early; every block of offsets the same."""
    keys = philox_words(PassFacts(1, pass_, 3, None).seed, pass_, SLID, 2)
    expected = SlidingPermutation(pass_, n, window, keys)(np.arange(n))
    assert list(run(range(n), Shuffle(window), pass_=pass_)) == expected.tolist()


@settings(deadline=None)
@given(n=st.integers(0, 300), window=st.integers(0, 100), kept=st.sets(st.integers(0, 299)))
def test_a_filter_does_not_change_the_order_of_the_rest(n, window, kept) -> None:
    """Seen to fail: keys by the place among what was kept."""
    everything = list(run(range(n), Shuffle(window)))
    filtered = list(run(range(n), Filter(kept.__contains__), Shuffle(window)))
    assert filtered == [record for record in everything if record in kept]
    doubled = list(run(range(n), twice, Shuffle(window)))
    assert list(run(range(n), twice, Filter(lambda x: x in kept), Shuffle(window))) == [
        record for record in doubled if record in kept
    ]


@pytest.mark.parametrize("step", [Shuffle(50), drawn], ids=["order", "draws"])
def test_orders_and_draws_differ_by_seed_pass_and_shard(step) -> None:
    """And two shuffles. Seen to fail: both under the keys of the first."""

    def outputs(*more, **words):
        return tuple(run(range(50), step, *more, **words))

    assert len({outputs(), outputs(seed=2), outputs(pass_=1), outputs(shard=4), outputs(Shuffle(50))}) == 5
    assert outputs() == outputs()
    once, twice_shuffled = (list(run(range(50), *[Shuffle(50)] * times)) for times in (1, 2))
    assert twice_shuffled != [once[place] for place in once]


# Packing


def sequences(lengths, dtype=np.int32):
    """Sequence i is i + 1 again and again."""
    return [np.full(length, number + 1, dtype) for number, length in enumerate(lengths)]


def members(row):
    """The sequences of a row."""
    segments = row["segment_ids"]
    return [row["tokens"][segments == number] for number in range(1, int(segments.max()) + 1)]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), max_size=80),
    capacity=st.integers(1, 40),
    window=st.integers(1, 20),
    oversize=st.sampled_from(["split", "truncate"]),
)
def test_pack_lays_out_every_sequence_once(lengths, capacity, window, oversize) -> None:
    """Seen to fail: the rest of a split sequence left out; what waits alone left out; positions that go on from one
    sequence to the next."""
    rows = list(run(sequences(lengths), Pack(capacity, pad=-1, oversize=oversize, window=window)))
    found = {}
    for row in rows:
        parts = members(row)
        assert [int(part[0]) for part in parts] == sorted(int(part[0]) for part in parts)
        used = sum(map(len, parts))
        assert 0 < used <= capacity
        assert row["position_ids"].tolist() == [place for part in parts for place in range(len(part))] + [0] * (
            capacity - used
        )
        assert row["segment_ids"].tolist() == [n for n, part in enumerate(parts, 1) for _ in part] + [0] * (
            capacity - used
        )
        assert (row["tokens"][used:] == -1).all()
        for part in parts:
            assert (part == part[0]).all()
            found.setdefault(int(part[0]) - 1, []).append(len(part))
    kept = {
        number: length if oversize == "split" else min(length, capacity)
        for number, length in enumerate(lengths)
        if length
    }
    assert {number: sum(parts) for number, parts in found.items()} == kept
    assert all(max(parts) <= capacity and len(parts) == -(-sum(parts) // capacity) for parts in found.values())


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 60), max_size=80), capacity=st.integers(1, 40), window=st.integers(1, 20))
def test_pack_crops_to_full_rows(lengths, capacity, window) -> None:
    """Only the last of a row is cut, and its beginning stays. Seen to fail: the end of the shortest kept; a last row
    with padding; the rest packed again; what is cut counted as waiting."""
    rows = list(
        run(
            [100 * number + np.arange(length) for number, length in enumerate(lengths)],
            Pack(capacity, pad=-1, crop=True, window=window),
        )
    )
    found = {}
    for row in rows:
        assert (row["segment_ids"] > 0).all()
        parts = members(row)
        for place, part in enumerate(parts):
            number, whole = int(part[0]) // 100, min(lengths[int(part[0]) // 100], capacity)
            assert part.tolist() == list(range(100 * number, 100 * number + len(part)))
            assert len(part) == whole or place == len(parts) - 1
            assert number not in found
            found[number] = len(part)
    left = [min(length, capacity) for number, length in enumerate(lengths) if number not in found]
    assert sum(left) < capacity


def test_pack_crops_the_shortest_when_nothing_fits() -> None:
    """Seen to fail: the longest cut."""
    rows = run(sequences([6, 9, 8, 5, 3, 9, 9]), Pack(10, crop=True, window=5))
    assert [[len(part) for part in members(row)] for row in rows] == [[6, 3, 1], [9, 1], [9, 1]]


LENGTHS = {
    "lognormal": lambda rng: rng.lognormal(6.0, 1.0, 6000),
    "short": lambda rng: rng.integers(100, 300, 20_000),
    "tiny": lambda rng: rng.integers(1, 30, 60_000),
    "long": lambda rng: rng.lognormal(7.0, 0.8, 4000),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_rows_are_full(kind) -> None:
    """Seen to fail: pairs taken wherever they fit a little better (they eat the small ones); the end packed oldest
    first."""
    lengths = np.maximum(1, LENGTHS[kind](np.random.default_rng(0))).astype(int)
    rows = sum(1 for _ in run(sequences(lengths, np.uint16), Pack(2048)))
    assert lengths.sum() / (rows * 2048) >= (0.994 if kind == "long" else 0.995)


@pytest.mark.parametrize(("most", "least"), [(16, 0.99), (4, 0.96)])
def test_rows_within_a_budget_are_full(most, least) -> None:
    """Of up to 3 pictures in a document: of tokens, or of pictures. Seen to fail: with the longest that fits."""
    rng = np.random.default_rng(0)
    records = list(
        zip(
            np.maximum(1, rng.lognormal(5.0, 1.0, 2000)).astype(int).clip(max=2048).tolist(),
            rng.integers(0, 4, 2000).tolist(),
            strict=True,
        )
    )
    rows = list(
        run(records, Pack(2048, length=operator.itemgetter(0), also={"pictures": (operator.itemgetter(1), most)}))
    )
    assert sorted(record for row in rows for record in row) == sorted(records)
    totals = np.array([np.sum(row, axis=0) for row in rows])
    assert (totals <= [2048, most]).all()
    assert (totals.sum(0) / [2048, most]).max() / len(rows) > least


def test_tiny_sequences_wait_for_more_than_a_row() -> None:
    """Seen to fail: a window in sequences alone."""
    assert sum(1 for _ in run(sequences([3] * 3000), Pack(90, window=10))) == 100


def test_no_sequence_waits_forever() -> None:
    """A row begins with the oldest. Seen to fail: rows begun with what is longest."""
    lengths = [5] + [7] * 1000  # nothing fits beside two of 7, and 5 never fits best
    rows = list(itertools.islice(run(sequences(lengths), Pack(14, window=10)), 2))
    assert any(1 in row["tokens"] for row in rows)


def test_rows_are_what_packs_make() -> None:
    """The same fields, types and padding as `Packs` give."""
    for make in (list, np.array, torch.tensor):
        documents = [make([number] * 3) for number in range(4)]
        (row,) = run(documents, Pack(14, pad=9))
        expected = PackView(documents, 14, 9)[PackIndex([0, 1, 2, 3], None, [3] * 4, [0] * 4, [3] * 4)]
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            assert type(row[name]) is type(value)
            assert row[name].dtype == value.dtype
            assert row[name].tolist() == value.tolist()


def test_records_that_are_no_sequences_stay_whole() -> None:
    images = [("image", patches) for patches in (3, 8, 2, 5, 4, 1)]
    rows = list(run(images, Pack(10, length=lambda image: image[1])))
    assert sorted(image for row in rows for image in row) == sorted(images)
    assert all(sum(image[1] for image in row) <= 10 for row in rows)


def test_behind_a_pack_the_record_is_its_first_one() -> None:
    def numbered(rows):
        for row in rows:
            yield int(row["tokens"][0]) - 1, penstock.sample().index

    assert all(
        first == index for first, index in run(sequences([5, 9, 3, 7, 4, 8, 2, 6]), Pack(12, window=3), numbered)
    )


@pytest.mark.parametrize(
    ("records", "step", "message"),
    [
        (
            [[1], "text"],
            Pack(4),
            "the field 'tokens' of a sequence to pack must be an array, .*not 'text'.* at record 1 of",
        ),
        ([3], Pack(4), "not 3.*need length="),
        ([[1], {"a": [1]}], Pack(4), r"fields \['a'\], but those before it in the shard have \['tokens'\]"),
        ([{"a": [1, 2], "b": [1]}], Pack(4), "must have the same length, but they have: 'a' 2, 'b' 1"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], Pack(4), r"shape \(…, 4\) here, .*shape \(…, 3\)"),
        ([[1] * 5], Pack(4, oversize="error"), "has length 5, but the capacity is 4.* use oversize='split'"),
        ([5], Pack(4, length=int), "has length 5, but the capacity is 4.*Filter"),
        ([0], Pack(4, length=int), r"length\(record\)=0"),
        ([2.5], Pack(4, length=float), r"length\(record\)=2.5"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(records, step, message) -> None:
    """What sequences may be is said, as here, by the tests of packs."""
    with pytest.raises(ValueError, match=r".") as caught:
        list(run(records, step))
    (note,) = caught.value.__notes__
    assert note == f"at record {len(records) - 1} of shard 3"
    assert re.search(message, f"{caught.value} {note}")


# Random numbers


def test_sample_is_the_record_also_behind_filter_and_shuffle() -> None:
    """Seen to fail: the shuffle not putting the record's number back."""
    plain = {record: draw for record, _, draw in run(range(40), drawn)}
    assert len(set(plain.values())) == 40
    for record, number, draw in run(range(40), Filter(is_odd), Shuffle(10), drawn):
        assert (number, draw) == (record, plain[record])


def five_from(shard):
    return iter(range(shard, shard + 5))


def told(records):
    for record in records:
        sample = penstock.sample()
        yield record, sample.shard, sample.index, sample.epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_knows_the_shard_and_the_pass_of_its_record(workers) -> None:
    """Seen to fail: the number of the shard in place of what the user gave."""
    shards = penstock.Stream(
        [100, 200], open=five_from, steps=[told, Shuffle(3), Filter(bool)], epoch_size=20, lanes=2, bookmarks=False
    )
    with penstock.Loader.from_dataset(shards, batch_size=20, num_workers=workers) as loader:
        records, given, numbers, passes = (column.tolist() for column in next(iter(loader)))
    assert given == [record // 100 * 100 for record in records]
    assert [record - shard for record, shard in zip(records, given, strict=True)] == numbers
    assert passes == [0] * 10 + [1] * 10
    assert sorted(records) == sorted([*range(100, 105), *range(200, 205)] * 2)


def test_a_record_goes_on_drawing_where_it_stopped() -> None:
    """A filter that drew must not decide what the steps after it draw. Seen to fail: a sample made anew behind the
    shuffle."""
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
    """Seen to fail: without the tag put back, the second half of a record drew for whichever record the shuffle had
    given last."""

    def halves(records):
        for record in records:
            yield record, penstock.sample().index
            yield record, penstock.sample().index

    assert all(record == index for record, index in run(range(50), halves, Shuffle(20)))


@pytest.mark.parametrize(
    ("chain", "depends"),
    [
        ([], False),
        ([Filter(is_odd), twice, Pack(4)], False),
        ([twice, Shuffle(4)], False),
        ([Shuffle(4), Filter(is_odd)], True),
        ([Shuffle(1), Filter(is_odd)], False),
        ([drawn], True),
        ([lambda records: (penstock.sample().index + record for record in records)], False),
        ([lambda records: (penstock.sample().epoch + record for record in records)], True),
        ([lambda records: (penstock.sample().seed + record for record in records)], True),
        ([lambda records: (torch.rand(1, generator=penstock.sample().torch_generator) for _ in records)], True),
        ([lambda records: Shuffle(4)(records)], True),
    ],
)
def test_dependence_on_the_pass_is_seen(chain, depends) -> None:
    outputs = run(
        [np.array([record]) for record in range(9)] if any(type(step) is Pack for step in chain) else range(9), *chain
    )
    list(outputs)
    assert outputs.depends_on_pass is depends


def test_what_was_cut_short_may_depend_on_the_pass() -> None:
    """How many outputs come before a bad record is up to the shuffle. Seen to fail: a shard skipped in one pass taken
    for as short in all of them."""
    counts = set()
    for pass_ in range(5):
        outputs = run(["1", "2", "3", "4", "x"], lambda records: map(int, records), Shuffle(4), pass_=pass_)
        given = 0
        with pytest.raises(ValueError, match="invalid literal"):
            for given, _ in enumerate(outputs, 1):  # noqa: B007
                pass
        counts.add(given)
        assert outputs.depends_on_pass
    assert len(counts) > 1


DRAWS = [random.random, np.random.random, lambda: torch.rand(1)]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_step_must_not_draw_from_the_global_generators(draw) -> None:
    """They belong to the process: a resumed run would draw others. Seen to fail: no look at the generators; a warning,
    and the run goes on."""
    # with a normal deviate in store, as other tests may leave it, NumPy's generator cannot be looked at
    np.random.seed(0)
    for step in (Filter(lambda record: draw() < 2), lambda records: (record + draw() for record in records)):
        with pytest.raises(
            GraphError, match=r"the steps over shard 3 drew from the global random numbers.*penstock\.sample\(\)\.rng"
        ):
            list(run(range(3), step))


@pytest.mark.parametrize("draw", DRAWS)
def test_what_reads_may_draw_from_the_global_generators(draw, caplog, monkeypatch) -> None:
    """A client of a network does, for its pauses. Seen to fail: taken for a draw of the steps."""
    monkeypatch.setattr("penstock._errors.first_time.said", set())
    np.random.seed(0)
    for _ in range(2):
        outputs = run((record for record in range(30) if draw() < 2), Filter(is_odd), Shuffle(4))
        assert sorted(outputs) == list(range(1, 30, 2))
        assert outputs.depends_on_pass
    (warning,) = caplog.records
    assert "reading shard 3 drew from the global random numbers" in warning.getMessage()
    assert "penstock.sample().rng" in warning.getMessage()


def test_no_shard_is_skipped_because_a_step_draws() -> None:
    """Seen to fail: all shards left out, one after another."""
    data = penstock.Stream(
        4, range, epoch_size=8, steps=[Filter(lambda record: random.random() < 2)], bookmarks=False, on_error="skip"
    )
    data.order(shuffle=False, seed=0).take()
    with pytest.raises(GraphError, match="drew from the global random numbers"):
        data[1]


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


def test_a_run_that_failed_does_not_look_like_one_that_ended() -> None:
    """Seen to fail: Python's generators are at their end after an error, so the shard would have been taken for a short
    one."""
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


class Itself:
    """Works in one lane; in two it would hand the records of one to the other."""

    def __call__(self, records):
        self.records = records
        return self

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.records)


def test_a_function_of_one_record_as_a_step_is_told_what_to_use() -> None:
    """Seen to fail: only "'generator' object is not subscriptable", at record 0."""
    with pytest.raises(TypeError, match="not subscriptable") as caught:
        list(run(range(5), lambda record: record["score"] > 3))
    assert any("steps[0]" in note and "penstock.Filter" in note for note in caught.value.__notes__)

    def eager(records):
        return [1 // record for record in records]

    with pytest.raises(ZeroDivisionError) as caught:  # an error of a record, in a step that is one
        list(run(range(5), eager))
    assert not any("penstock.Filter" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: step_settings([twice, 5]), TypeError, r"steps\[1\] is 5"),
        (
            lambda: step_settings([Filter(is_odd, version={1, 2})]),
            TypeError,
            r"version of steps\[0\], Filter, must be JSON",
        ),
        (
            lambda: list(run(range(5), nothing)),
            TypeError,
            r"steps\[0\], nothing, returned None, but must return an iterator",
        ),
        (lambda: list(run(range(5), Itself())), TypeError, r"steps\[0\], Itself, returned itself as the iterator"),
        (lambda: list(Shuffle(8)(iter(range(5)))), RuntimeError, "Pass it in steps="),
        (lambda: Filter(3), TypeError, "predicate must be a function"),
        (lambda: Shuffle(-1), ValueError, "window=-1"),
        (lambda: Pack(0), ValueError, "capacity=0"),
        (lambda: Pack(4, window=0), ValueError, "window=0"),
        (lambda: Pack(4, pad="x"), ValueError, "pad='x'"),
        (lambda: Pack(4, oversize="cut"), ValueError, "oversize='cut' must be"),
        (lambda: Pack(4, length=int, oversize="split"), ValueError, "with length= records stay whole"),
        (
            lambda: Pack(4, length=int, crop=True),
            ValueError,
            "crop=True, oversize=None cut sequences, but with length= records stay whole",
        ),
        (lambda: Pack(4, length=3), TypeError, "length must be a function"),
    ],
)
def test_what_is_no_step_is_refused(make, error, message) -> None:
    """Seen to fail: of a step that is its own iterator, the records of one shard came in another's place, without a
    word."""
    with pytest.raises(error, match=message):
        make()


def test_everything_is_closed_at_the_end_after_an_error_and_by_close() -> None:
    """Seen to fail: the user's generators left to the garbage collector; the records left open at the end."""
    closed, kept = [], []

    def noisy(name):
        def step(records):
            generator = outputs(records)
            kept.append(generator)
            return generator

        def outputs(records):
            try:
                for record in records:
                    if record == 4:
                        raise ValueError
                    yield record
            finally:
                closed.append(name)

        return step

    for n, reads, by_itself in ((3, 9, True), (3, 2, False), (9, 9, True)):
        records = Records(n)
        some = run(records, noisy("a"), Shuffle(1), noisy("b"))
        with contextlib.suppress(ValueError):
            list(itertools.islice(some, reads))
        assert records.closed == by_itself
        some.close()
        some.close()
        assert (sorted(closed), records.closed) == (["a", "b"], 1)
        closed.clear()
    unread = run(records := Records(3), noisy("a"))
    unread.close()
    assert (records.closed, records.read, closed) == (1, 0, [])
    with pytest.raises(ClosedError):
        next(unread)


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


# What names them


def test_settings_name_each_step() -> None:
    class Versioned:
        version = "2b"

        def __call__(self, records):
            return records

        def settings(self):
            return {"k": (1, 2)}

    chain = [Filter(is_odd, version=3), twice, functools.partial(twice), Shuffle(8), Versioned()]
    assert step_settings(chain) == [
        {"name": "Filter", "version": 3, "settings": {"predicate": {"name": "is_odd"}}},
        {"name": "twice"},
        {"name": "twice"},
        {"name": "Shuffle", "settings": {"window": 8}},
        {"name": "test_settings_name_each_step.<locals>.Versioned", "version": "2b", "settings": {"k": [1, 2]}},
    ]


def holding(rows=256, **values):
    """A step of each way to hold a value."""
    config = dataclasses.make_dataclass("Config", ["rows", "table"])(rows, np.arange(rows))

    class Rows:
        size = rows

        def __init__(self):
            self.config, self.names, self.weights = config, {"a", "b", rows}, torch.arange(rows)

        def __call__(self, records):
            return records

    def closure(records, *, least=0):
        return iter([record for record in records if record > rows])

    def step(records, k):
        return records

    return [
        Rows(),
        Filter(Rows()),
        functools.partial(step, k=rows),
        closure,
        lambda records: records if rows else None,
        Rows().__call__,
    ]


def test_the_values_that_a_step_holds_are_its_identity(caplog) -> None:
    """Seen to fail: nothing of a step was compared that had no settings()."""
    of, same, other = (step_values(holding(rows)) for rows in (256, 256, 512))
    assert of == same == json.loads(json.dumps(of))
    assert len(of) == len(other) == 6
    assert not set(map(json.dumps, of.values())) & set(map(json.dumps, other.values()))
    assert of["steps[2] holding.<locals>.step"] == {"k": 256}
    assert of["steps[3] holding.<locals>.closure"] == {"rows": 256, "least": 0}
    assert step_values([Shuffle(8), twice, Filter(is_odd), Pack(8)]) == {}
    assert caplog.records == []


def test_a_value_that_is_not_plain_is_left_out_and_named_once(caplog) -> None:
    class Tokenize:
        def __init__(self):
            self.tokenizer, self.length, self.words, self.field = (
                re.finditer("a", "b"),
                7,
                list(range(10**4)),
                operator.itemgetter("text"),
            )
            self.encode = self.tokenizer.__next__
            self.parser = configparser.ConfigParser().get

        def __call__(self, records):
            return records

    found = [step_values([twice, Tokenize()]) for _ in range(2)]
    name = "test_a_value_that_is_not_plain_is_left_out_and_named_once.<locals>.Tokenize"
    assert found[0] == found[1]
    assert found[0][f"steps[1] {name}"]["length"] == 7
    assert found[0][f"steps[1] {name}"]["field"] == "operator.itemgetter('text')"
    assert len(json.dumps(found[0])) < 500, "a long value is a checksum"
    [record] = caplog.records
    assert (
        f"steps[1], {name}, holds tokenizer (callable_iterator), encode (method-wrapper), parser.self (ConfigParser), "
        f"which a saved state cannot compare"
    ) in record.message
    assert "settings()" in record.message


SOURCE = """
import functools, json, re, enum, random
import numpy as np
import torch
import helpers
from dataclasses import dataclass
from penstock import Filter, Shuffle, Pack

LIMIT = {limit}
WORDS = {{"a", "b", "c", "dd", "ee"}}
class Color(enum.Enum):
    RED = 1
@dataclass
class Config:
    size: int = {size}
    color: Color = Color.RED
class Base:
    factor = {factor}
    def scale(self, record):
        return record * self.factor + {base}
class Step(Base):
    def __init__(self, config):
        self.config = config
        self.table = np.arange(3)
        self.weights = torch.ones({weights})
    def __call__(self, records):
        for record in records:
            yield self.scale(record) if record < self.config.size else helpers.odd(record)
@torch.no_grad()
def quiet(record):
    return record + {quiet}
def long(record):
    return quiet(record) > LIMIT and __name__ and str(record) not in WORDS and json.dumps(record){method}()
@functools.lru_cache
def cached(record):
    return record + {cached}
def of(n):
    def step(records, k={default}, *, word="{word}"):
        for record in records:
            yield from [inner(record + n + k) for _ in range(2)]
    def inner(record):
        return cached(record) if record else step
    return step
class Unit(enum.IntFlag):
    CM = 2
@dataclass(slots=True)
class Sizes:
    of: tuple
held = [functools.partial(of({{"b", "a", Unit.CM}}), k=Config()), Step(Sizes((1.5, float("nan"), b"x", None))), Filter(functools.partial(max, key={{1: Config}}))]
steps = [Filter(long), of({cell}), Step(Config()), Shuffle(8), functools.partial(of(2), k={partial}), lambda x: filter(re.compile("{pattern}").match, x),
         Filter(frozenset({{"x", "y", "z", {member}}}).__contains__), Pack(8, length=lambda r: {length})]
def told():
    from penstock._streams.step_identity import code_hash, step_values
    print(json.dumps([code_hash(steps), step_values(steps), step_values(held)]), flush=True)
if __name__ == "__main__":
    import multiprocessing, sys
    told()
    for method in sys.argv[1:]:
        process = multiprocessing.get_context(method).Process(target=told)
        process.start()
        process.join(120)
"""  # noqa: E501
FILLED = {
    "limit": 3, "size": 5, "factor": 2, "base": 0, "weights": 2, "method": ".upper", "cached": 1, "default": 1,
    "word": "w", "cell": 1, "partial": 4, "pattern": "a+", "member": "'m'", "length": "len(r)", "quiet": 1,
}  # fmt: skip
OTHERWISE = {
    "limit": 4, "size": 6, "factor": 3, "base": 1, "weights": 3, "method": ".lower", "cached": 2, "default": 2,
    "word": "v", "cell": 2, "partial": 5, "pattern": "b+", "member": "'n'", "length": "len(r) + 1", "quiet": 2,
}  # fmt: skip


@pytest.fixture
def code_hash_of(tmp_path):
    """The hash of the steps in ``SOURCE``, in this process, as a module."""
    numbers = itertools.count()

    def hashed(source, helpers="def odd(record):\n    return record + 1\n", whole=False):
        folder = tmp_path / f"{next(numbers)}"
        folder.mkdir()
        (folder / "helpers.py").write_text(helpers)
        (folder / "made.py").write_text(source)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("helpers", "made"):
                spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
                module = importlib.util.module_from_spec(spec)
                patch.setitem(sys.modules, name, module)
                spec.loader.exec_module(module)
            return module if whole else code_hash(module.steps)

    return hashed


def test_the_code_hash_sees_what_may_change_the_outputs(code_hash_of) -> None:
    """Seen to fail: globals, methods of base classes, names of attributes, and keyword defaults left out."""
    hashes = [code_hash_of(SOURCE.format_map(FILLED))]
    hashes += [code_hash_of(SOURCE.format_map({**FILLED, name: value})) for name, value in OTHERWISE.items()]
    hashes.append(code_hash_of(SOURCE.format_map(FILLED), "def odd(record):\n    return record + 2\n"))
    assert len(set(hashes)) == len(hashes) == len(OTHERWISE) + 2
    assert code_hash_of(SOURCE.format_map(FILLED)) == hashes[0]


@pytest.mark.parametrize(
    "methods", [["fork"], pytest.param(["fork", "spawn", "forkserver"], marks=pytest.mark.soak)], ids=len
)
def test_hash_and_values_are_the_same_in_every_process(code_hash_of, tmp_path, methods) -> None:
    """As a script and as a module, in children of every start method, whatever the hash seed. Seen to fail: sets in
    their own order; the module's name in it."""
    (tmp_path / "helpers.py").write_text("def odd(record):\n    return record + 1\n")
    script = tmp_path / "made.py"
    script.write_text(SOURCE.format_map(FILLED))
    module = code_hash_of(SOURCE.format_map(FILLED), whole=True)
    here = json.dumps([code_hash_of(SOURCE.format_map(FILLED)), step_values(module.steps), step_values(module.held)])
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    ran = subprocess.run(
        [sys.executable, script, *methods], env=environment, check=True, capture_output=True, text=True, timeout=600
    )
    assert ran.stdout.splitlines() == [here] * (1 + len(methods))
