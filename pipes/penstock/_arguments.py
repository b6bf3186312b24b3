"""What may be written where a number is asked for; imports nothing of ours.

NumPy's and torch's integers are whole numbers, and so is whatever else has an ``__index__``; a bool is not.
"""

from __future__ import annotations

import math
import operator
from typing import Any

LONGEST_S = 2_000_000.0
"""From here on (23 days) a time-out is none: the system's own calls count in milliseconds, and 32 bits of them are not much more."""


def whole_number(name: str, value: Any, least: int, below: int = 2**63, remedy: str = "") -> int:
    """``value`` as an ``int``.

    Args:
        name: Of the argument.
        value: What the user wrote.
        least: The smallest that makes sense.
        below: One more than the largest.
        remedy: A sentence for whoever wrote something else.

    Raises:
        ValueError: It is not a whole number, or out of bounds.
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
    """``value`` as a number of seconds; None for what waits forever: None, 0, and more than 23 days.

    Raises:
        ValueError: It is negative, or no number.
    """
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number >= 0:
        raise ValueError(f"{name}={value!r:.200} must be a number of seconds from 0; 0 waits forever.")
    return None if number >= LONGEST_S else number or None
