"""The contents of a folder of copies in a few lines: the output of ``python -m penstock cache``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from penstock._files.copies import CacheFolder


def show(folder: str, clear: bool, out: TextIO, err: TextIO) -> int:
    """Print the contents, or with ``clear`` remove unused copies; returns the exit code."""
    if not os.path.isdir(folder):
        print(f"penstock cache: {folder!r} is not a folder.", file=err)
        return 2
    try:
        cache = CacheFolder(folder, 0)
        removed = cache.clear() if clear else None
        copies, parts, counts = cache.contents()
    except (OSError, ValueError) as exc:
        print(f"penstock cache: {exc}", file=err)
        return 2
    if removed is not None:
        print(f"removed {removed:,} unused copies", file=out)
    readers = _readers([os.path.join(folder, name) for name in copies])
    print(f"{len(copies):,} copies, {_size(sum(copies.values()))}; {parts:,} unfinished copies", file=out)
    asked = counts.hits + counts.fetches + counts.misses
    if asked:
        print(
            f"{counts.hits:,} hits, {counts.fetches:,} copies fetched ({_size(counts.fetched_bytes)}), "
            f"{counts.misses:,} times no room; {counts.wait_ns / 1e9:,.1f} s spent waiting for copies",
            file=out,
        )
    for pid, number in sorted(readers.items()):
        print(f"process {pid} reads {number:,} of them", file=out)
    return 0


def _readers(paths: list[str]) -> dict[int, int]:
    """How many of the files each process holds a lock on; available only on Linux."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return {}
    inodes = {os.stat(path).st_ino for path in paths if os.path.exists(path)}
    found: dict[int, int] = {}
    for line in lines:
        _, kind, *_, pid, file, _, _ = [word for word in line.split() if word != "->"]
        if kind == "FLOCK" and int(file.rpartition(":")[2]) in inodes:
            found[int(pid)] = found.get(int(pid), 0) + 1
    return found


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
