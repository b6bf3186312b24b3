"""The table of docs/appendix/trainers_table.md. The tests fill it in while they run, and write it if PENSTOCK_WRITE_DOCS is 1."""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path

WRITING = os.environ.get("PENSTOCK_WRITE_DOCS") == "1"
PAGE = Path(__file__).parent.parent.parent / "docs" / "appendix" / "trainers_table.md"
BEGIN, END = "<!-- table: written by the tests, with PENSTOCK_WRITE_DOCS=1 -->", "<!-- end of the table -->"
LOADERS = ("penstock", "penstock with the line", "DataLoader", "StatefulDataLoader")
HEAD = ("trainer", "checkpoint", "ranks", *LOADERS, "the line you need")

Place = tuple[str, str, str]

ROWS: dict[Place, dict[str, str]] = {}
"""(trainer, checkpoint, ranks) -> the result of each loader, and under ``need`` the line that the user needs."""


def record(trainer: str, checkpoint: str, ranks: str, kind: str, result: str, need: str | None = "") -> None:
    """Record one cell, and what it takes if that is known."""
    row = ROWS.setdefault((trainer, checkpoint, ranks), {})
    row[kind] = result
    if need is not None:
        row["need"] = need


def written() -> str:
    """The rows as Markdown; rows that differ only in the number of ranks are merged."""

    def shown(place: Place) -> tuple[str, ...]:
        row = ROWS[place]
        return (place[0], place[1], *(row.get(kind, "-") for kind in LOADERS), row["need"])

    order = list(dict.fromkeys(place[:2] for place in ROWS))
    places = sorted(ROWS, key=lambda place: (place[0], order.index(place[:2]), shown(place)[2:], place[2]))
    places.sort(key=lambda place: [trainer for trainer, _ in order].index(place[0]))
    lines = [HEAD, ("---",) * len(HEAD)]
    for cells, group in groupby(places, key=shown):
        lines.append((*cells[:2], ", ".join(place[2] for place in group), *cells[2:]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def read(page: str) -> dict[Place, dict[str, str]]:
    """The rows of the table in ``page``."""
    rows = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        if line.startswith("| ") and not line.startswith(("| trainer", "| ---")):
            trainer, checkpoint, ranks, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            for one in ranks.split(", "):
                rows[trainer, checkpoint, one] = dict(zip((*LOADERS, "need"), cells, strict=True))
    return rows
