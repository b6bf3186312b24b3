"""Small values in memory that the loop shares with the workers, such as a ``multiprocessing.Value`` with the epoch.

A dataset that holds one may read it, so nothing of an epoch is loaded before the loop, which may set it, asks for that.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from penstock._errors import suppress_own
from penstock._fetch.epoch_attribute import is_told
from penstock._fetch.held import held

if TYPE_CHECKING:
    from collections.abc import Mapping

_SMALL: Final = 1024
"""Bytes of the largest value. A larger one is data."""
_WITH_LOCK: Final = "multiprocessing.sharedctypes"
_KINDS: Final = ("multiprocessing.managers", "multiprocessing.synchronize")


def shared_in(roots: Mapping[str, Any]) -> str | None:
    """The path of a small value in shared memory that ``roots`` hold; None if there is none.

    What has a ``set_epoch`` is left out, because it may keep its epoch there, as those of Hugging Face do.
    """
    for one in held(roots, enters=lambda value: not is_told(value) and type(value).__module__ != _WITH_LOCK):
        with suppress_own():  # such as a parameter whose shape is not known yet
            if _is_shared(one.value):
                return one.path
    return None


def _is_shared(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.nbytes <= _SMALL and _is_shared_memory(value)
    if isinstance(value, mmap.mmap):
        return len(value) <= _SMALL
    if isinstance(value, ctypes._SimpleCData | ctypes.Array | ctypes.Structure):
        return ctypes.sizeof(value) <= _SMALL and _is_shared_memory(value)
    if type(value).__module__ == _WITH_LOCK:
        return _is_shared(value.get_obj())
    return any(base.__module__ in _KINDS for base in type(value).__mro__)


def _is_shared_memory(memory: Any) -> bool:
    while isinstance(memory, np.ndarray | memoryview):  # views
        memory = memory.base if isinstance(memory, np.ndarray) else memory.obj
    if isinstance(memory, torch.Tensor):
        return memory.device.type == "cpu" and bool(memory.is_shared())  # type: ignore[no-untyped-call]
    return isinstance(memory, mmap.mmap) or hasattr(memory, "_wrapper")  # ctypes in a block of multiprocessing's heap
