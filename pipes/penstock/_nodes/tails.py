"""Dealing, like cards: the k-th item after where a run of the epoch began goes to rank k mod world_size. Pure arithmetic.

A run of an epoch begins at its start, or where a state was loaded. A *round* is one item for each rank; states are only ever
taken at the end of a round, so they are the same on all ranks. The last round may be short: `Tail` says what becomes of it.
"""

from __future__ import annotations

from typing import Literal, get_args

Tail = Literal["pad", "drop", "exact"]


def check_tail(tail: str) -> None:
    """Refuse what is not a `Tail`."""
    if tail not in get_args(Tail):
        raise ValueError(
            f"tail={tail!r} is none of {get_args(Tail)}: pad the last round from the epoch's start, drop it, or deal it out as it is."
        )


def share(items: int, rank: int, world_size: int, tail: Tail) -> int:
    """How many of the next ``items`` are dealt to ``rank``."""
    rounds, left = divmod(items, world_size)
    if tail == "drop" or left == 0:
        return rounds
    return rounds + (1 if tail == "pad" or rank < left else 0)


def batches(items: int, batch_size: int, drop_last: bool) -> int:
    """How many batches ``items`` make."""
    return items // batch_size if drop_last else -(-items // batch_size)
