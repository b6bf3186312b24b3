"""Tar files as webdataset writes them: the files of a sample are adjacent and share their name up to the first dot."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Unpack

import numpy as np

from penstock._errors import first_time
from penstock._files.files import REINDEX, whole
from penstock._files.first_look import kind_of
from penstock._streams.known_files import Format, known_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from penstock._files.files import Stamp
    from penstock._files.paths import Paths
    from penstock._streams.sharded import FormatOptions
    from penstock._streams.shards import Shards
    from penstock._streams.stream import Stream

log = logging.getLogger("penstock")

BLOCK: Final = 512
END: Final = bytes(BLOCK)
TOO_LARGE: Final = 2**43
"""Bytes. A file system may refuse to seek this far."""
LONGEST_EXTENDED: Final = 2**20
"""Largest extended header in bytes, enough for a few names. Extended headers are read into memory."""
KEYS_KEPT: Final = 2**16
"""Samples that a stream remembers, to notice a sample whose files are not adjacent; an index looks at all."""
FILES: Final = (b"0", b"\0", b"7")
LINKS: Final = (b"1", b"2")
# links, devices and folders: no data follows, whatever size they state
EMPTY: Final = (b"1", b"2", b"3", b"4", b"5", b"6")
EXTENDED: Final = (b"L", b"K", b"x", b"X", b"g")  # these describe the member that follows
PAX: Final = (b"x", b"X")
EXTENDED_BY_GNU: Final = (b"L", b"K", b"S")
CUT_SHORT: Final = "it ends there without an end-of-archive marker, so it was cut short or not written completely"
JOINED: Final = (
    "the end-of-archive marker is there, but more data follows, which would be lost. If that is another tar, join them "
    "with 'tar --concatenate' instead of cat, or keep both files; otherwise the file is damaged"
)
LINK: Final = (
    "{!r} is a link, and links are not followed, so its sample would lack it. Create the tar with --dereference "
    "--hard-dereference (in Python by tarfile.open(dereference=True)), which store the data instead"
)
SPARSE: Final = "it contains a sparse file, which is not supported. Create the tar without --sparse"
NAMED: Final = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)
META: Final = re.compile(r"__[^/]*__(?:/|$)")


def tar(
    paths: Paths,
    *,
    index: str | os.PathLike[str] | None = None,
    counts: npt.ArrayLike | None = None,
    ahead: int = 1,
    **options: Unpack[FormatOptions],
) -> Shards | Stream:
    """Read tar files as webdataset groups them. A sample is a dict of ``bytes``.

    Adjacent files with the same path up to the first dot of the base name form one sample. That path is the sample's
    ``"__key__"``; the rest of the name, in lower case, is the key of the file's contents: ``a/001.jpg`` and
    ``a/001.seg.PNG`` make ``{"__key__": "a/001", "jpg": …, "seg.png": …}``. Folders and devices are skipped, and so are
    files that have no dot in their name, or are called ``__…__`` or ``._…`` (which macOS adds). Decode with
    ``Loader.from_dataset(transform=…)``.

    Files with an index (``python -m penstock index``) are read by position. Without one, ``counts`` gives the number of
    samples, and the files are read forward. Compressed files (.tar.gz, .tgz, .tar.zst, .tar.xz, .tar.bz2) are always
    read forward.

    Args:
        paths: A path, a pattern such as ``"data/*.tar"`` or ``"data/{00000..01242}.tar"``, or a list of them. Paths
            with ``://`` are read through fsspec.
        index: Folder that holds the indices. Default: each index is next to its file.
        counts: The number of samples in each file, to read them without an index.
        ahead: How many shards per lane to copy before they are read, if copies are kept.
        **options: ``storage_options``, ``cache_dir``, ``max_cache_size``, ``lanes``, ``window``, ``transform``: see
            `penstock.Shards`. ``epoch_size``, and with it ``steps``, ``bookmarks``, ``retries``, ``on_error``: see
            `penstock.Stream`. With ``epoch_size`` the result is a stream, and no index is needed, and none is used.

    Raises:
        ValueError: A file has no index and no counts. On reading: a file is damaged, a sample has links instead of
            files, or a file has changed since it was indexed.
        FileNotFoundError: A file does not exist, or has no index while others have one.
    """
    return known_files(FORMAT, paths, index, counts, ahead, options)


def sample_offsets(file: BinaryIO, path: str) -> np.ndarray:
    """Where each sample of a tar begins, and where the last one ends: int64, shape ``(samples + 1,)``."""
    return np.array([begin for begin, _ in _grouped_files(_members(file, path, read=False), path, math.inf)], np.int64)


class _Member(NamedTuple):
    """A file in a tar, and where its first header begins.

    ``data`` is None if it was not read. A member without a name is the end of the tar.
    """

    begin: int
    name: str | None
    data: bytes | None
    is_link: bool = False


def _members(file: BinaryIO, path: str, at: int = 0, *, read: bool = True, whole: bool = True) -> Iterator[_Member]:
    """The files in a tar, in the formats POSIX.1-1988 (ustar), POSIX.1-2001 (pax) and GNU.

    Args:
        file: The tar, or some of its members.
        path: For error messages.
        at: The offset of ``file`` in the tar.
        read: Whether to read the data. Otherwise it is skipped, by seeking if the file can seek.
        whole: Whether ``file`` must end as a tar does.

    Raises:
        ValueError: The tar is damaged or cut short.
    """
    seeks = not read and file.seekable()
    begin, name, size = at, None, None  # of the next member, as given by its extended headers so far
    while True:
        header = file.read(BLOCK)
        if header == END or (not header and not whole):
            # up to the end, because compressed data shows only there whether it is complete
            while whole and (rest := file.read(2**20)):
                if rest.strip(b"\0"):
                    raise _damaged(path, at, JOINED)
            yield _Member(begin, None, None)
            return
        if len(header) < BLOCK:
            raise _damaged(
                path, at, CUT_SHORT if at or header else "it is empty, but even a tar without members has 1024 bytes"
            )
        if whole:  # otherwise the index confirms that a header is here, and the file has not changed
            try:
                _check(header, path, at)
            except ValueError:
                if not at and (other := kind_of(header)):
                    raise ValueError(f"{path} is not a tar{other}.") from None
                raise
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
                data = file.read(length)  # without the padding, because removing that would copy the data
            except MemoryError:
                raise _damaged(path, at, f"there is not enough memory for a file of {length} bytes") from None
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
                # Python refuses to parse thousands of digits
                size = int(said["size"][:30]) if said.get("size", "").isdecimal() else size
            continue
        if is_file or kind in LINKS:
            yield _Member(begin, name or own_name, data, kind in LINKS)
        begin, name, size = at, None, None


def _grouped_files(
    members: Iterator[_Member], path: str, keep: float = KEYS_KEPT
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The samples and where they begin. The last one is empty and marks the end.

    The fields of the last `KEYS_KEPT` samples are remembered: if one of them comes again with another field, its files
    are not adjacent, and each sample would be two halves.
    """
    begin, sample = 0, dict[str, Any]()
    seen: dict[str, frozenset[str]] = {}
    alike: dict[frozenset[str], frozenset[str]] = {}
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
        if suffix.startswith("_") and key.endswith("/"):  # "._1.jpg" has the attributes that macOS keeps of "1.jpg"
            continue
        if member.is_link:
            raise _damaged(path, member.begin, LINK.format(member.name))
        if key != sample.get("__key__"):
            if sample:
                yield begin, sample
                if sample["__key__"] in seen and first_time("twice in a tar", path):
                    log.warning("%s has more than one sample %r. All of them are read.", path, sample["__key__"])
                fields = frozenset(sample)
                seen[sample["__key__"]] = alike.setdefault(fields, fields)
                if len(seen) > keep:
                    del seen[next(iter(seen))]
            begin, sample = member.begin, {"__key__": key}
        if suffix in sample:
            raise _damaged(path, member.begin, f"the sample {key!r} has two files with the suffix {suffix!r}")
        if suffix not in seen.get(key, (suffix,)):
            before = ", ".join(sorted(seen[key] - {"__key__"}))
            raise ValueError(
                f"the files of the sample {key!r} are not next to each other in {path}: .{before} came before, and "
                f".{suffix} only at byte {member.begin}, after another sample, so each would be two halves. Make the "
                f"tar again with its files in the order of their names: tar --sort=name -cf {path} …"
            )
        sample[suffix] = member.data


def _forward(path: str, expected: Stamp | None) -> Iterator[dict[str, Any]]:
    with whole(path, expected) as file:
        for _, sample in _grouped_files(_members(file, path), path):
            if sample:
                yield sample


def _parse(data: bytes, path: str, begin: int) -> dict[str, Any]:
    (_, sample), *rest = _grouped_files(_members(io.BytesIO(data), path, begin, whole=False), path)
    if not sample or len(rest) != 1:
        raise _damaged(path, begin, f"exactly one sample was expected there. If the file was changed, {REINDEX}")
    return sample


def _check(header: bytes, path: str, at: int) -> None:
    """Verify the checksum of a header. Some old programs summed signed bytes."""
    said = _number(header[148:156], path, at)
    others = 8 * ord(" ") - sum(header[148:156])
    # The lower half of an Adler-32 is 1 plus the sum of all bytes modulo 65521, in a tenth of the time of sum().
    if (said - others + 1) % 65521 != zlib.adler32(header) & 0xFFFF:
        added = sum(header) + others
        if said != added and said != added - 256 * sum(byte > 127 for byte in header[:148] + header[156:]):
            raise _damaged(path, at, "there is no valid tar header there")
    if header[156:157] == b"S":
        raise _damaged(path, at, SPARSE)


def _number(field: bytes, path: str, at: int) -> int:
    """An octal number, or a binary one, which GNU tar uses for numbers too large for octal."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    try:
        number = int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        number = -1
    if number < 0:  # `int` accepts a sign, and a negative size would lead back to this header
        raise _damaged(path, at, "there is no valid tar header there")
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
            raise _damaged(path, at, "an extended header is not a list of keys and values")
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
