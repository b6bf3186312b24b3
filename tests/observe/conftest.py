"""What tests of pictures share."""

from __future__ import annotations

import io

import pytest


@pytest.fixture(scope="session")
def fonts() -> None:
    """Have matplotlib open now the files that it keeps open for the life of the process: before a test counts what is open."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.suptitle("title $x^{-2}$")
    axes = figure.subplots()
    axes.plot([1, 2], [0.001, 1000.0], label="x")
    axes.set(xlabel="x", yscale="log", title="y")
    axes.legend()
    figure.savefig(io.BytesIO())
