"""What a sampler holds, to compare it with a copy: its attributes, what they hold, and what its code reaches by name.

The comparison is a pickle that is never loaded, because the pickler is fast, follows every reference, and refuses what
cannot be followed. Arrays and tensors are compared as memory: 10**7 weights take 6 ms. Functions and classes count by
identity, and by what they reach.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import pickle
import random
import re
from types import BuiltinFunctionType, FunctionType, MethodWrapperType, ModuleType
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from penstock._errors import is_own_error
from penstock._fetch.users_code import closure_of, code_names, globals_of, is_users, members_of, modules_of
from penstock._memory.buffers import flat_bytes
from penstock._nodes.sampler_traits import seedable, wrapped

_OBJECTS: Final = 5_000
_TEXT: Final = 2**24
_ARRAYS: Final = 2**28
"""Bounds on what is compared: objects that are not plain, bytes of their pickle, bytes of arrays. The first two take at
most 50 ms.
"""


_GENERATORS: Final = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
)
_PLAIN: Final = {
    *("array", "builtins", "collections", "decimal", "fractions", "itertools", "logging", "numpy", "operator"),
    *("random", "re", "types", "typing"),
}
_COMPUTE: Final = _PLAIN | {
    *("abc", "bisect", "cmath", "contextlib", "copy", "dataclasses", "enum", "functools", "future", "hashlib"),
    *("heapq", "math", "numbers", "penstock", "statistics", "string", "struct", "torch", "warnings", "zlib"),
}
"""Libraries that only compute, but for what `_OUTSIDE` names. Through any other a sampler may depend on what is in no
object.
"""
_OUTSIDE: Final = re.compile(
    r"open(_memmap)?|input|exec|eval|__import__|globals|load(s|txt|_\w+)?|read_\w+|from_?file|fromregex|genfromtxt|"
    r"memmap|stat|exists|is_file|is_dir|iterdir|r?glob|walk"
)
"""Names of functions and methods that do too."""


_OWN_COPY: Final = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")
"""Methods with which a copy may share something, or a comparison may miss something."""
_WHOLE: Final = _PLAIN | {"datetime", "pathlib", "uuid", "zoneinfo"}
"""Libraries whose objects are pickled whole, as `_WHOLE_TYPES` are."""
_WHOLE_TYPES: Final = (functools.partial, torch.Size, torch.dtype, torch.device)
_NOT_READ: Final = (".__init__", ".__repr__")
"""Methods that do not run when a sampler is read."""


class Memory(NamedTuple):
    """A pickle, and the memory of its ``arrays``, which is not copied."""

    text: bytes
    arrays: list[np.ndarray]

    def equals(self, other: Memory) -> bool:
        return self.text == other.text and all(map(_equal, self.arrays, other.arrays))

    def kept(self) -> Memory:
        """The same with copies of the arrays."""
        return Memory(self.text, [array.copy() for array in self.arrays])


class Content(NamedTuple):
    """What a sampler holds.

    Attributes:
        own: Its attributes, and what they hold. A copy has others.
        reached: What its functions and classes reach by name: globals, closures, class attributes. A copy shares them.
    """

    own: Memory
    reached: Memory


class CannotCompare(Exception):
    """A sampler holds something that cannot be compared, or too much of it; the text says what."""


def content(sampler: Any) -> Content:
    """What ``sampler`` holds now.

    Raises:
        CannotCompare: It cannot be told whole.
    """
    reader = _Reader(sampler)
    try:
        own = reader.dumped(sampler)
        reader._is_reaching = True
        while reader.reached:  # which may name other functions
            reached, reader.reached = reader.reached, []
            reader.dump(reached)
        return Content(own, reader.dumped(None))
    except CannotCompare:
        raise
    except Exception as exc:
        if not is_own_error(exc):
            raise
        raise CannotCompare(f"{type(exc).__name__}: {exc}") from exc


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    whole = len(one) // 8 * 8
    same = len(one) == len(other) and np.array_equal(one[:whole].view(np.uint64), other[:whole].view(np.uint64))
    return same and np.array_equal(one[whole:], other[whole:])


class _Text(bytearray):
    """A file that keeps what is written, up to a bound."""

    def write(self, data: bytes) -> None:
        if len(self) + len(data) > _TEXT:
            raise CannotCompare("it holds too much data")
        self += data


@final
class _Reader(pickle.Pickler):
    def __init__(self, sampler: Any) -> None:
        self.text = _Text()
        self.arrays: list[np.ndarray] = []
        super().__init__(self.text, 5, buffer_callback=self._kept)
        self.reached: list[Any] = []
        self._is_reaching = False
        self._left, self._bytes = _OBJECTS, 0
        self._met: set[int] = set()
        # Every reading seeds these anew, so their states do not matter.
        self._seeded = {
            id(one) for one in (torch.default_generator, *map(seedable, wrapped(sampler))) if one is not None
        }

    def dumped(self, value: Any) -> Memory:
        """The pickle of all values since the last call, ``value`` among them."""
        self.dump(value)
        memory = Memory(bytes(self.text), self.arrays)
        self.text.clear()
        self.arrays = []
        return memory

    def _kept(self, buffer: Any) -> None:
        memory = np.frombuffer(buffer.raw(), np.uint8)
        self._bytes += len(memory)
        if self._bytes > _ARRAYS:
            raise CannotCompare("it holds too much data")
        self.arrays.append(memory)

    def reducer_override(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise CannotCompare("it holds too many objects")
        if id(value) in self._seeded:
            return _was, ()
        if isinstance(value, torch.Tensor):
            return _was, (
                str(value.dtype),
                str(value.device),
                tuple(value.shape),
                flat_bytes(value),
                vars(value),
                value.grad if value.is_leaf or value.retains_grad else None,
            )
        if isinstance(value, _GENERATORS) and self._is_reaching:
            raise CannotCompare(f"its code reaches a {type(value).__name__}, which a copy would share")
        if isinstance(value, torch.Generator):
            return _was, (value.get_state(),)
        if isinstance(value, BuiltinFunctionType | MethodWrapperType):  # a copy has the same owner
            self.reached.append(None if isinstance(value.__self__, ModuleType) else value.__self__)
            return _was, (id(value.__self__), value.__name__)
        if type(value) in (RandomSampler, SequentialSampler):  # of their data they use its length only
            return _was, (
                type(value),
                len(value.data_source),
                {name: one for name, one in vars(value).items() if name != "data_source"},
            )
        if isinstance(value, ModuleType):
            if _library_of(value) not in _COMPUTE:
                raise CannotCompare(f"it holds the module {value.__name__}")
            return _was, (id(value),)
        if isinstance(value, FunctionType | type) and value is not _was:
            self._reach(value)
            return _was, (id(value),)
        if isinstance(value, enum.Enum):  # a copy is the same member
            self.reached.append([type(value), vars(value)])
            return _was, (id(value),)
        if (own := _own_copy(value)) is not None:
            raise CannotCompare(f"{type(value).__qualname__} has its own {own}")
        return NotImplemented

    def _reach(self, value: FunctionType | type) -> None:
        """Note what the user's function or class reaches, once."""
        if id(value) in self._met:
            return
        self._met.add(id(value))
        if isinstance(value, FunctionType):
            self.reached.append(id(value.__code__))
            if is_users(value):
                self._check_names(value)
            self.reached.append([vars(value), closure_of(value), value.__defaults__, value.__kwdefaults__])
        if isinstance(value, type):
            members = {name: part for name, part in members_of(value).items() if not name.endswith(_NOT_READ)}
            self.reached.append([type(value), members])
        elif is_users(value):
            self.reached.append(globals_of(value))

    def _check_names(self, function: FunctionType) -> None:
        named = {**globals_of(function), **closure_of(function), **modules_of(function)}
        outside = {name for name in code_names(function.__code__) if _OUTSIDE.fullmatch(name)}
        outside.update(name for name, thing in named.items() if _is_outside(thing))
        if outside:
            raise CannotCompare(
                f"{function.__qualname__} names {min(outside)}, and so may depend on a file, on the time, or on the "
                f"environment"
            )


def _is_outside(thing: Any) -> bool:
    """Whether it is of a library, and not known to compute only; or a module that makes its attributes when asked."""
    if not isinstance(thing, ModuleType | FunctionType | BuiltinFunctionType | type) or is_users(thing):
        return isinstance(thing, ModuleType) and hasattr(thing, "__getattr__")
    return _library_of(thing) not in _COMPUTE or _OUTSIDE.fullmatch(thing.__name__) is not None


def _own_copy(value: Any) -> str | None:
    """How an object of this class is copied, unless as any object, or whole."""
    kind = type(value)
    if not _WHOLE.isdisjoint((_library_of(kind), _library_of(value))) or kind in _WHOLE_TYPES:
        return None
    own = (name for name in _OWN_COPY if getattr(kind, name, None) is not getattr(object, name, None))
    return next(own, "reducer in copyreg" if kind in copyreg.dispatch_table else None)


def _library_of(thing: Any) -> str:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None) or "builtins"
    return name.partition(".")[0].strip("_")  # of functions in C it is "_bisect"


def _was(*parts: Any) -> None:
    """Stands for an object in the pickle."""
