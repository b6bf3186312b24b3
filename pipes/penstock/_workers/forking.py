"""Forks that come up.

A fork takes over every lock that another thread holds at that instant, and in the child nobody gives it back. Python has had such
a lock itself: before 3.11.10 a child stood still inside ``os.fork`` if a native thread (autograd, gloo) was just beginning to use
Python (https://github.com/python/cpython/issues/112275; one child in 150 under Lightning's DDP). torch's and NumPy's global
generators have others. NumPy's a child can make new. What else was held nobody can see: so a child says that it is up once it has
taken torch's, and one that stands still instead is killed and forked anew, before it was given any work.
"""

from __future__ import annotations

import select
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock._errors import WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable


ATTEMPTS = 20
_STILL_MS, _LONGER = 100, 1.15  # between two looks at first; longer each time, should a child have reasons of its own to sleep


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
        if _comes_up(*fork(), _STILL_MS * _LONGER**attempt):
            return
        kill()
    raise WorkerDied(
        f"{ATTEMPTS} processes forked from this one stood still at once, most likely because its other threads held locks that they need. A thread "
        f"that draws from torch's global random numbers without a pause does that: let it pause, or give it a generator of its own. Or use "
        f'multiprocessing_context="forkserver", or method="thread".'
    )


def _comes_up(pid: int, said: int, still_ms: float) -> bool:
    """Whether a child speaks; not if it sleeps and has done nothing between two looks. Dead, or not to be seen (not Linux), it counts as up."""
    poller = select.poll()
    poller.register(said, select.POLLIN)
    seen = ""
    while not poller.poll(still_ms):
        before, seen = seen, _status(pid)
        state = seen.rpartition(")")[2][1:2]
        if state in ("", "Z", "X"):
            return True
        if state == "S" and seen == before:
            return False
    return True


def _status(pid: int) -> str:
    """What Linux says and counts of a process, such as its state, the time that it has used and the pages that it has touched."""
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
