"""What `Buckets` with keys are to deal: a walk along a block of the order, with a queue for each key. Slow, and in
other words than the package's."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class KeyModel:
    """What is left of a block.

    Args:
        order: The dataset indices in the block.
        keys: The key of each index.
        sizes: Samples in a batch, by key.
        short: ``"carry"``, ``"pad"`` or ``"drop"``.
    """

    def __init__(self, order: Sequence[int], keys: Sequence[Any], sizes: dict[Any, int], short: str) -> None:
        self.order, self.keys, self.sizes, self.short = order, keys, sizes, short
        self.all: dict[Any, list[int]] = defaultdict(list)
        for offset, index in enumerate(order):
            self.all[keys[index]].append(offset)
        self.done: set[int] = set()

    def rounds(self, ranks: int) -> list[tuple[Any, list[int]]]:
        """All rounds that are left, each with its key and the offsets of its samples."""
        queues: dict[Any, list[int]] = defaultdict(list)
        found: list[tuple[int, Any, list[int]]] = []
        for offset, index in enumerate(self.order):
            if offset not in self.done:
                key = self.keys[index]
                queues[key].append(offset)
                if len(queues[key]) == ranks * self.sizes[key]:
                    found.append((offset, key, queues.pop(key)))
        for key, rest in queues.items() if self.short != "drop" else ():
            before = [one for one in found if one[1] == key]
            if self.short == "carry" and len(rest) < ranks and self.sizes[key] > 1 and before:
                both = before[-1][2] + rest
                found.remove(before[-1])
                found.append((both[len(both) // 2 - 1], key, both[: len(both) // 2]))
                rest = both[len(both) // 2 :]
            found.append((rest[-1], key, rest))
        return [(key, offsets) for _, key, offsets in sorted(found)]

    def hands(self, key: Any, offsets: list[int], ranks: int) -> list[list[tuple[int, int]]]:
        """What each rank gets of a round: offsets, and how often each was there before."""
        wanted = ranks * self.sizes[key] if self.short == "pad" else max(ranks, len(offsets))
        every, dealt = self.all[key], [(offset, 0) for offset in offsets]
        dealt += [(every[k % len(every)], 1 + k // len(every)) for k in range(wanted - len(offsets))]
        return [dealt[rank::ranks] for rank in range(ranks)]
