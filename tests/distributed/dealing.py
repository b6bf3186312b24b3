"""What each `Tail` deals, as a list that is dealt card by card. The one place in the tests that knows the tails."""

from __future__ import annotations

from typing import get_args

from penstock.nodes import Tail

TAILS: tuple[Tail, ...] = get_args(Tail)


def dealt(n: int, world_size: int, tail: Tail, begin: int = 0) -> list[int]:
    """The positions of an epoch of ``n`` items, from ``begin`` on: place k goes to rank k mod ``world_size``. Position
    p is item p mod ``n``."""
    items = list(range(begin, n))
    short = -len(items) % world_size  # ranks without an item in the last round
    return {
        "pad": items + [n + k for k in range(short)],
        "drop": items[: len(items) // world_size * world_size],
        "exact": items,
    }[tail]


EVEN = tuple(tail for tail in TAILS if len(dealt(7, 2, tail)) % 2 == 0)
"""Those with which all ranks get as many items."""
