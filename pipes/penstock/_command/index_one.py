"""Write the index of one file, here or by parts on another machine."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from penstock import formats
from penstock._fetch.error_policy import describe
from penstock._streams.files import stamp, whole
from penstock._streams.index_file import read_header, read_offsets, write_index
from penstock._streams.paths import bare, compression, is_remote

if TYPE_CHECKING:
    import numpy as np

    from penstock._streams.files import Stamp
    from penstock._streams.known_files import Format


class Outcome(NamedTuple):
    """What came of one file.

    Attributes:
        path: The file's.
        records: How many it has; None if that could not be found out.
        is_new: Whether an index was written.
        error: Why not, or an empty text.
    """

    path: str
    records: int | None = None
    is_new: bool = False
    error: str = ""


def index_file(path: str, place: str) -> Outcome:
    """Write the index of one file to ``place``, unless it is there and up to date."""
    found = looked_at(path, place)
    return found if isinstance(found, Outcome) else written(path, place, found, offsets_in(path, found))


def looked_at(path: str, place: str) -> Outcome | Stamp:
    """What came of a file that need not be read; the version to read of any other."""
    try:
        format = format_of(path)
        if is_remote(place):
            raise ValueError("an index cannot be written beside it. Say --index FOLDER.")
        now = stamp(path)
        if now.size < 0:
            raise ValueError("the server does not say how many bytes it has, so nobody can know whether all have come. Download it first.")
        try:
            header = read_header(place)
            if header.kind == format.kind and header.stamp == now:
                read_offsets(place, header)
                return Outcome(path, header.records)
        except (FileNotFoundError, ValueError):
            pass  # none, or one that is damaged
    except Exception as exc:
        return _failed(path, exc)
    return now


def offsets_in(path: str, now: Stamp) -> np.ndarray | Outcome:
    """Where the records of a file begin, and where the last one ends; how it failed, if it did."""
    try:
        with whole(path, now) as file:
            return format_of(path).offsets(file, path)
    except Exception as exc:
        return _failed(path, exc)


def written(path: str, place: str, now: Stamp, offsets: np.ndarray | Outcome) -> Outcome:
    """What came of a file whose offsets are known."""
    if isinstance(offsets, Outcome):
        return offsets
    try:
        write_index(place, format_of(path).kind, now, offsets)
    except Exception as exc:
        return _failed(path, exc)
    return Outcome(path, len(offsets) - 1, is_new=True)


def _failed(path: str, exc: Exception) -> Outcome:
    """A damaged file and a server fail in ways of their own, and the other files are to be indexed."""
    return Outcome(path, error=str(exc) if isinstance(exc, OSError | EOFError | ValueError | ImportError) else describe(exc))


def format_of(path: str) -> Format:
    """How a file is read, by the end of its name.

    Raises:
        ValueError: Nobody knows.
    """
    name, indexed = bare(path).lower(), {suffix: format for suffix, (_, format) in all_formats().items() if format is not None}
    for suffix in (os.path.splitext(name)[1], os.path.splitext(name.removesuffix(compression(name)))[1]):
        if suffix in indexed:
            return indexed[suffix]
    raise ValueError(f"the name must end in one of {', '.join(indexed)}, or in one of them and .gz, .zst, .xz or .bz2.")


def all_formats() -> dict[str, tuple[str, Format | None]]:
    """The formats by what the names of their files end in: their name, and how they are indexed; None: they need no index."""
    modules = {name: import_module(getattr(formats, name).__module__) for name in formats.__all__}
    return {end: (name, getattr(module, "FORMAT", None)) for name, module in modules.items() for end in getattr(module, "SUFFIXES", ())}
