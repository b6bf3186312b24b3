"""For users of PyTorch's ImageNet example: a script in its shape, ported from DataLoader; killed at any point, it
resumes bit for bit.

python port_imagenet.py                                         # one rank
torchrun --nproc-per-node=2 port_imagenet.py --resume           # two ranks, from the last checkpoint, if there is one

Five lines differ from the script with DataLoaders, each marked by ``was:``. ``sampler.set_epoch`` may stay; the loader
knows its epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

import penstock

EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 3, 8, 4
CLASSES, PIXELS = 5, 8


class Pictures(Dataset):
    """Stands in for an ImageFolder.

    It augments with the global generators of ``random`` and torch, as torchvision's transforms do.
    """

    def __init__(self, length: int, *, augment: bool) -> None:
        generator = torch.Generator().manual_seed(length)
        self.labels = torch.randint(CLASSES, (length,), generator=generator)
        self.images = torch.randn(length, 3, PIXELS, PIXELS, generator=generator) + self.labels.view(-1, 1, 1, 1)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self.augment:
            image = image.flip(-1) if random.random() < 0.5 else image
            top, left = torch.randint(3, (2,)).tolist()
            image = pad(image, (1, 1, 1, 1))[:, top : top + PIXELS, left : left + PIXELS]
        return image, self.labels[index]


def new_model() -> nn.Module:
    """A small network.

    It uses GroupNorm, because BatchNorm's running statistics differ between ranks, and a checkpoint holds only rank
    0's.
    """
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, CLASSES),
    )


def train(arguments: argparse.Namespace) -> None:
    """Train from the beginning, or from the last checkpoint."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(new_model())
    torch.manual_seed(100 + rank)  # each rank has its own dropout and mixup draws
    random.seed(100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    train_set, val_set = Pictures(62, augment=True), Pictures(27, augment=False)
    sampler = DistributedSampler(train_set, seed=1)
    batch_size = GLOBAL_BATCH // world_size
    loader = penstock.Loader.from_dataset(  # was: DataLoader(
        train_set, batch_size=batch_size, sampler=sampler, num_workers=arguments.workers
    )
    # was: DataLoader(… sampler=DistributedSampler(val_set, shuffle=False)), which counts some samples twice
    val_loader = penstock.Loader.from_dataset(
        val_set, batch_size=batch_size, num_workers=1, tail="exact", prefetch_next_epoch=False
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
        torch.set_rng_state(saved["rng"][rank][0])
        random.setstate(saved["rng"][rank][1])
        loader.load_state_dict(saved["loader"])  # was: nothing
        record(arguments.folder, resumed=saved["at"])
        print(
            f"rank {rank} continues after {saved['at']}: epoch {loader.epoch}, batch {loader.position} of "
            f"{len(loader)}",
            flush=True,
        )

    def save(at: str) -> None:
        rng = [None] * world_size
        dist.all_gather_object(rng, (torch.get_rng_state(), random.getstate()))
        if rank == 0:
            checkpoint = {
                "at": at,
                "step": step,
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "rng": rng,
                "loader": loader.state_dict(),  # was: "epoch": epoch + 1
            }
            write(checkpoint, file)
        dist.barrier()

    for epoch in range(loader.epoch, EPOCHS):  # was: range(start_epoch, EPOCHS)
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            share = random.betavariate(0.5, 0.5)
            mixed = share * images + (1 - share) * images.flip(0)
            outputs = model(mixed)
            loss = share * cross_entropy(outputs, labels) + (1 - share) * cross_entropy(outputs, labels.flip(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            record(arguments.folder, at=f"step-{step}", loss=loss.item(), lr=scheduler.get_last_lr())
            # also on an epoch's last batch; a run resumed from there starts with the code after the loop
            if step % SAVE_EVERY == 0:
                save(f"step-{step}")
            die(arguments, f"step-{step}")
        scheduler.step()
        validation = validate(model.module, val_loader)
        record(arguments.folder, at=f"epoch-{epoch}", validation=validation, lr=scheduler.get_last_lr())
        if rank == 0:
            print(
                f"epoch {epoch}: {validation[0]:.0f} of {validation[1]:.0f} correct, with a loss of "
                f"{validation[2]:.4f}",
                flush=True,
            )
        save(f"epoch-{epoch}")
        die(arguments, f"epoch-{epoch}")
    loader.close()
    val_loader.close()


@torch.no_grad()
def validate(model: nn.Module, loader: penstock.Loader) -> list[float]:
    """Number correct, number of images, and mean loss, over all ranks; every image counts once."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for images, labels in loader:
        outputs = model(images)
        right = (outputs.argmax(1) == labels).sum()
        sums += torch.tensor([right, len(labels), cross_entropy(outputs, labels, reduction="sum")], dtype=torch.float64)
    dist.all_reduce(sums)
    right, count, loss = sums.tolist()
    return [right, count, loss / count]


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
    parser.add_argument(
        "--folder", type=Path, default=Path("port_imagenet_run"), help="for the checkpoint and the records"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--workers", type=int, default=2)
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
