"""Read the files of a folder with pyarrow and with penstock, and compare the values.

    git clone https://github.com/apache/parquet-testing && git clone https://github.com/apache/arrow-testing
    python real_files.py parquet-testing arrow-testing

Every file is tried as Parquet and as Arrow. A child process does the reading, because a damaged file may end a process, and is replaced when that happens. Exits with 1
if values differ, or if penstock ended the process where pyarrow did not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

READERS = ("parquet", "arrow")


def by_pyarrow(kind: str, path: str) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "parquet":
        rows: list[Any] = pq.ParquetFile(path).read().to_pylist()
        return rows
    with pa.OSFile(path) as file:
        in_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if in_file else pa.ipc.open_stream(file)
        table = reader.read_all()
        table.validate(full=True)
        return table.to_pylist()  # type: ignore[no-any-return]


def by_penstock(kind: str, path: str) -> list[Any]:
    from penstock import formats

    data = getattr(formats, kind)(path)
    rows = [data[number] for number in range(len(data))]
    data.close()
    return rows


def outcome(read: Any, kind: str, path: str) -> tuple[str, str]:
    """Whether it could be read, and the values or the reason."""
    try:
        return "read", repr(read(kind, path))
    except Exception as exc:
        return "refused", f"{type(exc).__name__}: {exc}"


def child() -> None:
    for line in sys.stdin:
        kind, path, reader = json.loads(line)
        print(json.dumps(outcome(globals()[reader], kind, path)), flush=True)


class Child:
    """A process that reads files, and its replacements."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, *question: str) -> tuple[str, str]:
        if self._process is None:
            words = [sys.executable, __file__, "--child"]
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer:
            what, value = json.loads(answer)
            return what, value
        code, self._process = self._process.wait(), None
        return "ended the process", f"exit code {code}"

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child:
        child()
        return 0
    reading, counts, bad = Child(), Counter[tuple[str, str, str]](), 0
    for path in sorted(path for folder in words.folders for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts):
        for kind in READERS:
            theirs, ours = (reading.ask(kind, str(path), reader) for reader in ("by_pyarrow", "by_penstock"))
            same = "the same values" if theirs == ours else "other values" if theirs[0] == ours[0] == "read" else ""
            what = (kind, theirs[0], same or ours[0]) if "read" in (theirs[0], ours[0]) else (kind, theirs[0], ours[0])
            counts[what] += 1
            wrong = same == "other values" or (ours[0] == "ended the process" and theirs[0] != ours[0])
            bad += wrong
            if wrong or theirs[0] != ours[0]:
                print(
                    f"{'WRONG' if wrong else 'NOTE'} {kind} {path}\n    pyarrow {theirs[0]}: {theirs[1]:.300}\n    penstock {ours[0]}: {ours[1]:.300}"
                )
    reading.close()
    for (kind, theirs_, ours_), number in sorted(counts.items()):
        print(f"{number:5} {kind}: pyarrow {theirs_}; penstock {ours_}")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
