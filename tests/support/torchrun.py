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
    """Run ``script`` on ``world_size`` ranks of one node; its output, once it has succeeded and left no process.

    torchrun starts the ranks in new sessions, so a mark in their environment identifies them.
    """
    mark = uuid4().hex
    output = folder / f"{mark}.txt"
    words = ["--nproc-per-node", world_size, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", script, *arguments]
    with output.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *map(str, words)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(timeout_s)
        assert code == 0, f"it ended with {code}:\n{output.read_text()}"
        _, left = psutil.wait_procs(marked(mark), timeout=100)
        end_with_stacks(left)
        assert not left, f"it left processes behind: {left}\n{output.read_text()}"
    except subprocess.TimeoutExpired:
        end_with_stacks(marked(mark))
        raise AssertionError(f"it has not ended after {timeout_s} s. It said:\n{output.read_text()}") from None
    finally:
        kill_marked(mark)
        process.wait()
    return output.read_text()
