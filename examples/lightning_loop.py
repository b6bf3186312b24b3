"""For Lightning: one callback, and every checkpoint of the Trainer resumes at the exact batch.

python lightning_loop.py        # needs: pip install '.[lightning]'
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

import penstock
from penstock.integrations.lightning import LightningCallback


class Line(LightningModule):
    """A line through points, and a list of the points it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        index, x, y = batch
        self.seen += index.tolist()
        return (self.layer(x) - y).square().mean()

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("error", (self.layer(batch[1]) - batch[2]).abs().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, resume: Path | None = None) -> list[int]:
    """Three epochs of twelve batches, with a checkpoint every 18 batches."""
    x = torch.linspace(-1, 1, 48).unsqueeze(1)
    data = TensorDataset(torch.arange(48), x, 3 * x + 1)
    with (
        penstock.Loader.from_dataset(data, batch_size=4, shuffle=True, num_workers=2) as train,
        penstock.Loader.from_dataset(
            data, batch_size=16, num_workers=1, prefetch_next_epoch=False
        ) as validation,  # idle, with its workers alive, between validations
    ):
        trainer = Trainer(
            callbacks=[LightningCallback(), ModelCheckpoint(folder, "{step}", every_n_train_steps=18, save_top_k=-1)],
            max_epochs=3,
            check_val_every_n_epoch=3,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Line()
        trainer.fit(model, train, validation, ckpt_path=resume)
    return model.seen


def main() -> None:
    """Train once without a stop, then again from the checkpoint in the middle of the second epoch."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(Path(folder))
        resumed = fit(Path(folder), resume=Path(folder) / "step=18.ckpt")
    print(
        f"single run: {len(whole)} samples; from the checkpoint: {len(resumed)}, and they are the last ones of the "
        f"single run: {resumed == whole[72:]}"
    )
    assert resumed == whole[72:]


if __name__ == "__main__":
    main()
