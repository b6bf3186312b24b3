"""Resolves ``module:factory`` from a command line, and rebuilds a loader with other workers."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate, default_convert

from penstock._loader.loader import Loader
from penstock._nodes.parallel_mapper import ParallelMapper

if TYPE_CHECKING:
    from penstock._nodes.node import Node


class TargetError(Exception):
    """The command line does not name anything that can be measured; the message says what to write instead."""


def built(target: str) -> Any:
    """Call the factory that ``target`` names (``module:factory`` or ``path/to/file.py:factory``); an object that is not a function is returned unchanged.

    Raises:
        TargetError: There is no such module, file or name.
        Exception: Whatever the module or the factory raises.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(
            f"{target!r} must be module:factory or path/to/file.py:factory, where factory is a function without arguments that returns a loader."
        )
    found: Any = _of_file(place) if place.endswith(".py") else _module(place, place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise TargetError(f"{place} has no {name!r}. Name a function without arguments that returns a loader, or a loader.")
        found = getattr(found, part)
    return found() if isinstance(found, type) or (callable(found) and not hasattr(found, "__iter__")) else found


def _of_file(path: str) -> Any:
    if not os.path.isfile(path):
        raise TargetError(f"there is no file {path!r}.")
    folder, file = os.path.split(os.path.realpath(path))
    name = file.removesuffix(".py")
    sys.path.insert(0, folder)  # spawned worker processes inherit this path, and import the file by its name
    module = _module(name, path)
    if os.path.realpath(getattr(module, "__file__", None) or "") != os.path.join(folder, file):
        raise TargetError(f"{path}: there is another module called {name!r}, so worker processes could not import this file. Rename it.")
    return module


def _module(name: str, said: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(f"{exc.name}.")):
            raise TargetError(f"there is no module {said!r} here. For a file, write its path: path/to/file.py:factory.") from None
        raise


def as_loader(given: Any, batch_size: int) -> Any:
    """``given``, if it is iterable; for a dataset that can only be read by index, a `Loader` over it, shuffled and without workers.

    Raises:
        TargetError: It is neither.
    """
    if hasattr(type(given), "__iter__") or (not hasattr(type(given), "__len__") and hasattr(type(given), "__getitem__")):
        return given
    if is_dataset(given):
        return with_workers(given, 0, "thread", batch_size)
    raise TargetError(
        f"the factory returned an object of type {type(given).__name__}, which is not iterable. It must return a loader, or a dataset with __len__ and __getitem__."
    )


def is_dataset(one: Any) -> bool:
    """Whether this is a dataset that is read by index, not a loader."""
    kind = type(one)
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and (kind in (list, tuple) or not hasattr(kind, "__iter__"))


def with_workers(given: Any, num_workers: int, method: Any, batch_size: int) -> Loader[Any]:
    """A `Loader` over the same data in the same batches, with other workers.

    Args:
        given: A `Loader` that has not started, whose graph the new one takes over; a ``DataLoader``; or a map-style dataset.
        num_workers: 0 loads inline.
        method: ``"thread"``, ``"process"`` or ``"ray"``.
        batch_size: Batch size for a dataset.

    Raises:
        TargetError: It is something else, or its data is not read by index.
    """
    if isinstance(given, Loader):
        downstream: Node[Any] | None = None
        for node in given.root.chain():
            if isinstance(node, ParallelMapper):
                mapper: Node[Any] = ParallelMapper(node.source, node.map_fn, num_workers, node.in_order, method)
                if downstream is None:
                    return Loader(mapper)
                downstream._source = mapper  # later stages of the graph are measured too
                return Loader(given.root)
            downstream = node
        raise TargetError("this Loader has no workers to compare, because its graph has no ParallelMapper.")
    if isinstance(given, DataLoader):
        if isinstance(given.dataset, IterableDataset):
            raise TargetError(
                f"{type(given.dataset).__name__} is an IterableDataset, which penstock reads in one process, so there is nothing to compare."
            )
        return Loader.from_dataset(given.dataset, **_words(given), num_workers=num_workers, method=method)
    if is_dataset(given):
        return Loader.from_dataset(given, batch_size, True, num_workers=num_workers, method=method)
    raise TargetError(
        f"--compare takes a penstock.Loader, a DataLoader or a map-style dataset, not an object of type {type(given).__name__}."
    )


def _words(given: DataLoader[Any]) -> dict[str, Any]:
    words: dict[str, Any] = {
        "collate_fn": None if given.collate_fn in (default_collate, default_convert) else given.collate_fn,
        "pin_memory": given.pin_memory,
        "worker_init_fn": given.worker_init_fn,
    }
    sampler: Any = given.sampler
    if given.batch_size is None and given.batch_sampler is not None:
        return {**words, "batch_sampler": given.batch_sampler}
    words |= {"batch_size": given.batch_size, "drop_last": given.drop_last}
    if type(sampler) is SequentialSampler:
        return {**words, "shuffle": False}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(given.dataset):  # type: ignore[arg-type]
        return {**words, "shuffle": True}
    return {**words, "sampler": sampler}
