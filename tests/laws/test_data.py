"""The laws for data that brings its order: mixes, windows, packs, buckets, and shards in every format.

Resume at every step, any number of ranks, a small state, frozen batches, and a worker that is killed.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import signal
import tarfile
import time
from importlib import import_module
from importlib.util import find_spec
from itertools import islice, product

import mds_files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fleets import chain, endless
from format_laws import open_files
from pairwise import engines, pairwise
from ways import NAMED

import datasets
import penstock
from penstock import Buckets, Loader, Mix, Packs, Shards, filtered, formats, pad
from penstock.__main__ import main
from penstock.formats import arrow, hf, jsonl, mds, parquet, tar
from penstock.orders import ShardOrder, ShuffledOrder, SlidingOrder
from penstock.testing import assert_order_is_pure, assert_resumes_everywhere, plain

COUNTS = [3, 0, 9, 1, 4, 5]  # 22 records; record i of all shards together is i


def drawn(record):
    """The value of a record of any format, with the epoch in it, and a random number of the sample's own."""
    sample = penstock.sample()
    if isinstance(record, dict):
        record = int(record["cls"]) if "cls" in record else record["value"]
    return 10_000 * sample.epoch + record, sample.rng.random()


def rows_of(batch):
    if isinstance(batch, dict):
        return [{name: plain(field)[1][row] for name, field in batch.items()} for row in range(len(batch["tokens"]))]
    return list(zip(*(field.tolist() for field in batch), strict=True))


def batches_of(one):
    return endless(one, rows_of)


# Orders.

STAGES = [(0, {"a": 0.7, "b": 0.2, "c": 0.1}), (17, {"a": 0.2, "c": 0.8}), (40, {"b": 1})]


def mixed(weights=STAGES[0][1], **words):
    return {"dataset": Mix({"a": range(5), "b": range(1000, 1090), "c": range(2000, 2011)}, weights, **words)}


def ordered(order):
    return {"dataset": range(22), "order": order, "shuffle": False}


ORDERS = {
    "mix": lambda _: mixed(epoch_size=22),
    "mix in stages": lambda _: mixed(STAGES, epoch_size=24),
    "mix in runs": lambda _: mixed(epoch_size=24, run=4),
    "mix to the first end": lambda _: mixed(stop="first"),
    "sliding": lambda _: ordered(SlidingOrder(22, 6, 3)),
    "shard order": lambda _: ordered(ShardOrder(COUNTS, 3, seed=3)),
    "shard order with a window": lambda _: ordered(ShardOrder(COUNTS, 3, 4, seed=3)),
}

# Groups. The tokens of document i in epoch e are ``10_000 * e + 100 * i`` and on, and each has a random number beside
# it.

LENGTHS = np.random.default_rng(4).lognormal(2, 0.8, 60).astype(np.int64) + 1
DOCUMENTS = [{"tokens": 100 * index + np.arange(length)} for index, length in enumerate(LENGTHS)]
SHARDED = [20, 0, 13, 22, 5]
BUDGET = 80


def marked(document):
    sample = penstock.sample()
    return {
        "tokens": 10_000 * sample.epoch + document["tokens"],
        "drawn": sample.rng.integers(1000, size=len(document["tokens"])),
    }


class Documents:
    """They draw by themselves, and not in a transform."""

    def __len__(self):
        return len(DOCUMENTS)

    def __getitem__(self, index):
        return marked(DOCUMENTS[index])


def in_shard(shard):
    return DOCUMENTS[sum(SHARDED[:shard]) : sum(SHARDED[: shard + 1])]


def forward_in_shard(shard):
    yield from in_shard(shard)


def packed(dataset=DOCUMENTS, lengths=LENGTHS, **words):
    return {"dataset": dataset, "transform": marked, "groups": Packs(lengths, 40, block=16, **words)}


def bucketed(dataset=DOCUMENTS, **words):
    groups = Buckets(LENGTHS, BUDGET, block=32, same_size_run=2, **words)
    return {"dataset": dataset, "transform": marked, "groups": groups, "collate_fn": pad(-1), "batch_size": 1}


GROUPS = {
    "packs": lambda _: {**packed(Documents()), "transform": None},
    "packs, transformed": lambda _: packed(),
    "packs of a mix": lambda _: packed(
        Mix({"a": DOCUMENTS, "b": DOCUMENTS}, {"a": 1, "b": 2}, epoch_size=50), [*LENGTHS, *LENGTHS]
    ),
    "packs, counted": lambda _: packed(count=True),
    "packs of shards": lambda _: packed(Shards(5, forward_in_shard, counts=SHARDED, lanes=2)),
    "buckets": lambda _: {**bucketed(Documents()), "transform": None},
    "buckets, counted": lambda _: bucketed(count=True),
    "buckets of shards": lambda _: bucketed(Shards(5, in_shard, counts=SHARDED)),
}

# Shards.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same records in every format."""
    folder = tmp_path_factory.mktemp("shards")
    for k in range(len(COUNTS)):
        lines = "".join(f'{{"value": {value}}}\n' for value in indexed(k)).encode()
        (folder / f"{k}.jsonl").write_bytes(lines)
        (folder / f"{k}.jsonl.zst").write_bytes(zstandard.compress(lines))
        with tarfile.open(folder / f"{k}.tar", "w") as archive:
            for value in indexed(k):
                for suffix, data in (("cls", b"%d" % value), ("bin", bytes(value))):
                    member = tarfile.TarInfo(f"{value:03d}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        (folder / f"{k}.tar.gz").write_bytes(gzip.compress((folder / f"{k}.tar").read_bytes()))
        table = pa.table({"value": pa.array(indexed(k), pa.int64())})
        pq.write_table(table, folder / f"{k}.parquet", row_group_size=4)
        with pa.ipc.new_file(folder / f"{k}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    values = [mds_files.integers(indexed(k), "value") for k in range(len(COUNTS))]
    for packing in ("", "zstd"):
        mds_files.write(folder / f"mds {packing}", {"value": "int"}, values, packing)
    assert main(["index", f"{folder}/*.jsonl*", f"{folder}/*.tar*"]) == 0
    if find_spec("lance") is not None:  # between the records lie others that were deleted
        rows = pa.table({"value": [value for record in range(22) for value in [record, -1][: 1 + record % 2]]})
        import_module("lance").write_dataset(rows, folder / "rows.lance", max_rows_per_file=4).delete("value = -1")
    return folder


def indexed(shard):
    return range(sum(COUNTS[:shard]), sum(COUNTS[: shard + 1]))


def forward(shard):
    yield from indexed(shard)


def seeking(shard, start):
    yield from indexed(shard)[start:]


def lance_rows(folder):
    pytest.importorskip("lance", reason="pylance is not installed: pip install --group lance")
    return formats.lance(folder / "rows.lance")


ORDER = {"lanes": 3, "window": 4}
SHARDS = {
    "indexed": lambda folder: Shards(6, indexed, counts=COUNTS, **ORDER),
    "forward": lambda folder: Shards(6, forward, counts=COUNTS, **ORDER),
    "forward, no window": lambda folder: Shards(6, forward, counts=COUNTS),
    "seeking": lambda folder: Shards(6, seeking, counts=COUNTS, **ORDER),
    "jsonl": lambda folder: jsonl(folder / "*.jsonl", **ORDER),
    "jsonl.zst": lambda folder: jsonl(folder / "*.jsonl.zst", **ORDER),
    "tar": lambda folder: tar(folder / "*.tar", **ORDER),
    "tar, forward": lambda folder: tar(folder / "*.tar", counts=COUNTS, **ORDER),
    "tar.gz": lambda folder: tar(folder / "{0..5}.tar.gz", **ORDER),
    "hf": lambda folder: hf(
        datasets.Dataset.from_dict({"value": list(range(22))}).to_iterable_dataset(num_shards=5), **ORDER
    ),
    "parquet": lambda folder: parquet(folder / "*.parquet", **ORDER),
    "parquet, files": lambda folder: parquet(folder / "*.parquet", unit="file", **ORDER),
    "arrow": lambda folder: arrow(folder / "*.arrow", **ORDER),
    "mds": lambda folder: mds(folder / "mds ", **ORDER),
    "mds.zstd": lambda folder: mds(folder / "mds zstd", **ORDER),
    "mix of shards": lambda folder: Mix(
        {"a": tar(folder / "*.tar", counts=COUNTS, **ORDER), "b": jsonl(folder / "*.jsonl")},
        {"a": 1, "b": 1},
        epoch_size=22,
    ),
    "lance": lance_rows,
}
DATA = {
    **ORDERS,
    **GROUPS,
    **{name: lambda folder, make=make: {"dataset": make(folder)} for name, make in SHARDS.items()},
}


def loader(folder, data, **words):
    return Loader.from_dataset(
        **{"batch_size": 6, "shuffle": True, "seed": 5, "transform": drawn, **DATA[data](folder), **words}
    )


# The laws.


@pytest.mark.parametrize(("data", "workers"), engines(DATA))
def test_each_resumes_everywhere(folder, data, workers):
    """Seen red with a mix that counts its sources from the start of each epoch by what it has given so far, and with a
    reader that forgets what it has passed over and then takes the next record."""
    options = NAMED[workers]
    assert_resumes_everywhere(lambda: loader(folder, data, **options), steps=30 if "buckets" in data else 10)


@pytest.mark.soak
@pytest.mark.parametrize("data", ["jsonl", "tar.gz", "parquet", "arrow", "hf", "mds", "mds.zstd", "lance"])
def test_each_resumes_in_a_spawned_worker(folder, data):
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "prefetch_next_epoch": False}
    with loader(folder, data) as one:
        expected = list(islice(batches_of(one), 7))
    with loader(folder, data, **options) as one:
        assert list(islice(batches_of(one), 5)) == expected[:5]
        state = one.state_dict()
    with loader(folder, data, **options) as one:
        one.load_state_dict(state)
        assert list(islice(batches_of(one), 2)) == expected[5:]


def on_ranks(names, tails):
    """Each of the names on one rank with one tail, by turns; what else is needed for every pair is for the soak."""
    turns = [*product([0, 2], tails)]
    often = [(name, *turns[k % 4]) for k, name in enumerate(names)]
    return [
        *often,
        *(pytest.param(*case, marks=pytest.mark.soak) for case in pairwise(names, [0, 2], tails) if case not in often),
    ]


@pytest.mark.parametrize(
    ("data", "rank", "tail"),
    [
        *on_ranks(
            [*ORDERS, "indexed", "forward", "tar, forward", "parquet", "mix of shards", "lance"], ["pad", "drop"]
        ),
        *on_ranks(GROUPS, ["drop", "exact"]),
    ],
)
def test_each_resumes_everywhere_on_a_rank(folder, data, rank, tail):
    words = {} if "buckets" in data else {"batch_size": 2}
    assert_resumes_everywhere(lambda: loader(folder, data, rank=rank, world_size=3, tail=tail, **words), steps=13)


LINKS = [(1, 12, 2), (2, 6, 3), (4, 3, 2), (3, 4, 4), (1, 12, 1), (2, 6, 2)]


@pytest.mark.parametrize(
    "data",
    [
        *(
            "mix",
            "mix in stages",
            "mix in runs",
            "shard order with a window",
            *(kind for kind in GROUPS if "packs" in kind),
        ),
        *(
            "indexed",
            "forward",
            "jsonl.zst",
            "tar",
            "tar, forward",
            "parquet",
            "arrow",
            "hf",
            "mds",
            "mds.zstd",
            "mix of shards",
            "lance",
        ),
    ],
)
def test_any_ranks_read_one_sequence(folder, data):
    """Global batches of 12, with their random numbers, over ends of epochs; each link goes on from what one of the
    ranks before has saved."""

    def build(**words):
        return loader(folder, data, tail="drop", drop_last=True, **words)

    with build(batch_size=12) as alone:
        expected = list(islice((row for batch in batches_of(alone) for row in batch), 12 * 14))
    assert chain(build, LINKS, rows_of) == expected


@pytest.mark.parametrize("data", [kind for kind in GROUPS if "buckets" in kind])
def test_any_ranks_read_one_sequence_of_buckets(folder, data):
    """Within an epoch: at its end each number of ranks drops another rest."""

    def build(*, batch_size, **words):
        return loader(folder, data, **words)

    with loader(folder, data) as alone:
        expected = list(islice(batches_of(alone), 10))
    assert chain(build, [(1, 0, 1), (4, 0, 1), (3, 0, 1), (2, 0, 1)], rows_of, whole=True) == expected


@pytest.mark.parametrize(
    ("data", "world_size"),
    [
        *product(["packs", "buckets"], [1, 2, 3, 4]),
        *((kind, 3) for kind in GROUPS if "counted" in kind or "shards" in kind),
    ],
)
def test_every_document_comes_once_in_an_epoch_on_any_number_of_ranks(folder, data, world_size):
    for epoch in range(2):
        seen = []
        for rank in range(world_size):
            with loader(folder, data, rank=rank, world_size=world_size, tail="exact") as one:
                one.set_epoch(epoch)
                for batch in one:
                    rows = batch["segment_ids"] > 0 if "packs" in data else batch["tokens"] >= 0
                    seen += batch["tokens"][rows].tolist()
        assert sorted(seen) == [10_000 * epoch + token for document in DOCUMENTS for token in document["tokens"]]


@pytest.mark.parametrize("data", [*ORDERS, *GROUPS])
def test_each_has_a_small_state(folder, data):
    with loader(folder, data) as one:
        next(iter(one))
        state = one.state_dict()["penstock"]
    source = json.loads(state)["state"]["source"]
    assert (
        source.keys() == {"epoch", "block", "taken", "position"}
        if data in GROUPS
        else source == {"epoch": 0, "position": 6}
    )
    assert len(state) < (450 if data in GROUPS else 350)


def test_a_state_is_small_with_a_million_shards():
    """And as fast to take as any: a position."""
    dataset = Shards(10**6, forward, counts=np.full(10**6, 10**4), settings={"columns": ["image", "label"]})
    with Loader.from_dataset(dataset, batch_size=4, shuffle=True) as one:
        state = one.state_dict()["penstock"]
        assert len(state) < 400
        assert json.loads(state)["state"] == {"epoch": 0, "source": {"epoch": 0, "position": 0}}
        begin = time.thread_time()
        for _ in range(1000):
            one.state_dict()
        assert time.thread_time() - begin < 1, (
            "1 ms each leaves room for a busy machine; it takes about 50 us, as for any data"
        )


def test_a_state_of_other_lengths_is_refused(folder):
    with loader(folder, "packs") as one:
        next(iter(one))
        state = one.state_dict()
    with (
        loader(folder, "packs", groups=Packs(LENGTHS + (np.arange(60) == 3), 40, block=16)) as other,
        pytest.raises(penstock.StateMismatch, match="lengths was '[0-9a-f]*' and is '[0-9a-f]*'"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("data", ORDERS)
def test_each_is_pure(data):
    """As they are here, with the seeds of the sources hashed."""
    first, again = (ORDERS[data](None) for _ in range(2))
    order, other = (words.get("order") or words["dataset"].order(shuffle=True, seed=5) for words in (first, again))
    assert_order_is_pure(order, items=len(first["dataset"]), again=other)


FROZEN = {
    "mix": [10004, 11089, 10001, 10000],
    "mix in stages": [11064, 11089, 11009, 11074, 11085, 11023],
    "mix in runs": [10002, 10003, 10000, 10002, 10003, 10004],
    "sliding": [10019, 10021, 10018, 10020],
    "shard order": [10006, 10019, 10016, 10007],
    "shard order with a window": [10006, 10018, 10016, 10007],
    "packs": [(15800, 15805), (11500, 11539), (10000, 15203), (11400, 15908), (12300, 15722)],
    "buckets": [(13300, 13316), (15700, 15722)],
}


@pytest.mark.parametrize("data", FROZEN)
def test_what_each_loads_is_frozen(folder, data):
    """A release that changes one of these changes every user's runs: never edit them. The last batch of epoch 1: of
    documents, the first and last token of a row."""
    with loader(folder, data) as one:
        one.set_epoch(1)
        *_, batch = one
    found = [(row[0], max(row)) for row in batch["tokens"].tolist()] if data in GROUPS else batch[0].tolist()
    assert found == FROZEN[data]


class TestTheCaseThatOthersLose:
    """Two equal sources on two ranks, where each rank reads every second item of the mix."""

    @pytest.mark.parametrize("run", [1, 2])
    def test_both_ranks_see_both_sources(self, run):
        two = {"a": range(1000), "b": range(5000, 6000)}
        for rank in (0, 1):
            words = {"rank": rank, "world_size": 2, "batch_size": 100, "seed": 0}
            with Loader.from_dataset(Mix(two, {"a": 0.5, "b": 0.5}, run=run), **words) as one:
                values = np.concatenate([batch.numpy() for batch in one])
            assert abs((values < 5000).mean() - 0.5) < 0.07

    def test_a_source_may_be_shuffled_by_any_order(self):
        """Also of a length that its window does not divide."""

        class Windowed(list):
            def order(self, *, shuffle, seed):
                return SlidingOrder(len(self), 4, seed) if shuffle else ShuffledOrder(len(self), seed)

        with Loader.from_dataset(Mix({"a": Windowed(range(10))}, {"a": 1}), shuffle=True, batch_size=10) as one:
            assert sorted(next(iter(one)).tolist()) == list(range(10))


# Shards alone.


@pytest.mark.parametrize("data", [data for data in SHARDS if data not in ("mix of shards", "lance")])
def test_the_samples_are_those_at_the_indices_of_the_order(folder, data):
    dataset = pickle.loads(pickle.dumps(SHARDS[data](folder)))
    order = dataset.order(shuffle=True, seed=5)
    with loader(folder, data, transform=None, collate_fn=list, tail="exact") as one:
        for epoch in range(2):
            indices = order.indices(epoch, np.arange(22)).tolist()
            assert [sample for batch in one for sample in batch] == [dataset[index] for index in indices]
    dataset.close()


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_sequence_is_the_same_in_every_format(folder, shuffle):
    """By position or forward, compressed or not: it is a matter of speed only."""
    sequences = {}
    # Of the last four, a shard is no file.
    for data in SHARDS.keys() - {"mix of shards", "forward, no window", "parquet", "arrow", "hf", "lance"}:
        with loader(folder, data, shuffle=shuffle) as one:
            sequences[data] = list(islice(batches_of(one), 9))
    assert all(sequence == sequences["indexed"] for sequence in sequences.values())


def test_a_state_goes_from_one_format_to_another(folder):
    """An index written later, or files compressed in mid-training, change no sample."""
    expected = list(islice(batches_of(loader(folder, "tar")), 9))
    with loader(folder, "tar, forward") as one:
        assert list(islice(batches_of(one), 5)) == expected[:5]
        state = one.state_dict()
    with loader(folder, "tar.gz") as one:
        one.load_state_dict(state)
        assert list(islice(batches_of(one), 4)) == expected[5:]


@pytest.mark.parametrize("data", ["indexed", "forward"])
def test_what_a_filter_keeps_of_shards_is_read_by_itself(folder, data):
    kept = filtered(SHARDS[data](folder), lambda value: value % 2 == 0)
    with Loader.from_dataset(kept) as one:
        assert [batch.item() for batch in one] == [*range(0, 22, 2)]


class Killed:
    """Shards that are read forward; one worker kills itself in the middle of one, once in all."""

    def __init__(self, mark):
        self.mark = mark

    def __call__(self, shard):
        for k in range(40):
            if (shard, k) == (2, 17) and not os.path.exists(self.mark):
                open(self.mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield 40 * shard + k


@pytest.mark.slow
def test_a_worker_that_is_killed_in_mid_shard_changes_nothing(tmp_path, caplog):
    """Its successor opens the shard and reads up to the same record."""
    (tmp_path / "mark").touch()
    words = {"batch_size": 7, "shuffle": True, "num_workers": 2, "method": "process", "transform": drawn}
    with Loader.from_dataset(Shards(6, Killed(tmp_path / "mark"), counts=[40] * 6, lanes=2, window=5), **words) as one:
        expected = list(islice(batches_of(one), 80))
    with Loader.from_dataset(Shards(6, Killed(tmp_path / "now"), counts=[40] * 6, lanes=2, window=5), **words) as one:
        assert list(islice(batches_of(one), 80)) == expected
    assert (tmp_path / "now").exists()
    assert "SIGKILL" in caplog.text


@pytest.mark.parametrize("data", ["tar", "tar, forward", "jsonl", "jsonl.zst", "parquet", "arrow", "mds", "mds.zstd"])
def test_no_file_is_open_after_close(folder, data):
    with loader(folder, data) as one:
        list(islice(batches_of(one), 5))
        dataset = one.dataset
        assert open_files(folder)
        dataset.close()
        assert open_files(folder) == []
        list(islice(batches_of(one), 5))
    del one
    dataset.close()
