"""Loops of asynchronous reinforcement learning lose no prompt with a `Ledger`, and train on none twice, however often
they are killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow


def lineage(loop: str, keeper: str, folder: Path, run_program: Callable[..., str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        run_program(Path(__file__).with_name("ledger_loops.py"), str(folder), loop, keeper, "8").splitlines()[-1]
    )
    return found


@pytest.mark.parametrize("loop", ["trl", "openrlhf"])
def test_nothing_is_lost_or_trained_twice(loop: str, tmp_path: Path, run_program: Callable[..., str]) -> None:
    """Seen to fail: with the state of the loader in place of the ledger's (which is the next test), and with ``done``
    once a rollout is finished, before it is trained on."""
    found = lineage(loop, "ledger", tmp_path, run_program)
    assert (found["lost"], found["twice"]) == (0, 0)
    assert found["trained"] > 100
    assert found["open"] > 0


@pytest.mark.parametrize(
    ("loop", "keeper", "fault"),
    [
        ("trl", "position", "lost"),
        pytest.param("openrlhf", "position", "lost", marks=pytest.mark.soak),
        pytest.param("trl", "first untrained", "twice", marks=pytest.mark.soak),
        ("openrlhf", "first untrained", "twice"),
    ],
)
def test_what_trainers_saved_instead_is_seen(
    loop: str, keeper: str, fault: str, tmp_path: Path, run_program: Callable[..., str]
) -> None:
    """The position when a checkpoint is written loses what is in flight; the one before the first untrained prompt
    trains the others after it twice."""
    assert lineage(loop, keeper, tmp_path, run_program)[fault] > 0
