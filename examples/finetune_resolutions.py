"""For fine-tuning an image model on folders of pictures of several sizes: batches of one resolution, repeats, captions
dropped, latents computed once.

python finetune_resolutions.py --folder run                                     # then once more, with --resume
torchrun --nproc-per-node=2 finetune_resolutions.py --folder run --resume       # on any number of ranks

Folders are named as trainers of LoRA expect them: ``10_dog`` holds pictures of a dog that come ten times in an epoch,
each with its caption in a text file. The encoder and the model are tiny, and made here. It needs: pip install pillow
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import penstock

SIZES = [(64, 64), (48, 80), (80, 48), (32, 96)]
"""Height and width of the resolutions: about as many pixels each, in steps of 16."""
BATCH, EPOCHS, SAVE_EVERY = 4, 2, 4


def make_pictures(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, n in (("3_dog", 9), ("1_park", 17)):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            height, width = (int(one * rng.uniform(1, 2)) for one in SIZES[int(rng.integers(len(SIZES)))])
            picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(picture).save(folder / name / f"{i}.png")
            (folder / name / f"{i}.txt").write_text(f"{name[2:]} number {i}")


class Latents(Dataset[torch.Tensor]):
    """What the encoder makes of each picture, in its resolution.

    Without random augmentation, so it is computed once, by `Cached`.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.sizes = [nearest(*Image.open(file).size[::-1]) for file in files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        height, width = self.sizes[index]
        picture = np.asarray(Image.open(self.files[index]).convert("RGB").resize((width, height)), np.float32)
        # a real run: vae.encode
        return torch.nn.functional.avg_pool2d(torch.from_numpy(picture / 127.5 - 1).permute(2, 0, 1), 8)


def nearest(height: int, width: int) -> tuple[int, int]:
    """The resolution whose shape is nearest."""
    return min(SIZES, key=lambda size: abs(np.log(height / width) - np.log(size[0] / size[1])))


class Captioned(Dataset[dict[str, Any]]):
    """A latent and its caption. One caption in ten is left out, at random, so that the model learns to do without."""

    def __init__(self, latents: Any, files: list[Path]) -> None:
        self.latents = latents
        self.rows = [index for index, file in enumerate(files) for _ in range(int(file.parent.name.split("_")[0]))]
        self.captions = [file.with_suffix(".txt").read_text() for file in files]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        index = self.rows[number]
        caption = "" if penstock.sample().rng.random() < 0.1 else self.captions[index]
        return {"latent": self.latents[index], "caption": caption, "number": number}


def batches(folder: Path) -> penstock.Loader[dict[str, Any]]:
    files = sorted(folder.glob("*_*/*.png"))
    latents = Latents(files)
    data = Captioned(penstock.Cached(latents, folder / "latents"), files)
    buckets = penstock.Buckets(keys=[latents.sizes[index] for index in data.rows], batch_size=BATCH)
    return penstock.Loader.from_dataset(data, groups=buckets, shuffle=True, seed=1, num_workers=1)


def train(arguments: argparse.Namespace, rank: int, ranks: int) -> None:
    folder = arguments.folder
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 3, 3, padding=1)
    trained: Any = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader, step, file = batches(folder), 0, folder / "checkpoint.pt"
    if arguments.resume and file.exists():
        saved = torch.load(file)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        print(f"rank {rank} of {ranks} continues after step {step}, in epoch {loader.epoch}", flush=True)
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            noise = torch.randn(batch["latent"].shape)
            loss = (trained(batch["latent"] + noise) - noise).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            seen = {
                "step": step,
                "epoch": epoch,
                "shape": [*batch["latent"].shape[2:]],
                "numbers": batch["number"].tolist(),
                "captions": batch["caption"],
            }
            with (folder / f"seen-{rank}.jsonl").open("a") as lines:
                lines.write(json.dumps(seen) + "\n")
            if rank == 0 and step % SAVE_EVERY == 0:
                state = {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                }
                torch.save(state, folder / "new.pt")
                os.replace(folder / "new.pt", file)
            if step == arguments.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
    loader.close()
    print(f"rank {rank}: loss {loss.item():.3f} after {step} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die-after", type=int, default=0)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    if rank == 0 and not arguments.folder.exists():
        make_pictures(arguments.folder)
    if ranks > 1:
        dist.barrier()
    train(arguments, rank, ranks)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
