"""Facts about a torch sampler that are known without reading it: what it wraps, and which generators it uses."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from penstock._errors import suppress_own
from penstock._fetch.epoch_calls import tell_epoch
from penstock._fetch.held import found_in as held
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


def seedable(sampler: Any) -> torch.Generator | np.random.Generator | None:
    """The ``generator`` of ``sampler`` itself that is seeded for every epoch; None if it has none of these kinds.

    One of another kind is a memory.
    """
    generator = getattr(sampler, "generator", None)
    is_own = isinstance(generator, torch.Generator | np.random.Generator) and generator is not torch.default_generator
    return generator if is_own else None


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


def copied(sampler: Any, *, shares_data: bool = False) -> Any:
    """A copy of ``sampler``; None if it cannot be copied.

    It shares the global generators, and the data of which torch's own samplers use nothing but the length. With
    ``shares_data``, which is for a copy that is not read, or of what may hold too much, it shares any ``dataset`` and
    ``data_source``.
    """
    if shares_data:
        shared = [getattr(one, name, None) for one in wrapped(sampler) for name in ("data_source", "dataset")]
    else:
        found, _ = held({"": sampler}, 500)
        shared = [one.value.data_source for one in found if type(one.value) in (RandomSampler, SequentialSampler)]
    with suppress_own():
        return copy.deepcopy(sampler, {id(one): one for one in (*shared, *_GLOBAL)})
    return None


def told_by(sampler: Any) -> list[Any]:
    """What `tell` reaches: ``sampler`` and everything it wraps, as far as they have a ``set_epoch``."""
    return [one for one in wrapped(sampler) if callable(getattr(one, "set_epoch", None))]


def tell(sampler: Any, epoch: int, *, seeded: bool = False) -> bool:
    """Call ``set_epoch(epoch)`` on ``sampler`` and on everything it wraps.

    With ``seeded``, the global generators are seeded by the epoch meanwhile, for a ``set_epoch`` that draws; not while
    other code may draw from them. Returns whether it drew then.
    """
    told = told_by(sampler)
    if not told or not seeded:
        for one in told:
            tell_epoch(one, epoch)
        return False
    with global_rngs_kept():
        seed_globals(0, epoch, 0)
        before = (look := looker())()
        for one in told:
            tell_epoch(one, epoch)
        return look() != before
