"""Metric learning in Lightning, P classes x K samples per batch: killed_lightning.py --folder FOLDER [--resume]
[--die-after PLACE].

If a run is killed between a checkpoint on an epoch's last batch and the end of that epoch, Lightning skips the
validation of that epoch, also with a DataLoader. Each step and each validation is recorded, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import Dataset, Sampler

import penstock
from penstock.integrations.lightning import LightningCallback

if TYPE_CHECKING:
    from collections.abc import Iterator

CLASSES, P, K = 16, 4, 3


class Faces(Dataset):
    """Each class is a point in space. Its samples are near the point, and augmentation moves them, drawing from the
    global generators."""

    def __init__(self, per_class: int, *, augment: bool) -> None:
        generator = torch.Generator().manual_seed(per_class)
        self.labels = torch.arange(CLASSES).repeat(per_class)
        self.points = torch.randn(CLASSES, 6, generator=generator)[self.labels] + 0.3 * torch.randn(
            len(self.labels), 6, generator=generator
        )
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = self.points[index]
        if self.augment:
            point = random.uniform(0.9, 1.1) * point + 0.1 * torch.randn(6)
        return point, self.labels[index]


class PKBatchSampler(Sampler[list[int]]):
    """P classes, and K samples of each; an epoch covers all classes twice. It draws from the global generators, and
    does not know the epoch."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.members = [torch.nonzero(labels == one).flatten().tolist() for one in range(CLASSES)]

    def __len__(self) -> int:
        return 2 * CLASSES // P

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(2):
            for chosen in torch.randperm(CLASSES).split(P):
                yield [index for one in chosen.tolist() for index in random.sample(self.members[one], K)]


class FacesModule(LightningDataModule):
    def train_dataloader(self) -> penstock.Loader:
        faces = Faces(10, augment=True)
        return penstock.Loader.from_dataset(faces, batch_sampler=PKBatchSampler(faces.labels), num_workers=2)

    def val_dataloader(self) -> penstock.Loader:
        return penstock.Loader.from_dataset(
            Faces(3, augment=False), batch_size=16, num_workers=1, prefetch_next_epoch=False
        )


class Embedder(LightningModule):
    """Learns to place samples of one class near each other."""

    def __init__(self, folder: Path, die_after: str | None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.folder, self.die_after = folder, die_after
        self.rng: Any = None
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        points, labels = batch
        places = self.net(points)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        distances = (places.unsqueeze(0) - places.unsqueeze(1)).square().sum(-1)
        return torch.where(same, distances, torch.relu(2 - distances)).mean()

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        self.record(at=f"step-{self.global_step + 1}", loss=loss.item(), lr=self.lr_schedulers().get_last_lr())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:  # runs after all callbacks, so after the checkpoint
        self.die(f"step-{self.global_step}")

    def on_validation_epoch_start(self) -> None:
        self.losses = []

    def validation_step(self, batch: Any) -> None:
        self.losses.append(self.loss(batch).item())

    def on_train_epoch_end(self) -> None:
        self.record(at=f"epoch-{self.current_epoch}", validation=self.losses, lr=self.lr_schedulers().get_last_lr())

    def on_train_epoch_start(self) -> None:
        self.die(f"epoch-{self.current_epoch - 1}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    # Lightning's checkpoints hold everything except the random state.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = torch.get_rng_state(), random.getstate(), self.at

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.rng = checkpoint["rng"]

    def on_train_start(self) -> None:
        if self.rng is not None:
            torch.set_rng_state(self.rng[0])
            random.setstate(self.rng[1])
            self.record(resumed=self.rng[2])

    def record(self, **values: object) -> None:
        self.at = values.get("at", "")
        with (self.folder / "records-0.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def die(self, place: str) -> None:
        """Die like a machine that is preempted."""
        if self.die_after == place:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die-after")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    arguments.folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = arguments.folder.resolve()
    each = {"dirpath": folder, "save_top_k": -1, "enable_version_counter": False}
    each_4_steps = ModelCheckpoint(filename="{step}", every_n_train_steps=4, **each)  # also on an epoch's last batch
    each_epoch = ModelCheckpoint(filename="{step}-end", save_on_train_epoch_end=True, **each)  # after the validation
    trainer = Trainer(
        callbacks=[each_4_steps, each_epoch, LightningCallback()],
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = sorted(
        folder.glob("step=*.ckpt"),
        key=lambda file: (int(file.stem.removesuffix("-end")[5:]), file.stem.endswith("-end")),
    )
    model = Embedder(folder, arguments.die_after)
    trainer.fit(model, datamodule=FacesModule(), ckpt_path=saved[-1] if arguments.resume and saved else None)


if __name__ == "__main__":
    main()
