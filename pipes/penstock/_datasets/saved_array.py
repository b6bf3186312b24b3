"""Whole numbers that take long to compute, kept in a file that says what they were computed from.

A file is a line of JSON, filled up with spaces to a multiple of 64 bytes, and then int64, little-endian. It is renamed into place once it is complete, so
any number of processes may write it at once.
"""

from __future__ import annotations

import json
import operator
import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock._datasets.cache_files import as_known_then
from penstock._streams.files import open_file
from penstock._streams.own_files import write_own

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._random.permutation import Int64s

_ALIGN = 64


def saved(path: str, identity: dict[str, Any], compute: Callable[[], Int64s]) -> Int64s:
    """The array in the file at ``path``, mapped into memory; computed and written if there is none.

    Raises:
        ValueError: The file is damaged, or holds something else; names the differences.
        OSError: The file cannot be read or written.
    """
    if not os.path.exists(path):
        _write(path, identity, compute())
    return opened(path, identity)


def opened(path: str, identity: dict[str, Any]) -> Int64s:
    """The array in the file, as `saved` gives it."""
    with open(path, "rb", opener=open_file) as file:
        line = file.readline(2**20)
    try:
        head = json.loads(line.decode())
        theirs, count, crc = dict(head["of"]), operator.index(head["count"]), head["crc"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of penstock's, or damaged. Delete it, or give another path.") from error
    ours = as_known_then(json.loads(json.dumps(identity)), theirs, path)
    if theirs != ours:
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        changed = "; ".join(f"{key} was {theirs.get(key)!r:.80} and is {ours.get(key)!r:.80}" for key in keys)
        raise ValueError(f"{path} was computed from something else: {changed}. Delete it, or give another path.")
    if os.path.getsize(path) != len(line) + 8 * count:
        raise ValueError(f"{path} has {os.path.getsize(path)} bytes, not {len(line) + 8 * count}: it is damaged. Delete it.")
    numbers = np.memmap(path, "<i8", "r", len(line), (count,)) if count else np.empty(0, np.int64)
    if zlib.crc32(numbers.data) != crc:
        raise ValueError(f"{path} is damaged: its checksum is wrong. Delete it.")
    return numbers


def _write(path: str, identity: dict[str, Any], numbers: Int64s) -> None:
    numbers = np.ascontiguousarray(numbers, "<i8")
    head = json.dumps({"of": identity, "count": len(numbers), "crc": zlib.crc32(numbers.data)})
    write_own(path, head.encode().ljust(-(-(len(head.encode()) + 1) // _ALIGN) * _ALIGN - 1), b"\n", numbers.data, sync=True)
