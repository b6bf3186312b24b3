"""Checks of numeric arguments; imports nothing of ours.

Anything with an ``__index__`` is a whole number, NumPy's and torch's integers included; a bool is not.
"""

from __future__ import annotations

import math
import operator
from typing import Any

LONGEST_S = 2_000_000.0
"""A time-out this long (23 days) or longer counts as none: system calls count milliseconds, and 32 bits of them overflow soon after."""


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


def seconds(name: str, value: Any) -> float | None:
    """``value`` in seconds; None, which waits forever, for None, 0 and `LONGEST_S` or more.

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
        raise ValueError(f"{name}={value!r:.200} must be a number of seconds, 0 or more; 0 waits forever.")
    return None if number >= LONGEST_S else number or None
