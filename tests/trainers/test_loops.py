"""Fabric, Accelerate and the Hugging Face Trainer resume exactly, on one rank, on two, and on another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.trainers import loops
from tests.trainers.loops import KINDS, PENSTOCK, POINTS, TRAINERS, exact, fits
from tests.trainers.table import WRITING, record

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(isinstance\\(treespec, LeafSpec\\)|'set_vital' is deprecated|pin_memory|srun)"),
    pytest.mark.filterwarnings("ignore:Counted has no state_dict"),
]
NEED = {
    "Fabric": '`fabric.save(file, {"loader": loader, …})`',
    "Accelerate": "`AccelerateLoader(loader, accelerator)`",
    "Hugging Face Trainer": "`HFTrainerCallback()`, `ignore_data_skip=True`",
}


def note(trainer: str, point: str, ranks: str, kind: str, result: bool) -> None:
    by = " (by skipping)" if kind == loops.DATALOADER and trainer != "Fabric" else ""
    record(trainer, point, ranks, kind, f"exact{by}" if result else "no", NEED[trainer])


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_rank(trainer: str, point: str, tmp_path: Path) -> None:
    """Seen to fail: `AccelerateLoader` did not register the loader; the callback did not load the state."""
    for kind in KINDS if WRITING else [PENSTOCK]:
        if fits(trainer, kind):
            result = loops.both(trainer, kind, tmp_path, point)
            note(trainer, point, "1", kind, exact(result))
            if kind == PENSTOCK:
                assert exact(result)
                assert result["whole"] == loops.right(0, 1)


def test_two_ranks(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """The batches of every rank are compared in order; a checkpoint of one rank resumes on two, and one of two ranks on one."""
    alone = tmp_path / "alone"
    loops.fabric(PENSTOCK, alone / "Fabric", save_at=18)
    loops.accelerate(PENSTOCK, alone / "Accelerate", save_at=18)
    run_program(Path(loops.__file__), str(tmp_path), *(["peers"] if WRITING else []), ranks=2)
    ranks = [json.loads((tmp_path / f"loops{rank}.json").read_text()) for rank in (0, 1)]
    for trainer in TRAINERS:
        for point in POINTS:
            for kind in ranks[0][f"{trainer}, {point}"]:
                seen = [rank[f"{trainer}, {point}"][kind] for rank in ranks]
                note(trainer, point, "2", kind, all(map(exact, seen)))
                if kind == PENSTOCK:
                    assert all(map(exact, seen)), (trainer, point)
                    assert [one["whole"] for one in seen] == [loops.right(rank, 2) for rank in (0, 1)]
    for rank in ranks:
        mixed, bare = rank["evaluated"][:2], rank["evaluated"][2:]
        assert mixed == bare  # the trainer's own, with a DataLoader: every sample once, in order, on every rank
        assert all(predicted == [float(i) for i in range(n)] for n, _, predicted, _ in mixed[0])
        assert exact(rank["mixed in"])
        assert rank["mixed in"]["logs"] == rank["mixed in"]["logs again"]
    assert [rank["mixed in"]["whole"] for rank in ranks] == [
        [[i % 1000 for i in batch] for batch in loops.right(rank, 2)] for rank in (0, 1)
    ]
    whole = [value for batch in loops.right(0, 1)[18:] for value in batch]
    for trainer in ("Fabric", "Accelerate"):
        onto_two = [
            value
            for pair in zip(*(rank["change"][trainer] for rank in ranks), strict=True)
            for both in zip(*pair, strict=True)
            for value in both
        ]
        note(trainer, "mid-epoch", "1 → 2", PENSTOCK, onto_two == whole)
        assert onto_two == whole
        place = tmp_path / f"{trainer} {PENSTOCK} mid-epoch"
        resumed = loops.fabric(PENSTOCK, place, resume=True) if trainer == "Fabric" else loops.accelerate(PENSTOCK, place, resume=True)[0]
        onto_one = [value for batch in resumed for value in batch]
        note(trainer, "mid-epoch", "2 → 1", PENSTOCK, onto_one == whole)
        assert onto_one == whole


def test_fabric_refuses_to_set_the_loader_up() -> None:
    """The message is Fabric's; the guide says what to do instead."""
    from lightning.fabric import Fabric

    with loops.new_loader() as loader, pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
