"""The examples ported from DataLoader are killed at the critical places, and end with the same records as an
undisturbed run.

A record is a line of JSON, of one step or of the work behind one epoch; it holds its place, such as ``step-12`` or
``epoch-1``.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torchrun import torchrun

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"

pytestmark = [pytest.mark.slow]

Records = list[dict[str, Any]]

PLACES = ["step-14", "step-16", "epoch-1"]
"""In mid-epoch; on the last batch of an epoch, after its checkpoint and before the scheduler's step; after validation.
24 steps, 8 per epoch."""


def records(folder: Path, rank: int = 0) -> Records:
    return [json.loads(line) for line in (folder / f"records-{rank}.jsonl").read_text().splitlines()]


def check_lives(folder: Path, ranks: int, resumed: list[str]) -> None:
    """Each life in ``killed`` wrote bit for bit the records of ``whole`` from the place where it began, and the last
    life wrote them to the end."""
    for rank in range(ranks):
        whole, killed = records(folder / "whole", rank), records(folder / "killed", rank)
        assert [record["at"] for record in whole] == [
            at for epoch in range(3) for at in (*(f"step-{epoch * 8 + step}" for step in range(1, 9)), f"epoch-{epoch}")
        ]
        places = [record["at"] for record in whole]
        begins = [0, *(k for k, record in enumerate(killed) if "resumed" in record), len(killed)]
        assert [killed[begin]["resumed"] for begin in begins[1:-1]] == resumed
        for begin, end in pairwise(begins):
            start = places.index(killed[begin]["resumed"]) + 1 if begin else 0
            life = killed[begin + 1 if begin else 0 : end]
            assert life == whole[start : start + len(life)]
        assert start + len(life) == len(whole)


def lives(
    run_program: Callable[..., str], script: str | Path, *arguments: str, ranks: int = 0, places: list[str] = PLACES
) -> None:
    """A whole run, and one that is killed at each of ``places``."""
    run_program(EXAMPLES / script, *arguments, "--folder", "whole", ranks=ranks)
    killed = [EXAMPLES / script, *arguments, "--folder", "killed", "--resume"]
    for place in places:
        run_program(*killed, "--die-after", place, ranks=ranks, killed=True)
    run_program(*killed, ranks=ranks)


@pytest.mark.soak
def test_imagenet_under_torchrun_is_killed_on_the_last_batch_and_goes_on(tmp_path: Path) -> None:
    """Each life has a different number of workers."""
    script = EXAMPLES / "port_imagenet.py"
    torchrun(tmp_path, 2, script, "--folder", "whole")
    with pytest.raises(AssertionError, match=r"Signal 9 \(SIGKILL\)"):
        torchrun(tmp_path, 2, script, "--folder", "killed", "--workers", 0, "--die-after", "step-16")
    torchrun(tmp_path, 2, script, "--folder", "killed", "--workers", 1, "--resume")
    check_lives(tmp_path, 2, ["step-16"])


def test_imagenet_is_killed_and_goes_on(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """Seen to fail when a state of the last batch began the next epoch: the scheduler's step and the validation after
    the loop were skipped."""
    lives(run_program, "port_imagenet.py", ranks=2)
    check_lives(tmp_path, 2, ["step-12", "step-16", "epoch-1"])


@pytest.mark.parametrize(
    "options", [["items", "--stateful"], pytest.param(["own"], marks=pytest.mark.soak)], ids=["items", "own"]
)
def test_iterable_datasets_on_two_ranks_are_killed_and_go_on(
    options: list[str], tmp_path: Path, run_program: Callable[..., str]
) -> None:
    """Seen to fail as `test_imagenet_is_killed_and_goes_on` was: step 17 came where the work behind epoch 1 was due."""
    lives(run_program, "port_iterable.py", "--split", *options, ranks=2)
    check_lives(tmp_path, 2, ["step-12", "step-16", "epoch-1"])


def test_nanochats_packed_texts_on_two_ranks_are_killed_and_go_on(
    tmp_path: Path, run_program: Callable[..., str]
) -> None:
    """Each record holds its rows of tokens. Seen to fail: a checkpoint without the loader's state."""
    lives(run_program, "port_nanochat.py", ranks=2)
    check_lives(tmp_path, 2, ["step-12", "step-16", "epoch-1"])


def test_the_hugging_face_trainer_is_killed_and_goes_on(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """It evaluates before it saves, so a kill after the evaluation costs four steps, and a kill after the checkpoint
    costs none."""
    lives(run_program, HERE / "killed_hf.py", places=["step-14", "epoch-1", "step-16"])
    check_lives(tmp_path, 1, ["step-12", "step-12", "epoch-1"])


def test_lightning_is_killed_and_goes_on(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """The next test covers the place between the last batch's checkpoint and the end of the epoch."""
    lives(run_program, HERE / "killed_lightning.py", places=["step-14", "epoch-1", "step-18"])
    check_lives(tmp_path, 1, ["step-12", "epoch-1", "epoch-1"])


@pytest.mark.parametrize(
    ("script", "arguments"),
    [(HERE / "killed_lightning.py", []), (HERE / "killed_hf.py", ["--evaluate", "epoch"])],
    ids=["Lightning", "Hugging Face"],
)
def test_a_trainer_leaves_out_the_validation_behind_a_checkpoint_of_the_last_batch(
    script: Path, arguments: list[str], tmp_path: Path, run_program: Callable[..., str]
) -> None:
    """So it is with a DataLoader, too: they begin the next epoch. Nothing else is lost."""
    lives(run_program, script, *arguments, places=["step-16"])
    whole, killed = records(tmp_path / "whole"), records(tmp_path / "killed")
    assert killed[17] == {"resumed": "step-16"}
    assert killed[:17] + killed[18:] == [record for record in whole if record["at"] != "epoch-1"]
