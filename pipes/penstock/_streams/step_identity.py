"""What distinguishes two lists of steps: names, settings and values, for saved states; and also their code, for
bookmarks.

Values become JSON: what a function or an object holds, identical in every process in which it is equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import operator
import re
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from penstock._arguments import checksum
from penstock._errors import first_time
from penstock._fetch.users_code import closure_of, globals_of, is_library_file, is_users
from penstock._memory.buffers import flat_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_logger = logging.getLogger("penstock")

_OUT: Final = object()
"""Stands for a value that is not plain."""
_WORDS: Final = {"version", "settings", "keeps_count"}
"""Attributes of a step that do not count as its values."""
_AS_TEXT: Final = (
    *(float, complex, bytes, bytearray, range, slice, type(...), PurePath, np.dtype, torch.dtype, torch.device),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
)
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, functools.partial, type, np.ufunc)
_DATA: Final = (bool, int, float, str, bytes, tuple, list, dict, set, frozenset)


def step_settings(steps: Sequence[Any]) -> list[dict[str, Any]]:
    """What identifies each step: its name, and its ``version`` and ``settings()`` if it has them. JSON.

    Raises:
        TypeError: A step is not callable, or its settings are not JSON.
    """
    said = []
    for number, step in enumerate(steps):
        if not callable(step):
            raise TypeError(
                f"steps[{number}] is {step!r:.80}, but a step must be a function from an iterator to an iterator."
            )
        try:
            said.append(json.loads(json.dumps(named(step))))
        except (TypeError, ValueError) as exc:
            raise TypeError(
                f"settings() and version of steps[{number}], {named_only(step)}, must be JSON: {exc}"
            ) from exc
    return said


def step_values(steps: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """The plain values that each step without ``settings()`` holds, by step and name.

    JSON; long values are replaced by checksums.

    Values that are not plain are omitted, and this is logged once.
    """
    found = {}
    for number, step in enumerate(steps):
        values = PlainValues()
        if holds := {name: _short(value) for name, value in values.held(step).items()}:
            found[f"steps[{number}] {named_only(step)}"] = holds
        if values.left_out and first_time(named_only(step), *values.left_out):
            _logger.warning(
                "steps[%d], %s, holds %s, which a saved state cannot compare: a state would load silently even if it "
                "differs. Give the step (or the object) a settings() that returns what matters as JSON, or a version.",
                number,
                named_only(step),
                ", ".join(values.left_out),
            )
    return found


def code_hash(steps: Sequence[Any]) -> str:
    """A hash of the settings and values of ``steps``, and of the user's code that they are known to run.

    The same in every process of one version of Python.

    Bookmarks need the code, because a count from before an edit would mislead a seek.
    """
    return _digest(PlainValues(code=True).of([step_settings(steps), *steps]))


_LONGEST: Final = 200
"""Maximum length in characters of a value in a state."""


def _short(value: Any) -> Any:
    """``value``, or a checksum of it or of its long parts."""
    if len(text_of(value)) <= _LONGEST:
        return value
    parts = {name: _short(part) for name, part in value.items()} if isinstance(value, dict) else value
    return parts if len(text_of(parts)) <= _LONGEST else f"checksum {_digest(value)}"


def _digest(value: Any) -> str:
    return checksum(text_of(value).encode())


def named(function: Any) -> dict[str, Any]:
    """The name of a function or of a callable object, with its ``version`` and its ``settings()`` if it has them.

    Not its module, which differs between running a script and importing it.
    """
    said = {"name": named_only(function)}
    version = getattr(function, "version", None)
    if version is not None:
        said["version"] = version
    if _says(function):
        said["settings"] = function.settings()
    return said


def named_only(function: Any) -> str:
    """The name of a function or of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _says(function: Any) -> bool:
    return callable(getattr(function, "settings", None)) and not isinstance(function, type)


@final
class PlainValues:
    """Turns values into JSON that is identical wherever the values are equal: in a script or a module, in any process.

    Args:
        code: Also include the code of the user's functions and classes, and of those that they name; and look into
            every object.

    Attributes:
        left_out: The values that are not plain: where each is held, and its type.
    """

    def __init__(self, *, code: bool = False) -> None:
        self.left_out: list[str] = []
        self._code = code
        # functions, classes and objects; includes the object itself, so that its id stays taken
        self._met: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any, where: str = "") -> Any:
        """``value`` as JSON; `_OUT` if it is not plain."""
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, _AS_TEXT):
            return float(value) if isinstance(value, float) and math.isfinite(value) else str(value)
        if isinstance(value, re.Pattern):
            return [self.of(value.pattern), value.flags]
        if isinstance(value, np.generic) and value.dtype.kind in "biu":
            return value.item()
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return f"{value.dtype.str} {value.shape} {checksum(np.ascontiguousarray(value).tobytes())}"
        if isinstance(value, torch.Tensor):
            with contextlib.suppress(Exception):  # e.g. a sparse tensor
                return f"{value.dtype} {tuple(value.shape)} {checksum(flat_bytes(value).tobytes())}"
        elif isinstance(value, list | tuple):
            return self._all(value, where)
        elif isinstance(value, set | frozenset):
            return sorted(self._all(value, where), key=text_of)
        elif isinstance(value, dict):
            return self._dict(
                {key if isinstance(key, str) else text_of(self.of(key, where)): item for key, item in value.items()},
                where,
            )
        elif isinstance(value, CodeType):
            return self._code_of(value)
        elif isinstance(value, ModuleType):
            return value.__name__
        elif (found := self._once(value, where)) is not _OUT:
            return found
        self.left_out.append(f"{where} ({type(value).__qualname__})")
        return _OUT

    def held(self, holder: Any, where: str = "") -> dict[str, Any]:
        """The values that a function or an object holds, by name."""
        if isinstance(holder, functools.partial):
            return {
                **self.held(holder.func, where),
                **self._dict({**dict(enumerate(holder.args)), **holder.keywords}, where),
            }
        if isinstance(holder, MethodType):
            return {**self._dict({"self": holder.__self__}, where), **self.held(holder.__func__, where)}
        if isinstance(holder, FunctionType):
            return self._dict(_held_by_function(holder), where)
        if isinstance(holder, BuiltinFunctionType):
            owner = holder.__self__
            return {} if owner is None or isinstance(owner, ModuleType | type) else self._dict({"self": owner}, where)
        if hasattr(holder, "__wrapped__"):  # functools.lru_cache
            return self._dict({"__wrapped__": holder.__wrapped__}, where)
        ours = type(holder).__module__ == "penstock"
        if isinstance(holder, type | np.ufunc) or (_says(holder) and not ours and not self._code):
            return {}
        if isinstance(holder, _AS_TEXT) or self._is_opaque(holder):
            return self._dict({"itself": holder}, where)
        values = _held_by_object(holder)
        if ours and not self._code:  # settings() covers the rest
            return {
                name: more for name, value in values.items() if callable(value) and (more := self.held(value, name))
            }
        return self._dict(values, where)

    def _all(self, values: Iterable[Any], where: str) -> list[Any]:
        return [found for value in values if (found := self.of(value, where)) is not _OUT]

    def _dict(self, values: dict[Any, Any], where: str) -> dict[str, Any]:
        places = ((str(name), value, f"{where}.{name}".lstrip(".")) for name, value in values.items())
        return {name: found for name, value, path in places if (found := self.of(value, path)) is not _OUT}

    def _once(self, value: Any, where: str) -> Any:
        """A function, a class or an object.

        If it occurs inside itself, or again next to its code, its name is enough.
        """
        if isinstance(value, type) and not (self._code and is_users(value)):
            return value.__qualname__
        function = getattr(value, "__func__", value)
        is_function = isinstance(function, _FUNCTIONS) or hasattr(value, "__wrapped__")
        if not is_function and self._is_opaque(value):
            return _OUT
        if id(value) in self._met:
            return f"{named_only(value)} {self._met[id(value)][0]}"
        try:
            name = {} if isinstance(value, type) else self._dict(named(value), where)
        except Exception:  # an unrelated method settings()
            return _OUT
        self._met[id(value)] = len(self._met), value
        if isinstance(value, type):
            return self._class(value)
        try:
            said: dict[str, Any] = {**name, "holds": self.held(value, where)}
        finally:
            if not self._code:
                del self._met[id(value)]
        if not self._code:
            return said
        if isinstance(function, FunctionType) and not is_library_file(function.__code__.co_filename):
            said["code"] = self._code_of(function.__code__), self._dict(globals_of(function), "")
        elif not is_function:
            said["code"] = self.of(type(value))
        return said

    def _is_opaque(self, value: Any) -> bool:
        """Whether only the type of an object is known: it belongs to a library, or is not callable and so is not a
        step.
        """
        known = _says(value) or dataclasses.is_dataclass(value) or type(value).__module__.startswith("penstock")
        return not known and not ((callable(value) or self._code) and is_users(type(value)))

    # The code.

    def _code_of(self, code: CodeType) -> list[Any]:
        numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars)
        return self._all((code.co_code, code.co_exceptiontable, numbers, names, code.co_consts), "")

    def _class(self, kind: type) -> dict[str, Any]:
        said: dict[str, Any] = {"name": [base.__qualname__ for base in kind.__mro__], **self._dict(_data_of(kind), "")}
        for base in filter(is_users, reversed(kind.__mro__)):
            for name, member in sorted(vars(base).items()):
                parts = (
                    (member.fget, member.fset)
                    if isinstance(member, property)
                    else (getattr(member, "__func__", member),)
                )
                # Python 3.14's function that makes the annotations holds all that the class does, its module's name
                # too.
                if functions := [
                    part for part in parts if isinstance(part, FunctionType) and part.__name__ != "__annotate__"
                ]:
                    said[f"{name} of {base.__qualname__}"] = self._all(functions, "")
        return said


def _held_by_function(function: FunctionType) -> dict[str, Any]:
    """The defaults of a user's function, its closure, and its attributes. For a library function: what it decorates."""
    code, attributes = function.__code__, {name: value for name, value in vars(function).items() if name not in _WORDS}
    if is_library_file(code.co_filename):
        return {"__wrapped__": attributes["__wrapped__"]} if "__wrapped__" in attributes else {}
    defaults = function.__defaults__ or ()
    values = dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
    values |= closure_of(function)
    return {**values, **(function.__kwdefaults__ or {}), **attributes}


def _held_by_object(holder: Any) -> dict[str, Any]:
    """The attributes of an object and of those of its classes that the user defined.

    What ``__getstate__`` omits is not a value.
    """
    if dataclasses.is_dataclass(holder):
        state: Any = {field.name: getattr(holder, field.name, None) for field in dataclasses.fields(holder)}
    else:
        try:
            state = holder.__getstate__()
        except Exception:  # it cannot be pickled
            state = vars(holder)
    parts = state if isinstance(state, tuple) else (state,)  # for a class with __slots__, also a dict of these
    values = _data_of(type(holder))
    for part in parts:
        values.update(part if isinstance(part, dict) else {} if part is None else {"state": part})
    return {name: value for name, value in values.items() if name not in _WORDS}


def _data_of(kind: type) -> dict[str, Any]:
    """The plain attributes of the user's classes."""
    members = {name: value for base in filter(is_users, reversed(kind.__mro__)) for name, value in vars(base).items()}
    return {
        name: value
        for name, value in members.items()
        if type(value) in _DATA and not name.startswith("__") and name not in _WORDS
    }


def text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=lambda out: "")
