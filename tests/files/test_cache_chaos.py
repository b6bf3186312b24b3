"""Jobs with two bounds and two orders share a folder of copies that is deleted, while some of them are stopped or
killed: every record is right."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest
from http_files import HttpFiles
from tests.files.cache_chaos import RECORDS, SHARDS, record

if TYPE_CHECKING:
    from collections.abc import Iterator

REPEATS = int(os.environ.get("PENSTOCK_REPEATS", "1"))
PROGRAM = Path(__file__).with_name("cache_chaos.py")
JOBS = [("60000", "1", "process"), ("1000000", "1", "thread"), ("60000", "2", "inline"), ("1000000", "2", "process")]


class Job:
    """A job that is started again whenever it was killed."""

    def __init__(self, url: str, folder: str, place: Path, bound: str, seed: str, method: str) -> None:
        self.seed = seed
        self.seen: list[list[int]] = []  # the lines of all its lives; an empty one where it was killed
        self.stopped_until = 0.0
        self._command = [sys.executable, str(PROGRAM), url, folder, bound, seed, str(place), method]
        self._errors = place.with_suffix(".errors")
        self.start()

    def start(self) -> None:
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                if line.endswith("\n"):
                    self.seen.append(list(map(int, line.split())))

    def kill(self) -> str:
        """What it has said on stderr."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.seen.append([])
        return self._errors.read_text()


@contextlib.contextmanager
def running(url: str, folder: str, places: Path) -> Iterator[list[Job]]:
    jobs = [Job(url, folder, places / str(number), *words) for number, words in enumerate(JOBS)]
    try:
        yield jobs
    finally:
        for job in jobs:
            job.kill()


def follows(seen: list[list[int]], right: list[list[int]]) -> bool:
    """Whether these are the batches in their order. One whose state was saved before the job was killed may be missing
    in the output."""
    at, gap = -1, 1
    for one in seen:
        if not one:
            gap = 2
            continue
        found = next((step for step in range(1, gap + 1) if right[at + step] == one), None)
        if found is None:
            return False
        at, gap = at + found, 1
    return True


@pytest.mark.soak
@pytest.mark.timeout(900 + 30 * REPEATS)
def test_every_record_is_right_whatever_happens_to_the_folder(tmp_path: Path) -> None:
    """30 s, times ``PENSTOCK_REPEATS``. Fails if a copy is believed that was cut, or is of another file, or if a fault
    of the folder skips data."""
    rng, folder, places = random.Random(5), tmp_path / "cache", tmp_path / "places"
    data = tmp_path / "data"
    data.mkdir()
    places.mkdir()
    happened = dict.fromkeys(("kill", "stop", "long stop", "delete", "delete one", "move"), 0)
    with HttpFiles().running() as server:
        for shard in range(SHARDS):
            lines = (json.dumps(record(shard, number)) + "\n" for number in range(RECORDS))
            server.files[f"/{shard}.jsonl"] = "".join(lines).encode()
            (data / f"{shard}.jsonl").write_bytes(server.files[f"/{shard}.jsonl"])
        with running(server.url, str(folder), places) as jobs:
            end = time.monotonic() + 30 * REPEATS
            while time.monotonic() < end:
                time.sleep(rng.random())
                for job in jobs:
                    assert job.process.poll() is None, job.kill()
                    if job.stopped_until and time.monotonic() > job.stopped_until:
                        job.process.send_signal(signal.SIGCONT)
                        job.stopped_until = 0.0
                what, job = rng.choice([*happened]), rng.choice(jobs)
                if what == "kill" and job.seen and job.seen[-1]:  # it has begun
                    job.kill()
                    job.start()
                    job.stopped_until = 0.0
                elif what in ("stop", "long stop") and not job.stopped_until and (what == "stop" or rng.random() < 0.1):
                    job.process.send_signal(signal.SIGSTOP)
                    job.stopped_until = time.monotonic() + (40 if what == "long stop" else 3 * rng.random())
                elif what == "delete":
                    shutil.rmtree(folder, ignore_errors=True)
                elif what == "delete one":
                    with contextlib.suppress(OSError, IndexError):
                        (folder / rng.choice(os.listdir(folder))).unlink()
                elif what == "move":
                    with contextlib.suppress(OSError):
                        folder.rename(tmp_path / f"moved-{happened[what]}")
                else:
                    continue
                happened[what] += 1
            for job in jobs:
                job.process.send_signal(signal.SIGCONT)
        for seed in ("1", "2"):
            alike = [job.seen for job in jobs if job.seed == seed]
            last = max(line[0] for seen in alike for line in seen if line)
            alone = Job(str(data), "", places / f"alone {seed}", "", seed, "inline")
            while not alone.seen or alone.seen[-1][0] <= last:
                time.sleep(0.05)
                assert alone.process.poll() is None, alone.kill()
            alone.kill()
            for seen in alike:
                assert len(seen) > 30
                assert follows(seen, [line for line in alone.seen if line])
    print(happened, [len(job.seen) for job in jobs])
