"""filtered: the samples of a dataset that satisfy a predicate."""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import pickle
import zlib
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import Subset

from penstock._datasets.cache_files import identity_of
from penstock._datasets.mix import Mix
from penstock._datasets.one_pass import check_read_once, one_pass
from penstock._files.files import open_file
from penstock._files.own_files import write_own
from penstock._random.orders import SequentialOrder
from penstock._streams.sharded import close_shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._random.permutation import Int64s


_logger = logging.getLogger("penstock")
_BATCH_SIZE = 256


def filtered(
    dataset: Any,
    predicate: Callable[[Any], bool],
    *,
    cache: str | os.PathLike[str] | None = None,
    num_workers: int = 0,
    method: Literal["thread", "process"] = "process",
) -> Subset[Any]:
    """The samples of ``dataset`` for which ``predicate(sample)`` is true, in their order, as a ``Subset``.

    Every sample is loaded once, during this call, on every rank, unless the file ``cache`` exists. Progress is shown as by `Cached.fill`. Unlike a filter that runs
    during loading, the result has a length, and its order, sharding and states work as for any dataset. It has no order of its own.

    Args:
        dataset: Map-style.
        predicate: A function of one sample, as the dataset returns it in epoch 0, that returns a bool. It is sent to worker processes once.
        cache: A file for the result. It is bound to the dataset's type and length, to the names of its files if it is `Shards`, to its ``settings()`` if it has that method, to the fingerprint
            (``_fingerprint``) of a Hugging Face dataset, and to the predicate: its name, and the values held by a ``functools.partial`` or an object.
            Delete the file when the predicate's code or the contents of the dataset's files change.
        num_workers: Worker threads or processes that load the samples; 0 loads them in this thread.
        method: ``"process"`` or ``"thread"``.

    Raises:
        TypeError: The dataset cannot be read by index, or ``predicate`` did not return a bool.
        ValueError: No sample is kept; ``dataset`` is a `Mix` or changes with the epoch; the file belongs to another dataset or predicate, or is damaged; or, with
            ``cache``, the predicate is a lambda or a nested function, which cannot be identified.
    """
    name = f"{getattr(predicate, '__module__', '?')}.{getattr(predicate, '__qualname__', type(predicate).__qualname__)}"
    if not callable(predicate):
        raise TypeError(f"predicate must be a function of one sample, but {predicate!r:.80} is not callable.")
    if isinstance(dataset, Mix):
        raise ValueError("filtering a Mix would lose its weights. Filter each of its sources, and mix the results.")
    check_read_once(dataset, "filtered", "Filter a dataset that does not change.")

    if cache is None:
        kept = _judged(dataset, predicate, name, num_workers, method)
    else:
        path, identity = os.fspath(cache), _identity(dataset, predicate, name)
        if not os.path.exists(path):
            _write(path, identity, _judged(dataset, predicate, name, num_workers, method))
        kept = _opened(path, identity)
    if len(kept) and not 0 <= kept.min() <= kept.max() < len(dataset):
        raise ValueError(f"{cache} is damaged: it holds indices outside the dataset. Delete it.")
    _logger.info(f"{name} keeps {len(kept)} of the {len(dataset)} samples of {type(dataset).__name__}")
    return Subset(dataset, array("q", kept.astype(np.int64).tobytes()))  # 8 bytes per index, returned as an int


filtered.__module__ = "penstock"


def _judged(dataset: Any, predicate: Any, name: str, num_workers: int, method: Any) -> Int64s:
    work = {"transform": partial(_is_kept, predicate, name), "collate_fn": np.array, "num_workers": num_workers, "method": method}
    batches = one_pass(dataset, _BATCH_SIZE, f"filtering by {name}", order=SequentialOrder(len(dataset)), **work)
    try:
        kept = np.flatnonzero(np.concatenate([np.zeros(0, bool), *batches]))
    finally:
        close_shards(dataset)
    if not len(kept):
        raise ValueError(
            f"{name} keeps none of the {len(dataset)} samples of {type(dataset).__name__}. Check it on a sample: predicate(dataset[0])."
        )
    return kept


def _is_kept(predicate: Any, name: str, sample: Any) -> bool:
    kept = predicate(sample)
    if isinstance(kept, torch.Tensor | np.ndarray) and not kept.ndim:
        kept = kept.item()
    if not isinstance(kept, bool | np.bool_):
        raise TypeError(f"{name} must return True or False, but returned {kept!r:.80}.")
    return bool(kept)


def _identity(dataset: Any, predicate: Any, name: str) -> dict[str, Any]:
    try:
        holds = f"{zlib.crc32(pickle.dumps(predicate, 5)):08x}"
    except Exception as exc:
        raise ValueError(
            f"with cache=, the predicate is pickled to compare it with the one that the file was made with, but {name} cannot be pickled ({exc}). "
            f"Use a module-level function, a functools.partial of one, or an object; or drop cache=."
        ) from exc
    method = getattr(dataset, "settings", None)
    settings = None
    if callable(method):
        with contextlib.suppress(TypeError, ValueError):  # an unrelated method of that name
            settings = json.loads(json.dumps(method()))
    return {"kept by": name, "predicate": holds, **identity_of(dataset, getattr(dataset, "_fingerprint", None)), "settings": settings}


# The file of `cache`: a line of JSON that says what it was computed from, padded with spaces to a multiple of `_ALIGN`, then int64 values,
# little-endian. It is renamed into place once complete, so any number of processes may write it at once. It is mapped, so all ranks and workers of a
# host share one copy of up to a billion indices.

_ALIGN = 64


def _opened(path: str, identity: dict[str, Any]) -> Int64s:
    """The array in the file at ``path``.

    Raises:
        ValueError: The file is damaged or holds something else; the message lists the differences.
        OSError: The file cannot be read.
    """
    with open(path, "rb", opener=open_file) as file:
        line = file.readline(2**20)
    try:
        head = json.loads(line.decode())
        theirs, count, crc = dict(head["of"]), operator.index(head["count"]), head["crc"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} was not written by penstock, or is damaged. Delete it, or give another path.") from error
    ours = json.loads(json.dumps(identity))
    if theirs != ours:
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        changed = "; ".join(f"{key} was {theirs.get(key)!r:.80} and is {ours.get(key)!r:.80}" for key in keys)
        raise ValueError(f"{path} was computed from other inputs: {changed}. Delete it, or give another path.")
    if os.path.getsize(path) != len(line) + 8 * count:
        raise ValueError(f"{path} has {os.path.getsize(path)} bytes instead of {len(line) + 8 * count}: it is damaged. Delete it.")
    numbers = np.memmap(path, "<i8", "r", len(line), (count,)) if count else np.empty(0, np.int64)
    if zlib.crc32(numbers.data) != crc:
        raise ValueError(f"{path} is damaged: its checksum is wrong. Delete it; the next call of filtered writes it again.")
    return numbers


def _write(path: str, identity: dict[str, Any], numbers: Int64s) -> None:
    numbers = np.ascontiguousarray(numbers, "<i8")
    head = json.dumps({"of": identity, "count": len(numbers), "crc": zlib.crc32(numbers.data)}).encode()
    write_own(path, head.ljust(-(-(len(head) + 1) // _ALIGN) * _ALIGN - 1), b"\n", numbers.data, sync=True)
