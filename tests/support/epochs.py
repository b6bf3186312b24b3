"""A loader of epochs of four batches, the last of them short, and what it must give."""

from __future__ import annotations

from typing import Any

from penstock import Loader
from penstock.testing import Tagged

N, B = 10, 3


def loader(restart_on_stop_iteration: bool | None = None, **options: Any) -> Loader[Any]:
    batches = Loader.from_dataset(Tagged(N), **{"batch_size": B, **options})
    return batches if restart_on_stop_iteration is None else restarting(batches, restart_on_stop_iteration)


def restarting(batches: Loader[Any], restart: bool | None) -> Loader[Any]:
    """A loader of the same graph that resumes a finished epoch as ``restart_on_stop_iteration`` says."""
    return Loader(batches.root, infinite=batches.infinite, restart_on_stop_iteration=restart)


def resumed(state: dict[str, Any], **options: Any) -> Loader[Any]:
    """One that goes on at ``state``."""
    batches = loader(**options)
    batches.load_state_dict(state)
    return batches


def values(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def epoch(e: int, start: int = 0) -> list[list[int]]:
    """The batches of epoch ``e``, in order, from the ``start``-th on."""
    return [[1000 * e + i for i in range(first, min(first + B, N))] for first in range(0, N, B)][start:]
