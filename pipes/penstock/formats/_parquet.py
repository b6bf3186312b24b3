"""Parquet files: a shard is a row group, or a file, and the footers count the rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, final

from penstock._streams.files import IN_USE, explain, opened, stamp
from penstock._streams.paths import Reach, extra, is_remote, kept_in, without_copy
from penstock._streams.shards import Shards
from penstock._streams.tables import WHOLE, Look, Piece, chosen_types, files_of, names_of, pieces_in

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from penstock._streams.files import Stamp
    from penstock._streams.paths import Paths
    from penstock._streams.shards import ShardOptions

_WHO: Final = "penstock.formats.parquet"
SUFFIXES: Final = (".parquet",)
LANES_BYTES: Final = 2**31
"""What the row groups that are open at a time may take, unless the user asks for more lanes."""
_PAGE_BYTES: Final = 2**21
_PAGE_ROWS: Final = 1024
"""A page ends once it has 1 MiB, but most writers look only after every 1024 rows."""
_BATCH_BYTES: Final = 2**21
_BUFFER_BYTES: Final = 2**18
_AT_ONCE: Final = 64
"""Rows made into Python values at a time."""


def parquet(
    paths: Paths,
    columns: Sequence[str] | None = None,
    *,
    unit: Literal["row_group", "file"] = "row_group",
    lanes: int | None = None,
    window: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_cache_size: int | str | None = None,
    ahead: int = 1,
    **options: Unpack[ShardOptions],
) -> Shards:
    """Parquet files as one dataset, in which a shard is a row group or a file. A sample is a dict of Python values, as pyarrow's ``to_pylist`` makes it.

    The footers count the rows. They are read here, those of many files in parallel. A row group is read front to back and takes a few MiB while it is open: a
    page of each column, compressed and decompressed. If its writer made one page of it, as with large images, that is all of the row group, twice.

    Args:
        paths: See `expanded`. Every file must have the same columns, of the same types.
        columns: Read only these; ``"a.b"`` is the field b of the column a. Default: all.
        unit: What a shard is: ``"row_group"``, or ``"file"``, all row groups of a file one after another. Shards are what is shuffled, what lanes take turns
            at, and where ``steps`` end: with files a `Pack` leaves fewer half-empty rows, and with row groups there are more shards for workers and ranks, and a resume
            reads less again. It decides the order, so a state of one is refused by the other.
        lanes: See `Shards`. Default: as there, unless so many would take more than 2 GiB by an estimate from the footers; then as many as fit, also
            without a shuffle.
        window: See `Shards`.
        storage_options: For the file system of fsspec that reads paths with ``://``: keys, an endpoint, headers. Not part of the state.
        cache_dir: A folder on a disk of this host in which copies of the files are kept, for all of its processes and for later runs; None: none are. Only whole
            files whose version can be known are kept, and a file is copied when it is first opened. Not part of the state.
        max_cache_size: What all copies in that folder may take: bytes, or a text such as ``"200GB"``. What does not fit is read where it is.
        ahead: How many shards of each lane are copied before they are read, where copies are kept.
        **options: ``transform``, ``epoch_size``, ``steps``, ``bookmarks``, ``retries``, ``on_error``: see `Shards`. With ``epoch_size``,
            the counts are not used.

    Raises:
        ValueError: A file is not parquet or was cut short; its columns differ from those of the first file, or one of ``columns`` is missing; ``unit`` is
            neither. On loading: a file has changed.
        ImportError: pyarrow is not installed.
    """
    if unit not in ("row_group", "file"):
        raise ValueError(f"unit={unit!r} must be 'row_group' or 'file'.")
    extra("pyarrow.parquet", _WHO)
    whole = unit == "file"
    files = files_of(paths, "parquet", Reach(storage_options, cache_dir, max_cache_size, ahead))
    columns = names_of(columns)
    pieces, counts, lane_bytes = pieces_in(files, functools.partial(_look, columns=columns), options.get("epoch_size"), whole=whole)
    fit = LANES_BYTES // max(1, *lane_bytes)
    more: dict[str, Any] = {"name": "file", "settings": {"unit": unit}} if whole else {"name": "row group"}
    return Shards(pieces, _Rows(columns), counts=counts, lanes=lanes, most_lanes=fit, window=window, **more, **options)


@final
class _Rows:
    """Opens a row group, or all row groups of a file."""

    def __init__(self, columns: list[str] | None) -> None:
        self._columns = columns

    def __call__(self, piece: Piece, start: int = 0) -> Iterator[dict[str, Any]]:
        """The rows of a piece, from row ``start`` on."""
        piece.check()
        metadata = _metadata(piece.path, piece.stamp)
        file = _opened(piece.path, piece.stamp, metadata)
        try:
            for group in range(metadata.num_row_groups) if piece.number == WHOLE else [piece.number]:
                rows = metadata.row_group(group).num_rows
                if start < rows:
                    yield from self._rows(file, metadata, group, start)
                start = max(0, start - rows)
            piece.check()
        except Exception:
            explain(piece.path, piece.stamp, *IN_USE)
            raise
        finally:
            file.close(force=True)

    def _rows(self, file: Any, metadata: Any, group: int, start: int) -> Iterator[dict[str, Any]]:
        size, rows = sum(_sizes(metadata, group, self._columns)), metadata.row_group(group).num_rows
        at_once = min(max(16, _BATCH_BYTES * rows // max(1, size)), 1024)
        for batch in file.iter_batches(at_once, [group], self._columns, use_threads=False):  # the loader has workers of its own
            for begin in range(start, len(batch), _AT_ONCE):
                yield from batch.slice(begin, _AT_ONCE).to_pylist()
            start = max(0, start - len(batch))


def _look(path: str, columns: list[str] | None) -> Look:
    """``more``: what reading the longest of its row groups takes, at most, in bytes."""
    seen = stamp(path)
    metadata = _metadata(path, seen)
    known = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    types = chosen_types(path, metadata.schema.to_arrow_schema(), columns, known)
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    most = max(rows, default=0)
    sizes = _sizes(metadata, rows.index(most), columns) if most else []
    return Look(seen, types, rows, sum(2 * min(size, max(_PAGE_BYTES, _PAGE_ROWS * size // most)) for size in sizes))


def _sizes(metadata: Any, group: int, columns: list[str] | None) -> list[int]:
    """The bytes of each column of a row group."""
    about = metadata.row_group(group)
    stored = [about.column(number) for number in range(about.num_columns)]
    wanted = None if columns is None else tuple(f"{column}." for column in columns)
    return [column.total_uncompressed_size for column in stored if wanted is None or f"{column.path_in_schema}.".startswith(wanted)]


@functools.lru_cache(maxsize=64)
def _metadata(path: str, stamp: Stamp) -> Any:
    try:
        file = _opened(without_copy(path), stamp)  # without a copy of all files: the footer is a small part of one
    except ValueError as exc:
        raise ValueError(f"{path} is not a parquet file, or was cut short: {exc}") from exc
    try:
        return file.metadata
    finally:
        file.close(force=True)


def _opened(path: str, stamp: Stamp, metadata: Any = None) -> Any:
    where = opened(path, stamp) if is_remote(path) or kept_in(path) is not None else path
    # `pre_buffer` would hold all compressed bytes of the row group, and so would an unbuffered file.
    file = functools.partial(extra("pyarrow.parquet", _WHO).ParquetFile, page_checksum_verification=True)
    return file(where, metadata=metadata, pre_buffer=False, buffer_size=_BUFFER_BYTES)
