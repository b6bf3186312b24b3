"""What a process may use of the machine, from files as the kernel writes them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from penstock._workers.limits import cores, free_memory, own_memory

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30
MEMINFO = {"proc/meminfo": "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n"}


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
    "sys/fs/cgroup/user/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/user/job/memory.max": "max\n",
    "sys/fs/cgroup/user/job/memory.current": str(7 * GIB),
    "sys/fs/cgroup/user/memory.max": str(8 * GIB),
    "sys/fs/cgroup/user/memory.current": str(7 * GIB),
    "sys/fs/cgroup/user/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
}
V1 = {
    "proc/self/cgroup": "5:memory:/docker/x\n4:cpuacct,cpu:/docker/x\n0::/\n",
    "sys/fs/cgroup/cpuacct,cpu/docker/x/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpuacct,cpu/docker/x/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpuacct,cpu/docker/cpu.cfs_quota_us": "300000\n",
    "sys/fs/cgroup/cpuacct,cpu/docker/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": str(4 * GIB),
    "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": str(3 * GIB),
    "sys/fs/cgroup/memory/docker/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/docker/memory.usage_in_bytes": str(3 * GIB),
}
CONTAINER = {  # the path is that of the host, and only the container's own group is mounted
    "proc/self/cgroup": "3:memory:/docker/x\n2:cpu:/docker/x\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
}

HALF = {
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/cpu.max": "250000\n",
    "sys/fs/cgroup/job/memory.max": "",
    "sys/fs/cgroup/job/memory.current": "5",
}
EXCEEDED = {
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/cpu.max": "1000 100000\n",
    "sys/fs/cgroup/job/memory.max": str(GIB),
    "sys/fs/cgroup/job/memory.current": str(2 * GIB),
}


@pytest.mark.parametrize(
    ("files", "usable", "free"),
    [
        pytest.param({}, 8, None, id="no Linux"),
        pytest.param(MEMINFO, 8, 32 * GIB, id="no groups"),
        pytest.param({**MEMINFO, **V2}, 2.5, 3 * GIB, id="version 2, limits above"),
        pytest.param({**MEMINFO, **V1}, 3, 2 * GIB, id="version 1, limits above"),
        pytest.param({**MEMINFO, **CONTAINER}, 1, GIB, id="version 1 in a container, half a core"),
        pytest.param({**MEMINFO, "proc/self/cgroup": "nonsense"}, 8, 32 * GIB, id="nonsense"),
        pytest.param({**MEMINFO, **HALF}, 8, 32 * GIB, id="half of each file"),
        pytest.param({**MEMINFO, **EXCEEDED}, 1, 0, id="limits that are exceeded"),
    ],
)
def test_cores_and_memory(
    files: dict[str, str], usable: float, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: a look at the process's own group only; cached files that counted as used; a ``cpu.max`` without a
    period, which raised."""
    root = written(tmp_path, files)
    assert cores(root) == usable
    assert free_memory(root) == free
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cores(root) == max(1, usable / 4)
    assert free_memory(root) == (None if free is None else free // 4)


def test_here() -> None:
    """On the machine that runs this."""
    assert 1 <= cores() <= 8
    assert (free_memory() or 1) > 0
    own = own_memory(os.getpid())
    assert own is None or 2**20 < own < 2**40
    assert own_memory(2**30) is None
