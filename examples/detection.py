"""For object detection: images of any size with lists of boxes, batches of one aspect ratio, as torchvision's reference
has them, and an exact resume.

python detection.py --folder run  # one rank; run again, it continues after its last checkpoint
torchrun --nproc-per-node=2 detection.py --folder run  # continues on two

The pictures are made here, and the detector is a tiny one that needs no torchvision; a model of
torchvision.models.detection takes the same batches.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import penstock

BATCH, EPOCHS, SAVE_EVERY, CELL = 3, 2, 4, 8

Target = dict[str, torch.Tensor]
Batch = tuple[tuple[torch.Tensor, ...], tuple[Target, ...]]


class Rectangles(Dataset[tuple[torch.Tensor, Target]]):
    """Pictures of any size with one to four bright rectangles.

    In training, half of them are flipped, and all change their brightness.
    """

    def __init__(self, n: int, seed: int, train: bool) -> None:
        rng = np.random.default_rng(seed)
        self.seed, self.train = seed, train
        self.sizes = [(int(height), int(width)) for height, width in rng.integers(40, 121, (n, 2))]

    def __len__(self) -> int:
        return len(self.sizes)

    def get_height_and_width(self, index: int) -> tuple[int, int]:
        return self.sizes[index]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Target]:
        rng = np.random.default_rng((self.seed, index))  # the picture: always the same
        height, width = self.sizes[index]
        picture = rng.uniform(0, 0.3, (3, height, width)).astype(np.float32)
        boxes = []
        for _ in range(rng.integers(1, 5)):
            box_height, box_width = rng.integers(10, 31, 2)
            top, left = rng.integers(height - box_height), rng.integers(width - box_width)
            picture[:, top : top + box_height, left : left + box_width] += 0.5
            boxes.append([left, top, left + box_width, top + box_height])
        image = torch.from_numpy(picture)
        target = {
            "boxes": torch.tensor(boxes, dtype=torch.float32),
            "labels": torch.ones(len(boxes), dtype=torch.int64),
            "image_id": torch.tensor(index),
        }
        return augmented(image, target) if self.train else (image, target)


def augmented(image: torch.Tensor, target: Target) -> tuple[torch.Tensor, Target]:
    # belongs to the epoch and the position: the same after a resume, in any worker, on any rank
    rng = penstock.sample().rng
    if rng.random() < 0.5:
        left, top, right, bottom = target["boxes"].unbind(1)
        image, target = (
            image.flip(2),
            target | {"boxes": torch.stack([image.shape[2] - right, top, image.shape[2] - left, bottom], 1)},
        )
    return image * rng.uniform(0.8, 1.2), target


def collate(samples: list[tuple[torch.Tensor, Target]]) -> Batch:
    """As torchvision's reference: a tuple of images of any size, and one of targets."""
    images, targets = zip(*samples, strict=True)
    return images, targets


def aspect_ratio_groups(data: Rectangles, k: int = 1) -> list[int]:
    """The group of each picture, of 2 k + 2: as torchvision's ``create_aspect_ratio_groups``."""
    ratios = [height / width for height, width in map(data.get_height_and_width, range(len(data)))]
    return np.digitize(ratios, 2 ** np.linspace(-1, 1, 2 * k + 1)).tolist()


class Detector(torch.nn.Module):
    """Says of each cell of 8 x 8 pixels whether the middle of a box is in it, and how large that box is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 5, 4, 2), torch.nn.ReLU(), torch.nn.Conv2d(16, 3, 5, 2, 2)
        )

    def forward(self, images: tuple[torch.Tensor, ...]) -> torch.Tensor:
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        padded = [
            torch.nn.functional.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images
        ]
        return self.body(torch.stack(padded))


def cells(targets: tuple[Target, ...], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the detector should say of pictures, and in which cells there is a box."""
    wanted, there = torch.zeros_like(like), torch.zeros_like(like[:, 0], dtype=torch.bool)
    for number, target in enumerate(targets):
        left, top, right, bottom = target["boxes"].unbind(1)
        row, column = ((top + bottom) / 2 / CELL).long(), ((left + right) / 2 / CELL).long()
        wanted[number, 1, row, column], wanted[number, 2, row, column] = (bottom - top) / CELL, (right - left) / CELL
        there[number, row, column] = True
    wanted[:, 0] = there.float()
    return wanted, there


def loss_of(model: torch.nn.Module, images: tuple[torch.Tensor, ...], targets: tuple[Target, ...]) -> torch.Tensor:
    said = model(images)
    wanted, there = cells(targets, said)
    found = torch.nn.functional.binary_cross_entropy_with_logits(said[:, 0], wanted[:, 0])
    sizes = (said[:, 1:] - wanted[:, 1:]).abs().sum(1)
    return found + 0.1 * (sizes * there).sum() / there.sum()


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: penstock.Loader[Batch]) -> tuple[float, int]:
    """The mean loss of all pictures, and how many there were.

    Ranks may get another number of them, so they communicate only behind the loop.
    """
    total = torch.zeros(2, dtype=torch.float64)
    for images, targets in loader:
        total += torch.tensor([loss_of(model, images, targets) * len(images), len(images)])
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total[0] / total[1]), int(total[1])


def train(folder: Path, die_after: int, rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    model = Detector()
    trained: Any = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Rectangles(50, seed=0, train=True)
    groups = penstock.Buckets(keys=aspect_ratio_groups(data), batch_size=BATCH)
    loader = penstock.Loader.from_dataset(data, groups=groups, shuffle=True, seed=1, num_workers=1, collate_fn=collate)
    validation = penstock.Loader.from_dataset(
        Rectangles(21, seed=1, train=False),
        batch_size=2,
        tail="exact",
        num_workers=1,
        collate_fn=collate,
        prefetch_next_epoch=False,
    )
    step, file = 0, folder / "checkpoint.pt"
    if file.exists():
        saved = torch.load(file)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        print(f"rank {rank} of {ranks} continues after step {step}, in epoch {loader.epoch}", flush=True)
    for epoch in range(loader.epoch, EPOCHS):
        for images, targets in loader:
            loss_of(trained, images, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            record(folder / f"seen-{rank}.jsonl", step, epoch, images, targets)
            if rank == 0 and step % SAVE_EVERY == 0:
                state = {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                }
                torch.save(state, folder / "new.pt")
                os.replace(folder / "new.pt", file)
            if step == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
        loss, n = evaluate(model, validation)  # not the DDP model, whose ranks would wait for each other
        print(f"rank {rank}: epoch {epoch}, step {step}, loss {loss:.3f} on {n} pictures", flush=True)
    loader.close()
    validation.close()


def record(file: Path, step: int, epoch: int, images: tuple[torch.Tensor, ...], targets: tuple[Target, ...]) -> None:
    """For the test: the number of each picture, and a checksum of its pixels and boxes as they were trained on."""
    rows = [
        [int(target["image_id"]), zlib.crc32(image.numpy().tobytes() + target["boxes"].numpy().tobytes())]
        for image, target in zip(images, targets, strict=True)
    ]
    with file.open("a") as lines:
        lines.write(json.dumps({"step": step, "epoch": epoch, "rows": rows}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--die-after", type=int, default=0)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    arguments.folder.mkdir(exist_ok=True)
    train(arguments.folder, arguments.die_after, rank, ranks)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
