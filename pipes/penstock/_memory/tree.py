"""Batches as trees: dicts, lists, tuples, named tuples and dataclasses that hold tensors and other leaves."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import UserList
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def mapped(tree: Any, change: Callable[[Any], Any], method: str = "") -> Any:
    """A tree of the same structure with ``change`` applied to every leaf; a custom container that has ``method`` counts
    as a leaf.
    """
    kind = type(tree)
    if kind is dict:
        return {key: mapped(value, change, method) for key, value in tree.items()}
    if kind in (list, tuple):
        return kind(mapped(value, change, method) for value in tree)
    if method and has_method(tree, method):
        return change(tree)
    if isinstance(tree, tuple | list):
        return _like(tree, [mapped(value, change, method) for value in tree])
    if isinstance(tree, UserList):
        row = copy.copy(tree)
        row.data = [mapped(value, change, method) for value in tree]
        return row
    if isinstance(tree, MutableMapping):  # an OrderedDict, for example
        other = copy.copy(tree)
        for key, value in tree.items():  # not `update`, which the ModelOutput of Transformers forbids
            other[key] = mapped(value, change, method)
        return other
    if _is_record(tree):
        record: Any = copy.copy(tree)
        for name, value in _fields(tree):
            object.__setattr__(record, name, mapped(value, change, method))
        return record
    return change(tree)


def leaves(tree: Any, method: str = "", _within: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Every leaf, in order, as in `mapped`.

    No container is built or changed, and one that contains itself is entered only once.
    """
    parts = None if method and has_method(tree, method) else _parts(tree)
    if parts is None:
        yield tree
    elif not any(tree is one for one in _within):
        for part in parts:
            yield from leaves(part, method, (*_within, tree))


def has_method(value: Any, name: str) -> bool:
    """Whether the class of ``value`` has a method ``name``.

    The instance is not asked: it may answer to any name, or raise.
    """
    return callable(getattr(type(value), name, None))


def nbytes(batch: Any) -> float:
    """Bytes of the tensors and arrays in ``batch``; infinity if it holds a type of unknown size. Never raises."""
    try:
        return sum(map(_leaf_nbytes, leaves(batch)))
    except Exception:  # custom containers and tensors may raise anything
        return math.inf


def _parts(tree: Any) -> Iterable[Any] | None:
    """The children of a container; None for a leaf."""
    if isinstance(tree, list | tuple | UserList):
        return cast("Iterable[Any]", tree)
    if isinstance(tree, MutableMapping):
        return tree.values()
    return [value for _, value in _fields(tree)] if _is_record(tree) else None


def _like(tree: tuple[Any, ...] | list[Any], values: list[Any]) -> Any:
    """A tuple or a list of ``values`` with the class of ``tree``, which may be a named tuple or another subclass."""
    kind: Any = type(tree)
    base: Any = list if isinstance(tree, list) else tuple
    try:
        other = base.__new__(kind, values)  # the class's own methods might refuse
    except TypeError:  # from a class written in C: torch.Size, and the results of torch.max
        return kind(values)
    if base is list:
        list.extend(other, values)  # `list.__new__` leaves it empty
    if hasattr(tree, "__dict__"):
        vars(other).update(vars(tree))
    return other


def _is_record(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _fields(record: Any) -> Iterator[tuple[str, Any]]:
    """The fields that are set; one with ``init=False`` may not be."""
    return ((one.name, getattr(record, one.name)) for one in dataclasses.fields(record) if hasattr(record, one.name))


def _leaf_nbytes(leaf: Any) -> float:
    if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
        return math.inf
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return leaf.nbytes
    if isinstance(leaf, str | bytes):
        return len(leaf)
    return 8 if leaf is None or isinstance(leaf, int | float | complex | np.generic) else math.inf
