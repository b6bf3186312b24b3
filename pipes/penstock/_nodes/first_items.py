"""FirstItems: by what another process can tell whether its iterable begins with the same items.

Items are not compared as a whole. Ranks may augment them with private generators, or keep them under other paths, although all of them read
the same records. So each field is compared for itself, over the first items, and one field that agrees is enough.

A field counts if it names the record: text, bytes, whole numbers, or a row of them (tokens). If the items have no such field, floats and
pictures count. A field that is the same in all of these items says nothing about their order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, final

import numpy as np
import torch

MOST: Final = 8
"""Items that are looked at: with fewer, two classes of labels often agree by chance."""
_FIELDS: Final = 64
_DEEPEST: Final = 4
_VALUES: Final = 256
_NAMES: Final = (bool, int, str, bytes)


@final
class FirstItems:
    """The first items of a pass of an iterable.

    Attributes:
        marks: One checksum for each field that counts, once enough items were added; empty before, and if no field counts.
    """

    def __init__(self) -> None:
        self.marks: tuple[int, ...] = ()
        self._fields: dict[tuple[str, bool], list[str]] = {}
        self._added = 0

    def add(self, items: list[Any], *, ended: bool) -> None:
        """Look at the next ``items``. Never raises, and keeps none of them. With ``ended``, no more will come."""
        left = MOST - self._added
        if left <= 0:
            return
        for item in items[:left]:
            self._added += 1
            with suppress(Exception):
                for _, (path, names, value) in zip(range(_FIELDS), _fields("", item, 0), strict=False):
                    self._fields.setdefault((path, names), []).append(value)
        if self._added == MOST or ended:
            self._added = MOST
            names = any(name for _, name in self._fields)
            counts = [(path, values) for (path, name), values in self._fields.items() if name == names and len({*values}) > 1]
            self.marks = tuple(zlib.crc32(repr(count).encode()) for count in counts)
            self._fields = {}


def _fields(path: str, value: Any, depth: int) -> Iterator[tuple[str, bool, str]]:
    """Each field of an item: its path, whether it names the record, and its value as text, the same in every process."""
    if isinstance(value, _NAMES):
        yield path, not isinstance(value, bool), repr(value[:4096] if isinstance(value, str | bytes) else value)
    elif isinstance(value, np.ndarray | np.generic | torch.Tensor):
        whole = "int" in str(value.dtype)
        # A picture has whole numbers too, but no name: it may be augmented.
        yield path, whole and value.ndim < 2, f"{tuple(value.shape)} {value.reshape(-1)[:_VALUES].tolist()}"
    elif isinstance(value, float | complex):
        yield path, False, repr(value)
    elif depth == _DEEPEST:
        return
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from _fields(f"{path}[{key!r:.80}]", value[key], depth + 1)
    elif isinstance(value, list | tuple):
        if value and all(isinstance(one, (*_NAMES, float)) for one in value[:_VALUES]):
            yield path, not any(isinstance(one, float) for one in value[:_VALUES]), f"{len(value)} {value[:_VALUES]!r}"
        else:
            for place, one in enumerate(value[:_FIELDS]):
                yield from _fields(f"{path}[{place}]", one, depth + 1)
    elif isinstance(value, set | frozenset):
        yield from _fields(path, sorted(map(repr, value)), depth + 1)
    elif hasattr(value, "__dict__"):
        yield from _fields(f"{path}.", vars(value), depth + 1)
