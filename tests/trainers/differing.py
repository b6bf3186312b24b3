"""Lightning and the Hugging Face Trainer over a loader whose epochs differ in length.

Imported by the tests, where it runs in one process; as a script on two, which the tests start:

    python differing.py FOLDER

Every rank writes what it saw to FOLDER/rank<r>.json.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import penstock
from penstock.integrations.lightning import LightningCallback
from penstock.testing import Tagged

N, EPOCHS = 60, 4
LENGTHS = np.random.default_rng(2).lognormal(3, 1, N).astype(int).clip(1, 200)
COUNTS = {1: [13, 12, 14, 12], 2: [6, 6, 7, 6]}
"""The batches of each epoch on each rank."""


def new_loader(budget: int = 300, count: bool = True, **options: Any) -> penstock.Loader[Any]:
    """Epoch 2 is the longest one, and epoch 0 longer than the others."""
    groups = penstock.Buckets(LENGTHS, budget, block=16, count=count)
    return penstock.Loader.from_dataset(Tagged(N), groups=groups, shuffle=True, seed=0, **options)


def epochs(rank: int = 0, ranks: int = 1) -> list[list[list[int]]]:
    """The batches of each epoch, of a loop that only reads."""
    with new_loader(rank=rank, world_size=ranks) as made:
        return [[batch.tolist() for batch in made] for _ in range(EPOCHS)]


def flat(of_epochs: list[list[list[int]]]) -> list[list[int]]:
    return [batch for one in of_epochs for batch in one]


def steps(accumulate: int = 1, ranks: int = 1) -> int:
    """Optimizer steps in all epochs: the last window of an epoch may be short."""
    return sum(math.ceil(count / accumulate) for count in COUNTS[ranks])


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self.validated: list[int] = []  # after how many batches of this run
        self.limits: list[float] = []  # Lightning's number of batches, as each epoch begins

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(batch.tolist())
        return self.layer(batch.float().unsqueeze(1)).mean() / 1000

    def on_train_epoch_start(self) -> None:
        self.limits.append(self.trainer.num_training_batches)

    def validation_step(self, batch: torch.Tensor) -> None:
        self.validated.append(len(self.seen))

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
        # it raises if it is stepped once more
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-6, total_steps=int(self.estimated))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def lightning(
    folder: Path | None = None, resume: Path | None = None, ranks: int = 1, loader: Any = None, **options: Any
) -> tuple[Model, Trainer]:
    """A run with Lightning; with ``folder``, there is a checkpoint after every step."""
    made = new_loader() if loader is None else loader
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "strategy": "ddp" if ranks > 1 else "auto"} | options
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        callbacks=[LightningCallback(), *([saver] if folder is not None else [])],
        enable_checkpointing=folder is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = Model()
    try:
        trainer.fit(model, made, DataLoader([0]), ckpt_path=resume)
    finally:
        for one in made if isinstance(made, list) else [made]:
            one.close()
    return model, trainer


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(x.flatten().long().tolist())
        return {"loss": self.layer(x).mean() / 1000}


def named(values: list[int]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(values, dtype=torch.float32).unsqueeze(1)}


def hugging_face(
    folder: Path, resume: int | None = None, mixin: bool = True, count: bool = True, **options: Any
) -> Any:
    """The Hugging Face Trainer after its run, with an own loader; there is a checkpoint after every step."""
    from transformers import Trainer as HFTrainer
    from transformers import TrainingArguments

    from penstock.integrations.transformers import HFTrainerCallback, HFTrainerMixin

    made = new_loader(count=count, collate_fn=named)

    class Own(*([HFTrainerMixin] if mixin else []), HFTrainer):
        def get_train_dataloader(self) -> Any:
            return made

    options = {"num_train_epochs": EPOCHS, "save_steps": 1, "logging_steps": 1, "ignore_data_skip": True} | options
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **options)
    trainer = Own(Regression(), arguments, callbacks=[] if mixin else [HFTrainerCallback()])
    try:
        trainer.train(resume_from_checkpoint=resume and str(folder / f"checkpoint-{resume}"))
    finally:
        made.close()
    return trainer


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """What this rank has seen."""
    model, trainer = lightning(folder / "lightning", ranks=2)
    seen: dict[str, Any] = {"lightning": model.seen, "estimated": [model.estimated, trainer.global_step]}
    seen["lightning again"] = lightning(resume=folder / "lightning" / "step=14.ckpt", ranks=2)[0].seen
    try:
        lightning(loader=new_loader(500, tail="exact"), ranks=2)
    except penstock.GraphError as exc:
        seen["refused"] = str(exc)
    whole = hugging_face(folder / "hf", logging_strategy="no")
    seen |= {"hf": whole.model.seen, "hf steps": [whole.state.max_steps, whole.state.global_step]}
    again = hugging_face(folder / "hf", resume=14, save_strategy="no", logging_strategy="no")
    return {**seen, "hf again": again.model.seen}


def main(folder: Path) -> None:
    quiet()
    faulthandler.dump_traceback_later(200, exit=True)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(on_two_ranks(folder)))
    gc.collect()  # the models, whose reducers must go before the group
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
