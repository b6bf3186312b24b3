"""What the user's objects hold: a bounded walk over attributes, items, closures, arguments, and the globals that their
functions name.
"""

from __future__ import annotations

import dis
import functools
import io
import sys
import sysconfig
from collections import deque
from itertools import islice
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from penstock._errors import suppress_own

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

MOST: Final = 10_000
"""Objects that a walk visits. Plain ones (numbers, text, arrays) do not count."""
SMALL: Final = 1024
"""Bytes of the largest array or tensor that is looked at. A larger one is data."""
_ITEMS: Final = 10_000
"""Items of one container that a walk looks at. A container with more of them holds data."""
_MANY: Final = 64
"""A container with more items holds data rather than parts: its items are visited after everything else."""


class EndOfWalk:
    """A walk ends here: what such an object holds belongs to it alone, and is not to be seeded, watched, or told the
    epoch.
    """


_PLAIN: Final = (
    EndOfWalk,
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, CodeType, PurePath),
    io.IOBase,  # an open remote file holds its client, of tens of thousands of objects
    *(np.dtype, np.ndarray, np.generic, torch.dtype, torch.device, torch.Tensor),
)
_CONTAINERS: Final = (list, tuple, deque, dict, set, frozenset, MappingProxyType)
_LIBRARIES: Final = tuple(
    f"{Path(path)}/"
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)


_EMPTY: Final = object()


class Held(NamedTuple):
    """An object that another one holds.

    Attributes:
        path: Where it is, as in ``dataset.transforms[0].rng``.
        value: The object.
        again: Returns what is there now; raises if there is nothing.
    """

    path: str
    value: Any
    again: Callable[[], Any]


def held(roots: Mapping[str, Any], most: int = MOST, without: Container[int] = ()) -> tuple[list[Held], bool]:
    """What ``roots`` are and hold, those near to a root first, each once; and whether the walk was cut.

    Plain values are left out (but not small arrays and tensors), and so are modules, the classes of libraries, what
    only C code can reach, and objects that do not even tell their class. The paths are the same in every process.

    Args:
        roots: Objects, by the first word of their paths.
        most: Bound on the objects visited.
        without: The ids of objects at which the walk ends.
    """
    found: dict[int, Held] = {}
    arrays: dict[int, Held] = {}
    parts = deque(Held(name, one, functools.partial(_same, one)) for name, one in roots.items())
    data: deque[Held] = deque()
    is_long = False
    while parts or data:
        one = (parts or data).popleft()
        with suppress_own():  # an object that refuses to be looked at, or that another thread changes
            if id(one.value) in found or id(one.value) in without or isinstance(one.value, (*_PLAIN, ModuleType)):
                if isinstance(one.value, np.ndarray | torch.Tensor) and one.value.nbytes <= SMALL:
                    arrays.setdefault(id(one.value), one)
                continue
            if len(found) >= most:
                return [*found.values(), *arrays.values()], True
            found[id(one.value)] = one
            (data if _has_more(one.value, _MANY) else parts).extend(_inside(one))
            is_long |= _has_more(one.value, _ITEMS) and not all(map(_is_data, _first(one.value)))
    return [*found.values(), *arrays.values()], is_long


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


def globals_of(function: FunctionType) -> dict[str, Any]:
    """The globals that a user's function names; of the user's modules that it names or imports, what is in there under
    one of its names.
    """
    return {path: space[name] for path, (space, name) in _places_of(function).items()}


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


def _places_of(function: FunctionType) -> dict[str, tuple[dict[str, Any], str]]:
    """Where `globals_of` are: a namespace, and a name in it."""
    names, found = sorted(code_names(function.__code__)), {}
    for name in sorted(_global_names(function.__code__)):  # an attribute may have the name of a global
        if name.startswith("__") or _is_a(function.__globals__.get(name), ModuleType):
            continue
        if name in function.__globals__:
            found[name] = function.__globals__, name
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
                found[f"{path}.{name}"] = vars(module), name
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


def _inside(one: Held) -> Iterator[Held]:
    path, value = one.path, one.value
    if isinstance(value, list | tuple | deque):
        is_data = _has_more(value, _MANY) and _all_plain(value)
        for number, item in enumerate(islice(value, 0 if is_data else _ITEMS)):
            if _is_part(item, value):
                yield Held(f"{path}[{number}]", item, functools.partial(_item, value, number))
        if hasattr(value, "__dict__"):
            yield from _of_object(path, value)
    elif isinstance(value, set | frozenset):
        # the order of a set differs between processes
        kinds = sorted(islice(value, _ITEMS), key=lambda item: type(item).__qualname__)
        for number, item in enumerate(kinds):
            if _is_part(item, value):
                yield Held(f"{path}{{{number}}}", item, functools.partial(_same, item))
    elif isinstance(value, dict | MappingProxyType):
        for number, (key, item) in enumerate(list(islice(value.items(), _ITEMS))):
            if _is_part(item, value):
                name = f"{key!r:.40}" if _is_a(key, _PLAIN) else f"key {number}"  # a repr may have an address
                yield Held(f"{path}[{name}]", item, functools.partial(_item, value, key))
        if hasattr(value, "__dict__"):
            yield from _of_object(path, value)
    elif isinstance(value, functools.partial):
        parts = {
            "func": value.func,
            **{f"args[{number}]": part for number, part in enumerate(value.args)},
            **value.keywords,
        }
        yield from (Held(f"{path}.{name}", part, functools.partial(_same, part)) for name, part in parts.items())
    elif isinstance(value, MethodType):
        yield Held(path, value.__self__, functools.partial(_same, value.__self__))
        yield Held(f"{path}.{value.__name__}", value.__func__, functools.partial(_same, value.__func__))
    elif isinstance(value, BuiltinFunctionType):
        yield Held(path, value.__self__, functools.partial(_same, value.__self__))
    elif isinstance(value, FunctionType):
        yield from _of_function(path, value)
    elif isinstance(value, type):
        yield from _of_class(path, value)
    else:
        yield from _of_object(path, value)


def _of_function(path: str, function: FunctionType) -> Iterator[Held]:
    values = {**vars(function), **closure_of(function), **(function.__kwdefaults__ or {})}
    values |= {f"default {number}": value for number, value in enumerate(function.__defaults__ or ())}
    for name, value in values.items():
        yield Held(f"{path}.{name}", value, functools.partial(_of_closure, function, name, value))
    if is_users(function):
        for path_in, (space, name) in _places_of(function).items():
            yield Held(f"{path}:{path_in}", space[name], functools.partial(_item, space, name))


def members_of(kind: type) -> dict[str, Any]:
    """The functions and the data of the user's classes among the bases of ``kind``, by their names and those of their
    classes.
    """
    found = {}
    for base in filter(is_users, kind.__mro__):
        for name, member in list(vars(base).items()):
            with suppress_own():  # a member that refuses to be looked at
                member = getattr(member, "__func__", member)
                parts = (member.fget, member.fset) if isinstance(member, property) else (member,)
                for number, part in enumerate(parts):
                    skipped = name.startswith(("__", "_abc_")) or (
                        hasattr(type(part), "__get__") and not is_users(type(part))
                    )
                    if isinstance(part, FunctionType) or not skipped:
                        found[f"{base.__qualname__}.{name}" + "=" * number] = part
    return found


def _of_class(path: str, kind: type) -> Iterator[Held]:
    for name, member in members_of(kind).items():
        yield Held(f"{path}.{name.rpartition('.')[2]}", member, functools.partial(_member, kind, name))


def _of_object(path: str, value: Any) -> Iterator[Held]:
    kind = type(value)
    slots = (name for base in kind.__mro__ for name in _names_in(vars(base).get("__slots__", ())))
    for name in (*getattr(value, "__dict__", ()), *slots):
        inside: Any = _EMPTY
        with suppress_own():  # an empty slot
            inside = getattr(value, name) if name not in getattr(value, "__dict__", ()) else value.__dict__[name]
        if inside is not _EMPTY:
            yield Held(f"{path}.{name}", inside, functools.partial(_attribute, value, name))
    yield Held(f"{path}.__class__", kind, functools.partial(_same, kind))


def _names_in(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _all_plain(values: Any) -> bool:
    return all(issubclass(kind, _PLAIN) for kind in set(map(type, islice(values, _ITEMS))))


def _is_part(item: Any, container: Any) -> bool:
    return not _is_data(item) or (isinstance(item, np.ndarray | torch.Tensor) and not _has_more(container, _MANY))


def _has_more(value: Any, than: int) -> bool:
    with suppress_own():  # what poses as a container, or one that cannot be counted yet
        return isinstance(value, _CONTAINERS) and len(value) > than
    return False


def _is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    with suppress_own():  # it does not tell its class
        return isinstance(value, kinds)
    return False


def _is_data(value: Any) -> bool:
    """Whether it is plain, or a record of plain values."""
    if type(value) in (list, tuple, dict, set, frozenset):
        return len(value) <= _MANY and _all_plain(value.values() if type(value) is dict else value)
    return _is_a(value, _PLAIN)


def _first(container: Any) -> Iterator[Any]:
    return islice(container.values() if isinstance(container, dict | MappingProxyType) else container, _ITEMS)


def _same(value: Any) -> Any:
    return value


def _item(container: Any, number: Any) -> Any:
    return container[number]


def _attribute(holder: Any, name: str) -> Any:
    return vars(holder)[name] if name in getattr(holder, "__dict__", ()) else getattr(holder, name)


def _member(kind: type, name: str) -> Any:
    return members_of(kind)[name]


def _of_closure(function: FunctionType, name: str, value: Any) -> Any:
    return closure_of(function).get(name, value)
