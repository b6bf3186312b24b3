"""Whether a sample that is loaded twice, with the same random numbers, is the same.

This sees what no list of generators could: one of a module, of C++ or of the operating system, a clock, a counter.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from penstock._errors import suppress_own

_logger = logging.getLogger("penstock")

_NUMBERS: Final = (bool, int, float, complex, np.generic, np.ndarray, torch.Tensor)


class Differing(NamedTuple):
    """What a worker made, whose first sample was another one when it was loaded again; ``level`` is that of the log."""

    value: Any
    level: int


def say(parts: str, level: int) -> None:
    """Log that the code of ``parts`` does not repeat itself."""
    _logger.log(
        level,
        "%s made another sample when the first one was loaded again with the same random numbers. It depends on the "
        "time, on what was loaded before, or on random numbers that nothing seeds (of a module, a class, a closure, "
        "OpenCV, os.urandom): then samples differ with other workers, and after a resume. Draw from "
        "penstock.sample().rng, or hold the generator in an attribute.",
        parts,
    )


def difference(first: Any, second: Any) -> int:
    """0 if two samples are equal, as far as can be told; otherwise a level of the log: a warning if tensors or numbers
    differ.
    """
    with suppress_own():  # such as an array that is not true or false
        if (first == second) is True:
            return 0
    if type(first) is not type(second):
        return logging.WARNING if isinstance(first, _NUMBERS) or isinstance(second, _NUMBERS) else logging.INFO
    if isinstance(first, _NUMBERS):
        same: Any = np.shape(first) == np.shape(second)
        with suppress_own():  # such as a sparse tensor
            same = same and (first == second) | ((first != first) & (second != second))  # NaN is equal here
            same = same if isinstance(same, bool) else same.all()
        return 0 if same else logging.WARNING
    if isinstance(first, list | tuple):
        first, second = dict(enumerate(first)), dict(enumerate(second))
    if isinstance(first, Mapping):
        same_keys = first.keys() == second.keys()
        return max((difference(first[key], second[key]) for key in first), default=0) if same_keys else logging.WARNING
    kind: Any = type(first)
    compares = kind.__eq__ is not object.__eq__ and not dataclasses.is_dataclass(first)
    return max(logging.INFO * compares, difference(getattr(first, "__dict__", {}), getattr(second, "__dict__", {})))
