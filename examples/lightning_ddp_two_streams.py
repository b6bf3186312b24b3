"""Lightning DDP with a two-stream batch sampler: labelled and unlabelled samples in every batch, divided over two ranks.

A DataLoader with this sampler ends in an error under Lightning, or trains every labelled sample on every rank.

python lightning_ddp_two_streams.py        # needs: pip install 'torch-penstock[lightning]'
"""

from __future__ import annotations

import logging
import warnings
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Sampler, TensorDataset

import penstock
from penstock.integrations.lightning import LightningCallback

if TYPE_CHECKING:
    from collections.abc import Iterator

LABELLED, UNLABELLED = range(20), range(20, 100)


class TwoStreamBatchSampler(Sampler[list[int]]):
    """Every labelled index once per epoch, ``size`` per batch, plus as many unlabelled ones, drawn again in each epoch."""

    def __init__(self, labelled: range, unlabelled: range, size: int) -> None:
        self.labelled, self.unlabelled, self.size = labelled, unlabelled, size

    def __len__(self) -> int:
        return len(self.labelled) // self.size

    def __iter__(self) -> Iterator[list[int]]:
        labelled = torch.randperm(len(self.labelled)).split(self.size)  # from torch's generator: penstock seeds it by (seed, epoch)
        for places in labelled[: len(self)]:
            others = torch.randint(len(self.unlabelled), (self.size,))
            yield [self.labelled[i] for i in places] + [self.unlabelled[i] for i in others]


class Student(LightningModule):
    """Keeps the labelled indices that this rank has trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        index, x = batch
        labelled = index < len(LABELLED)
        self.seen += index[labelled].tolist()
        return (self.layer(x[labelled]) - x[labelled]).square().mean() + self.layer(x[~labelled]).square().mean()

    def on_train_epoch_end(self) -> None:
        ranks: list[list[int]] = [[] for _ in range(self.trainer.world_size)]
        dist.all_gather_object(ranks, self.seen)
        once = sorted(chain(*ranks)) == list(LABELLED)
        if self.global_rank == 0:
            shares = " + ".join(str(len(seen)) for seen in ranks)
            print(f"epoch {self.current_epoch}: {shares} labelled samples on the ranks, each exactly once: {once}", flush=True)
        assert once
        self.seen = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Two epochs on two ranks, which Lightning starts."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    data = TensorDataset(torch.arange(100), torch.linspace(-1, 1, 100).unsqueeze(1))
    with penstock.Loader.from_dataset(data, batch_sampler=TwoStreamBatchSampler(LABELLED, UNLABELLED, 2), tail="drop") as loader:
        trainer = Trainer(
            callbacks=[LightningCallback()],
            max_epochs=2,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(Student(), loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
