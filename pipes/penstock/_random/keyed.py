"""Rounds of one key: how the samples of a block become batches that have the same key on all ranks.

Pure functions of a block.

A *round* is one batch for each rank. The samples of each key wait, in their order, until they fill a round, which comes
where its last sample stands in the order. So a schedule of the order is kept, and no sample comes before its turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch

from penstock._arguments import checksum, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    import numpy.typing as npt

    from penstock._random.permutation import Int64s

Short = Literal["carry", "pad", "drop"]
Offsets = np.ndarray[Any, np.dtype[Any]]


@final
class Keys:
    """The keys of a dataset, and what a batch of each is.

    Args:
        keys: The key of each sample, by index; or a dict of these by source.
        batch_size: Samples in a batch of one rank, for all keys or by key.
        short: What happens to samples that fill no round.

    Attributes:
        sources: How many each source of a mix has, if they were given by its name; else None.
        names: The keys, in the order in which they first occur.
        codes: Of each sample, the number of its key in ``names``: shape ``(n,)``.
        sizes: Samples in a batch, by key: shape ``(keys,)``.
        short: As given.
    """

    def __init__(self, keys: Any, batch_size: int | Mapping[Any, int], short: Short) -> None:
        if short not in ("carry", "pad", "drop"):
            raise ValueError(f"short={short!r:.80} must be 'carry', 'pad' or 'drop'.")
        self.short: Short = short
        parts = {name: [*_plain(keys[name])] for name in sorted(keys, key=str)} if isinstance(keys, Mapping) else None
        self.sources = None if parts is None else {name: len(part) for name, part in parts.items()}
        self.codes, self.names = _coded(_plain(keys) if parts is None else chain.from_iterable(parts.values()))
        if isinstance(batch_size, Mapping):
            missing, known = [key for key in self.names if key not in batch_size], {*self.names}
            unknown = [key for key in batch_size if key not in known]
            if missing or unknown:
                raise ValueError(
                    f"batch_size must have a number for each key and for nothing else: without one: "
                    f"{_listed([*map(repr, missing)])}; no key: {_listed([*map(repr, unknown)])}. Correct these, or "
                    f"pass one number for all keys."
                )
            sizes = [whole_number(f"batch_size[{key!r:.80}]", batch_size[key], 1, 2**31) for key in self.names]
        else:
            sizes = [whole_number("batch_size", batch_size, 1, 2**31)] * len(self.names)
        self.sizes: Int64s = np.array(sizes, np.int64)

    def __len__(self) -> int:
        return len(self.codes)

    def settings(self) -> dict[str, Any]:
        of_each = {*self.sizes.tolist()}
        size = of_each.pop() if len(of_each) == 1 else checksum(self.sizes.astype("<i8").data)
        return {
            "groups": "keys",
            "keys": checksum(self.codes.astype("<u4").data),
            "batch_size": size,
            "short": self.short,
        }

    def named(self, counts: Int64s, come: Int64s) -> str:
        """The keys with a count above 0, and their counts, in words; first those that do not ``come`` at all."""
        some = {*come.tolist()}
        keys = sorted((key in some, key) for key in np.flatnonzero(counts).tolist())
        return _listed(
            [f"{self.names[key]!r:.80}: {counts[key]:,}{'' if comes else ' (all of them)'}" for comes, key in keys]
        )


@final
@dataclass(frozen=True, slots=True)
class KeyRounds:
    """Rounds of a block, as they come.

    Attributes:
        keys: The key of each round: shape ``(rounds,)``.
        begins: Where its samples begin in the block by key: shape ``(rounds,)``.
        ends: Where they end: shape ``(rounds,)``.
        left_out: How many samples of each key are in no round: shape ``(keys,)``.
        repeated: How many come again: shape ``(keys,)``.
    """

    keys: Int64s
    begins: Int64s
    ends: Int64s
    left_out: Int64s
    repeated: Int64s

    def __len__(self) -> int:
        return len(self.keys)


@final
class KeyBlock:
    """A block of an order, by key.

    Args:
        keys: Of the dataset.
        indices: The dataset indices in the block: shape ``(n,)``.

    Attributes:
        indices: The same, in as few bytes as hold them.
    """

    def __init__(self, keys: Keys, indices: Int64s) -> None:
        self._sizes, self._short = keys.sizes, keys.short
        codes = keys.codes[indices]
        small = np.int32 if max(len(keys), len(indices)) < 2**31 else np.int64
        self.indices = indices.astype(small)
        # offsets in the block, those of the first key first
        self._members = np.argsort(codes, kind="stable").astype(small)
        self._bounds: Int64s = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(keys.sizes)))])
        self._last: tuple[Any, KeyRounds | None] = None, None  # what `rounds` returned last, and its arguments

    def rounds(self, past: Sequence[Sequence[int]], ranks: int) -> KeyRounds | None:
        """All rounds of ``ranks`` ranks after ``past``: pairs of a number of ranks and how many rounds these have had.

        None: there are not so many.
        """
        asked = [*past, ranks]
        if (last := self._last)[0] == asked:
            return last[1]
        starts, found = self._bounds[:-1].copy(), None
        for former, many in past:
            rounds = self._rounds(starts, former)
            if many > len(rounds):
                break
            np.maximum.at(starts, rounds.keys[:many], rounds.ends[:many])
        else:
            found = self._rounds(starts, ranks)
        self._last = asked, found
        return found

    def _rounds(self, starts: Int64s, ranks: int) -> KeyRounds:
        """The rounds of what is left of each key, from ``starts`` on."""
        bounds, full, left = self._bounds, self._sizes * ranks, self._bounds[1:] - starts
        counts = left // full if self._short == "drop" else -(-left // full)
        spare = counts * full - left
        keys = np.repeat(np.arange(len(counts)), counts)
        behind = np.cumsum(counts)  # the last round of each key
        begins = starts[keys] + (np.arange(len(keys)) - (behind - counts)[keys]) * full[keys]
        ends = np.minimum(begins + full[keys], bounds[1:][keys])
        if self._short == "carry":
            few = behind[(counts > 1) & (self._sizes > 1) & (full - spare < ranks)] - 1
            # Less than a sample for each rank: the last two rounds share what they have.
            ends[few - 1] = begins[few] = (begins[few - 1] + ends[few]) // 2
            spare = np.zeros_like(full)
            spare[keys] = np.maximum(ranks - (ends - begins), 0)  # of the last round of each key
        order = np.argsort(self._members[ends - 1])
        return KeyRounds(keys[order], begins[order], ends[order], np.maximum(-spare, 0), np.maximum(spare, 0))

    def hand(
        self, rounds: KeyRounds, number: int, rank: int, ranks: int, deal: Callable[[Int64s], Int64s] | None
    ) -> tuple[Offsets, Int64s | int]:
        """The batch of ``rank`` in round ``number``: the offsets of its samples in the block, and how often each was
        there before in this block.

        Args:
            rounds: Of ``ranks`` ranks.
            number: From 0.
            rank: From 0.
            ranks: Their number.
            deal: Given the dataset indices of a whole round, the places in it that ``rank`` gets. None: every
                ``ranks``-th.
        """
        key, begin, end = (int(field[number]) for field in (rounds.keys, rounds.begins, rounds.ends))
        there, full = end - begin, int(self._sizes[key]) * ranks
        if deal is not None and there == full:
            offsets = self._members[begin:end]
            return offsets[deal(self.indices[offsets])], 0
        wanted = full if self._short == "pad" else max(there, ranks)
        if wanted == there:
            return self._members[begin + rank : end : ranks], 0
        numbers = np.arange(rank, wanted, ranks)
        more, first = numbers - there, int(self._bounds[key])  # the key's first samples come again
        many = int(self._bounds[key + 1]) - first
        return self._members[np.where(more < 0, begin + numbers, first + more % many)], np.maximum(more // many + 1, 0)


def _plain(keys: Any) -> Iterable[Hashable]:
    """The keys one by one."""
    if isinstance(keys, np.ndarray | torch.Tensor):
        table = np.asarray(keys)
        if table.ndim != 1 and (table.ndim != 2 or table.dtype.kind not in "iu"):
            raise ValueError(
                f"keys have shape {table.shape} and dtype {table.dtype}, but there must be one for each index: shape "
                f"(n,), or (n, k) integers."
            )
        return table.tolist() if table.ndim == 1 else map(tuple, table.tolist())
    return keys  # type: ignore[no-any-return]


def _coded(keys: Iterable[Hashable]) -> tuple[npt.NDArray[Any], list[Hashable]]:
    """The number of each sample's key, counted in the order of their first samples, and the keys."""
    names: dict[Hashable, int] = {}
    try:
        codes = np.array([names.setdefault(key, len(names)) for key in keys], np.int64)
    except TypeError as exc:
        raise TypeError(
            f"keys must hold one hashable value for each sample, such as (512, 768), but {exc}. Use tuples, strings or "
            f"numbers."
        ) from None
    for name in names:
        if isinstance(name, torch.Tensor) or (isinstance(name, float) and name != name):
            raise ValueError(f"{name!r:.80} is no key, because it is equal to nothing. Use tuples, strings or numbers.")
    return codes.astype(np.min_scalar_type(max(len(names) - 1, 0))), [*names]


def _listed(values: Sequence[str], most: int = 8) -> str:
    return ", ".join(values[:most]) + (f" and {len(values) - most} more" if len(values) > most else "") or "none"
