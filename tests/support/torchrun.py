"""Run a script under torchrun, and leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psutil

if TYPE_CHECKING:
    from pathlib import Path

MARK = "PENSTOCK_TEST_RUN"


def torchrun(folder: Path, world_size: int, script: Path, *arguments: Any, timeout_s: float = 200) -> str:
    """Run ``script`` on ``world_size`` ranks of one node; return its output once it has succeeded and left no process."""
    node = Launch(
        folder, "node", ["--nproc-per-node", world_size, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", script, *arguments]
    )
    try:
        node.wait(timeout_s)
    finally:
        node.end()
    return node.said()


class Launch:
    """One torchrun agent and everything that it starts. It starts them in new sessions, so a mark in their environment identifies them.

    Args:
        folder: Its working directory; its output is kept there too.
        name: The agent's name.
        arguments: torchrun's arguments.
        before: A command that runs it, such as ``ip netns exec NAME``.
        environment: Added to the environment of this process.
    """

    def __init__(self, folder: Path, name: str, arguments: list[Any], before: tuple[str, ...] = (), **environment: str) -> None:
        self.name = name
        self.mark = uuid4().hex
        self.output = folder / f"{name}-{self.mark}.txt"
        with self.output.open("w") as sink:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "torch.distributed.run", *map(str, arguments)],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.output.read_text()

    def wait(self, timeout_s: float) -> None:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} has not ended after {timeout_s} s. It said:\n{self.said()}") from None
        assert code == 0, f"{self.name} ended with {code}:\n{self.said()}"
        _, left = psutil.wait_procs(self.processes(), timeout=5)
        assert not left, f"{self.name} left processes behind: {left}"

    def end(self) -> None:
        """Kill whatever still runs."""
        while stragglers := self.processes():
            for straggler in stragglers:
                os.kill(straggler.pid, signal.SIGKILL)
            psutil.wait_procs(stragglers, timeout=1)
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Every live process of this launch, at any depth."""

        def belongs(process: psutil.Process) -> bool:
            try:
                return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                return False

        return [process for process in psutil.process_iter() if belongs(process)]
