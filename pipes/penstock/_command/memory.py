"""The memory of this process and of all processes that it started."""

from __future__ import annotations

import contextlib
import os


def memory_of_processes() -> tuple[int, int] | None:
    """Bytes (PSS: memory shared by several processes is divided among them) and the number of processes; None where the system does not tell, which only Linux does."""
    parents: dict[int, int] = {}
    try:
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:  # the process may have ended
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        family = {os.getpid()}
        while grown := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= grown
        sizes = [_pss(pid) for pid in family]
    except (OSError, ValueError):
        return None
    return sum(sizes), sum(size > 0 for size in sizes)


def _pss(pid: int) -> int:
    """Bytes; 0 for a process that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/smaps_rollup") as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return 0
