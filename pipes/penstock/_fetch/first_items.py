"""FirstItems: by what another process can tell whether its iterable begins with the same items.

Items are not compared as a whole. Ranks may augment them with private generators, or keep them under other paths,
although all of them read the same records. So each field is compared for itself, over the first items, and one field
that agrees is enough.

A field that is the same in all of these items says nothing about their order, so it does not count.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Final, final

import numpy as np
import torch

MOST: Final = 8
"""Items that are looked at: with fewer, two classes of labels often agree by chance."""
_FIELDS: Final = 64
_DEEPEST: Final = 4
_VALUES: Final = 256
_ADDRESS: Final = " at 0x"
_PLAIN: Final = (bool, int, float, str, bytes)


@final
class FirstItems:
    """The first items of a pass of an iterable.

    Attributes:
        marks: One checksum for each field that counts, once enough items were added; empty before, and if no field
            counts.
    """

    def __init__(self) -> None:
        self.marks: tuple[int, ...] = ()
        self._fields: dict[str, list[str]] = {}
        self._added = 0

    def add(self, items: list[Any], *, ended: bool) -> None:
        """Look at the next ``items``. Never raises, and keeps none of them. With ``ended``, no more will come."""
        for item in items[: MOST - self._added]:
            self._added += 1
            with suppress(Exception):
                for path, value in islice(_fields("", item, 0), _FIELDS):
                    self._fields.setdefault(path, []).append(value)
        if self._added == MOST or ended:
            counts = [field for field in self._fields.items() if len({*field[1]}) > 1 and _ADDRESS not in repr(field)]
            self.marks = tuple(zlib.crc32(repr(count).encode()) for count in counts)


def reads_alike(value: Any) -> bool:
    """Whether equal values have the same ``repr`` in every process, unlike sets, tensors on a device, and objects whose
    text has their address in memory.
    """
    if isinstance(value, set | frozenset) or any(part in repr(value) for part in (_ADDRESS, ", device='")):
        return False
    slots = getattr(value, "__slots__", ())
    names = *getattr(value, "__dict__", ()), *((slots,) if isinstance(slots, str) else slots)
    inside = [getattr(value, name, None) for name in names if not name.startswith("__")]
    if isinstance(value, Mapping):
        inside += [*value, *value.values()]
    elif isinstance(value, list | tuple):
        inside += value
    return all(map(reads_alike, inside))


def _fields(path: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Each field of an item: its path and its value as text, the same in every process."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        yield path, f"{tuple(value.shape)} {value.reshape(-1)[:_VALUES].tolist()}"
    elif hasattr(value, "tobytes") and not getattr(value, "tile", None):
        # a picture; one of PIL with tiles is not decoded yet
        yield path, f"{zlib.crc32(value.tobytes())}"
    elif depth == _DEEPEST and not isinstance(value, _PLAIN):
        return
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from _fields(f"{path}[{key!r:.80}]", value[key], depth + 1)
    elif isinstance(value, list | tuple):
        if value and all(isinstance(one, _PLAIN) for one in value[:_VALUES]):
            yield path, f"{len(value)} {value[:_VALUES]!r}"
        else:
            for place, one in enumerate(value[:_FIELDS]):
                yield from _fields(f"{path}[{place}]", one, depth + 1)
    elif isinstance(value, set | frozenset):
        yield from _fields(path, sorted(map(repr, value)), depth + 1)
    elif hasattr(value, "__dict__") and not isinstance(value, _PLAIN):
        yield from _fields(f"{path}.", vars(value), depth + 1)
    elif reads_alike(value):
        yield path, repr(value)[:4096]
