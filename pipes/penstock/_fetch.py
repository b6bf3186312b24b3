"""What a worker does with one task: load samples by their addresses, collate them, and give errors an address too.

Nothing here knows of threads or processes. A task is an `Indices` or any other item; a sample's random numbers are keyed by
(seed, epoch, position), so that a task can be done anywhere, and again.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import Subset, default_collate, default_convert

from penstock._errors import GraphError
from penstock._keys import global_rngs_kept, numpy_generator, rekey_globals, torch_generator
from penstock._node import Indices
from penstock._pool import IDLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableSequence

    import numpy as np
    import torch


@final
class Sample:
    """The address of the sample that is being loaded, and random numbers of its own.

    The same (seed, epoch, position) gives the same numbers in any thread, any process, on any rank.

    Attributes:
        seed: The seed of the loader.
        epoch: From 0.
        position: The sample's place in the global sequence of the epoch, before sharding.
        index: Its index in the dataset.
    """

    def __init__(self, seed: int, epoch: int, position: int, index: Any) -> None:
        self.seed = seed
        self.epoch = epoch
        self.position = position
        self.index = index

    @cached_property
    def rng(self) -> np.random.Generator:
        """A NumPy generator of this sample's own."""
        return numpy_generator(self.seed, self.epoch, self.position)

    @cached_property
    def torch_generator(self) -> torch.Generator:
        """A torch generator of this sample's own, on the CPU."""
        return torch_generator(self.seed, self.epoch, self.position)


_current: ContextVar[Sample | None] = ContextVar("penstock_sample", default=None)


def sample() -> Sample:
    """The sample that is being loaded; for ``__getitem__`` and the transforms it calls.

    Raises:
        RuntimeError: Called where no sample is being loaded.
    """
    current = _current.get()
    if current is None:
        raise RuntimeError("penstock.sample() is known only while a sample is being loaded: call it in __getitem__, or in what that calls.")
    return current


@final
class Fetch:
    """Load the samples of a batch from a map-style dataset, and collate them: the ``map_fn`` of the canonical graph.

    Args:
        dataset: Has ``__getitem__``, or ``__getitems__`` for a list of indices at once.
        collate_fn: Makes a batch of a list of samples; default ``torch.utils.data.default_collate``. For a single index (no
            batching) it is handed the sample, and the default is ``default_convert``.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any] | None = None) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._gathers = _gathers(dataset)

    def __call__(self, indices: Any) -> Any:
        """The batch of a list of indices, or the sample of one index."""
        if isinstance(indices, list):
            return self.collate(self.dataset.__getitems__(indices) if self._gathers else [self.dataset[index] for index in indices])
        return self.convert(self.dataset[indices])

    def collate(self, samples: list[Any]) -> Any:
        """The batch of ``samples``."""
        if self.collate_fn is not None:
            return self.collate_fn(samples)
        # Where torch believes to be in a DataLoader's worker, it collates into shared memory of its own, which nobody wants here.
        info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            return default_collate(samples)
        finally:
            torch_worker._worker_info = info

    def convert(self, one: Any) -> Any:
        """A sample that is not batched."""
        return (self.collate_fn or default_convert)(one)

    def settings(self) -> dict[str, Any]:
        """The length of the dataset, where it has one."""
        try:
            return {"dataset_length": len(self.dataset)}
        except TypeError:
            return {}


@final
class MapWork:
    """`Work` that applies a ``map_fn``, sample by sample where that is a `Fetch`.

    Args:
        map_fn: A `Fetch`, or any callable: it is handed plain values, without their address.
        seed: Of the random numbers of the samples.
        rekey: Key the global generators of ``random``, ``numpy.random`` and torch anew for each sample.
    """

    def __init__(self, map_fn: Callable[[Any], Any], seed: int, rekey: bool) -> None:
        self.map_fn = map_fn
        self.seed = seed
        self.rekey = rekey

    @property
    def dataset(self) -> Any:
        """What ``get_worker_info().dataset`` shows in a worker process."""
        return self.map_fn.dataset if isinstance(self.map_fn, Fetch) else None

    def __call__(self, task: Any, cell: MutableSequence[int]) -> Any:
        if isinstance(self.map_fn, Fetch):
            if not isinstance(task, Indices):
                raise GraphError(f"Fetch loads samples by index, and {type(task).__name__} came: put a Sampler at the source, or map with a plain function.")
            return self._fetched(self.map_fn, task, cell)
        with self._noted(task, cell):
            if not isinstance(task, Indices):
                return self.map_fn(task)
            position = int(task.positions[0]) if task.is_batch else task.positions
            with self._loading(task.epoch, position, task.plain()):
                return self.map_fn(task.plain())

    def inline(self, task: Any) -> Any:
        """The task done in the caller's own process, whose global generators are left as they were."""
        with global_rngs_kept() if self.rekey else contextlib.nullcontext():
            return self(task, [IDLE])

    def name(self, task: Any, row: int) -> str:
        """``task`` in words."""
        if not isinstance(task, Indices):
            return f"the item {task!r:.80}"
        if task.is_batch and row != IDLE:
            task = task[row]
        if task.is_batch:
            indices = task.plain()
            shown = f"[{', '.join(map(str, indices[:8]))}{', …' if len(indices) > 8 else ''}]"
            return f"the batch of dataset indices {shown} (epoch {task.epoch}, positions {task.positions[0]} to {task.positions[-1]})"
        return f"dataset index {task.values} (epoch {task.epoch}, position {task.positions})"

    def _fetched(self, fetch: Fetch, task: Indices, cell: MutableSequence[int]) -> Any:
        with self._noted(task, cell):
            if not task.is_batch:
                with self._loading(task.epoch, task.positions, task.values):
                    return fetch.convert(fetch.dataset[task.values])
            indices = task.plain()
            if fetch._gathers:
                with self._loading(task.epoch, int(task.positions[0]), indices):
                    return fetch.collate(fetch.dataset.__getitems__(indices))
            samples = []
            for row, (position, index) in enumerate(zip(task.positions.tolist(), indices, strict=True)):
                cell[0] = row
                with self._loading(task.epoch, position, index):
                    samples.append(fetch.dataset[index])
            cell[0] = IDLE
            return fetch.collate(samples)

    @contextlib.contextmanager
    def _loading(self, epoch: int, position: int, index: Any) -> Iterator[None]:
        if self.rekey:
            rekey_globals(self.seed, epoch, position)
        token = _current.set(Sample(self.seed, epoch, position, index))
        try:
            yield
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def _noted(self, task: Any, cell: MutableSequence[int]) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            exc.add_note(f"while loading {self.name(task, cell[0])}")
            raise


def _gathers(dataset: Any) -> bool:
    """Whether ``__getitems__`` is worth a call: `Subset` has one that only loops where the dataset below has none."""
    while type(dataset).__getitem__ is Subset.__getitem__ if isinstance(dataset, Subset) else False:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
