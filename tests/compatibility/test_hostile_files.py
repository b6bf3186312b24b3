"""Files are data: whatever bytes stand in a cache, an index, a bookmark or a state, with right checksums, they give a
value or an error that names them.

``PENSTOCK_FUZZ=300 pytest --timeout 0 tests/compatibility/test_hostile_files.py`` tries 300 times as many; ``make
soak`` does. What these tests look for besides other errors is a signal, which ends pytest itself, and an import.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mds_files
import numpy as np
import pytest
import torch
from fuzz import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st
from megatron_files import index

from penstock import Cached, StateError, filtered, formats
from penstock.__main__ import main
from penstock._datasets.cache_record import FOOTER
from penstock._fetch.encoding import _READ, TAG, decoded
from penstock._files.files import stamp
from penstock._files.index_file import write_index
from penstock._streams.bookmarks import Bookmarks
from penstock.formats import jsonl, mds, megatron_documents, tar, tokens
from penstock.formats._tar import sample_offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Point(NamedTuple):
    x: Any
    y: Any


class Outer:
    class Inner(NamedTuple):
        z: Any


# Pieces of hostile files.

BYTES = b"\xff\xff\x11\0" + bytes(range(60))
DTYPES = [
    "float32", "bfloat16", "bool", "complex64", "float8_e5m2", "quint8", "quint4x2", "bits8", "int1", "_dynamo",
    "_inductor", "load", "e", "|O", "O", "|O8", "<i4", "<i8", "|b1", "|u1", ">c16", "<f2", "<f16", "<U1", "<U0", "|S2",
    "|V4", "|V0", "<M8[s]", "<M8[25us]", "<M8", "<m8", "T", "|T16", "f4,O", "(3)O", "|V2147483647", "<U4294967295",
    "<M8[0s]",
]  # fmt: skip
numbers = st.integers(0, 9) | st.sampled_from(
    [-1, -8, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 1.5, 1e300, math.inf]
)
scalars = st.none() | st.booleans() | numbers | st.sampled_from(["", "x", "y", "torch", "é\0"])
junk = (
    scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.sampled_from(["a", TAG, "items"]), scalars, max_size=2)
)
shapes = st.lists(st.integers(0, 3), max_size=3) | st.lists(numbers, max_size=3) | junk
MODULES = ["torch", "os", "collections", "numpy", "antigravity", "torch._dynamo", "penstock", __name__]
NAMES = [
    "Point",
    "Outer.Inner",
    "Point.x",
    "_dynamo.config",
    "_inductor",
    "Path.mro",
    "namedtuple",
    "path.join",
    "Size",
    "",
]


@st.composite
def described(draw: Any) -> list[Any]:
    """An array as a record describes it: often one whose size fits."""
    kind, dtype, shape = (
        draw(st.sampled_from(["tensor", "array", "scalar"])),
        draw(st.sampled_from(DTYPES) | junk),
        draw(shapes),
    )
    nbytes = draw(numbers | st.none())
    if nbytes is None:
        with contextlib.suppress(Exception):
            itemsize = getattr(torch, dtype).itemsize if kind == "tensor" else np.dtype(dtype).itemsize
            nbytes = itemsize * math.prod(shape)
    return [kind, dtype, shape, nbytes]


structures = st.recursive(
    described()
    | junk
    | st.tuples(st.sampled_from(["bytes", "bytes_", "str_"]), junk).map(list)
    | st.tuples(st.just("complex"), junk, junk).map(list),
    lambda inner: (
        st.tuples(st.sampled_from(["list", "tuple"]), st.lists(inner, max_size=3)).map(list)
        | st.tuples(st.just("dict"), st.lists(scalars | inner, max_size=2), st.lists(inner, max_size=2)).map(list)
        | st.tuples(
            st.just("named"),
            st.sampled_from(MODULES) | junk,
            st.sampled_from(NAMES) | junk,
            st.sampled_from([["x", "y"], ["z"], []]) | junk,
            st.lists(inner, max_size=2),
        ).map(list)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=4,
)


@contextlib.contextmanager
def nothing_imported() -> Iterator[None]:
    before = {*sys.modules}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of dtypes that are experiments
        yield
    assert {*sys.modules} - before == set()


@contextlib.contextmanager
def refused_by_name(path: Path, kind: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """Nothing is wrong, or the error names the file."""
    try:
        yield
    except kind as error:
        if str(path) not in str(error):
            raise


def use(value: Any) -> None:
    """What a program does with a value: object pointers that are none crash here at the latest."""
    if isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            use(one)
    elif isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.nbytes < 10**6:
        with contextlib.suppress(Exception):  # a text of no characters, a dtype that torch only stores
            str(value if isinstance(value, np.generic) else value.reshape(-1)[:9].tolist())


class One:
    """A dataset of one sample, which is in no file."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return "loaded"


# Caches.


def record(
    structure: Any, arrays: bytes = BYTES, *, text: bytes | None = None, sizes: tuple[int, int] | None = None
) -> bytes:
    """A record of sample 0 whose checksum is right, whatever it says."""
    text = json.dumps(structure).encode() if text is None else text
    data = arrays + text + FOOTER.pack(0, *(sizes or (len(arrays), len(text))), 0)[:-4]
    start = len(data) + 4 - FOOTER.size - sum(sizes or (len(arrays), len(text)))
    return data + struct.pack("=I", zlib.crc32(data[start:]))


def read(folder: Path, record: bytes) -> Any:
    """Sample 0 of a cache that holds a record."""
    Cached(One(), folder).close()
    (folder / "penstock.data").write_bytes(record)
    (folder / "penstock.index").write_bytes(struct.pack("=Q", len(record)))
    cached = Cached(One(), folder)
    try:
        return cached[0]
    finally:
        cached.close()


@pytest.mark.parametrize(
    ("structure", "said"),
    [
        (["array", "|O", [1], 8], r"\|O"),
        (["scalar", "|O", [], 8], r"\|O"),
        (["array", "f4,O", [1], 12], "f4,O"),
        (["array", "<i4", [1], 8], "8"),
        (["array", "<i4", [4], 2**40], "bytes"),
        (["bytes", 99], "bytes"),
        (["bytes", -4], "bytes"),
        (["tensor", "quint8", [8], 8], "quint8"),
        (["tensor", "bfloat16", [-1], 8], "shape"),
        (["tensor", "_inductor", [0], 0], "_inductor"),
        (["named", "torch", "_dynamo.config", ["x"], [1]], "no such class"),
        (["named", "torch", "Size", ["x"], [1]], "no such class"),
        (["dict", [["list", []]], [1]], "unhashable"),
        (["what", 1, 2], "what"),
    ],
    ids=str,
)
def test_a_record_that_makes_no_sense_is_refused_by_the_name_of_its_folder(
    structure: Any, said: str, tmp_path: Path
) -> None:
    r"""Seen red: ``|O`` took the bytes for pointers to objects, and the next use crashed; a name was asked of torch,
    which imported 800 modules for it; texts and tensors of other sizes than said; and errors of other types, that named
    no file."""
    with nothing_imported(), pytest.raises(ValueError, match=f"sample 0 .*{tmp_path}.*{said}"):
        read(tmp_path, record(structure, bytes(16)))


def test_a_record_that_says_it_begins_before_the_file_is_loaded_again(tmp_path: Path) -> None:
    """Seen red: its beginning was counted from the end of the file."""
    assert read(tmp_path, record(["list", []], sizes=(len(BYTES) + 3, len('["list", []]')))) == "loaded"


def test_a_named_tuple_in_a_class_is_found(tmp_path: Path) -> None:
    """A class lies in its module, or in a class there."""
    assert read(tmp_path, record(["named", __name__, "Outer.Inner", ["z"], [1]])) == Outer.Inner(1)


@pytest.mark.slow
@fuzzed(60)
@given(structures, st.binary(max_size=8), st.none() | st.tuples(st.integers(0, 200), st.integers(0, 200)))
def test_any_record_with_a_right_checksum_gives_a_value_or_a_value_error(
    tmp_path_factory: Any, structure: Any, more: bytes, sizes: Any
) -> None:
    """Seen red, as the test above says, and by a signal."""
    folder = tmp_path_factory.getbasetemp() / "hostile cache"
    with nothing_imported(), refused_by_name(folder):
        use(read(folder, record(structure, BYTES + more, sizes=sizes)))


@pytest.mark.slow
@fuzzed(20)
@given(
    st.binary(max_size=200),
    st.binary(max_size=60),
    st.sampled_from([b"", b"[" * 2000, b"9" * 5000, b'{"a":', b"\xff", b"NaN", b"\0[\0]"]),
)
def test_any_bytes_with_a_right_checksum_give_a_value_or_a_value_error(
    tmp_path_factory: Any, arrays: bytes, text: bytes, more: bytes
) -> None:
    """Seen red: a codec imported for two bytes that look like UTF-16."""
    folder = tmp_path_factory.getbasetemp() / "hostile cache"
    for before, after in ((more, text), (text, more)):
        with nothing_imported(), refused_by_name(folder):
            use(read(folder, record(None, arrays, text=before + after)))


@pytest.mark.slow
@fuzzed(20)
@given(
    st.lists(st.integers(-2, 9) | st.sampled_from([-(2**63), 2**40, 2**62, 2**63 - 1, 2 << 40]), max_size=9),
    junk,
    st.booleans(),
)
def test_whatever_a_file_of_kept_samples_holds(
    tmp_path_factory: Any, held: list[int], other: Any, hostile_head: bool
) -> None:
    path, data = tmp_path_factory.getbasetemp() / "hostile.kept", np.array(held, "<i8").tobytes()
    path.unlink(missing_ok=True)
    filtered([*range(4)], math.isfinite, cache=path)
    head = json.loads(path.read_bytes().partition(b"\n")[0])
    head |= {"count": other, "crc": other} if hostile_head else {"count": len(held), "crc": zlib.crc32(data)}
    path.write_bytes(json.dumps(head).encode() + b"\n" + data)
    with nothing_imported(), refused_by_name(path):
        [*filtered([*range(4)], math.isfinite, cache=path)]


# Indexes, bookmarks and what lies beside files.


@pytest.fixture(scope="module")
def shards(tmp_path_factory: Any) -> Any:
    """A file of JSON lines and a tar."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "x.jsonl").write_text('{"k": 1}\n[2]\n3\n')
    with tarfile.open(folder / "x.tar", "w") as archive:
        for k in range(3):
            member = tarfile.TarInfo(f"{k}.txt")
            member.size = 5
            archive.addfile(member, io.BytesIO(b"abcde"))
    return folder


@pytest.mark.slow
@fuzzed(40)
@given(
    st.lists(
        st.sampled_from([0, 2, 9, 13, 15, 512, 1024, 2048, -1, -512, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]),
        max_size=5,
    ),
    st.dictionaries(
        st.sampled_from(["records", "size", "mtime_ns", "version", "kind", "penstock index"]), junk, max_size=1
    ),
    st.sampled_from(["jsonl", "tar"]),
)
@example([], {"records": 2**32}, "jsonl")
def test_whatever_an_index_says_a_record_comes_or_a_value_error(
    shards: Path, offsets: list[int], other: Any, kind: str
) -> None:
    """Seen red: EINVAL where an offset is negative, a MemoryError and "cannot fit 'int'" where one is huge; no name of
    a file in them; a MemoryError where the number of records is: found by the long fuzz."""
    path, data = shards / f"x.{kind}", np.array(offsets, "<i8").tobytes()
    now = stamp(str(path))
    head = {
        "penstock index": 1,
        "kind": kind,
        "records": len(offsets) - 1,
        "size": now.size,
        "mtime_ns": now.mtime_ns,
        "version": "",
    }
    (shards / f"x.{kind}.index").write_bytes(
        json.dumps({**head, "checksum": zlib.crc32(data), **other}).encode() + b"\n" + data
    )
    with (
        nothing_imported(),
        refused_by_name(path),
        contextlib.closing({"jsonl": jsonl, "tar": tar}[kind](str(path))) as made,
    ):
        for k in range(min(len(made), 5)):
            with refused_by_name(path):
                made[k]


MDS = {
    "a": "int",
    "b": "str",
    "c": "json",
    "d": "ndarray",
    "e": "ndarray:int16:2",
    "f": "list[png]",
    "g": "pil",
    "h": "uint8",
}
SAID = [
    "format",
    "version",
    "samples",
    "compression",
    "raw_data",
    "zip_data",
    "column_names",
    "column_encodings",
    "column_sizes",
    "hashes",
]


@pytest.mark.slow
@fuzzed(60)
@given(
    st.dictionaries(
        st.sampled_from(SAID),
        junk | st.sampled_from(["mds", "zstd:3", ["sha1"], [8, 9], ["int", "ndarray:int8:3", "list[jpeg]"]]),
        max_size=2,
    ),
    st.dictionaries(
        st.sampled_from(["basename", "bytes", "hashes"]),
        junk | st.sampled_from(["../x.mds", "/etc/passwd", "a/../../x", "0.mds.gz", "s3://b/c"]),
        max_size=1,
    ),
    st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=4)), max_size=3),
    st.sampled_from(["", "zstd", "gz", "bz2"]),
)
@example({}, {}, [(0, struct.pack("<I", 2**31))], "")
@example({"samples": 2**40}, {}, [], "")
@example({"samples": 2**29, "zip_data": None, "compression": None}, {"bytes": 2**32 - 1}, [], "zstd")
def test_whatever_an_index_of_mds_and_its_shards_say(
    tmp_path_factory: Any, said: Any, of_file: Any, written: list[tuple[int, bytes]], packed: str
) -> None:
    """Records come, or a ValueError that names the folder; a FileNotFoundError where another shard is named. Only the
    header of a shard, and its values, are written over."""
    folder = tmp_path_factory.mktemp("mds")
    array, image = b"\x10\x04\x02\1\0\2\0", b"\2\0\0\0\1\0\0\0\1\0\0\0Lab"
    values = {
        "a": bytes(8),
        "b": b"text",
        "c": b"[1]",
        "d": array,
        "e": b"abcd",
        "f": struct.pack("<III", 0, 1, 0),
        "g": image,
        "h": b"a",
    }
    raw = bytearray(mds_files.shard_of(MDS, [values] * 3))
    for at, data in written:
        raw[at : at + len(data)] = data[: max(0, len(raw) - at)]
    shard = mds_files.described("0.mds", MDS, bytes(raw), 3, packed)
    shard["zip_data" if packed else "raw_data"].update(of_file)
    (folder / (f"0.mds.{packed}" if packed else "0.mds")).write_bytes(mds_files.PACK[packed](bytes(raw)))
    (folder / "index.json").write_bytes(mds_files.index_of([{**shard, **said}]))
    pytest.importorskip("PIL.Image").init()  # imports what reads images
    with (
        nothing_imported(),
        refused_by_name(folder, (ValueError, FileNotFoundError, ImportError)),
        contextlib.closing(mds(folder)) as made,
    ):
        for k in range(min(len(made), 5)):
            with refused_by_name(folder):
                use([*made[k].values()])


def pax(said: bytes) -> bytes:
    """A member that gives ``said`` as the extended header of what follows."""
    member = tarfile.TarInfo("pax")
    member.type, member.size = b"x", len(said)
    return member.tobuf(tarfile.USTAR_FORMAT) + said.ljust(-(-len(said) // 512) * 512, b"\0")


@pytest.mark.parametrize("size", [2**34, 2**50, 2**62, 2**63 + 8, 2**80, b"9" * 30, b"9" * 5000, "²".encode()], ids=str)
def test_a_tar_that_states_a_size_that_it_cannot_have_is_refused_by_its_name(size: Any, tmp_path: Path) -> None:
    """Seen red: a MemoryError, EINVAL and "cannot fit 'int'", and ValueErrors of ``int``, none of which named the
    file."""
    path, member, before = tmp_path / "x.tar", tarfile.TarInfo("1.txt"), b""
    if isinstance(size, int):
        member.size = size
    else:
        before = pax(b"%d size=%s\n" % (len(size) + 7 + len(str(len(size) + 9)), size))
    path.write_bytes(before + member.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with open(path, "rb") as file, refused_by_name(path):
        sample_offsets(file, str(path))
    with contextlib.closing(tar(str(path), counts=[1])) as made, refused_by_name(path):
        made[0]
    write_index(f"{path}.index", "tar", stamp(str(path)), np.array([0, path.stat().st_size]))
    with contextlib.closing(tar(str(path))) as made, refused_by_name(path):
        made[0]


@pytest.mark.parametrize(
    "header",
    [b"{'descr': '<u2', 'fortran_order': False, 'shape': (", b"{" * 90, b"9" * 9000, b"\xff"],
    ids=lambda header: header[:20],
)
def test_a_header_of_npy_that_cannot_be_read_names_its_file(header: bytes, tmp_path: Path) -> None:
    """Seen red: NumPy's own errors, which name none."""
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + bytes(20))
    with warnings.catch_warnings(), pytest.raises(ValueError, match="x.npy"):
        warnings.simplefilter("ignore")
        tokens(str(tmp_path / "x.npy"), 2)


whole = st.integers(-2, 9) | st.sampled_from([2**31 - 1, 2**40, -(2**63), 2**63 - 1])


@pytest.mark.slow
@fuzzed(200)
@given(
    st.lists(st.integers(-2, 9) | st.sampled_from([2**31 - 1, -(2**31)]), max_size=5),
    st.lists(whole, max_size=5),
    st.fixed_dictionaries(
        {},
        optional={
            "version": st.integers(0, 2),
            "code": st.integers(0, 9),
            "sequences": st.sampled_from([0, 1, 2**31, 2**60, 2**64 - 1]),
            "borders": st.sampled_from([0, 1, 2**31, 2**60, 2**64 - 1]),
            "pointers": st.lists(whole, max_size=5),
        },
    ),
    st.integers(0, 99),
    st.booleans(),
)
def test_whatever_an_index_of_megatron_says_its_documents_come_or_a_value_error(
    tmp_path_factory: Any, lengths: list[int], documents: list[int], other: Any, size: int, fits: bool
) -> None:
    """Seen red: borders that lead out of the sequences, an IndexError."""
    path = tmp_path_factory.getbasetemp() / "hostile.idx"
    path.write_bytes(
        index(lengths, [0, *sorted(at for at in documents if at >= 0), len(lengths)] if fits else documents, **other)
    )
    with open(path.with_suffix(".bin"), "wb") as file:
        file.truncate(2 * sum(lengths) if fits and 0 <= sum(lengths) < 100 else size)
    try:
        data = megatron_documents(path)
    except ValueError as exc:
        if "hostile." not in str(exc):
            raise
        return
    assert sum(len(data[number]["tokens"]) for number in range(len(data))) == sum(data.lengths) == sum(lengths)
    data.close()


@pytest.mark.slow
@fuzzed(40)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"shard": numbers, "key": st.just("k0") | junk, "pass": st.none() | numbers, "outputs": numbers},
            optional={"seed": st.just(0) | junk, "cut": st.booleans() | junk},
        )
        | junk,
        max_size=4,
    )
)
def test_whatever_bookmarks_say_with_a_right_checksum(tmp_path_factory: Any, said: list[Any]) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile bookmarks"
    keys = ["k0", "k1"]
    for file in folder.rglob("*.jsonl"):
        file.unlink()
    writer = Bookmarks(folder, {}, keys, 0)
    writer.add(1, 0, 7, every_pass=True)
    (file,) = folder.rglob("*.jsonl")
    with open(file, "ab") as out:
        for text in (json.dumps(one)[:-1].encode() for one in said):
            out.write(text + b',"check":%d}\n' % zlib.crc32(text, zlib.crc32(file.parent.name.encode())))
    reader = Bookmarks(folder, {}, keys, 0)
    for shard in (0, 1):
        outputs = reader.outputs(shard, 0)
        assert outputs is None or 0 <= outputs < 2**63
    assert outputs in (7, None)


# States.


tagged = st.recursive(
    junk,
    lambda inner: st.fixed_dictionaries(
        {TAG: st.sampled_from([*_READ, "x"])},
        optional={
            "items": st.lists(inner | st.lists(inner, max_size=2), max_size=3) | inner,
            "dtype": st.sampled_from(DTYPES)
            | st.lists(st.lists(st.sampled_from(DTYPES), max_size=3), max_size=2)
            | inner,
            "shape": shapes,
            "data": st.sampled_from(["", "AA==", "AAAAAAAAAAA=", "/////////////////////w==", "*"]) | inner,
            "bits": st.sampled_from(["7ff8000000000000", "x", ""]) | inner,
        },
    ),
    max_leaves=5,
)


@pytest.mark.slow
@fuzzed(100)
@given(tagged)
def test_any_value_in_a_state_is_read_or_refused(value: Any) -> None:
    """Seen red: a dtype "_dynamo" imported it."""
    with nothing_imported():
        try:
            value = decoded(json.loads(json.dumps(value)))
        except StateError:
            return
    use(value)


@pytest.mark.parametrize("dtype", ["_inductor", "quint8"])
def test_a_dtype_in_a_state_is_one_that_lies_in_torch(dtype: str) -> None:
    """Seen red: torch was asked for it, and imported a module of that name."""
    with nothing_imported(), pytest.raises(StateError, match="cannot be read"):
        decoded({TAG: "tensor", "dtype": dtype, "shape": [1], "data": "AA=="})


# Writes stay in their folder.


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("name", ["penstock.data", "penstock.index", "penstock.json", "penstock.json.new"])
def test_a_link_in_a_cache_folder_leads_no_write_elsewhere(name: str, dangling: bool, tmp_path: Path) -> None:
    """Seen red: the index emptied the file that its link led to, the JSON overwrote it, the data were appended to
    it."""
    target, folder = tmp_path / "target", tmp_path / "cache"
    if not dangling:
        target.write_bytes(b"")
    folder.mkdir()
    (folder / name).symlink_to(target)
    with refused_by_name(folder / name, OSError):
        assert Cached(One(), folder)[0] == "loaded"
    assert target.exists() != dangling
    assert dangling or target.read_bytes() == b""


@pytest.mark.parametrize("name", ["penstock.index", "penstock.json.new"])
def test_a_second_name_of_a_file_in_a_cache_folder_leads_no_write_elsewhere(name: str, tmp_path: Path) -> None:
    """Seen to fail: the file was emptied and written over, under both names."""
    target, folder = tmp_path / "target", tmp_path / "cache"
    target.write_text("mine")
    folder.mkdir()
    (folder / name).hardlink_to(target)
    assert Cached(One(), folder)[0] == "loaded"
    assert target.read_text() == "mine"


def test_a_pipe_in_a_cache_folder_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """Seen red: opening it waited for a writer, forever."""
    Cached(One(), tmp_path).close()
    for name in ("penstock.json", "penstock.data", "penstock.index"):
        sound = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(OSError, match=name):
            Cached(One(), tmp_path)
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(sound)


@pytest.mark.parametrize(
    "name", ["x.jsonl", "x.jsonl.index", "x.bin", "x.idx", "x.parquet", "x.arrow", "index.json", "kept", "index"]
)
def test_a_pipe_or_a_device_in_the_place_of_any_file_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to fail: a pipe was opened, which waits for a writer, and /dev/zero was read forever."""
    (tmp_path / "x.jsonl").write_text("1\n")
    assert main(["index", str(tmp_path / "x.jsonl")]) == 0
    reads: dict[str, Callable[[Any], Any]] = {
        "x.jsonl": lambda path: jsonl(path)[0],
        "x.jsonl.index": lambda _: jsonl(tmp_path / "x.jsonl"),
        "x.bin": lambda path: tokens(path, 4),
        "x.idx": megatron_documents,
        "x.parquet": formats.parquet,
        "x.arrow": formats.arrow,
        "index.json": lambda _: formats.mds(tmp_path),
        "kept": lambda path: filtered(range(9), bool, cache=path),
    }
    file = tmp_path / ("x.jsonl" if name == "index" else name)
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        file.unlink(missing_ok=True)
        put(file)
        if name == "index":
            assert main(["index", str(file)]) == 1
            assert "is a pipe or a device" in capsys.readouterr().err
        else:
            with pytest.raises(ValueError, match=rf"{name} is a pipe or a device, but only regular files can be read"):
                reads[name](str(file))


@pytest.mark.parametrize("name", ["x.jsonl.index", "x.idx", "penstock.json", "index.json"])
def test_a_file_without_bound_is_not_read_to_its_end(name: str, tmp_path: Path) -> None:
    """Seen to fail: all of it was read into memory before its size was compared."""
    (tmp_path / "x.jsonl").write_text("1\n")
    assert main(["index", str(tmp_path / "x.jsonl")]) == 0
    (tmp_path / "x.idx").write_bytes(index([1], [0, 1]))
    Cached(range(9), tmp_path)
    (tmp_path / "index.json").touch()
    os.truncate(tmp_path / name, 2**34)
    reads = {
        "x.jsonl.index": lambda: jsonl(tmp_path / "x.jsonl")[0],
        "x.idx": lambda: megatron_documents(tmp_path / "x.idx"),
        "index.json": lambda: formats.mds(tmp_path),
    }
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"is damaged"):
            reads.get(name, lambda: Cached(range(9), tmp_path))()
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("of_the_folder", [False, True])
def test_a_link_among_bookmarks_leads_no_write_elsewhere(of_the_folder: bool, tmp_path: Path) -> None:
    """Seen red: the line was appended to what the link led to; a new file was written in the folder that it led to."""
    marks, target = Bookmarks(tmp_path / "marks", {}, ["k0", "k1"], 0), tmp_path / "target"
    marks.add(0, 0, 5, every_pass=True)
    (file,) = (tmp_path / "marks").rglob("*.jsonl")
    link = file.parent if of_the_folder else file
    link.rename(tmp_path / "other")
    link.symlink_to(target)
    if of_the_folder:
        target.mkdir()
    with pytest.raises(OSError, match="link"):
        marks.add(1, 0, 5, every_pass=True)
    assert not [*target.iterdir()] if of_the_folder else not target.exists()


# For long.

REPEATS = int(os.environ.get("PENSTOCK_REPEATS", "1"))


@pytest.mark.soak
@pytest.mark.timeout(900 * REPEATS)
@pytest.mark.parametrize(("file", "times"), [("test_hostile_files.py", 20), ("test_hostile_states.py", 8)])
def test_many_times_as_many(file: str, times: int) -> None:
    """In a program of its own, because a crash would end this one."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "0", str(Path(__file__).with_name(file))]
    done = subprocess.run(
        command, env={**os.environ, "PENSTOCK_FUZZ": str(times * REPEATS)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
