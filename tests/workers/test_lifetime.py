"""The time that a graph may take to end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock._workers.lifetime import PATIENCE_S, closing_within, patience_s

if TYPE_CHECKING:
    import pytest


def test_all_that_ends_in_one_body_shares_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: each pool got the full timeout, so a graph with three pools took three times as long as `close`
    allowed; an interrupt kept the deadline for later calls.
    """
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def act() -> None:
        nonlocal now
        assert patience_s(None) == 5.0
        now += 3.0
        assert patience_s(None) == 2.0
        assert patience_s(7.0) == 7.0
        now += 3.0
        assert patience_s(None) == 0.0

    closing_within(5.0, act)
    assert patience_s(None) == PATIENCE_S
