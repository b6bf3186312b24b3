"""The bytes of local and remote files, and how to tell that a file has changed."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import shutil
import time
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, cast

from penstock._files.first_look import ENOUGH, kind_of
from penstock._files.paths import (
    address,
    address_at_source,
    checksum,
    compression,
    extra,
    is_remote,
    kept_in,
    options_of,
)
from penstock._files.transfer import copy_over_http, headers_of, transfer_callback
from penstock._files.unpacking import LIBRARIES, Unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Stamp(NamedTuple):
    """Distinguishes one version of a file from another; see `stamp`.

    Attributes:
        size: Bytes; -1 if the server does not tell.
        mtime_ns: The modification time of a local file; 0 for a remote file.
        version: The store's identifier for the version of a remote file; empty for a local file.
    """

    size: int
    mtime_ns: int
    version: str = ""

    def fits(self, other: Stamp) -> bool:
        """Whether both may describe the same version.

        If only one is of a remote file, only the sizes can be compared.
        """
        return self.size == other.size and (self[1:] == other[1:] or bool(self.version) != bool(other.version))


HTTP: Final = ("http://", "https://")
BLOCK: Final = 2**23
"""Read-ahead of a remote file in bytes, once per lane. The default of s3fs is 50 MiB."""


BUFFER: Final = 2**16
"""Read buffer of a local file in bytes. With Python's default of 8 KiB, a sample of 20 KB and its header take two
reads.
"""


def opened(path: str, expected: Stamp | None = None) -> BinaryIO:
    """Open a file, from a copy if one is kept.

    An HTTP server is asked for the ``expected`` version only; S3 never returns parts of two versions.
    """
    return opened_copy(path, expected) or opened_there(path, expected)


def opened_there(path: str, expected: Stamp | None) -> BinaryIO:
    """Open a file at its source, whether or not there is a copy."""
    version = "" if expected is None else expected.version
    if not is_remote(path):
        return open(path, "rb", buffering=BUFFER, opener=open_file)
    with _asking(path) as (filesystem, inside):
        # Of these, the default for HTTP drops parts of a block before they are read, and fetches them again.
        words = {"cache_type": "readahead"} if getattr(filesystem, "cache_type", None) == "bytes" else {}
        file = filesystem.open(inside, "rb", block_size=BLOCK, **words)
    if path.startswith(HTTP):
        file.kwargs["headers"] = headers_of(file, _asked_for(version))
    if not filesystem.cachable:
        file.penstock_filesystem = filesystem  # an archive is closed once nothing holds its file system
    return cast("BinaryIO", file)


def opened_copy(path: str, expected: Stamp | None = None) -> BinaryIO | None:
    """The copy of a file, made if necessary and not removed while it is open; None if no copies are kept, or there is
    no room.
    """
    cache = kept_in(path)
    if cache is None:
        return None
    # An index that was made on a disk does not know the version on the server, by which the copy is named.
    then = expected if expected is not None and (expected.version or not is_remote(path)) else stamp_lately(path)
    return cache.opened(*_of_copy(path, then)) if _is_known(path, then) else None


def kept_open(path: str, expected: Stamp | None = None) -> BinaryIO:
    """A file on a local disk that may be mapped by name: the file itself, or its copy, which is not removed while it is
    open.

    Raises:
        ValueError: The file is remote, and there is no copy.
    """
    copy = opened_copy(path, expected)
    if copy is None and is_remote(path):
        raise ValueError(
            f"{path} is memory-mapped, but it is not on a local disk, and there is no copy of it: there is no "
            f"cache_dir=, it has no room (max_cache_size=), or its store does not report versions. Copy it to a local "
            f"disk, or pass both."
        )
    return copy or opened_there(path, expected)


def read_range(path: str, expected: Stamp, begin: int, end: int) -> bytes:
    """The bytes of a remote file from ``begin`` up to ``end``. Can be called from any thread.

    Raises:
        ValueError: The file has another version than ``expected``.
    """
    try:
        with _asking(path) as (filesystem, inside):
            words = {"headers": headers_of(filesystem, {})} if path.startswith(HTTP) else {}
            found: bytes = filesystem.cat_file(inside, begin, end, **words)
    except Exception:
        explain(path, expected, *IN_USE)
        raise
    # some servers cannot be asked for a version, and some ignore the request
    check_unchanged(path, expected, stamp(path), *IN_USE)
    if len(found) < end - begin:
        raise OSError(
            f"{path} returned {len(found)} of the {end - begin} bytes from {begin} on, so the connection broke off."
        )
    return found


def fetch(path: str, is_over: Callable[[], bool]) -> None:
    """Make a copy of a file if it is worth its room and there is none.

    The transfer is aborted once ``is_over`` returns True.

    Raises:
        Exception: The store's own error.
    """
    cache = kept_in(path)
    if cache is not None:
        then = stamp(path)
        cache.stamps[path] = time.monotonic(), then
        if _is_known(path, then):
            cache.make(*_of_copy(path, then, is_over))


def _asked_for(version: str) -> dict[str, str]:
    """The header that asks an HTTP server for that version only, which takes a strong ETag (RFC 9110)."""
    return {"If-Match": version} if version.startswith('"') else {}


def _is_known(path: str, then: Stamp) -> bool:
    """Whether a stamp is enough to verify a copy later.

    It is not for a file in an archive, because it does not cover the archive.
    """
    return "::" not in path and then.size >= 0 and bool(then.mtime_ns or then.version != address(path))


def _of_copy(
    path: str, then: Stamp, is_over: Callable[[], bool] = lambda: False
) -> tuple[str, int, str, Callable[[str], None]]:
    """The arguments of `CacheFolder.opened`."""
    return (
        address_at_source(path),
        then.size,
        f"{then.mtime_ns} {then.version}",
        functools.partial(_copy, path, then, is_over),
    )


def _copy(path: str, then: Stamp, is_over: Callable[[], bool], to: str) -> None:
    """Copy one version of a file."""
    if is_remote(path):
        try:
            with _asking(path) as (filesystem, inside):
                callback = transfer_callback(path, then.size, is_over)
                if path.startswith(HTTP):
                    copy_over_http(filesystem, inside, to, callback, _asked_for(then.version))
                else:
                    filesystem.get_file(inside, to, callback=callback)
        except Exception:
            explain(path, then, *IN_USE)
            raise
    else:
        shutil.copyfile(path, to)
    check_unchanged(path, then, stamp(path), *IN_USE)


def open_file(path: str, flags: int) -> int:
    """The descriptor of a local file, for ``open(opener=…)``.

    Raises:
        ValueError: It is a pipe, which could block forever, or a device.
    """
    fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        stamp_of(path, os.fstat(fd))
    except ValueError:
        os.close(fd)
        raise
    return fd


def decompressed(path: str) -> BinaryIO:
    """The bytes of a file, decompressed if its name ends in .gz, .zst, .xz or .bz2; those can only be read forward.

    Raises:
        EOFError: On reading: the compressed data ends too early.
    """
    file = opened(path)
    return _unpacked(file, path, file)


@contextlib.contextmanager
def whole(path: str, expected: Stamp | None = None) -> Iterator[BinaryIO]:
    """The bytes of one version of a file, decompressed, to be read to the end.

    Args:
        path: Path of the file.
        expected: The version that it must have. Default: its current version.

    Raises:
        OSError: On reading: the file ended early.
        ValueError: It has another version, or was changed by the time it was read.
    """
    then = stamp_lately(path)
    check_unchanged(path, expected or then, then, *IN_USE)
    copy = opened_copy(path, then)
    if copy is None and kept_in(path) is not None:
        then = stamp(path)  # a recent stamp is good enough only for copies
        check_unchanged(path, expected or then, then, *IN_USE)
    with copy or opened_there(path, then) as raw:
        try:
            if copy is None and not is_remote(path):
                check_unchanged(path, then, stamp_of(path, os.fstat(raw.fileno())), *IN_USE)
            with _unpacked(io.BufferedReader(_Whole(raw, path, then.size), BUFFER), path, raw) as file:
                yield file
        except Exception:
            if copy is None:
                explain(path, then, *IN_USE)
            raise
        if copy is None:  # a copy has the right version, whatever has happened to the file
            check_unchanged(path, then, stamp(path), *IN_USE)


def _unpacked(file: BinaryIO, path: str, raw: Any) -> BinaryIO:
    """The decompressed bytes of ``file``, which come from what was opened, ``raw``."""
    suffix = compression(path)
    if not suffix:
        return file
    answer = getattr(raw, "r", None)  # of a server that sends it in one piece, perhaps to be unpacked by the client
    if answer is not None and "Content-Encoding" in answer.headers:
        file = io.BufferedReader(cast("io.RawIOBase", file), BUFFER)
        if not kind_of(file.peek(ENOUGH)):
            return file
    module, new, *bound = LIBRARIES[suffix]
    return io.BufferedReader(Unpacked(file, path, functools.partial(new, extra(module, f"{path!r}")), *bound), 2**18)


VERSIONS: Final = (
    *("generation", "ETag", "etag", "VersionId", "version_id", "blob_id", "sha", "CRC", "Content-MD5", "Digest"),
    *(
        "LastModified",
        "last_modified",
        "Last-Modified",
        "mtime",
        "modificationTime",
        "modify",
        "modified",
        "updated",
        "created",
    ),
)
"""The keys under which stores report a file's version in fsspec's ``info``; the best first."""


def stamp(path: str) -> Stamp:
    """What distinguishes the current version of a file from any other.

    Always asks the disk or the server, never a cached listing.

    For a local file: its size and modification time. For a remote file: its size, and the first of `VERSIONS` that its
    store reports, such as the ETag; or, if it reports none, the file's `address`, so that only a change of its size is
    detected.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is a pipe or a device.
        OSError: The disk does not respond. Servers may fail in other ways as well.
    """
    if not is_remote(path):
        return stamp_of(path, os.stat(path))
    with _asking(path) as (filesystem, inside):
        said = filesystem.info(inside)
    version = next((str(said[name]) for name in VERSIONS if said.get(name)), address(path))
    short = len(version) <= 200 and version.isascii() and version.isprintable()
    return Stamp(-1 if said.get("size") is None else int(said["size"]), 0, version if short else checksum(version))


LATELY_S: Final = 60.0


def stamp_lately(path: str) -> Stamp:
    """The result of `stamp`; if a copy is kept, possibly a result from the last minute, so that reading a copy does not
    always wait for the server.
    """
    cache = kept_in(path)
    if cache is None:
        return stamp(path)
    asked, found = cache.stamps.get(path) or (-LATELY_S, None)
    if found is None or time.monotonic() - asked > LATELY_S:
        found = stamp(path)
        cache.stamps[path] = time.monotonic(), found
    return found


@contextlib.contextmanager
def _asking(path: str) -> Iterator[tuple[Any, str]]:
    """The file system of a remote file, and its path there, for one query that bypasses cached listings."""
    fsspec = extra("fsspec", f"{path!r}")
    try:
        filesystem, inside = fsspec.url_to_fs(str(path), **options_of(path))
        filesystem.invalidate_cache(filesystem._parent(inside))
        yield filesystem, inside
    except FileNotFoundError as exc:
        why = exc.__cause__
        if why is None or "http" not in path:
            raise
        status = getattr(why, "status", 500)
        if status >= 500 or status in (408, 429):
            raise why from None  # fsspec reports every server problem as a missing file, but these are temporary
        hint = ". Has the signature of the URL expired?" if status in (401, 403) else ""
        # also the client's own, about a Content-Encoding that it does not know
        hint = f" ({getattr(why, 'message', '')})" if status == 400 else hint
        raise FileNotFoundError(errno.ENOENT, f"the server answered {status}{hint}", path) from exc


REINDEX = "index it again: python -m penstock index"


IN_USE: Final = (
    "since it was first checked",
    (
        "Do not modify files while they are in use; give a new version another name. To read this version, start "
        "again, from a checkpoint if there is one."
    ),
)


def check_unchanged(path: str, then: Stamp, now: Stamp, since: str = "since it was indexed", remedy: str = "") -> None:
    """Raise if a file has changed since ``then``.

    Raises:
        ValueError: It has changed.
    """
    if then.fits(now):
        return
    if then.size != now.size:
        what = f"had {then.size} bytes and now has {now.size}"
    else:
        what = (
            "was written to"
            if then.version == now.version
            else f"had the version {then.version} and now has {now.version}"
        )
    raise ValueError(
        f"{path} has changed {since}: it {what}. {remedy or f'If the change is intended, {REINDEX} {path}'}"
    )


def explain(path: str, then: Stamp, *words: str) -> None:
    """After an error: raise that of `check_unchanged` instead if a change is the cause.

    A server that was asked for a version reports another one in its own way.
    """
    try:
        now = stamp(path)
    except Exception:  # the original error is more informative
        return
    check_unchanged(path, then, now, *words)


def stamp_of(path: str, status: os.stat_result) -> Stamp:
    if not S_ISREG(status.st_mode) and not S_ISDIR(status.st_mode):
        raise ValueError(
            f"{path} is a pipe or a device, but only regular files can be read. Write its output to a file."
        )
    return Stamp(status.st_size, status.st_mtime_ns)


class _Whole(io.RawIOBase):
    """A file for which it is an error to end before byte ``size``. Closing it leaves the underlying file open."""

    def __init__(self, file: BinaryIO, path: str, size: int) -> None:
        self._file = file
        self._path = path
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = self._file.seek(offset, whence)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        n: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._at += n
        if not n and self._at < self._size:
            raise OSError(
                f"{self._path} ended after {self._at} of its {self._size} bytes, so the disk or the connection failed."
            )
        return n
