"""Integers that a function of each sample yields: computed in one pass over a dataset, by workers, and kept in a
file.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import pickle
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock._datasets.cache_files import identity_of
from penstock._datasets.one_pass import one_pass
from penstock._files.files import open_file
from penstock._files.own_files import write_own
from penstock._random.orders import SequentialOrder
from penstock._streams.sharded import close_shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._random.permutation import Int64s

_BATCH_SIZE = 256


def name_of(function: Any, role: str) -> str:
    """The name of a function of one sample.

    Raises:
        TypeError: It cannot be called.
    """
    if not callable(function):
        raise TypeError(f"{role} must be a function of one sample, but {function!r:.80} is not callable.")
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def one_each(dataset: Any, function: Callable[[Any], Any], what: str, num_workers: int, method: Any) -> np.ndarray:
    """``function(sample)`` of each sample, in order, computed on this rank alone.

    ``what`` is shown with the progress.
    """
    work = {"transform": function, "collate_fn": np.array, "num_workers": num_workers, "method": method}
    batches = one_pass(dataset, _BATCH_SIZE, what, order=SequentialOrder(len(dataset)), **work)
    try:
        found = [*batches]
    finally:
        close_shards(dataset)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def kept(cache: Any, dataset: Any, function: Any, role: str, did: str, compute: Callable[[], Int64s]) -> Int64s:
    """``compute()``, or what the file ``cache`` has of it.

    Args:
        cache: Path of the file, which is written if it does not exist; None: no file.
        dataset: The dataset that was read.
        function: What was applied to its samples.
        role: What the function is called, for messages and the file.
        did: What it did, for the file.
        compute: Reads the dataset.

    Raises:
        ValueError: The file belongs to another dataset or function, or is damaged; or the function cannot be
            identified.
    """
    if cache is None:
        return compute()
    path, identity = os.fspath(cache), _identity(dataset, function, name_of(function, role), role, did)
    if not os.path.exists(path):
        _write(path, identity, compute())
    return _opened(path, identity)


def _identity(dataset: Any, function: Any, name: str, role: str, did: str) -> dict[str, Any]:
    try:
        holds = f"{zlib.crc32(pickle.dumps(function, 5)):08x}"
    except Exception as exc:
        raise ValueError(
            f"with cache=, the {role} is pickled to compare it with the one that the file was made with, but {name} "
            f"cannot be pickled ({exc}). Use a module-level function, a functools.partial of one, or an object; or "
            f"drop cache=."
        ) from exc
    method = getattr(dataset, "settings", None)
    settings = None
    if callable(method):
        with contextlib.suppress(TypeError, ValueError):  # an unrelated method of that name
            settings = json.loads(json.dumps(method()))
    return {
        did: name,
        role: holds,
        **identity_of(dataset, getattr(dataset, "_fingerprint", None)),
        "settings": settings,
    }


# The file of `cache`: a line of JSON that says what it was computed from, padded with spaces to a multiple of `_ALIGN`,
# then int64 values, little-endian. It is renamed into place once complete, so any number of processes may write it at
# once. It is mapped, so all ranks and workers of a host share one copy of up to a billion indices.

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
        raise ValueError(
            f"{path} was not written by penstock, or is damaged. Delete it, or give another path."
        ) from error
    ours = json.loads(json.dumps(identity))
    if theirs != ours:
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        changed = "; ".join(f"{key} was {theirs.get(key)!r:.80} and is {ours.get(key)!r:.80}" for key in keys)
        raise ValueError(f"{path} was computed from other inputs: {changed}. Delete it, or give another path.")
    if os.path.getsize(path) != len(line) + 8 * count:
        raise ValueError(
            f"{path} has {os.path.getsize(path)} bytes instead of {len(line) + 8 * count}: it is damaged. Delete it."
        )
    numbers = np.memmap(path, "<i8", "r", len(line), (count,)) if count else np.empty(0, np.int64)
    if zlib.crc32(numbers.data) != crc:
        raise ValueError(f"{path} is damaged: its checksum is wrong. Delete it; the next call writes it again.")
    return numbers


def _write(path: str, identity: dict[str, Any], numbers: Int64s) -> None:
    numbers = np.ascontiguousarray(numbers, "<i8")
    head = json.dumps({"of": identity, "count": len(numbers), "crc": zlib.crc32(numbers.data)}).encode()
    write_own(path, head.ljust(-(-(len(head) + 1) // _ALIGN) * _ALIGN - 1), b"\n", numbers.data, sync=True)
