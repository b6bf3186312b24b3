"""What a piece of code leaves behind: threads, processes, shared memory, open files."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED_MEMORY = Path("/dev/shm")
OPEN_FILES = Path("/proc/self/fd")
TASKS = Path("/proc/self/task")


@contextmanager
def no_leaks(grace_s: float = 2.0) -> Iterator[None]:
    """Raise an AssertionError that names all that the body leaves behind after ``grace_s``, in which garbage is
    collected.

    That is threads of this process, its descendants (also zombies), entries of ``/dev/shm`` that these use, and open
    file descriptors; but not the two helper processes that `multiprocessing` keeps for the life of a program. A clean
    body does not wait.
    """
    before = _Inventory.taken()
    yield
    left = _Inventory.taken().added_since(before)
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
        added = _Inventory.taken().added_since(before)
        left = [thing for thing in left if thing in added]  # anything newer was made by another program
    if left:
        raise AssertionError("left behind:\n" + "\n".join(f"  {thing}" for thing in left))


@dataclass(frozen=True)
class _Inventory:
    threads: frozenset[threading.Thread]
    processes: frozenset[psutil.Process]
    segments: frozenset[str]
    files: dict[int, str]

    @classmethod
    def taken(cls) -> _Inventory:
        helpers = {
            resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
            forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        }
        return cls(
            threads=frozenset(
                thread for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"
            ),  # tqdm's, one for a program
            processes=frozenset(child for child in _descendants() if child.pid not in helpers),
            segments=frozenset(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else frozenset(),
            files=_open_files(),
        )

    def added_since(self, before: _Inventory) -> list[str]:
        threads = [f"thread {thread.name!r}" for thread in self.threads - before.threads]
        processes = [text for child in self.processes - before.processes if (text := _described(child)) is not None]
        segments = [f"shared memory {SHARED_MEMORY / name}" for name in _ours(self.segments - before.segments)]
        files: list[str] = []
        if len(self.files) > len(before.files):
            files = [f"open file {fd}: {target}" for fd, target in self.files.items() if before.files.get(fd) != target]
        return sorted(threads) + sorted(processes) + sorted(segments) + files


def _descendants() -> list[psutil.Process]:
    """Most tests have none but the resource tracker, which Linux tells at once; psutil looks at every process of the
    machine."""
    try:
        children = {int(pid) for task in TASKS.iterdir() for pid in (task / "children").read_text().split()}
    except OSError:  # another system, or a thread has ended meanwhile
        children = None
    if children is not None and children <= {resource_tracker._resource_tracker._pid}:  # type: ignore[attr-defined]
        return []
    return psutil.Process().children(recursive=True)


def _open_files() -> dict[int, str]:
    """What each file descriptor of this process points to, except those that live as long as the program."""
    kept: set[Any] = {
        resource_tracker._resource_tracker._fd,  # type: ignore[attr-defined]
        forkserver._forkserver._forkserver_alive_fd,  # type: ignore[attr-defined]
    }
    files = {}
    for name in os.listdir(OPEN_FILES) if OPEN_FILES.is_dir() else ():
        try:
            target = os.readlink(OPEN_FILES / name)
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if int(name) not in kept and not target.startswith("/dev/nvidia"):
            files[int(name)] = target
    return files


def _described(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"process {process.pid} (zombie: it ended, and nobody has waited for it)"
        return f"process {process.pid}: {' '.join(process.cmdline()) or process.name()}"
    except psutil.NoSuchProcess:
        return None


def _ours(names: frozenset[str]) -> frozenset[str]:
    """Leave out the shared memory entries that no process of this program uses.

    What nobody uses may be another program's, which was killed, or which opens it again later. It is ours if torch
    named it after this process; the library itself uses memory without a name.
    """
    if not names:
        return names
    me = psutil.Process()
    ours = {me.pid, *(child.pid for child in me.children(recursive=True))}
    here = {name for pid in ours for name in _held(pid)}
    return frozenset(name for name in names if name in here or name.startswith(f"torch_{me.pid}_"))


def _held(pid: int) -> set[str]:
    """Shared memory entries that a process has mapped or open."""
    names = set()
    try:
        names = set(re.findall(rf"{SHARED_MEMORY}/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
        with os.scandir(f"/proc/{pid}/fd") as entries:
            names |= {
                Path(target).name for entry in entries if (target := os.readlink(entry)).startswith(f"{SHARED_MEMORY}/")
            }
    except OSError:  # gone, or not ours to look into
        pass
    return names
