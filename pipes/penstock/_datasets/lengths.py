"""lengths: an integer for each sample of a dataset, such as its number of tokens."""

from __future__ import annotations

from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock._datasets.mix import Mix
from penstock._datasets.number_file import kept, name_of, one_each
from penstock._datasets.one_pass import check_read_once

if TYPE_CHECKING:
    import os
    from collections.abc import Callable


def lengths(
    dataset: Any,
    function: Callable[[Any], int],
    cache: str | os.PathLike[str] | None = None,
    *,
    num_workers: int = 0,
    method: Literal["thread", "process"] = "process",
) -> np.ndarray:
    """``function(sample)`` of every sample of ``dataset``, by index: lengths or counts for `Packs` and `Buckets`.

    Every sample is loaded once, during this call, on every rank, unless the file ``cache`` exists. Progress is shown as
    by `Cached.fill`.

    Args:
        dataset: Map-style.
        function: A function of one sample, as the dataset returns it in epoch 0, that returns an integer. It is sent to
            worker processes once.
        cache: A file for the result, bound to the dataset and to ``function`` as that of `filtered` is. Delete it when
            the function's code or the contents of the dataset's files change.
        num_workers: Worker threads or processes that load the samples; 0 loads them in this thread.
        method: ``"process"`` or ``"thread"``.

    Returns:
        int64, shape ``(n,)``; read-only, and mapped from the file if there is one.

    Raises:
        TypeError: The dataset cannot be read by index, or ``function`` did not return an integer.
        ValueError: ``dataset`` is a `Mix` or changes with the epoch; the file belongs to another dataset or function,
            or is damaged; or, with ``cache``, the function is a lambda or a nested function, which cannot be
            identified.
    """
    name = name_of(function, "function")
    if isinstance(dataset, Mix):
        raise ValueError(
            "a Mix is measured by source: pass {name: lengths(source, function) for each source} as a dict to Packs."
        )
    check_read_once(dataset, "lengths", "Measure a dataset that does not change.")
    compute = partial(
        one_each, dataset, partial(_measured, function, name), f"measuring by {name}", num_workers, method
    )
    found = kept(cache, dataset, function, "function", "measured by", compute)
    if len(found) != len(dataset):
        raise ValueError(f"{cache} is damaged: it holds {len(found)} lengths for {len(dataset)} samples. Delete it.")
    found.flags.writeable = False
    return found


lengths.__module__ = "penstock"


def _measured(function: Any, name: str, sample: Any) -> np.int64:
    value = function(sample)
    try:
        return np.int64(index(None if isinstance(value, bool) else value))  # type: ignore[arg-type]  # which raises
    except (TypeError, OverflowError):
        raise TypeError(f"{name} must return an integer of 64 bits, but returned {value!r:.80}.") from None
