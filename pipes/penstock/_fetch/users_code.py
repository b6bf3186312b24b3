"""The user's code: which functions and classes are the user's, and what a function reaches by name."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from collections import deque
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from penstock._errors import suppress_own

_LIBRARIES: Final = tuple(
    f"{Path(path)}/"
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)


def code_names(code: CodeType) -> set[str]:
    """The names in ``code`` and in the functions inside it."""
    return set(code.co_names).union(*(code_names(const) for const in code.co_consts if isinstance(const, CodeType)))


def is_users(thing: Any) -> bool:
    """Whether a function, a class or a module is the user's, and not a library's."""
    if isinstance(thing, FunctionType):
        return not is_library_file(thing.__code__.co_filename)
    if isinstance(thing, ModuleType):
        if (file := getattr(thing, "__file__", None)) is None:  # a folder without __init__.py
            return any(not is_library_file(path) for path in getattr(thing, "__path__", ()))
        return not is_library_file(file)
    module = sys.modules.get(thing.__module__)
    return module is None or thing.__module__ == "__main__" or not is_library_file(getattr(module, "__file__", None))


def is_library_file(file: str | None) -> bool:
    return (
        file is None
        or file.startswith(("<frozen", *_LIBRARIES))
        or "site-packages" in file
        or "dist-packages" in file
        or file.startswith(_OURS)
    )


_OURS: Final = f"{Path(__file__).parents[1]}/"


def modules_of(function: FunctionType) -> dict[str, ModuleType]:
    """The modules that a user's function names or imports."""
    named: dict[str, Any] = {name: function.__globals__.get(name) for name in sorted(_global_names(function.__code__))}
    modules = {name: thing for name, thing in named.items() if _is_a(thing, ModuleType) and name[:2] != "__"}
    package = function.__globals__.get("__package__") or ""
    for level, name in sorted(_imports(function.__code__)):
        whole = f"{package.rsplit('.', level - 1)[0]}.{name}".strip(".") if level else name
        for known in (whole, whole.partition(".")[0]):
            if known in sys.modules:
                modules.setdefault(known, sys.modules[known])
    return modules


def globals_of(function: FunctionType) -> dict[str, Any]:
    """The globals that a user's function names; of the user's modules that it names or imports, what is in there under
    one of its names.
    """
    names, found = sorted(code_names(function.__code__)), {}
    for name in sorted(_global_names(function.__code__)):  # an attribute may have the name of a global
        if name.startswith("__") or _is_a(function.__globals__.get(name), ModuleType):
            continue
        if name in function.__globals__:
            found[name] = function.__globals__[name]
    waiting, seen = deque(modules_of(function).items()), set()
    while waiting:
        path, module = waiting.popleft()
        if id(module) in seen or not is_users(module):
            continue
        seen.add(id(module))
        for name in names:
            if name.startswith("__") or name not in vars(module):
                continue
            if _is_a(value := vars(module)[name], ModuleType):
                waiting.append((f"{path}.{name}", value))
            else:
                found[f"{path}.{name}"] = value
    return found


@functools.lru_cache(maxsize=1024)
def _imports(code: CodeType) -> frozenset[tuple[int, str]]:
    """The modules that ``code`` and the functions inside it import, each with the number of its leading dots."""
    found: set[tuple[int, str]] = set().union(
        *(_imports(const) for const in code.co_consts if isinstance(const, CodeType))
    )
    if dis.opmap["IMPORT_NAME"] in code.co_code[::2]:
        read = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
        for number, one in enumerate(read):
            if one.opname == "IMPORT_NAME" and isinstance(level := read[number - 2].argval, int):
                found.add((level, one.argval))
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> frozenset[str]:
    """The globals that ``code`` and the functions inside it load, as they name them."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in _LOADS}
    return frozenset(found.union(*(_global_names(const) for const in code.co_consts if isinstance(const, CodeType))))


_LOADS: Final = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def closure_of(function: FunctionType) -> dict[str, Any]:
    """The variables of other functions that ``function`` uses."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_full(cell)}


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    with suppress_own():  # it does not tell its class
        return isinstance(value, kinds)
    return False
