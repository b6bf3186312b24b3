"""Patterns of paths, and the files that they stand for."""

from __future__ import annotations

import glob
import itertools
import os
import re
from typing import TYPE_CHECKING

from penstock._streams.files import bare, extra, is_remote, unsigned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def expanded(paths: Paths) -> list[str]:
    """A list of paths from a path, a pattern, or many of either.

    Braces are expanded as a shell does: ``{00000..01242}`` to numbers of as many digits, ``{a,b}`` to either. Then ``*``, ``?``, ``[…]`` and ``**``
    stand for the files that there are, sorted. Paths with ``://`` are left to fsspec; behind a ``?`` in a URL of HTTP stands no pattern, but what signs it.

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
        signed = text[len(unsigned(text)) :]
        for one in braces_expanded(unsigned(text)):
            found += _globbed(one + signed) if re.search(r"[*?[]", bare(one)) else [one + signed]
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


def _globbed(pattern: str) -> list[str]:
    if is_remote(pattern):
        filesystem, inside = extra("fsspec.core", f"{pattern!r}").url_to_fs(pattern)
        filesystem.invalidate_cache()  # of listings that were kept
        address = bare(pattern)
        head = address.removesuffix(inside)  # a protocol, and perhaps a host
        paths = [head + path if head != address else filesystem.unstrip_protocol(path) for path in sorted(filesystem.glob(inside))]
        found = [pattern.replace(address, path, 1) for path in paths]
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
