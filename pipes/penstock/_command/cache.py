"""``python -m penstock cache``: shows what a folder of copies holds, and removes unused ones."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TextIO

from penstock._files.copies import CacheFolder
from penstock._observe.report import copies_in, size_of
from penstock._statistics import CopyStatistics


def show(folder: str, clear: bool, out: TextIO, err: TextIO) -> int:
    """Print the contents, or with ``clear`` first remove unused copies; returns the exit code."""
    try:
        if not os.path.isdir(folder):
            raise ValueError(f"{folder!r} is not a folder.")
        cache = CacheFolder(folder, 0)
        if clear:
            print(f"removed {cache.clear():,} unused copies", file=out)
        copies, parts, counts = cache.contents()
    except (OSError, ValueError) as exc:
        print(f"penstock cache: {exc}", file=err)
        return 2
    print(f"{len(copies):,} copies, {size_of(sum(copies.values()))}; {parts:,} unfinished copies", file=out)
    if any(counts):
        print(copies_in(CopyStatistics(*counts[:4], counts.wait_ns / 1e9)), file=out)
    for pid, number in sorted(_readers([os.path.join(folder, name) for name in copies]).items()):
        print(f"process {pid} reads {number:,} of them", file=out)
    return 0


def _readers(paths: list[str]) -> Counter[int]:
    """How many of the files each process holds a lock on; available only on Linux."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return Counter()
    inodes = {os.stat(path).st_ino for path in paths if os.path.exists(path)}
    locks = [[word for word in line.split() if word != "->"] for line in lines]
    return Counter(
        int(pid) for _, kind, *_, pid, file, _, _ in locks if kind == "FLOCK" and int(file.rpartition(":")[2]) in inodes
    )
