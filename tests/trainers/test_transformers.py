"""The Hugging Face Trainer's callback: where it reads and writes, and what it refuses."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from typing import TYPE_CHECKING

from tests.trainers import loops
from tests.trainers.loops import PENSTOCK
from torch.utils.data import DataLoader

from penstock import StateError
from penstock.integrations.transformers import HFTrainerCallback

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
    pytest.mark.filterwarnings("ignore:Counted has no state_dict"),
]


def test_the_state_is_in_the_checkpoint_and_whole(tmp_path: Path) -> None:
    loops.hugging_face(PENSTOCK, tmp_path, save_at=12)
    for step in (12, 24, 36):
        folder = tmp_path / f"checkpoint-{step}"
        assert list(json.loads((folder / "loader.json").read_text())) == ["penstock"]
        assert not (folder / "loader.new").exists()


def test_what_cannot_resume_is_refused_before_the_first_step(tmp_path: Path) -> None:
    loops.hugging_face(PENSTOCK, tmp_path, save_at=12)
    with pytest.raises(ValueError, match="ignore_data_skip=True"):
        loops.hugging_face(PENSTOCK, tmp_path, resume=12, ignore_data_skip=False)
    (tmp_path / "checkpoint-12" / "loader.json").unlink()
    with pytest.raises(StateError, match=r"checkpoint-12/loader\.json is not there"):
        loops.hugging_face(PENSTOCK, tmp_path, resume=12)
    with pytest.raises(TypeError, match="trains from a DataLoader"):
        HFTrainerCallback().on_train_begin(None, None, None, train_dataloader=DataLoader([1]))


def test_accumulation_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    """Windows of four divide an epoch of twelve. Where they do not, the trainer itself forgets the last window of the epoch it resumes."""
    whole, steps = loops.hugging_face(PENSTOCK, tmp_path / "four", save_at=4, gradient_accumulation_steps=4)
    resumed, again = loops.hugging_face(PENSTOCK, tmp_path / "four", resume=4, gradient_accumulation_steps=4)
    assert (resumed, again) == (whole[16:], steps)
    whole, steps = loops.hugging_face(PENSTOCK, tmp_path / "five", save_at=4, gradient_accumulation_steps=5)
    resumed, again = loops.hugging_face(PENSTOCK, tmp_path / "five", resume=4, gradient_accumulation_steps=5)
    assert (resumed, again) == (whole[17:], steps - 1)  # Its step, not our batches: the guide says so.


def test_an_unsized_loader_resumes_in_a_later_epoch(tmp_path: Path) -> None:
    """The trainer then counts epochs wrongly, and its set_epoch yields to the state."""

    def run(**options):
        return loops.hugging_face(PENSTOCK, tmp_path, loader=loops.unsized_loader(collate_fn=loops.named), max_steps=30, **options)[0]

    whole = run(save_at=18)
    assert whole == [list(range(1000 * e + first, 1000 * e + first + 4)) for e in range(3) for first in range(0, 48, 4)][:30]
    assert run(resume=18) == whole[18:]
