"""The plain values that the user's objects hold: numbers, short texts, None. They show what the loop has changed."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock._errors import suppress_own
from penstock._fetch.epoch_attribute import is_told
from penstock._fetch.held import held
from penstock._fetch.told_parts import is_data

if TYPE_CHECKING:
    from collections.abc import Iterator

_ITEMS: Final = 64
"""Items of a container that are compared."""
_LONG: Final = 1024
"""Characters of the longest text that is compared."""
_PLAIN_STATE: Final = getattr(object, "__getstate__", None)
_PLAIN: Final = (bool, int, float, type(None), np.generic)


def plain_values(roots: dict[str, Any]) -> dict[str, Any]:
    """The plain values that ``roots`` hold, by their paths; none of what has a ``set_epoch``."""
    found: dict[str, Any] = {}
    for one in held(roots, enters=_enters):
        if _enters(one.value) and not type(one.value).__module__.startswith("penstock."):
            with suppress_own():  # another thread changes it
                found.update(_plain_in(one.path, one.value))
    return found


def _enters(value: Any) -> bool:
    return is_data(value) and not is_told(value)


def _plain_in(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    attributes = getattr(value, "__dict__", {})
    if attributes and getattr(type(value), "__getstate__", None) is not _PLAIN_STATE:
        with suppress_own():
            attributes = {name: attributes[name] for name in value.__getstate__() if name in attributes}
    for name, item in (*_items_in("", value), *((f".{name}", item) for name, item in [*attributes.items()])):
        if _is_plain(item):
            yield path + name, item
        else:  # a container that holds nothing else, which a walk leaves out
            yield from (one for one in _items_in(path + name, item) if _is_plain(one[1]))


def _items_in(path: str, value: Any) -> list[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [(f"{path}[{key!r}]", item) for key, item in islice(pairs, _ITEMS)]


def _is_plain(item: Any) -> bool:
    return isinstance(item, _PLAIN) or (isinstance(item, str) and len(item) <= _LONG)


def differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The paths of values that are other ones now."""
    return [path for path, value in now.items() if path in before and not _same(value, before[path])]


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other or (value != value and other != other))
