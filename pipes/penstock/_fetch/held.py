"""What the user's objects hold: a bounded walk over their attributes, and over the items of lists, tuples and dicts."""

from __future__ import annotations

import functools
import io
import operator
from collections import deque
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from penstock._errors import suppress_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MOST: Final = 2_000
"""Objects that a walk visits. Plain ones (numbers, text) do not count."""
_ITEMS: Final = 64
"""Items of one container that a walk looks at."""


class EndOfWalk:
    """A walk ends here: what such an object holds belongs to it alone, and is not to be seeded, watched, or told the
    epoch.
    """


_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, np.generic, PurePath)
_LEFT_OUT: Final = (
    EndOfWalk,
    *(*_PLAIN, CodeType, FunctionType, ModuleType, type, np.dtype, torch.dtype, torch.device),
    io.IOBase,  # an open remote file holds its client, of tens of thousands of objects
)
_OFTEN: Final = frozenset(_LEFT_OUT)


class Held(NamedTuple):
    """An object that another one holds.

    Attributes:
        path: Where it is, as in ``dataset.transforms[0].rng``.
        value: The object.
        again: Returns what is there now; raises if there is nothing. None: it stays.
    """

    path: str
    value: Any
    again: Callable[[], Any] | None = None


def held(
    roots: Mapping[str, Any], most: int = MOST, enters: Callable[[Any], bool] = lambda value: True
) -> Iterator[Held]:
    """What ``roots`` are and hold, those near to a root first, each once.

    Left out are plain values, functions, classes, modules, and objects that do not even tell their class. The paths are
    the same in every process.

    Args:
        roots: Objects, by the first word of their paths.
        most: Bound on the objects visited.
        enters: Whether to look into an object.
    """
    found: dict[int, Held] = {}  # which keeps the objects alive, and their ids taken
    left = deque(Held(name, value) for name, value in roots.items())
    while left and len(found) < most:
        one = left.popleft()
        with suppress_own():  # an object that refuses to be looked at, or that another thread changes
            if id(one.value) in found or isinstance(one.value, _LEFT_OUT):
                continue
            found[id(one.value)] = one
            if not isinstance(one.value, np.ndarray | torch.Tensor) and enters(one.value):
                left.extend(_inside(one.path, one.value))
        if id(one.value) in found:
            yield one


def _inside(path: str, value: Any) -> Iterator[Held]:
    if isinstance(value, MethodType | BuiltinFunctionType):
        yield Held(path, value.__self__)
        return
    if isinstance(value, functools.partial):
        parts = [("func", value.func), *((f"args[{k}]", part) for k, part in enumerate(value.args))]
        yield from (Held(f"{path}.{name}", part) for name, part in (*parts, *value.keywords.items()))
    elif isinstance(value, list | tuple | deque | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for number, (key, item) in enumerate(list(islice(items, _ITEMS))):
            if not _is_plain(item):
                name = repr(key) if isinstance(key, _PLAIN) else f"key {number}"  # a repr may have an address
                yield Held(f"{path}[{name}]", item, functools.partial(operator.getitem, value, key))
    for name, item in list(getattr(value, "__dict__", {}).items()):
        if not _is_plain(item):
            yield Held(f"{path}.{name}", item, functools.partial(getattr, value, name))
    slots = [vars(base).get("__slots__", ()) for base in type(value).__mro__]
    for name in (name for some in slots for name in ([some] if isinstance(some, str) else some)):
        with suppress_own():  # an empty slot
            yield Held(f"{path}.{name}", getattr(value, name), functools.partial(getattr, value, name))


def _is_plain(item: Any) -> bool:
    """Whether it is known to hold nothing, as most do: the type of an object is known without asking it."""
    kind = type(item)
    if kind in (tuple, list, dict):
        return _OFTEN.issuperset(map(type, islice(item.values() if kind is dict else item, _ITEMS)))
    return kind in _OFTEN
