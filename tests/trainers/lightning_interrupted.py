"""Trains forever on two ranks, each with two worker processes. Each rank prints a line, and the program waits for an interrupt."""

from __future__ import annotations

import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer

import penstock
from penstock.integrations.lightning import LightningCallback
from penstock.testing import Tagged


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            sys.stdout.write(f"training {os.getpid()}\n")  # print may write the line in two pieces, and both ranks write into one pipe
            sys.stdout.flush()
        return self.layer(batch.float().unsqueeze(1)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


if __name__ == "__main__":
    loader = penstock.Loader.from_dataset(Tagged(24), batch_size=1, infinite=True, num_workers=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=10**9,
        callbacks=[LightningCallback()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), loader)
