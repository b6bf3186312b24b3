"""JSON Lines: files with one record per line."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any, BinaryIO, Unpack

import numpy as np

from penstock._files.files import decompressed, whole
from penstock._files.first_look import kind_of
from penstock._streams.forward_reader import Unreadable
from penstock._streams.known_files import Format, known_files

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import numpy.typing as npt

    from penstock._files.files import Stamp
    from penstock._files.paths import Paths
    from penstock._streams.sharded import FormatOptions
    from penstock._streams.shards import Shards
    from penstock._streams.stream import Stream

CHUNK = 2**22  # bytes read at once
_HEAD = 2**8  # bytes that show whether a file is one array
_ARRAY = re.compile(rb"\[\s*\{")


def jsonl(
    paths: Paths,
    *,
    index: str | os.PathLike[str] | None = None,
    counts: npt.ArrayLike | None = None,
    ahead: int = 1,
    **options: Unpack[FormatOptions],
) -> Shards | Stream:
    """Read files of JSON Lines as one dataset. A sample is what ``json.loads`` returns. Blank lines are skipped.

    Files with an index (``python -m penstock index``) are read by position. Compressed files (.gz, .zst, .xz, .bz2) are
    read forward, and so are all files if ``counts`` is given.

    Args:
        paths: A path, a pattern such as ``"data/*.jsonl"`` or ``"data/{000..127}.jsonl"``, or a list of them. Paths
            with ``://`` are read through fsspec.
        index: Folder that holds the indices. Default: each index is next to its file.
        counts: The number of records in each file, to read them without an index.
        ahead: How many shards per lane to copy before they are read, if copies are kept.
        **options: ``storage_options``, ``cache_dir``, ``max_cache_size``, ``lanes``, ``window``, ``transform``: see
            `penstock.Shards`. ``epoch_size``, and with it ``steps``, ``bookmarks``, ``retries``, ``on_error``: see
            `penstock.Stream`. With ``epoch_size`` the result is a stream, and no index is needed, and none is used.

    Raises:
        ValueError: A file has no index and no counts. On reading: a line is not JSON, or a file has changed since it
            was indexed.
        FileNotFoundError: A file does not exist, or has no index while others have one.
    """
    return known_files(FORMAT, paths, index, counts, ahead, options)


def _offsets(file: BinaryIO, path: str) -> np.ndarray:
    """Where each non-blank line of a file begins, and where the file ends: int64, shape ``(lines + 1,)``."""
    found: list[np.ndarray] = []
    head = b""
    # How far the file was read; of the line that is unfinished there: where it begins, and b"x" unless it is blank so
    # far.
    at, begin, begun = 0, 0, b""
    while chunk := file.read(CHUNK):
        if len(head) < _HEAD:
            head = (head + chunk).lstrip()[:_HEAD]
        data, first = begun + chunk, at - len(begun)
        at += len(chunk)
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
        if len(ends):
            begins = first + _begins(data, ends)
            # the first of these lines may have begun in an earlier chunk
            found.append(np.where(begins == first, begin, begins))
            data, begin = data[int(ends[-1]) + 1 :], first + int(ends[-1]) + 1
        begun = b"x" if data.strip() else b""
    offsets: np.ndarray = np.concatenate([*found, [begin, at] if begun else [at]])
    _check_first(head, path, alone=len(offsets) == 2)
    return offsets


def _begins(data: bytes, ends: np.ndarray) -> np.ndarray:
    begins = np.concatenate([[0], ends[:-1] + 1])
    blank = np.frombuffer(data, np.uint8)[begins] <= ord(" ")
    for line in np.flatnonzero(blank).tolist():
        blank[line] = not data[begins[line] : ends[line]].strip()
    kept: np.ndarray = begins[~blank]
    return kept


def _forward(path: str, expected: Stamp | None) -> Iterator[Any]:
    with whole(path, expected) as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        first_two = list(itertools.islice(lines, 2))
        if first_two:
            _check_first(first_two[0][1].lstrip()[:_HEAD], path, alone=len(first_two) == 1)
        for number, line in itertools.chain(first_two, lines):
            try:
                record = _loaded(line, path, number)
            except ValueError as exc:
                record = Unreadable(exc)
            yield record


def _check_first(head: bytes, path: str, *, alone: bool) -> None:
    """Refuse a file of another kind, and one that is one JSON array of objects, in one line or in several.

    Args:
        head: The beginning of the file after blank lines, at least of its first line.
        path: For the error.
        alone: There is no other line.
    """
    if kind := kind_of(head):  # before any count: what look like lines are none
        raise ValueError(f"{path} is not JSON Lines{kind}.")
    if _ARRAY.match(head) if alone else head.partition(b"\n")[0].strip() in (b"[", b"[{"):
        raise ValueError(
            f"{path} is one JSON array of records instead of a record in each line. Write them line by line: jq -c "
            f"'.[]' FILE > FILE.jsonl. If the array is meant as a single record, put it into an object: "
            f'{{"messages": […]}}.'
        )


def _parse(data: bytes, path: str, begin: int) -> Any:
    data = data.partition(b"\n")[0]  # blank lines follow, and JSON does not accept everything that counts as blank here
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        with decompressed(path) as file:
            lines_before = sum(file.read(min(CHUNK, begin - at)).count(b"\n") for at in range(0, begin, CHUNK))
        return _loaded(data, path, lines_before + 1)


def _loaded(line: bytes, path: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"line {number} of {path} is not JSON ({exc}): {line.rstrip()!r:.200}") from None


SUFFIXES = (".jsonl", ".ndjson", ".json")
FORMAT = Format("jsonl", _offsets, _forward, _parse)
