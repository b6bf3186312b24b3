"""Lightning's Trainer, run to the end and resumed from its own checkpoints of every kind.

Imported by the tests, where it runs in one process; as a script it runs the same cases on two, which Lightning starts
itself:

    python lightning_cases.py FOLDER [EVERY]

Of `CASES` it runs each EVERY-th, as `some` says. Every rank writes what it saw to FOLDER/rank<r>.json; the judge is
`exact`, in the test. Nothing here imitates Lightning.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import warnings
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

import penstock
from penstock.integrations.lightning import LightningCallback
from penstock.testing import Tagged

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from two_stream import TwoStreamBatchSampler

N, B = 48, 4
WITHOUT, WITH = "without the callback", "with it"


@dataclass(frozen=True)
class Case:
    """One kind of checkpoint. Steps are counted in steps of an epoch, so that they mean the same on any number of
    ranks."""

    name: str  # as it stands in the table of the guide
    # what `ModelCheckpoint` is told; ``every`` (in epochs) becomes its ``every_n_train_steps``
    checkpoint: dict[str, Any]
    resume: float  # batches trained when the checkpoint to resume from was made, in epochs
    # what `Trainer` is told; ``max_epochs=3`` where it does not say
    trainer: dict[str, Any] = field(default_factory=dict)
    loader: str = "sized"  # or "unsized", or "endless"
    estimated: bool = False  # ``configure_optimizers`` asks for ``trainer.estimated_stepping_batches``
    hook: bool = False  # the loader is made by ``train_dataloader`` and not passed to ``fit``
    fails: float | None = None  # the step that raises in the first run, in epochs
    validated: bool = False  # there is a validation loader
    alone: bool = False  # exact without the callback


MID = {"every": 1.5}
EDGE = {"every": 2.0}
EPOCH_END: dict[str, Any] = {}
VALIDATION_END = {"save_on_train_epoch_end": False}
EXCEPTION = {"every": 99.0, "save_on_exception": True}

CASES = [
    Case("mid-epoch", MID, 1.5, alone=True),
    Case("last batch", EDGE, 2, alone=True),
    Case("epoch end (the default)", EPOCH_END, 2, alone=True),
    Case("validation end", VALIDATION_END, 2, validated=True, alone=True),
    Case("validation end, in mid-epoch", VALIDATION_END, 1.5, {"val_check_interval": 0.5}, validated=True, alone=True),
    Case("exception", EXCEPTION, 1.5, fails=1.5),
    Case("mid-epoch, `estimated_stepping_batches`", MID, 1.5, estimated=True),
    Case("epoch end, `estimated_stepping_batches`", EPOCH_END, 2, estimated=True, alone=True),
    Case(
        "mid-epoch, `reload_dataloaders_every_n_epochs`",
        MID,
        1.5,
        {"reload_dataloaders_every_n_epochs": 1},
        hook=True,
        alone=True,
    ),
    Case(
        "last batch, `reload_dataloaders_every_n_epochs`",
        EDGE,
        2,
        {"reload_dataloaders_every_n_epochs": 1},
        hook=True,
        alone=True,
    ),
    Case(
        "epoch end, `reload_dataloaders_every_n_epochs`",
        EPOCH_END,
        2,
        {"reload_dataloaders_every_n_epochs": 1},
        hook=True,
        alone=True,
    ),
    Case("mid-epoch, `limit_train_batches`", {"every": 0.75}, 0.75, {"limit_train_batches": 0.5}, alone=True),
    Case("last batch, `limit_train_batches`", {"every": 1.0}, 1, {"limit_train_batches": 0.5}),
    Case("epoch end, `limit_train_batches`", EPOCH_END, 1, {"limit_train_batches": 0.5}, alone=True),
    Case("mid-epoch, `max_steps`", MID, 1.5, {"max_steps": 2.5}, alone=True),
    Case("last batch, `max_steps`", EDGE, 2, {"max_steps": 2.5}, alone=True),
    Case("epoch end, `max_steps`", EPOCH_END, 1, {"max_steps": 2.5}),
    Case("un-sized, mid-epoch", MID, 1.5, loader="unsized"),
    Case("un-sized, last batch", EDGE, 2, loader="unsized", alone=True),
    Case("un-sized, epoch end", EPOCH_END, 2, loader="unsized"),
    Case("un-sized, exception", EXCEPTION, 1.5, loader="unsized", fails=1.5),
    Case(
        "un-sized, mid-epoch, `estimated_stepping_batches`",
        MID,
        1.5,
        {"max_steps": 2.5, "max_epochs": 9},
        loader="unsized",
        estimated=True,
    ),
    Case(
        "un-sized, mid-epoch, reloaded", MID, 1.5, {"reload_dataloaders_every_n_epochs": 1}, loader="unsized", hook=True
    ),
    Case(
        "un-sized, last batch of `limit_train_batches`",
        {"every": 1.0},
        1,
        {"limit_train_batches": 0.5},
        loader="unsized",
    ),
    Case("endless, `max_steps`", MID, 1.5, {"max_steps": 2.5}, loader="endless"),
    Case(
        "endless, `limit_train_batches`, last batch",
        {"every": 0.75},
        0.75,
        {"limit_train_batches": 0.75},
        loader="endless",
        alone=True,
    ),
    Case("endless, `limit_train_batches`, epoch end", EPOCH_END, 0.75, {"limit_train_batches": 0.75}, loader="endless"),
]


def some(every: int) -> list[Case]:
    """Each ``every``-th case, from the second one on; 4 leave every kind of loader, checkpoint and option."""
    return CASES[1::every] if every > 1 else CASES


CHANGES = [
    Case("mid-epoch", MID, 1.5, validated=True),
    Case("last batch", EDGE, 2, validated=True, alone=True),
    Case("epoch end (the default)", EPOCH_END, 2),
    Case("validation end, in mid-epoch", VALIDATION_END, 1.5, {"val_check_interval": 0.5}, validated=True),
    Case("exception", EXCEPTION, 1.5, fails=1.5),
    Case("un-sized, mid-epoch", MID, 1.5, loader="unsized"),
]
"""The cases that are also resumed on another number of ranks."""


class Counted(IterableDataset):
    """The numbers below N, tagged by the epoch, in a different order each epoch; without a length."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter(1000 * self.epoch + (i * 5 + self.epoch) % N for i in range(N))


def new_loader(case: Case, **options: Any) -> penstock.Loader[Any]:
    """The loader of a case."""
    if case.loader == "unsized":
        return penstock.Loader.from_dataset(Counted(), batch_size=B, split="items", tail="drop", **options)
    return penstock.Loader.from_dataset(
        Tagged(N), batch_size=B, shuffle=True, seed=3, infinite=case.loader == "endless", **options
    )


class Model(LightningModule):
    """One weight, and a log of every batch that it was trained on, or validated."""

    def __init__(self, case: Case = Case("", {}, 0), make: Any = None, fails: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.case, self.make, self.fails = case, make, fails
        self.seen: list[list[int]] = []
        self.validated: list[list[int]] = []
        self.epochs: list[int] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if len(self.seen) == self.fails:
            raise RuntimeError("as planned")
        self.seen.append(batch.tolist())
        self.epochs.append(self.trainer.current_epoch)
        return self.layer(batch.float().unsqueeze(1)).mean() / 1000

    def validation_step(self, batch: torch.Tensor) -> None:
        self.validated.append(batch.tolist())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
        if self.case.estimated:
            torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 1e-6, total_steps=int(self.trainer.estimated_stepping_batches)
            )
        return optimizer


class HookedModel(Model):
    def train_dataloader(self) -> Any:
        return self.make()


def fit(
    case: Case, kind: str, folder: Path, *, ranks: int = 1, resume: Path | None = None, fails: int | None = None
) -> Model:
    """One run of a case to the end."""
    epoch = N // B // ranks
    made = new_loader(case)
    model = (HookedModel if case.hook else Model)(case, lambda: new_loader(case), fails)
    options = {"max_epochs": 3} | case.trainer
    if "max_steps" in options:
        options |= {"max_steps": int(options["max_steps"] * epoch), "max_epochs": case.trainer.get("max_epochs", -1)}
    if "limit_train_batches" in options:
        options["limit_train_batches"] = max(1, int(options["limit_train_batches"] * epoch))
    checkpoint = dict(case.checkpoint)
    if "every" in checkpoint:
        checkpoint["every_n_train_steps"] = max(1, int(checkpoint.pop("every") * epoch))
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, **checkpoint)
    trainer = new_trainer(
        ranks,
        [saver, *([LightningCallback()] if kind == WITH else [])],
        num_sanity_val_steps=1,
        limit_val_batches=1,
        **options,
    )
    try:
        trainer.fit(
            model, None if case.hook else made, DataLoader([0, 1]) if case.validated else None, ckpt_path=resume
        )
    except RuntimeError as exc:
        if str(exc) != "as planned":
            raise
    finally:
        made.close()
    return model


def new_trainer(ranks: int, callbacks: list[Callback], **options: Any) -> Trainer:
    options = {"strategy": "ddp" if ranks > 1 else "auto"} | options
    return Trainer(
        accelerator="cpu",
        devices=ranks,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def run(case: Case, kind: str, folder: Path, *, ranks: int = 1) -> dict[str, Any]:
    """Both runs of a case on this rank: without a stop, and from the checkpoint on."""
    epoch = N // B // ranks
    place = place_of(case, kind, folder, ranks)
    if case.fails is not None:
        fit(case, kind, place, ranks=ranks, fails=int(case.fails * epoch))
        whole = fit(case, kind, place / "whole", ranks=ranks)
    else:
        whole = fit(case, kind, place, ranks=ranks)
    resumed = again(case, kind, place, folder / "again", steps=int(case.resume * epoch), ranks=ranks)
    return {"whole": whole.seen, "epochs": whole.epochs, **resumed}


def again(case: Case, kind: str, place: Path, folder: Path, *, steps: int, ranks: int) -> dict[str, Any]:
    """The batches trained from the checkpoint in ``place`` that was saved after ``steps`` steps."""
    (file,) = [file for file in place.glob("*.ckpt") if f"step={steps}" in file.stem]
    model = fit(case, kind, folder / place.name, ranks=ranks, resume=file)
    return {"resumed": model.seen, "resumed epochs": model.epochs, "validated": len(model.validated)}


def place_of(case: Case, kind: str, folder: Path, ranks: int) -> Path:
    return folder / f"{case.name} {kind} {ranks}".replace("/", "-")


def right(case: Case, rank: int, ranks: int) -> list[list[int]]:
    """The batches that a run must train on: a plain loop over our loader, with the trainer's limits."""
    epoch = N // B // ranks
    limit = max(1, int(case.trainer.get("limit_train_batches", 1) * epoch))
    steps = int(case.trainer.get("max_steps", 3) * epoch)
    with new_loader(case, rank=rank, world_size=ranks) as made:
        return [batch.tolist() for _ in range(3) for batch in islice(made, limit)][:steps]


def exact(case: Case, kind: str, result: dict[str, Any], rank: int = 0, ranks: int = 1) -> bool:
    """Whether the resumed run trained on the same batches, in order and by value, as the single run after that point,
    and the single run was right.

    With the callback, Lightning's own epoch number must also be right at every batch.
    """
    at = int(case.resume * (N // B // ranks))
    if kind == WITH and result["epochs"][at:] != result["resumed epochs"]:
        return False
    return result["whole"][at:] == result["resumed"] and result["whole"] == right(case, rank, ranks)


def sequence(results: list[list[list[int]]]) -> list[int]:
    """The samples of all ranks, dealt back into one global sequence."""
    return [
        value for batches in zip(*results, strict=True) for round_ in zip(*batches, strict=True) for value in round_
    ]


def what_dataloader_does() -> dict[str, str | int]:
    """The same sampler in a DataLoader: Lightning's error, and, without Lightning's sampler, how many primaries this
    rank trains."""
    said: dict[str, str | int] = {}
    for injected in (True, False):
        model = Model()
        trainer = new_trainer(2, [], max_epochs=1, use_distributed_sampler=injected, enable_checkpointing=False)
        try:
            trainer.fit(model, DataLoader(range(N), batch_sampler=TwoStreamBatchSampler(range(20), range(20, N), 2, 2)))
            said[f"{injected}"] = sum(i < 20 for batch in model.seen for i in batch)
        except TypeError as exc:
            said[f"{injected}"] = str(exc)
    return said


def validated() -> dict[str, list[int]]:
    """The samples of one validation on this rank, as the guide's first example does it and with the default tail."""
    seen = {}
    for tail in ("pad", "exact"):
        with (
            penstock.Loader.from_dataset(Tagged(N), batch_size=B) as train,
            penstock.Loader.from_dataset(range(9), batch_size=B, prefetch_next_epoch=False, tail=tail) as validation,
        ):
            model = Model()
            new_trainer(2, [LightningCallback()], max_epochs=1, num_sanity_val_steps=0, enable_checkpointing=False).fit(
                model, train, validation
            )
            seen[tail] = [i for batch in model.validated for i in batch]
    return seen


def refusals() -> dict[str, str]:
    """The errors before the first step: ranks of unequal length, and a loader inside a DataLoader."""

    class Wrapped(IterableDataset):
        def __init__(self, loader):
            self.loader = loader

        def __iter__(self):
            return iter(self.loader)

    said = {}
    for name in ("unequal", "wrapped"):
        with penstock.Loader.from_dataset(Tagged(N - 7), batch_size=B, tail="exact") as loader:
            model = Model()
            try:
                new_trainer(2, [LightningCallback()], max_epochs=1, enable_checkpointing=False).fit(
                    model, loader if name == "unequal" else DataLoader(Wrapped(loader), batch_size=None)
                )
            except (penstock.GraphError, TypeError) as exc:
                said[name] = f"{len(model.seen)} steps: {exc}"
    return said


def quiet() -> None:
    for name in (
        "lightning.pytorch",
        "lightning.fabric",
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.seed",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def main(folder: Path, every: int = 1) -> None:
    """Run everything on this rank of two, and write the results to this rank's file."""
    quiet()
    faulthandler.dump_traceback_later(800, exit=True)
    seen: dict[str, Any] = {"cases": {}, "changes": {}}
    for case in some(every):
        seen["cases"][case.name] = run(case, WITH, folder, ranks=2)
    for case in CHANGES:
        place = place_of(case, WITH, folder / "alone", 1)  # made by one rank, before this script
        seen["changes"][case.name] = again(
            case, WITH, place, folder / "changed", steps=int(case.resume * (N // B)), ranks=2
        )
        fit(
            case,
            WITH,
            place_of(case, WITH, folder / "from two", 2),
            ranks=2,
            fails=case.fails and int(case.fails * N // B / 2),
        )
    seen["dataloader"] = what_dataloader_does()
    seen["refusals"] = refusals()
    seen["validated"] = validated()
    (folder / f"rank{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
