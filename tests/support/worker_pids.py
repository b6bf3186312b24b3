"""The worker processes of this process, as the system sees them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


def worker_pids() -> list[int]:
    """Those that have begun their start, the oldest first.

    A worker has no children, and shares memory with this process. A process that forks workers has children; other
    children share no memory.
    """
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):  # it has ended
            if not child.children() and "memfd:penstock" in Path(f"/proc/{child.pid}/maps").read_text():
                found.append((child.create_time(), child.pid))
    return [pid for _, pid in sorted(found)]
