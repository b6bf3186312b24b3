"""Cached: a dataset whose samples are loaded once, and from then on read from memory that the processes of this host share."""

from __future__ import annotations

import logging
import mmap
import operator
import os
import shutil
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch.utils.data import IterableDataset

from penstock._datasets.cache_files import ABSENT, Claim, Files, identity_of, in_folder, in_memory, passed
from penstock._datasets.cache_record import Unfit, record_of, value_at
from penstock._datasets.randomness_check import RandomnessCheck
from penstock._errors import ClosedError
from penstock._fetch.fetch import Fetch, epoch_aware

if TYPE_CHECKING:
    from collections.abc import Callable


_logger = logging.getLogger("penstock")


@final
class Cached:
    """A map-style dataset that loads each sample of another one once: in the first epoch, as they are asked for.

    A sample is made of dicts, lists, tuples and named tuples, and in them CPU tensors, NumPy arrays and scalars, numbers, ``str``,
    ``bytes``, ``bool`` and None; each may have a shape of its own. It comes back with the same types, dtypes, shapes and bits, as a
    copy of the caller's own, its arrays and tensors contiguous. Everything else is refused; nothing is pickled.

    Random augmentation belongs behind the cache: inside, it would be drawn once for all epochs. A sample that draws from
    `penstock.sample()` is refused; one that draws from the global generators is warned of, except in worker threads.

    Guarantees: Any number of processes and threads may fill and read a cache at once. A sample is there whole or not at all,
    whatever is killed at whatever instant. On Linux a sample is loaded by one thread of one process at a time while the others
    wait for it, and loaded again only if that one failed or died; elsewhere, or on a file system without locks, two that ask at
    the same instant may both load it. After a loss of power samples may be missing, and are loaded again: nothing waits for the
    disk, and a record that did not reach it is found by its CRC-32 (ISO 3309), as a damaged one is, and logged.

    Args:
        dataset: Has ``__getitem__`` and ``__len__``, and no ``set_epoch``. Its ``__getitems__`` is used where it has one.
        path: A folder for the files, made where it is missing, kept between runs, and shared by all on this host that are given
            it; of one host at a time. None (Linux only): memory without a name, shared by this process and those that it starts,
            and gone with the last of them.
        fingerprint: Any JSON value. With the dataset's type and length it says what the folder is the cache of.

    Attributes:
        dataset: What is cached.

    Raises:
        TypeError: A dataset without a length, or read from its beginning; a fingerprint that is not JSON.
        ValueError: A dataset that is empty or changes with the epoch; a folder that is damaged, or another dataset's cache.
        OSError: The files cannot be made.
    """

    def __init__(self, dataset: Any, path: str | os.PathLike[str] | None = None, *, fingerprint: Any = None) -> None:
        _check(dataset)
        self.dataset = dataset
        self._path = None if path is None else os.path.abspath(path)
        self._identity = identity_of(dataset, fingerprint)
        self._length: int = self._identity["length"]
        self._has_getitems = Fetch(dataset).has_getitems
        self._once = RandomnessCheck("Apply the random transform to what the cache returns.")
        self._files: Files | None = in_memory(self._length) if self._path is None else in_folder(self._path, self._identity)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Sample ``index``, counted from the end where it is negative.

        Raises:
            IndexError: There is no such sample.
            TypeError: The sample cannot be held.
            ValueError: The sample drew random numbers.
            OSError: There is no room for it.
            ClosedError: Used after `close`.
            Exception: Whatever the dataset raises; nothing is kept then.
        """
        place, files = self._place(index), self._opened()
        found = files.read(place)
        return self._load(files, place) if found is ABSENT else found

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]]:
        """The samples of a list of indices; only where the dataset has a ``__getitems__`` that is worth a call."""
        if not self._has_getitems:
            raise AttributeError("__getitems__")
        return self._gather

    @property
    def filled(self) -> int:
        """How many samples are there; counted, in O(n)."""
        return int(np.count_nonzero(self._opened().entries))

    def close(self) -> None:
        """Let go of files and memory, in this process; again, does nothing. Garbage collection does the same."""
        self._files = None

    def __getstate__(self) -> dict[str, Any]:
        sent = map(passed, self._files.fds) if self._files is not None and self._path is None else ()
        return {**vars(self), "_files": None if self._files is None else list(sent)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state["_files"] is not None:
            if self._path is None:
                index, data = (one.detach() for one in state["_files"])
                self._files = Files(index, data, self._length)
            else:
                self._files = in_folder(self._path, self._identity)

    def _place(self, index: Any) -> int:
        place = operator.index(index)
        if not -self._length <= place < self._length:
            raise IndexError(f"index {place} is out of range: {self._identity['dataset']} has {self._length} samples.")
        return place % self._length

    def _opened(self) -> Files:
        if self._files is None:
            raise ClosedError("this Cached has been closed. Build a new one.")
        return self._files

    def _load(self, files: Files, place: int) -> Any:
        with Claim(files) as claim:
            claim.take(place, wait=True)
            found = files.read(place)  # someone else may have been quicker
            if found is ABSENT:
                with self._once.loading(f"sample {place} of {self._identity['dataset']}"):
                    loaded = self.dataset[place]
                found = self._stored(claim, place, loaded)
        return found

    def _gather(self, indices: list[Any]) -> list[Any]:
        places, files = [self._place(index) for index in indices], self._opened()
        found = {place: files.read(place) for place in dict.fromkeys(places)}
        missing = [place for place, one in found.items() if one is ABSENT]
        if missing:
            with Claim(files) as claim:  # of what is free: who waits must hold nothing
                found |= {place: files.read(place) for place in missing if claim.take(place, wait=False)}
                missing = [place for place in claim.taken if found[place] is ABSENT]
                found |= {place: self._stored(claim, place, one) for place, one in zip(missing, self._gathered(missing), strict=True)}
        # What is twice in the list is two samples; and for what another one loads, we wait one by one.
        taken = [found.pop(place, ABSENT) for place in places]
        return [self[place] if one is ABSENT else one for place, one in zip(places, taken, strict=True)]

    def _gathered(self, places: list[int]) -> list[Any]:
        if not places:
            return []
        with self._once.loading(f"samples {places} of {self._identity['dataset']}"):
            loaded = self.dataset.__getitems__(places)
        if type(loaded) not in (list, tuple) or len(loaded) != len(places):
            raise TypeError(
                f"__getitems__ of {self._identity['dataset']} has returned a {type(loaded).__name__}, and a cache needs a list of {len(places)} "
                f"samples. Return one, or do without __getitems__."
            )
        return list(loaded)

    def _stored(self, claim: Claim, place: int, value: Any) -> Any:
        """What every later read will give, so that the first epoch is like the others."""
        if claim.files.entries[place]:
            _logger.warning("sample %d in the cache %s was damaged, and has been loaded again.", place, self._path)
        try:
            record = record_of(place, value)
        except Unfit as unfit:
            raise TypeError(
                f"sample {place} of {self._identity['dataset']} cannot be cached: sample{unfit}. Cache what comes before the transform that "
                f"makes it so, and apply that transform to what the cache returns."
            ) from None
        try:
            claim.write(place, record)
        except OSError as error:
            free = shutil.disk_usage(self._path).free if self._path else os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
            raise OSError(
                error.errno,
                f"sample {place} could not be written to the cache in {self._path or 'memory'} ({error.strerror}): it needs {len(record)} bytes, "
                f"and {free} are free. Make room, or cache fewer samples (torch.utils.data.Subset); what is cached stays usable",
            ) from error
        return value_at(memoryview(record), len(record))


def _check(dataset: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(f"a cache needs a dataset that is read by index and has a length, and {kind} is not one.")
    if told := epoch_aware(dataset):
        raise ValueError(
            f"{type(told[0]).__name__} has a set_epoch, so its samples change with the epoch, and a cache would freeze them. Cache what does not "
            f"change, and let what does change read the cache."
        )
    if not len(dataset):
        raise ValueError(f"{kind} is empty (its length is 0), so there is nothing to cache. Look where its files are found.")
