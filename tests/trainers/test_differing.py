"""Lightning and the Hugging Face Trainer read every batch of epochs that differ in length, validate at their ends, and
schedule over their sum."""

from __future__ import annotations

import json
import math
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities import CombinedLoader
from tests.trainers import differing
from tests.trainers.differing import COUNTS, EPOCHS, epochs, flat, hugging_face, lightning, new_loader, steps

from penstock import Loader
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*(does not have many workers|isinstance\\(treespec, LeafSpec\\)|srun|'set_vital' is deprecated|"
        "Starting from v1.9|GPU available|ckpt_path|dirpath has changed|Checkpoint directory|pin_memory)"
    ),
]


class RestoresLate(SingleDeviceStrategy):
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


# Lightning.


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, COUNTS[1]),
        ({"limit_train_batches": 0.5}, [count // 2 for count in COUNTS[1]]),
        ({"limit_train_batches": 13}, [13, 12, 13, 12]),
        ({"accumulate_grad_batches": 4}, COUNTS[1]),
    ],
    ids=str,
)
def test_lightning_trains_and_validates_whole_epochs(options: dict[str, Any], each: list[int]) -> None:
    """Fails without the new limits (epoch 2 lost its 14th batch in silence, and epochs after a longer one were not
    validated), without those of ``val_check_batch`` alone, and without the sum of the steps (52 for 51).
    """
    model, trainer = lightning(val_check_interval=0.5, **options)
    assert model.seen == [batch for one, count in zip(epochs(), each, strict=True) for batch in one[:count]]
    assert model.limits == each
    ends = list(accumulate(each))
    halves = [half for end, count in zip(ends, each, strict=True) for half in range(end - count, end + 1, count // 2)]
    assert sorted({*model.validated} | {0}) == sorted({half for half in halves if half in model.validated} | {0})
    assert len(model.validated) == 2 * EPOCHS
    window = options.get("accumulate_grad_batches", 1)
    assert model.estimated == trainer.global_step == sum(math.ceil(count / window) for count in each)


def test_lightning_validates_once_an_epoch_by_default() -> None:
    """Fails without a new ``val_check_batch``: a shorter epoch was not validated, and a longer one before its end."""
    assert lightning()[0].validated == list(accumulate(COUNTS[1]))


def test_lightning_stops_where_the_steps_do() -> None:
    """``max_steps`` bounds the estimate. Seen to fail: the estimate was the sum."""
    model, trainer = lightning(max_steps=30, max_epochs=9)
    assert model.seen == flat(epochs())[:30]
    assert model.estimated == trainer.global_step == 30


@pytest.mark.parametrize("at", [5, 13, 14, 25, 38, 39, 45])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}], ids=str)
def test_lightning_resumes_in_epochs_of_any_length(at: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Within an epoch, on its last batch, and on the first of the next one. Fails if the limits are set only when an
    epoch begins: within the long epoch its last batch was lost."""
    window = options.get("accumulate_grad_batches", 1)
    whole, trainer = lightning(tmp_path, **options)
    ends = list(accumulate(math.ceil(count / window) for count in COUNTS[1]))
    at = min(at, ends[-1] - 2) if window == 1 else {5: 2, 13: 4, 14: 5, 25: 7, 38: 10, 39: 11, 45: 12}[at]
    epoch = next(number for number, end in enumerate(ends) if at <= end)
    into = min((at - (ends[epoch - 1] if epoch else 0)) * window, COUNTS[1][epoch])
    resumed, again = lightning(resume=tmp_path / f"step={at}.ckpt", **options)
    assert resumed.seen == whole.seen[sum(COUNTS[1][:epoch]) + into :]
    assert (resumed.estimated, again.global_step) == (whole.estimated, trainer.global_step)


def test_a_strategy_that_restores_late_has_the_limits_of_the_loaded_epoch(tmp_path: Path) -> None:
    """As FSDP does, after the lengths were read. Fails without the limits at the start: the last batch of epoch 2 was
    lost."""
    StrategyRegistry.register("late", RestoresLate, device="cpu", override=True)
    whole = lightning(tmp_path)[0]
    resumed = lightning(resume=tmp_path / "step=30.ckpt", strategy="late")[0]
    assert resumed.seen == whole.seen[30:]
    assert resumed.estimated == whole.estimated


def test_a_loader_that_was_read_before_has_the_limits_of_lightnings_first_epoch() -> None:
    """Lightning reads the length of epoch 1, and asks for epoch 0 then. Fails if the fetcher keeps that length: the
    last batch of epoch 0 was lost."""
    made = new_loader()
    for _ in made:
        pass
    assert lightning(loader=made)[0].seen == flat(epochs())


def test_a_trainer_fits_again_and_keeps_its_class() -> None:
    """Also after a fit that raised, whose hook for the end Lightning does not call.

    Seen to fail: each fit put one more class before the last one.
    """
    from lightning.pytorch import Trainer

    model, trainer = lightning(max_epochs=2)
    assert type(trainer) is Trainer
    trainer.fit_loop.max_epochs = 3

    class Fails(type(model)):
        def on_train_start(self):
            raise RuntimeError("as planned")

    for _ in range(2):
        with new_loader() as loader, pytest.raises(RuntimeError, match="as planned"):
            trainer.fit(Fails(), loader)
        assert len(type(trainer).__mro__) == len(Trainer.__mro__) + 2
    trainer.fit_loop.max_epochs = 3
    model = differing.Model()
    with new_loader() as loader:
        trainer.fit(model, loader)
    assert type(trainer) is Trainer
    assert len(model.seen) == COUNTS[1][2]  # the trainer has had two epochs, and goes on
    assert model.estimated == sum(COUNTS[1][:3])


@pytest.mark.parametrize("mode", ["min_size", "max_size"])
def test_lightning_counts_several_loaders(mode: str) -> None:
    """Seen to fail: the limits of each loader were those of epoch 0. (``max_size_cycle`` begins the next epoch of a
    loader that has ended, so it is ahead of Lightning's.)
    """
    other = Loader.from_dataset(Tagged(13), 1)
    choose = min if mode == "min_size" else max
    model = differing.Model()
    model.training_step = lambda batch: model.seen.append([]) or model.layer.weight.sum()
    each = [choose(13, count) for count in COUNTS[1]]
    trainer = differing.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[differing.LightningCallback()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with other, new_loader() as loader:
        trainer.fit(model, CombinedLoader([loader, other], mode))
    assert model.limits == each
    assert model.estimated == len(model.seen) == sum(each)


# The Hugging Face Trainer.


@pytest.mark.parametrize("window", [1, 4])
def test_the_mixin_reads_and_schedules_whole_epochs(window: int, tmp_path: Path) -> None:
    """Seen to fail: 13, 12, 13, 12 batches, and a schedule of 52 steps, of which 51 were made."""
    trainer = hugging_face(tmp_path, gradient_accumulation_steps=window, save_strategy="no")
    assert trainer.model.seen == flat(epochs())
    assert trainer.state.max_steps == trainer.state.global_step == steps(window)
    logged = trainer.state.log_history[:-1]
    assert [one["learning_rate"] for one in logged] == pytest.approx(
        [5e-5 * (1 - step / steps(window)) for step in range(steps(window))]
    )
    ends = accumulate(math.ceil(count / window) for count in COUNTS[1])
    assert [logged[end - 1]["epoch"] for end in ends] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"num_train_epochs": 2.5}, 13 + 12 + 7),
        ({"max_steps": 26}, 26),
        ({"max_steps": 50, "num_train_epochs": 1}, 50),
        ({"max_steps": 7, "gradient_accumulation_steps": 4}, 13 + 12),
    ],
    ids=str,
)
def test_the_mixin_ends_where_the_arguments_say(options: dict[str, Any], total: int, tmp_path: Path) -> None:
    """Seen to fail: half of the last epoch was half of the first, and a last epoch was missing."""
    trainer = hugging_face(tmp_path, save_strategy="no", **options)
    assert trainer.model.seen == flat(epochs())[:total]
    assert trainer.state.max_steps == trainer.state.global_step


@pytest.mark.parametrize(("window", "points"), [(1, [5, 13, 25, 26, 38, 39, 45]), (4, [2, 4, 7, 10, 11])])
def test_the_mixin_resumes_in_epochs_of_any_length(window: int, points: list[int], tmp_path: Path) -> None:
    """Seen to fail: step 39, the end of epoch 2, was the beginning of epoch 3 for the trainer, at 13 steps an epoch,
    and step 26 the end of epoch 1."""
    whole = hugging_face(tmp_path, gradient_accumulation_steps=window)
    before = [min(window * k, count) for count in COUNTS[1] for k in range(1, math.ceil(count / window) + 1)]
    ends = [0, *accumulate(COUNTS[1])]
    firsts = [end for end, count in zip(ends, COUNTS[1], strict=False) for _ in range(math.ceil(count / window))]
    for at in points:
        words = {"save_strategy": "no", "restore_callback_states_from_checkpoint": at == points[0]}
        again = hugging_face(tmp_path, resume=at, gradient_accumulation_steps=window, **words)
        assert again.model.seen == whole.model.seen[firsts[at - 1] + before[at - 1] :], at
        assert again.state.global_step == whole.state.global_step
        assert again.state.log_history[:-1] == whole.state.log_history[:-1]


def test_the_callback_alone_refuses_epochs_that_differ(tmp_path: Path) -> None:
    """And what the message advises works. Seen to fail: the trainer lost batches in silence."""
    with pytest.raises(
        ValueError, match=r"the epochs have 12 to 14 batches.*Write class MyTrainer\(HFTrainerMixin, Trainer\)"
    ):
        hugging_face(tmp_path, mixin=False)
    trainer = hugging_face(tmp_path, mixin=False, count=False, max_steps=51, save_strategy="no")
    assert trainer.model.seen == flat(epochs())


# Ranks.


def test_two_ranks(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """Fails if ranks of unequal length are looked for in the first epoch only: then DDP hangs."""
    run_program(Path(differing.__file__), str(tmp_path), ranks=2)
    for rank in (0, 1):
        seen, right = json.loads((tmp_path / f"rank{rank}.json").read_text()), flat(epochs(rank, 2))
        assert seen["lightning"] == seen["hf"] == right
        assert seen["lightning again"] == seen["hf again"] == right[14:]
        assert seen["estimated"] == seen["hf steps"] == [steps(ranks=2)] * 2
        assert seen["refused"].startswith("the ranks have [5, 4] training batches per epoch")
