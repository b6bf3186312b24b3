"""Fabric, Accelerate and the Hugging Face Trainer resume exactly, on one rank, on two, and on another number of
ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.trainers import loops
from tests.trainers.loops import POINTS, TRAINERS, exact

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*(isinstance\\(treespec, LeafSpec\\)|'set_vital' is deprecated|pin_memory|srun)"
    ),
    pytest.mark.filterwarnings("ignore:Counted has no state_dict"),
]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_rank(trainer: str, point: str, tmp_path: Path) -> None:
    """Seen to fail: `AccelerateLoader` did not register the loader; the callback did not load the state."""
    result = loops.both(trainer, tmp_path, point)
    assert exact(result)
    assert result["whole"] == loops.right(0, 1)


def test_two_ranks(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """The batches of every rank are compared in order; a checkpoint of one rank resumes on two, and one of two ranks on
    one. Accelerate deals whole batches."""
    alone = tmp_path / "alone"
    loops.fabric(alone / "Fabric", save_at=18)
    loops.accelerate(alone / "Accelerate", save_at=18)
    run_program(Path(loops.__file__), str(tmp_path), ranks=2)
    ranks = [json.loads((tmp_path / f"loops{rank}.json").read_text()) for rank in (0, 1)]
    for trainer in TRAINERS:
        for point in POINTS:
            seen = [rank[f"{trainer}, {point}"] for rank in ranks]
            assert all(map(exact, seen)), (trainer, point)
            split = "batches" if trainer == "Accelerate" else "items"
            assert [one["whole"] for one in seen] == [loops.right(rank, 2, split) for rank in (0, 1)]
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
            for both in (pair if trainer == "Accelerate" else zip(*pair, strict=True))
            for value in both
        ]
        assert onto_two == whole
        place = tmp_path / f"{trainer} mid-epoch"
        resumed = loops.fabric(place, resume=True) if trainer == "Fabric" else loops.accelerate(place, resume=True)[0]
        onto_one = [value for batch in resumed for value in batch]
        assert onto_one == whole


def test_fabric_refuses_to_set_the_loader_up() -> None:
    """The message is Fabric's; the guide says what to do instead."""
    from lightning.fabric import Fabric

    with loops.new_loader() as loader, pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
