"""Files with known record counts, as `Shards`: read by position if an index gives the record offsets, otherwise
forward.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, final

from penstock._files.files import (
    REINDEX,
    check_unchanged,
    explain,
    opened_copy,
    opened_there,
    stamp,
    stamp_lately,
    stamp_of,
)
from penstock._files.index_file import index_paths_of, read_header, read_offsets
from penstock._files.paths import Reach, compression, expanded, is_remote
from penstock._streams.stream import over
from penstock._streams.tables import looked_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

    from penstock._files.files import Stamp
    from penstock._files.index_file import Header
    from penstock._files.paths import Paths
    from penstock._streams.sharded import FormatOptions
    from penstock._streams.shards import Shards
    from penstock._streams.stream import Stream


class Format(NamedTuple):
    """How files of one format are read. The functions must be module-level, so that they can be pickled.

    Attributes:
        kind: The name of the format in its indices.
        offsets: Where each record of an open file begins, and where the last one ends: int64, shape ``(records + 1,)``.
            Called with the file and its path.
        forward: Reads the records of a file from its beginning, from the expected version, or from the current one if
            None is expected.
        parse: Decodes a record from its bytes, the path, and its offset in the file.
    """

    kind: str
    offsets: Callable[[BinaryIO, str], np.ndarray]
    forward: Callable[[str, Stamp | None], Iterator[Any]]
    parse: Callable[[bytes, str, int], Any]


def known_files(
    format: Format,
    paths: Paths,
    index: str | os.PathLike[str] | None,
    counts: npt.ArrayLike | None,
    ahead: int,
    options: FormatOptions,
) -> Shards | Stream:
    """The records of files of a format, by their indices.

    With ``counts`` or an ``epoch_size`` they are read forward, and indices are ignored.

    Raises:
        ValueError: The counts are unknown, or an index is damaged.
        FileNotFoundError: A file does not exist, or has no index while others have one.
    """
    reach = Reach.taken(options, ahead)
    files = reach.of(expanded(paths, reach.storage_options))
    for path in files:
        if not is_remote(path) and os.path.isdir(path):
            raise ValueError(f"{path} is a folder. Pass the files in it: {os.path.join(path, f'*.{format.kind}')!r}.")
    indices = None
    if options.get("epoch_size") is not None:
        if index is not None:
            raise ValueError(
                "index= and epoch_size= exclude each other: an index counts the records, so that an epoch is all of "
                "them. Drop one of them."
            )
    elif counts is not None:
        if index is not None:
            raise ValueError(
                "index= and counts= exclude each other, because an index contains the counts. Drop one of them."
            )
    else:
        found, missing = _indexed(format, files, index_paths_of(files, index))
        if missing:
            _refuse(missing, len(files), index)
        counts, indices = [found[path][1].records for path in files], found
    opener = Opener(format, indices)
    return over(files, opener, counts, options, name=f"{format.kind} file")


@final
class Opener:
    """The ``open`` of `Shards` over files. A file is read by position if it has an index and is not compressed.

    Args:
        format: How the files are read.
        indices: The path of each file's index, and its header when the dataset was built: an index written later
            belongs to another version of the file. None: there are no indices.
    """

    by_fsspec = True
    """Remote paths are opened by fsspec."""

    def __init__(self, format: Format, indices: dict[str, tuple[str, Header]] | None) -> None:
        self._format = format
        self._indices = indices
        self.reads_forward = indices is None or any(map(compression, indices))

    def __call__(self, path: str, expected: Stamp | None = None) -> Any:
        if self._indices is None:
            return self._format.forward(path, expected)
        place, header = self._indices[path]
        if compression(path):
            check_unchanged(path, header.stamp, stamp_lately(path))
            return self._format.forward(path, header.stamp)
        return FileRecords(path, header.stamp, lambda _: _offsets(place, header, path), self._format.parse)


class FileRanges:
    """Reads any range of a file.

    Args:
        path: Path of the file.
        expected: The stamp that it must have.
        words: The reference time and the remedy for error messages, if they are not those of an index; see
            `check_unchanged`.

    Raises:
        ValueError: The file has changed.
    """

    def __init__(self, path: str, expected: Stamp, *words: str) -> None:
        self._path = path
        self._expected = expected
        self._words = words
        copy = opened_copy(path, expected)
        self._is_copy = copy is not None
        self._file = copy or opened_there(path, expected)
        self._is_local = isinstance(self._file, io.BufferedReader)
        try:
            self.check_version()
        except BaseException:
            self._file.close()
            raise

    def check_version(self) -> None:
        """Raise a `ValueError` unless this is still the file that was indexed, and the open file is the one under this
        name.
        """
        check_unchanged(
            self._path, self._expected, stamp_lately(self._path) if self._is_copy else stamp(self._path), *self._words
        )
        if not self._is_copy and not is_remote(self._path):
            check_unchanged(
                self._path, self._expected, stamp_of(self._path, os.fstat(self._file.fileno())), *self._words
            )

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` up to ``end``.

        Raises:
            ValueError: The file has become shorter than that.
        """
        if self._is_local:
            data = os.pread(self._file.fileno(), end - begin, begin)
            while 0 < len(data) < end - begin and (
                more := os.pread(self._file.fileno(), end - begin - len(data), begin + len(data))
            ):
                data += more  # one call reads at most 2 GiB
        else:
            self._file.seek(begin)
            try:
                data = self._file.read(end - begin)
            except Exception:
                explain(self._path, self._expected, *self._words)
                raise
        if len(data) < end - begin:
            self.check_version()
            remedy = self._words[-1] if self._words else f"If the change is intended, {REINDEX}."
            raise ValueError(f"{self._path} ends before byte {end}, so it was truncated while it was read. {remedy}")
        return data

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


@final
class FileRecords(FileRanges):
    """The records of one file, by position.

    Args:
        path: Path of the file.
        expected: The stamp that it must have.
        offsets: Where each record begins, and where the last one ends; called with the open file.
        parse: Decodes a record from its bytes, the path, and its offset.
        words: See `FileRanges`.
    """

    def __init__(
        self,
        path: str,
        expected: Stamp,
        offsets: Callable[[FileRanges], np.ndarray],
        parse: Callable[[bytes, str, int], Any],
        *words: str,
    ) -> None:
        super().__init__(path, expected, *words)
        self._parse = parse
        try:
            self._offsets = offsets(self)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Any:
        begin, end = int(self._offsets[number]), int(self._offsets[number + 1])
        return self._parse(self.read(begin, end), self._path, begin)


def _offsets(place: str, header: Header, path: str) -> np.ndarray:
    """The offsets of an index, which lie inside the file that it is of."""
    offsets = read_offsets(place, header)
    if offsets[-1] > header.stamp.size:
        raise ValueError(
            f"{place} is damaged: its offsets end at {offsets[-1]}, but {path} has {header.stamp.size} bytes. {REINDEX}"
        )
    return offsets


def _indexed(format: Format, files: list[str], places: list[str]) -> tuple[dict[str, tuple[str, Header]], list[str]]:
    """The indices of the files that have one, and the other files."""
    found, missing = {}, []
    for path, place, header in zip(files, places, looked_at(_header_or_none, places), strict=True):
        if header is None:
            missing.append(path)
        elif header.kind == format.kind:
            found[path] = place, header
        else:
            raise ValueError(
                f"{place} is the index of a {header.kind} file, but {path} is being read as {format.kind}. Use the "
                f"function for {header.kind} files."
            )
    return found, missing


def _header_or_none(place: str) -> Header | None:
    try:
        return read_header(place)
    except FileNotFoundError:
        return None


def _refuse(missing: list[str], n: int, index: str | os.PathLike[str] | None) -> None:
    stamp(missing[0])  # raises if the file itself does not exist
    command = (
        f"python -m penstock index {missing[0]}"
        + (" …" if len(missing) > 1 else "")
        + ("" if index is None else f" --index {index}")
    )
    if len(missing) < n:
        raise FileNotFoundError(
            f"{len(missing)} of {n} files have no index, for example {missing[0]}, but the others have one. Write it "
            f"once: {command}"
        )
    raise ValueError(
        f"the number of records in {missing[0]} is unknown. Write an index once: {command}. Or pass counts=, the "
        f"number of records in each file. Or read the files without counting them, and pass epoch_size=, the number of "
        f"items in an epoch."
    )
