"""The processes of a session: everything that a script has started, at any depth."""

from __future__ import annotations

import os

import psutil


def session(leader: int) -> list[psutil.Process]:
    """The live processes of the session that process ``leader`` began."""

    def belongs(process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    return [process for process in psutil.process_iter() if belongs(process)]
