"""Warns about loaders that shuffle in step: two of the same length with the default seed visit the same positions at
the same time.

The default seed cannot be random, because the ranks of a job must agree on it without communication.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from penstock._fetch.dataset_facts import length
from penstock._nodes.sampler_traits import wrapped
from penstock._nodes.sharder import ranks_of

_started: weakref.WeakSet[Any] = weakref.WeakSet()


def unseeded_length(order_length: int | None, sampler: Any) -> int | None:
    """Items shuffled with the default seed: ``order_length``, or the length of one of torch's random samplers; None if
    there are none.
    """
    if sampler is None:
        return order_length
    random = any(
        isinstance(one, RandomSampler | SubsetRandomSampler | WeightedRandomSampler) for one in wrapped(sampler)
    )
    return length(sampler) if random else None


def warn_if_in_step(loader: Any) -> None:
    """Warn if ``loader``, which starts for the first time and not from a loaded state, is in step with another one."""
    items = loader._unseeded
    if items is None:
        return
    others = [
        other for other in list(_started) if other is not loader and other._unseeded == items and other._is_inside
    ]
    # Loaders of other ranks in the same process are meant to be in step.
    if any(ranks_of(other.root) == ranks_of(loader.root) for other in others):
        warnings.warn(
            f"two loaders shuffle {items} items each with the same seed, the default seed=0, so they visit the same "
            f"positions at the same time, in every run (torch.manual_seed does not change that). Pass a different "
            f"seed= to one of them, or pass seed=0 to both if you want this.",
            stacklevel=5,
        )
    _started.add(loader)
