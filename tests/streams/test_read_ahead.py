"""While a `Shuffle` empties itself at the end of a shard, the next shard is read: every item costs one record, and
nothing else is different."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from penstock import Filter, Shuffle, Stream, sample
from penstock._streams.retrying import iter_with_retries
from penstock._streams.steps import ShardRun

SHARDS, RECORDS, LANES, WINDOW = 8, 160, 2, 64


class Source:
    """Opens shards that draw for each record while it is read, and remembers what was read and closed."""

    def __init__(self, fails=()):
        self.read = 0
        self.open = 0
        self.fails = set(fails)

    def __call__(self, shard):
        self.open += 1
        try:
            for number in range(RECORDS):
                if (shard, number) in self.fails:
                    raise ValueError(f"record {number} is damaged")
                self.read += 1
                yield shard, number, float(sample().rng.random())
        finally:
            self.open -= 1


def halves(records):
    """A step that ours know nothing of: it may make more of a record than one."""
    for shard, number, draw in records:
        yield from ((shard, number, half, draw + sample().rng.random()) for half in (0, 1))


def odd(record):
    return record[1] % 2


def drawn(records):
    for record in records:
        yield (*record, float(sample().rng.random()))


drawn.keeps_count = True

STEPS = {
    "shuffle": [Shuffle(WINDOW)],
    "drawn, shuffle, drawn": [drawn, Shuffle(WINDOW), drawn],
    "filter, shuffle": [Filter(odd), Shuffle(WINDOW)],
    "shuffle, halves": [Shuffle(WINDOW), halves],
    "halves, shuffle": [halves, Shuffle(WINDOW)],
    "nothing": [],
}


def stream(source, steps, **words):
    data = Stream(SHARDS, source, epoch_size=1000, lanes=LANES, steps=steps, bookmarks=False, **words)
    data.order(shuffle=False, seed=3).take()
    return data


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_the_items_are_those_of_shards_run_one_by_one(steps):
    """Seen to fail where a record that is read ahead gets the sample of record 0, and where the second record of a run
    gets that of the first."""
    data = stream(source := Source(), steps)
    lanes = []
    for lane in range(LANES):
        deals = [divmod(number, SHARDS) for number in range(lane, 3 * SHARDS, LANES)]
        runs = (
            ShardRun(Source()((shard + pass_) % SHARDS), steps, seed=3, pass_=pass_, shard=(shard + pass_) % SHARDS)
            for pass_, shard in deals
        )
        lanes.append(list(itertools.chain.from_iterable(runs)))
    expected = list(itertools.islice(itertools.chain.from_iterable(zip(*lanes, strict=False)), 1000))
    assert [data[item] for item in range(len(expected))] == expected
    data.close()
    assert source.open == 0


def test_an_item_costs_one_record():
    """Seen to fail without `_read_ahead`: the last items of a shard then read nothing, and the first of the next one
    all the more."""
    data = stream(source := Source(), [Shuffle(WINDOW)])
    costs = []
    for item in range(0, LANES * RECORDS * 4, LANES):  # lane 0
        before = source.read
        data[item]
        costs.append(source.read - before)
    data.close()
    assert sum(costs[:WINDOW]) > 1.4 * WINDOW  # the window has to be filled once
    # an item may read a few records, and the next one none
    smooth = np.convolve(costs[WINDOW:], np.ones(WINDOW // 4), "valid")
    assert smooth.min() >= WINDOW // 8
    assert smooth.max() < WINDOW // 2


def test_no_more_records_wait_than_a_window_holds():
    """Seen to fail without `_room`. `Shuffle` comes first, and each of its outputs becomes many: the next shard must
    not be read whole meanwhile."""

    def many(records):
        for record in records:
            yield from itertools.repeat(record, 50)

    data = stream(source := Source(), [Shuffle(WINDOW), many])
    for item in range(0, LANES * RECORDS * 50, LANES):  # lane 0, to the end of its first shard
        data[item]
    assert source.read == RECORDS + WINDOW // 2
    data.close()


def test_an_error_in_the_next_shard_comes_when_its_items_do():
    """Seen to fail where an error while reading ahead is raised at once, and where it is forgotten: the shard then
    seems to end there."""
    data = stream(source := Source(fails={(LANES, 2)}), [Shuffle(WINDOW)])
    items = [data[item] for item in range(0, LANES * RECORDS, LANES)]
    assert sorted(item[1] for item in items) == list(range(RECORDS))
    assert source.read == RECORDS + 2
    with pytest.raises(ValueError, match="record 2 is damaged") as caught:
        data[LANES * RECORDS]
    assert any(f"shard {LANES}, pass 0" in note for note in caught.value.__notes__)
    source.fails.clear()  # whoever mends the shard can go on
    assert data[LANES * RECORDS][0] == LANES
    data.close()
    assert source.open == 0


def test_bookmarks_pass_over_the_shard_that_was_read_ahead(tmp_path):
    """Seen to fail where `_skip_to` leaves the run that was begun: its records would come as those of a later shard."""

    def build(source):
        data = Stream(SHARDS, source, epoch_size=1000, lanes=LANES, steps=[Shuffle(WINDOW)], bookmarks=tmp_path)
        data.order(shuffle=False, seed=3).take()
        return data

    data = build(Source())
    expected = [data[item] for item in range(LANES * RECORDS * 3)]
    data.close()
    data = build(source := Source())
    for item in range(0, LANES * (RECORDS - 2), LANES):
        data[item]
    item = LANES * RECORDS * 2 + 8  # two shards on
    assert data[item] == expected[item]
    data.close()
    assert source.open == 0


@pytest.mark.parametrize("at", [(0, 1), (0, 70), (LANES, 3), (LANES, 100)])
def test_a_connection_that_breaks_changes_no_draw(at, monkeypatch):
    """Seen to fail: what was drawn for a record, and for those before it when the shard was opened again, came before
    its own draws."""
    monkeypatch.setitem(iter_with_retries.__kwdefaults__, "pause_s", 0)
    broken = []

    def breaks(shard):
        for record in Source()(shard):
            if record[:2] == at and not broken:
                broken.append(at)
                raise ConnectionResetError("gone")
            yield record

    data, expected = stream(breaks, [Shuffle(WINDOW)]), stream(Source(), [Shuffle(WINDOW)])
    assert [data[item] for item in range(600)] == [expected[item] for item in range(600)]
    assert broken == [at]
    data.close()
    expected.close()
