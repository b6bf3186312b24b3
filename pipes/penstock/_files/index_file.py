"""The index of a file: where each of its records begins, and which version of the file this applies to.

A line of JSON, followed by the offsets as 64-bit integers, little-endian. It is written next to the file, as
``<file>.index``, or into a folder.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any, Final, NamedTuple

import numpy as np

from penstock._files.files import IN_USE, REINDEX, Stamp, opened
from penstock._files.own_files import write_own
from penstock._files.paths import bare, beside

FORMAT: Final = 1
SUFFIX: Final = ".index"
LONGEST_HEADER: Final = 1000
MOST_RECORDS: Final = 2**40
"""Maximum number of records in a file, so that the sum over a million files fits into an int64."""


class Header(NamedTuple):
    """The header of an index.

    Attributes:
        kind: The format that the file was read as, such as ``"jsonl"``.
        records: The number of records.
        stamp: The version of the file.
        checksum: CRC-32 (ISO 3309) of the offsets.
        begin: Where the offsets begin in the index file.
    """

    kind: str
    records: int
    stamp: Stamp
    checksum: int
    begin: int


def index_path_of(path: str, folder: str | os.PathLike[str] | None) -> str:
    """The path of the index of the file ``path``."""
    name = bare(path)
    return (
        beside(path, path.replace(name, name + SUFFIX, 1))
        if folder is None
        else os.path.join(os.fspath(folder), os.path.basename(name) + SUFFIX)
    )


def index_paths_of(paths: list[str], folder: str | os.PathLike[str] | None) -> list[str]:
    """The paths of the indices of many files.

    Raises:
        ValueError: Two of them would coincide.
    """
    index_paths = [index_path_of(path, folder) for path in paths]
    owner: dict[str, str] = {}
    for path, index_path in zip(paths, index_paths, strict=True):
        if owner.setdefault(index_path, path) != path:
            raise ValueError(
                f"{owner[index_path]} and {path} have the same name, so one folder cannot hold the indices of both. "
                f"Use a separate folder for each."
            )
    return index_paths


def write_index(index_path: str, kind: str, stamp: Stamp, offsets: np.ndarray) -> None:
    """Write an index, completely or not at all.

    Args:
        index_path: Path of the index.
        kind: See `Header`.
        stamp: The file's stamp from before it was read.
        offsets: int64, shape ``(records + 1,)``: where each record begins, and where the last one ends.
    """
    data = offsets.astype("<i8").tobytes()
    header = {
        "penstock index": FORMAT,
        "kind": kind,
        "records": len(offsets) - 1,
        **stamp._asdict(),
        "checksum": zlib.crc32(data),
    }
    write_own(index_path, json.dumps(header).encode(), b"\n", data)


def read_header(index_path: str) -> Header:
    """The header of the index at ``index_path``.

    Raises:
        FileNotFoundError: It does not exist.
        ValueError: It is damaged, or was not written by penstock.
    """
    with opened(index_path) as file:
        return _header(index_path, file.read(LONGEST_HEADER))


def read_offsets(index_path: str, header: Header) -> np.ndarray:
    """The offsets of the index at ``index_path``: int64, shape ``(records + 1,)``.

    Raises:
        ValueError: It is damaged, or no longer has this header.
    """
    with opened(index_path) as file:
        if _header(index_path, file.read(LONGEST_HEADER)) != header:
            raise ValueError(
                f"{index_path} has changed since it was first read: it was rewritten for another version of its file "
                f"or for another file. {IN_USE[1]}"
            )
        length = 8 * (header.records + 1)
        # Checked before allocating memory, because the number of records comes from the file.
        whole = file.seek(0, os.SEEK_END) == header.begin + length
        file.seek(header.begin)
        data = file.read(length) if whole else b""
    if len(data) != length or zlib.crc32(data) != header.checksum:
        raise _damaged(index_path, "its offsets have the wrong checksum")
    offsets = np.frombuffer(data, "<i8").astype(np.int64, copy=False)
    if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any():
        raise _damaged(index_path, "its offsets are not in ascending order")
    return offsets


def _header(index_path: str, begin: bytes) -> Header:
    line, newline, _ = begin.partition(b"\n")
    try:
        said: Any = json.loads(line.decode()) if newline else None
        if said["penstock index"] != FORMAT:
            raise ValueError(
                f"{index_path} is an index of format {said['penstock index']}, but this version of penstock reads "
                f"format {FORMAT}: {REINDEX}"
            )
        header = Header(
            said["kind"],
            said["records"],
            Stamp(*(said[name] for name in Stamp._fields)),
            said["checksum"],
            len(line) + 1,
        )
        numbers = (header.records, header.stamp.size, abs(header.stamp.mtime_ns), header.checksum)
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers) or header.records >= MOST_RECORDS:
            raise KeyError
        if type(header.stamp.version) is not str or type(header.kind) is not str:
            raise KeyError
    except (KeyError, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        raise _damaged(index_path, "it does not begin like an index") from None
    return header


def _damaged(index_path: str, why: str) -> ValueError:
    return ValueError(f"{index_path} is damaged or not an index: {why}. Delete it, and {REINDEX}")
