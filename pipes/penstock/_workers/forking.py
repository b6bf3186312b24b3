"""Forks that come up.

A forked child inherits every lock that another thread held at that instant, and nobody will release it there. Python has had such a
lock itself: before 3.11.10 a child hung inside ``os.fork`` if a native thread (autograd, gloo) was just beginning to use Python
(https://github.com/python/cpython/issues/112275; one child in 150 under Lightning's DDP). torch's and NumPy's global generators have
others. A child can make NumPy's anew; it takes torch's before it says that it is up. A child that hangs instead is killed and forked
again, before it was given any work.

Who hangs, and who is only slow? A process with one thread, asleep until somebody wakes a futex that is private to it, is never woken:
there is nobody. Linux shows that in ``/proc/PID/syscall``, and no load of the machine looks like it. Anything else that sleeps may
have a reason that we do not know, so it gets time; whatever runs, waits for a processor or for a page gets all the time it needs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock._errors import WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable


ATTEMPTS = 20
_LOOK_MS, _LONGER = 100, 1.15  # between two looks at a child; longer with each attempt, because a lock may be held for a while
_PATIENCE = 10  # looks at a child that sleeps and does nothing, until it is taken to hang without proof

_FUTEX = {"x86_64": "202", "aarch64": "98", "riscv64": "98"}.get(platform.machine(), "")  # the number of the system call
_PRIVATE, _COMMAND = 128, 127  # bits of its operation
_WAITS = (0, 6, 9, 13)  # FUTEX_WAIT, _LOCK_PI, _WAIT_BITSET, _LOCK_PI2


def come_up() -> None:
    """In the child, before it says that it is up. Never returns if another thread held torch's generator at the fork."""
    np.random.get_bit_generator().lock._at_fork_reinit()  # type: ignore[attr-defined,unused-ignore]
    torch.default_generator.get_state()


def until_up(fork: Callable[[], tuple[int, int]], kill: Callable[[], None]) -> None:
    """Fork a child that comes up.

    Args:
        fork: Forks one, which calls `come_up`; gives its pid, and a file descriptor that becomes readable when it says that it is up.
        kill: Kills and reaps the child last forked.

    Raises:
        WorkerDied: None came up in `ATTEMPTS`.
    """
    for attempt in range(ATTEMPTS):
        # This waits for its lock. Threads that draw without a pause hold it nearly always, but not in the moment after we had it.
        torch.default_generator.get_state()
        if _comes_up(*fork(), _LOOK_MS * _LONGER**attempt):
            return
        kill()
    raise WorkerDied(
        f"{ATTEMPTS} processes forked from this one hung at once, most likely because its other threads held locks that they need. A thread "
        f"that draws from torch's global random numbers without a pause does that: let it pause, or give it a generator of its own. Or use "
        f'multiprocessing_context="forkserver", or method="thread".'
    )


def _comes_up(pid: int, said: int, look_ms: float) -> bool:
    """Whether a child speaks; not if it hangs. Dead, or not to be seen (not Linux), it counts as up."""
    poller = select.poll()
    poller.register(said, select.POLLIN)
    seen: list[str] = []
    idle = 0
    while not poller.poll(look_ms):
        before, seen = seen, _threads(pid)
        states = {thread.rpartition(")")[2][1:2] for thread in seen}
        if not states - {"Z", "X"}:
            return True
        idle = idle + 1 if states == {"S"} and seen == before else 0
        if idle == _PATIENCE or (len(seen) == 1 and _never_woken(pid)):
            return False
    return True


def _threads(pid: int) -> list[str]:
    """What Linux says and counts of each thread of a process, such as its state, the time that it has used and the pages that it has touched."""
    found = []
    try:
        for thread in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # it has just ended
                found.append(Path(thread.path, "stat").read_text())
    except OSError:  # the whole process has
        return []
    return found


def _never_woken(pid: int) -> bool:
    """Whether the only thread of a process waits, for as long as it takes, for another one to wake it. False where that cannot be seen."""
    try:
        number, *arguments = Path(f"/proc/{pid}/syscall").read_text().split()
    except OSError:
        return False
    if number != _FUTEX:
        return False
    _, operation, _, timeout = (int(argument, 16) for argument in arguments[:4])
    return bool(operation & _PRIVATE) and operation & _COMMAND in _WAITS and timeout == 0
