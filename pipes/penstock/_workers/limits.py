"""The cores and memory that this process may use, from its affinity and the limits of its control groups (versions 1
and 2).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT: Final = Path("/")
_NONE: Final = 2**62
"""A limit of this many bytes or more means none, which is how version 1 writes it."""


def cores(root: Path = _ROOT) -> float:
    """Cores that this process may keep busy, at least 1. Processes started here by ``torchrun`` get equal shares.

    Args:
        root: Where ``/proc`` and ``/sys`` are.
    """
    found = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for group in _groups("cpu", root):
        found_here = _numbers(group / "cpu.max") or _numbers(group / "cpu.cfs_quota_us") + _numbers(
            group / "cpu.cfs_period_us"
        )
        quota, period = [*found_here, 0, 0][:2]
        if quota > 0 and period > 0:
            found = min(found, quota / period)
    return max(1.0, found / _ranks_here())


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes that this process may still take; None if unknown.

    Memory that the kernel would drop, such as cached files, counts as free.
    """
    found = [1024 * kib for kib in entries(root / "proc/meminfo", "MemAvailable:")]
    for group in _groups("memory", root):
        most = [*_numbers(group / "memory.max"), *_numbers(group / "memory.limit_in_bytes")]
        used = [*_numbers(group / "memory.current"), *_numbers(group / "memory.usage_in_bytes")]
        if most and used and most[0] < _NONE:
            cached = [
                *entries(group / "memory.stat", "total_inactive_file"),
                *entries(group / "memory.stat", "inactive_file"),
                0,
            ]
            found.append(max(0, most[0] - used[0] + cached[0]))
    return min(found) // _ranks_here() if found else None


def own_memory(pid: int, root: Path = _ROOT) -> int | None:
    """Bytes that only process ``pid`` uses; None if unknown."""
    private = sum(entries(root / f"proc/{pid}/smaps_rollup", "Private_Clean:", "Private_Dirty:"))
    return 1024 * private or None


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The control groups whose limits apply here: this process's group and its ancestors."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            # Version 2 has one line without names. Version 1 has one for each group of controllers; both may be there.
            if names and controller not in names.split(","):
                continue
            mount = root / "sys/fs/cgroup"
            if names:
                mount = next((found for found in (mount / names, mount / controller) if found.is_dir()), mount)
            # In a container the path may be that of the host, and its folder be missing here; then only the root's
            # limits are read.
            group = Path(path.lstrip("/"))
            yield from (mount / above for above in (group, *group.parents))


def _numbers(file: Path) -> list[int]:
    """The numbers at the start of a file; empty if there is no such file, or if it says ``max``."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []


def entries(file: Path, *names: str) -> list[int]:
    """The numbers that follow ``names`` in a file of lines."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        return [int(words[1]) for words in lines if len(words) > 1 and words[0] in names]
    except (OSError, ValueError):
        return []


def _ranks_here() -> int:
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1
