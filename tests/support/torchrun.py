"""Run a program in new interpreters, by itself or under torchrun, and leave no process behind."""

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


def run_alone(folder: Path, arguments: list[Any], deadline_s: float = 200, **environment: str) -> str:
    """Run Python in ``folder`` with ``arguments``; its output, once it has succeeded and left no process.

    torchrun starts the ranks in new sessions, so a mark in their environment identifies them.
    """
    mark = uuid4().hex
    output, words = folder / f"{mark}.txt", [str(word) for word in arguments]
    with output.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, **environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(deadline_s)
        _, left = psutil.wait_procs(marked(mark), timeout=100)
        end_with_stacks(left)
    except subprocess.TimeoutExpired:
        end_with_stacks(marked(mark))
        raise AssertionError(f"{words} has not ended after {deadline_s} s. It said:\n{output.read_text()}") from None
    finally:
        kill_marked(mark)
        process.wait()
    assert code == 0, f"{words} ended with {code}:\n{output.read_text()}"
    assert not left, f"{words} left processes behind: {left}\n{output.read_text()}"
    return output.read_text()


def torchrun(folder: Path, world_size: int, script: Path, *arguments: Any) -> str:
    """Run ``script`` on ``world_size`` ranks of one node."""
    words = ["--nproc-per-node", world_size, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return run_alone(folder, ["-m", "torch.distributed.run", *words, script, *arguments], OMP_NUM_THREADS="1")
