"""Files of a few records each, in several formats: file ``k`` has the numbers from ``100 * k`` on."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING

import pytest
from mds_files import INT, integers, shard_of

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDS = 12


def jsonl(file: int) -> bytes:
    return b"".join(json.dumps({"i": 100 * file + n}).encode() + b"\n" for n in range(RECORDS))


def tar(file: int) -> bytes:
    with io.BytesIO() as out:
        with tarfile.open(fileobj=out, mode="w") as members:
            for n in range(RECORDS):
                member = tarfile.TarInfo(f"{n:03}.txt")
                data = str(100 * file + n).encode()
                member.size = len(data)
                members.addfile(member, io.BytesIO(data))
        return out.getvalue()


def parquet(file: int) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    out = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"i": [100 * file + n for n in range(RECORDS)]}), out
    )
    return out.getvalue()


def arrow(file: int) -> bytes:
    """In two record batches."""
    pyarrow = pytest.importorskip("pyarrow")
    out = io.BytesIO()
    table = pyarrow.table({"i": [100 * file + n for n in range(RECORDS)]})
    with pyarrow.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, RECORDS // 2)
    return out.getvalue()


def mds(file: int) -> bytes:
    return shard_of(INT, integers(range(100 * file, 100 * file + RECORDS)))


def numbers(path: str) -> Iterator[int]:
    import fsspec

    with fsspec.open(path, "rb") as file:
        for line in file:
            yield json.loads(line)["i"]
