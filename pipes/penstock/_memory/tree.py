"""Batches are trees: dicts, lists, tuples, named tuples and dataclasses, of tensors and other leaves."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of the same form, with every leaf changed."""
    if type(tree) is dict:
        return {key: mapped(value, change) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(mapped(value, change) for value in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(value, change) for value in tree))
    if isinstance(tree, Mapping) and hasattr(tree, "update"):  # such as an OrderedDict, or a BatchEncoding without a `to` of its own
        other = copy.copy(tree)
        other.update({key: mapped(value, change) for key, value in tree.items()})
        return other
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        record: Any = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(record, field.name, mapped(getattr(tree, field.name), change))
        return record
    return change(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf, in order."""
    found: list[Any] = []
    mapped(tree, found.append)
    yield from found


def nbytes(batch: Any) -> float:
    """Bytes of the tensors and arrays in ``batch``; infinitely many where there is anything that is not known here."""
    return sum(map(_leaf_nbytes, leaves(batch)))


def _leaf_nbytes(leaf: Any) -> float:
    if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
        return math.inf
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return leaf.nbytes
    if isinstance(leaf, str | bytes):
        return len(leaf)
    return 8 if leaf is None or isinstance(leaf, int | float | complex | np.generic) else math.inf
