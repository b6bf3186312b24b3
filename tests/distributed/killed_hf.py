"""A Hugging Face Trainer over ragged token lists, ported from DataLoader; killed at any point, it resumes bit for bit.

python killed_hf.py --resume            # continues from the last checkpoint, if there is one

The lines marked ``new:`` are not in the script with DataLoaders. The Trainer itself saves the random state, the optimizer and the scheduler.
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
    from transformers import TrainerControl, TrainerState

CLASSES, WORDS, MASK = 3, 50, 1


def sentences(count: int) -> list[dict[str, Any]]:
    """Lists of 3 to 12 tokens, each with a class to learn."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(3, 13, (count,), generator=generator).tolist()
    tokens = [torch.randint(2, WORDS, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "label": sum(ids) % CLASSES} for ids in tokens]


def pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest sentence."""
    longest = max(len(one["input_ids"]) for one in features)
    ids = torch.tensor([one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in features])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([one["label"] for one in features])}


def pad_and_mask(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The collator for training: it masks some tokens, drawing from torch's global generator."""
    batch = pad(features)
    batch["input_ids"][(torch.rand(batch["input_ids"].shape) < 0.1) & (batch["attention_mask"] == 1)] = MASK
    return batch


class Classifier(nn.Module):
    """A tiny model, defined here so that nothing is downloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, padding_idx=0)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = attention_mask.unsqueeze(-1)
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.head(self.dropout(mean))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class PenstockTrainer(Trainer):
    """The Trainer, with penstock's loaders."""

    def get_train_dataloader(self) -> penstock.Loader:  # new:
        return penstock.Loader.from_dataset(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=True,
            seed=self.args.seed,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> penstock.Loader:  # new:
        return penstock.Loader.from_dataset(
            self.eval_dataset, batch_size=self.args.per_device_eval_batch_size, collate_fn=pad, tail="exact", prefetch_next_epoch=False
        )

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.loss = super().training_step(*args, **kwargs)
        return self.loss


class Recorder(TrainerCallback):
    """Records each step and each evaluation, to the last bit."""

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

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step:
            evaluated = any("eval_loss" in entry for entry in state.log_history if entry["step"] == state.global_step)
            self.record(resumed=epoch_of(state, kwargs) if evaluated else f"step-{state.global_step}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.record(at=f"step-{state.global_step}", loss=self.trainer.loss.item(), lr=kwargs["lr_scheduler"].get_last_lr())
        if not control.should_save:
            self.die(f"step-{state.global_step}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.die(f"step-{state.global_step}")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        place = epoch_of(state, kwargs)
        self.record(at=place, validation=kwargs["metrics"]["eval_loss"], lr=kwargs["lr_scheduler"].get_last_lr())
        self.die(place)


def epoch_of(state: TrainerState, kwargs: dict[str, Any]) -> str:
    """The epoch that ends here."""
    return f"epoch-{state.global_step // len(kwargs['train_dataloader']) - 1}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("killed_hf_run"), help="for the checkpoints and the records")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint, if there is one")
    parser.add_argument(
        "--evaluate",
        choices=["steps", "epoch"],
        default="steps",
        help="epoch: after the last checkpoint of each epoch; a run resumed from there skips it, also with a DataLoader",
    )
    parser.add_argument("--die-after", metavar="PLACE", help="step-N or epoch-N: die after it")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recorder = Recorder(arguments.folder, arguments.die_after)
    if not arguments.resume:
        recorder.file.unlink(missing_ok=True)
    recorder.trainer = PenstockTrainer(
        Classifier(),
        TrainingArguments(
            output_dir=str(arguments.folder),
            num_train_epochs=3,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            lr_scheduler_type="linear",
            dataloader_num_workers=2,
            eval_strategy=arguments.evaluate,
            eval_steps=8,  # one epoch; with eval_strategy="steps" the Trainer evaluates before it saves
            save_steps=4,  # also on an epoch's last batch
            ignore_data_skip=True,  # new: the loader jumps; the Trainer would read and discard batches
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        data_collator=pad_and_mask,
        train_dataset=sentences(62),
        eval_dataset=sentences(27),
        callbacks=[HFTrainerCallback(), recorder],  # new: HFTrainerCallback
    )
    last = get_last_checkpoint(str(arguments.folder)) if arguments.resume else None
    recorder.trainer.train(resume_from_checkpoint=last)
    print(f"{recorder.trainer.state.global_step} steps; the last loss is {recorder.trainer.loss.item():.4f}")


if __name__ == "__main__":
    main()
