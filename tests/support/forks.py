"""Processes that are forked for one piece of work."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def forked(work: Callable[[], object]) -> int:
    """The pid of a process that does ``work`` and nothing else. It exits with 1 if that raises."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return pid


def ended(*children: int) -> list[int]:
    """The exit codes, or signals below 0; waits for all children, even if the test is stopped."""
    left = list(children)
    try:
        codes = []
        while left:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(left[0], 0)[1]))
            del left[0]
        return codes
    finally:
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
