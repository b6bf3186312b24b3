"""Detects that a process has died, and the cause."""

from __future__ import annotations

import contextlib
import os
import signal
from io import FileIO
from typing import TYPE_CHECKING, Any, final

from penstock._workers.processes.protocol import NO_DESCRIPTORS

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


UNKNOWN = -1000
"""Exit code of a process that other code reaped. Negative, so it counts as killed, and its replacement counts as a
restart.
"""

_SERVER_DIED = 255
"""What `multiprocessing` reports for a child of its fork server when the server is dead too and took the exit code with
it.
"""

_PATIENCE_S = 10.0
"""How long to wait for an exit code, which a fork server reports at once, unless the machine is very busy."""

_LIKELY = {
    "SIGKILL": "possibly out of memory (the kernel's OOM killer; see dmesg), or killed by hand",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code gave up",
    "SIGBUS": "memory or a mapped file that is not there, for instance a full disk or a truncated file",
    "SIGFPE": "a crash in native code",
    "SIGILL": "native code built for another processor",
    "SIGTERM": "it was asked to end, for instance by a job scheduler",
    "SIGALRM": (
        "a timer that user code has set in it; handlers of the main process are not inherited, so set the handler "
        "there too"
    ),
}


@final
class Watched:
    """A process that `multiprocessing` has started.

    Each call is idempotent, so that what an interrupt has left can be done again.

    Attributes:
        fd: A file descriptor that becomes readable when it dies. A pidfd where the platform has them: the sentinel of
            `multiprocessing` is a pipe. A process that user code forks inherits it and keeps it open after the death,
            and a fork server that dies closes it while its children live on.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self._pidfd: FileIO | None = None
        self._code: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # not Linux, an old kernel, or no descriptor left
            self._pidfd = FileIO(os.pidfd_open(process.pid or 0))
        self.fd = process.sentinel if self._pidfd is None else self._pidfd.fileno()

    def kill(self) -> None:
        """End it by force."""
        if self._code is None:
            self._process.kill()

    def reap(self, patience_s: float = _PATIENCE_S) -> int:
        """Reap it once it has died. Returns its exit code (negative: a signal), or `UNKNOWN`.

        Args:
            patience_s: How long its fork server, which has the exit code, may take to tell it; it may be stopped, or
                deaf to its children's deaths.
        """
        if self._code is None:
            # `multiprocessing` takes the code of a child of its own from the kernel, which has it by now. It asks its
            # fork server for that of another, and has no limit for the answer.
            popen: Any = self._process._popen  # type: ignore[attr-defined]
            self._process.join(patience_s if popen.method == "forkserver" else None)
            code = self._process.exitcode
            if code is None:  # `multiprocessing` would count it among the living for as long as this process lives
                popen.returncode = code = UNKNOWN
                self._process.join()
            self._code = UNKNOWN if (popen.method, code) == ("forkserver", _SERVER_DIED) else code
        return self._code

    def close(self) -> None:
        """Close all of its resources, after `reap`."""
        self._process.close()
        self.disown()

    def disown(self) -> None:
        """Close only the copies that a fork of this process has."""
        if self._pidfd is not None:
            self._pidfd.close()


def cause_of(code: int) -> str:
    """An exit code (negative: a signal) in words."""
    if code == NO_DESCRIPTORS:
        return "its file descriptors were exhausted; user code in it opens files and does not close them"
    if code == UNKNOWN:
        return (
            "nobody knows how, because this program ignores SIGCHLD or waits for every child it has (os.waitpid(-1)) "
            "and so took its exit code, or because the fork server, which had its exit code, has died too or does not "
            "answer"
        )
    if code >= 0:
        return f"exit code {code}, so it ended itself (os._exit, or native code that calls exit)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"signal {name}, {_LIKELY.get(name, 'sent by another process or by itself')}"
