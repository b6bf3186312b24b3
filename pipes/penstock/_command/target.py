"""What ``module:factory`` on a command line names, and a loader of the same data with other workers."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from penstock._fetch.dataset_facts import DatasetFacts
from penstock._loader.loader import Loader
from penstock._nodes.parallel_mapper import ParallelMapper


class TargetError(Exception):
    """The command line does not name anything that can be measured; the message says what to write instead."""


def built(target: str) -> Any:
    """Call the factory that ``target`` names (``module:factory`` or ``path/to/file.py:factory``); an object that is not
    a function is returned unchanged.

    Raises:
        TargetError: It names neither, or a file that worker processes could not import.
        Exception: Whatever the import or the factory raises.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TargetError(
            f"{target!r} must be module:factory or path/to/file.py:factory, where factory is a function without "
            f"arguments that returns a loader."
        )
    found = functools.reduce(getattr, name.split("."), _imported(place))
    return found() if isinstance(found, type) or (callable(found) and not hasattr(found, "__iter__")) else found


def _imported(place: str) -> Any:
    name, file = place, ""
    if place.endswith(".py"):
        file = os.path.realpath(place)
        name = os.path.basename(file).removesuffix(".py")
        # spawned worker processes inherit this path, and import the file by its name
        sys.path.insert(0, os.path.dirname(file))
    module = importlib.import_module(name)
    if file and os.path.realpath(module.__file__ or "") != file:
        raise TargetError(
            f"{place}: there is another module called {name!r}, so worker processes could not import this file. Rename "
            f"it."
        )
    return module


def is_dataset(given: Any) -> bool:
    """Whether this is a dataset that is read by index, not a loader."""
    return hasattr(type(given), "__getitem__") and hasattr(type(given), "__len__")


def described(loader: Any) -> str:
    """A description of the loader."""
    if isinstance(loader, Loader):
        return repr(loader).strip("<>").partition(": ")[0]
    if isinstance(loader, DataLoader):
        return f"torch DataLoader of {type(loader.dataset).__name__}, num_workers={loader.num_workers}"
    return type(loader).__name__


def workers_of(loader: Any) -> int:
    """How many workers the loader was given; 0 also if it determines the number itself."""
    if isinstance(loader, Loader):
        return max(
            (
                node.num_workers
                for node in loader.root.chain()
                if isinstance(node, ParallelMapper) and node.executor.crew.auto is None
            ),
            default=0,
        )
    return getattr(loader, "num_workers", 0)


def with_workers(given: Any, num_workers: int, method: Any, batch_size: int) -> Loader[Any]:
    """A `Loader` over the same data in the same batches, with other workers.

    Args:
        given: A `Loader` that has not started, whose graph the new one takes over; a ``DataLoader``; or a map-style
            dataset.
        num_workers: 0 loads inline.
        method: ``"thread"``, ``"process"`` or ``"ray"``.
        batch_size: Batch size for a dataset.

    Raises:
        TargetError: It is something else, or its data is not read by index.
    """
    if isinstance(given, Loader):
        return _of_graph(given, num_workers, method)
    if isinstance(given, DataLoader):
        if isinstance(given.dataset, IterableDataset):
            raise TargetError(
                f"{type(given.dataset).__name__} is an IterableDataset, which penstock reads in one process unless it "
                f"has lanes=: there is nothing to compare. Return Loader.from_dataset(…, lanes=…), if the dataset "
                f"splits itself by worker."
            )
        batches: dict[str, Any] = {
            "batch_size": given.batch_size,
            "drop_last": given.drop_last,
            "sampler": given.sampler,
        }
        if given.batch_size is None and given.batch_sampler is not None:
            batches = {"batch_sampler": given.batch_sampler}
        collate_fn = None if given.collate_fn in (default_collate, default_convert) else given.collate_fn
        others: dict[str, Any] = {"pin_memory": given.pin_memory, "worker_init_fn": given.worker_init_fn}
        return Loader.from_dataset(
            given.dataset, **batches, **others, collate_fn=collate_fn, num_workers=num_workers, method=method
        )
    if is_dataset(given):
        shuffle = not DatasetFacts(given).sets_worker_info  # a Stream over an IterableDataset has an order of its own
        return Loader.from_dataset(given, batch_size, shuffle, num_workers=num_workers, method=method)
    raise TargetError(
        f"--compare takes a Loader, a DataLoader or a dataset with __len__ and __getitem__, not an object of type "
        f"{type(given).__name__}."
    )


def _of_graph(given: Loader[Any], num_workers: int, method: Any) -> Loader[Any]:
    downstream: Any = None
    for node in given.root.chain():
        if isinstance(node, ParallelMapper):
            mapper: Any = ParallelMapper(node.source, node.map_fn, num_workers, node.in_order, method)
            if downstream is None:
                return Loader(mapper)
            downstream._source = mapper  # later stages of the graph are measured too
            return Loader(given.root)
        downstream = node
    raise TargetError("this Loader has no workers to compare, because its graph has no ParallelMapper.")
