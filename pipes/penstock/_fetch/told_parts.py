"""What in the user's data has a ``set_epoch``, however deep it is held."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Sampler

from penstock._fetch.dataset_facts import DatasetView
from penstock._fetch.epoch_attribute import asked, follows, is_told, number_of, tell_epoch
from penstock._fetch.held import held

if TYPE_CHECKING:
    from collections.abc import Sequence

_OTHERS: Final = (torch.nn.Module, torch.Tensor, np.ndarray, torch.optim.Optimizer, DataLoader, Sampler, logging.Logger)
_OF_TRAINERS: Final = frozenset({"Trainer", "Accelerator", "Loader", "LightningDataModule"})


def is_data(value: Any) -> bool:
    """Whether ``value`` may be a part of the data, or of a function of it: not a model, a trainer, a loader, nor a
    dataset of this library that reads what it holds in its own way, such as `Shards`.
    """
    if type(value).__module__.startswith("penstock.") and not isinstance(value, ConcatDataset | DatasetView):
        return False
    return not isinstance(value, _OTHERS) and _OF_TRAINERS.isdisjoint(base.__name__ for base in type(value).__mro__)


def told_in(data: Any) -> dict[str, Any]:
    """Every object with a ``set_epoch`` that ``data`` is or holds, by its path, which is the same in each copy.

    What such an object holds is its own business.
    """
    found = held({"dataset": data}, enters=lambda value: is_data(value) and not is_told(value))
    return {one.path: one.value for one in found if is_told(one.value)}


_tellers: dict[int, int] = {}
"""The `ToldParts` that told each object last, by the ids of both, while the object lives."""


@final
class ToldParts:
    """The objects with a ``set_epoch`` in data that is read in this process, or copied to workers.

    They are told which epoch comes next when one ends, before the loop may tell them another number. A part that the
    loop does tell another one is the loop's from then on, and is told nothing.

    Args:
        data: The user's dataset.
        tops: Those whose other number is a request to the loader, like `Loader.set_epoch`.

    Attributes:
        left: The paths of those that are the loop's.
    """

    def __init__(self, data: Any, tops: Sequence[Any] = ()) -> None:
        self._data = data
        self.found = told_in(data)
        self.left: set[str] = set()
        self._tops = [path for path, one in self.found.items() if any(one is top for top in tops)]
        self._numbers: dict[str, int | None] = {}  # of those that are the loop's, when an epoch began last

    def __bool__(self) -> bool:
        return bool(self.found)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "left": {*self.left}}

    def tell(self, epoch: int, *, inline: bool) -> None:
        """``epoch`` comes next. With ``inline``, the loop may have told them another number since."""
        for path, one in self.found.items():
            if inline and asked(one) is not None:
                self.left.update({path}.difference(self._tops))
            elif path not in self.left:
                tell_epoch(one, epoch)
            self._mark(one)

    def begin(self, epoch: int) -> bool:
        """``epoch`` begins. Whether all parts have the number that they were told, or that the loop had told them."""
        holds, self.found = True, told_in(self._data)  # the loop may have replaced one
        for path, one in self.found.items():
            if path in self._tops:
                continue
            if path in self.left or asked(one) is not None:
                self.left.add(path)
                holds = holds and self._numbers.get(path, -1) == number_of(one)
                self._numbers[path] = number_of(one)
            elif follows(one) and number_of(one) != epoch:  # the loop has left an epoch early
                tell_epoch(one, epoch)
                self._mark(one)
        return holds

    def lack(self, epoch: int, told: int | None) -> bool:
        """Whether they are to be told ``epoch``: it is not the one ``told`` last, they share an object with a loader
        that has told it its own since, or they are a copy in a worker.
        """
        return bool(self.found) and (
            epoch != told or any(_tellers.get(id(one)) != id(self) for one in self.found.values())
        )

    def _mark(self, one: Any) -> None:
        if id(one) not in _tellers:
            with suppress(TypeError):  # it does not support weak references
                weakref.finalize(one, _tellers.pop, id(one), None).atexit = False
        _tellers[id(one)] = id(self)
