"""Facts about a torch sampler that are known without reading it: what it wraps, which generators it uses, how long it is."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

_DEEPEST = 16
"""Bound on nested samplers: without it, a proxy that has every attribute would be followed forever."""


def wrapped(sampler: Any) -> list[Any]:
    """``sampler`` and everything it wraps as ``.batch_sampler`` or ``.sampler``, each once, from the outside in."""
    found: list[Any] = []
    left = [sampler]
    while left and len(found) < _DEEPEST:
        one = left.pop(0)
        if one is not None and all(one is not other for other in found):
            found.append(one)
            left += [getattr(one, name, None) for name in ("batch_sampler", "sampler")]
    return found


def owns_its_randomness(sampler: Any) -> bool:
    """Whether ``sampler`` is known to draw from its own generator or from none, and to keep no state between epochs.

    That holds for torch's own samplers, nested or over plain sequences; those without a generator are lent one.
    """
    torchs = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
    plain = (list, tuple, range, np.ndarray, torch.Tensor)
    return all(type(one) in torchs + plain and getattr(one, "generator", None) is not torch.default_generator for one in wrapped(sampler))


def can_be_pickled(thing: Any) -> bool:
    """Whether ``thing`` can be sent to another process. The pickle is discarded as it is written."""

    class Sink:
        def write(self, data: Any) -> int:
            return len(data)

    try:
        pickle.Pickler(Sink(), protocol=5).dump(thing)
    except Exception:
        return False
    return True


def copied(sampler: Any) -> Any:
    """A copy of ``sampler`` that shares its dataset; None if it cannot be copied."""
    shared = [getattr(one, name, None) for one in wrapped(sampler) for name in ("data_source", "dataset")]
    try:
        return copy.deepcopy(sampler, {id(one): one for one in shared})
    except Exception:
        return None


def twin(sampler: Any) -> Any:
    """A shallow copy of one of torch's samplers, over the same data and without a generator; any other sampler unchanged."""
    if not isinstance(sampler, Sampler):
        return sampler
    other = copy.copy(sampler)
    for name in ("batch_sampler", "sampler"):
        if hasattr(other, name):
            setattr(other, name, twin(getattr(other, name)))
    if hasattr(other, "generator"):
        other.generator = None
    return other


def tell(sampler: Any, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` on ``sampler`` and on everything it wraps."""
    for one in wrapped(sampler):
        if callable(set_epoch := getattr(one, "set_epoch", None)):
            set_epoch(epoch)


def is_told(sampler: Any) -> bool:
    """Whether `tell` reaches a ``set_epoch``, so that an epoch depends on its number and not on earlier epochs."""
    return any(callable(getattr(one, "set_epoch", None)) for one in wrapped(sampler))


def length(sampler: Any) -> int | None:
    """``len(sampler)``; None if it has none."""
    with suppress(TypeError, NotImplementedError):
        return len(sampler)
    return None


def length_in(sampler: Any, epoch: int) -> int | None:
    """``len(sampler)`` in ``epoch``: from a copy with its epoch set, or from ``sampler`` if it cannot be copied."""
    other = copied(sampler)
    if other is None:
        return length(sampler)
    tell(other, epoch)
    return length(other)
