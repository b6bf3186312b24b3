"""Facts about a torch sampler that are known without reading it: what it wraps, and which generators it uses."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from penstock._errors import suppress_own
from penstock._fetch.epoch_attribute import tell_epoch
from penstock._memory.modes import neutral_modes
from penstock._random.draws import looker
from penstock._random.global_rng import global_rngs_kept, seed_globals

_GLOBAL = torch.default_generator, np.random.mtrand._rand
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
    return all(
        type(one) in torchs + plain and getattr(one, "generator", None) is not torch.default_generator
        for one in wrapped(sampler)
    )


def copied(sampler: Any) -> Any:
    """A copy of ``sampler``; None if it cannot be copied.

    Of torch's own samplers it has what decides, with the seed, what they yield: of their data the length only. Of
    others it shares the global generators, and any ``dataset`` and ``data_source``.
    """
    with suppress_own():
        if owns_its_randomness(sampler):
            return _settings(sampler)
        shared = [getattr(one, name, None) for one in wrapped(sampler) for name in ("data_source", "dataset")]
        other = copy.deepcopy(sampler, {id(one): one for one in (*shared, *_GLOBAL)})
        return None if other is sampler else other
    return None


def _settings(one: Any) -> Any:
    if isinstance(one, torch.Tensor):
        return one.detach().clone()
    other = copy.copy(one)
    if isinstance(one, Sampler):
        for name, part in vars(one).items():
            setattr(other, name, range(len(part)) if name == "data_source" else _settings(part))
        other.generator = None  # it is lent one
    return other


def same_settings(one: Any, other: Any) -> bool:
    """Whether these `copied` of torch's samplers yield the same from the same seed."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Sampler):
        ours, theirs = ({**vars(each), "generator": None} for each in (one, other))
        return ours.keys() == theirs.keys() and all(same_settings(ours[name], theirs[name]) for name in ours)
    if isinstance(one, torch.Tensor):
        one, other = one.numpy(force=True), other.numpy(force=True)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def told_by(sampler: Any) -> list[Any]:
    """What `tell` reaches: ``sampler`` and everything it wraps, as far as they have a ``set_epoch``."""
    return [one for one in wrapped(sampler) if callable(getattr(one, "set_epoch", None))]


def tell(sampler: Any, epoch: int, *, seeded: bool = True) -> bool:
    """Call ``set_epoch(epoch)`` on ``sampler`` and on everything it wraps.

    With ``seeded``, the global generators are seeded by the epoch meanwhile, for a ``set_epoch`` that draws; not while
    other code may draw from them. Returns whether it drew then.
    """
    if not (told := told_by(sampler)):
        return False
    with neutral_modes(), global_rngs_kept() if seeded else nullcontext():
        if seeded:
            seed_globals(0, epoch, 0)
        before = (look := looker())()
        for one in told:
            tell_epoch(one, epoch)
        return seeded and look() != before
