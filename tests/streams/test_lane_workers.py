"""Shards that nobody has counted, read by several worker processes: each lane by one of them, and nothing differs.

Record r of shard s is ``100 * s + r``.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import Loader, Shards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LENGTHS = (5, 0, 9, 3, 12, 7, 1, 8, 4, 11, 6, 2)


class Opening:
    """Opens a shard. May kill its process at one record, the first time."""

    def __init__(self, folder: Path, kill_at: int | None = None) -> None:
        self.folder = folder
        self.kill_at = kill_at

    def __call__(self, shard: int) -> Iterator[int]:
        for record in range(100 * shard, 100 * shard + LENGTHS[shard]):
            if record == self.kill_at:
                self.kill_at = None
                try:
                    (self.folder / "killed").touch(exist_ok=False)  # one of two workers that read the same shard at once, in two passes
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield record


def odd(records: Iterator[int]) -> Iterator[int]:
    for record in records:
        if record % 3:
            yield record


def drawn(record: int) -> tuple[int, float]:
    return record, penstock.sample().rng.random()


def loading(opening: Opening, workers: int, *, lanes: int = 4, **options: Any) -> Loader[Any]:
    shards = Shards(len(LENGTHS), opening, steps=[odd], transform=drawn, epoch_size=24, lanes=lanes, bookmarks=False)
    words = {"batch_size": 6, "shuffle": True, "seed": 3, "method": "process", "multiprocessing_context": "fork", **options}
    return Loader.from_dataset(shards, num_workers=workers, **words)


def epochs(loader: Loader[Any], n: int = 2) -> list[Any]:
    return [penstock.testing.plain(batch) for _ in range(n) for batch in loader]


@pytest.fixture
def expected(tmp_path: Path) -> list[Any]:
    (tmp_path / "inline").mkdir()
    with loading(Opening(tmp_path / "inline"), 0) as loader:
        return epochs(loader)


@pytest.mark.parametrize("kill_at", [302, 1002])
def test_a_worker_that_dies_in_the_middle_of_a_shard(
    tmp_path: Path, expected: list[Any], kill_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    opening = Opening(tmp_path, kill_at)
    with loading(opening, 2, prefetch_next_epoch=False) as loader:  # otherwise it may be a batch that nobody waits for that kills
        assert epochs(loader) == expected
        assert loader.root.statistics()[-1].workers.restarts == 1
    assert "died while loading dataset index" in caplog.text


class Replacing:
    """Opens a file of lines. The first process that has read five of them puts another file of the same size in its place, and dies."""

    def __call__(self, path: Path) -> Iterator[str]:
        with path.open() as file:
            for number, line in enumerate(file):
                if number == 5 and "old" in line:
                    other = path.with_suffix(".new")
                    other.write_text("new\n" * 99)
                    other.replace(path)
                    os.kill(os.getpid(), signal.SIGKILL)
                yield line


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_the_successor_of_a_worker_reads_no_other_version(tmp_path: Path, context: Any) -> None:
    """Seen to fail: each process knew only what it had seen itself, so the next one read the new file."""
    (tmp_path / "0").write_text("old\n" * 99)
    shards = Shards([tmp_path / "0"], Replacing(), epoch_size=99, bookmarks=False)
    with (
        Loader.from_dataset(shards, 3, num_workers=1, method="process", multiprocessing_context=context) as loader,
        pytest.raises(ValueError, match=r"0 has changed since it was first looked at, by another process of this loader\. Leave files"),
    ):
        list(loader)
