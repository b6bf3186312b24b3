"""Change: if an exception interrupts a change, it is repaired before other code relies on it."""

from __future__ import annotations

import pytest

from penstock._workers.processes.change import Change


class Ledger:
    """Two numbers that must agree."""

    def __init__(self) -> None:
        self.left = self.right = 0
        self.mended = 0
        self.interrupt_mending = False
        self.change = Change()

    def mend(self) -> None:
        self.mended += 1
        if self.interrupt_mending:
            self.interrupt_mending = False
            raise KeyboardInterrupt
        self.right = self.left

    def count(self, fault: BaseException | None = None) -> None:
        with self.change.after(self.mend):
            assert self.left == self.right
            self.left += 1
            if fault is not None:
                raise fault
            self.right += 1


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(), None])
def test_the_next_change_finds_what_belongs_together_together(fault: BaseException | None) -> None:
    """Seen to fail: `_torn` cleared by every exit; never set; never cleared."""
    ledger = Ledger()
    ledger.count()
    if fault is not None:
        with pytest.raises(type(fault)):
            ledger.count(fault)
    assert ledger.mended == 0
    for _ in range(2):
        ledger.count()
        assert ledger.right == ledger.left
        assert ledger.mended == (fault is not None)


def test_who_only_looks_settles_first_and_once() -> None:
    """Seen to fail: `settle` that does not clear the flag after repairing."""
    ledger = Ledger()
    with pytest.raises(KeyboardInterrupt):
        ledger.count(KeyboardInterrupt())
    for _ in range(2):
        ledger.change.settle(ledger.mend)
        assert (ledger.left, ledger.right, ledger.mended) == (1, 1, 1)


def test_an_interrupted_mending_is_done_again() -> None:
    """Seen to fail: `_torn` cleared before `mend` is called."""
    ledger = Ledger()
    with pytest.raises(KeyboardInterrupt):
        ledger.count(KeyboardInterrupt())
    ledger.interrupt_mending = True
    with pytest.raises(KeyboardInterrupt):
        ledger.count()
    ledger.count()
    assert (ledger.left, ledger.right, ledger.mended) == (2, 2, 2)


def test_an_interrupt_before_the_with_statement_has_hold_counts() -> None:
    """Then `__exit__` is never called. Seen to fail: `_torn` set by `__exit__` alone."""
    ledger = Ledger()
    ledger.change.after(ledger.mend)
    ledger.count()
    assert ledger.mended == 1
