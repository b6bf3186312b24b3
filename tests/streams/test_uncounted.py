"""The formats without counts: the same records as with them, filtered, tokenised and packed, equal on any number of
ranks."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from small_files import RECORDS, arrow, jsonl, parquet, tar

import datasets
from penstock import Cached, Filter, Loader, Mix, Packs, Shards, StateMismatch, Stream, formats
from penstock.__main__ import main
from penstock._command.index import index_files
from penstock._streams import lanes, shard_keys

FILES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uncounted")
    for make in (jsonl, tar, parquet, arrow):
        for k in range(FILES):
            (folder / f"{k}.{make.__name__}").write_bytes(make(k))
    assert main(["index", f"{folder}/*.jsonl", f"{folder}/*.tar"]) == 0
    return folder


def hf_stream(folder, **words):
    files = [str(folder / f"{k}.jsonl") for k in range(FILES)]
    return formats.hf(datasets.load_dataset("json", data_files=files, split="train", streaming=True), **words)


FORMATS = {
    "jsonl": lambda folder, **words: formats.jsonl(folder / "*.jsonl", **words),
    "tar": lambda folder, **words: formats.tar(folder / "*.tar", **words),
    "parquet": lambda folder, **words: formats.parquet(folder / "*.parquet", **words),
    "arrow": lambda folder, **words: formats.arrow(folder / "*.arrow", **words),
    "hf": lambda folder, **words: hf_stream(
        folder, counts=None if "epoch_size" in words else [RECORDS] * FILES, **words
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_one_pass_is_what_the_counted_shards_are(folder, name):
    counted = FORMATS[name](folder, lanes=1)
    uncounted = FORMATS[name](folder, lanes=1, epoch_size=FILES * RECORDS, bookmarks=False)
    uncounted.order(shuffle=False, seed=0).take()
    assert [uncounted[k] for k in range(len(uncounted))] == [counted[k] for k in range(len(counted))]
    assert counted.counts.sum() == FILES * RECORDS
    assert (type(counted), type(uncounted)) == (Shards, Stream)
    counted.close()
    uncounted.close()


def test_with_bookmarks_a_resume_reads_less_than_a_shard_a_lane(tmp_path):
    """Seen to fail without `_skip_to`."""
    opened = Counter()

    def numbers(shard):
        opened[shard] += 1
        yield from range(100 * shard, 100 * shard + 10)

    def build():
        return Loader.from_dataset(Stream(16, numbers, epoch_size=10**4, lanes=4, bookmarks=tmp_path), batch_size=8)

    with build() as loader:
        batches = iter(loader)
        for _ in range(53):
            expected = next(batches).tolist()
        state = loader.state_dict()
        expected = next(batches).tolist()
    opened.clear()
    with build() as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).tolist() == expected
    assert sum(opened.values()) == 4, "one shard for each lane"


def test_a_missing_shard_and_a_damaged_record(tmp_path, caplog):
    """Skipped, they are facts: the sequence stays as it was when the shard is back. Seen to fail without the bound of
    `_output`."""
    for k in range(4):
        lines = [json.dumps(10 * k + i) for i in range(6)]
        if k == 2:
            lines[3] = "{"
        if k != 1:
            (tmp_path / f"{k}.jsonl").write_text("\n".join(lines))

    def build():
        files = [tmp_path / f"{k}.jsonl" for k in range(4)]
        data = formats.jsonl(files, epoch_size=15, lanes=1, on_error="skip", bookmarks=tmp_path / "bookmarks")
        data.order(shuffle=False, seed=0).take()
        return data

    data = build()
    expected = [0, 1, 2, 3, 4, 5, 20, 21, 22, 24, 25, 30, 31, 32, 33, 34, 35]
    assert [data[k] for k in range(17)] == expected
    assert "1.jsonl" in caplog.text
    (tmp_path / "1.jsonl").write_text("\n".join(map(str, range(10, 16))))
    again = build()
    caplog.clear()
    assert [again[k] for k in range(17)] == expected
    assert "1.jsonl gives 0 outputs in pass 0" in caplog.text  # seen to fail: not a word, though the file was whole
    data.close()
    again.close()


def ten_numbers(shard):
    yield from range(10 * shard, 10 * shard + 10)


def unless_12(value):
    if value == 12:
        raise ValueError("12")
    return value


def all_but_12(records):
    yield from map(unless_12, records)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_leaves_out_items_and_not_what_lies_behind_an_error(workers):
    """Seen to fail: every item of the lane from the damaged record on was left out, for ever, and so was a
    StateMismatch."""

    def read(**words):
        data = Stream(4, ten_numbers, epoch_size=24, lanes=2, bookmarks=False, **words)
        with Loader.from_dataset(
            data, 4, on_error="skip", num_workers=workers, method="process", multiprocessing_context="fork"
        ) as loader:
            return [value for batch in loader for value in batch.tolist()]

    whole = read()
    assert read(transform=unless_12) == [value for value in whole if value != 12]
    with pytest.raises(ValueError, match="12") as raised:
        read(steps=[all_but_12])
    assert any('Stream(…, on_error="skip") skips the rest' in note for note in raised.value.__notes__)


def test_a_shard_that_is_closed_in_a_pause_is_not_cut_short(caplog):
    """Seen to fail: with on_error="skip" the closing ended the pause, the rest of the shard was left out, and a
    bookmark kept that."""
    fails, paused = [True], threading.Event()

    def open(shard):
        yield from range(3)
        if fails:
            paused.set()
            raise OSError("for a while")
        yield from range(3, 6)

    data = Stream(1, open, epoch_size=6, on_error="skip", bookmarks=False)
    data.order(shuffle=False, seed=0).take()
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(lambda: [data[k] for k in range(6)])
        paused.wait()
        data.close()
        with pytest.raises(OSError, match="for a while"):
            reading.result()
    fails.clear()
    assert [data[k] for k in range(6)] == [0, 1, 2, 3, 4, 5]
    assert "leaves out" not in caplog.text


def lines_of(path):
    yield from map(int, path.read_text().split())


def even_lines_of(path):
    yield from (value for value in lines_of(path) if value % 2 == 0)


def ahead(shards, open, epoch, **words):
    loader = Loader.from_dataset(Stream(shards, open, epoch_size=40, lanes=2, **words), batch_size=8)
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


def test_bookmarks_are_those_of_the_same_data_and_code(tmp_path, monkeypatch, caplog):
    """Seen to fail: another ``open`` of the same files, and other data whose shards were only numbered, were searched
    by the first one's bookmarks; a new run that began at its beginning ended with a StateMismatch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for k in range(4):
        (tmp_path / str(k)).write_text("\n".join(map(str, range(100 * k, 100 * k + 9 + k))))
    paths = [tmp_path / str(k) for k in range(4)]

    def first_lines_of(shard):
        yield from range(100 * shard, 100 * shard + int((tmp_path / "lines").read_text()) + shard)

    for shards, one, other in ((paths, lines_of, even_lines_of), (4, first_lines_of, first_lines_of)):
        (tmp_path / "lines").write_text("3")
        ahead(shards, one, 0)
        ahead(shards, one, 1)
        (tmp_path / "lines").write_text("5")
        for epoch in (0, 2):
            assert ahead(shards, other, epoch) == ahead(shards, other, epoch, bookmarks=False)
    assert not caplog.text


def test_bookmarks_of_one_file_are_not_those_of_another_of_equal_name_size_and_time(tmp_path, monkeypatch):
    """Seen to fail: the second was searched by the bookmarks of the first, and a new run began at the wrong record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder, lines in (("train", ["100", "101", "102", "103"]), ("val", list("01234567"))):
        (tmp_path / folder).mkdir()
        paths = [tmp_path / folder / f"{k}.txt" for k in range(4)]
        for path in paths:
            path.write_text("\n".join(lines) + "\n")
            os.utime(path, (0, 0))
        for epoch in (1, 0):  # a jump first
            assert ahead(paths, lines_of, epoch) == ahead(paths, lines_of, epoch, bookmarks=False)


@pytest.mark.parametrize("scheme", ["mine", "s3"])
def test_bookmarks_of_shards_whose_names_only_the_user_understands(tmp_path, scheme):
    """Seen to fail: no protocol of fsspec, or s3fs not installed, though nobody had asked fsspec for anything."""
    shards = [f"{scheme}://bucket/{k}" for k in range(4)]

    def open(url):
        yield from range(int(url[-1]) * 100, int(url[-1]) * 100 + 9)

    read = ahead(shards, open, 1, bookmarks=tmp_path)
    assert (
        read
        == ahead(shards, open, 1, bookmarks=tmp_path)
        == ahead(4, lambda k: iter(range(100 * k, 100 * k + 9)), 1, bookmarks=False)
    )


def test_a_file_is_looked_at_when_its_turn_comes(tmp_path, monkeypatch):
    """There may be a hundred thousand of them, far away. Seen to fail: all were looked at before the first item."""
    looked = []
    monkeypatch.setattr(shard_keys, "stamp_lately", lambda path: looked.append(path))
    shards = [f"{k}" for k in range(1000)]
    data = Stream(shards, lambda name: iter(range(9)), epoch_size=8, lanes=4, bookmarks=tmp_path)
    assert len(next(iter(Loader.from_dataset(data, batch_size=8)))) == 8
    assert looked == ["0", "1", "2", "3"]


def test_a_file_that_could_not_be_looked_at_is_looked_at_again(tmp_path, monkeypatch):
    """As on a server that says 503 at first. Seen to fail: it was never looked at again, and another version came in
    the next pass."""
    (tmp_path / "0").write_text("1\n" * 9)
    answers, look = iter([False] * 2), shard_keys.stamp_lately
    monkeypatch.setattr(shard_keys, "stamp_lately", lambda path: look(path if next(answers, True) else "not there"))
    loader = Loader.from_dataset(Stream([tmp_path / "0"], lines_of, epoch_size=9, bookmarks=False), 9)
    assert len(list(loader)) == 1
    (tmp_path / "0").write_text("2\n" * 9)
    with pytest.raises(ValueError, match="0 has changed since it was first checked"):
        list(loader)


@pytest.mark.parametrize(
    "shard", [lambda k: (f"{k}.tar", k), lambda k: [f"{k}.tar"], lambda k: k, lambda k: f"{k}.tar"]
)
def test_a_state_of_other_shards_is_refused(shard):
    """Seen to fail: shards that are tuples had no names."""

    def build(start):
        return Loader.from_dataset(
            Stream([shard(start + k) for k in range(4)], lambda shard: iter([0]), epoch_size=8, bookmarks=False)
        )

    build(0).load_state_dict(build(0).state_dict())
    with pytest.raises(StateMismatch, match="names was"):
        build(1).load_state_dict(build(0).state_dict())


def test_arguments_of_both_kinds_are_refused(folder):
    with pytest.raises(ValueError, match="index= and epoch_size= exclude"):
        formats.jsonl(folder / "*.jsonl", index=folder, epoch_size=10)
    with pytest.raises(
        TypeError,
        match=(
            r"no argument steps=.*or epoch_size= and no counts= or index=, if a function of penstock\.formats made "
            r"these"
        ),
    ):
        formats.jsonl(folder / "*.jsonl", steps=[Filter(bool)])
    with pytest.raises(
        TypeError, match=r"Stream has no argument counts=.*an epoch is then all records, without epoch_size="
    ):
        formats.jsonl(folder / "*.jsonl", counts=[RECORDS] * FILES, epoch_size=10)
    for read in (formats.jsonl, formats.tar, formats.parquet, formats.arrow):
        with pytest.raises(TypeError, match="no argument cachedir="):
            read(folder / f"*.{read.__name__}", cachedir=folder)
    for call in (
        lambda: formats.tokens(folder / "*.bin", 4, cachedir=folder),
        lambda: formats.megatron_documents(folder / "x", cachedir=folder),
    ):
        with pytest.raises(TypeError, match="'cachedir'"):
            call()
    with pytest.raises(ValueError, match="epoch_size="):
        formats.hf(
            datasets.load_dataset("json", data_files=str(folder / "0.jsonl"), split="train", streaming=True).filter(
                bool
            )
        )


def test_only_the_lanes_that_a_process_reads_need_open_files(monkeypatch):
    """Seen to fail: the lanes of all ranks counted, so that the streams of a thousand ranks were refused."""
    monkeypatch.setattr(lanes, "most_files", lambda: 4)

    def read(rank, world_size):
        data = Stream(range(8), open=lambda shard: iter(range(100 * shard, 100 * shard + 50)), epoch_size=16, lanes=8)
        with Loader.from_dataset(data, batch_size=None, rank=rank, world_size=world_size) as loader:
            return list(loader)

    assert [read(rank, 2) for rank in range(2)] == [
        [100 * k + i for i in range(2) for k in range(rank, 8, 2)] for rank in range(2)
    ]
    with pytest.raises(
        ValueError,
        match="reads more than 4 of the 8 lanes, and each keeps a file open, but it may open only 8 in total",
    ):
        read(0, 1)


def test_a_jump_learns_what_another_process_has_cut_short(tmp_path):
    """The fault has passed, and the sequence stays as it was. Seen to fail: only the other kinds of bookmarks were read
    again."""
    failures = [OSError("once")]

    def numbers(shard):
        for number in range(2000):
            if shard == 1 and number == 5 and failures:
                raise failures.pop()
            yield 10_000 * shard + number

    def stream():
        data = Stream(
            [*"abcd"],
            lambda name: numbers("abcd".index(name)),
            epoch_size=8,
            lanes=1,
            on_error="skip",
            retries=0,
            bookmarks=tmp_path,
        )
        data.order(shuffle=False, seed=0).take()
        return data

    other, ours = stream(), stream()
    assert ours[0] == 0
    expected = [other[item] for item in range(9000)]
    assert expected[2004:2006] == [10_004, 20_000]
    assert ours[8000] == expected[8000]
    other.close()
    ours.close()


def test_an_open_that_can_begin_anywhere_is_asked_for_the_record_after_a_fault(tmp_path):
    """Seen to fail: `open` was called without its argument ``start``."""
    asked, failures = [], [OSError("once")]

    def seeking(shard, start):
        asked.append((shard, start))
        for number in range(start, 9):
            if (shard, number) == (1, 5) and failures:
                raise failures.pop()
            yield 10 * shard + number

    data = Stream(2, seeking, epoch_size=18, lanes=1, bookmarks=False)
    with Loader.from_dataset(data, batch_size=9) as loader:
        assert [batch.tolist() for batch in loader] == [list(range(9)), list(range(10, 19))]
    assert asked == [(0, 0), (1, 0), (1, 5)]
    data.close()


def test_pieces_of_an_indexed_file(tmp_path):
    """Seen to fail: an AttributeError, because a record of a run had no epoch, and an index asks for it to compare the
    file once in each."""
    (tmp_path / "a.jsonl").write_text("".join(f"{k}\n" for k in range(50)))
    assert index_files([str(tmp_path / "a.jsonl")], None, 1, io.StringIO(), io.StringIO()) == 0
    counted = formats.jsonl(tmp_path / "a.jsonl")
    with Loader.from_dataset(Stream.of(counted, 10, epoch_size=50, lanes=1, bookmarks=False), None) as loader:
        assert list(loader) == list(range(50))
    counted.close()


class Replacing:
    """Opens a file of lines. The first process that has read five of them puts another file of the same size in its
    place, and dies."""

    def __call__(self, path):
        with path.open() as file:
            for number, line in enumerate(file):
                if number == 5 and "old" in line:
                    other = path.with_suffix(".new")
                    other.write_text("new\n" * 99)
                    other.replace(path)
                    os.kill(os.getpid(), signal.SIGKILL)
                yield line


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_the_successor_of_a_worker_reads_no_other_version(tmp_path, context):
    """Seen to fail: each process knew only what it had seen itself, so the next one read the new file."""
    (tmp_path / "0").write_text("old\n" * 99)
    shards = Stream([tmp_path / "0"], Replacing(), epoch_size=99, bookmarks=False)
    with (
        Loader.from_dataset(shards, 3, num_workers=1, method="process", multiprocessing_context=context) as loader,
        pytest.raises(
            ValueError,
            match=r"0 has changed since it was first checked by another process of this loader\. Do not modify files",
        ),
    ):
        list(loader)


REFUSED = {
    "sampler": {"sampler": [0, 1]},
    "batch_sampler": {"batch_sampler": [[0, 1]]},
    "groups": {"groups": Packs([1] * 6, 2)},
    "tail": {"tail": "some"},
    "mesh": {"mesh": "dp", "rank": 0, "world_size": 1},
    "rank": {"rank": 2, "world_size": 2},
    "batch_size": {"batch_size": -1},
    "num_workers": {"num_workers": -1},
    "in_order": {"in_order": False},
    "device": {"device": "nowhere"},
}


@pytest.mark.parametrize("mixed", [False, True], ids=["shards", "mix"])
@pytest.mark.parametrize("words", [*REFUSED.values(), None], ids=[*REFUSED, "cached"])
def test_a_refused_call_leaves_a_stream_as_it_was(words, mixed):
    """Fails if anything but a loader that was built fixes the order, for the corrected call is then refused as that of
    a second loader."""

    def stream():
        data = Stream(4, lambda shard: iter(range(10 * shard, 10 * shard + 3)), epoch_size=6, lanes=2, bookmarks=False)
        return Mix({"it": data}, {"it": 1}, epoch_size=6) if mixed else data

    def read(data):
        with Loader.from_dataset(data, shuffle=True, seed=5, batch_size=6) as loader:
            return next(iter(loader)).tolist()

    data = stream()
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        Loader.from_dataset(Cached(data)) if words is None else Loader.from_dataset(data, **words)
    assert read(data) == read(stream())
    with pytest.raises(ValueError, match="already used by a loader with shuffle=True"):
        Loader.from_dataset(data)
