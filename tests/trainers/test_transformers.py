"""The Hugging Face Trainer's callback and mixin: what they read and write, and what they refuse."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from typing import TYPE_CHECKING

from leaks import _Inventory
from tests.trainers import loops
from torch.utils.data import DataLoader

from penstock import Loader, StateError
from penstock.integrations.transformers import HFTrainerCallback

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
    pytest.mark.filterwarnings("ignore:Counted has no state_dict"),
]


def test_the_state_is_in_the_checkpoint_and_whole(tmp_path: Path) -> None:
    loops.hugging_face(tmp_path, save_at=12)
    for step in (12, 24, 36):
        folder = tmp_path / f"checkpoint-{step}"
        assert list(json.loads((folder / "loader.json").read_text())) == ["penstock"]
        assert not (folder / "loader.new").exists()


def test_what_cannot_resume_is_refused_before_the_first_step(tmp_path: Path) -> None:
    loops.hugging_face(tmp_path, save_at=12)
    with pytest.raises(ValueError, match="ignore_data_skip=True"):
        loops.hugging_face(tmp_path, resume=12, ignore_data_skip=False)
    (tmp_path / "checkpoint-12" / "loader.json").unlink()
    with pytest.raises(StateError, match=r"checkpoint-12/loader\.json does not exist"):
        loops.hugging_face(tmp_path, resume=12)
    with pytest.raises(TypeError, match="trains from a DataLoader"):
        HFTrainerCallback().on_train_begin(None, None, None, train_dataloader=DataLoader([1]))


def test_accumulation_goes_on_with_the_same_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Windows of four divide an epoch of twelve. If windows do not divide it, the trainer itself drops the last window of the resumed epoch.

    Seen to fail: without a word.
    """
    whole, steps = loops.hugging_face(tmp_path / "four", save_at=4, gradient_accumulation_steps=4)
    resumed, again = loops.hugging_face(tmp_path / "four", resume=4, gradient_accumulation_steps=4)
    assert (resumed, again) == (whole[16:], steps)
    assert "no optimizer step" not in caplog.text
    whole, steps = loops.hugging_face(tmp_path / "five", save_at=4, gradient_accumulation_steps=5)
    resumed, again = loops.hugging_face(tmp_path / "five", resume=4, gradient_accumulation_steps=5)
    assert (resumed, again) == (whole[17:], steps - 1)  # Its step, not our batches: the guide says so.
    assert "no optimizer step for the last 2 batches of epoch 1" in caplog.text


@pytest.mark.parametrize("at", [1, 4, 6])
def test_the_mixin_steps_for_the_last_window_of_a_resumed_epoch(at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """12 batches in windows of 5. Seen to fail: the window of two made no step, with its gradients in the next one, and nobody said so."""
    options = {"gradient_accumulation_steps": 5, "save_steps": at, "logging_steps": 1}
    runs = []
    for checkpoint in (None, tmp_path / f"checkpoint-{at}"):
        trainer = loops.mixed_in(tmp_path, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append((trainer.state.global_step, loops.logs(trainer), trainer.model.layer.weight.item(), trainer.model.seen))
    (steps, logs, weight, seen), (*again, seen_again) = runs
    assert (steps, [steps, logs, weight]) == (9, again)
    assert seen_again == seen[12 * (at // 3) + 5 * (at % 3) :]
    assert "no optimizer step" not in caplog.text


def test_an_unsized_loader_resumes_in_a_later_epoch(tmp_path: Path) -> None:
    """The trainer then counts epochs wrongly, and the state overrides its set_epoch."""

    def run(**options):
        return loops.hugging_face(tmp_path, loader=loops.unsized_loader(collate_fn=loops.named), max_steps=30, **options)[0]

    whole = run(save_at=18)
    assert whole == [list(range(1000 * e + first, 1000 * e + first + 4)) for e in range(3) for first in range(0, 48, 4)][:30]
    assert run(resume=18) == whole[18:]


@pytest.mark.parametrize(
    ("loader", "at", "options"),
    [
        ("sized", 18, {}),
        ("sized", 12, {}),
        ("sized", 4, {"gradient_accumulation_steps": 4}),
        ("unsized", 6, {"max_steps": 30}),
        ("unsized", 18, {"max_steps": 30}),
        ("unsized", 24, {"max_steps": 30}),
    ],
)
def test_a_resumed_run_logs_what_one_run_logs(loader: str, at: int, options: dict[str, int], tmp_path: Path) -> None:
    """Seen to fail: `epoch` was too small by the skipped batches, and in a later epoch of an unsized loader by whole epochs, too."""

    def once(**more):
        made = {"loader": loops.unsized_loader(collate_fn=loops.named)} if loader == "unsized" else {}
        options_ = {"logging_strategy": "steps", "logging_steps": 1} | options
        return loops.logs(loops.hugging_face_trainer(tmp_path, save_at=at, **made, **options_, **more))

    assert once() == once(resume=at)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, {"shuffle": True, "seed": 3}),
        ({"data_seed": 8}, {"shuffle": True, "seed": 8}),
        ({"train_sampling_strategy": "sequential"}, {}),
        ({"dataloader_drop_last": True, "n": 50}, {"shuffle": True, "seed": 3, "drop_last": True}),
        ({"n": 50}, {"shuffle": True, "seed": 3}),
        ({"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3}, {"shuffle": True, "seed": 3}),
    ],
)
def test_the_mixin_builds_the_loader_of_the_arguments(options: dict, words: dict, tmp_path: Path) -> None:
    """Seen to fail: without the mixin's callback there was no loader.json, and the resumed run trained on the first batches again."""
    found = loops.mixed_in_runs(tmp_path, **options)
    with Loader.from_dataset(range(options.get("n", loops.N)), batch_size=loops.B, **words) as loader:
        assert found["whole"] == [batch.tolist() for _ in range(3) for batch in loader]
    assert found["resumed"] == found["whole"][18:]
    assert found["logs"] == found["logs again"]
    assert not _Inventory.taken().processes


def test_the_mixin_needs_no_other_word(tmp_path: Path) -> None:
    """A moved checkpoint, a trainer that looks for the last checkpoint itself, and a second callback, which is not added."""
    whole = loops.mixed_in(tmp_path, save_steps=18)
    whole.train()
    for folder in (tmp_path / "moved" / "elsewhere", None):
        if folder is not None:
            shutil.copytree(tmp_path / "checkpoint-18", folder)
        else:
            shutil.rmtree(tmp_path / "checkpoint-36")
        resumed = loops.mixed_in(tmp_path, save_steps=99)
        resumed.train(resume_from_checkpoint=True if folder is None else folder)
        assert resumed.model.seen == whole.model.seen[18:]
    assert sum(isinstance(one, HFTrainerCallback) for one in whole.callback_handler.callbacks) == 1


@pytest.mark.parametrize("options", [{}, {"dataloader_num_workers": 2}, {"dataloader_drop_last": True}, {"eval_accumulation_steps": 1}])
def test_the_mixin_evaluates_as_the_trainer_does(options: dict, tmp_path: Path) -> None:
    """Seen to fail: with a bare Loader the last batch's loss was weighted like that of a full batch."""
    found = loops.evaluated(tmp_path, True, **options)
    assert found == loops.evaluated(tmp_path, False, **options)
    if "dataloader_drop_last" not in options:
        assert all(predicted == [float(i) for i in range(n)] for n, _, predicted, _ in found)
    assert not _Inventory.taken().processes


@pytest.mark.filterwarnings("ignore:(Stream|Claiming) has (no state_dict|a length)", "ignore:Length of IterableDataset")
@pytest.mark.parametrize("kind", [loops.Stream, loops.Claiming])
def test_the_mixin_evaluates_a_stream_as_the_trainer_does(kind: type, tmp_path: Path) -> None:
    """Seen to fail: a short last batch weighed like a whole one, and a false length would have told the wrong batch the last."""
    found = loops.evaluated(tmp_path, True, kind)
    assert found == loops.evaluated(tmp_path, False, kind)
    assert [loss for _, loss, _, _ in found] == pytest.approx([loss for _, loss, _, _ in loops.evaluated(tmp_path, True)], rel=1e-5)
    assert not _Inventory.taken().processes


def test_evaluation_in_mid_training_leaves_the_training_as_it_was(tmp_path: Path) -> None:
    whole = loops.mixed_in(tmp_path)
    whole.train()
    watched = loops.mixed_in(tmp_path, eval_strategy="steps", eval_steps=5)
    watched.train()
    assert [batch for batch in watched.model.seen if batch in whole.model.seen] == whole.model.seen


def test_what_the_mixin_cannot_do_is_refused(tmp_path: Path) -> None:
    for strategy in ("group_by_length", "batch_rebalance"):
        trainer = loops.mixed_in(tmp_path, train_sampling_strategy=strategy)
        for make in (trainer.train, trainer.evaluate):
            with pytest.raises(ValueError, match=f"train_sampling_strategy='{strategy}' needs the lengths.*override get_train_dataloader"):
                make()
    trainer = loops.mixed_in(tmp_path)
    trainer.get_tp_size = lambda: 2
    with pytest.raises(ValueError, match="does not know the mesh"):
        trainer.get_train_dataloader()
    trainer.train_dataset = trainer.eval_dataset = None
    for make in (trainer.get_train_dataloader, trainer.get_eval_dataloader):
        with pytest.raises(ValueError, match="Pass one to the Trainer"):
            make()


def test_a_mixin_behind_the_trainer_is_refused() -> None:
    """Seen to fail: it did nothing, and a resumed run got other samples without a word."""
    from transformers import Trainer

    from penstock.integrations.transformers import HFTrainerMixin

    class Right(HFTrainerMixin, Trainer):
        pass

    class Below(Right):
        pass

    with pytest.raises(TypeError, match=r"Trainer comes before HFTrainerMixin.*Write class Wrong\(HFTrainerMixin, Trainer\)"):

        class Wrong(Trainer, HFTrainerMixin):
            pass
