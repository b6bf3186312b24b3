"""What tells two lists of steps apart: their settings, for saved states, and a hash of their code, for bookmarks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


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


def named(function: Any) -> dict[str, Any]:
    """The name of a function or of a callable object, with its ``version`` and its ``settings()`` if it has them.

    Not its module, which is another one when a script is run and when it is imported.
    """
    said = {"name": named_only(function)}
    version = getattr(function, "version", None)
    if version is not None:
        said["version"] = version
    settings = getattr(function, "settings", None)
    if callable(settings) and not isinstance(function, type):
        said["settings"] = settings()
    return said


def named_only(function: Any) -> str:
    """The name of a function or of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def code_hash(steps: Sequence[Any]) -> str:
    """A hash of all that the outputs of ``steps`` can be seen to depend on.

    Of the settings, and of the code, constants, defaults and closures of user functions, of the global values and user functions that they name, and of
    what objects hold, as pickle would see it. Of a function or a class in a library, only the name. The same in every process of one version of Python.
    What it cannot see needs a ``version``.
    """
    return _Hasher().of([step_settings(steps), list(steps)]).hex()


_LIBRARIES: Final = (
    os.path.join(Path(__file__).parent.parent, ""),
    *(os.path.join(path, "") for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(name))),
)
_PLAIN: Final = (int, float, complex, str, bytes, bool, type(None), type(...))
_DATA: Final = (*_PLAIN, tuple, list, dict, set, frozenset)


@final
class _Hasher:
    """Hashes Python values by content. An object that is being hashed already counts by its type alone."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}  # the object too, so that its id stays taken

    def of(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return _digest(type(value).__name__, repr(value).encode())
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        self._known[id(value)] = value, _digest("cycle", type(value).__qualname__.encode())
        found = self._of(value)
        self._known[id(value)] = value, found
        return found

    def all(self, kind: str, values: Iterable[Any]) -> bytes:
        return _digest(kind, *map(self.of, values))

    def _of(self, value: Any) -> bytes:
        kind = type(value)
        if kind in (tuple, list):
            return self.all(kind.__name__, value)
        if kind in (set, frozenset):
            return _digest(kind.__name__, *sorted(map(self.of, value)))
        if kind is dict:
            return self.all("dict", (part for item in value.items() for part in item))
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return self.all("method", (value.__func__, value.__self__))
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            return self.all("builtin", (value.__qualname__, owner.__name__ if isinstance(owner, ModuleType | type) else owner))
        if isinstance(value, ModuleType):
            return self.all("module", (value.__name__,))
        if isinstance(value, type):
            return self._class(value)
        if kind is np.ndarray and value.dtype.kind != "O":
            return _digest("array", repr((value.dtype.str, value.shape)).encode(), np.ascontiguousarray(value).tobytes())
        if isinstance(value, torch.Tensor):
            with contextlib.suppress(Exception):  # a sparse one, say
                plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                return _digest("tensor", repr((value.dtype, tuple(value.shape))).encode(), plain.numpy().tobytes())
        return self._object(value)

    def _object(self, value: Any) -> bytes:
        parts: list[Any] = [type(value)]
        if "__wrapped__" in getattr(value, "__dict__", ()):
            parts.append(value.__wrapped__)  # functools.lru_cache
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            return self.all("opaque", parts)
        if isinstance(reduced, str):
            return self.all("object", [*parts, reduced])
        return self.all("object", parts + [list(part) if hasattr(part, "__next__") else part for part in reduced])

    def _code(self, code: CodeType) -> bytes:
        numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        return self.all(
            "code", (code.co_code, code.co_exceptiontable, numbers, code.co_names, code.co_varnames, code.co_freevars, code.co_consts)
        )

    def _function(self, function: FunctionType) -> bytes:
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:
                cells.append("empty")
        if _is_library_file(function.__code__.co_filename):
            wrapped = [cell for cell in cells if callable(cell)]  # what a decorator of a library wraps
            return self.all("function", (function.__globals__.get("__name__"), function.__code__.co_qualname, wrapped))
        names = sorted(name for name in _names(function.__code__) if not name.startswith("__"))  # not __name__ and __file__
        used = [(name, self._used(function.__globals__[name], names)) for name in names if name in function.__globals__]
        return self.all("user", (function.__code__, function.__defaults__, function.__kwdefaults__, cells, used))

    def _used(self, value: Any, names: Sequence[str]) -> Any:
        """What a function uses of a global value; ``names`` are all that its code contains, those of attributes included."""
        if not isinstance(value, ModuleType) or _is_library_file(getattr(value, "__file__", None)):
            return value
        return [value.__name__, [(name, vars(value)[name]) for name in names if name in vars(value)]]

    def _class(self, kind: type) -> bytes:
        parts: list[Any] = [kind.__qualname__]
        for base in kind.__mro__:
            if not _is_users(base):
                parts.append(f"{base.__module__}.{base.__qualname__}")
                continue
            for name, member in sorted(vars(base).items()):
                if found := _functions(member):
                    parts.append((name, found))
                elif not name.startswith("__") and type(member) in _DATA:
                    parts.append((name, member))
        return self.all("class", parts)


def _functions(member: Any) -> list[Callable[..., Any]]:
    """The functions in a member of a class."""
    if isinstance(member, FunctionType):
        return [member]
    if isinstance(member, staticmethod | classmethod):
        return _functions(member.__func__)
    if isinstance(member, property):
        return [one for one in (member.fget, member.fset) if isinstance(one, FunctionType)]
    return []


def _names(code: CodeType) -> set[str]:
    """The names in ``code`` and in the functions inside it."""
    return set(code.co_names).union(*(_names(const) for const in code.co_consts if isinstance(const, CodeType)))


def _is_users(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or not _is_library_file(getattr(module, "__file__", None))


def _is_library_file(file: str | None) -> bool:
    return file is None or file.startswith(("<frozen", *_LIBRARIES)) or "site-packages" in file or "dist-packages" in file


def _digest(kind: str, *parts: bytes) -> bytes:
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
