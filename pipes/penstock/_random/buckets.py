"""Buckets: batches of samples of similar length. A description, and pure functions of a block; see `grouping`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._arguments import Shown, checksum, whole_number
from penstock._random.grouping import Lengths, checked_lengths
from penstock._random.groups import Groups
from penstock._random.permutation import GROUPED, philox_words

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock._random.permutation import Int64s, UInt64s


@final
class Buckets(Shown):
    """Batches of samples of similar length: pass it to `Loader.from_dataset` as ``groups=``.

    Each bucket is one batch, so ``batch_size`` and ``drop_last`` are omitted. ``collate_fn`` receives the list of its samples, and pads them (see
    `penstock.pad`). Within a block the samples are sorted by length and cut into batches, and the batches are shuffled.

    Args:
        lengths: The length of every sample of the dataset, by index, in any unit (tokens, seconds): shape ``(n,)``. If they are inexact, batches are larger or
            smaller than intended; nothing else is affected.
        max_padded_size: Limit for the padded size of a batch: its number of samples times its longest length.
        max_samples: Limit for the number of samples in a batch; None: no limit.
        block: Number of samples that are sorted together. A jump to a position plans one block.
        same_size_run: Batches are shuffled in runs of this many similar batches. A multiple of the number of ranks gives all ranks similar batches at the same time,
            so that no rank waits for one long batch.
        count: Count the batches of an epoch, so that ``len(loader)`` works. This plans the whole epoch.

    Raises:
        ValueError: A length is negative or not a number, or a single sample exceeds ``max_padded_size``; the message names its index.
    """

    __module__ = "penstock"

    def __init__(
        self,
        lengths: npt.ArrayLike,
        max_padded_size: float,
        *,
        max_samples: int | None = None,
        block: int = 8192,
        same_size_run: int = 1,
        count: bool = False,
    ) -> None:
        self.lengths: Lengths = checked_lengths(lengths, whole=False)
        if isinstance(max_padded_size, bool) or not isinstance(max_padded_size, int | float | np.number) or not 0 < max_padded_size < 2**62:
            raise ValueError(
                f"max_padded_size={max_padded_size!r:.80} must be a number above 0: the longest length in a batch times its number of samples."
            )
        self.max_padded_size = float(max_padded_size)
        self.max_samples = None if max_samples is None else whole_number("max_samples", max_samples, 1)
        self.block: int = whole_number("block", block, 1, 2**24 + 1)
        self.same_size_run = whole_number("same_size_run", same_size_run, 1, self.block + 1)
        self.count: bool = count
        self.groups_per_item = 1
        if self.lengths.max(initial=0) > max_padded_size:
            longest = int(self.lengths.argmax())
            raise ValueError(
                f"lengths[{longest}] is {self.lengths[longest]}, but a batch is limited to max_padded_size={max_padded_size}. Raise the limit, or drop that sample."
            )
        self._checksum = checksum(np.ascontiguousarray(self.lengths, self.lengths.dtype.newbyteorder("<")).data)

    def plan(self, indices: Int64s) -> Groups:
        """The batches of a block that consists of these ``indices`` of the dataset. Keyed by the indices, so another order shuffles them differently."""
        seed = int.from_bytes(hashlib.blake2b(indices.astype("<i8").tobytes(), digest_size=8).digest(), "little") >> 1
        words = philox_words(seed, 0, GROUPED, len(indices))
        most = min(self.max_samples or self.block, self.block)
        return bucketed(self.lengths[indices], self.max_padded_size, most, self.same_size_run, words)

    def details(self) -> dict[str, Any]:
        return {"lengths": len(self.lengths), "max_padded_size": self.max_padded_size, "max_samples": self.max_samples}

    def settings(self) -> dict[str, Any]:
        """What must match when a state is loaded."""
        words = {"budget": self.max_padded_size, "most": self.max_samples, "alike": self.same_size_run, "block": self.block}
        return {"groups": "buckets", **words, "lengths": self._checksum}


def bucketed(lengths: Int64s, budget: float, most: int, alike: int, words: UInt64s) -> Groups:
    """Cut the items, sorted by length, into batches whose padded size is at most ``budget``, and shuffle them in runs of ``alike`` batches.

    If ranks take batches in turn and ``alike`` is a multiple of their number, they work on similar batches at the same time, so that no rank waits for one
    long batch. The number of batches is a multiple of ``alike``, unless there are too few items for a full run.

    Args:
        lengths: Lengths of the items, shape ``(n,)``; none exceeds the budget.
        budget: Limit for the padded size: the longest length in a batch times its number of items.
        most: Maximum number of items in a batch.
        alike: Number of batches in a run.
        words: Random words, at least one per run; they determine the order of the runs.
    """
    by_length = np.argsort(lengths, kind="stable")
    ordered = lengths[by_length]
    ends = _cut(ordered, 0, budget, most)
    needed = -(-len(ends) // alike) * alike
    if len(ends) < needed <= len(ordered):
        # The remainder that does not fill a run is cut again, into a whole run. If it has too few items, earlier runs are cut again with it.
        kept = next(k for k in range(needed - alike, -1, -alike) if len(ordered) - (ends[k - 1] if k else 0) >= needed - k)
        ends = ends[:kept] + _cut_evenly(ordered, ends[kept - 1] if kept else 0, needed - kept, budget, most)
    bounds = np.array([0, *ends])
    runs = np.argsort(words[: -(-len(ends) // alike)], kind="stable")
    batches = (runs[:, None] * alike + np.arange(alike)).ravel()
    batches = batches[batches < len(ends)]
    sizes = np.diff(bounds)[batches]
    splits = np.cumsum([0, *sizes.tolist()])
    members = np.repeat(bounds[:-1][batches] - splits[:-1], sizes) + np.arange(len(ordered))
    return Groups(by_length[members], splits)


def _cut(ordered: Int64s, begin: int, budget: float, most: int) -> list[int]:
    """The ends of batches over ``ordered[begin:]``, each batch as large as possible."""
    ends = []
    numbers = np.arange(1, most + 1)
    while begin < len(ordered):
        ahead = ordered[begin : begin + most]
        begin += max(1, int(np.searchsorted(ahead * numbers[: len(ahead)], budget, side="right")))
        ends.append(begin)
    return ends


def _cut_evenly(ordered: Int64s, begin: int, n: int, budget: float, most: int) -> list[int]:
    """The ends of ``n`` batches over ``ordered[begin:]``, with the largest batch as small as possible."""
    low, high = 0.0, budget
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_cut(ordered, begin, middle, most)) <= n else (middle, high)
    ends = _cut(ordered, begin, high, most)
    while len(ends) < n:  # several batches have the same size: halve one of those with the most items
        bounds = [begin, *ends]
        sizes = np.diff(bounds)
        largest = int(sizes.argmax())
        ends.insert(largest, bounds[largest] + int(sizes[largest]) // 2)
    return ends
