"""MDS: the samples that MosaicML Streaming makes of it, value for value, and refusals of what is damaged or would run
code."""

from __future__ import annotations

import bz2
import io
import json
import os
import pickle
import struct
import sys
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import mds_files
import numpy as np
import pytest
from format_laws import read
from mds_files import INT, integers

from penstock import Filter, Loader
from penstock.formats import mds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RECORDS = [list(range(7)), list(range(7, 9)), list(range(9, 20))]
ALL = [{"i": value} for values in RECORDS for value in values]


def written(folder: Path, packed: str = "", hashes: Any = ()) -> Path:
    return mds_files.write(folder / "mds", INT, [integers(values) for values in RECORDS], packed, hashes)


def ours(dataset: Any) -> list[Any]:
    with closing(dataset):
        return [dataset[number] for number in range(len(dataset))]


def image(form: str, color: int = 100) -> bytes:
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("RGB", (4, 3), (color, 0, 0)).save(out := io.BytesIO(), form)
    return out.getvalue()


def several(*values: bytes) -> bytes:
    return struct.pack(f"<{1 + len(values)}I", len(values), *map(len, values)) + b"".join(values)


ARRAY = np.arange(6, dtype="<i2").reshape(2, 3)
VALUES: dict[str, tuple[bytes, Any]] = {
    "bytes": (b"\0\xff", b"\0\xff"),
    "str": ("é".encode(), "é"),
    "int": (struct.pack("<q", -5), -5),
    "json": (b'{"a": [1, null]}', {"a": [1, None]}),
    "uint8": (b"\xff", np.uint8(255)),
    "float32": (struct.pack("<f", 0.1), np.float32(0.1)),
    "str_int": (b"1" + b"0" * 30, 10**30),
    "str_float": (b"0.1", 0.1),
    "str_decimal": (b"1.10", Decimal("1.10")),
    "ndarray": (bytes([17, 2 << 2 | 1, 2, 0, 3, 0]) + ARRAY.tobytes(), ARRAY),
    "ndarray:int16": (bytes([2 << 2, 2, 3]) + ARRAY.tobytes(), ARRAY),
    "ndarray:int16:2,3": (ARRAY.tobytes(), ARRAY),
    "pkl": (pickle.dumps({1, 2}), {1, 2}),
}


def test_each_encoding_by_its_layout(tmp_path: Path) -> None:
    """Seen to fail: the width of an array's lengths taken for their number."""
    columns = {f"c{number}": encoding for number, encoding in enumerate(VALUES)}
    record = {name: VALUES[encoding][0] for name, encoding in columns.items()}
    (sample,) = ours(mds(mds_files.write(tmp_path / "mds", columns, [[record]]), trust=True))
    for name, encoding in columns.items():
        expected = VALUES[encoding][1]
        assert type(sample[name]) is type(expected)
        assert np.array_equal(sample[name], expected)
        assert not isinstance(expected, np.ndarray) or (
            sample[name].dtype == expected.dtype and sample[name].flags.writeable
        )


def test_images_are_those_of_pillow(tmp_path: Path) -> None:
    raw = struct.pack("<III", 4, 3, 3) + b"RGB" + bytes([100, 0, 0] * 12)
    columns = {"a": "jpeg", "b": "png", "c": "pil", "d": "list[png]", "e": "jpegarray", "f": "list[pil]"}
    values = [
        image("JPEG"),
        image("PNG"),
        raw,
        bytes(4) + several(image("PNG"), image("PNG", 200)),
        several(image("JPEG")),
        bytes(4) + several(raw),
    ]
    (sample,) = ours(mds(mds_files.write(tmp_path / "mds", columns, [[dict(zip(columns, values, strict=True))]])))
    assert [sample[name].format for name in "abc"] == ["JPEG", "PNG", None]
    found = [*(sample[name] for name in "abc"), *sample["d"], *sample["e"], *sample["f"]]
    assert [round(one.getpixel((0, 0))[0] / 100) for one in found] == [1, 1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("packed", mds_files.PACK)
def test_reads_all_in_order(tmp_path: Path, packed: str) -> None:
    data = mds(written(tmp_path, packed))
    assert data.counts is not None
    assert data.counts.tolist() == [7, 2, 11]
    assert read(data, 2) == [ALL, ALL]


def test_several_folders_and_folders_inside(tmp_path: Path) -> None:
    """As ``merge_index`` writes one index for several."""
    written(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "mds").rename(tmp_path / "a" / "mds")
    said = json.loads((tmp_path / "a" / "mds" / "index.json").read_text())["shards"]
    for shard in said:
        shard["raw_data"]["basename"] = f"mds/{shard['raw_data']['basename']}"
    (tmp_path / "a" / "index.json").write_bytes(mds_files.index_of(said))
    mds_files.write(tmp_path / "b", INT, [integers([100])])
    assert ours(mds(tmp_path / "a")) == ALL
    assert ours(mds(tmp_path / "{b,a}")) == [{"i": 100}, *ALL]


def test_raw_shards_beside_compressed_ones_are_read_by_position(tmp_path: Path) -> None:
    """A ``StreamingDataset`` has put them there. The state is the same."""
    names = mds(written(tmp_path, "zstd")).shard_names
    index = (tmp_path / "mds" / "index.json").read_bytes()
    written(tmp_path)
    (tmp_path / "mds" / "index.json").write_bytes(index)
    data = mds(tmp_path / "mds")
    assert [os.path.basename(path) for path in data.shards] == ["0.mds", "1.mds", "2.mds"]
    assert data.shard_names == names
    assert ours(data) == ALL


@pytest.mark.parametrize("packed", ["", "gz"])
def test_a_stream_of_them(tmp_path: Path, packed: str) -> None:
    data = mds(
        written(tmp_path, packed),
        epoch_size=10,
        steps=[Filter(lambda sample: sample["i"] % 2 == 0)],
        bookmarks=False,
        lanes=1,
    )
    assert read(data)[0] == [{"i": value} for value in range(0, 20, 2)]


def test_a_stream_leaves_out_a_record_that_is_damaged(tmp_path: Path) -> None:
    records = [{"t": b"good"}, {"t": b"\xff"}, {"t": b"fine"}]
    folder = mds_files.write(tmp_path / "mds", {"t": "str"}, [records])
    with pytest.raises(
        ValueError, match=r"0\.mds is damaged .*: 't' of the record at byte 38 is not a valid str \(UnicodeDecodeError"
    ):
        ours(mds(folder))
    with closing(mds(folder, epoch_size=2, bookmarks=False, on_error="skip")) as data:
        assert read(data)[0] == [{"t": "good"}, {"t": "fine"}]


class TestRefused:
    """Each error names the file, and what to do."""

    def test_what_runs_code(self, tmp_path: Path) -> None:
        """Nothing is unpickled before. Seen to fail: without the check."""
        folder = mds_files.write(tmp_path / "mds", {"x": "pkl"}, [[{"x": b"cos\nabort\n(tR."}]])
        with pytest.raises(
            ValueError,
            match=r"index\.json: the column 'x' is pickled .* pass trust=True. Otherwise write the dataset again",
        ):
            mds(folder)

    def test_an_encoding_that_is_left_to_streaming(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "streaming", None)
        with pytest.raises(ImportError, match=r"the encoding 'voxels' is unknown .* pip install 'mosaicml-streaming'"):
            mds(mds_files.write(tmp_path / "mds", {"x": "voxels"}, [[{"x": b""}]]))

    @pytest.mark.parametrize("packed", ["br", "snappy"])
    def test_a_compression_whose_package_is_missing(
        self, tmp_path: Path, packed: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, {"br": "brotli"}.get(packed, packed), None)
        monkeypatch.setitem(mds_files.PACK, packed, bytes)
        with pytest.raises(ImportError, match=rf"mds\.{packed}' needs the package .* pip install"):
            mds(written(tmp_path, packed))

    def test_what_is_no_dataset(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"index\.json does not exist.* Pass the folder that contains it"):
            mds(tmp_path)
        index = written(tmp_path) / "index.json"
        sound = json.loads(index.read_text())
        for damage, why in (
            ({"format": "xsv"}, "a shard has the format .xsv., version 2, but only mds of version 2"),
            ({"raw_data": {"basename": "../x", "bytes": 99}}, "does not name a file in that folder"),
            ({"column_sizes": [None, 8]}, "the columns of a shard"),
            (
                {
                    "compression": "lzma",
                    "zip_data": {"basename": "x.lzma", "bytes": 9},
                    "raw_data": {"basename": "x", "bytes": 99},
                },
                "has the compression lzma",
            ),
        ):
            index.write_bytes(mds_files.index_of([sound["shards"][0] | damage]))
            with pytest.raises(ValueError, match=rf"index\.json is damaged or not an MDS index: .*{why}"):
                mds(tmp_path / "mds")
        index.write_text("{")
        with pytest.raises(ValueError, match=r"index\.json is damaged"):
            mds(tmp_path / "mds")

    @pytest.mark.parametrize("packed", ["", "gz"])
    def test_a_hash_that_differs(self, tmp_path: Path, packed: str) -> None:
        """Raw, one bit of a value is only noticed so. Seen to fail: without the comparison."""
        folder = written(tmp_path, packed, ["sha1"])
        with pytest.raises(
            ValueError, match=r"validate_hash='xxh64', but .* has 'sha1' for .*0\.mds.* Choose a hash that was written"
        ):
            mds(folder, validate_hash="xxh64")
        assert read(mds(folder, validate_hash="sha1"), 2) == [ALL, ALL]
        path = folder / f"1.mds{packed and '.gz'}"
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"{path.name} is damaged .*: its sha1 is \w+ instead of "):
            read(mds(folder, validate_hash="sha1"))

    @pytest.mark.parametrize("packed", ["", "zstd"])
    def test_a_shard_that_is_missing_or_of_another_size(self, tmp_path: Path, packed: str) -> None:
        folder = written(tmp_path, packed)
        path = folder / (f"2.mds.{packed}" if packed else "2.mds")
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ValueError, match=rf"{path.name} has \d+ bytes, but .*index\.json says \d+"):
            mds(folder)
        path.unlink()
        with pytest.raises(FileNotFoundError, match=path.name):
            mds(folder)

    @pytest.mark.parametrize("packed", ["", "bz2"])
    @pytest.mark.parametrize(("at", "number"), [(0, 10), (4, 12), (4, 2**31), (8, 2**32 - 1), (48, 149)])
    def test_offsets_that_lead_elsewhere(self, tmp_path: Path, packed: str, at: int, number: int) -> None:
        """And those of other records: shard 2 has 11. Seen to fail: without each of the comparisons."""
        folder = written(tmp_path)
        raw = bytearray((folder / "2.mds").read_bytes())
        raw[at : at + 4] = struct.pack("<I", number)
        (folder / "2.mds").write_bytes(raw)
        if packed:
            (folder / "2.mds.bz2").write_bytes(bz2.compress(raw))
            (folder / "2.mds").unlink()
            (folder / "index.json").write_bytes(
                mds_files.index_of([mds_files.described("2.mds", INT, bytes(raw), 11, packed)])
            )
        with pytest.raises(
            ValueError, match=r"2\.mds.* is damaged or not the shard that .*index\.json describes: its? (records|has)"
        ):
            read(mds(folder))

    def test_more_bytes_than_the_index_says_and_lengths_that_lead_elsewhere(self, tmp_path: Path) -> None:
        """Seen to fail: without each of the comparisons."""
        folder = mds_files.write(tmp_path / "mds", {"t": "str"}, [[{"t": b"good"}]])
        raw = bytearray((folder / "0.mds").read_bytes())
        said = mds_files.described("0.mds", {"t": "str"}, bytes(raw) + b"x", 1, "bz2")
        said["raw_data"]["bytes"] -= 1
        (tmp_path / "index.json").write_bytes(mds_files.index_of([said]))
        (tmp_path / "0.mds.bz2").write_bytes(bz2.compress(raw + b"x"))
        with pytest.raises(ValueError, match=r"0\.mds\.bz2 is damaged .*: it has more than its 30 bytes"):
            read(mds(tmp_path))
        raw[22] = 3
        (folder / "0.mds").write_bytes(raw)
        with pytest.raises(
            ValueError, match=r"0\.mds is damaged .*: the record at byte 22 does not end where its columns end"
        ):
            read(mds(folder))

    @pytest.mark.parametrize("packed", ["", "gz"])
    def test_a_shard_that_has_changed(self, tmp_path: Path, packed: str) -> None:
        """Between two epochs, to as many bytes; also where it stays open. Seen to fail: without the stamps."""
        data = mds(written(tmp_path, packed))
        with Loader.from_dataset(data, batch_size=20, collate_fn=list, prefetch_next_epoch=False) as loader:
            assert list(loader) == [ALL]
            path = tmp_path / "mds" / f"1.mds{packed and '.gz'}"
            other = tmp_path / "other"
            other.write_bytes(path.read_bytes())
            os.utime(other, ns=(0, 0))
            other.rename(path)
            with pytest.raises(ValueError, match=rf"{path.name} has changed since .*: it was written to"):
                list(loader)


THEIRS = """
import pickle
from streaming import StreamingDataset
dataset = StreamingDataset(local="mds", shuffle=False, batch_size=1, allow_unsafe_types=True)
with open("theirs", "wb") as file:
    pickle.dump([dataset[number] for number in range(len(dataset))], file)
"""


class TestAsStreamingDataset:
    """Written by ``MDSWriter``, read by both."""

    @pytest.mark.slow
    @pytest.mark.parametrize("packed", [None, "zstd:7", "gz", "bz2:1", "br:4", "snappy"])
    def test_sample_by_sample(self, tmp_path: Path, packed: str | None, run_script: Callable[..., str]) -> None:
        """Values, their types and the order of the columns. Only this differs: arrays of theirs cannot be written
        to."""
        streaming = pytest.importorskip(
            "streaming", reason="MosaicML Streaming, which needs an environment of its own, is not installed"
        )
        pillow = pytest.importorskip("PIL.Image")
        encodings = streaming.base.format.mds.encodings
        known = {*encodings._encodings} - {"ndarray"} | {"ndarray", "ndarray:float32", "ndarray:int16:2,3"}
        rng = np.random.default_rng(0)

        def picture() -> Any:
            return pillow.fromarray(rng.integers(0, 255, (8, 9, 3), dtype=np.uint8))

        def value(encoding: str, n: int) -> Any:
            special = {
                "bytes": bytes(n), "str": "é" * n, "int": n - 5, "json": {"x": [n, None]}, "str_int": 10**30 + n,
                "str_float": n / 3, "str_decimal": Decimal("1.10") + n, "pkl": {n, "x"},
                "ndarray": rng.normal(size=(n + 1, 300)), "ndarray:float32": rng.normal(size=n + 1).astype("f4"),
                "ndarray:int16:2,3": ARRAY + n,
            }  # fmt: skip
            if "array" in encoding and "nd" not in encoding:
                return [image("JPEG", n)] * (n % 3 + 1)
            if encoding.startswith("list["):
                return [picture() for _ in range(n % 3)]
            return special[encoding] if encoding in special else picture() if encoding in ("pil", "jpeg", "png") else n

        columns = {f"c {encoding}": encoding for encoding in sorted(known)}
        folder = tmp_path / "mds"
        with streaming.MDSWriter(
            out=str(folder), columns=columns, compression=packed, hashes=["sha1", "xxh64"], size_limit=50_000
        ) as writer:
            for n in range(20):
                writer.write({name: value(encoding, n) for name, encoding in columns.items()})
        data = mds(folder, trust=True, validate_hash="xxh64")
        found = read(data)[0]
        (tmp_path / "theirs.py").write_text(THEIRS)
        run_script(tmp_path / "theirs.py")
        theirs = pickle.loads((tmp_path / "theirs").read_bytes())
        assert len(data.shards) > 3
        assert len(found) == len(theirs) == 20
        for number, sample in enumerate(found):
            expected = theirs[number]
            assert [*sample] == [*expected]
            for name in expected:
                assert alike(sample[name], expected[name]), name
        assert ours(mds(folder, trust=True))[7]["c int"] == 2  # where theirs has left raw shards beside the others

    def test_encodings_that_only_streaming_knows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        streaming = pytest.importorskip(
            "streaming", reason="MosaicML Streaming, which needs an environment of its own, is not installed"
        )
        encodings = streaming.base.format.mds.encodings
        folder = mds_files.write(tmp_path / "mds", {"x": "voxels"}, [[{"x": b"abc"}]])
        with pytest.raises(ValueError, match="neither penstock.formats.mds nor the installed version of streaming"):
            mds(folder)
        monkeypatch.setitem(encodings._encodings, "voxels", encodings.Bytes)
        assert ours(mds(folder)) == [{"x": b"abc"}]
        monkeypatch.setattr(encodings, "_unsafe_encodings", {"voxels"})
        with pytest.raises(ValueError, match="trust=True"):
            mds(folder)


def alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if hasattr(one, "tobytes") and hasattr(one, "mode"):
        return (one.mode, one.size, one.format, one.tobytes()) == (
            other.mode,
            other.size,
            other.format,
            other.tobytes(),
        )
    return bool(one == other)
