"""The user's code: which functions and classes are the user's, and what a function reaches by name."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import sysconfig
from collections import deque
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBRARIES: Final = (
    "<frozen",
    f"{Path(__file__).parents[1]}/",
    *(f"{path}/" for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))),
)


def is_users(thing: Any) -> bool:
    """Whether a class or a module is the user's, and not a library's."""
    module = thing if isinstance(thing, ModuleType) else sys.modules.get(thing.__module__)
    if module is None or getattr(thing, "__module__", None) == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return any(not is_library_file(one) for one in ([file] if file else getattr(module, "__path__", ())))


def is_library_file(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file


def globals_of(function: FunctionType) -> dict[str, Any]:
    """The globals that a user's function names; of the user's modules that it names or imports, what is in there under
    one of its names.
    """
    read, imported = _loaded(function.__code__)
    named = {name: function.__globals__[name] for name in sorted(read) if name in function.__globals__}
    named = {name: value for name, value in named.items() if not name.startswith("__")}
    found = {name: value for name, value in named.items() if not issubclass(type(value), ModuleType)}
    modules = {name: value for name, value in named.items() if name not in found}
    package = function.__globals__.get("__package__") or ""
    for level, name in sorted(imported):
        whole = f"{package.rsplit('.', level - 1)[0]}.{name}".strip(".") if level else name
        for known in (whole, whole.partition(".")[0]):
            if known in sys.modules:
                modules.setdefault(known, sys.modules[known])
    names = sorted({name for code in _codes(function.__code__) for name in code.co_names if not name.startswith("__")})
    waiting, seen = deque(modules.items()), set()
    while waiting:
        path, module = waiting.popleft()
        if id(module) in seen or not is_users(module):
            continue
        seen.add(id(module))
        for name in names:
            if name not in vars(module):
                continue
            if issubclass(type(value := vars(module)[name]), ModuleType):
                waiting.append((f"{path}.{name}", value))
            else:
                found[f"{path}.{name}"] = value
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """``code``, and that of the functions inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


_LOADS: Final = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # an attribute may have the name of a global


@functools.lru_cache(maxsize=1024)
def _loaded(code: CodeType) -> tuple[set[str], set[tuple[int, str]]]:
    """The globals that ``code`` and the functions inside it load, and the modules that they import, each with the
    number of its leading dots.
    """
    names, imports = set(), set()
    for one in _codes(code):
        steps = [step for step in dis.get_instructions(one) if step.opname != "EXTENDED_ARG"]
        for number, step in enumerate(steps):
            if step.opname in _LOADS:
                names.add(step.argval)
            elif step.opname == "IMPORT_NAME" and isinstance(level := steps[number - 2].argval, int):
                imports.add((level, step.argval))
    return names, imports


def closure_of(function: FunctionType) -> dict[str, Any]:
    """The variables of other functions that ``function`` uses."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is still empty
            found[name] = cell.cell_contents
    return found
