"""Resident: a whole dataset in device memory, loaded once.

A batch is one index operation, without workers or copies.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from penstock._datasets.one_pass import check_read_once, one_pass
from penstock._datasets.randomness_check import RandomnessCheck
from penstock._fetch.array_dataset import ArrayDataset
from penstock._fetch.dataset_facts import SHARD_NAMES, SUBSET_INDICES, DatasetFacts
from penstock._memory.devices import device_module, resolve_device
from penstock._memory.modes import in_neutral_modes
from penstock._memory.tree import leaves, mapped
from penstock._streams.sharded import close_shards
from penstock._workers.limits import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._random.batch_rng import BatchRng
    from penstock._random.order import Order


_logger = logging.getLogger("penstock")

_BATCH_SIZE = 64
_REMEDY = "Put the random part into augment."


@final
class Resident(ArrayDataset):
    """A dataset held in the memory of ``device``: the fastest way to load data that fits.

    Pass it to `Loader.from_dataset` in place of the dataset, without workers. Order, sharding and saved states are the
    same as with the original dataset, so a run may switch between the two. Each rank holds the whole dataset.

    Args:
        dataset: Map-style, with a fixed length. Its samples hold tensors, arrays and numbers, and all have the same
            shape. It is read once, during construction. Progress is shown on a terminal if tqdm is installed, or else
            logged every ten seconds.
        device: Where to hold it; default: the CPU.
        transform: Applied to each sample once, during loading; it must not be random.
        augment: Called for each batch, on the device, with the batch and the `BatchRng` of its samples.
        num_workers: Workers that load the dataset; they end when loading is done.
        method: ``"process"`` or ``"thread"``.
        max_bytes: Refuse a dataset larger than this; default: 90 % of the device's free memory.

    Attributes:
        fields: The tensors, with the structure of a batch; the first dimension counts the samples.
        nbytes: Their total size.

    Raises:
        ValueError: The dataset would take more than ``max_bytes`` (known after the first samples); its samples differ
            in shape, are not tensors, change with the epoch, or draw from `penstock.sample()`; or the device does not
            exist.
    """

    __module__ = "penstock"

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        augment: Callable[[Any, BatchRng], Any] | None = None,
        num_workers: int = 0,
        method: Literal["thread", "process"] = "process",
        max_bytes: int | None = None,
    ) -> None:
        where = resolve_device("cpu" if device is None else device)
        check_read_once(dataset, "Resident", _REMEDY)
        start = time.perf_counter()
        try:
            fields = _loaded(_Transformed(dataset, transform), where, max_bytes, num_workers, method)
        finally:
            close_shards(dataset)
        super().__init__(fields, len(dataset), augment)
        facts = DatasetFacts.of(dataset)
        self._ordered = None if facts.own_order(shuffle=False, seed=0) is None else dataset  # needed only for its order
        self.shard_names, self.subset_indices = map(facts.names.get, (SHARD_NAMES, SUBSET_INDICES))
        self.nbytes = sum(field.nbytes for field in leaves(fields))
        took_s = time.perf_counter() - start
        _logger.info(
            f"{len(self)} samples of {type(dataset).__name__} ({_size(self.nbytes)}) loaded onto {where} in "
            f"{took_s:.1f} s"
        )

    def order(self, *, shuffle: bool, seed: int) -> Order | None:
        """The dataset's own order; see `DatasetLike`."""
        return DatasetFacts.of(self._ordered).own_order(shuffle=shuffle, seed=seed)


class _Transformed:
    def __init__(self, dataset: Any, transform: Callable[[Any], Any] | None) -> None:
        self.dataset = dataset
        self.transform = transform
        self._randomness = RandomnessCheck(_REMEDY)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with self._randomness.loading(f"sample {index} of {type(self.dataset).__name__}"):
            sample = self.dataset[index]
            return sample if self.transform is None else self.transform(sample)


@in_neutral_modes
def _loaded(dataset: _Transformed, device: torch.device, max_bytes: int | None, num_workers: int, method: Any) -> Any:
    fields, done = None, 0
    batches = one_pass(
        dataset, _BATCH_SIZE, f"loading {type(dataset.dataset).__name__}", num_workers=num_workers, method=method
    )
    with contextlib.closing(batches):
        while (batch := _next(batches, done)) is not None:
            if fields is None:
                _check(dataset, batch, device, max_bytes)
                fields = mapped(batch, lambda field: field.new_empty((len(dataset), *field.shape[1:]), device=device))
            done += _put(fields, batch, done)
    return fields


def _next(batches: Any, done: int) -> Any:
    try:
        return next(batches, None)
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise ValueError(f"{_RAGGED.format(first=done, last=done + _BATCH_SIZE - 1)}: {error}") from error


_RAGGED = (
    "samples {first} to {last} differ in shape from each other or from earlier ones, but Resident holds all samples in "
    "one tensor. Make their shapes equal in transform (pad, crop), or use Cached, which accepts any shape"
)


def _put(fields: Any, batch: Any, done: int) -> int:
    """Copy a batch into its rows; the number of rows."""
    rows = 0
    whole, part = list(leaves(fields)), list(leaves(batch))
    like = [(one.shape[1:], one.dtype) for one in whole]
    if [(one.shape[1:], one.dtype) if isinstance(one, torch.Tensor) else None for one in part] != like:
        came = [
            (tuple(one.shape[1:]), one.dtype) if isinstance(one, torch.Tensor) else type(one).__name__ for one in part
        ]
        raise ValueError(
            f"{_RAGGED.format(first=done, last=done + _BATCH_SIZE - 1)}: got {came} after "
            f"{[(tuple(shape), dtype) for shape, dtype in like]}."
        )
    for field, values in zip(whole, part, strict=True):
        rows = len(values)
        field[done : done + rows] = values
    return rows


def _check(dataset: _Transformed, batch: Any, device: torch.device, max_bytes: int | None) -> None:
    """Refuse a dataset that would not fit or cannot be held, before loading all of it."""
    other = next((leaf for leaf in leaves(batch) if not isinstance(leaf, torch.Tensor)), None)
    if other is not None:
        raise ValueError(
            f"Resident holds only tensors, but a sample of {type(dataset.dataset).__name__} also contains a "
            f"{type(other).__name__} ({other!r:.40}). Convert it to a number in transform, or drop it."
        )
    rows = [leaf.nbytes // len(leaf) for leaf in leaves(batch)]
    if not rows:
        raise ValueError(
            f"a sample of {type(dataset.dataset).__name__} contains no tensor, so there is nothing to hold."
        )
    needed = sum(rows) * len(dataset)
    free = _free(device)
    limit = max_bytes if max_bytes is not None else None if free is None else int(0.9 * free)
    if limit is not None and needed > limit:
        allowed = (
            f"max_bytes={max_bytes}" if max_bytes is not None else f"90 % of the {_size(free or 0)} free on {device}"
        )
        raise ValueError(
            f"{len(dataset)} samples of {_size(sum(rows))} each take {_size(needed)}, more than {allowed}. Make them "
            f"smaller in transform (uint8 instead of float32, for example), hold a Subset, or use Cached, which can "
            f"live on disk."
        )


def _free(device: torch.device) -> int | None:
    """Bytes of free memory on ``device``; None if unknown."""
    if device.type != "cpu":
        info = getattr(device_module(device), "mem_get_info", None)
        return None if info is None else int(info(device)[0])
    return free_memory()


def _size(nbytes: int) -> str:
    return (
        f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes} bytes"
    )
