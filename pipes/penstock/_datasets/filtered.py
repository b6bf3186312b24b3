"""filtered: the samples of a dataset that satisfy a predicate."""

from __future__ import annotations

import logging
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import Subset

from penstock._datasets.mix import Mix
from penstock._datasets.number_file import kept, name_of, one_each
from penstock._datasets.one_pass import check_read_once

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from penstock._random.permutation import Int64s


_logger = logging.getLogger("penstock")


def filtered(
    dataset: Any,
    predicate: Callable[[Any], bool],
    *,
    cache: str | os.PathLike[str] | None = None,
    num_workers: int = 0,
    method: Literal["thread", "process"] = "process",
) -> Subset[Any]:
    """The samples of ``dataset`` for which ``predicate(sample)`` is true, in their order, as a ``Subset``.

    Every sample is loaded once, during this call, on every rank, unless the file ``cache`` exists. Progress is shown as
    by `Cached.fill`. Unlike a filter that runs during loading, the result has a length, and its order, sharding and
    states work as for any dataset. It has no order of its own.

    Args:
        dataset: Map-style.
        predicate: A function of one sample, as the dataset returns it in epoch 0, that returns a bool. It is sent to
            worker processes once.
        cache: A file for the result. It is bound to the dataset's type and length, to the names of its files if it is
            `Shards`, to its ``settings()`` if it has that method, to the fingerprint (``_fingerprint``) of a Hugging
            Face dataset, and to the predicate: its name, and the values held by a ``functools.partial`` or an object.
            Delete the file when the predicate's code or the contents of the dataset's files change.
        num_workers: Worker threads or processes that load the samples; 0 loads them in this thread.
        method: ``"process"`` or ``"thread"``.

    Raises:
        TypeError: The dataset cannot be read by index, or ``predicate`` did not return a bool.
        ValueError: No sample is kept; ``dataset`` is a `Mix` or changes with the epoch; the file belongs to another
            dataset or predicate, or is damaged; or, with ``cache``, the predicate is a lambda or a nested function,
            which cannot be identified.
    """
    name = name_of(predicate, "predicate")
    if isinstance(dataset, Mix):
        raise ValueError("filtering a Mix would lose its weights. Filter each of its sources, and mix the results.")
    check_read_once(dataset, "filtered", "Filter a dataset that does not change.")
    found = kept(
        cache,
        dataset,
        predicate,
        "predicate",
        "kept by",
        partial(_judged, dataset, predicate, name, num_workers, method),
    )
    if len(found) and not 0 <= found.min() <= found.max() < len(dataset):
        raise ValueError(f"{cache} is damaged: it holds indices outside the dataset. Delete it.")
    _logger.info(f"{name} keeps {len(found)} of the {len(dataset)} samples of {type(dataset).__name__}")
    return Subset(dataset, array("q", found.astype(np.int64).tobytes()))  # 8 bytes per index, returned as an int


filtered.__module__ = "penstock"


def _judged(dataset: Any, predicate: Any, name: str, num_workers: int, method: Any) -> Int64s:
    found = np.flatnonzero(
        one_each(dataset, partial(_is_kept, predicate, name), f"filtering by {name}", num_workers, method)
    )
    if not len(found):
        raise ValueError(
            f"{name} keeps none of the {len(dataset)} samples of {type(dataset).__name__}. Check it on a sample: "
            f"predicate(dataset[0])."
        )
    return found


def _is_kept(predicate: Any, name: str, sample: Any) -> bool:
    kept = predicate(sample)
    if isinstance(kept, torch.Tensor | np.ndarray) and not kept.ndim:
        kept = kept.item()
    if not isinstance(kept, bool | np.bool_):
        raise TypeError(f"{name} must return True or False, but returned {kept!r:.80}.")
    return bool(kept)
