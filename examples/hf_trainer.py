"""For the Hugging Face Trainer: one mixin, and every checkpoint of the Trainer resumes at the exact batch.

python hf_trainer.py        # needs: pip install '.[transformers]'
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from penstock.integrations.transformers import HFTrainerMixin


class Line(torch.nn.Module):
    """A line through points, and a list of the points it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, index: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += index.tolist()
        return {"loss": (self.layer(x) - labels).square().mean()}


class PenstockTrainer(HFTrainerMixin, Trainer):
    """A Trainer that trains and evaluates from penstock's loaders; ``seed`` below (or ``data_seed``) determines the
    order.
    """


def fit(folder: str, resume: Path | None = None) -> list[int]:
    """Three epochs of twelve batches, with a checkpoint every 18."""
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=3,
        per_device_train_batch_size=4,
        dataloader_num_workers=2,
        seed=42,
        save_steps=18,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    x = torch.linspace(-1, 1, 48).unsqueeze(1)
    data = [{"index": i, "x": x[i], "labels": 3 * x[i] + 1} for i in range(48)]
    model = Line()
    PenstockTrainer(model, arguments, train_dataset=data).train(
        resume_from_checkpoint=None if resume is None else str(resume)
    )
    return model.seen


def main() -> None:
    """Train once without a stop, then again from the checkpoint in the middle of the second epoch."""
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(folder)
        resumed = fit(folder, resume=Path(folder) / "checkpoint-18")
    print(
        f"single run: {len(whole)} samples; from the checkpoint: {len(resumed)}, and they are the last ones of the "
        f"single run: {resumed == whole[72:]}"
    )
    assert resumed == whole[72:]


if __name__ == "__main__":
    main()
