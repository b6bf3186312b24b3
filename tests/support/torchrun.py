"""Run a script under torchrun, and leave nothing of it behind."""

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


def torchrun(folder: Path, world_size: int, script: Path, *arguments: Any, timeout_s: float = 90) -> str:
    """Run ``script`` on ``world_size`` ranks of one node; what it said, once it has ended well and left no process."""
    node = Launch(
        folder, "node", ["--nproc-per-node", world_size, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", script, *arguments]
    )
    try:
        node.wait(timeout_s)
    finally:
        node.end()
    return node.said()


class Launch:
    """One torchrun agent and all that it starts, which it does in sessions of their own: they are known by their environment.

    Args:
        folder: Where it runs, and where what it says is kept.
        name: Of this agent.
        arguments: torchrun's.
        before: A command that runs it, such as ``ip netns exec NAME``.
        environment: What it has more than this process.
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
        """Kill what still runs."""
        while stragglers := self.processes():
            for straggler in stragglers:
                os.kill(straggler.pid, signal.SIGKILL)
            psutil.wait_procs(stragglers, timeout=1)
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Every live process of this launch, wherever it hangs in the tree."""

        def belongs(process: psutil.Process) -> bool:
            try:
                return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                return False

        return [process for process in psutil.process_iter() if belongs(process)]
