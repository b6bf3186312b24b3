"""Facts about a torch sampler that are known without reading it: what it wraps, which generators it uses, how long it is."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from penstock._fetch.fetch import Told

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


def copied(sampler: Any, *, whole: bool = False) -> Any:
    """A copy of ``sampler``; None if it cannot be copied.

    It shares its dataset, unless it is ``whole``; then it shares only the data of which torch's own samplers use nothing but the length.
    """
    wraps = wrapped(sampler)
    shared = [getattr(one, name, None) for one in wraps for name in ("data_source", "dataset")]
    if whole:
        shared = [one.data_source for one in wraps if type(one) in (RandomSampler, SequentialSampler)]
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
    told = Told(epoch)
    for one in wrapped(sampler):
        if callable(set_epoch := getattr(one, "set_epoch", None)):
            set_epoch(told)


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
