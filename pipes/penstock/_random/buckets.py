"""Buckets: batches of samples of similar length, or of one key.

A description, and pure functions of a block; see `grouping` and `keyed`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._arguments import Shown, checksum, whole_number
from penstock._random.grouping import Lengths, by_source, checked_lengths
from penstock._random.groups import Groups
from penstock._random.keyed import Keys
from penstock._random.permutation import GROUPED, philox_words

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import numpy.typing as npt

    from penstock._random.grouping import ByIndex
    from penstock._random.keyed import Short
    from penstock._random.permutation import Int64s, UInt64s


@final
class Buckets(Shown):
    """Batches of samples that belong together: of similar length, or with the same key.

    Pass it to `Loader.from_dataset` as ``groups=``.

    Each bucket is one batch, so ``batch_size`` and ``drop_last`` are omitted there. ``collate_fn`` receives the list of
    its samples, and pads them if need be (see `penstock.pad`).

    *By length*, with ``max_padded_size`` or ``max_tokens``. Within a block the samples are sorted by length and cut
    into batches, and the batches are shuffled.

    *By key*, with ``keys``: the samples of a batch have the same key, such as a resolution, and in every round (one
    batch on each rank) all ranks have the same key, with any number of ranks. The samples of each key wait, in the
    order of the epoch, until they fill a round, which comes where its last sample stands. At the end of a block,
    ``short`` says what happens to those that fill none:

    * ``"carry"``: they are a smaller round, in which ranks differ by one sample at most. If it had less than a sample
      for each rank, it shares with the key's round before; and if that cannot help (the block has fewer samples of the
      key than ranks, or a batch is one sample), as many are repeated as are missing for one on each rank. So each
      sample comes once an epoch.
    * ``"pad"``: the key's first samples of the block come again, until the round is full.
    * ``"drop"``: they are left out.

    What is repeated or left out, and keys that do not come at all, are logged before the first batch. A state loads on
    any number of ranks: what is left of the block then fills rounds of the new size, and with ``"carry"`` each sample
    of the epoch still comes once, unless fewer of a key are left than there are ranks now.

    Args:
        lengths: The length of every sample of the dataset, by index, in any unit (tokens, seconds): shape ``(n,)``. If
            they are inexact, batches are larger or smaller than intended; nothing else is affected. For a `Mix`, a dict
            of them by source.
        max_padded_size: Limit for the padded size of a batch: its number of samples times its longest length.
        max_tokens: Limit for the sum of the lengths in a batch, for models that need no padding.
        keys: The key of every sample of the dataset, by index: a list of hashable values, or an array of shape
            ``(n,)``, or of integers of shape ``(n, k)``, whose rows are keys. For a `Mix`, a dict of them by source.
        batch_size: With ``keys``: samples in a batch on each rank, or a dict with a number for each key. Default: 1.
        short: With ``keys``: see above. Default: ``"carry"``.
        max_samples: By length: limit for the number of samples in a batch; None: no limit.
        block: Number of samples that are planned together. A jump to a position plans one block. Default: by length
            8192, by key 2**22. An epoch by key that is one block has a length.
        same_size_run: By length: batches are shuffled in runs of this many similar batches. A multiple of the number of
            ranks gives all ranks similar batches at the same time, so that no rank waits for one long batch.
        drop_last: By length: leave out samples of each block, chosen without regard to their lengths, so that the rest
            fills whole runs of full batches.
        count: By length: count the batches of an epoch, so that ``len(loader)`` works. This plans the whole epoch.

    Raises:
        ValueError: Not exactly one of ``max_padded_size``, ``max_tokens`` and ``keys``, or arguments of another kind of
            buckets; a length is negative or not a number, or a single sample exceeds the limit (the message names its
            index); ``batch_size`` lacks a key, or has one that no sample has.
        TypeError: A key is not hashable.
    """

    __module__ = "penstock"

    def __init__(
        self,
        lengths: ByIndex | None = None,
        max_padded_size: float | None = None,
        *,
        max_tokens: float | None = None,
        keys: npt.ArrayLike | Sequence[Hashable] | Mapping[str, Any] | None = None,
        batch_size: int | Mapping[Any, int] | None = None,
        short: Short | None = None,
        max_samples: int | None = None,
        block: int | None = None,
        same_size_run: int = 1,
        drop_last: bool = False,
        count: bool = False,
    ) -> None:
        limits = {"max_padded_size": max_padded_size, "max_tokens": max_tokens}
        kinds = [name for name, value in {**limits, "keys": keys}.items() if value is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"Buckets needs exactly one of max_padded_size, max_tokens and keys, which decides what a batch is, "
                f"but got {' and '.join(kinds) or 'none'}."
            )
        by_key, by_length = {"batch_size": batch_size, "short": short}, {"lengths": lengths, "max_samples": max_samples}
        by_length |= {
            "same_size_run": None if same_size_run == 1 else same_size_run,
            "drop_last": drop_last or None,
            "count": count or None,
        }
        if stray := [name for name, value in (by_key if keys is None else by_length).items() if value is not None]:
            raise ValueError(
                (
                    f"{' and '.join(stray)} and {kinds[0]} exclude each other. Leave "
                    f"{'them' if len(stray) > 1 else 'it'} out"
                )
                + (
                    ", or pass keys."
                    if keys is None
                    else (
                        ": short says what happens to samples that fill no round, and an epoch of one block has a "
                        "length."
                    )
                )
            )
        self.keys = None if keys is None else Keys(keys, 1 if batch_size is None else batch_size, short or "carry")
        self.block: int = whole_number(
            "block",
            (8192 if keys is None else 2**22) if block is None else block,
            1,
            2**24 + 1 if keys is None else 2**40,
        )
        self.count, self.drop_last, self.groups_per_item = count, drop_last, 1
        self.max_padded_size, self.max_tokens = (
            None if limit is None else _checked_limit(name, limit) for name, limit in limits.items()
        )
        self.max_samples = None if max_samples is None else whole_number("max_samples", max_samples, 1)
        self.same_size_run = whole_number("same_size_run", same_size_run, 1, self.block + 1)
        numbers, sources = by_source("lengths", [] if lengths is None else lengths, whole=False)
        self.sources = sources if self.keys is None else self.keys.sources
        self.lengths: Lengths = checked_lengths(numbers, whole=False)
        if keys is None and lengths is None:
            raise ValueError(
                f"{kinds[0]} limits lengths, but there are none. Pass the length of each sample as lengths."
            )
        if self.lengths.max(initial=0) > self._limit:
            longest = int(self.lengths.argmax())
            raise ValueError(
                f"lengths[{longest}] is {self.lengths[longest]}, but a batch is limited to "
                f"{kinds[0]}={limits[kinds[0]]}. Raise the limit, or drop that sample."
            )
        self._checksum = checksum(np.ascontiguousarray(self.lengths, self.lengths.dtype.newbyteorder("<")).data)

    def plan(self, indices: Int64s) -> Groups:
        """The batches by length of a block that consists of these ``indices`` of the dataset.

        Keyed by the indices, so another order shuffles them differently.
        """
        seed = int.from_bytes(hashlib.blake2b(indices.astype("<i8").tobytes(), digest_size=8).digest(), "little") >> 1
        words = philox_words(seed, 0, GROUPED, len(indices))
        lengths, summed = self.lengths[indices], self.max_tokens is not None
        most = min(self.max_samples or self.block, self.block)
        if self.drop_last:
            lengths = lengths[: _filling(lengths, self._limit, most, self.same_size_run, summed)]
        return bucketed(lengths, self._limit, most, self.same_size_run, words, summed)

    def details(self) -> dict[str, Any]:
        if self.keys is not None:
            return {
                "keys": len(self.keys.names),
                "batch_size": self.keys.settings()["batch_size"],
                "short": self.keys.short,
            }
        limit = (
            {"max_padded_size": self.max_padded_size} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        )
        return {"lengths": len(self.lengths), **limit, "max_samples": self.max_samples}

    def settings(self) -> dict[str, Any]:
        """What must match when a state is loaded."""
        if self.keys is not None:
            return {**self.keys.settings(), "block": self.block}
        limit = {"budget" if self.max_tokens is None else "max_tokens": self._limit}
        words = {**limit, "most": self.max_samples, "alike": self.same_size_run, "block": self.block}
        return {"groups": "buckets", **words, **({"full": True} if self.drop_last else {}), "lengths": self._checksum}

    @property
    def _limit(self) -> float:
        return self.max_tokens or self.max_padded_size or np.inf


def _checked_limit(name: str, limit: float) -> float:
    if isinstance(limit, bool) or not isinstance(limit, int | float | np.number) or not 0 < limit < 2**62:
        of = (
            "the longest length in a batch times its number of samples"
            if name == "max_padded_size"
            else "the sum of the lengths in a batch"
        )
        raise ValueError(f"{name}={limit!r:.80} must be a number above 0: {of}.")
    return float(limit)


def bucketed(lengths: Int64s, budget: float, most: int, alike: int, words: UInt64s, summed: bool = False) -> Groups:
    """Cut the items, sorted by length, into batches whose size is at most ``budget``, and shuffle them in runs of
    ``alike`` batches.

    If ranks take batches in turn and ``alike`` is a multiple of their number, they work on similar batches at the same
    time, so that no rank waits for one long batch. The number of batches is a multiple of ``alike``, unless there are
    too few items for a full run.

    Args:
        lengths: Lengths of the items, shape ``(n,)``; none exceeds the budget.
        budget: Limit for the size of a batch.
        most: Maximum number of items in a batch.
        alike: Number of batches in a run.
        words: Random words, at least one per run; they determine the order of the runs.
        summed: The size of a batch is the sum of its lengths, and not the longest one times its number of items.
    """
    by_length = np.argsort(lengths, kind="stable")
    ordered = lengths[by_length]
    ends = _cut(ordered, 0, budget, most, summed)
    needed = -(-len(ends) // alike) * alike
    if len(ends) < needed <= len(ordered):
        # The remainder that does not fill a run is cut again, into a whole run. If it has too few items, earlier runs
        # are cut again with it.
        kept = next(
            k for k in range(needed - alike, -1, -alike) if len(ordered) - (ends[k - 1] if k else 0) >= needed - k
        )
        ends = ends[:kept] + _cut_evenly(ordered, ends[kept - 1] if kept else 0, needed - kept, budget, most, summed)
    bounds = np.array([0, *ends])
    runs = np.argsort(words[: -(-len(ends) // alike)], kind="stable")
    batches = (runs[:, None] * alike + np.arange(alike)).ravel()
    batches = batches[batches < len(ends)]
    sizes = np.diff(bounds)[batches]
    splits = np.cumsum([0, *sizes.tolist()])
    members = np.repeat(bounds[:-1][batches] - splits[:-1], sizes) + np.arange(len(ordered))
    return Groups(by_length[members], splits)


def _filling(lengths: Int64s, budget: float, most: int, alike: int, summed: bool) -> int:
    """How many items, in their order, fill whole runs of full batches: with one more another batch would begin."""

    def batches(n: int, more: int = 0) -> int:
        ordered = np.sort(lengths[:n])
        return len(_cut(np.append(ordered, [ordered[-1]] * more) if n else ordered, 0, budget, most, summed))

    # The last batch is full if another item as long as its longest did not fit.
    full = max(batches(len(lengths), 1) - 1, 0) // alike * alike
    return bisect_right(range(len(lengths) + 1), full, key=batches) - 1


def _cut(ordered: Int64s, begin: int, budget: float, most: int, summed: bool) -> list[int]:
    """The ends of batches over ``ordered[begin:]``, each batch as large as possible."""
    ends = []
    numbers = np.arange(1, most + 1)
    while begin < len(ordered):
        ahead = ordered[begin : begin + most]
        begin += max(
            1, int(np.searchsorted(np.cumsum(ahead) if summed else ahead * numbers[: len(ahead)], budget, side="right"))
        )
        ends.append(begin)
    return ends


def _cut_evenly(ordered: Int64s, begin: int, n: int, budget: float, most: int, summed: bool) -> list[int]:
    """The ends of ``n`` batches over ``ordered[begin:]``, with the largest batch as small as possible."""
    low, high = 0.0, budget
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_cut(ordered, begin, middle, most, summed)) <= n else (middle, high)
    ends = _cut(ordered, begin, high, most, summed)
    while len(ends) < n:  # several batches have the same size: halve one of those with the most items
        bounds = [begin, *ends]
        sizes = np.diff(bounds)
        largest = int(sizes.argmax())
        ends.insert(largest, bounds[largest] + int(sizes[largest]) // 2)
    return ends
