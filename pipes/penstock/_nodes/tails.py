"""Deal items to ranks like cards: item k goes to rank k mod world_size. Pure arithmetic.

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


def batches(items: int, batch_size: int, drop_last: bool) -> int:
    """The number of batches in ``items``."""
    return items // batch_size if drop_last else -(-items // batch_size)
