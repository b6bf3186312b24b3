"""Signals at random moments: the program ``random_moments.py``. ``PENSTOCK_REPEATS`` multiplies how many there are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

REPEATS = int(os.environ.get("PENSTOCK_REPEATS", "1"))
PROGRAM = Path(__file__).with_name("random_moments.py")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900 * REPEATS)]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_ctrl_c_at_any_moment_leaves_nothing(run_script: Any, method: str) -> None:
    """Of a start, of `next`, `refresh` and `close`. Seen to fail: a zombie of the process that forks workers; an
    interrupted close that no later one finished; a worker of the fork server that heard Ctrl-C in its start, taken for
    one that can never start.
    """
    moments = (10 if method == "spawn" else 30) * REPEATS
    said = run_script(PROGRAM, "interrupted", method, str(moments), "1", deadline_s=840 * REPEATS)
    print(said)
    assert f"{method}: {moments} moments, nothing left" in said


def test_a_fork_server_that_dies_at_any_moment_of_a_start_is_replaced(run_script: Any) -> None:
    """Seen to fail: a server that inherited every signal blocked, and then hung whoever waited for its children; one
    that has SIGINT blocked; two workers with one channel.
    """
    starts = 20 * REPEATS
    said = run_script(PROGRAM, "served", str(starts), "1", deadline_s=840 * REPEATS)
    print(said)
    assert f"forkserver: {starts} starts, nothing left" in said
