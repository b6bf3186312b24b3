"""The table in docs/appendix/trainers_table.md equals the tests' results; this file runs last in its folder."""

from __future__ import annotations

import pytest
from tests.trainers import table


def test_the_table_is_what_was_found() -> None:
    """Compares the rows of the tests that ran; with PENSTOCK_WRITE_DOCS=1 writes them. DataLoader's cells, which only that run fills, are not compared."""
    if not table.ROWS:
        pytest.skip("no test of a trainer has run")
    page = table.PAGE.read_text()
    if table.WRITING:
        before, _, rest = page.partition(table.BEGIN)
        table.PAGE.write_text(f"{before}{table.BEGIN}\n\n{table.written()}\n{table.END}{rest.partition(table.END)[2]}")
        return
    committed = table.read(page)
    for place, found in table.ROWS.items():
        for column, cell in found.items():
            assert committed[place][column] == cell, (place, column)


def test_a_table_reads_back_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ROWS", {})
    table.record("A", "end", "1", "penstock", "exact", "x")
    table.record("A", "end", "2", "penstock", "exact", "x")
    table.record("A", "end", "1 → 2", "penstock", "no", "x")
    text = table.written()
    assert text.count("\n") == 4
    assert "| A | end | 1, 2 | exact | - | - | - | x |" in text
    assert {place: row["penstock"] for place, row in table.read(table.BEGIN + "\n" + text + table.END).items()} == {
        ("A", "end", "1"): "exact",
        ("A", "end", "2"): "exact",
        ("A", "end", "1 → 2"): "no",
    }
