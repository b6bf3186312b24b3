"""The Hugging Face Trainer's callback and mixin: what they read and write, and what they refuse."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

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
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert list(state["stateful_callbacks"]["HFTrainerCallback"]["attributes"]["loader"]) == ["penstock"]


@pytest.mark.parametrize("restore", [False, True])
def test_the_callback_reads_the_folder_that_the_trainer_resumes_from(tmp_path: Path, restore: bool) -> None:
    """Fails if the callback looks for the state in output_dir, where another run may have left a checkpoint of the same
    step."""
    whole, _ = loops.hugging_face(tmp_path / "one", save_at=12)
    loops.hugging_face(tmp_path / "other", save_at=12, loader=loops.new_loader(collate_fn=loops.named, tail="drop"))
    shutil.copytree(tmp_path / "one" / "checkpoint-12", tmp_path / "elsewhere" / "checkpoint-12")
    _empty(tmp_path / "one" / "checkpoint-12" / "trainer_state.json")
    again = {"folder": tmp_path / "one", "restore_callback_states_from_checkpoint": restore}
    assert (
        loops.hugging_face(again.pop("folder"), resume_from=tmp_path / "elsewhere" / "checkpoint-12", **again)[0]
        == whole[12:]
    )


def _empty(file: Path) -> None:
    """Take the loader's state out of a trainer's state, as if it had been saved without."""
    state = json.loads(file.read_text())
    del state["stateful_callbacks"]["HFTrainerCallback"]
    file.write_text(json.dumps(state))


def test_what_cannot_resume_is_refused_before_the_first_step(tmp_path: Path) -> None:
    loops.hugging_face(tmp_path, save_at=12)
    with pytest.raises(ValueError, match="ignore_data_skip=True"):
        loops.hugging_face(tmp_path, resume=12, ignore_data_skip=False)
    _empty(tmp_path / "checkpoint-12" / "trainer_state.json")
    with pytest.raises(StateError, match=r"checkpoint of step 12 has no state of a loader in its trainer_state\.json"):
        loops.hugging_face(tmp_path, resume=12)
    with pytest.raises(TypeError, match="trains from a DataLoader"):
        HFTrainerCallback().on_train_begin(None, None, None, train_dataloader=DataLoader([1]))


def test_accumulation_goes_on_with_the_same_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Windows of four divide an epoch of twelve. If windows do not divide it, the trainer itself drops the last window
    of the resumed epoch.

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
def test_the_mixin_steps_for_the_last_window_of_a_resumed_epoch(
    at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """12 batches in windows of 5. Seen to fail: the window of two made no step, with its gradients in the next one, and
    nobody said so."""
    options = {"gradient_accumulation_steps": 5, "save_steps": at, "logging_steps": 1}
    runs = []
    for checkpoint in (None, tmp_path / f"checkpoint-{at}"):
        trainer = loops.mixed_in(tmp_path, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(
            (trainer.state.global_step, loops.logs(trainer), trainer.model.layer.weight.item(), trainer.model.seen)
        )
    (steps, logs, weight, seen), (*again, seen_again) = runs
    assert (steps, [steps, logs, weight]) == (9, again)
    assert seen_again == seen[12 * (at // 3) + 5 * (at % 3) :]
    assert "no optimizer step" not in caplog.text


def test_the_mixin_resumes_with_another_batch_size(tmp_path: Path) -> None:
    """In the middle of epoch 1: the rest of it, and another epoch. Seen to fail: nothing was trained, because a run has
    18 steps of twice as many samples, and the trainer took step 18 for its last."""
    whole = loops.mixed_in(tmp_path, save_steps=18)
    whole.train()
    again = loops.mixed_in(tmp_path, save_steps=99, per_device_train_batch_size=2 * loops.B)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-18"))
    samples = [value for batch in whole.model.seen[18:] for value in batch]
    assert [value for batch in again.model.seen for value in batch] == samples
    assert again.state.global_step == again.state.max_steps == 18 + 3 + 6
    assert again.state.log_history[-2]["learning_rate"] == pytest.approx(5e-5 / 27)


def test_the_mixin_trains_all_max_steps_with_another_batch_size(tmp_path: Path) -> None:
    """From the middle of epoch 2 into epoch 3. Seen to fail: the run ended with epoch 2, because three epochs of twice
    as many steps have enough of them."""
    large = loops.mixed_in(tmp_path, save_steps=15, max_steps=15, per_device_train_batch_size=2 * loops.B)
    large.train()
    small = loops.mixed_in(tmp_path, save_steps=99, max_steps=30)
    small.train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    whole = loops.mixed_in(tmp_path, save_steps=99, max_steps=48)
    whole.train()
    assert small.model.seen == whole.model.seen[30:45]
    assert small.state.global_step == 30


def test_an_unsized_loader_resumes_in_a_later_epoch(tmp_path: Path) -> None:
    """The trainer then counts epochs wrongly, and the state overrides its set_epoch."""

    def run(**options):
        return loops.hugging_face(
            tmp_path, loader=loops.unsized_loader(collate_fn=loops.named), max_steps=30, **options
        )[0]

    whole = run(save_at=18)
    assert (
        whole
        == [list(range(1000 * e + first, 1000 * e + first + 4)) for e in range(3) for first in range(0, 48, 4)][:30]
    )
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
    """Seen to fail: `epoch` was too small by the skipped batches, and in a later epoch of an unsized loader by whole
    epochs, too."""

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
    """Seen to fail: without the mixin's callback there was no loader.json, and the resumed run trained on the first
    batches again."""
    found = loops.mixed_in_runs(tmp_path, **options)
    with Loader.from_dataset(range(options.get("n", loops.N)), batch_size=loops.B, **words) as loader:
        assert found["whole"] == [batch.tolist() for _ in range(3) for batch in loader]
    assert found["resumed"] == found["whole"][18:]
    assert found["logs"] == found["logs again"]
    assert not _Inventory.taken().processes


def test_the_mixin_needs_no_other_word(tmp_path: Path) -> None:
    """A moved checkpoint, a trainer that looks for the last checkpoint itself, and a second callback, which is not
    added."""
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


@pytest.mark.parametrize(
    "options", [{}, {"dataloader_num_workers": 2}, {"dataloader_drop_last": True}, {"eval_accumulation_steps": 1}]
)
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
    """Seen to fail: a short last batch weighed like a whole one, and a false length would have told the wrong batch the
    last."""
    found = loops.evaluated(tmp_path, True, kind)
    assert found == loops.evaluated(tmp_path, False, kind)
    assert [loss for _, loss, _, _ in found] == pytest.approx(
        [loss for _, loss, _, _ in loops.evaluated(tmp_path, True)], rel=1e-5
    )
    assert not _Inventory.taken().processes


def test_evaluation_in_mid_training_leaves_the_training_as_it_was(tmp_path: Path) -> None:
    whole = loops.mixed_in(tmp_path)
    whole.train()
    watched = loops.mixed_in(tmp_path, eval_strategy="steps", eval_steps=5)
    watched.train()
    assert [batch for batch in watched.model.seen if batch in whole.model.seen] == whole.model.seen


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainers_own_sampler_and_batch_size_count(tmp_path: Path, workers: int) -> None:
    """Fails if the mixin does not ask the trainer's sampler: rewards were then compared between different questions,
    without a word."""
    options = {"change": loops.grouped, "n": 12, "save_steps": 4, "dataloader_num_workers": workers}
    whole = loops.mixed_in(tmp_path, **options)
    whole.train()
    assert [len(batch) for batch in whole.model.seen] == [8] * 18
    asked = [batch[::4] for batch in whole.model.seen]
    assert whole.model.seen == [[i for i in batch for _ in range(4)] for batch in asked]
    epochs = [[i for batch in asked[k : k + 6] for i in batch] for k in (0, 6, 12)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for at in (4, 8):  # within the first epoch, and within the second
        resumed = loops.mixed_in(tmp_path, **options)
        resumed.train(resume_from_checkpoint=tmp_path / f"checkpoint-{at}")
        assert resumed.model.seen == whole.model.seen[at:]


def test_ranks_get_the_batches_of_the_trainers_own_sampler_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if indices are dealt one by one: joined in rank order, as such a trainer gathers them, the groups of four
    were torn.

    A state loads on another number of ranks that makes the same global batch.
    """

    def loader(rank: int, ranks: int, size: int) -> Loader:
        monkeypatch.undo()
        made = loops.mixed_in(tmp_path, change=loops.grouped, n=13, per_device_train_batch_size=size)
        for name, value in {"RANK": rank, "WORLD_SIZE": ranks}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(type(made.accelerator), "num_processes", ranks)
        return made.get_train_dataloader()

    def read(one: Loader) -> list[list[int]]:
        return [batch["x"].flatten().long().tolist() for batch in one]

    alone = loader(0, 1, 4)
    batches = iter(alone)
    head = [next(batches)["x"].flatten().long().tolist() for _ in range(2)]
    state = alone.state_dict()
    tail = [batch["x"].flatten().long().tolist() for batch in batches]
    assert [len(batch) for batch in tail] == [8, 8, 8, 8, 4]
    parts = []
    for rank in range(2):
        part = loader(rank, 2, 2)
        part.load_state_dict(state)
        parts.append(read(part))
    assert [a + b for a, b in zip(*parts, strict=True)] == [*tail[:-1], tail[-1] + head[0][:4]]


def test_a_trainers_own_sampler_decides_the_evaluation(tmp_path: Path) -> None:
    """Fails if evaluation reads the samples in dataset order, once each."""
    trainer = loops.mixed_in(tmp_path, change=loops.grouped, evaluated=loops.columns(5), per_device_eval_batch_size=4)
    first, again = (
        trainer.evaluation_loop(trainer.get_eval_dataloader(), "x").predictions.flatten().tolist() for _ in range(2)
    )
    assert first == again == [i for i in first[::4] for _ in range(4)]
    assert sorted(first[::4]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_an_evaluation_persist_on_request(persistent: bool, tmp_path: Path) -> None:
    """Fails if dataloader_persistent_workers is ignored, or if a kept loader is read for another dataset."""
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": persistent}
    trainer = loops.mixed_in(tmp_path, evaluated=loops.columns(12), **options)

    def evaluated(data: object = None) -> tuple[list[float], object]:
        loader = trainer.get_eval_dataloader(data)
        return trainer.evaluation_loop(loader, "x").predictions.flatten().tolist(), loader

    (first, by), (second, again), (other, _) = evaluated(), evaluated(), evaluated(loops.columns(7))
    assert (first, second, other) == ([float(i) for i in range(12)], first, first[:7])
    assert (by is again) is persistent


def test_samples_are_grouped_by_length_as_by_the_trainers_own_sampler(tmp_path: Path) -> None:
    """Fails if a sampling strategy of the trainer is refused although its sampler can be asked."""
    data = [
        {"x": torch.tensor([float(i)]), "labels": torch.tensor([0.0]), "input_ids": [0] * (i % 5)} for i in range(80)
    ]

    def trained(checkpoint: Path | None = None) -> list[list[int]]:
        trainer = loops.mixed_in(tmp_path, train_sampling_strategy="group_by_length", save_steps=3)
        trainer.train_dataset = data
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.model.seen

    whole = trained()
    assert sorted(i for batch in whole[:20] for i in batch) == list(range(80))
    # shuffled batches: about 60
    assert sum(max(i % 5 for i in batch) - min(i % 5 for i in batch) for batch in whole[:20]) < 40
    assert trained(tmp_path / "checkpoint-3") == whole[3:]


def test_what_the_mixin_cannot_do_is_refused(tmp_path: Path) -> None:
    refused = {
        "train_sampling_strategy='batch_rebalance'.*override get_train_dataloader": {
            "train_sampling_strategy": "batch_rebalance"
        },
        "split_batches=True.*divide the batch size": {"accelerator_config": {"split_batches": True}},
        "even_batches=False.*leave out HFTrainerMixin": {"accelerator_config": {"even_batches": False}},
    }
    for message, options in refused.items():
        trainer = loops.mixed_in(tmp_path, **options)
        for make in (trainer.train, trainer.evaluate):
            with pytest.raises(ValueError, match=message):
                make()
    trainer = loops.mixed_in(tmp_path)
    trainer.get_tp_size = lambda: 2
    with pytest.raises(ValueError, match="does not know the mesh"):
        trainer.get_train_dataloader()
    trainer.train_dataset = trainer.eval_dataset = None
    for make in (trainer.get_train_dataloader, trainer.get_eval_dataloader):
        with pytest.raises(ValueError, match="requires an? (train|eval)_dataset"):
            make()


def test_a_mixin_behind_the_trainer_is_refused() -> None:
    """Seen to fail: it did nothing, and a resumed run got other samples without a word."""
    from transformers import Trainer

    from penstock.integrations.transformers import HFTrainerMixin

    class Right(HFTrainerMixin, Trainer):
        pass

    class Below(Right):
        pass

    with pytest.raises(
        TypeError, match=r"Trainer comes before HFTrainerMixin.*Write class Wrong\(HFTrainerMixin, Trainer\)"
    ):

        class Wrong(Trainer, HFTrainerMixin):
            pass
