"""Fabric, Accelerate and the Hugging Face Trainer: one run to the end, and one from a checkpoint of the first.

Imported by the tests, where it runs in one process; as a script on two, which torchrun, or the tests, start:

    python loops.py FOLDER

Every rank writes what it saw to FOLDER/loops<r>.json.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, Sampler

import penstock
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable

N, B, EPOCHS = 48, 4, 3
TRAINERS = ("Fabric", "Accelerate", "Hugging Face Trainer")
POINTS = {"mid-epoch": 1.5, "last batch": 2.0}
"""When the checkpoint is saved, in epochs."""


def new_loader(**options: Any) -> penstock.Loader[Any]:
    return penstock.Loader.from_dataset(Tagged(N), batch_size=B, shuffle=True, seed=3, **options)


def fabric(folder: Path, *, save_at: int = 0, resume: bool = False, ranks: int = 1) -> list[list[int]]:
    """A loop with Fabric; ``folder/state.ckpt`` is written after ``save_at`` steps."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    model = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    loader = new_loader()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    if resume:
        fabric.load(folder / "state.ckpt", state)
    seen = []
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            batch = fabric.to_device(batch)
            optimizer.zero_grad()
            fabric.backward(model(batch.float().unsqueeze(1)).mean())
            optimizer.step()
            seen.append(batch.tolist())
            if len(seen) == save_at:
                fabric.save(folder / "state.ckpt", state)
    loader.close()
    return seen


def accelerate(
    folder: Path, *, save_at: int = 0, resume: bool = False, ranks: int = 1, steps: int = 5, unsized: bool = False
) -> tuple[list[list[int]], list[int]]:
    """A loop with Accelerate that accumulates gradients over ``steps`` batches: the batches, and those at which it
    synchronized."""
    from accelerate import Accelerator

    from penstock.integrations.accelerate import AccelerateLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = torch.nn.Linear(1, 1)
    made = unsized_loader() if unsized else new_loader()
    loader = AccelerateLoader(made, accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    if resume:
        accelerator.load_state(str(folder / "state"))
    seen, synced = [], []
    for epoch in range(made.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch.float().unsqueeze(1)).mean())
                optimizer.step()
                optimizer.zero_grad()
            seen.append(batch.tolist())
            if accelerator.sync_gradients:
                synced.append(len(seen))
            if len(seen) == save_at:
                accelerator.save_state(str(folder / "state"))
    made.close()
    accelerator.free_memory()
    return seen, synced


class Counted(IterableDataset):
    """The numbers below N, tagged by the epoch; without a length."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter(range(1000 * self.epoch, 1000 * self.epoch + N))


def unsized_loader(**options: Any) -> penstock.Loader:
    return penstock.Loader.from_dataset(Counted(), batch_size=B, split="items", tail="drop", **options)


class Regression(torch.nn.Module):
    """A model for the Hugging Face Trainer, with a log of its batches."""

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
    folder: Path, *, save_at: int = 0, resume: int = 0, ranks: int = 1, **options: Any
) -> tuple[list[list[int]], int]:
    """The Hugging Face Trainer: the batches and the optimizer steps. Writes ``checkpoint-{save_at}``."""
    trainer = hugging_face_trainer(folder, save_at=save_at, resume=resume, ranks=ranks, **options)
    return trainer.model.seen, trainer.state.global_step


def hugging_face_trainer(folder: Path, *, save_at: int = 0, resume: int = 0, ranks: int = 1, **options: Any) -> Any:
    """The trainer after its run."""
    from transformers import Trainer, TrainingArguments

    from penstock.integrations.transformers import HFTrainerCallback

    made = options.pop("loader", None) or new_loader(collate_fn=named)
    callback = options.pop("callback", None) or HFTrainerCallback()
    resume_from = options.pop("resume_from", folder / f"checkpoint-{resume}" if resume else None)

    class Own(Trainer):
        def get_train_dataloader(self):
            return made

    arguments = {
        "logging_strategy": "no",
        "num_train_epochs": EPOCHS,
        "save_steps": save_at or 999,
        "per_device_train_batch_size": B,
        "ignore_data_skip": True,
    } | options
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, seed=3, **arguments
    )
    trainer = Own(Regression(), arguments, callbacks=[callback], train_dataset=list(range(N)), data_collator=named)
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    made.close()
    return trainer


class Labelled(Regression):
    """A model for evaluation: it predicts its input, and its loss depends on the labels."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**super().forward(x), "loss": (self.layer(x) - labels).square().mean(), "logits": x}


def labelled(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The collator; it must not get a column that the model does not use."""
    assert {*samples[0]} == {"x", "labels"}
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def columns(n: int) -> list[dict[str, Any]]:
    return [
        {"x": torch.tensor([float(i)]), "labels": torch.tensor([i / n]), "comment": "not for the model"}
        for i in range(n)
    ]


def mixed_in(
    folder: Path,
    mixin: bool = True,
    n: int = N,
    evaluated: Any = None,
    change: Any = lambda trainer: trainer,
    **options: Any,
) -> Any:
    """A trainer, which ``change`` may change, with the mixin, which should need nothing else, or without it, for
    comparison."""
    from transformers import Trainer, TrainingArguments

    from penstock.integrations.transformers import HFTrainerMixin

    class Own(*([HFTrainerMixin] if mixin else []), change(Trainer)):
        pass

    options = {
        "num_train_epochs": EPOCHS,
        "save_steps": 18,
        "per_device_train_batch_size": B,
        "logging_steps": 1,
        "seed": 3,
    } | options
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **options)
    torch.manual_seed(1)
    return Own(
        Labelled(), arguments, train_dataset=columns(n), eval_dataset=evaluated or columns(13), data_collator=labelled
    )


class Repeated(Sampler):
    """Each index four times in a row, in a new order every epoch, as trainers do that compare several answers to one
    question."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.generator = torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return 4 * self.n

    def __iter__(self):
        return (i for i in torch.randperm(self.n, generator=self.generator).tolist() for _ in range(4))


def grouped(trainer: type) -> type:
    """``trainer`` with the sampler and the batches of one that generates for two steps at once."""

    class Grouped(trainer):
        def _get_train_sampler(self, dataset=None):
            return Repeated(len(self.train_dataset))

        def _get_eval_sampler(self, eval_dataset):
            return Repeated(len(eval_dataset))

        def get_train_dataloader(self):
            return self._get_dataloader(
                self.train_dataset, "Training", 2 * self._train_batch_size, self._get_train_sampler, is_training=True
            )

    return Grouped


class Stream(IterableDataset):
    """The samples of `columns`, without a length."""

    def __init__(self, n: int) -> None:
        self.samples = columns(n)

    def __iter__(self):
        return iter(self.samples)


class Claiming(Stream):
    """A `Stream` with a length that it has not."""

    def __len__(self) -> int:
        return len(self.samples) + 3


def evaluated(folder: Path, mixin: bool, kind: Callable[[int], Any] = columns, **options: Any) -> list[Any]:
    """The loss and the predictions of evaluations that divide evenly, and of some that do not."""
    found: list[Any] = []
    for n in (8, 12, 13, 19, 24) if options.get("dataloader_drop_last") else (1, 5, 12, 13, 16, 24):
        trainer = mixed_in(folder, mixin, evaluated=kind(n), per_device_eval_batch_size=4, **options)
        predicted = trainer.predict(trainer.eval_dataset)
        found.append(
            [
                n,
                trainer.evaluate()["eval_loss"],
                predicted.predictions.flatten().tolist(),
                predicted.label_ids.flatten().tolist(),
            ]
        )
    return found


def mixed_in_runs(folder: Path, **options: Any) -> dict[str, Any]:
    """One run to the end, and one from its checkpoint, with their logs."""
    whole = mixed_in(folder, **options)
    at = whole.args.save_steps
    whole.train()
    resumed = mixed_in(folder, **options)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{at:.0f}"))
    return {
        "at": at,
        "whole": whole.model.seen,
        "resumed": resumed.model.seen,
        "logs": logs(whole),
        "logs again": logs(resumed),
    }


def logs(trainer: Any) -> list[dict[str, float]]:
    """All log entries except the last, which holds the duration of the run."""
    return trainer.state.log_history[:-1]


def both(trainer: str, folder: Path, point: str, ranks: int = 1) -> dict[str, Any]:
    """One run to the end, and one from its checkpoint."""
    at = int(POINTS[point] * N / B / ranks)
    place = folder / f"{trainer} {point}"
    if trainer == "Fabric":
        return {
            "at": at,
            "whole": fabric(place, save_at=at, ranks=ranks),
            "resumed": fabric(place, resume=True, ranks=ranks),
        }
    if trainer == "Accelerate":
        whole, resumed = (
            accelerate(place, ranks=ranks, **options)[0] for options in ({"save_at": at}, {"resume": True})
        )
    else:
        whole, resumed = (
            hugging_face(place, ranks=ranks, **options)[0] for options in ({"save_at": at}, {"resume": at})
        )
    return {"at": at, "whole": whole, "resumed": resumed}


def exact(result: dict[str, Any]) -> bool:
    return len(result["whole"]) > result["at"] and result["whole"][result["at"] :] == result["resumed"]


def right(rank: int, ranks: int, split: Any = "items") -> list[list[int]]:
    """The batches of a plain loop over the loader."""
    with new_loader(rank=rank, world_size=ranks, split=split) as loader:
        return [batch.tolist() for _ in range(EPOCHS) for batch in loader]


def quiet() -> None:
    warnings.simplefilter("ignore")


def main(folder: Path) -> None:
    quiet()
    faulthandler.dump_traceback_later(800, exit=True)
    seen: dict[str, Any] = {
        f"{trainer}, {point}": both(trainer, folder, point, ranks=2) for trainer in TRAINERS for point in POINTS
    }
    change = folder / "alone"  # made by one rank
    seen["change"] = {
        "Fabric": fabric(change / "Fabric", resume=True, ranks=2),
        "Accelerate": accelerate(change / "Accelerate", resume=True, ranks=2)[0],
    }
    seen["evaluated"] = [
        evaluated(folder, mixin, dataloader_drop_last=drop) for mixin in (True, False) for drop in (False, True)
    ]
    seen["mixed in"] = mixed_in_runs(folder / "mixed in", save_steps=8)
    (folder / f"loops{os.environ['RANK']}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
