"""What trainers count, gather and schedule is right by value on two ranks, and after a kill on four, and after another
one on one. See killed_trainers.py."""

from __future__ import annotations

import json
import math
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import killed_trainers as trainers
import pytest
from killed_trainers import EPOCHS, PACKS, new_groups, new_minibatches, new_packs, new_samples, new_weighted
from torchrun import torchrun

pytestmark = [pytest.mark.soak]

Lives = list[list[dict[str, Any]]]


def lives(folder: Path, kind: str, *kills: int) -> Lives:
    """The steps of each life: on 2, 4 and 1 ranks under torchrun. Those that the next one has done again are left
    out."""
    program = Path(trainers.__file__)
    for ranks, kill_at in zip((2, 4), kills, strict=True):
        with pytest.raises(AssertionError, match=r"Signal 9 \(SIGKILL\)"):
            torchrun(folder, ranks, program, kind, folder, kill_at)
    torchrun(folder, 1, program, kind, folder)
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    found = [[*one] for _, one in groupby(lines, lambda line: line["ranks"])]
    ends = [*(one[0]["step"] for one in found[1:]), math.inf]
    return [[line for line in one if line["step"] < end] for one, end in zip(found, ends, strict=True)]


def joined(of_lives: Lives) -> list[dict[str, Any]]:
    return [line for one in of_lives for line in one]


def test_groups_of_a_sampler_stay_whole(tmp_path: Path) -> None:
    """Seen to fail: with ``split="items"``."""
    steps = joined(lives(tmp_path, "groups", 4, 15))
    with new_groups() as alone:
        whole = [batch.tolist() for _ in range(EPOCHS) for batch in alone]
    assert [line["gathered"] for line in steps] == whole
    assert len(whole) == 24
    assert all(len({*line["gathered"][at : at + 4]}) == 1 for line in steps for at in (0, 4))


def test_accelerate_gathers_and_schedules_as_with_a_dataloader(tmp_path: Path) -> None:
    """Batches of four on each rank, so the arithmetic is that of DataLoader: a step of W ranks has 4 W samples, and the
    schedule moves W steps at once. A window of three batches goes on where it was."""
    found = lives(tmp_path, "accelerate", 5, 11)
    with new_samples() as alone:
        order = [[value for batch in alone for value in batch.tolist()] for _ in range(EPOCHS)]
    steps = [line for line in joined(found) if "gathered" in line]
    total = EPOCHS * math.ceil(trainers.SAMPLES / trainers.BATCH)
    at, epoch, window, scheduled = 0, 0, 0, 0
    for step, line in enumerate(steps):
        end = min(at + line["ranks"] * trainers.BATCH, trainers.SAMPLES)
        window = 0 if end == trainers.SAMPLES else window + 1
        synced = window % trainers.WINDOW == 0
        scheduled += line["ranks"] * synced
        batches = math.ceil(math.ceil(trainers.SAMPLES / line["ranks"]) / trainers.BATCH)
        assert line["lr"] == pytest.approx(1 - scheduled / total)
        assert line == {
            "ranks": line["ranks"],
            "step": step,
            "epoch": epoch,
            "gathered": order[epoch][at:end],
            "synced": synced,
            "lr": line["lr"],
            "lengths": [total, batches],
        }
        at, epoch = (0, epoch + 1) if end == trainers.SAMPLES else (end, epoch)
    assert (at, epoch) == (0, EPOCHS)
    evaluated = [(line["epoch"], line["evaluated"]) for line in joined(found) if "evaluated" in line]
    assert evaluated == [(epoch, [*range(trainers.EVALUATED)]) for epoch in range(EPOCHS)]


def batches_of(packs: int, ranks: int) -> int:
    """With ``tail="drop"``, of batches that have `PACKS` on all ranks."""
    return math.ceil(packs // ranks / (PACKS // ranks))


def check_packs(found: Lives, epochs: list[list[float]]) -> list[int]:
    """Each step has the packs that follow, up to the end of the epoch on so many ranks. The last step of each epoch."""
    at, epoch, ends = 0, 0, []
    for line in [line for line in joined(found) if "gathered" in line]:
        whole, ranks = epochs[epoch], line["ranks"]
        taken = min(PACKS, (len(whole) - at) // ranks * ranks)
        assert line.get("epoch", epoch) == epoch
        assert sorted(line["gathered"]) == sorted(whole[at : at + taken])
        at += taken
        if len(whole) - at < ranks:
            at, epoch = 0, epoch + 1
            ends.append(line["step"])
    assert (at, epoch) == (0, EPOCHS)
    return ends


@pytest.fixture(scope="module")
def packs() -> list[list[float]]:
    """The packs of each epoch."""
    with new_packs() as alone:
        epochs = [[value for batch in alone for value in batch["x"].flatten().tolist()] for _ in range(EPOCHS)]
    counts = {ranks: [batches_of(len(epoch), ranks) for epoch in epochs] for ranks in (1, 2, 4)}
    assert counts == {1: [5, 5, 4, 5], 2: [4, 5, 4, 4], 4: [4, 4, 4, 4]}
    return epochs


def test_lightning_has_whole_epochs_of_packs(packs: list[list[float]], tmp_path: Path) -> None:
    found = lives(tmp_path, "lightning", 7, 10)
    ends = check_packs(found, packs)
    for line in joined(found):
        if "lengths" in line:
            counts = [batches_of(len(epoch), line["ranks"]) for epoch in packs]
            assert line["lengths"] == [sum(counts), counts[line["epoch"]]]
    validated = [(line["step"], line["epoch"]) for line in joined(found) if "evaluated" in line]
    assert validated == [(end, epoch) for epoch, end in enumerate(ends)]
    assert joined(found)[-1]["ended"] == ends[-1] + 1


def test_the_trainer_has_whole_epochs_of_packs(packs: list[list[float]], tmp_path: Path) -> None:
    """And its schedule ends with the run. Seen to fail: it took its steps for those of the new number of ranks, and
    asked for epoch 1 where the state was in epoch 2."""
    found = lives(tmp_path, "transformers", 7, 10)
    ends = check_packs(found, packs)
    *_, step, end = joined(found)
    assert step["lengths"][0] == end["ended"] == ends[-1] + 1
    assert end["rates"][-1] == pytest.approx(5e-5 / end["ended"])


def test_a_ledger_whose_weights_are_updated(tmp_path: Path) -> None:
    """Prompts of two epochs are open at each kill. Each is served by the weights of its epoch, and settled once."""
    found = lives(tmp_path, "ledger", 13, 14)
    whole = {}
    for epoch in range(trainers.PROMPTS_DRAWN // trainers.DRAWN):
        _, loader = new_weighted(epoch)
        with loader:
            loader.set_epoch(epoch)
            whole |= {(epoch, position): prompt for position, prompt in enumerate(loader)}
    served = [tuple(one) for line in joined(found) for one in line["gathered"]]
    assert {whole[epoch, position] == prompt for epoch, position, prompt in served} == {True}
    settled = [tuple(one) for line in joined(found) for one in line["settled"]]
    opened = [tuple(one) for one in joined(found)[-1]["opened"]]
    assert sorted([*settled, *opened]) == [*whole][: len(settled) + len(opened)]
    assert len(settled) > 50
    for before, after in pairwise(found):
        was_open = sorted(tuple(one) for one in before[-1]["opened"])
        assert len({epoch for epoch, _ in was_open}) > 1
        again = [(epoch, position) for line in after for epoch, position, _ in line["gathered"]]
        assert again[: len(was_open)] == was_open


def test_loaders_of_minibatches(tmp_path: Path) -> None:
    steps = joined(lives(tmp_path, "minibatches", 6, 17))
    whole = []
    for rollout in range(6):
        with new_minibatches(rollout) as alone:
            whole += [(rollout, epoch, batch.tolist()) for epoch in range(2) for batch in alone]
    assert [(line["rollout"], line["epoch"], line["gathered"]) for line in steps] == whole
    passes = [[*one] for _, one in groupby(whole, lambda line: line[:2])]
    assert len({json.dumps([index for *_, batch in one for index, _ in batch]) for one in passes}) == 12
    assert len({number for *_, batch in whole for _, number in batch}) == sum(4 * len(one) for one in passes)
