"""MDS, the format of MosaicML Streaming's ``MDSWriter``: an ``index.json`` with the record counts, and shards that
begin with the offset of each record.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import struct
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Unpack, final

import numpy as np

from penstock._files.files import IN_USE, stamp, stamp_lately, whole
from penstock._files.paths import Reach, bare, beside, compression, expanded, extra, is_remote
from penstock._files.unpacking import Unpacked
from penstock._streams.forward_reader import Unreadable
from penstock._streams.known_files import FileRanges, FileRecords
from penstock._streams.stream import over
from penstock._streams.tables import looked_at
from penstock.formats._mds_values import decoder, runs_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock._files.files import Stamp
    from penstock._files.paths import Paths
    from penstock._streams.sharded import FormatOptions
    from penstock._streams.shards import Shards
    from penstock._streams.stream import Stream

SUFFIXES: Final = (".mds",)
_MOST_INDEX: Final = 2**30
"""Largest ``index.json`` in bytes; enough for a million shards."""
_LIMIT: Final = 2**32
"""Largest shard in bytes before compression: its offsets are 32-bit."""
_CHUNK: Final = 2**23


def mds(
    paths: Paths,
    *,
    validate_hash: str | None = None,
    trust: bool = False,
    ahead: int = 1,
    **options: Unpack[FormatOptions],
) -> Shards | Stream:
    """Read datasets written by MosaicML Streaming's ``MDSWriter``.

    A sample is the dict that its ``StreamingDataset`` returns; that package is not needed.

    The record counts are in ``index.json`` and the record offsets are at the front of each shard, so there is nothing
    to index. Raw shards are read by position. Compressed shards (zstd, gz, bz2, br, snappy) are read forward, unless a
    local folder also has the raw ones. ``jpeg`` and ``png`` values are Pillow images, decoded when their pixels are
    first accessed. Arrays are writable. Encodings unknown to penstock are decoded by the package ``streaming``.

    Args:
        paths: The folder with the ``index.json``, a pattern such as ``"data/*"``, or a list of them, read as one
            dataset in that order. Paths with ``://`` are read through fsspec.
        validate_hash: The name of a hash that was written (``MDSWriter(hashes=…)``), such as ``"sha1"`` or ``"xxh64"``.
            Each process verifies the hash of each shard when it first opens it, which takes a full read of the shard.
        trust: Also decode columns with the encoding ``pkl``. Unpickling runs whatever code is in the data.
        ahead: How many shards per lane to copy before they are read, if copies are kept.
        **options: ``storage_options``, ``cache_dir``, ``max_cache_size``, ``lanes``, ``window``, ``transform``: see
            `penstock.Shards`. ``epoch_size``, and with it ``steps``, ``bookmarks``, ``retries``, ``on_error``: see
            `penstock.Stream`. With ``epoch_size`` the result is a stream, and the counts are not used. A shard is
            copied unchanged when it is first opened.

    Raises:
        ValueError: An ``index.json`` is damaged or has another format; a column is ``pkl`` and ``trust`` is False; the
            size of a shard differs from its index; or the hash was not written. On reading: a shard is damaged, its
            hash is wrong, or it has changed since the dataset was built.
        FileNotFoundError: A folder has no ``index.json``, or a shard is missing.
        ImportError: A package for an encoding, a compression or a hash is not installed.
    """
    reach = Reach.taken(options, ahead)
    folders = expanded(paths, reach.storage_options)
    if not folders:
        raise ValueError(f"paths={paths!r:.80} names no folder.")
    shards = [shard for found in looked_at(_shards_in, folders) for shard in found]
    for columns, shard in {shard.columns: shard for shard in shards}.items():
        columns.check(shard.place, trust)
    for shard in {shard.packed: shard for shard in shards}.values():
        _check_unpacking(shard)
    if validate_hash is not None:
        for shard in shards:
            _check_hash_is_known(shard, validate_hash)
    files = reach.of([shard.path for shard in shards])
    is_counted = options.get("epoch_size") is None
    stamps = looked_at(stamp, files) if is_counted else None
    for shard, then in zip(shards, stamps or (), strict=bool(stamps)):
        shard.check_size(then)
    opener = _Opener(
        {shard.path: shard for shard in shards}, dict(zip(files, stamps or (), strict=False)), validate_hash
    )
    counts = [shard.records for shard in shards] if is_counted else None
    return over(files, opener, counts, options, name="MDS shard")


class _Shard(NamedTuple):
    """A shard as described by ``index.json``.

    Attributes:
        path: Path of the shard.
        place: Path of the ``index.json``.
        records: Number of records.
        nbytes: Size of the file.
        raw_nbytes: Size before compression.
        packed: The compression, such as ``"zstd"``; empty if there is none.
        hashes: Hexadecimal digests of the file, by algorithm name.
        columns: The columns of a record.
    """

    path: str
    place: str
    records: int
    nbytes: int
    raw_nbytes: int
    packed: str
    hashes: dict[str, str]
    columns: _Columns

    def check_size(self, then: Stamp) -> None:
        """Refuse a file whose size differs from the index."""
        if then.size not in (-1, self.nbytes):
            raise ValueError(
                f"{self.path} has {then.size} bytes, but {self.place} says {self.nbytes}. Either they were not written "
                f"together, or the shard was cut short. Copy both again."
            )

    def damaged(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is damaged or not the shard that {self.place} describes: {why}. Copy both again."
        )

    def offsets(self, head: bytes) -> np.ndarray:
        """Where each record begins in the shard, and where the last one ends: uint32, shape ``(records + 1,)``.

        Args:
            head: The first bytes of the shard: its number of records and these offsets.
        """
        records, *_ = struct.unpack_from("<I", head)
        if records != self.records:
            raise self.damaged(f"it has {records} records instead of {self.records}")
        offsets = np.frombuffer(head, "<u4", offset=4)
        if offsets[0] < len(head) or offsets[-1] != self.raw_nbytes or (offsets[1:] < offsets[:-1]).any():
            raise self.damaged(
                f"its records do not follow one another between byte {len(head)} and byte {self.raw_nbytes}"
            )
        return offsets

    def offsets_in(self, file: FileRanges) -> np.ndarray:
        """`offsets`, from the open file."""
        return self.offsets(file.read(0, self.head_nbytes))

    @property
    def head_nbytes(self) -> int:
        return 4 * (self.records + 2)


class _Columns(NamedTuple):
    """The columns of the records in a shard.

    Attributes:
        names: Names of the columns.
        encodings: Encodings of their values.
        sizes: Bytes per value; 0 if the size varies, in which case it is stored at the front of each record.
    """

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int, ...]

    def check(self, index: str, trust: bool) -> None:
        """Refuse columns that cannot be decoded, or must not be without ``trust``."""
        for name, encoding in zip(self.names, self.encodings, strict=True):
            try:
                unsafe = runs_code(encoding)
            except ValueError as exc:
                raise ValueError(f"{index}: the column {name!r} cannot be decoded: {exc}") from exc
            if unsafe and not trust:
                raise ValueError(
                    f"{index}: the column {name!r} is pickled (pkl), and unpickling runs whatever code is in the data. "
                    f"If you trust its author, pass trust=True. Otherwise write the dataset again with an encoding "
                    f"that holds only data, such as json, ndarray or bytes."
                )


@functools.lru_cache(64)
def _reader(of: _Columns) -> Callable[[bytes, _Shard, int], dict[str, Any]]:
    """A function that decodes a record from its bytes, its shard and its offset."""
    columns = [(name, size, decoder(encoding)) for name, encoding, size in zip(*of, strict=True)]
    head = struct.Struct(f"<{of.sizes.count(0)}I")
    least = head.size + sum(of.sizes)

    def read(data: bytes, shard: _Shard, begin: int) -> dict[str, Any]:
        if len(data) < least or least + sum(lengths := head.unpack_from(data)) != len(data):
            raise shard.damaged(f"the record at byte {begin} does not end where its columns end")
        record, at, varying = {}, head.size, iter(lengths)
        name = ""
        try:
            for name, size, decode in columns:
                end = at + (size or next(varying))
                record[name] = decode(data[at:end])
                at = end
        except (ImportError, MemoryError):
            raise
        except Exception as exc:  # of any type: an IndexError would end the shard silently
            encoding = of.encodings[of.names.index(name)]
            raise shard.damaged(
                f"{name!r} of the record at byte {begin} is not a valid {encoding} ({type(exc).__name__}: {exc})"
            ) from exc
        return record

    return read


# index.json


def _shards_in(folder: str) -> list[_Shard]:
    """The shards of a folder, from its ``index.json``."""
    index = _inside(folder, "index.json")
    try:
        then = stamp(index)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise FileNotFoundError(
            f"{index} does not exist. MDSWriter writes it last, and it lists the shards. Pass the folder that contains "
            f"it, or several folders as a list or a pattern."
        ) from exc
    try:
        if then.size > _MOST_INDEX:
            raise ValueError(f"{then.size} bytes are too large")
        with whole(index, then) as file:
            said = json.loads(file.read())
        if not isinstance(said, dict) or said.get("version") != 2 or not isinstance(said.get("shards"), list):
            raise ValueError("it must be a dict of version 2, with a list of shards")
        # one object for all shards with equal columns, because it is sent to every worker
        known: dict[_Columns, _Columns] = {}
        return [_shard(one, folder, index, known) for one in said["shards"]]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"{index} is damaged or not an MDS index: {type(exc).__name__}: {exc}") from exc


def _shard(said: Any, folder: str, index: str, known: dict[_Columns, _Columns]) -> _Shard:
    if said["format"] != "mds" or said["version"] != 2:
        raise ValueError(
            f"a shard has the format {said['format']!r:.99}, version {said['version']!r:.99}, but only mds of version "
            f"2 can be read"
        )
    found = _Columns(
        tuple(said["column_names"]), tuple(said["column_encodings"]), tuple(size or 0 for size in said["column_sizes"])
    )
    if (
        len({*map(len, found)}) > 1
        or len({*found.names}) < len(found.names)
        or not all(isinstance(one, str) for one in found[0] + found[1])
    ):
        raise ValueError(
            f"the columns of a shard are not different names, with their encodings and sizes: {found!r:.300}"
        )
    records, sizes = said["samples"], found.sizes
    path, raw_nbytes, hashes = _file(said["raw_data"], folder)
    if not all(
        type(number) is int and 0 <= number < _LIMIT for number in (records, raw_nbytes, *sizes)
    ) or raw_nbytes < 4 * (records + 2):
        raise ValueError(
            f"a shard of {records!r:.99} records and {raw_nbytes} bytes, whose columns have {sizes!r:.99} bytes, "
            f"cannot be"
        )
    nbytes, packed = raw_nbytes, ""
    if said.get("zip_data") is not None and (is_remote(folder) or not os.path.exists(path)):
        packed = str(said["compression"]).partition(":")[0]
        path, nbytes, hashes = _file(said["zip_data"], folder)
    if _PACKED.get(packed) != compression(path):
        raise ValueError(
            f"{path} has the compression {packed or 'none'} according to the index, but its name says otherwise"
        )
    return _Shard(path, index, records, nbytes, raw_nbytes, packed, hashes, known.setdefault(found, found))


_PACKED: Final = {"": "", "gz": ".gz", "bz2": ".bz2", "zstd": ".zst", "br": "", "snappy": ""}
"""The ending by which `whole` recognizes each compression."""


def _file(said: Any, folder: str) -> tuple[str, int, dict[str, str]]:
    """Path, size and hashes of a file in the folder or one of its subfolders."""
    name, nbytes, hashes = said["basename"], said["bytes"], said.get("hashes", {})
    if (
        not name.isprintable()
        or ":" in name
        or {"", ".", ".."}.intersection(name.split("/"))
        or type(nbytes) is not int
        or nbytes < 0
    ):
        raise ValueError(f"{said!r:.200} does not name a file in that folder, with its size")
    return _inside(folder, name), nbytes, {**hashes}


def _inside(folder: str, name: str) -> str:
    if not is_remote(folder):
        return os.path.join(folder, name)
    return beside(folder, folder.replace(bare(folder), f"{bare(folder).rstrip('/')}/{name}", 1))


# Shards


@final
class _Opener:
    """The ``open`` of `Shards`: raw shards are read by position, compressed or uncounted ones forward.

    Args:
        shards: The shards by path.
        stamps: Stamps of the counted files from when the dataset was built.
        validate_hash: See `mds`.
    """

    by_fsspec = True
    """Remote paths are opened by fsspec."""

    def __init__(self, shards: dict[str, _Shard], stamps: dict[str, Stamp], validate_hash: str | None) -> None:
        self._shards = shards
        self._stamps = stamps
        self._validate_hash = validate_hash
        self._validated: dict[str, Stamp] = {}
        self.reads_forward = not stamps or any(shard.packed for shard in shards.values())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_validated": {}}

    def __call__(self, path: str, expected: Stamp | None = None) -> FileRecords | Iterator[Any]:
        shard, then = self._shards[path], self._stamps.get(path) or expected or stamp_lately(path)
        shard.check_size(then)
        if self._validate_hash is not None and self._validated.get(path) != then:
            _validate(shard, path, then, self._validate_hash)
            self._validated[path] = then
        read = _reader(shard.columns)
        if path in self._stamps and not shard.packed:
            return FileRecords(path, then, shard.offsets_in, lambda data, _, begin: read(data, shard, begin), *_CHANGED)
        return _forward(shard, path, then, read)


_CHANGED: Final = ("since the dataset was built", IN_USE[1])


def _forward(
    shard: _Shard, path: str, then: Stamp, read: Callable[[bytes, _Shard, int], dict[str, Any]]
) -> Iterator[Any]:
    """The records of a shard, read from its beginning."""
    with whole(path, then) as file:
        raw = _unpacked(file, shard)
        offsets = shard.offsets(_exactly(raw, shard.head_nbytes, shard))
        _exactly(raw, int(offsets[0]) - shard.head_nbytes, shard)  # the writer's configuration
        for number in range(shard.records):
            begin, end = offsets[number : number + 2].tolist()
            data = _exactly(raw, end - begin, shard)
            try:
                record: Any = read(data, shard, begin)
            except ValueError as exc:
                record = Unreadable(exc)
            yield record
        if raw.read(1):
            raise shard.damaged(f"it has more than its {shard.raw_nbytes} bytes")


def _exactly(file: BinaryIO, nbytes: int, shard: _Shard) -> bytes:
    parts, left = [], nbytes
    while left and (part := file.read(min(left, _CHUNK))):  # allocates no more memory than there are bytes
        parts.append(part)
        left -= len(part)
    if left:
        raise shard.damaged(f"it ends {left} bytes before the end of a record")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unpacked(file: BinaryIO, shard: _Shard) -> BinaryIO:
    """The decompressed bytes of a shard; `whole` has already handled the compressions it supports."""
    if shard.packed == "br":
        return io.BufferedReader(Unpacked(file, shard.path, _Brotli), 2**18)
    return io.BytesIO(_unsnapped(file.read(), shard)) if shard.packed == "snappy" else file


class _Brotli:
    """Decompresses brotli through the interface that `Unpacked` expects."""

    unused_data = b""

    def __init__(self) -> None:
        self._frame = _brotli("brotli").Decompressor()

    @property
    def eof(self) -> bool:
        found: bool = self._frame.is_finished()
        return found

    @property
    def needs_input(self) -> bool:
        found: bool = self._frame.can_accept_more_data()
        return found

    def decompress(self, data: bytes) -> bytes:
        found: bytes = self._frame.process(data, output_buffer_limit=2**18)
        return found


def _brotli(path: str) -> Any:
    module = extra("brotli", f"{path!r}", package := "brotli>=1.2")
    if not hasattr(module.Decompressor, "can_accept_more_data"):
        raise ImportError(
            f"{path!r} needs a newer version of the package brotli: pip install '{package}'", name="brotli"
        )
    return module


def _snappy(path: str) -> Any:
    return extra("snappy", f"{path!r}", "python-snappy")


def _unsnapped(data: bytes, shard: _Shard) -> bytes:
    """The bytes of a shard in snappy's raw format, which begins with the decompressed size and can only be decompressed
    in one piece.
    """
    stated = 0
    for number, byte in enumerate(data[:5]):
        stated |= (byte & 127) << (7 * number)
        if byte < 128:
            break
    if stated != shard.raw_nbytes:
        raise shard.damaged(f"it states a decompressed size of {stated} bytes instead of {shard.raw_nbytes}")
    try:
        found: bytes = _snappy(shard.path).decompress(data)
    except MemoryError:
        raise
    except Exception as exc:  # the library has its own exception types
        raise shard.damaged(f"it cannot be decompressed ({exc})") from exc
    return found


def _check_unpacking(shard: _Shard) -> None:
    """Fail early if the package that decompresses this shard is not installed."""
    if shard.packed == "zstd":
        extra("zstandard", f"{shard.path!r}")
    elif shard.packed in (found := {"br": _brotli, "snappy": _snappy}):
        found[shard.packed](shard.path)


def _check_hash_is_known(shard: _Shard, algorithm: str) -> None:
    if algorithm not in shard.hashes:
        raise ValueError(
            f"validate_hash={algorithm!r}, but {shard.place} has {', '.join(map(repr, shard.hashes)) or 'no hash'} for "
            f"{shard.path}. Choose a hash that was written, or None to compare only sizes."
        )
    _new_hash(algorithm)


def _new_hash(algorithm: str) -> Any:
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake"):
        return hashlib.new(algorithm, usedforsecurity=False)
    xxhash = extra("xxhash", f"validate_hash={algorithm!r}")
    if algorithm not in xxhash.algorithms_available:
        raise ValueError(
            f"validate_hash={algorithm!r} is a hash that neither hashlib nor xxhash supports. Choose another one that "
            f"was written."
        )
    return getattr(xxhash, algorithm)()


def _validate(shard: _Shard, path: str, then: Stamp, algorithm: str) -> None:
    file, found = FileRanges(path, then, *_CHANGED), _new_hash(algorithm)
    try:
        for begin in range(0, shard.nbytes, _CHUNK):
            found.update(file.read(begin, min(begin + _CHUNK, shard.nbytes)))
    finally:
        file.close()
    if found.hexdigest() != shard.hashes[algorithm]:
        raise shard.damaged(f"its {algorithm} is {found.hexdigest()} instead of {shard.hashes[algorithm]!r:.200}")
