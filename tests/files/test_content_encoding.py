"""Files that an HTTP server sends with a Content-Encoding, which the client undoes in silence."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_files import HttpFiles

from penstock import Loader, formats

if TYPE_CHECKING:
    from pathlib import Path

aiohttp: Any = pytest.importorskip("aiohttp")
N = 500


@pytest.fixture(scope="module", autouse=True)
def _its_thread() -> None:
    """That of fsspec, which lives as long as the program."""
    pytest.importorskip("fsspec.asyn").get_loop()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(N):
            member = tarfile.TarInfo(f"{number:03}.id")
            member.size = 3
            archive.addfile(member, io.BytesIO(b"%03d" % number))
    return file.getvalue()


def tabled() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(N)), "text": ["words " * 9] * N}), file, row_group_size=100)
    return file.getvalue()


FILES = {"jsonl": b"".join(b'{"id": %6d}\n' % number for number in range(N)), "tar": tarred(), "parquet": tabled()}


def read(url: str, kind: str, **words: Any) -> list[int]:
    """The ids of all records of one file."""
    counts = {} if kind == "parquet" or "epoch_size" in words else {"counts": [N]}
    data = getattr(formats, kind)(url, **counts, **words)
    with Loader.from_dataset(data, batch_size=50, collate_fn=list) as loader:
        found = [int(record["id"]) for batch in loader for record in batch]
    data.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "tar"])
def test_a_gz_that_is_said_to_be_encoded(kind: str, tmp_path: Path) -> None:
    """As by ``gsutil cp -Z``: the name ends in .gz, and the client unpacks it. Seen red: it was called damaged."""
    for ranges in (True, False):
        with HttpFiles(ranges=ranges).running() as server:
            server.files[f"/a.{kind}.gz"] = gzip.compress(FILES[kind])
            for encoding in ("gzip", "x-gzip", "identity"):
                server.encoded = lambda accepted, body, encoding=encoding: (encoding, body)
                for words in ({}, {"cache_dir": tmp_path / encoding, "max_cache_size": "1MB"}, {"epoch_size": N}):
                    assert read(f"{server.url}/a.{kind}.gz", kind, **words) == list(range(N)), (encoding, words)


@pytest.mark.parametrize("kind", ["jsonl", "tar"])
def test_a_file_that_is_encoded_on_the_way(kind: str) -> None:
    """Also one that is compressed already, and then still is. Seen red when it was taken for unpacked by its header."""
    with HttpFiles().running() as server:
        server.files |= {f"/a.{kind}": FILES[kind], f"/a.{kind}.gz": gzip.compress(FILES[kind])}
        for encoding, encode in {"gzip": gzip.compress, "deflate": zlib.compress}.items():
            server.encoded = lambda accepted, body, encoding=encoding, encode=encode: (encoding, encode(body))
            for name in (f"a.{kind}", f"a.{kind}.gz"):
                assert read(f"{server.url}/{name}", kind) == list(range(N)), (encoding, name)


def test_a_damaged_gz_is_still_called_damaged() -> None:
    with HttpFiles().running() as server:
        server.files["/a.jsonl.gz"] = FILES["jsonl"]
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged, or not compressed as its name says"):
            read(f"{server.url}/a.jsonl.gz", "jsonl")
        server.encoded = lambda accepted, body: ("gzip", gzip.compress(gzip.compress(body)[:-20]))
        with pytest.raises(EOFError, match="ends in the middle of its compressed data"):
            read(f"{server.url}/a.jsonl.gz", "jsonl")


def test_parts_of_a_file_are_asked_for_without_encoding(tmp_path: Path) -> None:
    """A server that compresses for whoever accepts it, and sends ranges of that. Seen red: "not a parquet file", and
    tokens were decoded from the middle of a stream of gzip."""
    with HttpFiles().running() as server:
        numbers = np.arange(N, dtype=np.uint16)
        server.files |= {"/a.parquet": FILES["parquet"], "/a.bin": numbers.tobytes()}
        server.encoded = lambda accepted, body: ("gzip", gzip.compress(body)) if "gzip" in accepted else ("", body)
        assert read(f"{server.url}/a.parquet", "parquet") == list(range(N))
        no_room = {"cache_dir": tmp_path, "max_cache_size": 9}
        data = formats.tokens(f"{server.url}/a.bin", 10, dtype="uint16", **no_room)
        assert [data[k]["tokens"].tolist() for k in (0, 7)] == [numbers[:10].tolist(), numbers[70:80].tolist()]
        data.close()


def test_what_cannot_be_undone_or_read_in_parts_says_so() -> None:
    """Seen red: "not a parquet file, or was cut short", and "the server answered 400" without its reason."""
    with HttpFiles().running() as server:
        server.files |= {"/a.parquet": gzip.compress(FILES["parquet"]), "/a.jsonl": FILES["jsonl"]}
        server.encoded = lambda accepted, body: ("gzip", body)
        with pytest.raises(ValueError, match=r"a\.parquet cannot be read in parts, .* as with Content-Encoding"):
            read(f"{server.url}/a.parquet", "parquet")
        server.encoded = lambda accepted, body: ("br", b"not Brotli")
        with pytest.raises((OSError, aiohttp.ClientError), match=r"(?i)decode content-encoding: br"):
            read(f"{server.url}/a.jsonl", "jsonl")
