"""The laws for data in shards: resume at every step, any number of ranks, a small state, a worker that is killed."""

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
from itertools import islice

import mds_files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fleets import chain, endless
from format_laws import open_files
from pairwise import engines

import datasets
import penstock
from penstock import Loader, Mix, Shards, filtered, formats
from penstock.__main__ import main
from penstock.formats import arrow, hf, jsonl, mds, parquet, tar
from penstock.testing import assert_resumes_everywhere

COUNTS = [3, 0, 9, 1, 4, 5]  # 22 records; record i of all shards together is i


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same records in every format."""
    folder, first = tmp_path_factory.mktemp("shards"), 0
    for k, count in enumerate(COUNTS):
        lines = "".join(f'{{"value": {value}}}\n' for value in range(first, first + count)).encode()
        (folder / f"{k}.jsonl").write_bytes(lines)
        (folder / f"{k}.jsonl.zst").write_bytes(zstandard.compress(lines))
        with tarfile.open(folder / f"{k}.tar", "w") as archive:
            for value in range(first, first + count):
                for suffix, data in (("cls", b"%d" % value), ("bin", bytes(value))):
                    member = tarfile.TarInfo(f"{value:03d}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        table = pa.table({"value": pa.array(range(first, first + count), pa.int64())})
        pq.write_table(table, folder / f"{k}.parquet", row_group_size=4)
        with pa.ipc.new_file(folder / f"{k}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
        (folder / f"{k}.tar.gz").write_bytes(gzip.compress((folder / f"{k}.tar").read_bytes()))
        first += count
    values = [mds_files.integers(indexed(k), "value") for k in range(len(COUNTS))]
    for packed in ("", "zstd"):
        mds_files.write(folder / f"mds {packed}", {"value": "int"}, values, packed)
    assert main(["index", f"{folder}/*.jsonl*", f"{folder}/*.tar*"]) == 0
    if find_spec("lance") is not None:  # between the records lie others that were deleted
        rows = pa.table({"value": [value for record in range(first) for value in [record, -1][: 1 + record % 2]]})
        import_module("lance").write_dataset(rows, folder / "rows.lance", max_rows_per_file=4).delete("value = -1")
    return folder


def first_of(shard):
    return sum(COUNTS[:shard])


def indexed(shard):
    return range(first_of(shard), first_of(shard) + COUNTS[shard])


def forward(shard):
    yield from indexed(shard)


def seeking(shard, start):
    yield from indexed(shard)[start:]


def drawn(record):
    """The value of a record of any format, and a random number of the sample's own."""
    sample = penstock.sample()
    if isinstance(record, dict):
        record = int(record["cls"]) if "cls" in record else record["value"]
    return 10_000 * sample.epoch + record, sample.rng.random()


def lance_rows(folder):
    pytest.importorskip("lance", reason="pylance is not installed: pip install --group lance")
    return formats.lance(folder / "rows.lance")


ORDER = {"lanes": 3, "window": 4}
DATA = {
    "indexed": lambda folder: Shards(6, indexed, counts=COUNTS, **ORDER),
    "forward": lambda folder: Shards(6, forward, counts=COUNTS, **ORDER),
    "forward, no window": lambda folder: Shards(6, forward, counts=COUNTS),
    "seeking": lambda folder: Shards(6, seeking, counts=COUNTS, **ORDER),
    "jsonl": lambda folder: jsonl(folder / "*.jsonl", **ORDER),
    "jsonl.zst": lambda folder: jsonl(folder / "*.jsonl.zst", **ORDER),
    "tar": lambda folder: tar(folder / "*.tar", **ORDER),
    "tar, forward": lambda folder: tar(folder / "*.tar", counts=COUNTS, **ORDER),
    "tar.gz": lambda folder: tar(folder / "{0..5}.tar.gz", **ORDER),
    "hf": lambda folder: hf(datasets.Dataset.from_dict({"value": list(range(22))}).to_iterable_dataset(num_shards=5), **ORDER),
    "parquet": lambda folder: parquet(folder / "*.parquet", **ORDER),
    "parquet, files": lambda folder: parquet(folder / "*.parquet", unit="file", **ORDER),
    "arrow": lambda folder: arrow(folder / "*.arrow", **ORDER),
    "mds": lambda folder: mds(folder / "mds ", **ORDER),
    "mds.zstd": lambda folder: mds(folder / "mds zstd", **ORDER),
    "mix": lambda folder: Mix(
        {"a": tar(folder / "*.tar", counts=COUNTS, **ORDER), "b": jsonl(folder / "*.jsonl")}, {"a": 1, "b": 1}, epoch_size=22
    ),
    "lance": lance_rows,
}


def loader(folder, data, **words):
    return Loader.from_dataset(DATA[data](folder), **{"batch_size": 6, "shuffle": True, "seed": 5, "transform": drawn, **words})


def rows_of(batch):
    return list(zip(*(field.tolist() for field in batch), strict=True))


def batches_of(one):
    return endless(one, rows_of)


@pytest.mark.parametrize(("data", "workers"), engines(DATA))
def test_each_resumes_everywhere(folder, data, workers):
    """Seen red with a reader that forgets what it has passed over and then takes the next record."""
    options = {} if workers == "inline" else {"num_workers": 2, "method": workers}
    assert_resumes_everywhere(lambda: loader(folder, data, **options), steps=10)


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


@pytest.mark.parametrize("data", [data for data in DATA if data not in ("mix", "lance")])
def test_the_samples_are_those_at_the_indices_of_the_order(folder, data):
    dataset = pickle.loads(pickle.dumps(DATA[data](folder)))
    order = dataset.order(shuffle=True, seed=5)
    with loader(folder, data, transform=None, collate_fn=list, tail="exact") as one:
        for epoch in range(2):
            assert [sample for batch in one for sample in batch] == [
                dataset[index] for index in order.indices(epoch, np.arange(22)).tolist()
            ]
    dataset.close()


@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize("data", ["indexed", "forward", "tar, forward", "parquet", "mix", "lance"])
def test_each_resumes_everywhere_on_a_rank(folder, data, tail):
    assert_resumes_everywhere(lambda: loader(folder, data, batch_size=2, rank=2, world_size=3, tail=tail), steps=12)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_sequence_is_the_same_in_every_format(folder, shuffle):
    """By position or forward, compressed or not: it is a matter of speed only."""
    sequences = {}
    for data in DATA.keys() - {"mix", "forward, no window", "parquet", "arrow", "hf", "lance"}:  # of the last four, a shard is no file
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


@pytest.mark.parametrize(
    "data", ["indexed", "forward", "jsonl.zst", "tar", "tar, forward", "parquet", "arrow", "hf", "mds", "mds.zstd", "mix", "lance"]
)
def test_any_ranks_read_one_sequence(folder, data):
    """Global batches of 12, samples and their random numbers, over ends of epochs; each link goes on from what one of the ranks before has saved."""

    def build(**words):
        return loader(folder, data, tail="drop", drop_last=True, **words)

    expected = list(islice((sample for batch in batches_of(build(batch_size=12)) for sample in batch), 12 * 14))
    links = [(1, 12, 2), (2, 6, 3), (4, 3, 2), (3, 4, 4), (1, 12, 1), (2, 6, 2)]
    assert chain(build, links, rows_of) == expected


@pytest.mark.parametrize("data", ["indexed", "forward"])
def test_what_a_filter_keeps_of_shards_is_read_by_itself(folder, data):
    kept = filtered(DATA[data](folder), lambda value: value % 2 == 0)
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
        assert time.thread_time() - begin < 1, "1 ms each leaves room for a busy machine; it takes about 50 us, as for any data"


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
