"""Write the index of one file, here or in parts on another machine."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from penstock import formats
from penstock._fetch.error_policy import describe
from penstock._files.files import stamp, whole
from penstock._files.index_file import read_header, read_offsets, write_index
from penstock._files.paths import bare, compression, is_remote

if TYPE_CHECKING:
    import numpy as np

    from penstock._files.files import Stamp
    from penstock._streams.known_files import Format


class Outcome(NamedTuple):
    """The result for one file.

    Attributes:
        path: Path of the file.
        records: Its number of records; None if that could not be determined.
        is_new: Whether an index was written.
        error: Why not; empty if there was no error.
    """

    path: str
    records: int | None = None
    is_new: bool = False
    error: str = ""


def index_file(path: str, place: str) -> Outcome:
    """Write the index of one file to ``place``, unless an up-to-date one exists."""
    found = looked_at(path, place)
    return found if isinstance(found, Outcome) else written(path, place, found, offsets_in(path, found))


def looked_at(path: str, place: str) -> Outcome | Stamp:
    """The result for a file that need not be read; for any other, the version to read."""
    try:
        format = format_of(path)
        if is_remote(place):
            raise ValueError("an index cannot be written next to it. Pass --index FOLDER.")
        now = stamp(path)
        if now.size < 0:
            raise ValueError("the server does not report its size, so a truncated download could not be detected. Download the file first.")
        try:
            header = read_header(place)
            if header.kind == format.kind and header.stamp == now:
                read_offsets(place, header)
                return Outcome(path, header.records)
        except (FileNotFoundError, ValueError):
            pass  # there is no index, or a damaged one
    except Exception as exc:
        return _failed(path, exc)
    return now


def offsets_in(path: str, now: Stamp) -> np.ndarray | Outcome:
    """Where the records of a file begin, and where the last one ends; or the failure."""
    try:
        with whole(path, now) as file:
            return format_of(path).offsets(file, path)
    except Exception as exc:
        return _failed(path, exc)


def written(path: str, place: str, now: Stamp, offsets: np.ndarray | Outcome) -> Outcome:
    """The result for a file, once its offsets are known."""
    if isinstance(offsets, Outcome):
        return offsets
    try:
        write_index(place, format_of(path).kind, now, offsets)
    except Exception as exc:
        return _failed(path, exc)
    return Outcome(path, len(offsets) - 1, is_new=True)


def _failed(path: str, exc: Exception) -> Outcome:
    """The result for a file that failed. Damaged files and servers raise errors of any type, and the other files must still be indexed."""
    return Outcome(path, error=str(exc) if isinstance(exc, OSError | EOFError | ValueError | ImportError) else describe(exc))


def format_of(path: str) -> Format:
    """How to read a file, by its suffix.

    Raises:
        ValueError: The suffix is unknown.
    """
    name, indexed = bare(path).lower(), {suffix: format for suffix, (_, format) in all_formats().items() if format is not None}
    for suffix in (os.path.splitext(name)[1], os.path.splitext(name.removesuffix(compression(name)))[1]):
        if suffix in indexed:
            return indexed[suffix]
    raise ValueError(f"the name must end in one of {', '.join(indexed)}, optionally followed by .gz, .zst, .xz or .bz2.")


def all_formats() -> dict[str, tuple[str, Format | None]]:
    """The formats by file suffix: their name, and how they are indexed; None: they need no index."""
    modules = {name: import_module(getattr(formats, name).__module__) for name in formats.__all__}
    return {end: (name, getattr(module, "FORMAT", None)) for name, module in modules.items() for end in getattr(module, "SUFFIXES", ())}
