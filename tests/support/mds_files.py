"""Writes the files of MosaicML Streaming's ``MDSWriter``, version 2 of its layout. A record is the bytes of each
column."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any

import zstandard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

PACK = {"": bytes, "gz": gzip.compress, "bz2": bz2.compress, "zstd": zstandard.compress}
SIZES = {"int": 8, "uint8": 1, "float32": 4, "float64": 8}
INT = {"i": "int"}


def shard_of(columns: Mapping[str, str], records: Sequence[Mapping[str, bytes]]) -> bytes:
    """A shard before compression: how many records, where each begins and the last one ends, how the writer was set up,
    and the records."""
    bodies = [
        b"".join(
            [struct.pack("<I", len(record[name])) for name in columns if columns[name] not in SIZES]
            + [record[name] for name in columns]
        )
        for record in records
    ]
    head, at = b'{"a": "b"}', 4 * (len(bodies) + 2)
    offsets = [at + len(head) + sum(map(len, bodies[:n])) for n in range(len(bodies) + 1)]
    return struct.pack(f"<{len(offsets) + 1}I", len(bodies), *offsets) + head + b"".join(bodies)


def described(
    name: str, columns: Mapping[str, str], raw: bytes, records: int, packed: str = "", hashes: Iterable[str] = ()
) -> dict[str, Any]:
    """What an index says of a shard."""

    def file(name: str, data: bytes) -> dict[str, Any]:
        return {
            "basename": name,
            "bytes": len(data),
            "hashes": {one: hashlib.new(one, data).hexdigest() for one in hashes},
        }

    return {
        "format": "mds", "version": 2, "samples": records, "size_limit": None, "hashes": list(hashes),
        "compression": f"{packed}:3" if packed else None, "raw_data": file(name, raw),
        "zip_data": file(f"{name}.{packed}", PACK[packed](raw)) if packed else None,
        "column_names": list(columns), "column_encodings": list(columns.values()),
        "column_sizes": [SIZES.get(one) for one in columns.values()],
    }  # fmt: skip


def index_of(shards: list[dict[str, Any]]) -> bytes:
    return json.dumps({"version": 2, "shards": shards}).encode()


def write(
    folder: Path, columns: Mapping[str, str], shards: Sequence[Any], packed: str = "", hashes: Iterable[str] = ()
) -> Path:
    """A dataset; its index names the shards ``0.mds`` and so on, compressed or not."""
    folder.mkdir(exist_ok=True)
    said = []
    for number, records in enumerate(shards):
        raw, name = shard_of(columns, records), f"{number}.mds"
        said.append(described(name, columns, raw, len(records), packed, hashes))
        (folder / (f"{name}.{packed}" if packed else name)).write_bytes(PACK[packed](raw))
    (folder / "index.json").write_bytes(index_of(said))
    return folder


def integers(values: Iterable[int], name: str = "i") -> list[dict[str, bytes]]:
    return [{name: struct.pack("<q", value)} for value in values]
