"""What trainers count, gather and schedule, on as many ranks as torchrun started. One is killed, and the next life has
others.

killed_trainers.py KIND FOLDER [KILL-THE-LAST-RANK-AT-STEP]

KIND is groups, accelerate, lightning, transformers, ledger or minibatches. Rank 0 writes what all ranks had in each
step to FOLDER/steps.jsonl. A life goes on from the last checkpoint, so steps after it are there twice.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from penstock import Ledger, Loader, Packs
from penstock.orders import WeightedOrder

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCHS = 4


class Run:
    """The log of all lives in one folder, and the kill."""

    def __init__(self, folder: Path, kill_at: int) -> None:
        self.folder, self.kill_at = folder, kill_at
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.checkpoint = folder / "checkpoint.json"

    def everyones(self, mine: Any) -> list[Any]:
        """The value of each rank, in the order of the ranks."""
        values = [mine] * self.ranks
        if dist.is_initialized():
            dist.all_gather_object(values, mine)
        return values

    def joined(self, mine: list[Any]) -> list[Any]:
        """What ``gather`` returns."""
        return [value for hand in self.everyones(mine) for value in hand]

    def dies(self, step: int, victim: int = -1) -> None:
        """Every rank has written its step before. One dies: the last one, if nobody says another."""
        if step == self.kill_at:
            self.everyones(None)
            if self.rank == victim % self.ranks:
                os.kill(os.getpid(), signal.SIGKILL)

    def log(self, **values: Any) -> None:
        if self.rank == 0:
            with (self.folder / "steps.jsonl").open("a") as sink:
                sink.write(json.dumps({"ranks": self.ranks, **values}) + "\n")

    def save(self, **values: Any) -> None:
        if self.rank == 0:
            self.checkpoint.with_suffix(".new").write_text(json.dumps(values))
            os.replace(self.checkpoint.with_suffix(".new"), self.checkpoint)

    def saved(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.checkpoint.read_text()) if self.checkpoint.exists() else {}
        return found


# A sampler that repeats each prompt, for GRPO.

PROMPTS, G, ROUND = 13, 4, 8


class Repeated(Sampler[int]):
    """Each prompt ``G`` times in a row."""

    def __len__(self) -> int:
        return PROMPTS * G

    def __iter__(self) -> Iterator[int]:
        return (prompt for prompt in torch.randperm(PROMPTS).tolist() for _ in range(G))


def new_groups(ranks: int = 1, **options: Any) -> Loader[Any]:
    """An epoch has 6 rounds of two groups, and one that is left over."""
    return Loader.from_dataset(
        range(PROMPTS), ROUND // ranks, sampler=Repeated(), split="batches", drop_last=True, tail="drop", **options
    )


def groups(run: Run) -> None:
    dist.init_process_group("gloo")
    with new_groups(run.ranks, num_workers=1, method="thread") as loader:
        step = 0
        if saved := run.saved():
            loader.load_state_dict(saved["loader"])
            step = saved["step"]
        for _ in range(loader.epoch, EPOCHS):
            for batch in loader:
                run.dies(step)
                run.log(step=step, gathered=run.joined(batch.tolist()))
                step += 1
                run.save(step=step, loader=loader.state_dict())


# Accelerate: batches of 4 on any number of ranks, so a step has more samples on more ranks.

SAMPLES, EVALUATED, BATCH, WINDOW = 70, 37, 4, 3


def accelerate(run: Run) -> None:
    from accelerate import Accelerator

    from penstock.integrations.accelerate import AccelerateLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    made = new_samples()
    train: Any = AccelerateLoader(made, accelerator)
    evaluate: Any = AccelerateLoader(Loader.from_dataset(range(EVALUATED), BATCH), accelerator, save=False)
    total = len(train) * EPOCHS
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    model, optimizer, train, evaluate, schedule = accelerator.prepare(model, optimizer, train, evaluate, schedule)
    step = 0
    if saved := run.saved():
        accelerator.load_state(str(run.folder / saved["state"]))
        # Accelerate keeps it with the random states of each rank, and a new rank has none
        accelerator.step = run.everyones(accelerator.step)[0]
        step = saved["step"]
    for epoch in range(made.epoch, EPOCHS):
        for batch in train:
            run.dies(step)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch.float().unsqueeze(1)).mean() * 1e-6)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            gathered = accelerator.gather_for_metrics(batch).tolist()
            run.log(
                step=step,
                epoch=epoch,
                gathered=gathered,
                synced=accelerator.sync_gradients,
                lr=schedule.get_last_lr()[0],
                lengths=[total, len(train)],
            )
            step += 1
            if step % 2 == 0:
                accelerator.save_state(str(run.folder / f"state-{step}"))
                accelerator.wait_for_everyone()
                run.save(step=step, state=f"state-{step}")
        metrics = [one for batch in evaluate for one in accelerator.gather_for_metrics(batch).tolist()]
        run.log(step=step - 1, epoch=epoch, evaluated=metrics)
    made.close()
    evaluate.loader.close()


def new_samples(**options: Any) -> Loader[Any]:
    return Loader.from_dataset(range(SAMPLES), BATCH, shuffle=True, seed=3, **options)


# Packs whose epochs differ in length, in Lightning and in the Trainer: four packs in each step on any number of ranks.

LENGTHS = np.random.default_rng(3).lognormal(3, 1, 90).astype(int).clip(1, 200)
PACKS = 4


def checksums(packs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """One number for each pack, which a float keeps."""
    numbers = [float(zlib.crc32(pack["tokens"].tobytes()) % 2**24) for pack in packs]
    return {"x": torch.tensor(numbers).unsqueeze(1)}


def new_packs(ranks: int = 1, **options: Any) -> Loader[Any]:
    documents = [np.full(length, index) for index, length in enumerate(LENGTHS)]
    return Loader.from_dataset(
        documents,
        PACKS // ranks,
        groups=Packs(LENGTHS, 200, block=16, count=True),
        shuffle=True,
        seed=2,
        collate_fn=checksums,
        **options,
    )


def lightning(run: Run) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from penstock.integrations.lightning import LightningCallback

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any) -> torch.Tensor:
            run.dies(self.global_step)
            gathered, limit = run.joined(batch["x"].flatten().tolist()), self.trainer.num_training_batches
            run.log(step=self.global_step, epoch=self.current_epoch, gathered=gathered, lengths=[total, limit])
            loss: torch.Tensor = self.layer(batch["x"]).mean() * 1e-9
            return loss

        def validation_step(self, batch: Any) -> None:
            run.log(step=self.global_step - 1, epoch=self.current_epoch, evaluated=True)

        def configure_optimizers(self) -> Any:
            nonlocal total
            total = self.trainer.estimated_stepping_batches
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    total: Any = None
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    saver = ModelCheckpoint(dirpath=run.folder, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    trainer = Trainer(
        accelerator="cpu",
        devices=run.ranks,
        strategy="ddp" if run.ranks > 1 else "auto",
        callbacks=[LightningCallback(), saver],
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = sorted(run.folder.glob("step=*.ckpt"), key=lambda file: int(file.stem.removeprefix("step=")))
    with new_packs(run.ranks) as loader:
        trainer.fit(Model(), loader, DataLoader([0]), ckpt_path=saved[-1] if saved else None)
    run.log(step=trainer.global_step - 1, ended=trainer.global_step)


def transformers(run: Run) -> None:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from penstock.integrations.transformers import HFTrainerMixin

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).mean() * 1e-9}

    class Own(HFTrainerMixin, Trainer):
        def get_train_dataloader(self) -> Any:
            return new_packs(run.ranks)

        def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
            step = self.state.global_step
            run.dies(step)
            gathered = run.joined(inputs["x"].flatten().tolist())
            run.log(
                step=step,
                gathered=gathered,
                lengths=[self.state.max_steps, len(self.callback_handler.train_dataloader)],
                at=self.state.epoch,
            )
            return super().training_step(model, inputs, *more)

    arguments = TrainingArguments(
        str(run.folder),
        num_train_epochs=EPOCHS,
        save_steps=3,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Own(Model(), arguments)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(run.folder)))
    rates = {one["step"]: one["learning_rate"] for one in trainer.state.log_history if "learning_rate" in one}
    run.log(step=trainer.state.global_step - 1, ended=trainer.state.global_step, rates=[*rates.values()])


# A ledger of rank 0 whose weights follow what was learned.

DRAWN, PROMPTS_DRAWN = 6, 12 * 6


def weights_of(epoch: int) -> list[float]:
    return [float((index + epoch) % 3 == 0) for index in range(30)]


def new_weighted(epoch: int, **options: Any) -> tuple[WeightedOrder, Loader[Any]]:
    order = WeightedOrder(weights_of(epoch), num_samples=DRAWN, seed=1)
    words: dict[str, Any] = {"batch_size": None, "rank": 0, "world_size": 1, "collate_fn": int, **options}
    return order, Loader.from_dataset(range(30), order=order, seed=1, **words)


def ledger(run: Run) -> None:
    """In each step each rank takes a prompt of rank 0, which settles those that are open in another order: some are
    dropped, and some served again. Before an epoch ends, the next one has other weights."""
    dist.init_process_group("gloo")
    saved = run.saved()
    epoch = saved.get("epoch", 0)
    order, loader = new_weighted(epoch, infinite=True)
    with loader, Ledger(loader, max_open=16) as prompts:
        if saved and run.rank == 0:
            prompts.load_state_dict(saved["ledger"])
        held: list[Any] = []
        for step in range(saved.get("step", 0), PROMPTS_DRAWN // run.ranks):
            run.dies(step, victim=0)
            taken: list[Any] = []
            settled: list[Any] = []
            while run.rank == 0 and len(taken) < run.ranks:
                at, prompt = next(prompts)
                taken.append([at.epoch, at.position, prompt])
                held.append(at)
                if at.epoch == epoch and at.position == DRAWN - 1:
                    epoch += 1
                    order.update(weights_of(epoch))
            while len(held) > 4:
                at = held.pop(step % 3)
                if at.position == 5 and step % 2:
                    prompts.again(at)
                else:
                    (prompts.drop if at.position == 3 else prompts.done)(at)
                    settled.append([at.epoch, at.position])
            told = [taken]
            dist.broadcast_object_list(told)
            gathered = run.joined(told[0][run.rank :: run.ranks])
            opened = [at.json() for at in prompts.open]
            run.log(step=step, gathered=gathered, settled=settled, opened=opened)
            if run.rank == 0:
                run.save(step=step + 1, epoch=epoch, ledger=prompts.state_dict())


# A loader for each batch of rollouts, as for PPO: two passes of minibatches over it.


def minibatches(run: Run) -> None:
    dist.init_process_group("gloo")
    saved = run.saved()
    step, state = saved.get("step", 0), saved.get("loader")
    for rollout in range(saved.get("rollout", 0), 6):
        with new_minibatches(rollout, run.ranks) as loader:
            if state is not None:
                loader.load_state_dict(state)
                state = None
            for epoch in range(loader.epoch, 2):
                for batch in loader:
                    run.dies(step)
                    drawn = [[*map(int, one)] for one in batch]
                    run.log(step=step, rollout=rollout, epoch=epoch, gathered=run.joined(drawn))
                    step += 1
                    run.save(step=step, rollout=rollout, loader=loader.state_dict())


class Rollouts:
    """One more in each iteration."""

    def __init__(self, rollout: int) -> None:
        self.n = 16 + rollout

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, int(torch.randint(2**20, ()))])


def new_minibatches(rollout: int, ranks: int = 1) -> Loader[Any]:
    words: dict[str, Any] = {"drop_last": True, "tail": "drop"}
    return Loader.from_dataset(Rollouts(rollout), 4 // ranks, shuffle=True, seed=rollout, split="batches", **words)


KINDS = {one.__name__: one for one in (groups, accelerate, lightning, transformers, ledger, minibatches)}


def main(kind: str, folder: str, kill_at: int = -1) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    KINDS[kind](Run(Path(folder), kill_at))
    gc.collect()  # the models, whose reducers must go before the group
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
