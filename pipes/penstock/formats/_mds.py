"""MDS, the files that MosaicML Streaming's ``MDSWriter`` writes: an ``index.json`` that counts the records, and shards that begin with where each record is."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Unpack, final

import numpy as np

from penstock._streams.files import IN_USE, stamp, stamp_lately, whole
from penstock._streams.forward_reader import Unreadable
from penstock._streams.known_files import FileRanges
from penstock._streams.paths import Reach, bare, beside, compression, expanded, extra, is_remote
from penstock._streams.shards import Shards
from penstock._streams.tables import looked_at
from penstock._streams.unpacking import Unpacked
from penstock.formats._mds_values import decoder, needed, runs_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock._streams.files import Stamp
    from penstock._streams.paths import Paths
    from penstock._streams.shards import ShardOptions

SUFFIXES: Final = (".mds",)
_MOST_INDEX: Final = 2**30
"""Bytes of an ``index.json``: a million shards."""
_LIMIT: Final = 2**32
"""Bytes of a shard before compression: its offsets are 32-bit."""
_CHUNK: Final = 2**23


def mds(
    paths: Paths,
    *,
    validate_hash: str | None = None,
    trust: bool = False,
    lanes: int | None = None,
    window: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_cache_size: int | str | None = None,
    ahead: int = 1,
    **options: Unpack[ShardOptions],
) -> Shards:
    """The samples of datasets that MosaicML Streaming's ``MDSWriter`` wrote: dicts of the values that its ``StreamingDataset`` returns, without that package.

    The counts are in ``index.json``, and where each sample begins is at the front of its shard, so there is nothing to index. Raw shards are read by position.
    Compressed ones (zstd, gz, bz2, br, snappy) are read forward, unless a local folder has the raw ones, too. ``jpeg`` and ``png`` are images of Pillow, decoded when
    their pixels are asked for; arrays can be written to. Encodings that are not known here are left to the package ``streaming``.

    Args:
        paths: The folder with the ``index.json``, a pattern such as ``"data/*"``, or a list of them, which are read as one dataset, in that order; with ``://``, fsspec
            reads them.
        validate_hash: A hash that was written (``MDSWriter(hashes=…)``), such as ``"sha1"`` or ``"xxh64"``. Each process compares that of each shard when it opens the shard for
            the first time, for which it reads all of it.
        trust: Decode columns of the encoding ``pkl``, too. Unpickling runs whatever code is in the data.
        lanes: See `penstock.Shards`.
        window: See `penstock.Shards`.
        storage_options: For the file system of fsspec that reads paths with ``://``: keys, an endpoint, headers. Not part of the state.
        cache_dir: A folder on a disk of this host in which copies of the shards are kept, for all of its processes and for later runs; None: none are. A shard is copied,
            as it is, when it is first opened. Not part of the state.
        max_cache_size: What all copies in that folder may take: bytes, or a text such as ``"200GB"``. What does not fit is read where it is.
        ahead: How many shards of each lane are copied before they are read, where copies are kept.
        **options: ``transform``, ``epoch_size``, ``steps``, ``bookmarks``, ``retries``, ``on_error``: see `penstock.Shards`. With ``epoch_size``,
            the counts are not used.

    Raises:
        ValueError: An ``index.json`` is damaged or of another format; a column is ``pkl``, without ``trust``; a shard has another size than its index says, or not that hash.
            On reading: a shard is damaged, or has changed since the dataset was built.
        FileNotFoundError: A folder has no ``index.json``, or a shard is missing.
        ImportError: A package for an encoding, a compression or a hash is not installed.
    """
    folders = expanded(paths, storage_options)
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
    files = Reach(storage_options, cache_dir, max_cache_size, ahead).of([shard.path for shard in shards])
    is_counted = options.get("epoch_size") is None
    stamps = looked_at(stamp, files) if is_counted else None
    for shard, then in zip(shards, stamps or (), strict=bool(stamps)):
        shard.check_size(then)
    opener = _Opener({shard.path: shard for shard in shards}, dict(zip(files, stamps or (), strict=False)), validate_hash)
    counts = [shard.records for shard in shards] if is_counted else None
    return Shards(files, opener, counts=counts, lanes=lanes, window=window, name="MDS shard", **options)


class _Shard(NamedTuple):
    """What an ``index.json`` says of a shard.

    Attributes:
        path: Where it is.
        place: Where the ``index.json`` is.
        records: How many it has.
        nbytes: Its size.
        raw_nbytes: Its size before compression.
        packed: How it is compressed, such as ``"zstd"``; empty if it is not.
        hashes: Of its bytes, as hexadecimal digits, by the names of the algorithms.
        columns: What is in a record.
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
        """Refuse a file of another size than the index says."""
        if then.size not in (-1, self.nbytes):
            raise ValueError(
                f"{self.path} has {then.size} bytes, and {self.place} says {self.nbytes}, so one of them is not the one that was written with the other, or was cut short. Copy "
                f"both again."
            )

    def damaged(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is damaged, or not the shard that {self.place} describes: {why}. Copy both again.")

    def offsets(self, head: bytes) -> np.ndarray:
        """Where each record begins in the shard, and where the last one ends: uint32, shape ``(records + 1,)``.

        Args:
            head: The first bytes of the shard: how many records it has, and these offsets.
        """
        records, *_ = struct.unpack_from("<I", head)
        if records != self.records:
            raise self.damaged(f"it has {records} records, and should have {self.records}")
        offsets = np.frombuffer(head, "<u4", offset=4)
        if offsets[0] < len(head) or offsets[-1] != self.raw_nbytes or (offsets[1:] < offsets[:-1]).any():
            raise self.damaged(f"its records do not follow one another from byte {len(head)} or later to byte {self.raw_nbytes}")
        return offsets

    @property
    def head_nbytes(self) -> int:
        return 4 * (self.records + 2)


class _Columns(NamedTuple):
    """What is in each record of a shard.

    Attributes:
        names: Of the columns.
        encodings: How their values are written.
        sizes: How many bytes each value has; 0 where that differs, and then stands at the front of each record.
    """

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int, ...]

    def check(self, index: str, trust: bool) -> None:
        """Refuse what cannot be decoded, or must not be without ``trust``."""
        for name, encoding in zip(self.names, self.encodings, strict=True):
            try:
                unsafe = runs_code(encoding)
            except ValueError as exc:
                raise ValueError(f"{index}: the column {name!r} cannot be decoded: {exc}") from exc
            if unsafe and not trust:
                raise ValueError(
                    f"{index}: the column {name!r} is pickled (pkl), and unpickling runs whatever code is in the data. If you trust whoever wrote it, pass trust=True. Or write the "
                    f"dataset again, with an encoding that is only data, such as json, ndarray or bytes."
                )

    def reader(self) -> Callable[[bytes, _Shard, int], dict[str, Any]]:
        """Makes a record of its bytes, its shard, and where it begins."""
        columns = [(name, size, decoder(encoding)) for name, encoding, size in zip(*self, strict=True)]
        head = struct.Struct(f"<{self.sizes.count(0)}I")
        least = head.size + sum(self.sizes)

        def read(data: bytes, shard: _Shard, begin: int) -> dict[str, Any]:
            if len(data) < least or least + sum(lengths := head.unpack_from(data)) != len(data):
                raise shard.damaged(f"the record at byte {begin} does not end where its columns do")
            record, at, varying = {}, head.size, iter(lengths)
            name = ""
            try:
                for name, size, decode in columns:
                    end = at + (size or next(varying))
                    record[name] = decode(data[at:end])
                    at = end
            except (ImportError, MemoryError):
                raise
            except Exception as exc:  # of whatever kind: an IndexError would end the shard in silence
                encoding = self.encodings[self.names.index(name)]
                raise shard.damaged(f"{name!r} of the record at byte {begin} is no {encoding} ({type(exc).__name__}: {exc})") from exc
            return record

        return read


# index.json


def _shards_in(folder: str) -> list[_Shard]:
    """The shards of a folder, by its ``index.json``."""
    index = _inside(folder, "index.json")
    try:
        then = stamp(index)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise FileNotFoundError(
            f"{index} does not exist, and it says what the shards are; MDSWriter writes it last of all. Pass the folder that has it, or several of them: a list, or a pattern."
        ) from exc
    try:
        if then.size > _MOST_INDEX:
            raise ValueError(f"{then.size} bytes are too many")
        with whole(index, then) as file:
            said = json.loads(file.read())
        if not isinstance(said, dict) or said.get("version") != 2 or not isinstance(said.get("shards"), list):
            raise ValueError("it must be a dict of version 2, with a list of shards")
        known: dict[_Columns, _Columns] = {}  # of all shards with equal columns, one object: they are sent to each worker
        return [_shard(one, folder, index, known) for one in said["shards"]]
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{index} is damaged, or no index of MDS: {exc}") from exc


def _shard(said: Any, folder: str, index: str, known: dict[_Columns, _Columns]) -> _Shard:
    match said:
        case {"format": "mds", "version": 2, "samples": int(records), "raw_data": dict(raw)} if (
            type(records) is int and 0 <= records < _LIMIT
        ):
            pass
        case {"format": str(format)} if format != "mds":
            raise ValueError(f"a shard is {format}, and only mds is read. Convert the dataset: MDSWriter")
        case _:
            raise ValueError(f"{said!r:.200} is no shard of version 2")
    columns = known.setdefault(found := _columns(said), found)
    raw_path, raw_nbytes, hashes = _file(raw, folder)
    if not 4 * (records + 2) <= raw_nbytes < _LIMIT:
        raise ValueError(f"a shard of {records} records cannot have {raw_nbytes} bytes")
    path, nbytes, packed = raw_path, raw_nbytes, ""
    if said.get("zip_data") is not None and (is_remote(folder) or not os.path.exists(raw_path)):
        packed = str(said.get("compression")).partition(":")[0]
        path, nbytes, hashes = _file(said["zip_data"], folder)
    if _PACKED.get(packed) != compression(path):
        raise ValueError(f"{path} is compressed by {packed or 'nothing'}, by its index, but not by its name")
    return _Shard(path, index, records, nbytes, raw_nbytes, packed, hashes, columns)


def _columns(said: dict[str, Any]) -> _Columns:
    names, encodings, sizes = (said.get(f"column_{what}") for what in ("names", "encodings", "sizes"))
    if not isinstance(names, list) or not isinstance(encodings, list) or not isinstance(sizes, list):
        raise ValueError("a shard has no column_names, column_encodings and column_sizes")
    found = _Columns(tuple(names), tuple(encodings), tuple(size or 0 for size in sizes))
    is_whole = len(names) == len(encodings) == len(sizes) and all(isinstance(text, str) for text in [*names, *encodings])
    if not is_whole or len({*names}) < len(names) or not all(isinstance(size, int) and 0 <= size < _LIMIT for size in found.sizes):
        raise ValueError(f"the columns of a shard are not texts and sizes: {names!r:.99}, {encodings!r:.99}, {sizes!r:.99}")
    return found


_PACKED: Final = {"": "", "gz": ".gz", "bz2": ".bz2", "zstd": ".zst", "br": "", "snappy": ""}
"""What of a name `whole` knows of each compression."""


def _file(said: Any, folder: str) -> tuple[str, int, dict[str, str]]:
    """Path, bytes and hashes of a file; in the folder or further inside."""
    match said:
        case {"basename": str(name), "bytes": int(nbytes)} if nbytes >= 0 and isinstance(hashes := said.get("hashes", {}), dict):
            parts = name.split("/")
            if name.isprintable() and ":" not in name and not {"", ".", ".."}.intersection(parts):
                return _inside(folder, name), nbytes, hashes
    raise ValueError(f"{said!r:.200} names no file in that folder, with its size")


def _inside(folder: str, name: str) -> str:
    if not is_remote(folder):
        return os.path.join(folder, name)
    return beside(folder, folder.replace(bare(folder), f"{bare(folder).rstrip('/')}/{name}", 1))


# Shards


@final
class _Opener:
    """The ``open`` of `Shards`: a raw shard is read by position, and a compressed or uncounted one forward.

    Args:
        shards: By their paths.
        stamps: Of the counted files, when the dataset was built.
        validate_hash: See `mds`.
    """

    by_fsspec = True
    """Remote paths are fsspec's."""

    def __init__(self, shards: dict[str, _Shard], stamps: dict[str, Stamp], validate_hash: str | None) -> None:
        self._shards = shards
        self._stamps = stamps
        self._validate_hash = validate_hash
        self._validated: dict[str, Stamp] = {}
        self._readers: dict[_Columns, Callable[[bytes, _Shard, int], dict[str, Any]]] = {}
        self.reads_forward = not stamps or any(shard.packed for shard in shards.values())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_validated": {}, "_readers": {}}

    def __call__(self, path: str, expected: Stamp | None = None) -> _RawShard | Iterator[Any]:
        shard, then = self._shards[path], self._stamps.get(path) or expected or stamp_lately(path)
        shard.check_size(then)
        if self._validate_hash is not None and self._validated.get(path) != then:
            _validate(shard, path, then, self._validate_hash)
            self._validated[path] = then
        read = self._readers.get(shard.columns)
        if read is None:
            read = self._readers[shard.columns] = shard.columns.reader()
        if path in self._stamps and not shard.packed:
            return _RawShard(shard, path, then, read)
        return _forward(shard, path, then, read)


@final
class _RawShard(FileRanges):
    """The records of a shard that is not compressed, by position."""

    def __init__(self, shard: _Shard, path: str, then: Stamp, read: Callable[[bytes, _Shard, int], dict[str, Any]]) -> None:
        super().__init__(path, then, *_CHANGED)
        self._shard = shard
        self._record = read
        try:
            self._offsets = shard.offsets(self.read(0, shard.head_nbytes))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._shard.records

    def __getitem__(self, number: int) -> dict[str, Any]:
        begin, end = self._offsets[number : number + 2].tolist()
        return self._record(self.read(begin, end), self._shard, begin)


_CHANGED: Final = ("since the dataset was built", IN_USE[1])


def _forward(shard: _Shard, path: str, then: Stamp, read: Callable[[bytes, _Shard, int], dict[str, Any]]) -> Iterator[Any]:
    """The records of a shard from its beginning."""
    with whole(path, then) as file:
        raw = _unpacked(file, shard)
        offsets = shard.offsets(_exactly(raw, shard.head_nbytes, shard))
        _exactly(raw, int(offsets[0]) - shard.head_nbytes, shard)  # how the writer was set up
        for number in range(shard.records):
            begin, end = offsets[number : number + 2].tolist()
            data = _exactly(raw, end - begin, shard)
            try:
                record: Any = read(data, shard, begin)
            except ValueError as exc:
                record = Unreadable(exc)
            yield record
        if raw.read(1):
            raise shard.damaged(f"more than its {shard.raw_nbytes} bytes are in it")


def _exactly(file: BinaryIO, nbytes: int, shard: _Shard) -> bytes:
    parts, left = [], nbytes
    while left and (part := file.read(min(left, _CHUNK))):  # no more memory is asked for than there are bytes
        parts.append(part)
        left -= len(part)
    if left:
        raise shard.damaged(f"it ends {left} bytes before the end of a record")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unpacked(file: BinaryIO, shard: _Shard) -> BinaryIO:
    """The bytes of a shard; `whole` has decompressed what it knows."""
    if shard.packed == "br":
        return io.BufferedReader(Unpacked(file, shard.path, _Brotli), 2**18)
    return io.BytesIO(_unsnapped(file.read(), shard)) if shard.packed == "snappy" else file


class _Brotli:
    """Decompresses brotli as `Unpacked` asks for it."""

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
    module = needed("brotli", "brotli>=1.2", f"{path!r}")
    if not hasattr(module.Decompressor, "can_accept_more_data"):
        raise ImportError(f"{path!r} needs a newer version of the package brotli: pip install 'brotli>=1.2'", name="brotli")
    return module


def _unsnapped(data: bytes, shard: _Shard) -> bytes:
    """The bytes of a shard in snappy's raw format, which begins with how many they are, and is decompressed in one piece."""
    stated = 0
    for place, byte in enumerate(data[:5]):
        stated |= (byte & 127) << (7 * place)
        if byte < 128:
            break
    if stated != shard.raw_nbytes:
        raise shard.damaged(f"it states {stated} bytes, decompressed, and should have {shard.raw_nbytes}")
    try:
        found: bytes = needed("snappy", "python-snappy", f"{shard.path!r}").decompress(data)
    except MemoryError:
        raise
    except Exception as exc:  # it has errors of its own
        raise shard.damaged(f"it cannot be decompressed ({exc})") from exc
    return found


def _check_unpacking(shard: _Shard) -> None:
    """Refuse at once what could only be decompressed by a package that is not installed."""
    if shard.packed == "zstd":
        extra("zstandard", f"{shard.path!r}")
    elif shard.packed == "br":
        _brotli(shard.path)
    elif shard.packed == "snappy":
        needed("snappy", "python-snappy", f"{shard.path!r}")


def _check_hash_is_known(shard: _Shard, algorithm: str) -> None:
    if algorithm not in shard.hashes:
        raise ValueError(
            f"validate_hash={algorithm!r}, and {shard.place} has {', '.join(map(repr, shard.hashes)) or 'no hash'} of {shard.path}. Choose one that was written, or None, which "
            f"compares sizes only."
        )
    _new_hash(algorithm)


def _new_hash(algorithm: str) -> Any:
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake"):
        return hashlib.new(algorithm, usedforsecurity=False)
    xxhash = extra("xxhash", f"validate_hash={algorithm!r}")
    if algorithm not in xxhash.algorithms_available:
        raise ValueError(f"validate_hash={algorithm!r} is a hash that neither hashlib nor xxhash has. Choose another that was written.")
    return getattr(xxhash, algorithm)()


def _validate(shard: _Shard, path: str, then: Stamp, algorithm: str) -> None:
    file, found = FileRanges(path, then, *_CHANGED), _new_hash(algorithm)
    try:
        for begin in range(0, shard.nbytes, _CHUNK):
            found.update(file.read(begin, min(begin + _CHUNK, shard.nbytes)))
    finally:
        file.close()
    if found.hexdigest() != shard.hashes[algorithm]:
        raise shard.damaged(f"its {algorithm} is {found.hexdigest()}, and should be {shard.hashes[algorithm]!r:.200}")
