"""Tells a process that hangs from a slow one, as far as Linux shows it in ``/proc/PID``.

If every thread of a process sleeps on a futex that is private to the process, without a time limit, no thread is left
that could wake one of them. Load on the machine never looks the same. Two processes that wait for each other do not
either, because what they share is no private futex.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from pathlib import Path
from typing import TYPE_CHECKING, final

from penstock._workers.processes.signals import FAULTS

if TYPE_CHECKING:
    from collections.abc import Iterable

BETWEEN_LOOKS_S = 2.0
# the number of the system call
_FUTEX = {"x86_64": "202", "aarch64": "98", "riscv64": "98"}.get(platform.machine(), "")
_PRIVATE, _COMMAND = 128, 127  # bits of the futex operation
_WAITS = (0, 6, 9, 13)  # FUTEX_WAIT, _LOCK_PI, _WAIT_BITSET, _LOCK_PI2
_WAKING = sum(1 << number - 1 for number in signal.valid_signals() - FAULTS - {2, 15, 28})
"""Signals whose handler, set by user code, may wake the process. The other ones are SIGINT, SIGTERM and SIGWINCH, which
Python, we and readline handle.
"""


def threads_of(pid: int) -> list[str]:
    """The folder of each thread of a process; empty if the process has ended."""
    with contextlib.suppress(OSError):
        return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    return []


def never_woken(pid: int) -> list[str] | None:
    """How often each thread has slept, if all wait, without a time limit, for another one to wake them.

    None if not, or if that is not visible.

    One look at several threads is no proof, because they are looked at in turn, and one may have woken another in
    between. Then a later look differs.
    """
    threads = threads_of(pid)
    try:
        slept = [_slept(thread) for thread in threads]
    except (OSError, ValueError):  # one has just ended, or this is hidden
        return None
    return slept if all(slept) and slept else None


def _slept(thread: str) -> str:
    """How often a thread has slept, if now it waits for another one; otherwise empty."""
    number, *arguments = Path(thread, "syscall").read_text().split()
    if number != _FUTEX:
        return ""
    # The address of the futex, the operation, the value that it had, and the time limit.
    _, operation, _, timeout = (int(argument, 16) for argument in arguments[:4])
    status = Path(thread, "status").read_text()
    # or is stopped, frozen or debugged: it may have been woken, and not have seen it yet
    runs = "State:\tS" not in status
    if runs or not operation & _PRIVATE or operation & _COMMAND not in _WAITS or timeout:
        return ""
    return status.partition("voluntary_ctxt_switches:")[2]


def _handles_signals(pid: int) -> bool:
    """Whether a process has a handler that may wake it."""
    try:
        caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    except (OSError, IndexError):
        return False
    return bool(int(caught, 16) & _WAKING)


@final
class HangWatch:
    """Looks at processes every two seconds, and finds those that hang.

    Args:
        now: The time, as `time.monotonic` gives it.

    Attributes:
        due: When to look next.
    """

    def __init__(self, now: float) -> None:
        self._asleep: dict[int, list[str]] = {}
        self.due = now + BETWEEN_LOOKS_S

    def found(self, pids: Iterable[int], now: float) -> list[int]:
        """Those that were never woken between the last look and this one. Looks if it is due."""
        if now < self.due:
            return []
        self.due = now + BETWEEN_LOOKS_S
        before, self._asleep = self._asleep, {pid: asleep for pid in pids if (asleep := never_woken(pid))}
        return [pid for pid, asleep in self._asleep.items() if before.get(pid) == asleep and not _handles_signals(pid)]
