"""JSON lines: every line is a record, whether read by position or forward."""

from __future__ import annotations

import gzip
import json
import os
import re
import tracemalloc
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Loader
from penstock.__main__ import main
from penstock.formats import _jsonl as module
from penstock.formats import jsonl, tar

PACK = {"": bytes, ".gz": gzip.compress}


def index(*paths):
    assert main(["index", *map(str, paths)]) == 0


def write(path, lines):
    path.write_bytes(b"".join(lines))
    return str(path)


def read(dataset, **words):
    with Loader.from_dataset(dataset, batch_size=None, **words) as loader:
        records = list(loader)
    dataset.close()
    return records


@pytest.mark.parametrize(
    ("have", "words", "error", "message"),
    [
        (
            "",
            {},
            ValueError,
            r"the number of records in .*0.jsonl is unknown. .*python -m penstock index .*0.jsonl …. Or pass counts=",
        ),
        ("", {"index": "folder"}, ValueError, "--index folder"),
        (
            "0",
            {},
            FileNotFoundError,
            "1 of 2 files have no index, for example .*1.jsonl, .*python -m penstock index .*1.jsonl",
        ),
        ("", {"paths": "gone.jsonl"}, FileNotFoundError, "No such file .*gone.jsonl'"),
        ("", {"index": "folder", "counts": [1, 1]}, ValueError, "index= and counts= exclude each other"),
    ],
)
def test_without_an_index_it_says_what_to_do(tmp_path, have, words, error, message):
    paths = [write(tmp_path / f"{k}.jsonl", [b"{}\n"]) for k in range(2)]
    for k in have:
        index(paths[int(k)])
    with pytest.raises(error, match=message):
        jsonl(**{"paths": paths, **words})


LINES = st.lists(
    st.sampled_from([b"{}", b"", b"  ", b'{"a":1}', b"\t", b"\f\v", b"12", b' [3, "x"] ', b"\r"]), max_size=30
)


@settings(max_examples=200, deadline=None)
@given(
    lines=LINES, newline=st.sampled_from([b"\n", b"\r\n"]), ends=st.booleans(), chunk=st.sampled_from([1, 3, 7, 2**20])
)
def test_blank_lines_and_a_last_line_without_an_end_are_no_matter(tmp_path_factory, lines, newline, ends, chunk):
    """Seen red where a line that goes on in the next chunk begins anew, where the last line needs its end, and where
    what is blank to Python, and not to JSON, was parsed with the record before it.
    """
    data = newline.join(lines) + newline * ends
    path = tmp_path_factory.mktemp("x") / "x.jsonl"
    path.write_bytes(data)
    expected = [json.loads(line) for line in lines if line.strip()]
    before, module.CHUNK = module.CHUNK, chunk
    try:
        index(path)
    finally:
        module.CHUNK = before
    by_position, forward = jsonl(path), jsonl(path, counts=[len(expected)])
    assert [by_position[k] for k in range(len(by_position))] == expected
    assert [forward[k] for k in range(len(forward))] == expected
    by_position.close()
    forward.close()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{oops}", r"Expecting property name.*\): b'{oops}'"),
        (b"[" * 100_000, ""),  # what Python cannot read
        (b'"\xff"', ""),
    ],
    ids=["oops", "nested", "no text"],
)
@pytest.mark.parametrize("words", [{}, {"counts": [3]}], ids=str)
def test_a_line_that_is_not_json_is_named(tmp_path, words, line, why):
    path = write(tmp_path / "x.jsonl", [b"{}\n", b"\n", line + b"\n", b"{}\n"])
    index(path)
    dataset = jsonl(path, **words)
    assert dataset[0] == {}
    with pytest.raises(ValueError, match=rf"line 3 of .*x.jsonl is not JSON \({why}") as caught:
        dataset[1]
    assert caught.value.__notes__ == [f"in record 1 of jsonl file {path}"]
    dataset.close()


@pytest.mark.parametrize("words", [{}, {"counts": [40]}], ids=str)
def test_a_line_that_is_not_json_may_be_skipped(tmp_path, words):
    """And no other is. Seen red where the error ends the iterator."""
    path = write(tmp_path / "x.jsonl", [b"oops\n" if k in (7, 30) else b"%d\n" % k for k in range(40)])
    index(path)
    dataset = jsonl(path, **words)
    with Loader.from_dataset(dataset, batch_size=6, on_error="skip") as loader:
        assert [value for batch in loader for value in batch.tolist()] == [k for k in range(40) if k not in (7, 30)]
    dataset.close()


def test_a_long_line_is_scanned_once(tmp_path, monkeypatch):
    """Seen to fail: each chunk was added to the line so far, and all of that was searched again; 128 MB took 14 s."""
    monkeypatch.setattr(module, "CHUNK", 2**12)
    path = write(tmp_path / "x.jsonl", [b" " * 2**20, b"1" * 2**22, b"\n2"])
    with open(path, "rb") as file:
        tracemalloc.start()
        try:
            assert module.FORMAT.offsets(file, str(path)).tolist() == [0, 2**20 + 2**22 + 1, 2**20 + 2**22 + 2]
            assert tracemalloc.get_traced_memory()[1] < 2**18
        finally:
            tracemalloc.stop()


class TestAnIndex:
    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_of_a_file_that_changed_is_refused(self, tmp_path, suffix):
        """Seen red without the stamp: records of the old offsets come, cut anywhere."""
        path = write(tmp_path / f"x.jsonl{suffix}", [PACK[suffix](b"1\n2\n")])
        index(path)
        dataset = jsonl(path)
        os.truncate(path, 3)
        with pytest.raises(
            ValueError,
            match=f"{path} has changed since it was indexed: .* had .* bytes and now has 3. .*python -m penstock index",
        ):
            dataset[1]

    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_that_is_written_anew_is_of_another_version(self, tmp_path, suffix):
        """Seen to fail: whoever opened the file next read the new index, and so the new version, in the middle of an
        epoch."""
        path = write(tmp_path / f"x.jsonl{suffix}", [PACK[suffix](b"1\n2\n")])
        index(path)
        dataset = jsonl([path, path])
        assert read(dataset) == [1, 2, 1, 2]
        write(tmp_path / f"x.jsonl{suffix}", [PACK[suffix](b"3\n4\n")])
        os.utime(path, (0, 0))
        index(path)
        with pytest.raises(ValueError, match=f"{path} has changed since it was indexed"):
            dataset[1]
        assert read(jsonl(path)) == [3, 4]

    def test_that_is_of_another_kind_is_refused(self, tmp_path):
        path = write(tmp_path / "x.jsonl", [b"1\n"])
        index(path)
        os.rename(f"{path}.index", tmp_path / "x.tar.index")
        with pytest.raises(
            ValueError, match="x.tar.index is the index of a jsonl file, but .*x.tar is being read as tar"
        ):
            tar(tmp_path / "x.tar")

    def test_that_is_damaged_is_refused(self, tmp_path):
        path = write(tmp_path / "x.jsonl", [b"1\n"])
        index(path)
        with open(f"{path}.index", "r+b") as file:
            file.seek(-8, 2)
            file.write(b"\x01")  # where the record ends: "1" is JSON, too
        dataset = jsonl(path)  # the counts are in its first line
        with pytest.raises(ValueError, match="x.jsonl.index is damaged"):
            dataset[0]


@pytest.mark.parametrize("words", [{}, {"epoch_size": 4}], ids=["counted", "stream"])
def test_a_folder_is_refused_when_it_is_named(tmp_path, words):
    """Seen to fail: it was one shard, which could not be opened once it was read."""
    with pytest.raises(ValueError, match=r"is a folder\. Pass the files in it: '.*/\*\.jsonl'"):
        jsonl(tmp_path, **words)


ROWS = [{"a": number} for number in range(6)]
ARRAYS = {
    "in a line": json.dumps(ROWS),
    "in lines": json.dumps(ROWS, indent=1),
    "a row in each line": "[" + ",\n".join(map(json.dumps, ROWS)) + "]\n",
}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".json.gz"])
@pytest.mark.parametrize("text", ARRAYS.values(), ids=ARRAYS)
def test_a_json_array_is_not_one_record(tmp_path, text, suffix, capsys):
    """When it is indexed, and when it is read forward. Seen to fail: the whole file was a record, again and again."""
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    said = f"{path} is one JSON array of records instead of a record in each line"
    if text != ARRAYS["a row in each line"]:
        assert main(["index", str(path)]) == 1
        assert said in capsys.readouterr().err
    for words in ({"counts": [6]}, {"epoch_size": 6, "bookmarks": False}):
        with (
            Loader.from_dataset(jsonl(path, **words), batch_size=2) as loader,
            pytest.raises(ValueError, match="array|is not JSON"),
        ):
            next(iter(loader))


def test_a_json_array_after_blank_lines_is_not_indexed(tmp_path, capsys):
    """Seen to fail: only the first 256 bytes of a chunk were looked at, and these were blank."""
    path = tmp_path / "x.jsonl"
    path.write_text("\n" * 300 + ARRAYS["in lines"])
    assert main(["index", str(path)]) == 1
    assert "is one JSON array" in capsys.readouterr().err


@pytest.mark.parametrize(
    "lines",
    [
        ['[{"role": "user"}, {"role": "assistant"}]'] * 2,  # conversations
        ["[1, 2]"],
        ["[]"],
        ['{"data": [{"a": 1}]}'],
        ["", ' [{"a": 1}]', "[]"],
    ],
)
def test_records_that_are_arrays(tmp_path, lines):
    """Only a file that is nothing but an array of objects is meant otherwise."""
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(lines))
    index(path)
    expected = [json.loads(line) for line in lines if line]
    for data in (jsonl(path), jsonl(path, counts=[len(expected)])):
        with closing(data):
            assert [data[number] for number in range(len(data))] == expected


@pytest.mark.parametrize("name", ["manifest.json", "c4-train.00000-of-01024.json.gz"])
def test_json_lines_under_the_name_of_json(tmp_path, name):
    """As C4, Dolma and NeMo's manifests have them. Seen to fail: the error named a command that refused the name."""
    path, data = tmp_path / name, b"".join(b'{"id": %d}\n' % number for number in range(5))
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    index(path)
    with closing(jsonl(path)) as found:
        assert [found[number]["id"] for number in range(len(found))] == [0, 1, 2, 3, 4]


def test_a_folder_is_not_indexed(tmp_path, capsys):
    """Seen to fail: "indexed 0 files", and exit code 0. A folder that a pattern matches is passed over."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.jsonl").write_text("1")
    assert main(["index", str(tmp_path / "train")]) == 1
    assert f"{tmp_path}/train: it is a folder. Pass the files in it: '{tmp_path}/train/*'" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text("1")
    assert main(["index", str(tmp_path / "*")]) == 0


@pytest.mark.parametrize("time", [0, 0x0A0A], ids=["a line", "lines"])
@pytest.mark.parametrize("counts", [[1], [2]], ids=str)
def test_a_compressed_file_under_another_name(tmp_path, time, counts, capsys):
    """Gzip writes the time, and so its bytes may look like lines. Seen to fail: the shard had more records than the one
    in its count, and it was indexed."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(gzip.compress(b"1\n2", mtime=time))
    assert len(path.read_bytes().split(b"\n")) == (3 if time else 1)
    said = r"x\.jsonl is not JSON Lines \(it is compressed by gzip, so its name must end in \.gz\)"
    with closing(jsonl(path, counts=counts)) as data:
        for number in reversed(range(counts[0])):
            with pytest.raises(ValueError, match=said):
                data[number]
    assert main(["index", str(path)]) == 1
    assert re.search(said, capsys.readouterr().err)
