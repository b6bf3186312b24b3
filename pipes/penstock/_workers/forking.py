"""Fork children, and make sure that they come up.

A forked child inherits every lock that another thread held at that instant, and no thread will release it there. Python
itself had such a lock: before 3.11.10 a child hung inside ``os.fork`` if a native thread (autograd, gloo) was just
beginning to use Python (https://github.com/python/cpython/issues/112275; one child in 150 under Lightning's DDP).
torch's and NumPy's global generators have such locks too. A child replaces NumPy's. torch's cannot be replaced, so
`fork` waits until it is free. The child acquires it before it reports that it is up; a child that hangs instead is
killed and forked again before it gets any work.

`asleep` tells a hung child from a slow one, at the first look if it has a single thread. A child that sleeps for
another reason gets some time, because the reason is unknown. A child that runs, or waits for a CPU or for a page, gets
all the time it needs.
"""

from __future__ import annotations

import contextlib
import os
import select
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock._errors import WorkerDied
from penstock._workers.asleep import never_woken, threads_of

if TYPE_CHECKING:
    from collections.abc import Callable


ATTEMPTS = 20
# between two checks of a child; longer with each attempt, because a lock may be held for a while
_LOOK_MS, _LONGER = 100, 1.15
# after this many checks of a child that sleeps without progress, we assume, without proof, that it hangs
_PATIENCE = 10


def come_up() -> None:
    """Call this in the child before it reports that it is up.

    It never returns if another thread held torch's generator lock at the fork.
    """
    # A Python lock, which may be made anew, whoever held it. The lock of torch's is a mutex in C++, of which Python
    # sees nothing: this waits for it.
    np.random.get_bit_generator().lock._at_fork_reinit()  # type: ignore[attr-defined,unused-ignore]
    torch.default_generator.get_state()


_TAKEN = 50  # enough for every thread that waits for the generator's lock to wake up and take it before us


def fork(pids: list[int]) -> int:
    """`os.fork` at a moment when, as a rule, no other thread holds torch's generator lock. Returns the pid, or 0.

    A thread that draws without a pause holds that lock nearly always, but it needs Python's lock to begin the next
    draw, and this thread holds that. So once we have taken the generator's lock often enough, each of those draws has
    ended and none has begun. Native code that draws may still hold it; then the child hangs.

    Args:
        pids: The pid is appended in the same C call that forks, so that no interrupt can come in between and lose it.
    """
    for _ in range(_TAKEN):
        torch.default_generator.get_state()
    pids.extend(starmap(os.fork, [()]))
    return pids[-1]


def until_up(fork: Callable[[], tuple[int, int]], kill: Callable[[], None]) -> None:
    """Fork children until one comes up.

    Args:
        fork: Forks a child (by `fork`), which calls `come_up`. Returns its pid, and a file descriptor that becomes
            readable when the child is up.
        kill: Kills and reaps the child forked last.

    Raises:
        WorkerDied: No child came up in `ATTEMPTS` attempts.
    """
    for attempt in range(ATTEMPTS):
        if _comes_up(*fork(), _LOOK_MS * _LONGER**attempt):
            return
        kill()
    raise WorkerDied(
        f"{ATTEMPTS} processes forked from this one hung as they started, most likely because other threads held locks "
        f"that the children need. Native code that draws from torch's global generator without a pause causes this: "
        f'let it pause, or give it its own generator. Or use multiprocessing_context="forkserver", or method="thread".'
    )


def _comes_up(pid: int, said: int, look_ms: float) -> bool:
    """Wait until the child reports, and return whether it is up; False if it hangs.

    A dead child, or an invisible one (not Linux), counts as up.
    """
    poller = select.poll()
    poller.register(said, select.POLLIN)
    seen: list[str] = []
    idle = 0
    while not poller.poll(look_ms):
        # A child that makes progress has another line in ``stat``: it has computed, or faulted a page in. `never_woken`
        # is a proof, where the system shows what a process waits for; some containers do not.
        before, seen = seen, _stats(pid)
        states = {thread.rpartition(")")[2][1:2] for thread in seen}
        if not states - {"Z", "X"}:
            return True
        idle = idle + 1 if states == {"S"} and seen == before else 0
        if idle == _PATIENCE or (len(seen) == 1 and never_woken(pid)):
            return False
    return True


def _stats(pid: int) -> list[str]:
    """Linux's ``stat`` line of each thread of a process: its state, CPU time and page faults."""
    found = []
    for thread in threads_of(pid):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(Path(thread, "stat").read_text())
    return found
