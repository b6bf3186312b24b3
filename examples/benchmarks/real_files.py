"""Read the files of a folder with the tool that they are made for and with penstock, and compare the values.

    git clone https://github.com/apache/parquet-testing && git clone https://github.com/apache/arrow-testing git clone
    https://github.com/webdataset/webdataset && git clone https://github.com/lhotse-speech/lhotse && pip install
    webdataset python real_files.py parquet-testing arrow-testing webdataset lhotse

Every file is tried as Parquet and as Arrow, by pyarrow; a tar, compressed or not, by webdataset; and a file whose name
has ``.json`` in it, line by line, by Python's json. A child process does the reading, because a damaged file may end a
process, and is replaced when that happens. Exits with 1 if values differ, or if penstock ended the process where the
other tool did not.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

READERS = {"parquet": "", "arrow": "", "tar": ".tar|.tgz", "jsonl": ".json"}
"""What the name of a file must contain one of, by format."""


def by_its_own_tool(kind: str, path: str) -> list[Any]:
    if kind == "tar":
        import webdataset

        samples = webdataset.WebDataset(path, shardshuffle=False, empty_check=False)
        return [
            {key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")}
            for sample in samples
        ]
    if kind == "jsonl":
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as lines:
            return [json.loads(line) for line in lines if line.strip()]

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
    from penstock.__main__ import main as command

    with tempfile.TemporaryDirectory() as folder:
        words = {}
        if kind in ("tar", "jsonl"):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                if command(["index", path, "--index", folder]):
                    raise ValueError(said.getvalue())
            words = {"index": folder}
        data = getattr(formats, kind)(path, **words)
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
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
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
    for path in sorted(
        path for folder in words.folders for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts
    ):
        for kind in (kind for kind, parts in READERS.items() if any(part in path.name for part in parts.split("|"))):
            theirs, ours = (reading.ask(kind, str(path), reader) for reader in ("by_its_own_tool", "by_penstock"))
            same = "the same values" if theirs == ours else "other values" if theirs[0] == ours[0] == "read" else ""
            what = (kind, theirs[0], same or ours[0]) if "read" in (theirs[0], ours[0]) else (kind, theirs[0], ours[0])
            counts[what] += 1
            wrong = same == "other values" or (ours[0] == "ended the process" and theirs[0] != ours[0])
            bad += wrong
            if wrong or theirs[0] != ours[0]:
                print(
                    f"{'WRONG' if wrong else 'NOTE'} {kind} {path}\n    its own tool {theirs[0]}: "
                    f"{theirs[1]:.300}\n    penstock {ours[0]}: {ours[1]:.300}"
                )
    reading.close()
    for (kind, theirs_, ours_), number in sorted(counts.items()):
        print(f"{number:5} {kind}: its own tool {theirs_}; penstock {ours_}")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
