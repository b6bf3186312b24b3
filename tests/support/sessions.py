"""The processes that a script has started, at any depth: those of its session, or those that carry a mark. And how they
are ended when a deadline passes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    """The live processes with ``mark`` in their environment as `MARK`, whatever session they are in: torchrun starts
    its ranks in new ones."""

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


def end_with_stacks(processes: Iterable[psutil.Process]) -> None:
    """End processes that have passed a deadline. Each prints the stacks of its threads to its stderr: `faulthandler`
    does that at SIGABRT.

    It is switched on in every Python that a test starts, by an environment variable, and in forks of pytest. What
    blocks even SIGABRT is killed.
    """
    processes = list(processes)
    for process in processes:  # so that none notices the end of another
        with suppress(psutil.Error):
            process.suspend()
    # one at a time, or they would write into each other's lines
    for process in sorted(processes, key=_depth, reverse=True):
        with suppress(psutil.Error):
            print(f"past its deadline: process {process.pid} of {process.ppid()}: {' '.join(process.cmdline())}")
            process.send_signal(signal.SIGABRT)
            process.resume()
            deadline = time.monotonic() + 10
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.01)
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def _depth(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return len(process.parents())
    return 0


def started_by(pid: int) -> list[psutil.Process]:
    """The live processes that process ``pid`` has started, at any depth, and those of its session if it began one."""
    with suppress(psutil.NoSuchProcess):
        me = psutil.Process(pid)
        return [one for one in {*me.children(recursive=True), *session(pid)} - {me} if not _is_helper(one)]
    return session(pid)


def _is_helper(process: psutil.Process) -> bool:
    """Whether it is `multiprocessing`'s resource tracker, or the fork server of this program, which hang nowhere, end
    with it, and would be missed."""
    with suppress(psutil.Error):
        return process.pid == forkserver._forkserver._forkserver_pid or "resource_tracker" in " ".join(
            process.cmdline()
        )
    return False


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` for all tests, of `subprocess.run` too: what is past a deadline is ended with all that it has
    started, and tells where it was."""

    def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
        try:
            return super().communicate(input, timeout)
        except subprocess.TimeoutExpired:
            self._end()
            for said in super().communicate():
                print(said.decode(errors="replace") if isinstance(said, bytes) else said or "")
            raise

    def wait(self, timeout: float | None = None) -> int:
        try:
            return super().wait(timeout)
        except subprocess.TimeoutExpired:
            self._end()
            raise

    def _end(self) -> None:
        with suppress(psutil.NoSuchProcess):
            end_with_stacks([psutil.Process(self.pid), *started_by(self.pid)])
