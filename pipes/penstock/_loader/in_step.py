"""Warns about loaders that shuffle alike by the default seed: two of the same length that are read at the same time,
and one that is built again to continue a training.

The default seed cannot be random, because the ranks of a job must agree on it without communication.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from typing import Any

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from penstock._errors import first_time
from penstock._fetch.dataset_facts import length
from penstock._loader.rank_notes import place_in_the_code
from penstock._nodes.sampler_traits import wrapped
from penstock._nodes.sharder import ranks_of

log = logging.getLogger("penstock")

_started: weakref.WeakSet[Any] = weakref.WeakSet()
_latest: dict[Any, weakref.ref[Any]] = {}  # the loader that was begun last, of each place in the code and rank


def unseeded(order_length: int | None, sampler: Any) -> tuple[int, str] | None:
    """Items shuffled with the default seed: ``order_length``, or the length of one of torch's random samplers; None if
    there are none. With the place in the code where the loader is built.
    """
    items = order_length
    if sampler is not None:
        kinds = RandomSampler, SubsetRandomSampler, WeightedRandomSampler
        items = length(sampler) if any(isinstance(one, kinds) for one in wrapped(sampler)) else None
    return None if items is None else (items, place_in_the_code())


def say_if_anew(loader: Any) -> None:
    """Say so if ``loader``, which starts for the first time and was told neither an epoch nor a state, begins as one
    did that was built by the same line and is gone.

    By a log record and no warning, because comparisons, sweeps and folds may want it.
    """
    if loader._unseeded is None or loader._reader.cursor.is_told:
        return
    place = loader._unseeded[1], ranks_of(loader.root)
    before = _latest.get(place, lambda: loader)()
    _latest[place] = weakref.ref(loader)
    if (before is None or before._reader.closed) and first_time(*place):
        log.warning(
            "a loader with the default seed=0 was built here before (%s), and this one begins with epoch 0 again: with "
            "the same random numbers and, for as many samples, the same order (torch.manual_seed does not change "
            "that). If one training reads them all, call loader.set_epoch(number of epochs so far), or pass another "
            "seed= to each. Pass seed=0 if you want this.",
            place[0],
        )


def warn_if_in_step(loader: Any) -> None:
    """Warn if ``loader``, which starts for the first time and not from a loaded state, is in step with another one."""
    if loader._unseeded is None:
        return
    items = loader._unseeded[0]
    others = [
        other for other in list(_started) if other is not loader and other._unseeded[0] == items and other._is_inside
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
