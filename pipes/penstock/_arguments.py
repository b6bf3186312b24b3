"""Checks of users' arguments, and the ``repr`` of objects built from them. Imports nothing from penstock.

Anything with an ``__index__`` is a whole number, including NumPy and torch integers; a bool is not.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
import re
from typing import Any, Final

LONGEST_S = 2_000_000.0
"""A time-out this long (23 days) or longer counts as none, because system calls count milliseconds in 32 bits, which
overflow soon after.
"""


def whole_number(name: str, value: Any, least: int, below: int = 2**63, remedy: str = "") -> int:
    """``value`` as an ``int``.

    Args:
        name: The argument's name, for the message.
        value: What the user passed.
        least: The smallest value allowed.
        below: One more than the largest value allowed.
        remedy: A sentence that ends the message: what to pass instead.

    Raises:
        ValueError: ``value`` is not a whole number, or is out of bounds.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number < below:
        bounds = f"of at least {least}" if number is None or number < least else f"below {below}"
        kind = f", a {type(value).__name__}," if number is None else ""
        raise ValueError(f"{name}={value!r:.200}{kind} must be a whole number {bounds}. {remedy}".rstrip())
    return number


def seconds(name: str, value: Any, zero: str = "waits forever") -> float | None:
    """``value`` in seconds; None for None, 0, and `LONGEST_S` or more. ``zero`` says in the message what 0 does.

    Raises:
        ValueError: ``value`` is negative or not a number.
    """
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number >= 0:
        raise ValueError(f"{name}={value!r:.200} must be a number of seconds, 0 or more; 0 {zero}.")
    return None if number >= LONGEST_S else number or None


def checksum(data: Any) -> str:
    """A hash of bytes, or of anything that has them, in 16 digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def joined(checksums: list[str]) -> str | None:
    """One checksum for several; None if there are none."""
    return checksum(" ".join(checksums).encode()) if len(checksums) > 1 else checksums[0] if checksums else None


def shortened(said: dict[str, Any], most: int = 400) -> dict[str, Any] | str:
    """``said``, if its JSON has at most ``most`` characters.

    Otherwise with checksums for its values, or, if that is too long, one checksum.
    """
    for one in (said, {name: _checksum_of(value) for name, value in said.items()}):
        if len(json.dumps(one)) <= most:
            return one
    return _checksum_of(said)


def _checksum_of(said: Any) -> str:
    return f"checksum {checksum(json.dumps(said, sort_keys=True).encode())}"


LONGEST_LINE: Final = 200
"""The most characters in a ``repr``."""
_LONGEST_VALUE: Final = 80
_FEW: Final = 6


class Shown:
    """A class whose ``repr`` is one line: its name and `details`.

    It loads nothing and never raises, whatever state the object is in.
    """

    __slots__ = ()

    def details(self) -> dict[str, Any]:
        """Names and values to show in the ``repr`` and the drawn graph.

        Must not load data, start anything or take long.
        """
        return {}

    def __repr__(self) -> str:
        details = shown_details(self)
        return called(type(self).__name__, details) if details else cut(f"{type(self).__name__}()", LONGEST_LINE)


def called(name: str, words: dict[str, str]) -> str:
    """``name(word=value, …)``, or just ``name``, on one line of at most `LONGEST_LINE` characters."""
    return cut(
        f"{name}({', '.join(f'{word}={value}' for word, value in words.items())})" if words else name, LONGEST_LINE
    )


def shown_details(one: Any) -> dict[str, str]:
    """The `Shown.details` of ``one`` as strings; empty if they raise."""
    try:
        return {word: brief(value) for word, value in one.details().items()}
    except Exception:  # from a user's class, or an object that was only partly built
        return {}


def brief(value: Any) -> str:
    """``value`` in a few characters.

    Other people's objects are shown by type, because their ``repr`` might read a disk or wait for a device.
    """
    kind = type(value)
    try:
        if value is None or kind in (bool, int, float):
            text = repr(value)
        elif kind in (str, bytes):
            text = repr(value) if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 8]!r}…"
        elif isinstance(value, Shown):
            text = repr(value)
        elif kind is functools.partial:
            text = f"partial({brief(value.func)})"
        elif kind in (list, tuple):
            shown = [brief(one) for one in value[:_FEW]] + [f"… {len(value)} items"] * (len(value) > _FEW)
            text = f"[{', '.join(shown)}]" if kind is list else f"({', '.join(shown)})"
        elif kind is dict:
            few = len(value) <= _FEW
            items = (
                ", ".join(f"{brief(key)}: {brief(one)}" for key, one in value.items()) if few else f"{len(value)} items"
            )
            text = f"{{{items}}}"
        elif kind.__module__ == "torch" and kind.__name__ in ("device", "dtype"):
            text = str(value)
        elif isinstance(value, type) or (callable(value) and isinstance(getattr(value, "__qualname__", None), str)):
            text = value.__qualname__
        else:
            text = kind.__name__
    except Exception:
        text = kind.__name__
    return cut(text, _LONGEST_VALUE)


def cut(text: str, most: int) -> str:
    """``text`` on one line, with at most ``most`` characters."""
    line = text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 1]}…"


def nbytes_of(name: str, value: Any) -> int:
    """A number of bytes, at least 1: an ``int``, or a string such as ``"200GB"`` or ``"64 MiB"``.

    Raises:
        ValueError: ``value`` is neither.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGTP]?)(i?)B\s*", value)
        if not found:
            raise ValueError(
                f"{name}={value!r} is not a size. Pass a number of bytes, or a string such as '200GB', '64MiB' or "
                f"'1.5TB'."
            )
        value = int(float(found[1]) * (1024 if found[3] else 1000) ** " kMGTP".index(found[2] or " "))
    return whole_number(name, value, 1)
