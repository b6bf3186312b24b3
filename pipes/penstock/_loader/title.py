"""One line about a loader: what it reads, and its position."""

from __future__ import annotations

import os
from typing import Any

from penstock._arguments import LONGEST_LINE, cut
from penstock._loader.cursor import GraphPosition
from penstock._nodes.node import epoch_of
from penstock._nodes.parallel_mapper import ParallelMapper


def title(loader: Any) -> str:
    """Starts nothing. May be called by a signal handler in the middle of a ``next``, or by another thread."""
    return cut(f"Loader of {_what(loader)}: {_where(loader)}", LONGEST_LINE - len("<penstock.>"))


def _what(loader: Any) -> str:
    try:
        *_, first = nodes = list(loader.root.chain())
        words = loader._words
        workers = next((str(node.executor.crew) for node in nodes if isinstance(node, ParallelMapper)), "no workers")
        return f"{cut(type(words['dataset'] if words else first).__name__, 60)}, {workers}"
    except Exception:  # from a user's node, or a loader that was only partly built
        return "a graph"


def _where(loader: Any) -> str:
    try:
        reader, unfinished = loader._reader, loader._runs.unfinished
        positions = reader.positions
        cursor = vars(reader.cursor) if unfinished is None else unfinished[2]
        if unfinished is None:
            epoch, left, whole = loader.epoch, loader.remaining, loader._batches(loader.epoch)
        else:
            state = cursor["state"]
            epoch, whole = epoch_of(state), positions.remaining(positions.start_of(epoch_of(state), state))
            left = 0 if cursor["stands"] is GraphPosition.BEHIND_MARKER else positions.remaining(state)
        where = f"epoch {epoch}" + ("" if left is None or whole is None else f", batch {whole - left:,} of {whole:,}")
        if reader.closed:
            where = f"closed in {where}"
        elif cursor["pending"]:
            where = f"resumes in {where}"
        elif reader.owner is None:
            where = "not started" + ("" if whole is None else f", {whole:,} batches an epoch")
        elif reader.owner != os.getpid():
            where = "started in another process"
        return f"{where}{', infinite' * loader.infinite}"
    except Exception:
        return "position unknown"
