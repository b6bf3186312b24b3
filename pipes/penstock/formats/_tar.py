"""Tar files as webdataset writes them: the files of a sample are neighbours, and have one name up to the first dot."""

from __future__ import annotations

import io
import os
import re
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Unpack

import numpy as np

from penstock._streams.files import REINDEX, whole
from penstock._streams.known_files import Format, known_files
from penstock._streams.paths import Reach

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from penstock._streams.files import Stamp
    from penstock._streams.paths import Paths
    from penstock._streams.shards import ShardOptions, Shards

BLOCK: Final = 512
END: Final = bytes(BLOCK)
TOO_LARGE: Final = 2**43
"""Bytes. A file system may refuse to seek that far."""
LONGEST_EXTENDED: Final = 2**20
"""Bytes of an extended header: a few names. They are read into memory."""
FILES: Final = (b"0", b"\0", b"7")
EMPTY: Final = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices and folders: no data follows, whatever size they state
EXTENDED: Final = (b"L", b"K", b"x", b"X", b"g")  # they say more of the member that follows
PAX: Final = (b"x", b"X")
EXTENDED_BY_GNU: Final = (b"L", b"K", b"S")
CUT_SHORT: Final = "it ends there, without the mark that ends a tar, so it was cut short or not written to the end"
JOINED: Final = (
    "the mark that ends a tar stands there, and more follows, which would be left out. If that is another tar, join them by 'tar --concatenate' in place of cat, "
    "or keep both files; otherwise the file is damaged"
)
SPARSE: Final = "it holds a sparse file, which is not supported. Pack the file without holes (tar without --sparse)"
NAMED: Final = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)
META: Final = re.compile(r"__[^/]*__(?:/|$)")


def tar(
    paths: Paths,
    *,
    index: str | os.PathLike[str] | None = None,
    counts: npt.ArrayLike | None = None,
    lanes: int | None = None,
    window: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_cache_size: int | str | None = None,
    ahead: int = 1,
    **options: Unpack[ShardOptions],
) -> Shards:
    """The samples of tar files, as webdataset groups them: dicts of ``bytes``.

    Neighbouring files with the same path up to the first dot of the base name are one sample. That path is the sample's ``"__key__"``; the rest of the name,
    in lower case, is the key of the file's contents: ``a/001.jpg`` and ``a/001.seg.PNG`` make ``{"__key__": "a/001", "jpg": …, "seg.png": …}``. Members that are
    not files, have no dot in their name, or are called ``__…__`` are left out. Decode with ``Loader.from_dataset(transform=…)``.

    Files with an index (``python -m penstock index``) are read by position. Otherwise ``counts`` says how many samples they have, and they are read
    forward. Compressed files (.tar.gz, .tgz, .tar.zst, .tar.xz, .tar.bz2) are always read forward.

    Args:
        paths: A path, a pattern such as ``"data/*.tar"`` or ``"data/{00000..01242}.tar"``, or a list of them; with ``://``, fsspec reads them.
        index: The folder of the indices. Default: each index lies beside its file.
        counts: How many samples each file has, to read them without an index.
        lanes: See `penstock.Shards`.
        window: See `penstock.Shards`.
        storage_options: For the file system of fsspec that reads paths with ``://``: keys, an endpoint, headers. Not part of the state.
        cache_dir: A folder on a disk of this host in which copies of the files are kept, for all of its processes and for later runs; None: none are. Only whole
            files whose version can be known are kept, and a file is copied when it is first opened. Not part of the state.
        max_cache_size: What all copies in that folder may take: bytes, or a text such as ``"200GB"``. What does not fit is read where it is.
        ahead: How many shards of each lane are copied before they are read, where copies are kept.
        **options: ``transform``, ``epoch_size``, ``steps``, ``bookmarks``, ``retries``, ``on_error``: see `penstock.Shards`. With ``epoch_size``,
            no index is needed or used.

    Raises:
        ValueError: A file has no index and no counts. On reading: it is damaged, or has changed since it was indexed.
        FileNotFoundError: A file does not exist, or has no index while others have one.
    """
    return known_files(FORMAT, paths, index, counts, lanes, window, Reach(storage_options, cache_dir, max_cache_size, ahead), options)


def sample_offsets(file: BinaryIO, path: str) -> np.ndarray:
    """Where each sample of a tar begins, and where the last one ends: int64, shape ``(samples + 1,)``."""
    return np.array([begin for begin, _ in _grouped(_members(file, path, read=False), path)], np.int64)


class _Member(NamedTuple):
    """A file in a tar, with where its first header begins; ``data`` is None where it was not to be read. The last one, without a name, is the end."""

    begin: int
    name: str | None
    data: bytes | None


def _members(file: BinaryIO, path: str, at: int = 0, *, read: bool = True, whole: bool = True) -> Iterator[_Member]:
    """The files in a tar, by POSIX.1-1988 (ustar), POSIX.1-2001 (pax) or as GNU writes them.

    Args:
        file: The tar, or some of its members.
        path: For messages.
        at: Where in the tar ``file`` begins.
        read: Whether to read the data. Otherwise it is skipped, without reading it where the file can seek.
        whole: Whether ``file`` must end as a tar does.

    Raises:
        ValueError: The tar is damaged or cut short.
    """
    seeks = not read and file.seekable()
    begin, name, size = at, None, None  # of the member that comes next, if extended headers have said it
    while True:
        header = file.read(BLOCK)
        if header == END or (not header and not whole):
            while whole and (rest := file.read(2**20)):  # to the end, because only there compressed data says whether it is whole
                if rest.strip(b"\0"):
                    raise _damaged(path, at, JOINED)
            yield _Member(begin, None, None)
            return
        if len(header) < BLOCK:
            raise _damaged(path, at, CUT_SHORT if at or header else "it has no bytes at all, and even an empty tar has 1024")
        if whole:  # otherwise the index knows that a header stands there, and the file has not changed
            _check(header, path, at)
        kind, own_size = header[156:157], _number(header[124:136], path, at)
        at += BLOCK
        own_name = _own_name(header)
        is_extended = kind in EXTENDED
        is_file = kind in FILES and not (kind == b"\0" and own_name.endswith("/"))
        length = own_size if is_extended or size is None else size
        if kind in EMPTY or (kind == b"\0" and not is_file):
            length = 0
        if length >= (LONGEST_EXTENDED if is_extended else TOO_LARGE):
            raise _damaged(path, at, f"a header states a size of {length} bytes")
        padded = -(-length // BLOCK) * BLOCK
        if is_extended or (is_file and read):
            try:
                data = file.read(length)  # without the padding: cutting it off would copy the data
            except MemoryError:
                raise _damaged(path, at, f"a file of {length} bytes stands there, for which there is no room in memory") from None
            if len(data) < length or len(file.read(padded - length)) < padded - length:
                raise _damaged(path, at, CUT_SHORT)
        elif seeks:
            data = None
            file.seek(padded, os.SEEK_CUR)
        else:
            data = None
            _skip(file, padded)
        at += padded
        if is_extended:
            assert data is not None
            if kind == b"L":
                name = _text(data)
            elif kind in PAX:
                said = _pax(data, path, at)
                name = said["path"].rstrip("/") if "path" in said else name
                size = int(said["size"][:30]) if said.get("size", "").isdecimal() else size  # Python refuses to read thousands of digits
            continue
        if is_file:
            yield _Member(begin, name or own_name, data)
        begin, name, size = at, None, None


def _grouped(members: Iterator[_Member], path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The samples and where they begin. The last one, which is empty, is the end."""
    begin, sample = 0, dict[str, Any]()
    for member in members:
        if member.name is None:
            if sample:
                yield begin, sample
            yield member.begin, {}
            return
        named = None if "__" in member.name and META.match(member.name) else NAMED.fullmatch(member.name)
        if named is None:
            continue
        key, suffix = named[1], named[2].lower()
        if key != sample.get("__key__"):
            if sample:
                yield begin, sample
            begin, sample = member.begin, {"__key__": key}
        if suffix in sample:
            raise _damaged(path, member.begin, f"the sample {key!r} has two files {suffix!r}")
        sample[suffix] = member.data


def _forward(path: str, expected: Stamp | None) -> Iterator[dict[str, Any]]:
    with whole(path, expected) as file:
        for _, sample in _grouped(_members(file, path), path):
            if sample:
                yield sample


def _parse(data: bytes, path: str, begin: int) -> dict[str, Any]:
    (_, sample), *rest = _grouped(_members(io.BytesIO(data), path, begin, whole=False), path)
    if not sample or len(rest) != 1:
        raise _damaged(path, begin, f"one sample was expected there. If the file was changed, {REINDEX}")
    return sample


def _check(header: bytes, path: str, at: int) -> None:
    """Compare the checksum of a header. Some old programs added up signed bytes."""
    said = _number(header[148:156], path, at)
    others = 8 * ord(" ") - sum(header[148:156])
    # Half of an Adler-32 is 1 and all the bytes, added up modulo 65521, in a tenth of the time of sum().
    if (said - others + 1) % 65521 != zlib.adler32(header) & 0xFFFF:
        added = sum(header) + others
        if said != added and said != added - 256 * sum(byte > 127 for byte in header[:148] + header[156:]):
            raise _damaged(path, at, "no header of a tar stands there")
    if header[156:157] == b"S":
        raise _damaged(path, at, SPARSE)


def _number(field: bytes, path: str, at: int) -> int:
    """An octal number; or, as GNU writes those that are too large for it, a binary one."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    try:
        number = int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        number = -1
    if number < 0:  # `int` takes a sign, and a size below 0 would lead back to this header
        raise _damaged(path, at, "no header of a tar stands there")
    return number


def _own_name(header: bytes) -> str:
    name = _text(header[:100])
    return f"{_text(header[345:500])}/{name}" if header[345] and header[156:157] not in EXTENDED_BY_GNU else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _pax(data: bytes, path: str, at: int) -> dict[str, str]:
    """Lines of "<length of the line> <key>=<value>"."""
    said = {}
    while data and data[0]:
        digits, _, _ = data.partition(b" ")
        length = int(digits[:30]) if digits.isdigit() else 0
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or data[length - 1 : length] != b"\n":
            raise _damaged(path, at, "an extended header is no list of keys and values")
        said[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        data = data[length:]
    if any(key.startswith("GNU.sparse") for key in said):
        raise _damaged(path, at, SPARSE)
    return said


def _skip(file: BinaryIO, n: int) -> None:
    while n and (data := file.read(min(n, 2**20))):
        n -= len(data)


def _damaged(path: str, at: int, why: str) -> ValueError:
    return ValueError(f"{path} cannot be read as a tar at byte {at}: {why}.")


SUFFIXES: Final = (".tar", ".tgz")
FORMAT: Final = Format("tar", sample_offsets, _forward, _parse)
