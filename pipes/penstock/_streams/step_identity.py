"""What tells two lists of steps apart: names, settings and values, for saved states; and their code, too, for bookmarks."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

from penstock._arguments import checksum
from penstock._errors import first_time
from penstock._streams.plain_values import PlainValues, named_only, text_of
from penstock._streams.plain_values import named as named

if TYPE_CHECKING:
    from collections.abc import Sequence

_logger = logging.getLogger("penstock")


def step_settings(steps: Sequence[Any]) -> list[dict[str, Any]]:
    """What names each step: its name, and its ``version`` and ``settings()`` if it has them. JSON.

    Raises:
        TypeError: A step cannot be called, or its settings are no JSON.
    """
    said = []
    for place, step in enumerate(steps):
        if not callable(step):
            raise TypeError(f"steps[{place}] is {step!r:.80}, and a step must be a function from an iterator to an iterator.")
        try:
            said.append(json.loads(json.dumps(named(step))))
        except (TypeError, ValueError) as exc:
            raise TypeError(f"settings() and version of steps[{place}], {named_only(step)}, must be JSON, but: {exc}") from exc
    return said


def step_values(steps: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """The plain values that each step without ``settings()`` holds, by step and name. JSON; those that would be long are checksums.

    Values that are not plain are left out, and the log says so once.
    """
    found = {}
    for place, step in enumerate(steps):
        values = PlainValues()
        if holds := {name: _short(value) for name, value in values.held(step).items()}:
            found[f"steps[{place}] {named_only(step)}"] = holds
        if values.left_out and first_time(named_only(step), *values.left_out):
            _logger.warning(
                "steps[%d], %s, holds %s, which no saved state can compare: with another one, a state would load without a word. Give the step (or the object) a "
                "settings() that returns what matters, as JSON, or a version.",
                place,
                named_only(step),
                ", ".join(values.left_out),
            )
    return found


def code_hash(steps: Sequence[Any]) -> str:
    """A hash of the settings and values of ``steps``, and of the user's code that they are seen to run. The same in every process of one version of Python.

    Bookmarks need the code, because a count that the code before an edit gave would mislead a seek.
    """
    return _digest(PlainValues(code=True).of([step_settings(steps), *steps]))


_LONGEST: Final = 200
"""Characters of a value in a state."""


def _short(value: Any) -> Any:
    """``value``, or the checksum of it, or of the long parts of it."""
    if len(text_of(value)) <= _LONGEST:
        return value
    parts = {name: _short(part) for name, part in value.items()} if isinstance(value, dict) else value
    return parts if len(text_of(parts)) <= _LONGEST else f"checksum {_digest(value)}"


def _digest(value: Any) -> str:
    return checksum(text_of(value).encode())
