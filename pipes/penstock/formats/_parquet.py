"""Parquet files: a shard is a row group or a file, and the footers hold the row counts."""

from __future__ import annotations

import functools
import io
import os
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, final

from penstock._files.files import IN_USE, explain, opened, stamp
from penstock._files.first_look import ENOUGH, kind_of
from penstock._files.paths import Reach, extra, is_remote, kept_in, without_copy
from penstock._streams.stream import over
from penstock._streams.tables import (
    WHOLE,
    Look,
    Piece,
    chosen_types,
    files_of,
    folder_types,
    in_folders,
    names_of,
    pieces_in,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock._files.files import Stamp
    from penstock._files.paths import Paths
    from penstock._streams.sharded import FormatOptions
    from penstock._streams.shards import Shards
    from penstock._streams.stream import Stream

_WHO: Final = "penstock.formats.parquet"
SUFFIXES: Final = (".parquet",)
LANES_BYTES: Final = 2**31
"""Memory that the open row groups may take, unless the user asks for more lanes."""
_PAGE_BYTES: Final = 2**21
_PAGE_ROWS: Final = 1024
"""A page ends once it has 1 MiB, but most writers check only every 1024 rows."""
_BATCH_BYTES: Final = 2**21
_BUFFER_BYTES: Final = 2**18
_SIGNATURE_BYTES: Final = 28
"""They follow a readable footer if columns are encrypted (Parquet Modular Encryption). pyarrow ends the process when it
is asked about such a column.
"""
_AT_ONCE: Final = 64
"""Rows converted to Python values at a time."""


def parquet(
    paths: Paths,
    columns: Sequence[str] | None = None,
    *,
    unit: Literal["row_group", "file"] = "row_group",
    ahead: int = 1,
    **options: Unpack[FormatOptions],
) -> Shards | Stream:
    """Read Parquet files as one dataset.

    A shard is a row group or a file. A sample is a dict of Python values, as returned by pyarrow's ``to_pylist``.

    The row counts come from the footers, which are read when the dataset is built, in parallel for many files. A row
    group is read front to back and takes a few MiB while it is open: one page of each column, compressed and
    decompressed. If its writer put it into a single page, as with large images, that is the whole row group, twice.

    Args:
        paths: See `expanded`. All files must have the same columns, with the same sorts of Python values; folders such
            as ``lang=en`` are columns, too.
        columns: Read only these; ``"a.b"`` is the field b of the column a. Default: all.
        unit: What a shard is: ``"row_group"``, or ``"file"`` for all row groups of a file in sequence. Shards are the
            unit of shuffling, of the turns that lanes take, and of ``steps``. With files a `Pack` leaves fewer
            half-empty rows; with row groups there are more shards for workers and ranks, and a resume rereads less. The
            unit determines the order, so a state saved with one is refused by the other.
        ahead: How many shards per lane to copy before they are read, if copies are kept.
        **options: ``storage_options``, ``cache_dir``, ``max_cache_size``, ``lanes``, ``window``, ``transform``: see
            `penstock.Shards`. ``epoch_size``, and with it ``steps``, ``bookmarks``, ``retries``, ``on_error``: see
            `penstock.Stream`. With ``epoch_size`` the result is a stream, and the counts are not used. The default for
            ``lanes`` is as there, unless so many lanes would take more than 2 GiB, as estimated from the footers; then
            as many as fit, also without a shuffle.

    Raises:
        ValueError: A file is not Parquet, is encrypted or was cut short; its columns differ from those of the first
            file; one of ``columns`` is missing; or ``unit`` is invalid. On loading: a file has changed.
        ImportError: pyarrow is not installed.
    """
    if unit not in ("row_group", "file"):
        raise ValueError(f"unit={unit!r} must be 'row_group' or 'file'.")
    extra("pyarrow.parquet", _WHO)
    whole = unit == "file"
    files = files_of(paths, "parquet", Reach.taken(options, ahead))
    columns, folders = names_of(columns), folder_types(files)
    pieces, counts, lane_bytes = pieces_in(
        files, functools.partial(_look, columns=columns, folders=folders), options.get("epoch_size"), whole=whole
    )
    fit = LANES_BYTES // max(1, *lane_bytes)
    more: dict[str, Any] = {"name": "file", "settings": {"unit": unit}} if whole else {"name": "row group"}
    return over(pieces, _Rows(columns, folders), counts, options, most_lanes=fit, **more)


@final
class _Rows:
    """Opens a row group, or all row groups of a file."""

    def __init__(self, columns: list[str] | None, folders: dict[str, Any]) -> None:
        self._columns = columns
        self._folders = folders

    def __call__(self, piece: Piece, start: int = 0) -> Iterator[dict[str, Any]]:
        """The rows of a piece, starting with row ``start``."""
        piece.check()
        metadata = _metadata(piece.path, piece.stamp)
        file = _opened(piece.path, piece.stamp, metadata)
        try:
            more = in_folders(self._folders, piece.path, file.schema_arrow.names, self._columns)
            for group in range(metadata.num_row_groups) if piece.number == WHOLE else [piece.number]:
                rows = metadata.row_group(group).num_rows
                if start < rows:
                    yield from self._rows(file, metadata, group, start, more)
                start = max(0, start - rows)
            piece.check()
        except Exception:
            explain(piece.path, piece.stamp, *IN_USE)
            raise
        finally:
            file.close(force=True)

    def _rows(
        self, file: Any, metadata: Any, group: int, start: int, more: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        columns = None if self._columns is None else [name for name in self._columns if name not in more]
        size, rows = sum(_sizes(metadata, group, columns)), metadata.row_group(group).num_rows
        at_once = min(max(16, _BATCH_BYTES * rows // max(1, size)), 1024)
        for batch in file.iter_batches(at_once, [group], columns, use_threads=False):  # the loader has its own workers
            for begin in range(start, len(batch), _AT_ONCE):
                found = batch.slice(begin, _AT_ONCE).to_pylist()
                yield from [{**row, **more} for row in found] if more else found
            start = max(0, start - len(batch))


def _look(path: str, columns: list[str] | None, folders: dict[str, Any]) -> Look:
    """``more``: an upper bound, in bytes, on the memory for reading its longest row group."""
    seen = stamp(path)
    metadata = _metadata(path, seen)
    types = chosen_types(
        path,
        metadata.schema.to_arrow_schema(),
        columns,
        folders,
        # under a name that it does not know, pyarrow reads nothing, in silence
        lambda name: _reader(io.BytesIO(), metadata).read_row_groups([], [name]).schema.names,
    )
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    most = max(rows, default=0)
    sizes = _sizes(metadata, rows.index(most), columns) if most else []
    return Look(seen, types, rows, sum(2 * min(size, max(_PAGE_BYTES, _PAGE_ROWS * size // most)) for size in sizes))


def _sizes(metadata: Any, group: int, columns: list[str] | None) -> list[int]:
    """The bytes of each column of a row group."""
    about = metadata.row_group(group)
    stored = [about.column(number) for number in range(about.num_columns)]
    wanted = None if columns is None else tuple(f"{column}." for column in columns)
    return [
        column.total_uncompressed_size
        for column in stored
        if wanted is None or f"{column.path_in_schema}.".startswith(wanted)
    ]


@functools.lru_cache(maxsize=64)
def _metadata(path: str, stamp: Stamp) -> Any:
    if stamp.size < 0:
        raise ValueError(
            f"{path} cannot be read in parts, because its server does not report its size, as with Content-Encoding. "
            f"Store it without one, or download it first."
        )
    with opened(without_copy(path), stamp) as raw:  # no copy, because the footer is a small part of the file
        try:
            metadata = _reader(raw).metadata
        except ValueError as exc:
            raw.seek(0)
            raise ValueError(
                f"{path} is not a parquet file, or was cut short{kind_of(raw.read(ENOUGH), 'parquet')}: {exc}"
            ) from exc
        raw.seek(-8, os.SEEK_END)
        if int.from_bytes(raw.read(4), "little") == metadata.serialized_size + _SIGNATURE_BYTES:
            raise ValueError(
                f"{path} has encrypted columns. Write it again without encryption: pyarrow reads it with the keys."
            )
    return metadata


def _opened(path: str, stamp: Stamp, metadata: Any) -> Any:
    by_us = is_remote(path) or kept_in(path) is not None
    return _reader(opened(path, stamp) if by_us else extra("pyarrow", _WHO).OSFile(os.fsencode(path)), metadata)


def _reader(where: Any, metadata: Any = None) -> Any:
    # `pre_buffer` would hold all compressed bytes of the row group in memory, and so would an unbuffered file.
    file = functools.partial(extra("pyarrow.parquet", _WHO).ParquetFile, page_checksum_verification=True)
    return file(where, metadata=metadata, pre_buffer=False, buffer_size=_BUFFER_BYTES)
