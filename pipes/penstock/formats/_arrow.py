"""Arrow IPC files and streams, memory-mapped. A shard is a record batch."""

from __future__ import annotations

import functools
import itertools
import os
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Unpack, final

import numpy as np

from penstock._files.files import kept_open, stamp
from penstock._files.first_look import ENOUGH, kind_of
from penstock._files.paths import Reach, extra, kept_in
from penstock._streams.stream import over
from penstock._streams.tables import Look, Piece, chosen_types, files_of, looked_at, names_of, pieces_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from penstock._files.paths import Paths
    from penstock._streams.sharded import FormatOptions
    from penstock._streams.shards import Shards
    from penstock._streams.stream import Stream

_WHO: Final = "penstock.formats.arrow"
SUFFIXES: Final = (".arrow", ".feather")
_MAGIC: Final = b"ARROW1"
"""The first bytes of the file format; the stream format has no such marker."""
_AT_ONCE: Final = 64
"""Rows converted to Python values at a time, but at most:"""
_BYTES_AT_ONCE: Final = 2**16


def arrow(paths: Paths, columns: Sequence[str] | None = None, **options: Unpack[FormatOptions]) -> Shards | Stream:
    """Read Arrow IPC files (also Feather version 2) and streams (``.arrow``, as Hugging Face writes them) as one
    dataset. A shard is a record batch.

    The files are memory-mapped, so rows are read by index and occupy only the operating system's page cache. (A
    compressed record batch is decompressed when it is opened.) A sample is a dict of Python values, as returned by
    pyarrow's ``to_pylist``. Do not truncate a file while it is being read: as with any mapped file, that kills the
    process.

    Args:
        paths: See `expanded`. Files must be on a local disk unless ``cache_dir`` is given. All files must have the same
            columns, with the same sorts of Python values.
        columns: Read only these. Default: all.
        **options: ``storage_options``, ``cache_dir``, ``max_cache_size``, ``lanes``, ``window``, ``transform``: see
            `penstock.Shards`. ``epoch_size``, and with it ``steps``, ``bookmarks``, ``retries``, ``on_error``: see
            `penstock.Stream`. With ``epoch_size`` the result is a stream, and the counts are not used. With
            ``cache_dir`` every file is copied when the dataset is built, because any row may come first;
            ``max_cache_size`` must be at least the total size of the files.

    Raises:
        ValueError: A file is not Arrow or was cut short; a file is not local and there is no room for a copy; its
            columns differ from those of the first file; or one of ``columns`` is missing. On loading: a file has
            changed.
        ImportError: pyarrow is not installed.
    """
    extra("pyarrow", _WHO)
    files = files_of(paths, "arrow", Reach.taken(options))
    _check_room(files)
    columns = names_of(columns)
    batches, counts, offsets = pieces_in(files, functools.partial(_look, columns=columns), options.get("epoch_size"))
    return over(batches, _RecordBatches(offsets, columns), counts, options, name="record batch")


def _check_room(files: list[str]) -> None:
    """Refuse files unless there is room for copies of all of them."""
    if (cache := kept_in(files[0])) is not None:
        needed = sum(seen.size for seen in looked_at(stamp, files))
        if needed > cache.most_bytes:
            raise ValueError(
                f"max_cache_size={cache.most_bytes:,} bytes, but the {len(files)} Arrow files take {needed:,}, and all "
                f"of them are memory-mapped. Raise the limit to at least that, or store them as parquet, which can be "
                f"read in parts."
            )


def _name_of(file: BinaryIO) -> str:
    """A path to an open file that stays valid even if the file is removed."""
    path = f"/dev/fd/{file.fileno()}"
    return path if os.path.exists(path) else file.name


@final
class _RecordBatches:
    """Opens a record batch."""

    def __init__(self, offsets: list[npt.NDArray[np.int64] | None], columns: list[str] | None) -> None:
        self._offsets = offsets
        self._columns = columns

    def __call__(self, piece: Piece) -> _Rows:
        piece.check()
        with kept_open(
            piece.path, piece.stamp
        ) as file:  # keeps the copy from being removed before it is mapped; after that, the mapping keeps it
            batch = _batch(_name_of(file), piece.number, self._offsets[piece.file])
        batch = batch if self._columns is None else batch.select(self._columns)
        _check(piece, batch)
        return _Rows(batch, piece.check)


@final
class _Rows:
    """The rows of a record batch, as dicts.

    Rows read in order are converted several at a time, which is much cheaper.
    """

    def __init__(self, batch: Any, check_version: Callable[[], None]) -> None:
        self._batch = batch
        self.check_version = check_version
        self._at_once = min(_AT_ONCE, max(1, _BYTES_AT_ONCE * len(batch) // max(1, batch.nbytes)))
        self._ready: dict[int, dict[str, Any]] = {}  # each row is returned once, because the caller may modify it
        self._next = 0  # the first row not converted yet

    def __len__(self) -> int:
        return len(self._batch)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number not in self._ready and number >= self._next:
            begin = self._next if number < self._next + self._at_once else number
            rows = self._batch.slice(begin, self._at_once).to_pylist()
            self._next = begin + len(rows)
            if len(self._ready) > 4 * self._at_once:  # other workers read those
                self._ready.clear()
            self._ready.update(zip(range(begin, self._next), rows, strict=True))
        row = self._ready.pop(number, None)
        return self._batch.slice(number, 1).to_pylist()[0] if row is None else row


def _look(path: str, columns: list[str] | None) -> Look:
    """``more``: where the record batches of a stream begin, if each can be read independently."""
    pyarrow = extra("pyarrow", _WHO)
    seen = stamp(path)
    held, head = kept_open(path, seen), b""
    try:
        with held, pyarrow.memory_map(_name_of(held)) as file:
            head = file.read(ENOUGH)
            in_file = head.startswith(_MAGIC)
            file.seek(8 if in_file else 0)  # the file format is a stream between two markers, plus an index
            schema = pyarrow.ipc.read_schema(file)
            fixed = (number for number, field in enumerate(schema) if pyarrow.types.is_primitive(field.type))
            # One column is enough to count the rows.
            options = pyarrow.ipc.IpcReadOptions(included_fields=[next(fixed, 0)] if len(schema) else [])
            file.seek(0)
            if in_file:
                reader = pyarrow.ipc.open_file(file, options=options)
                rows, offsets = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)], None
            else:
                rows, offsets = _counted(file, pyarrow.ipc.open_stream(file, options=options))
                file.seek(0)
                if (
                    pyarrow.ipc.open_stream(file).schema != schema
                ):  # of the other byte order, which only a stream that is read in sequence swaps
                    offsets = None
    except (OSError, ValueError, pyarrow.ArrowException) as exc:
        raise ValueError(
            f"{path} is not an Arrow file or stream, or was cut short{kind_of(head, 'arrow')}: {exc}"
        ) from exc
    return Look(seen, chosen_types(path, schema, columns, {}), rows, offsets)


def _counted(file: Any, stream: Any) -> tuple[list[int], npt.NDArray[np.int64] | None]:
    pyarrow = extra("pyarrow", _WHO)
    rows, offsets = [], [file.tell()]
    for batch in stream:
        rows.append(batch.num_rows)
        offsets.append(file.tell())
    file.seek(offsets[-1])
    # by the format's specification; before Arrow 0.15 four bytes
    if file.read(8) not in (b"\xff\xff\xff\xff\0\0\0\0", bytes(4), bytes(8)):
        raise ValueError("it has no end-of-stream marker. If it is complete, write it again and close the writer")
    file.seek(offsets[0])
    # dictionaries come first, and no batch can be read without them
    if rows and pyarrow.ipc.read_message(file).type != "record batch":
        return rows, None
    return rows, np.array(offsets[:-1], dtype=np.int64)


def _check(piece: Piece, batch: Any) -> None:
    """Refuse a batch whose offsets or indices point outside it, because following one would crash the process.

    Python checks top-level strings itself.

    Raises:
        ValueError: An offset or index is out of bounds.
    """
    pyarrow = extra("pyarrow", _WHO)
    as_bytes = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    try:
        batch.validate()  # checks the buffer sizes before anything reads them
        for column in batch.columns:
            column.view(as_bytes.get(column.type, column.type)).validate(full=True)
    except pyarrow.ArrowException as exc:  # one of them is an IndexError, which would end a loop silently
        raise ValueError(f"{piece.path} is damaged, in record batch {piece.number}: {exc}") from exc


def _batch(path: str, number: int, offsets: npt.NDArray[np.int64] | None) -> Any:
    """A record batch. It keeps its file mapped."""
    pyarrow = extra("pyarrow", _WHO)
    file = pyarrow.memory_map(path)
    if file.read(len(_MAGIC)) == _MAGIC:
        return pyarrow.ipc.open_file(file).get_batch(number)
    file.seek(0)
    if offsets is None:
        return next(itertools.islice(pyarrow.ipc.open_stream(file), number, None))
    schema = pyarrow.ipc.read_schema(file)
    file.seek(offsets[number])
    return pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(file), schema)
