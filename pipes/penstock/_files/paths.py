"""Local and remote paths: parsing them, expanding patterns, and what is needed to open their files."""

from __future__ import annotations

import functools
import glob
import importlib
import itertools
import json
import os
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict
from urllib.parse import parse_qsl, urlencode

from penstock import _arguments
from penstock._arguments import nbytes_of, whole_number

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from penstock._files.copies import CacheFolder

    Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def is_remote(path: str) -> bool:
    """Whether fsspec opens the path."""
    return "://" in path


def _on_disk(path: str) -> str | None:
    """Where a file, or the archive that it is in, is on a local disk; None if it is on a server."""
    last = re.sub(r"^(file|local)://", "", path.rpartition("::")[2]) if is_remote(path) else path
    return None if is_remote(last) else last


def bare(path: str) -> str:
    """The part of a path that ends with the file's name: without fsspec's chained links (``zip://name::…``) and a URL's
    query (``?…``).
    """
    if not is_remote(path):
        return path
    return _unasked(next(filter(is_remote, path.split("::"))))


def address(path: str, names: Collection[str] | None = None) -> str:
    """The absolute path of a local file, or a URL without its signature, which is valid for a few hours.

    Args:
        path: Path of the file.
        names: The parameters of its query that count; see `telling`. None: all but a signature.
    """
    if not is_remote(path):
        return os.path.abspath(path)
    return "::".join(_unasked(link) + query(link, names) for link in path.split("::"))


def query(path: str, names: Collection[str] | None = None) -> str:
    """The part of a path that `address` adds: the query, if that is of an HTTP URL, without what does not count."""
    kept = sorted((name, value) for name, value in _asked(path) if names is None or name in names)
    return f"?{urlencode(kept)}" if kept else ""


def telling(paths: Iterable[str]) -> frozenset[str]:
    """The parameters of queries that tell the files of a data set apart: those in which its URLs differ, and
    ``versionId``. Signatures never do.
    """
    asked = [dict(_asked(path)) for path in paths]
    values = {name: {one.get(name) for one in asked} for name in set().union(*asked)}
    return frozenset(name for name, found in values.items() if len(found) > 1 or name == "versionId")


# what these have in common beside the names that begin with a prefix; each with the name that shows that there is one
_SIGNATURES: Final = {
    # S3 and GCS of old, CloudFront
    "signature": "awsaccesskeyid googleaccessid expires policy key-pair-id hash-algorithm",
    "sig": "sv ss srt sr st se sp sip spr si skoid sktid skt ske sks skv sdd saoid suoid scid ses",  # Azure
}


def _asked(path: str) -> list[tuple[str, str]]:
    """The parameters in the query of a URL, without a signature."""
    found = parse_qsl(path[len(_unasked(path)) + 1 :], keep_blank_values=True)
    there = {name.lower() for name, _ in found}
    signed = {name for sign, names in _SIGNATURES.items() if sign in there for name in (sign, *names.split())}
    return [
        (name, value)
        for name, value in found
        if name.lower() not in signed and not name.lower().startswith(("x-amz-", "x-goog-"))
    ]


def _unasked(link: str) -> str:
    """A URL without its query; in paths of other stores a question mark is a letter, or begins the version of an object
    on S3.
    """
    return link.partition("?" if link.startswith(("http://", "https://")) else "?versionId=")[0]


def compression(path: str) -> str:
    """The suffix of a compressed file, or an empty string."""
    suffix = os.path.splitext(bare(path))[1].lower()
    return {".tgz": ".gz", ".zstd": ".zst"}.get(suffix, suffix if suffix in (".gz", ".zst", ".xz", ".bz2") else "")


class Reached(str):
    """A path together with what is needed to open it.

    Attributes:
        storage_options: Passed to the fsspec file system: keys, an endpoint, headers.
        cache: Where a copy of the file is kept, or None.
    """

    storage_options: Mapping[str, Any]
    cache: CacheFolder | None

    def __new__(cls, path: str, storage_options: Mapping[str, Any], cache: CacheFolder | None = None) -> Reached:
        made = super().__new__(cls, path)
        made.storage_options, made.cache = storage_options, cache
        return made

    def __reduce__(self) -> Any:
        return Reached, (str(self), self.storage_options, self.cache)


def reached(path: str, storage_options: Mapping[str, Any] | None) -> str:
    """A path together with its storage options."""
    return Reached(path, storage_options) if storage_options and is_remote(path) else path


def beside(path: str, other: str) -> str:
    """The path ``other``, opened with the same options as ``path``."""
    return Reached(other, path.storage_options, path.cache) if isinstance(path, Reached) else other


def without_copy(path: str) -> str:
    """The same path, without a copy."""
    return Reached(str(path), path.storage_options) if isinstance(path, Reached) else path


def kept_in(path: object) -> CacheFolder | None:
    """Where a copy of a file is kept, or None."""
    return path.cache if isinstance(path, Reached) else None


class CopyOptions(TypedDict, total=False):
    """The keyword arguments by which formats reach files, and keep copies of them; `Shards` documents them."""

    storage_options: Mapping[str, Any] | None
    cache_dir: str | os.PathLike[str] | None
    max_cache_size: int | str | None


class Reach(NamedTuple):
    """How files are opened: `CopyOptions`, and how many shards per lane to copy before they are read."""

    storage_options: Mapping[str, Any] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    max_cache_size: int | str | None = None
    ahead: int = 1

    @classmethod
    def taken(cls, options: Any, ahead: int = 0) -> Reach:
        """Those of ``options`` that are `CopyOptions`, which are removed there."""
        return cls(**{name: options.pop(name) for name in CopyOptions.__annotations__ if name in options}, ahead=ahead)

    def of(self, files: list[str]) -> list[str]:
        """The paths ``files``, with copies if the user asked for them.

        Raises:
            ValueError: Only one of ``cache_dir`` and ``max_cache_size`` was given; ``max_cache_size`` is not a size; or
                the folder does not support locks.
        """
        if (self.cache_dir is None) != (self.max_cache_size is None):
            raise ValueError(
                "cache_dir and max_cache_size go together: the folder for copies, and the number of bytes that they "
                "may take, such as '200GB'. Pass both, or neither."
            )
        if self.cache_dir is None:
            return files
        from penstock._files.copies import CacheFolder, hashes_of

        folder = os.path.expanduser(os.fspath(self.cache_dir))
        if not folder or "://" in folder:
            raise ValueError(
                f"cache_dir={folder!r} is not a folder on a local disk, where the copies must be. Pass one, such as "
                f"'/local/disk/cache'."
            )
        inside, real = os.path.join(os.path.realpath(folder), ""), functools.cache(os.path.realpath)
        for file in files:
            on_disk = _on_disk(file)
            if on_disk is not None and os.path.join(real(os.path.dirname(on_disk)), "").startswith(inside):
                raise ValueError(
                    f"{file} is inside cache_dir={folder!r}, so copies would be read as data. Choose a folder that is "
                    f"used only for copies."
                )
        most, ahead = nbytes_of("max_cache_size", self.max_cache_size), whole_number("ahead", self.ahead, 0)
        cache = CacheFolder(
            folder,
            most,
            (name for file in files for name in hashes_of(address_at_source(Reached(file, options_of(file))))),
            ahead,
        )
        return [Reached(file, options_of(file), cache) for file in files]


def options_of(path: str) -> Mapping[str, Any]:
    return path.storage_options if isinstance(path, Reached) else {}


def listed(paths: Iterable[Any]) -> list[Any]:
    """Several paths, in their order."""
    if isinstance(paths, set | frozenset):
        raise TypeError(
            f"{paths!r:.80} is a set, whose order differs between processes. Pass a list, such as sorted(...) of it."
        )
    return list(paths)


def expanded(paths: Paths, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """A list of paths from a path, a pattern, or many of either.

    Braces are expanded as in a shell: ``{00000..01242}`` to numbers with the same number of digits, ``{a,b}`` to
    either. Then ``*``, ``?``, ``[…]`` and ``**`` are matched against existing files, sorted. Paths with ``://`` are
    handled by fsspec; in an HTTP URL, what follows ``?`` is a signature, not a pattern.

    Args:
        paths: A path, a pattern, or a list of them.
        storage_options: See `Reached`.

    Raises:
        FileNotFoundError: No file matches a pattern.
        TypeError: An argument is not a path.
    """
    found = []
    for path in [paths] if isinstance(paths, str | bytes | os.PathLike) else listed(paths):
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"{path!r:.80} is not a path. Pass a path, a pattern such as 'data/{{000..127}}.tar' or 'data/*.tar', "
                f"or a list of them."
            )
        text = os.fspath(path)
        if "://" not in text and os.path.exists(text):
            found.append(text)
            continue
        asked = text[len(_unasked(text)) :]
        for one in braces_expanded(_unasked(text)):
            name = reached(one + asked, storage_options)
            found += _globbed(name) if re.search(r"[*?[]", bare(one)) else [name]
    return found


def braces_expanded(pattern: str) -> Iterator[str]:
    """The strings that a pattern with braces expands to; braces without a comma or two dots are left alone."""
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


def _globbed(pattern: str) -> list[str]:
    if is_remote(pattern):
        filesystem, inside = extra("fsspec.core", f"{pattern!r}").url_to_fs(str(pattern), **options_of(pattern))
        filesystem.invalidate_cache()  # of cached listings
        address = bare(pattern)
        head = address.removesuffix(inside)  # a protocol, and possibly a host
        paths = [
            head + path if head != address else filesystem.unstrip_protocol(path)
            for path in sorted(filesystem.glob(inside))
        ]
        found = [beside(pattern, pattern.replace(address, path, 1)) for path in paths]
    else:
        found = sorted(glob.glob(pattern, recursive=True))
    if not found:
        where = "" if is_remote(pattern) else f", searched from {os.getcwd()!r}"
        raise FileNotFoundError(f"no file matches {pattern!r}{where}.")
    return found


def _choices(inside: str) -> list[str] | None:
    """The alternatives in a pair of braces, or None."""
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


def address_at_source(path: str) -> str:
    """The `address` of a file, and its host if the options name one; but no keys, which change over time."""
    options = options_of(path)
    where = {
        name: options[name]
        for name in ("endpoint_url", "host", "port", "base_url", "path", "fs", "fo", "account_name")
        if name in options
    }
    where |= (
        {"endpoint_url": options["client_kwargs"]["endpoint_url"]}
        if "endpoint_url" in options.get("client_kwargs", {})
        else {}
    )
    return address(path) + (f" {json.dumps(where, sort_keys=True, default=str)}" if where else "")


def checksum(said: Any) -> str:
    """A checksum of JSON."""
    return _arguments.checksum(json.dumps(said).encode())


def extra(module: str, why: str, package: str | None = None) -> Any:
    """Import an optional package.

    Args:
        module: The module to import.
        why: The feature that needs it.
        package: What to install; default: what has the name of the module.

    Raises:
        ImportError: It is not installed; the message starts with ``why``.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        package = package or module.partition(".")[0]
        raise ImportError(f"{why} needs the package {package}: pip install '{package}'", name=module) from exc
