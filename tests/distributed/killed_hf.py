"""A Hugging Face Trainer over ragged token lists, with penstock's loaders: killed_hf.py --folder FOLDER [--resume]
[--die-after PLACE] [--evaluate WHEN].

The Trainer itself saves the random state, the optimizer and the scheduler. Each step and each evaluation is recorded,
to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import penstock
from penstock.integrations.transformers import HFTrainerCallback

if TYPE_CHECKING:
    from transformers import TrainerState

CLASSES, WORDS, MASK = 3, 50, 1


def sentences(count: int) -> list[dict[str, Any]]:
    """Lists of 3 to 12 tokens, each with a class to learn."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(3, 13, (count,), generator=generator).tolist()
    tokens = [torch.randint(2, WORDS, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "label": sum(ids) % CLASSES} for ids in tokens]


def padded(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(one["input_ids"]) for one in features)
    ids = torch.tensor([one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in features])
    return {"input_ids": ids, "labels": torch.tensor([one["label"] for one in features])}


def padded_and_masked(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The collator for training: it masks some tokens, drawing from torch's global generator."""
    batch = padded(features)
    batch["input_ids"][(torch.rand(batch["input_ids"].shape) < 0.1) & (batch["input_ids"] != 0)] = MASK
    return batch


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, padding_idx=0)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.dropout(self.embedding(input_ids).mean(1)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class PenstockTrainer(Trainer):
    def get_train_dataloader(self) -> penstock.Loader:
        return penstock.Loader.from_dataset(
            sentences(62), 8, True, seed=self.args.seed, collate_fn=padded_and_masked, num_workers=2
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> penstock.Loader:
        return penstock.Loader.from_dataset(
            sentences(27), 8, collate_fn=padded, tail="exact", prefetch_next_epoch=False
        )

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.loss = super().training_step(*args, **kwargs)
        return self.loss


class Recorder(TrainerCallback):
    def __init__(self, folder: Path, die_after: str | None) -> None:
        self.file = folder / "records-0.jsonl"
        self.die_after = die_after
        self.trainer: PenstockTrainer | None = None

    def record(self, **values: object) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def die(self, place: str) -> None:
        """Die like a machine that is preempted."""
        if place == self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            evaluated = any("eval_loss" in entry for entry in state.log_history if entry["step"] == state.global_step)
            self.record(resumed=epoch_of(state, kwargs) if evaluated else f"step-{state.global_step}")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.record(
            at=f"step-{state.global_step}", loss=self.trainer.loss.item(), lr=kwargs["lr_scheduler"].get_last_lr()
        )
        if not control.should_save:
            self.die(f"step-{state.global_step}")

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.die(f"step-{state.global_step}")

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        place = epoch_of(state, kwargs)
        self.record(at=place, validation=kwargs["metrics"]["eval_loss"], lr=kwargs["lr_scheduler"].get_last_lr())
        self.die(place)


def epoch_of(state: TrainerState, kwargs: dict[str, Any]) -> str:
    """The epoch that ends here."""
    return f"epoch-{state.global_step // len(kwargs['train_dataloader']) - 1}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--evaluate", default="steps")  # or epoch: after the last checkpoint of each epoch
    parser.add_argument("--die-after")
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recorder = Recorder(asked.folder, asked.die_after)
    recorder.trainer = PenstockTrainer(
        Classifier(),
        TrainingArguments(
            output_dir=str(asked.folder),
            num_train_epochs=3,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            eval_strategy=asked.evaluate,
            eval_steps=8,  # one epoch; with eval_strategy="steps" the Trainer evaluates before it saves
            save_steps=4,  # also on an epoch's last batch
            ignore_data_skip=True,  # the loader jumps; the Trainer would read and discard batches
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=sentences(62),
        eval_dataset=sentences(27),
        callbacks=[HFTrainerCallback(), recorder],
    )
    recorder.trainer.train(resume_from_checkpoint=get_last_checkpoint(str(asked.folder)) if asked.resume else None)


if __name__ == "__main__":
    main()
