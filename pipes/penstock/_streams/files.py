"""Paths and files, here and elsewhere: lists of them, their bytes, and what tells that a file has changed."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import importlib
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Sequence
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, cast

from penstock import _arguments
from penstock._arguments import nbytes_of
from penstock._streams.unpacking import LIBRARIES, Unpacked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock._streams.copies import CacheFolder

    Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class Stamp(NamedTuple):
    """What tells one version of a file from another; see `stamp`.

    Attributes:
        size: Bytes; -1 where the server does not say.
        mtime_ns: When a local file was changed last; 0 for a remote file.
        version: What the store of a remote file calls the version; empty for a local file, and in old indices.
    """

    size: int
    mtime_ns: int
    version: str = ""

    def fits(self, other: Stamp) -> bool:
        """Whether both may be of the same version. If only one is of a remote file, they have only the size in common."""
        return self.size == other.size and (self[1:] == other[1:] or bool(self.version) != bool(other.version))


def named(shard: Any) -> Any:
    """What names a shard, as JSON. Paths without their folders, so that data may be moved."""
    if isinstance(shard, str | os.PathLike):
        return os.path.basename(os.fspath(shard))
    if isinstance(shard, Sequence) and not isinstance(shard, bytes | Stamp):
        return [named(part) for part in shard]
    return shard if isinstance(shard, int) else None


def names_of(shards: Sequence[Any]) -> str:
    """A checksum of the names of ``shards``, in their order. Files with the same name are told apart by what of their folders differs.

    A file may be compressed later, so that is left out of its name.
    """
    if not all(isinstance(shard, str | os.PathLike) for shard in shards):
        return checksum([named(shard) for shard in shards])
    parts = [_parts(os.fsdecode(shard)) for shard in shards]
    for part in parts:
        stem, suffix = os.path.splitext(part[-1])
        if compression(part[-1]):
            part[-1] = f"{stem}.tar" if suffix.lower() == ".tgz" else stem
    names = [part[-1] for part in parts]
    if len(set(names)) < len(names):
        columns = zip(*(part[:-1] for part in parts), strict=False)
        common = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))
        names = ["/".join(part[common:]) for part in parts]
    return checksum(names)


def _parts(path: str) -> list[str]:
    """The folders of a file and its name; an archive is a folder."""
    if not is_remote(path):
        return os.path.abspath(path).split("/")
    *inner, outer = address(path).split("::")
    return "/".join([outer, *filter(is_remote, reversed(inner))]).split("/")


def address(path: str) -> str:
    """The whole path of a local file, or a URL without what signs it."""
    return "::".join(map(_unsigned, path.split("::"))) if is_remote(path) else os.path.abspath(path)


def _unsigned(link: str) -> str:
    """A URL without what signs it, for a few hours; that of another store has no such part."""
    return link.partition("?")[0] if link.startswith(("http://", "https://")) else link


def checksum(said: Any) -> str:
    """Of JSON."""
    return _arguments.checksum(json.dumps(said).encode())


def extra(module: str, why: str) -> Any:
    """An optional package.

    Raises:
        ImportError: It is not installed; the message says ``why`` it is needed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ImportError(
            f"{why} needs the package {module.partition('.')[0]}: pip install 'torch-penstock[formats]'", name=module
        ) from exc


class Reached(str):
    """A path that takes more to be opened than itself.

    Attributes:
        storage_options: For the file system of fsspec: keys, an endpoint, headers.
        cache: Where a copy of it is kept, or None.
    """

    storage_options: Mapping[str, Any]
    cache: CacheFolder | None

    def __new__(cls, path: str, storage_options: Mapping[str, Any], cache: CacheFolder | None = None) -> Reached:
        made = super().__new__(cls, path)
        made.storage_options, made.cache = storage_options, cache
        return made

    def __reduce__(self) -> Any:
        return Reached, (str(self), self.storage_options, self.cache)


def beside(path: str, other: str) -> str:
    """``other``, which takes the same to be opened as ``path``; no copy of it is kept."""
    return Reached(other, path.storage_options) if isinstance(path, Reached) else other


def kept_in(path: str) -> CacheFolder | None:
    """Where a copy of a file is kept, if anywhere."""
    return path.cache if isinstance(path, Reached) else None


class Reach(NamedTuple):
    """How files are reached: the arguments of these names of `penstock.formats`."""

    storage_options: Mapping[str, Any] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    max_cache_size: int | str | None = None

    def of(self, files: list[str]) -> list[str]:
        """The paths ``files``, such that copies of them are kept where that was asked for.

        Raises:
            ValueError: Only one of ``cache_dir`` and ``max_cache_size`` came, or the latter is no size; the folder has no locks.
        """
        if (self.cache_dir is None) != (self.max_cache_size is None):
            raise ValueError(
                "cache_dir and max_cache_size go together: the folder of the copies, and how many bytes they may take, such as '200GB'. Say both, or neither."
            )
        if self.cache_dir is None:
            return files
        from penstock._streams.copies import CacheFolder, file_hash

        cache = CacheFolder(os.fspath(self.cache_dir), nbytes_of("max_cache_size", self.max_cache_size))
        cache.own = frozenset(file_hash(address(file)) for file in files)
        return [Reached(file, _options(file), cache) for file in files]


def expanded(paths: Paths, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """A list of paths from a path, a pattern, or many of either.

    Braces are expanded as a shell does: ``{00000..01242}`` to numbers of as many digits, ``{a,b}`` to either. Then ``*``, ``?``, ``[…]`` and ``**``
    stand for the files that there are, sorted. Paths with ``://`` are left to fsspec; behind a ``?`` in a URL of HTTP stands no pattern, but what signs it.

    Args:
        paths: As said.
        storage_options: See `Reached`.

    Raises:
        FileNotFoundError: No file fits a pattern.
        TypeError: What came is no path.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    found = []
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"{path!r:.80} is no path. Pass a path, a pattern such as 'data/{{000..127}}.tar' or 'data/*.tar', or a list of them."
            )
        text = os.fspath(path)
        if "://" not in text and os.path.exists(text):
            found.append(text)
            continue
        signed = text[len(_unsigned(text)) :]
        for one in braces_expanded(_unsigned(text)):
            name = Reached(one + signed, storage_options) if storage_options and is_remote(one) else one + signed
            found += _globbed(name) if re.search(r"[*?[]", bare(one)) else [name]
    return found


def braces_expanded(pattern: str) -> Iterator[str]:
    """The texts that a pattern with braces stands for; braces without a comma or two dots in them are left alone."""
    depth, begin = 0, 0
    for at, letter in enumerate(pattern):
        if letter == "{":
            begin, depth = (at if depth == 0 else begin), depth + 1
        elif letter == "}" and depth:
            depth -= 1
            if depth == 0 and (choices := _choices(pattern[begin + 1 : at])) is not None:
                heads, tails = pattern[:begin], list(braces_expanded(pattern[at + 1 :]))
                yield from (heads + choice + tail for choice, tail in itertools.product(choices, tails))
                return
    yield pattern


BLOCK: Final = 2**23
"""Bytes that a remote file reads ahead: one for each lane. s3fs has 50 MiB."""


BUFFER: Final = 2**16
"""Bytes of a local file read at once. Python's own 8 KiB take two reads for a sample of 20 KB and its header."""


def is_remote(path: str) -> bool:
    """Whether fsspec opens it."""
    return "://" in path


def bare(path: str) -> str:
    """What of a path ends in the file's name: without the links of fsspec around it (``zip://name::…``), and what signs a URL (``?…``)."""
    if not is_remote(path):
        return path
    return _unsigned(next(filter(is_remote, path.split("::"))))


def opened(path: str, expected: Stamp | None = None) -> BinaryIO:
    """The bytes of a file; from a copy where one is kept. An HTTP server is asked for no version but the ``expected`` one; S3 never gives parts of two."""
    version = "" if expected is None else expected.version
    if (cache := kept_in(path)) is not None:
        then = expected or stamp(path)
        if then.size >= 0 and (then.mtime_ns or then.version != address(path)):  # else nobody could know whether a copy is still right
            copy = cache.opened(address(path), then.size, f"{then.mtime_ns} {then.version}", functools.partial(_copy, path, then))
            if copy is not None:
                return copy
    if not is_remote(path):
        return open(path, "rb", buffering=BUFFER, opener=open_file)
    with _asking(path) as (filesystem, inside):
        # Of these, HTTP's own default drops parts of a block before they are read, and fetches them again.
        words = {"cache_type": "readahead"} if getattr(filesystem, "cache_type", None) == "bytes" else {}
        file = filesystem.open(inside, "rb", block_size=BLOCK, **words)
    if path.startswith(("http://", "https://")) and version.startswith('"'):  # a strong ETag, by RFC 9110
        file.kwargs["headers"] = {**file.kwargs.get("headers", {}), "If-Match": version}
    if not filesystem.cachable:
        file.penstock_filesystem = filesystem  # an archive is closed when nobody holds its file system any more
    return cast("BinaryIO", file)


def _copy(path: str, then: Stamp, to: str) -> None:
    """Copy one version of a file, in one request."""
    if is_remote(path):
        with _asking(path) as (filesystem, inside):
            filesystem.get_file(inside, to)
    else:
        shutil.copyfile(path, to)
    check_unchanged(path, then, stamp(path), *IN_USE)


def open_file(path: str, flags: int) -> int:
    """The descriptor of a local file, for ``open(opener=…)``.

    Raises:
        ValueError: It is a pipe, which could be waited for forever, or a device.
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
    return _unpacked(opened(path), path)


@contextlib.contextmanager
def whole(path: str, expected: Stamp | None = None) -> Iterator[BinaryIO]:
    """The bytes of one version of a file, decompressed, for who reads them to their end.

    Args:
        path: The file.
        expected: The version that it must have. Default: the one that it has.

    Raises:
        OSError: On reading: the file ended before the last of its bytes.
        ValueError: It is of another version, or was changed by the time that it was read.
    """
    then = stamp(path)
    check_unchanged(path, expected or then, then, *IN_USE)
    with opened(path, then) as raw:
        try:
            if not is_remote(path) and kept_in(path) is None:
                check_unchanged(path, then, stamp_of(path, os.fstat(raw.fileno())), *IN_USE)
            with _unpacked(io.BufferedReader(_Whole(raw, path, then.size), BUFFER), path) as file:
                yield file
        except Exception:
            explain(path, then, *IN_USE)
            raise
        check_unchanged(path, then, stamp(path), *IN_USE)


def _unpacked(file: BinaryIO, path: str) -> BinaryIO:
    suffix = compression(path)
    if not suffix:
        return file
    module, new, *bound = LIBRARIES[suffix]
    return io.BufferedReader(Unpacked(file, path, functools.partial(new, extra(module, f"{path!r}")), *bound), 2**18)


def compression(path: str) -> str:
    """The suffix of a compressed file, or an empty text."""
    suffix = os.path.splitext(bare(path))[1].lower()
    return {".tgz": ".gz"}.get(suffix, suffix if suffix in (".gz", ".zst", ".xz", ".bz2") else "")


VERSIONS: Final = (
    *("generation", "ETag", "etag", "VersionId", "version_id", "blob_id", "sha", "CRC", "Content-MD5", "Digest"),
    *("LastModified", "last_modified", "Last-Modified", "mtime", "modificationTime", "modify", "modified", "updated", "created"),
)
"""What stores call the version of a file in fsspec's ``info``; the best first."""


def stamp(path: str) -> Stamp:
    """What tells the version that a file has now from any other. Asks the disk or the server, never a listing that was kept.

    Of a local file: its size and time. Of a remote one: its size, and the first of `VERSIONS` that its store says, such as the ETag; or, if it says none, the
    file's `address`, so that only a change of its size is seen.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is a pipe or a device.
        OSError: The disk does not answer. A server may fail in other ways, too.
    """
    if not is_remote(path):
        return stamp_of(path, os.stat(path))
    with _asking(path) as (filesystem, inside):
        said = filesystem.info(inside)
    version = next((str(said[name]) for name in VERSIONS if said.get(name)), address(path))
    short = len(version) <= 200 and version.isascii() and version.isprintable()
    return Stamp(-1 if said.get("size") is None else int(said["size"]), 0, version if short else checksum(version))


@contextlib.contextmanager
def _asking(path: str) -> Iterator[tuple[Any, str]]:
    """The file system of a remote file, and its path there, for one question that no kept listing should answer."""
    fsspec = extra("fsspec", f"{path!r}")
    try:
        filesystem, inside = fsspec.url_to_fs(str(path), **_options(path))
        filesystem.invalidate_cache(filesystem._parent(inside))
        yield filesystem, inside
    except FileNotFoundError as exc:
        why = exc.__cause__
        if why is None or "http" not in path:
            raise
        status = getattr(why, "status", 500)
        if status >= 500 or status in (408, 429):
            raise why from None  # fsspec calls every trouble of a server a missing file, but these pass
        hint = ". Has what signs the URL expired?" if status in (401, 403) else ""
        raise FileNotFoundError(errno.ENOENT, f"the server answered {status}{hint}", path) from exc


def _options(path: str) -> Mapping[str, Any]:
    return path.storage_options if isinstance(path, Reached) else {}


REINDEX = "index it again: python -m penstock index"
IN_USE: Final = (
    "since it was first looked at",
    "Leave files as they are while they are read, and give a new version another name; or start again, from a checkpoint if there is one, to read this one.",
)


def check_unchanged(path: str, then: Stamp, now: Stamp, since: str = "since it was indexed", remedy: str = "") -> None:
    """Raise unless a file is the one that it was ``then``.

    Raises:
        ValueError: It is not.
    """
    if then.fits(now):
        return
    if then.size != now.size:
        what = f"had {then.size} bytes, and has {now.size}"
    else:
        what = "was written to" if then.version == now.version else f"was the version {then.version}, and is {now.version}"
    raise ValueError(f"{path} has changed {since}: it {what}. {remedy or f'If that is how it should be, {REINDEX} {path}'}")


def explain(path: str, then: Stamp, *words: str) -> None:
    """After an error: raise the one of `check_unchanged` if that is why. A server that was asked for a version says in its own way that it has another."""
    try:
        now = stamp(path)
    except Exception:  # the first error says more
        return
    check_unchanged(path, then, now, *words)


def stamp_of(path: str, status: os.stat_result) -> Stamp:
    if not S_ISREG(status.st_mode) and not S_ISDIR(status.st_mode):
        raise ValueError(f"{path} is a pipe or a device, and only files can be read. Write what comes out of it into a file.")
    return Stamp(status.st_size, status.st_mtime_ns)


class _Whole(io.RawIOBase):
    """A file whose end is an error if it comes before byte ``size``. Closing it leaves the file open."""

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
            raise OSError(f"{self._path} ended after {self._at} of its {self._size} bytes, so the disk or the server broke off.")
        return n


def _globbed(pattern: str) -> list[str]:
    if is_remote(pattern):
        filesystem, inside = extra("fsspec.core", f"{pattern!r}").url_to_fs(str(pattern), **_options(pattern))
        filesystem.invalidate_cache()  # of listings that were kept
        address = bare(pattern)
        head = address.removesuffix(inside)  # a protocol, and perhaps a host
        paths = [head + path if head != address else filesystem.unstrip_protocol(path) for path in sorted(filesystem.glob(inside))]
        found = [beside(pattern, pattern.replace(address, path, 1)) for path in paths]
    else:
        found = sorted(glob.glob(pattern, recursive=True))
    if not found:
        where = "" if is_remote(pattern) else f", looked for from {os.getcwd()!r}"
        raise FileNotFoundError(f"no file fits {pattern!r}{where}.")
    return found


def _choices(inside: str) -> list[str] | None:
    """What a pair of braces stands for, or None."""
    if span := re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", inside):
        first, last, step = int(span[1]), int(span[2]), abs(int(span[3] or 1)) or 1
        padded = any(re.match(r"-?0\d", end) for end in (span[1], span[2]))
        digits = max(len(span[1]), len(span[2])) if padded else 0
        numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        return [f"{number:0{digits}d}" for number in numbers]
    if span := re.fullmatch(r"([a-zA-Z])\.\.([a-zA-Z])", inside):
        first, last = ord(span[1]), ord(span[2])
        return [chr(letter) for letter in (range(first, last + 1) if first <= last else range(first, last - 1, -1))]
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(inside):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            parts.append(inside[begin:at])
            begin = at + 1
    if not parts:
        return None
    return [choice for part in [*parts, inside[begin:]] for choice in braces_expanded(part)]
