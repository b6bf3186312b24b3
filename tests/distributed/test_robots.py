"""Windows over a LeRobot dataset: the program is killed on two ranks and goes on with one, and gives what LeRobot's own
dataset, sampler and DataLoader give."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "lerobot_windows.py"
BOUNDS = [(0, 13), (13, 20), (20, 38), (38, 47), (47, 63)]
"""Where the example's episodes begin and end."""

pytestmark = pytest.mark.slow


def needs(module: str) -> None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as exc:  # the latter two for a shared library that it needs
        pytest.skip(f"{module}: {exc!r:.200}")


def seen(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"seen-{rank}.jsonl").read_text().splitlines()]


def windows(records: list[dict[str, Any]]) -> list[Any]:
    """Every window that was trained on, by its frame: the names in a record, then a row for each."""
    return sorted(
        row
        for one in records
        for row in zip(*(one[name] for name in sorted({*one} - {"step"}, key="index".__ne__)), strict=True)
    )


def expected(index: int) -> dict[str, Any]:
    """The window of a frame, from its number alone."""
    begin, end = next((begin, end) for begin, end in BOUNDS if begin <= index < end)

    def near(offsets: range) -> list[int]:
        return [min(max(index + offset, begin), end - 1) for offset in offsets]

    def pads(offsets: range) -> list[bool]:
        return [not begin <= index + offset < end for offset in offsets]

    return {
        "index": index,
        "observation.state": [[k, k - begin] for k in near(range(-1, 1))],
        "action": [[k, k - begin] for k in near(range(8))],
        "image": [4 * k for k in near(range(-1, 1))],
        "action_is_pad": pads(range(8)),
        "observation.image_is_pad": pads(range(-1, 1)),
    }


def test_windows_are_killed_on_two_ranks_and_go_on_with_one(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """Each step has the windows that it has in a whole run, and each window is what its number says. Seen to fail: a
    checkpoint without the loader's state; a window that reaches into the next episode."""
    run_program(EXAMPLE, "--folder", "whole")
    run_program(EXAMPLE, "--folder", "killed", "--die-after", "10", ranks=2, killed=True)
    lives = [seen(tmp_path / "killed", rank)[:8] for rank in range(2)]
    begun = len(seen(tmp_path / "killed"))  # 9 or 10: the other rank's death ends this one
    assert "continues after step 8, in epoch 1" in run_program(EXAMPLE, "--folder", "killed", "--resume")
    whole = seen(tmp_path / "whole")
    after = seen(tmp_path / "killed")[begun:]
    assert [one["step"] for one in after] == [*range(9, 19)]
    for step, one in enumerate(whole, 1):
        found = [life[step - 1] for life in lives] if step <= 8 else [after[step - 9]]
        assert {record["step"] for record in found} == {step}
        assert windows(found) == windows([one])
        for name in {*one} - {"step"}:
            assert one[name] == [expected(index)[name] for index in one["index"]]
    frames = sorted(k for begin, end in BOUNDS for k in range(begin, end - 3))
    for epoch in range(3):
        assert sorted(index for one in whole[6 * epoch : 6 * epoch + 6] for index in one["index"]) == frames


BESIDE_DATALOADER = """
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, sys.argv[1])
import penstock
from lerobot_windows import DROPPED, WINDOWS, EpisodeSampler, Windows, make_dataset

root = Path("robot")
make_dataset(root, video=False)
data = Windows(root, WINDOWS)
order = EpisodeSampler(data.episodes, DROPPED).indices
if sys.argv[2] == "lerobot":
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.datasets.sampler import EpisodeAwareSampler

    data = LeRobotDataset("carry", root, delta_timestamps=WINDOWS)
    bounds = [data.meta.episodes[f"dataset_{which}_index"] for which in ("from", "to")]
    sampler = EpisodeAwareSampler(*bounds, drop_n_last_frames=DROPPED)
    assert [*sampler] == order
    order = sampler
with penstock.Loader.from_dataset(data, batch_size=10, sampler=order, num_workers=2) as loader:
    for ours, theirs in zip(loader, DataLoader(data, batch_size=10, sampler=order), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) if key != "task" else ours[key] == theirs[key] for key in ours)
print(len(ours))
"""


@pytest.mark.parametrize("whose", ["ours", "lerobot"])
def test_windows_are_those_of_a_dataloader(whose: str, tmp_path: Path, run_program: Callable[..., str]) -> None:
    """Bit for bit, in order, by processes. Seen to fail: with LeRobot's sampler without its ``drop_n_last_frames``."""
    if whose == "lerobot":
        needs("lerobot.datasets.lerobot_dataset")
    (tmp_path / "program.py").write_text(BESIDE_DATALOADER)
    run_program(tmp_path / "program.py", EXAMPLE.parent, whose)


@pytest.mark.parametrize("frames", ["images", "video"])
def test_lerobots_dataset_and_sampler_give_the_same(
    frames: str, tmp_path: Path, run_program: Callable[..., str]
) -> None:
    """Seen to fail: with frames of the video by their number in the episode."""
    needs("lerobot.datasets.lerobot_dataset")
    words = ["--video"] if frames == "video" else []
    if words:
        needs("torchcodec.decoders")
    run_program(EXAMPLE, "--folder", "ours", *words)
    run_program(EXAMPLE, "--folder", "theirs", "--lerobot", *words)
    assert (ours := seen(tmp_path / "ours")) == seen(tmp_path / "theirs")
    assert all(
        abs(found - 4 * index) < 3 for one in ours for index, (_, found) in zip(one["index"], one["image"], strict=True)
    )
