"""Run a script under torchrun, and leave no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psutil
from sessions import MARK, end_with_stacks, kill_marked, marked

if TYPE_CHECKING:
    from pathlib import Path


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
            end_with_stacks(marked(self.mark))
            raise AssertionError(f"{self.name} has not ended after {timeout_s} s. It said:\n{self.said()}") from None
        assert code == 0, f"{self.name} ended with {code}:\n{self.said()}"
        _, left = psutil.wait_procs(marked(self.mark), timeout=100)
        end_with_stacks(left)
        assert not left, f"{self.name} left processes behind: {left}\n{self.said()}"

    def end(self) -> None:
        """Kill whatever still runs."""
        kill_marked(self.mark)
        self.process.wait()
