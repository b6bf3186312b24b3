"""Transaction: if an exception interrupts a change, it is rolled back before other code relies on it."""

from __future__ import annotations

import contextlib

import pytest

from penstock._workers.processes.transaction import Transaction


class Ledger:
    """Two numbers that must agree."""

    def __init__(self, interrupted_rollbacks: int) -> None:
        self.left = self.right = self.rolled_back = 0
        self.interrupted_rollbacks = interrupted_rollbacks
        self.transaction = Transaction()

    def roll_back(self) -> None:
        self.rolled_back += 1
        if self.rolled_back <= self.interrupted_rollbacks:
            raise KeyboardInterrupt
        self.right = self.left

    def count(self, fault: BaseException | None = None) -> None:
        with self.transaction.begin(self.roll_back):
            assert self.left == self.right
            self.left += 1
            if fault is not None:
                raise fault
            self.right += 1


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(), None, "before the with statement has hold"])
@pytest.mark.parametrize("interrupted_rollbacks", [0, 1])
@pytest.mark.parametrize("looks", [False, True])
def test_whoever_comes_next_finds_together_what_belongs_together(fault, interrupted_rollbacks, looks):
    """Seen to fail: `_inconsistent` cleared by every exit, before `rollback` is called, or never; never set, or by
    `__exit__` alone."""
    ledger = Ledger(interrupted_rollbacks)
    if isinstance(fault, str):
        ledger.transaction.begin(ledger.roll_back)
    else:
        with contextlib.suppress(KeyboardInterrupt, OSError):
            ledger.count(fault)
    assert ledger.rolled_back == 0
    rollbacks = 0 if fault is None else 1 + interrupted_rollbacks
    for _ in range(rollbacks - 1):
        with pytest.raises(KeyboardInterrupt):
            ledger.count()
    for _ in range(2):
        ledger.transaction.settle(ledger.roll_back) if looks else ledger.count()
        assert ledger.left == ledger.right
        assert ledger.rolled_back == rollbacks
