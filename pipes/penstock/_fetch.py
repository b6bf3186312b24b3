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
from torch.utils.data import ConcatDataset, Subset, default_collate, default_convert

from penstock._errors import GraphError
from penstock._keys import global_rngs_kept, numpy_generator, rekey_globals, torch_generator
from penstock._node import Indices
from penstock._pool import IDLE
from penstock._tolerance import SKIP, Fault, Marred

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableSequence

    import numpy as np
    import torch

    from penstock._tolerance import OnError


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
        on_error: What becomes of a sample that raises an ``Exception``, where ``map_fn`` is a `Fetch`.

    Attributes:
        changing: The datasets that want to be told of an epoch: their ``set_epoch`` is called when a task is of another one than
            the task before.
    """

    def __init__(self, map_fn: Callable[[Any], Any], seed: int, rekey: bool, on_error: OnError = "raise") -> None:
        self.map_fn = map_fn
        self.seed = seed
        self.rekey = rekey
        self.on_error = on_error
        self.changing = _changing(self.dataset)
        self._epoch: int | None = None  # that `changing` were told last, in this process

    @property
    def dataset(self) -> Any:
        """What ``get_worker_info().dataset`` shows in a worker process."""
        return self.map_fn.dataset if isinstance(self.map_fn, Fetch) else None

    def __call__(self, task: Any, cell: MutableSequence[int]) -> Any:
        token = _current.set(None)
        try:
            if isinstance(self.map_fn, Fetch):
                return self._fetched(self.map_fn, task, cell)
            if not isinstance(task, Indices):
                return self.map_fn(task)
            position = int(task.positions[0]) if task.is_batch else task.positions
            self._begin(task.epoch, position, task.plain())
            return self.map_fn(task.plain())
        except BaseException as exc:
            annotate(exc, f"while loading {self.name(task, cell[0])}")
            raise
        finally:
            _current.reset(token)

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
        if task.is_batch and not len(task):
            return f"an empty batch (epoch {task.epoch})"
        if task.is_batch:
            indices = task.plain()
            shown = f"[{', '.join(map(str, indices[:8]))}{', …' if len(indices) > 8 else ''}]"
            return f"the batch of dataset indices {shown} (epoch {task.epoch}, positions {task.positions[0]} to {task.positions[-1]})"
        return f"dataset index {task.values} (epoch {task.epoch}, position {task.positions})"

    def _fetched(self, fetch: Fetch, task: Any, cell: MutableSequence[int]) -> Any:
        if not isinstance(task, Indices):
            raise GraphError(
                f"Fetch loads samples by index, and {type(task).__name__} came: put a Sampler at the source, or map with a plain function."
            )
        if self.changing and task.epoch != self._epoch:
            self._tell(task.epoch)
        faults: list[Fault] = []
        if task.is_batch:
            samples = self._samples(fetch, task, cell, faults)
            cell[0] = IDLE
        else:
            samples = self._by_row(fetch.dataset.__getitem__, [(task.positions, task.values)], task, [IDLE], faults)
        _current.set(None)
        value = None if faults and not samples else fetch.collate(samples) if task.is_batch else fetch.convert(samples[0])
        return Marred(value, faults, len(samples)) if faults else value

    def _samples(self, fetch: Fetch, task: Indices, cell: MutableSequence[int], faults: list[Fault]) -> list[Any]:
        """The samples of a batch; those that could not be loaded are in ``faults``."""
        indices = task.plain()
        if not indices:
            return []
        load = fetch.dataset.__getitem__ if not fetch._gathers else None
        if load is None:
            self._begin(task.epoch, int(task.positions[0]), indices)
            try:
                samples: list[Any] = fetch.dataset.__getitems__(indices)
            except Exception:
                if self.on_error == "raise":
                    raise
                load = _gather_one(fetch.dataset)  # once more, one by one, to find out which
            else:
                return samples
        return self._by_row(load, zip(task.positions.tolist(), indices, strict=True), task, cell, faults)

    def _by_row(
        self, load: Callable[[Any], Any], rows: Iterable[tuple[int, Any]], task: Indices, cell: MutableSequence[int], faults: list[Fault]
    ) -> list[Any]:
        samples = []
        for row, (position, index) in enumerate(rows):
            cell[0] = row
            self._begin(task.epoch, position, index)
            try:
                samples.append(load(index))
            except Exception as exc:
                if self.on_error == "raise":
                    raise
                substitute = SKIP if self.on_error == "skip" else self._substitute(exc, index, task.epoch, position)
                faults.append(Fault(row, self.name(task, row), in_words(exc), substitute is SKIP))
                if substitute is not SKIP:
                    samples.append(substitute)
        return samples

    def _substitute(self, exc: Exception, index: Any, epoch: int, position: int) -> Any:
        self._begin(epoch, position, index)  # its random numbers do not depend on where the sample failed
        assert callable(self.on_error)
        return self.on_error(exc, index, epoch, position)

    def _begin(self, epoch: int, position: int, index: Any) -> None:
        if self.rekey:
            rekey_globals(self.seed, epoch, position)
        _current.set(Sample(self.seed, epoch, position, index))

    def _tell(self, epoch: int) -> None:
        self._epoch = None
        for dataset in self.changing:
            dataset.set_epoch(epoch)
        self._epoch = epoch


def annotate(exc: BaseException, note: str) -> None:
    """Add a note, where the exception can bear one (a frozen dataclass cannot)."""
    with contextlib.suppress(Exception):
        exc.add_note(note)


def in_words(exc: BaseException) -> str:
    """Type and message, whatever the message may raise."""
    try:
        return f"{type(exc).__name__}: {exc}"
    except Exception:
        return f"{type(exc).__name__}, whose message cannot be shown"


def _gather_one(dataset: Any) -> Callable[[Any], Any]:
    return lambda index: dataset.__getitems__([index])[0]


def _changing(dataset: Any) -> list[Any]:
    """What in ``dataset`` has a ``set_epoch``: itself, or what torch's own wrappers hold."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    inside = [dataset.dataset] if isinstance(dataset, Subset) else dataset.datasets if isinstance(dataset, ConcatDataset) else []
    return [found for one in inside for found in _changing(one)]


def _gathers(dataset: Any) -> bool:
    """Whether ``__getitems__`` is worth a call: `Subset` has one that only loops where the dataset below has none."""
    while type(dataset).__getitem__ is Subset.__getitem__ if isinstance(dataset, Subset) else False:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
