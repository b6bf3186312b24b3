"""Says so if a loader with the default seed is built again, as if to continue a training: it shuffles alike.

The default seed cannot be random, because the ranks of a job must agree on it without communication.
"""

from __future__ import annotations

import logging
import os
import traceback
import weakref
from pathlib import Path
from typing import Any, Final

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from penstock._errors import first_time
from penstock._fetch.users_code import is_library_file
from penstock._nodes.sampler_traits import wrapped
from penstock._nodes.sharder import ranks_of

log = logging.getLogger("penstock")

FRAMES: Final = 3
"""Frames of the user's code that tell where a loader was built."""

_HERE: Final = str(Path(__file__).parents[1]) + os.sep

_latest: dict[Any, weakref.ref[Any]] = {}  # the loader that was begun last, of each line of code and rank


def unseeded(sampler: Any, *, shuffled: bool) -> str | None:
    """The line of code that builds a loader, if that shuffles with the default seed: by itself, or by one of torch's
    random samplers.
    """
    kinds = RandomSampler, SubsetRandomSampler, WeightedRandomSampler
    random = shuffled if sampler is None else any(isinstance(one, kinds) for one in wrapped(sampler))
    return place_in_the_code() if random else None


def say_if_anew(loader: Any) -> None:
    """Say so if ``loader``, which starts for the first time and was told neither an epoch nor a state, begins as one
    did that was built by the same line and is gone.

    By a log record and no warning, because comparisons, sweeps and folds may want it.
    """
    if loader._unseeded is None or loader._reader.cursor.is_told:
        return
    line = loader._unseeded, ranks_of(loader.root)
    before = _latest.get(line, lambda: loader)()
    _latest[line] = weakref.ref(loader)
    if (before is None or before._reader.closed) and first_time(*line):
        log.warning(
            "a loader with the default seed=0 was built here before (%s), and this one begins with epoch 0 again: with "
            "the same random numbers and, for as many samples, the same order (torch.manual_seed does not change "
            "that). If one training reads them all, call loader.set_epoch(number of epochs so far), or pass another "
            "seed= to each. Pass seed=0 if you want this.",
            line[0],
        )


def place_in_the_code() -> str:
    """The innermost frames of the user's code (if all code is installed, of any code but ours), without folders, which
    may differ between hosts.
    """
    stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    frames = [one for one in stack if not one.filename.startswith(_HERE)]
    users = [one for one in frames if not is_library_file(one.filename)]
    return ", ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in (users or frames)[:FRAMES])
