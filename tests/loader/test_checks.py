"""Checks: what watches a loader is told what happens, and may raise."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from penstock import Loader
from penstock._loader import checks
from penstock._loader.checks import Check


class Recorder(Check):
    """Writes down what it is told."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def began(self, state: Any, *, jumped: bool) -> bool:
        self.told.append(("began", state["epoch"], jumped))
        return True

    def delivered(self, state: Any, address: Any) -> None:
        self.told.append(address.positions.tolist())
        if self.told.count([4, 5]) == 2:
            raise ArithmeticError("seen twice")

    def ended(self) -> None:
        self.told.append("ended")

    def closed(self) -> None:
        self.told.append("closed")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a check is told of the loaders that a test builds."""
    heard: list[Any] = []
    home: Any = ModuleType("recorders")
    home.check = lambda positions, nodes, infinite: Recorder(heard) if positions.sized() else None
    monkeypatch.setitem(sys.modules, "recorders", home)
    monkeypatch.setattr(checks, "homes", ["recorders"])
    return heard


def test_a_check_is_told_what_happens_and_may_raise(told: list[Any]) -> None:
    """At a start and after a load, nothing was read before. Seen to fail: without `jumped` at a load."""
    with Loader.from_dataset(range(6), batch_size=2) as loader:
        assert len(list(loader)) == 3
        loader.load_state_dict(loader.state_dict())
        batches = iter(loader)
        assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1], [2, 3]]
        with pytest.raises(ArithmeticError, match="seen twice"):
            next(batches)
        assert loader.state_dict()["penstock"].count('"position": 4') == 1
    assert told == [
        ("began", 0, True),
        *([0, 1], [2, 3], [4, 5], "ended"),
        ("began", 1, True),
        *([0, 1], [2, 3], [4, 5], "closed"),
    ]
