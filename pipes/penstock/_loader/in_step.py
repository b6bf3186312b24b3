"""Loaders that shuffle in step: two of the same length, both by the default seed, give the same places of their datasets at the same time.

The default stays what it is, because the ranks of a job have to agree without talking; so this tells of it.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from penstock._nodes.sampler_traits import length, wrapped

_started: weakref.WeakSet[Any] = weakref.WeakSet()


def unseeded_length(order_length: int | None, sampler: Any) -> int | None:
    """How many items are shuffled by the default seed; None where none are: ``order_length``, or the length of a random sampler of torch's."""
    if sampler is None:
        return order_length
    random = any(isinstance(one, RandomSampler | SubsetRandomSampler | WeightedRandomSampler) for one in wrapped(sampler))
    return length(sampler) if random else None


def warn_if_in_step(loader: Any) -> None:
    """To be called when ``loader`` starts for the first time, and not from a loaded state."""
    items = loader._unseeded
    if items is None:
        return
    others = [other for other in list(_started) if other is not loader and other._unseeded == items and other._is_inside]
    if any(
        other.root.ranks() == loader.root.ranks() for other in others
    ):  # in one process, other ranks of the same job are meant to be in step
        warnings.warn(
            f"two loaders shuffle {items} items each by the same seed, the default seed=0, so they visit the same places at the same time, in every run "
            f"(torch.manual_seed changes nothing in that). Give one of them another seed=; or give both seed=0, if that is what you want.",
            stacklevel=5,
        )
    _started.add(loader)
