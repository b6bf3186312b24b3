"""Cached: loads each sample of a dataset once, then reads it from memory shared by all processes of this host."""

from __future__ import annotations

import errno
import logging
import mmap
import operator
import os
import shutil
from typing import TYPE_CHECKING, Any, Final, Literal, final

import numpy as np
from torch.utils.data import Subset

from penstock._arguments import Shown
from penstock._datasets.cache_files import ABSENT, AT_MOST, Claim, Files, for_child, identity_of, in_folder, in_memory
from penstock._datasets.cache_record import NotCacheable, record_of, value_at
from penstock._datasets.one_pass import check_read_once, one_pass
from penstock._datasets.randomness_check import RandomnessCheck
from penstock._errors import ClosedError
from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.fetch import samples_in
from penstock._random.order import ContinuingOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._random.order import Order


_logger = logging.getLogger("penstock")


@final
class Cached(Shown):
    """A map-style dataset that loads each sample of another dataset once, on first request, and keeps it.

    A sample consists of dicts, lists, tuples and named tuples that hold CPU tensors, NumPy arrays and scalars, numbers,
    ``str``, ``bytes``, ``bool`` and None. Every sample may have its own shape. It comes back with the same types,
    dtypes, shapes and bits, as the caller's own copy, with contiguous arrays and tensors. Other types are refused;
    nothing is pickled.

    Apply random augmentation to what the cache returns: inside the cache it would be drawn once and then reused in
    every epoch. A sample that draws from `penstock.sample()` is refused. One that draws from the global generators
    causes a warning.

    Guarantees: Any number of processes and threads may fill and read a cache at once. A sample is cached completely or
    not at all, even if a process is killed while writing it. On Linux one thread of one process loads a sample while
    the others wait, and it is loaded again only if that thread failed or its process died. Elsewhere, or on a file
    system without locks, two threads that request a sample at the same time may both load it. The cache does not wait
    for the disk, so after a power failure samples may be missing; they are loaded again. The CRC-32 (ISO 3309) detects
    a record that did not reach the disk or is damaged; such a record is logged.

    Args:
        dataset: Has ``__getitem__`` and ``__len__``, and no ``set_epoch``. If it has ``__getitems__``, that is used
            instead.
        path: A folder for the files. It is created if missing, kept between runs, and shared by all processes of this
            host that get the same path. Only one host may use it at a time. None (Linux only): unnamed memory, shared
            by this process and those that it starts, and freed when the last of them ends.
        fingerprint: Any JSON value. It identifies the contents of the folder together with the dataset's type and
            length, and the names of its files if it is `Shards`. Change it when the files are rewritten.

    Attributes:
        dataset: The dataset that is cached.

    Raises:
        TypeError: The dataset has no length or cannot be indexed; the fingerprint is not JSON.
        ValueError: The dataset is empty or changes with the epoch; the folder is damaged or holds another dataset's
            cache.
        OSError: The files cannot be created.
    """

    __module__ = "penstock"

    def __init__(self, dataset: Any, path: str | os.PathLike[str] | None = None, *, fingerprint: Any = None) -> None:
        check_read_once(
            dataset,
            "Cached",
            "Cache the part that does not change, and let a dataset that changes with the epoch read from the cache.",
        )
        if not len(dataset):
            raise ValueError(
                f"{type(dataset).__name__} is empty (its length is 0), so there is nothing to cache. Check where it "
                f"looks for its files."
            )
        self.dataset = dataset
        self._path = None if path is None else os.path.abspath(path)
        self._identity = identity_of(dataset, fingerprint)
        self._length: int = self._identity["length"]
        self._has_getitems = DatasetFacts.of(dataset).has_getitems
        self._randomness = RandomnessCheck("Apply the random transform to what the cache returns.")
        self._files: Files | None = (
            in_memory(self._length) if self._path is None else in_folder(self._path, self._identity)
        )

    def details(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "path": self._path, "samples": self._length}

    def __len__(self) -> int:
        return self._length

    def order(self, *, shuffle: bool, seed: int) -> Order | None:
        """The dataset's own order; see `DatasetLike`."""
        order = DatasetFacts.of(self.dataset).own_order(shuffle=shuffle, seed=seed)
        if isinstance(order, ContinuingOrder):
            raise TypeError(
                f"{type(self.dataset).__name__} is an endless stream, but this cache holds {len(self)} samples. Pass "
                f"the stream itself to Loader.from_dataset, or cache shards of known lengths: no epoch_size=, but an "
                f"index (python -m penstock index) or counts=."
            )
        return order

    def __getitem__(self, index: Any) -> Any:
        """Sample ``index``; a negative index counts from the end.

        Raises:
            IndexError: There is no such sample.
            TypeError: The sample holds a type that cannot be cached.
            ValueError: The sample drew from `penstock.sample()`.
            OSError: There is no room for the sample.
            ClosedError: The cache was closed.
            Exception: Whatever the dataset raises; the sample is then not cached.
        """
        number, files = self._number(index), self._opened()
        sample = files.read(number)
        return self._load(files, number) if sample is ABSENT else sample

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]]:
        """The samples of a list of indices; present only if the dataset has a ``__getitems__`` worth calling."""
        if not self._has_getitems:
            raise AttributeError("__getitems__")
        return self._get_many

    @property
    def filled(self) -> int:
        """How many samples are cached, damaged ones included; O(n)."""
        return int(np.count_nonzero(self._opened().entries))

    def fill(self, *, num_workers: int = 0, method: Literal["thread", "process"] = "process") -> None:
        """Load every sample that is not cached yet, so that no epoch has to.

        Progress is shown on a terminal if tqdm is installed, or else logged every ten seconds.

        Without this call, the first epoch fills the cache. Several processes may fill a cache at once; they share the
        work. Damage is noticed, and the sample loaded again, only when the sample is read.

        Args:
            num_workers: Worker threads or processes that load the samples; 0 loads them in this thread.
            method: ``"process"`` or ``"thread"``.

        Raises:
            Exception: See `__getitem__`. Samples cached before the error stay cached.
        """
        missing = np.flatnonzero(np.asarray(self._opened().entries) == 0)
        what = f"caching {self._identity['dataset']}"
        if len(missing):  # an empty epoch would be warned of
            for _ in one_pass(
                Subset(self, missing),  # type: ignore[arg-type]
                _BATCH_SIZE,
                what,
                num_workers=num_workers,
                method=method,
                transform=_dropped,
            ):
                pass

    def close(self) -> None:
        """Release files and memory in this process. Idempotent; garbage collection does the same."""
        self._files = None

    def __getstate__(self) -> dict[str, Any]:
        sent = map(for_child, self._files.fds) if self._files is not None and self._path is None else ()
        return {**vars(self), "_files": None if self._files is None else list(sent)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state["_files"] is not None:
            if self._path is None:
                index, data = (fd.detach() for fd in state["_files"])
                self._files = Files(index, data, self._length)
            else:
                self._files = in_folder(self._path, self._identity)

    def _number(self, index: Any) -> int:
        number = operator.index(index)
        if not -self._length <= number < self._length:
            raise IndexError(f"index {number} is out of range: {self._identity['dataset']} has {self._length} samples.")
        return number % self._length

    def _opened(self) -> Files:
        if self._files is None:
            raise ClosedError("this Cached was closed. Build a new one.")
        return self._files

    def _load(self, files: Files, number: int) -> Any:
        with Claim(files) as claim:
            claim.take(number, wait=True)
            sample = files.read(number)  # someone else may have loaded it while we waited
            if sample is ABSENT:
                with self._randomness.loading(f"sample {number} of {self._identity['dataset']}"):
                    loaded = self.dataset[number]
                sample = self._store(claim, number, loaded)
        return sample

    def _load_free(self, claim: Claim, numbers: list[int]) -> dict[int, Any]:
        """Claim those of ``numbers`` that no other thread or process holds; return their samples, loading what is still
        absent.
        """
        # Not inside the `with`: Ctrl-C at a loop's jump in there could skip the release (python/cpython#130279).
        found = {number: claim.files.read(number) for number in numbers if claim.take(number, wait=False)}
        missing = [number for number, sample in found.items() if sample is ABSENT]
        return found | {
            number: self._store(claim, number, new)
            for number, new in zip(missing, self._load_many(missing), strict=True)
        }

    def _get_many(self, indices: list[Any]) -> list[Any]:
        numbers, files = [self._number(index) for index in indices], self._opened()
        found = {number: files.read(number) for number in dict.fromkeys(numbers)}
        missing = [number for number, sample in found.items() if sample is ABSENT]
        if missing:
            with Claim(files) as claim:  # claims only what is free, because waiting while holding claims could deadlock
                found |= self._load_free(claim, missing)
        # A repeated index gives two copies. Samples that others are loading are awaited one by one, without holding a
        # claim.
        taken = [found.pop(number, ABSENT) for number in numbers]
        return [self[number] if sample is ABSENT else sample for number, sample in zip(numbers, taken, strict=True)]

    def _load_many(self, numbers: list[int]) -> list[Any]:
        if not numbers:
            return []
        with self._randomness.loading(f"samples {numbers} of {self._identity['dataset']}"):
            return list(
                samples_in(self.dataset, self.dataset.__getitems__(numbers), len(numbers), "or remove __getitems__")
            )

    def _store(self, claim: Claim, number: int, loaded: Any) -> Any:
        """Write the sample, and return what later reads will return, so that the first epoch is like the others."""
        if claim.files.entries[number]:
            _logger.warning("sample %d in the cache %s was damaged and was loaded again.", number, self._path)
        try:
            record = record_of(number, loaded)
        except NotCacheable as refusal:
            raise TypeError(
                f"sample {number} of {self._identity['dataset']} cannot be cached: sample{refusal}. Cache the data "
                f"before the transform that produces this, and apply that transform to what the cache returns."
            ) from None
        if len(record) > AT_MOST:
            raise OSError(
                errno.EFBIG,
                f"sample {number} of {self._identity['dataset']} takes {len(record)} bytes, but a cached sample may "
                f"have at most {AT_MOST}. Cache the data before the transform that makes it so large, and apply that "
                f"transform to what the cache returns",
            )
        try:
            claim.write(number, record)
        except OSError as error:
            free = shutil.disk_usage(self._path).free if self._path else os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
            raise OSError(
                error.errno,
                f"sample {number} could not be written to the cache in {self._path or 'memory'} ({error.strerror}): it "
                f"needs {len(record)} bytes, but {free} are free. Make room, or cache fewer samples "
                f"(torch.utils.data.Subset); the samples cached so far stay usable",
            ) from error
        return value_at(memoryview(record), len(record))


_BATCH_SIZE: Final = 16
"""How many samples `Cached.fill` loads between two progress reports."""


def _dropped(sample: Any) -> int:
    """What a worker of `Cached.fill` sends in place of a sample."""
    return 0
