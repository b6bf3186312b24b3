"""How we learn that a process has died, and of what."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from penstock._workers.processes.protocol import NO_DESCRIPTORS

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


UNKNOWN = -1000
"""Exit code of a process that someone else reaped. Negative, so it counts as killed, and its replacement counts as a restart."""

_SERVER_DIED = 255
"""What `multiprocessing` reports for a child of its fork server when the server is dead too and took the exit code with it."""

_LIKELY = {
    "SIGKILL": "possibly out of memory (the kernel's OOM killer; see dmesg), or killed by hand",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code gave up",
    "SIGBUS": "memory or a mapped file that is not there, for instance a full disk or a truncated file",
    "SIGFPE": "a crash in native code",
    "SIGILL": "native code built for another processor",
    "SIGTERM": "it was asked to end, for instance by a job scheduler",
    "SIGALRM": "a timer that user code has set in it; handlers of the main process are not inherited, so set the handler there too",
}


def watch(process: BaseProcess) -> int:
    """A file descriptor that becomes readable when ``process`` dies.

    A pidfd where the platform has them. The sentinel of `multiprocessing` is a pipe: a process that user code forks inherits it and
    keeps it open after the death, and a fork server that dies closes it while its children live on.
    """
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(process.pid or 0)
    return process.sentinel


def buried(process: BaseProcess, watched: int) -> int:
    """Reap a process that has ended, and close all there is of it; its exit code (negative: a signal)."""
    if watched != process.sentinel:
        os.close(watched)
    code = reaped(process)
    process.close()
    return code


def reaped(process: BaseProcess) -> int:
    """Wait for the end of ``process``; its exit code (negative: a signal), or `UNKNOWN`."""
    process.join()
    code = process.exitcode
    popen: Any = process._popen  # type: ignore[attr-defined]
    if code is None:  # `multiprocessing` would count it among the living for as long as this process lives
        popen.returncode = code = UNKNOWN
        process.join()
    return UNKNOWN if (popen.method, code) == ("forkserver", _SERVER_DIED) else code


def cause_of(code: int) -> str:
    """An exit code (negative: a signal) in words."""
    if code == NO_DESCRIPTORS:
        return "its file descriptors were exhausted; user code in it opens files and does not close them"
    if code == UNKNOWN:
        return (
            "nobody knows how, because this program ignores SIGCHLD or waits for every child it has (os.waitpid(-1)) and so took its exit code, "
            "or because the fork server, which had its exit code, has died too"
        )
    if code >= 0:
        return f"exit code {code}, so it ended itself (os._exit, or native code that calls exit)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"signal {name}, {_LIKELY.get(name, 'sent by another process or by itself')}"
