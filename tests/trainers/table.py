"""The table of docs/trainers.md: the tests fill it in while they run, and write it where PENSTOCK_WRITE_DOCS is 1."""

from __future__ import annotations

import os

WRITING = os.environ.get("PENSTOCK_WRITE_DOCS") == "1"

ROWS: dict[tuple[str, str, str], dict[str, str]] = {}
"""(trainer, checkpoint, ranks) -> what came of each loader, and under ``need`` the line that the user needs."""


def record(trainer: str, checkpoint: str, ranks: str, kind: str, result: str, need: str = "") -> None:
    """One cell."""
    row = ROWS.setdefault((trainer, checkpoint, ranks), {})
    row[kind] = result
    row["need"] = need
