"""For IterableDatasets on several ranks: a script ported from DataLoader; killed at any point, the run resumes bit for
bit.

python port_iterable.py  # one rank needs no split
torchrun --nproc-per-node=2 port_iterable.py --split items --resume  # every rank reads all rows and is dealt its share
torchrun --nproc-per-node=2 port_iterable.py --split own --stateful --resume  # the dataset reads only its rank's rows

DataLoader has no ``split``: if a dataset does not split itself, every rank trains on all of it.
The lines that differ from the script with DataLoaders are marked ``was:``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 3, 6, 4
Row = tuple[torch.Tensor, torch.Tensor]


class Rows(IterableDataset):
    """Numbered rows, as if read from a file: in file order, or shuffled and with noise, drawn from the global
    generators.

    Args:
        rows: Number of rows.
        own: Whether the dataset splits itself by rank; otherwise it knows nothing of ranks.
        shuffle: Whether each epoch has its own order and noise.
    """

    def __init__(self, rows: int, *, own: bool = False, shuffle: bool = False) -> None:
        part = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.rows = list(range(rows))[part[0] :: part[1]] if own else list(range(rows))
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[Row]:
        for number in random.sample(self.rows, len(self.rows)) if self.shuffle else self.rows:
            yield self.read(number)

    def read(self, number: int) -> Row:
        x = torch.tensor([number / 50, number % 7, number % 3])
        return (x + 0.01 * torch.randn(3) if self.shuffle else x), x.sum(0, keepdim=True)


class StatefulRows(Rows):
    """Counts its epochs and has a state, so that a resume reads nothing twice."""

    epoch = position = 0

    def __iter__(self) -> Iterator[Row]:
        order = random.Random(self.epoch).sample(self.rows, len(self.rows))
        while self.position < len(order):
            self.position += 1
            yield self.read(order[self.position - 1])
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def train(arguments: argparse.Namespace) -> None:
    """Train from the beginning, or from the last checkpoint."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)))
    torch.manual_seed(100 + rank)  # each rank has its own dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    own = arguments.split == "own"
    train_set = (StatefulRows if arguments.stateful else Rows)(48 if own else 49, own=own, shuffle=True)
    batch_size = GLOBAL_BATCH // world_size
    # was: DataLoader(train_set, batch_size=batch_size, drop_last=True, num_workers=1)
    loader = penstock.Loader.from_dataset(
        train_set, batch_size=batch_size, drop_last=True, num_workers=1, split=arguments.split, tail="drop"
    )
    # was: DataLoader(Rows(17), batch_size=batch_size), the same on every rank
    val_loader = penstock.Loader.from_dataset(
        Rows(17), batch_size=batch_size, split="items", tail="exact", prefetch_next_epoch=False
    )

    step, file = 0, arguments.folder / "checkpoint.pt"
    if not arguments.resume:
        (arguments.folder / f"records-{rank}.jsonl").unlink(missing_ok=True)
    elif file.exists():
        saved = torch.load(file)
        step = saved["step"]
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["ranks"][rank]["rng"])
        loader.load_state_dict(saved["ranks"][rank]["loader"])  # was: nothing; a resumed run started the epoch again
        record(arguments.folder, resumed=saved["at"])
        print(f"rank {rank} continues after {saved['at']}, in epoch {loader.epoch}", flush=True)

    def save(at: str) -> None:
        """The state of a dataset that splits itself belongs to one rank, so each rank contributes its own."""
        ranks: list[Any] = [None] * world_size
        # was: without the loader
        dist.all_gather_object(ranks, {"rng": torch.get_rng_state(), "loader": loader.state_dict()})
        if rank == 0:
            checkpoint = {
                "at": at,
                "step": step,
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "ranks": ranks,
            }
            write(checkpoint, file)
        dist.barrier()

    for epoch in range(loader.epoch, EPOCHS):  # was: range(start_epoch, EPOCHS)
        model.train()
        for x, y in loader:
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            record(arguments.folder, at=f"step-{step}", loss=loss.item(), lr=scheduler.get_last_lr())
            # also on an epoch's last batch; without a length, nothing knows that it is the last
            if step % SAVE_EVERY == 0:
                save(f"step-{step}")
            die(arguments, f"step-{step}")
        scheduler.step()
        validation = validate(model.module, val_loader)
        record(arguments.folder, at=f"epoch-{epoch}", validation=validation, lr=scheduler.get_last_lr())
        if rank == 0:
            print(f"epoch {epoch}: a loss of {validation[1]:.4f} on {validation[0]:.0f} rows", flush=True)
        save(f"epoch-{epoch}")
        die(arguments, f"epoch-{epoch}")
    loader.close()
    val_loader.close()


@torch.no_grad()
def validate(model: nn.Module, loader: penstock.Loader) -> list[float]:
    """Number of rows and their mean loss, over all ranks; every row counts once."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        sums += torch.tensor([len(x), mse_loss(model(x), y, reduction="sum")], dtype=torch.float64)
    dist.all_reduce(sums)
    count, loss = sums.tolist()
    return [count, loss / count]


def write(checkpoint: dict, file: Path) -> None:
    """Write atomically: if the process dies in here, the old file survives."""
    new = file.with_suffix(".new")
    with new.open("wb") as out:
        torch.save(checkpoint, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, file)


def record(folder: Path, **values: object) -> None:
    """One line of JSON in this rank's file, to the last bit."""
    with (folder / f"records-{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def die(arguments: argparse.Namespace, place: str) -> None:
    """Die like a machine that is preempted."""
    if arguments.die_after == place:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--split", choices=["items", "own"])
    parser.add_argument("--stateful", action="store_true", help="read a dataset that has a state_dict")
    parser.add_argument(
        "--folder", type=Path, default=Path("port_iterable_run"), help="for the checkpoint and the records"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--die-after", metavar="PLACE", help="step-N or epoch-N: die after it")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
