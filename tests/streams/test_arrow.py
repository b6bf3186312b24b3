"""Arrow files and streams: the rows that pyarrow reads, by index, out of mapped memory; what differs, is damaged or was
changed is refused by name."""

from __future__ import annotations

import os
import random
import re
import threading

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from format_laws import open_files, read

from penstock.formats import arrow


def table(n, first=0):
    """Rows of several sorts; row i has the id ``first + i``."""
    ids = list(range(first, first + n))
    return pa.table(
        {
            "text": [None if i % 5 == 3 else f"text {i}" for i in ids],
            "id": ids,
            "image": [{"bytes": bytes([i % 256]) * (i % 7), "path": f"{i}.png"} for i in ids],
            "tokens": pa.array([[i] * (i % 4) for i in ids], type=pa.list_(pa.int32())),
        }
    )


def write(path, content, kind="stream", batch=5, compression=None):
    """As Hugging Face writes a stream, as a file, or with ``dictionary`` a stream with one."""
    if kind == "dictionary":
        content = content.append_column(
            "kind", pa.array([f"kind {i % 2}" for i in range(len(content))]).dictionary_encode()
        )
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, content.schema, options=options) as writer:
        writer.write_table(content, batch)


def rows(path):
    """What pyarrow reads."""
    with pa.OSFile(str(path)) as source:
        in_file = source.read(6) == b"ARROW1"
        source.seek(0)
        return (pa.ipc.open_file if in_file else pa.ipc.open_stream)(source).read_all().to_pylist()


def of_the_other_byte_order(stream):
    """A stream that claims it: in the flatbuffer of its schema the field ``endianness``, which is left out if it is 0,
    is found where there is a 1."""

    def number(at, size, signed=False):
        return int.from_bytes(stream[at : at + size], "little", signed=signed)

    message = 8 + number(8, 4)
    header = message + number(message - number(message, 4, signed=True) + 4 + 2 * 2, 2)  # the third field
    schema = header + number(header, 4)
    one = next(at for at in range(schema, 8 + number(4, 4), 2) if number(at, 2) == 1)
    endianness = schema - number(schema, 4, signed=True) + 4  # the first field
    assert number(endianness, 2) == 0
    stream[endianness : endianness + 2] = (one - schema).to_bytes(2, "little")
    return bytes(stream)


KINDS = ["stream", "file", "dictionary"]


@pytest.fixture
def files(tmp_path):
    """A stream and a file of 13 + 13 rows, in record batches of 5."""
    write(tmp_path / "0.arrow", table(13))
    write(tmp_path / "1.arrow", table(13, 13), "file")
    return str(tmp_path / "*.arrow")


class TestRows:
    @pytest.mark.parametrize("compression", [None, "zstd"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_are_those_of_pyarrow(self, tmp_path, kind, compression):
        path = tmp_path / "0.arrow"
        write(path, table(200), kind, 80, compression)
        data = arrow(str(path))
        assert repr(read(data)) == repr([rows(path)]), "the types are the same, too"
        at_random = random.Random(1).choices(range(200), k=60)
        assert [data[index] for index in at_random] == [rows(path)[index] for index in at_random]

    @pytest.mark.parametrize("kind", KINDS)
    def test_have_only_the_columns_asked_for(self, tmp_path, kind):
        """Seen to fail: the columns not selected."""
        write(tmp_path / "0.arrow", table(12), kind)
        expected = [{"tokens": row["tokens"], "id": row["id"]} for row in rows(tmp_path / "0.arrow")]
        assert read(arrow(str(tmp_path / "0.arrow"), ["tokens", "id"])) == [expected]

    @pytest.mark.parametrize("kind", ["stream", "file"])
    def test_of_empty_batches_and_files(self, tmp_path, kind):
        write(tmp_path / "0.arrow", table(0), kind)
        assert len(arrow(str(tmp_path / "0.arrow"))) == 0
        write(tmp_path / "0.arrow", table(1).slice(0, 0), kind)
        (some,) = table(9).to_batches()
        with pa.OSFile(str(tmp_path / "1.arrow"), "wb") as sink, pa.ipc.new_stream(sink, some.schema) as writer:
            for begin, end in ((0, 3), (3, 3), (3, 3), (3, 9)):
                writer.write_batch(some.slice(begin, end - begin))
        assert read(arrow(str(tmp_path / "*.arrow"))) == [rows(tmp_path / "1.arrow")]

    def test_may_be_changed_by_who_gets_them(self, files):
        """Seen to fail: rows that were made ahead are handed out twice."""
        data = arrow(files)
        for index in (0, 1, 1, 2, 3, 3, 0, 25, 24, 25):
            row = data[index]
            assert row["id"] == index
            row.clear()

    def test_of_the_other_byte_order(self, tmp_path):
        """Fails if the numbers are not swapped: 2 came as 33554432, without an error."""
        sink = pa.BufferOutputStream()
        numbers = pa.concat_tables(
            pa.table({"x": pa.array(batch, pa.int32())}) for batch in ([0x01020304, None], [2, 1000])
        )
        with pa.ipc.new_stream(sink, numbers.schema) as writer:
            writer.write_table(numbers)
        content = bytearray(sink.getvalue().to_pybytes())
        for batch in ([0x01020304, 0], [2, 1000]):
            native, swapped = (np.array(batch, kind).tobytes() for kind in ("<i4", ">i4"))
            assert content.count(native) == 1
            content[:] = content.replace(native, swapped)
        (tmp_path / "0.arrow").write_bytes(of_the_other_byte_order(content))
        data = arrow(str(tmp_path / "0.arrow"))
        assert read(data) == [numbers.to_pylist()]
        assert data[3] == {"x": 1000}

    def test_of_the_same_values_under_other_types(self, tmp_path):
        """Fails if the types of the files must be equal; or if a list passes for a map."""
        arrays = [
            pa.array([["a"]], pa.list_(pa.string())),
            pa.array(
                [["b"]], pa.list_(pa.string_view() if int(pa.__version__.split(".")[0]) > 20 else pa.large_string())
            ),
            pa.array([["c"]], pa.list_(pa.large_string(), 1)),
            pa.RunEndEncodedArray.from_arrays([1], pa.array([["d"]], pa.large_list(pa.string()))),
            pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string())),
        ]
        for number, values in enumerate(arrays):
            write(tmp_path / f"{number}.arrow", pa.table({"x": values}))
        assert read(arrow(str(tmp_path / "{0..3}.arrow"))) == [[{"x": [letter]} for letter in "abcd"]]
        with pytest.raises(
            ValueError, match=r"'x' is list<item: string> in .*0\.arrow, but map<string, string> in .*4\.arrow"
        ):
            arrow(str(tmp_path / "{0..4}.arrow"))

    @pytest.mark.parametrize("kind", ["stream", "file"])
    def test_folders_name_no_columns(self, tmp_path, kind):
        """Unlike those of Parquet. Fails if one that is asked for is left out in silence."""
        for number, lang in enumerate(["en", "fr"]):
            (tmp_path / f"lang={lang}").mkdir()
            write(tmp_path / f"lang={lang}" / "0.arrow", table(3, 3 * number).select(["id"]), kind)
        files = str(tmp_path / "**" / "*.arrow")
        assert read(arrow(files)) == read(arrow(files, ["id"])) == [[{"id": i} for i in range(6)]]
        with pytest.raises(ValueError, match=r"0\.arrow has no column 'lang', only 'id'"):
            arrow(files, ["lang", "id"])


class TestResources:
    def test_mapped_and_not_read(self, tmp_path):
        """Seen to fail: with a file that is read, 20 MB."""
        write(tmp_path / "0.arrow", pa.table({"x": [bytes(1000)] * 20_000}), batch=20_000)
        before = pa.total_allocated_bytes()
        data = arrow(str(tmp_path / "0.arrow"))
        assert data[19_999] == {"x": bytes(1000)}
        assert pa.total_allocated_bytes() - before < 1e6

    def test_nothing_is_open_after_close(self, files, tmp_path):
        """Seen to fail: a mapping kept beside the record batch."""
        data = arrow(files, lanes=2)
        assert data[0]
        assert open_files(tmp_path) != []
        assert len(read(data, shuffle=True)[0]) == 26
        waiting = threading.Event()
        while open_files(tmp_path):  # a thread of pyarrow's own lets go of a file a moment later
            waiting.wait(0.01)


class TestWhatIsRefused:
    def test_a_missing_column(self, files):
        for column in ("lable", "image.bytes"):
            with pytest.raises(ValueError, match=rf"0\.arrow has no column '{column}', only 'text', 'id', "):
                arrow(files, [column])

    def test_what_only_looks_like_a_column(self, tmp_path):
        """Dots in names, as robots have them. Seen red: it was built, and the first row was a bare KeyError."""
        write(tmp_path / "0.arrow", pa.table({"state.head": [0], "state.arm": [1], "state": [2], "pose.x": [3]}))
        assert arrow(tmp_path / "0.arrow", ["state", "state.arm"])[0] == {"state": 2, "state.arm": 1}
        for name in ("pose", "state.a", "state.arm.x"):
            with pytest.raises(ValueError, match=rf"no column '{name}', only 'state\.head', 'state\.arm', "):
                arrow(tmp_path / "0.arrow", [name])

    @pytest.mark.parametrize(
        ("head", "said"), [(b"FEA1", "Feather file of version 1"), (b"PAR1", r"read it by penstock\.formats\.parquet")]
    )
    def test_what_it_is_instead_is_said(self, tmp_path, head, said):
        (tmp_path / "a.arrow").write_bytes(head + bytes(100))
        with pytest.raises(ValueError, match=said):
            arrow(str(tmp_path / "a.arrow"))

    @pytest.mark.parametrize("name", ["0", "1"])
    @pytest.mark.parametrize(
        "content", [b"", b"hello" * 100, 300, -200, -8], ids=["empty", "text", "header", "cut short", "end mark"]
    )
    def test_what_is_not_arrow(self, files, tmp_path, name, content):
        """Seen to fail: a stream that ended behind a record batch, without its end mark, had fewer rows."""
        bad = tmp_path / f"{name}.arrow"
        bad.write_bytes(bad.read_bytes()[:content] if isinstance(content, int) else content)
        with pytest.raises(ValueError, match=rf"{name}\.arrow is not an Arrow file or stream, or was cut short: "):
            arrow(files)

    @pytest.mark.parametrize(
        ("column", "there", "here"),
        [
            ("text", [0, 6, 12, 18], [0, 2**31 - 1, 12, 18]),
            ("tokens", [0, 0, 1, 3], [0, 2**30, 1, 3]),
            ("kind", [0, 1, 0, 1], [0, 10**9, 0, 1]),
        ],
    )
    def test_what_leads_out_of_a_record_batch(self, tmp_path, column, there, here):
        """Seen to fail: a damaged offset or index was followed, which ended the process or gave what lies there."""
        write(tmp_path / "0.arrow", table(50), "dictionary", batch=50)
        content = (tmp_path / "0.arrow").read_bytes()
        there, here = (np.array(numbers, "<i4").tobytes() for numbers in (there, here))
        assert content.count(there) >= 1
        (tmp_path / "0.arrow").write_bytes(content.replace(there, here))
        with pytest.raises(ValueError, match=r"0\.arrow is damaged, in record batch 0: "):
            arrow(str(tmp_path / "0.arrow"), [column])[0]

    def test_a_remote_file(self):
        memory = fsspec.filesystem("memory")
        memory.pipe("0.arrow", b"")
        with pytest.raises(
            ValueError, match="is memory-mapped, but it is not on a local disk, .* Copy it to a local disk"
        ):
            arrow("memory://0.arrow")
        memory.rm("0.arrow")

    def test_a_file_that_was_replaced(self, files, tmp_path):
        """Seen to fail: without the comparison, rows of the new file come under the old numbers."""
        data = arrow(files)
        write(tmp_path / "1.arrow", table(13, 500), "file")
        os.utime(tmp_path / "1.arrow", ns=(1, 1))
        with pytest.raises(ValueError, match=r"1\.arrow has changed since the dataset was built") as caught:
            data[20]
        assert any(re.search(r"record batch 1 of .*1\.arrow", note) for note in caught.value.__notes__)
