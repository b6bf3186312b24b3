"""Deal items to ranks: like cards, item k goes to rank k mod world_size; or each rank gets a part of a block. Pure
arithmetic.

Counting starts at the start of the epoch, or at the position of the state that was loaded. A *round* is one item for
each rank. States are taken only at the end of a round, so they are the same on all ranks. The last round may be short;
`Tail` says how to handle it.
"""

from __future__ import annotations

from typing import Literal, get_args

Tail = Literal["pad", "drop", "exact"]


def check_tail(tail: str) -> None:
    """Refuse a value that is not a `Tail`."""
    if tail not in get_args(Tail):
        raise ValueError(
            f"tail={tail!r} must be one of {get_args(Tail)}: pad the last round from the epoch's start, drop it, or "
            f"deal it as it is."
        )


def repeats(tail: Tail | None) -> bool:
    """Whether some items of an epoch are dealt a second time, which needs a source that is read by position."""
    return tail == "pad"


def share(items: int, rank: int, world_size: int, tail: Tail) -> int:
    """The number of the next ``items`` that ``rank`` gets."""
    rounds, left = divmod(items, world_size)
    if tail == "drop" or left == 0:
        return rounds
    return rounds + (1 if repeats(tail) or rank < left else 0)


def part(items: int, rank: int, world_size: int, tail: Tail) -> tuple[int, int]:
    """The part of a block of ``items`` that ``rank`` gets: the number of its first item, and the one after its last.

    Each rank gets as many as `share` says, and the parts follow each other. Numbers from ``items`` on are those of
    items that are dealt again.
    """
    rounds, left = divmod(items, world_size)
    before = 0 if tail == "drop" or not left else rank if repeats(tail) else min(rank, left)
    begin = rounds * rank + before
    return begin, begin + share(items, rank, world_size, tail)


def batches(items: int, batch_size: int, drop_last: bool) -> int:
    """The number of batches in ``items``."""
    return items // batch_size if drop_last else -(-items // batch_size)
