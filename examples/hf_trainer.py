"""The Hugging Face Trainer: return the loader, add the callback, and let it not skip by reading.

python hf_trainer.py        # needs: pip install 'penstock[trainers]'
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import penstock
from penstock.integrations.transformers import HFTrainerCallback


class Line(torch.nn.Module):
    """A line through points, and a list of the points it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, index: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += index.tolist()
        return {"loss": (self.layer(x) - labels).square().mean()}


class PenstockTrainer(Trainer):
    """A Trainer that trains from a `penstock.Loader`."""

    def get_train_dataloader(self) -> penstock.Loader:
        x = torch.linspace(-1, 1, 48).unsqueeze(1)
        data = [{"index": i, "x": x[i], "labels": 3 * x[i] + 1} for i in range(48)]
        return penstock.Loader.from_dataset(data, batch_size=4, shuffle=True, num_workers=2)


def fit(folder: str, resume: Path | None = None) -> list[int]:
    """Three epochs of twelve batches, with a checkpoint every 18."""
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=3,
        save_steps=18,
        ignore_data_skip=True,  # the loader jumps; the trainer would read and throw away
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    model = Line()
    PenstockTrainer(model, arguments, callbacks=[HFTrainerCallback()]).train(resume_from_checkpoint=None if resume is None else str(resume))
    return model.seen


def main() -> None:
    """Train in one go, then again from the checkpoint in the middle of the second epoch."""
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(folder)
        resumed = fit(folder, resume=Path(folder) / "checkpoint-18")
    print(
        f"one run: {len(whole)} samples; from the checkpoint: {len(resumed)}, and they are the last of the one run: {resumed == whole[72:]}"
    )
    assert resumed == whole[72:]


if __name__ == "__main__":
    main()
