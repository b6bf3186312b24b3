"""Helpers of the scripts in this folder. They run under torchrun; each check is a function that runs on all ranks
together."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def gathered(mine: Any) -> list[Any]:
    """The value of each rank, in the order of the ranks."""
    everyones: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everyones, mine)
    return everyones


def flat(batches: Iterable[torch.Tensor]) -> list[int]:
    return [value for batch in batches for value in batch.tolist()]


def in_order(hands: list[list[int]]) -> list[int]:
    """The global sequence, from the share of each rank: item k is item ``k // world_size`` of rank
    ``k % world_size``."""
    return [hands[k % len(hands)][k // len(hands)] for k in range(sum(map(len, hands)))]


def error(action: Callable[[], Any]) -> str:
    """The error of ``action`` as text, to compare across ranks."""
    try:
        action()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "no error"


def run(checks: Iterable[Callable[[], None]]) -> None:
    """Run every check on all ranks at once. Rank 0 prints which passed."""
    for check in checks:
        try:
            check()
        except Exception as exc:
            exc.add_note(f"in {check.__name__} on rank {RANK} of {WORLD_SIZE}")
            raise
        dist.barrier()
        if RANK == 0:
            sys.stdout.write(f"good: {check.__name__}\n")  # in one piece: every rank writes into the same file
            sys.stdout.flush()
    dist.destroy_process_group()
