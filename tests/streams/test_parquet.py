"""Parquet: the rows that pyarrow reads, in any order; few pages in memory; files that differ, are damaged or were
changed are refused by name."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from format_laws import every_way, open_files, read

from penstock import Loader, StateMismatch
from penstock.formats import parquet


def table(n, first=0):
    """Rows of all sorts; row i has the id ``first + i``."""
    ids = list(range(first, first + n))
    return pa.table(
        {
            "id": ids,
            "text": [None if i % 5 == 3 else f"text {i}" for i in ids],
            "image": [{"bytes": bytes([i % 256]) * (i % 7), "path": f"{i}.png"} for i in ids],
            "tokens": pa.array([[i] * (i % 4) for i in ids], type=pa.list_(pa.int32())),
            "score": pa.array([i / 3 for i in ids], type=pa.float32()),
            "kind": pa.array([f"kind {i % 2}" for i in ids]).dictionary_encode(),
            "when": pa.array(ids, type=pa.timestamp("us")),
        }
    )


@pytest.fixture
def files(tmp_path):
    """Three files of 13 + 13 + 4 rows, in row groups of 5."""
    for number, n in enumerate((13, 13, 4)):
        pq.write_table(table(n, 13 * number), tmp_path / f"{number}.parquet", row_group_size=5)
    return str(tmp_path / "*.parquet")


def rows(files, columns=None):
    """What pyarrow reads."""
    folder = os.path.dirname(files)
    return [
        row
        for name in sorted(os.listdir(folder))
        for row in pq.ParquetFile(f"{folder}/{name}").read(columns).to_pylist()
    ]


class TestRows:
    def test_are_those_of_pyarrow(self, files):
        data = parquet(files)
        assert len(data) == 30
        assert [data[index] for index in range(30)] == rows(files)
        assert data.__getitems__([29, 0, 0, 14]) == [rows(files)[index] for index in (29, 0, 0, 14)]
        assert repr(read(data)) == repr([rows(files)]), "the types are the same, too"

    @pytest.mark.parametrize("columns", [["text", "id"], ["image.bytes", "tokens"]], ids=str)
    def test_have_only_the_columns_asked_for(self, files, columns):
        """Seen to fail: the columns not passed on."""
        assert read(parquet(files, columns)) == [rows(files, columns)]

    @pytest.mark.parametrize(
        "name", ["a.b", "a", "pose.left.arm", "pose.left.arm.x", "list.list.element.y", "map.key_value"]
    )
    def test_of_columns_and_fields_with_dots_in_their_names(self, tmp_path, name):
        """The second file has another ``a``. Seen red for "a.b": ``a`` was compared as well, and the files refused."""
        for number, a in enumerate(([1, 2], ["x", "y"])):
            pairs = pa.array([[("k", 1)]] * 2, pa.map_(pa.string(), pa.int64()))
            content = {"a.b": [3, 4], "pose": [{"left.arm": {"x": 5, "y": 6}}] * 2, "list": [[{"y": 7, "z": 8}]] * 2}
            table = pa.table({"a": a if name != "a" else [1, 2], **content, "map": pairs})
            pq.write_table(table, tmp_path / f"{number}.parquet")
        expected = rows(str(tmp_path / "*.parquet"), [name])
        assert expected[0].keys() == {name if name in ("a", "a.b") else name.partition(".")[0]}
        assert read(parquet(str(tmp_path / "*.parquet"), [name])) == [expected]

    def test_of_row_groups_of_any_size(self, tmp_path):
        """Longer than a batch, longer than a slice of it, empty, and a file without any. Seen to fail: ``start`` not
        reduced by the batches left out."""
        with pq.ParquetWriter(tmp_path / "0.parquet", pa.schema({"id": pa.int64()})) as writer:
            for begin, end in ((0, 2500), (2500, 2500), (2500, 2501), (2501, 2700)):
                writer.write_table(pa.table({"id": pa.array(range(begin, end), type=pa.int64())}), row_group_size=3000)
        pq.write_table(pa.table({"id": pa.array([], type=pa.int64())}), tmp_path / "1.parquet")
        pq.ParquetWriter(tmp_path / "2.parquet", pa.schema({"id": pa.int64()})).close()
        pq.write_table(pa.table({"id": range(2700, 2710)}), tmp_path / "3.parquet")
        data = parquet(str(tmp_path / "*.parquet"))
        assert [row["id"] for row in read(data, batch_size=100)[0]] == list(range(2710))
        for index in (0, 63, 64, 1023, 1024, 2048, 2499, 2500, 2501, 2709):
            assert parquet(str(tmp_path / "*.parquet"))[index] == {"id": index}

    def test_of_whole_files(self, files):
        """Rows from the middle of any row group, shards that are files, and no state of the other unit. Seen to fail:
        ``start`` not reduced by the row groups passed over."""
        data = parquet(files, unit="file")
        assert [data[index] for index in range(30)] == rows(files)
        for index in range(30):
            assert parquet(files, unit="file")[index] == rows(files)[index]
        assert data.counts.tolist() == [13, 13, 4]
        with (
            Loader.from_dataset(data, batch_size=2, collate_fn=list) as loader,
            Loader.from_dataset(parquet(files), batch_size=2) as other,
        ):
            next(iter(loader))
            with pytest.raises(StateMismatch, match="'unit': 'file'"):
                other.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match="unit='files' must be 'row_group' or 'file'"):
            parquet(files, unit="files")

    def test_that_a_step_gets_end_with_the_unit(self, files):
        """Seen to fail: a file's row groups as shards."""

        def last(records):
            yield [row["id"] for row in records][-1]

        for unit, expected in (("file", [12, 25, 29]), ("row_group", [4, 9, 12, 17, 22, 25, 29])):
            data = parquet(files, ["id"], unit=unit, lanes=1, epoch_size=len(expected), steps=[last], bookmarks=False)
            assert read(data) == [expected]

    def test_through_fsspec(self, files):
        memory = fsspec.filesystem("memory")
        expected = rows(files)
        for path in sorted(Path(files).parent.iterdir()):
            memory.pipe(f"/penstock/{path.name}", path.read_bytes())
        try:
            assert read(parquet("memory://penstock/*.parquet")) == [expected]
            data = parquet("memory://penstock/{0..2}.parquet")
            memory.pipe("/penstock/1.parquet", b"PAR1")
            with pytest.raises(
                ValueError, match=r"1\.parquet has changed since the dataset was built: it had \d+ bytes and now has 4"
            ):
                data[20]
        finally:
            memory.rm("/penstock", recursive=True)

    @pytest.mark.parametrize("first", [pa.string(), pa.large_string(), pa.null()], ids=str)
    def test_of_the_same_values_under_other_types(self, tmp_path, first):
        """As pandas, polars and a writer of a column without values write the same text. Fails if the types of the
        files must be equal."""
        kinds = [first, pa.string(), pa.large_string(), pa.null(), pa.dictionary(pa.int32(), pa.string())]
        for number, kind in enumerate(kinds):
            words = pa.array([None if pa.types.is_null(kind) else f"text {number}"], kind)
            lists = [] if number == 0 else [pa.scalar(number, pa.int16() if number == 1 else pa.uint64())]
            row = {"text": words, "nested": [{"a": lists, "b": None if number < 2 else b"b"}]}
            pq.write_table(pa.table(row), tmp_path / f"{number}.parquet")
        expected = [row for number in range(5) for row in pq.read_table(tmp_path / f"{number}.parquet").to_pylist()]
        assert read(parquet(tmp_path / "{0..4}.parquet")) == [expected]
        assert [row["text"] for row in expected[1:]] == ["text 1", "text 2", None, "text 4"]
        assert [row["nested"]["a"] for row in expected] == [[], [1], [2], [3], [4]]

    def test_with_the_columns_that_folders_name(self, tmp_path):
        """As Spark, Ray Data and pyarrow write tables. Fails if the folders are not looked at, or not as pyarrow does:
        an integer, a missing value, an escaped one."""
        rows = {"text": list("abcd"), "lang": ["en", "en", None, "fr/CA"], "year": [2023, 2024, 2023, 2024]}
        pq.write_to_dataset(pa.table(rows), tmp_path / "t", partition_cols=["lang", "year"])
        files = str(tmp_path / "t" / "**" / "*.parquet")
        expected = sorted(map(str, pq.read_table(tmp_path / "t").to_pylist()))
        assert len(expected) == 4
        assert sorted(map(str, read(parquet(files))[0])) == expected
        assert (
            sorted(map(str, read(parquet(files, ["text", "lang", "year"], unit="file"), shuffle=True)[0])) == expected
        )
        assert sorted(row["year"] for row in read(parquet(files, ["year"]))[0]) == [2023, 2023, 2024, 2024]
        assert sorted(map(str, read(parquet(files, ["text"]))[0])) == [str({"text": letter}) for letter in "abcd"]
        with pytest.raises(ValueError, match=r"has no column 'country', only 'text', 'lang', 'year'"):
            parquet(files, ["country"])

    def test_a_column_of_the_file_itself_is_preferred_to_a_folder(self, tmp_path):
        for lang in ("en", "fr"):
            (tmp_path / f"lang={lang}").mkdir()
            pq.write_table(pa.table({"lang": [f"{lang}-X"]}), tmp_path / f"lang={lang}" / "0.parquet")
        assert read(parquet(tmp_path / "*/*.parquet")) == [[{"lang": "en-X"}, {"lang": "fr-X"}]]


class TestResources:
    def test_one_file_for_each_open_row_group_and_none_after_close(self, files, tmp_path):
        """Seen to fail: files kept after their row group has ended."""
        with Loader.from_dataset(parquet(files, lanes=2), batch_size=2, shuffle=True, collate_fn=list) as loader:
            for _ in loader:
                assert len(open_files(tmp_path)) <= 4
        assert open_files(tmp_path) == []

    def test_a_row_group_is_never_in_memory_whole(self, tmp_path):
        """20 MB in pages of 1 MB. Seen to fail: 43 MB with pyarrow's own ``pre_buffer`` and without a buffer."""
        rng = np.random.default_rng(0)
        pq.write_table(
            pa.table({"x": [rng.bytes(1000) for _ in range(20_000)]}), tmp_path / "0.parquet", row_group_size=20_000
        )
        data = parquet(str(tmp_path / "0.parquet"))
        before = pa.total_allocated_bytes()
        assert len(data[10_000]["x"]) == 1000
        assert 0 < pa.total_allocated_bytes() - before < 8e6

    def test_the_default_lanes_fit_into_memory(self, tmp_path, monkeypatch):
        """And rows that are not shuffled come in the files' order all the same. Seen to fail: a limit that is not
        applied."""
        pq.write_table(
            pa.table({"x": [bytes(1000)] * 640}),
            tmp_path / "0.parquet",
            row_group_size=20,
            use_dictionary=False,
            compression="none",
        )
        data = parquet(str(tmp_path / "0.parquet"))
        assert data.order(shuffle=True, seed=0).settings()["lanes"] == 8
        monkeypatch.setattr("penstock.formats._parquet.LANES_BYTES", 200_000)  # 20 KB a row group, twice
        data = parquet(str(tmp_path / "0.parquet"))
        assert data.order(shuffle=True, seed=0).settings()["lanes"] == 4
        assert data.order(shuffle=False, seed=0).indices(0, np.arange(640)).tolist() == list(range(640))
        assert parquet(str(tmp_path / "0.parquet"), lanes=6).order(shuffle=True, seed=0).settings()["lanes"] == 6


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("columns", "why"),
        [
            (["id", "lable"], r"0\.parquet has no column 'lable', only 'id', 'text', "),
            (["image.byte"], r"has no column 'image\.byte', only"),
            ("text", r"columns='text' must be a list of names, such as \['text', 'label'\]"),
            ([], r"columns=\[\] must be a list of names"),
        ],
        ids=str,
    )
    def test_columns_that_are_not_there(self, files, columns, why):
        with pytest.raises(ValueError, match=why):
            parquet(files, columns)

    @pytest.mark.parametrize("columns", [["state"], ["state", "id"], ["state.head"], ["pose.left"], ["state.arm.x"]])
    def test_what_only_looks_like_a_part_of_a_column(self, tmp_path, columns):
        """Dots in names, as robots have them. Seen red: rows without these columns, or without any, in silence."""
        flat = {"state.head.pan": [0, 1], "state.arm": [2, 3], "pose": [{"left.arm": {"x": 4}}] * 2, "id": [5, 6]}
        pq.write_table(pa.table(flat), tmp_path / "0.parquet")
        with pytest.raises(
            ValueError, match=rf"no column '{columns[0]}', only 'state\.head\.pan', 'state\.arm', 'pose'"
        ):
            parquet(tmp_path / "0.parquet", columns)

    def test_another_schema_in_one_file(self, tmp_path):
        """Seen to fail: only the names compared; only the columns of the first file compared."""
        paths = [tmp_path / f"{number}.parquet" for number in range(2)]
        pq.write_table(pa.table({"id": [1], "text": ["a"]}), paths[0])
        for other, what in (
            ({"id": ["1"], "text": ["a"]}, "'id' is int64 in .*0.parquet, but string in .*1.parquet"),
            ({"id": [1]}, "'text' is string in .*, but missing in"),
        ):
            pq.write_table(pa.table(other), paths[1])
            with pytest.raises(ValueError, match=f"the files have different columns: {what}"):
                parquet(paths)
            with pytest.raises(ValueError, match="the files have different columns"):
                parquet(paths[::-1])
        pq.write_table(pa.table({"text": ["b"], "id": [2]}), paths[1])  # in another order
        assert read(parquet(paths)) == [[{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]]

    @pytest.mark.parametrize(
        "content", [b"", b"PAR1", b"hello" * 100, None], ids=["empty", "only magic", "text", "cut short"]
    )
    def test_what_is_not_parquet(self, files, tmp_path, content):
        bad = tmp_path / "1.parquet"
        bad.write_bytes(bad.read_bytes()[:-20] if content is None else content)
        with pytest.raises(ValueError, match=r"1\.parquet is not a parquet file, or was cut short: "):
            parquet(files)

    def test_the_same_column_with_other_values(self, tmp_path):
        """Fails if a column of nulls in the first file hides that two others differ."""
        kinds = [pa.list_(pa.null()), pa.list_(pa.string()), pa.list_(pa.null()), pa.list_(pa.int8())]
        for number, kind in enumerate(kinds):
            pq.write_table(pa.table({"x": pa.array([[]], kind)}), tmp_path / f"{number}.parquet")
        assert read(parquet(tmp_path / "{0..2}.parquet")) == [[{"x": []}] * 3]
        with pytest.raises(
            ValueError, match=r"'x' is list<element: string> in .*1\.parquet, but list<element: int8> in .*3\.parquet"
        ):
            parquet(tmp_path / "*.parquet")

    def test_several_columns_of_one_name(self, tmp_path):
        """Fails if a sample, which is a dict, has the last of them only."""
        pq.write_table(
            pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["x", "x", "y"]), tmp_path / "0.parquet"
        )
        for columns in (None, ["x"]):
            with pytest.raises(ValueError, match=r"0\.parquet has several columns named 'x', but a sample is a dict"):
                parquet(tmp_path / "0.parquet", columns)
        assert read(parquet(tmp_path / "0.parquet", ["y"])) == [[{"y": 3}]]

    def test_encrypted_columns(self, tmp_path):
        """Fails if pyarrow is asked for the size of a column that it cannot decrypt, which ends the process."""

        class Keys(encryption.KmsClient):
            def wrap_key(self, key_bytes, master_key_identifier):
                return base64.b64encode(key_bytes)

            def unwrap_key(self, wrapped_key, master_key_identifier):
                return base64.b64decode(wrapped_key)

        for plain in (True, False):
            how = encryption.EncryptionConfiguration(
                footer_key="f", column_keys={"c": ["secret"]}, plaintext_footer=plain
            )
            keys = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(
                encryption.KmsConnectionConfig(), how
            )
            content = pa.table({"open": [1], "secret": [2]})
            with pq.ParquetWriter(tmp_path / "0.parquet", content.schema, encryption_properties=keys) as writer:
                writer.write_table(content)
            for columns in (None, ["open"]):
                with pytest.raises(
                    (ValueError, OSError), match=r"0\.parquet has encrypted columns|encrypted metadata"
                ) as caught:
                    parquet(tmp_path / "0.parquet", columns)
                assert plain or any("0.parquet" in note for note in caught.value.__notes__)

    def test_no_file_and_a_folder(self, tmp_path):
        """Fails if the advice finds no file, as for files in folders of the folder."""
        with pytest.raises(ValueError, match=r"paths=\[\] matches no file"):
            parquet([])
        with pytest.raises(
            ValueError,
            match=r"is a folder\. Pass the files in it: '.*\*\.parquet', or however they end: none ends in \.parquet",
        ):
            parquet(tmp_path)
        pq.write_to_dataset(pa.table({"x": [1, 2], "y": [3, 4]}), tmp_path / "[t]", partition_cols=["x"])
        with pytest.raises(
            ValueError, match=r"\[t\] is a folder\. Pass the files in it: '.*/\*\*/\*\.parquet'\."
        ) as caught:
            parquet(tmp_path / "[t]")
        assert len(parquet(str(caught.value).split("'")[1])) == 2

    def test_a_file_that_was_replaced(self, files, tmp_path):
        """Seen to fail: without the comparison, the new file is read by the old footer."""
        data = parquet(files)
        pq.write_table(table(13, 500), tmp_path / "1.parquet", row_group_size=5)
        os.utime(tmp_path / "1.parquet", ns=(1, 1))
        assert data[0]["id"] == 0
        with pytest.raises(ValueError, match=r"1\.parquet has changed since the dataset was built") as caught:
            data[20]
        assert any(re.search(r"row group 1 of .*1\.parquet", note) for note in caught.value.__notes__)

    def test_a_file_that_is_overwritten_while_it_is_read(self, files, tmp_path):
        """Seen to fail: the error was the reader's, of bytes that it could not make sense of."""
        pq.write_table(table(4000), tmp_path / "0.parquet", compression="none", data_page_size=1000)
        data = parquet(tmp_path / "0.parquet")
        assert data[0]["id"] == 0
        with open(tmp_path / "0.parquet", "r+b") as file:
            file.write(b"\xff" * 60_000)
        with pytest.raises(ValueError, match=r"0\.parquet has changed since it was first checked"):
            for index in range(1, 4000):
                data[index]

    def test_a_damaged_footer_among_others(self, files, tmp_path):
        """Seen to fail: the error did not say in which file."""
        content = bytearray((tmp_path / "1.parquet").read_bytes())
        length = int.from_bytes(content[-8:-4], "little")
        content[-8 - length : -8] = b"\xff" * length
        (tmp_path / "1.parquet").write_bytes(content)
        with pytest.raises(OSError, match="thrift") as caught:
            parquet(files)
        assert any(note.endswith("1.parquet") for note in caught.value.__notes__)

    @every_way
    def test_a_damaged_page(self, files, tmp_path, way):
        """The error names the row group and the file."""
        path = tmp_path / "1.parquet"
        about = pq.ParquetFile(path).metadata.row_group(2)
        content, where = bytearray(path.read_bytes()), about.column(0).data_page_offset
        content[where : where + 40] = b"\xff" * 40
        stat = path.stat()
        data = parquet(files)
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with (
            Loader.from_dataset(data, batch_size=10, collate_fn=list, **way) as loader,
            pytest.raises(OSError, match="header") as caught,
        ):
            list(loader)
        assert any(re.search(r"row group 2 of .*1\.parquet", note) for note in caught.value.__notes__)

    def test_a_page_with_another_checksum(self, tmp_path):
        """Seen to fail: a number that a disk has changed, in a file with checksums, was read as it stood there."""
        path = tmp_path / "1.parquet"
        words = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        pq.write_table(pa.table({"id": [2**40 + k for k in range(5)]}), path, **words)
        content = path.read_bytes()
        path.write_bytes(content.replace((2**40 + 3).to_bytes(8, "little"), (2**40 + 9).to_bytes(8, "little"), 1))
        data = parquet(path)
        with pytest.raises(OSError, match="CRC checksum"):
            data[3]
