"""The programs of detection, of asynchronous checkpoints and of torchtitan's loop are killed on two ranks and resumed
on one: every sample comes as in a whole run, bit for bit."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torchrun import torchrun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

pytestmark = [pytest.mark.slow]

Records = list[dict[str, Any]]


@pytest.fixture(params=["forks", pytest.param("torchrun", marks=pytest.mark.soak)])
def launch(request: pytest.FixtureRequest, tmp_path: Path, run_program: Callable[..., str]) -> Callable[..., str]:
    """Run an example: `Programs.run`, or torchrun itself."""
    if request.param == "forks":
        return run_program

    def run(script: Path, *arguments: Any, ranks: int = 1, killed: bool = False) -> str:
        if not killed:
            return torchrun(tmp_path, ranks, script, *arguments)
        with pytest.raises(AssertionError, match=r"Signal 9 \(SIGKILL\)"):
            torchrun(tmp_path, ranks, script, *arguments)
        return ""

    return run


def seen(folder: Path, rank: int) -> Records:
    return [json.loads(line) for line in (folder / f"seen-{rank}.jsonl").read_text().splitlines()]


def lives(folder: Path) -> tuple[list[Records], Records]:
    """What two ranks trained on before the kill, and one after it; that begins where rank 0 counts back."""
    first = seen(folder, 0)
    begin = next(k for k in range(1, len(first)) if first[k]["step"] <= first[k - 1]["step"])
    return [first[:begin], seen(folder, 1)], first[begin:]


def dealt_back(ranks: list[Records]) -> Iterator[tuple[int, list[Any]]]:
    """Each step, and its samples in the order of the epoch. Item i goes to rank i % n, and one rank may take a step in
    several batches."""
    steps = {record["step"] for records in ranks for record in records}
    for step in sorted(steps):
        hands = [[row for record in records if record["step"] == step for row in record["rows"]] for records in ranks]
        yield step, [hands[k % len(ranks)][k // len(ranks)] for k in range(sum(map(len, hands)))]


def check_in_order(folder: Path, saved: int, last: int) -> None:
    """The steps that survived, on two ranks and then on one, are those of the whole run on one. Of the two, one may
    have been killed a step before the other, after the last state."""
    before, after = lives(folder / "killed")
    before = [[record for record in records if record["step"] <= saved] for records in before]
    whole = dict(dealt_back([seen(folder / "whole", 0)]))
    assert [*whole] == [*range(1, last + 1)]
    two, one = dict(dealt_back(before)), dict(dealt_back([after]))
    assert [two[step] for step in range(1, saved + 1)] == [whole[step] for step in range(1, saved + 1)]
    assert [*one] == [*range(saved + 1, last + 1)]
    assert [one[step] for step in one] == [whole[step] for step in one]


def test_detection_is_killed_on_two_ranks_and_resumed_on_one(tmp_path: Path, launch: Callable[..., str]) -> None:
    """Both ranks take as many batches; validation has each picture once, on any number of ranks.

    The rest of the interrupted epoch fills rounds for one rank, so there its pictures, pixels and boxes are compared
    whatever their order. Seen to fail: a checkpoint without the loader's state; a flip drawn from an unseeded
    generator; validation with ``tail="pad"``.
    """
    run = partial(launch, EXAMPLES / "detection.py", "--folder")
    lines = re.findall(r"epoch (\d).*? on (\d+) pictures", run("whole", ranks=2))  # two ranks may share a line
    assert sorted(lines) == [("0", "21")] * 2 + [("1", "21")] * 2
    run("alone")
    run("killed", "--die-after", "6", ranks=2, killed=True)
    said = run("killed")
    assert "continues after step 4, in epoch 0" in said
    assert re.findall(r"epoch (\d).* on (\d+) pictures", said) == [("0", "21"), ("1", "21")]
    whole, alone = [seen(tmp_path / "whole", rank) for rank in range(2)], seen(tmp_path / "alone", 0)
    assert len(whole[0]) == len(whole[1])
    before, after = lives(tmp_path / "killed")
    assert [records[:4] for records in before] == [records[:4] for records in whole]
    first = [
        row
        for records in (*(one[:4] for one in before), after)
        for record in records
        if record["epoch"] == 0
        for row in record["rows"]
    ]
    assert sorted(first) == sorted(
        row for records in whole for record in records if record["epoch"] == 0 for row in record["rows"]
    )
    assert sorted(number for number, _ in first) == list(range(50))
    assert [one["rows"] for one in after if one["epoch"] == 1] == [one["rows"] for one in alone if one["epoch"] == 1]


def test_asynchronous_checkpoints_are_killed_on_two_ranks_and_resumed_on_one(
    tmp_path: Path, launch: Callable[..., str]
) -> None:
    """The kill comes while a checkpoint is being written, right after the call. So the run continues after that one, or
    the one before.

    Seen to fail: with the state that the loader has when the next checkpoint is due, after the upload: five steps were
    skipped.
    """
    run = partial(launch, EXAMPLES / "async_checkpoint.py", "--folder")
    run("whole")
    run("killed", "--die-after", "20", ranks=2, killed=True)
    saved = re.search(r"rank 0 of 1 continues after step (15|20)\b", run("killed"))
    assert saved
    check_in_order(tmp_path, int(saved[1]), 39)


def test_torchtitans_loop_is_killed_on_two_ranks_and_resumed_on_one(tmp_path: Path, launch: Callable[..., str]) -> None:
    """One rank accumulates two batches where two ranks take one each, and the losses are equal, too. Seen to fail: a
    checkpoint without the dataloader."""
    run = partial(launch, EXAMPLES / "torchtitan_loop.py", "--folder")
    whole = run("whole")
    killed = run("killed", "--die-after", "14", ranks=2, killed=True)
    resumed = run("killed")
    assert "rank 0: training starts at step 13\n" in resumed
    check_in_order(tmp_path, 12, 30)
    losses = [[float(loss) for loss in re.findall(r"loss (\S+)", said)] for said in (whole, killed, resumed)]
    assert losses[2] == pytest.approx(losses[0][12:], abs=2e-4)
    assert losses[1] == pytest.approx(losses[0][: len(losses[1])], abs=2e-4)
