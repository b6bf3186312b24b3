"""Packed: sequences packed once, as a map-style dataset of packs."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch.utils.data import IterableDataset

from penstock._arguments import Shown
from penstock._datasets.mix import Mix
from penstock._datasets.saved_array import opened, saved
from penstock._fetch.fetch import View
from penstock._fetch.packing import Pack, PackView
from penstock._random.grouping import Packs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from penstock._random.grouping import Oversize
    from penstock._random.permutation import Int64s


_BITS = 40  # of a member are its index; the rest is the number of the piece


@final
class Packed(Shown, View):
    """Sequences of a dataset packed into samples of one length, once: a map-style dataset of packs.

    It has a length, and can be shuffled, mixed, and read by any number of ranks with any ``tail``. Each pack stays the same in every epoch; with
    ``groups=Packs(…)`` each epoch packs anew. What a pack holds is described there.

    The packs are made over the dataset as it lies, block by block, at 4 us a sequence, and take 8 bytes a sequence besides the lengths. The random numbers
    of a pack (``penstock.sample()``) are shared by its sequences, which draw from them one after another.

    Args:
        dataset: Map-style; its samples are sequences, or dicts of them.
        lengths: See `Packs`.
        capacity: See `Packs`.
        block: See `Packs`.
        oversize: See `Packs`.
        pad: See `Packs`.
        cache: A file to keep the packs in, shared by all processes. It is bound to the lengths and to how they were packed.

    Attributes:
        dataset: The dataset that is packed.

    Raises:
        TypeError: The dataset cannot be read by index.
        ValueError: Lengths that are none, or not one for each sample; ``dataset`` is a `Mix`; the file holds other packs.
    """

    __module__ = "penstock"

    def __init__(
        self,
        dataset: Any,
        lengths: npt.ArrayLike,
        capacity: int,
        *,
        block: int = 1024,
        oversize: Oversize = "split",
        pad: float | Mapping[str, float] = 0,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} cannot be packed, because it cannot be read by index. It needs __getitem__ and __len__."
            )
        if isinstance(dataset, Mix):
            raise ValueError(
                "packing a Mix would lose its weights. Pack each of its sources, and mix those; or pass the mix with groups=Packs(…)."
            )
        groups = Packs(lengths, capacity, block=block, oversize=oversize)
        if len(groups.lengths) != len(dataset):
            raise ValueError(
                f"there are {len(groups.lengths)} lengths, and {type(dataset).__name__} has {len(dataset)} samples. Give one length for each index of the dataset."
            )
        if groups.groups_per_item >= 2 ** (63 - _BITS):
            raise ValueError(
                f"a sequence of {groups.lengths.max()} places would be cut into {groups.groups_per_item} pieces. Raise the capacity."
            )
        self.dataset = dataset
        self._view = PackView(dataset, groups.capacity, pad)
        self._lengths = groups.lengths
        self._identity = {**groups.settings(), "sequences": len(groups.lengths)}
        self._path = None if cache is None else os.path.abspath(cache)
        self._open(_planned(groups) if self._path is None else saved(self._path, self._identity, lambda: _planned(groups)))
        if self._path is not None and not self._are_packs():
            raise ValueError(f"{self._path} is damaged: what it holds are no packs of these sequences. Delete it.")

    def details(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "capacity": self._view.capacity, "packs": len(self)}

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Pack ``index``; a negative index counts from the end."""
        sample: dict[str, Any] = self._view[self._pack(index)]
        return sample

    @property
    def __getitems__(self) -> Callable[[list[int]], list[dict[str, Any]]]:
        """The packs of a list of indices; present only if the dataset has a ``__getitems__`` worth calling."""
        many = self._view.__getitems__
        return lambda indices: many(list(map(self._pack, indices)))

    def __getstate__(self) -> dict[str, Any]:
        here = {} if self._path is None else {"_members": None, "_ends": None}  # a process that is started opens the file again
        return {**vars(self), **here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._path is not None:
            self._open(opened(self._path, self._identity))

    def _open(self, numbers: Int64s) -> None:
        packs = int(numbers[0]) if len(numbers) else 0
        self._ends, self._members = numbers[1 : 1 + packs], numbers[1 + packs :]

    def _are_packs(self) -> bool:
        """Whether each pack holds something, no more than fits, and only what there is."""
        begins, indices = np.concatenate([[0], self._ends]), self._members & (2**_BITS - 1)
        if not (begins[:-1] < begins[1:]).all() or begins[-1] != len(indices) or indices.max(initial=0) >= len(self._lengths):
            return False
        left = self._lengths[indices] - (self._members >> _BITS) * self._view.capacity
        filled = np.add.reduceat(np.minimum(left, self._view.capacity), begins[:-1]) if len(indices) else begins
        return bool(self._members.min(initial=0) >= 0 and left.min(initial=1) > 0 and filled.max() <= self._view.capacity)

    def _pack(self, index: int) -> Pack:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"index {number} is out of bounds for {len(self)} packs")
        number %= len(self)
        members = self._members[self._ends[number - 1] if number else 0 : self._ends[number]]
        indices, capacity = members & (2**_BITS - 1), self._view.capacity
        wholes, starts = self._lengths[indices], (members >> _BITS) * capacity
        return Pack(indices.tolist(), None, wholes.tolist(), starts.tolist(), np.minimum(wholes - starts, capacity).tolist())


def _planned(groups: Packs) -> Int64s:
    """The number of packs, where each ends, and their members."""
    ends, members, taken = [], [], 0
    for begin in range(0, len(groups.lengths), groups.block):
        block = np.arange(begin, min(begin + groups.block, len(groups.lengths)))
        plan = groups.plan(block)
        assert plan.pieces is not None
        ends.append(plan.splits[1:] + taken)
        taken += len(plan.offsets)
        members.append(block[plan.offsets] | (plan.pieces.starts // groups.capacity << _BITS))
    return np.concatenate([[sum(map(len, ends))], *ends, *members]).astype(np.int64)
