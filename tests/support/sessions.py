"""The processes that a script has started, at any depth: those of its session, or those that carry a mark."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

MARK = "PENSTOCK_TEST_RUN"


def session(leader: int) -> list[psutil.Process]:
    """The live processes of the session that process ``leader`` began."""

    def belongs(process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    return [process for process in psutil.process_iter() if belongs(process)]


def marked(mark: str) -> list[psutil.Process]:
    """The live processes with ``mark`` in their environment as `MARK`, whatever session they are in: torchrun starts its ranks in new ones."""

    def belongs(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    return [process for process in psutil.process_iter() if belongs(process)]


def kill_marked(mark: str) -> None:
    while stragglers := marked(mark):
        for straggler in stragglers:
            with suppress(psutil.NoSuchProcess):
                straggler.kill()
        psutil.wait_procs(stragglers, timeout=1)
