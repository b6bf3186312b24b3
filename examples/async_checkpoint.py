"""For checkpoints that are written while training goes on: `torch.distributed.checkpoint.async_save` of a sharded
model, with the loader's state of the same step.

python async_checkpoint.py --folder run  # one rank; run again, it continues after its last complete checkpoint
torchrun --nproc-per-node=2 async_checkpoint.py --folder run  # continues on two

The model is tiny and sharded by FSDP2, which runs on CPUs, too. The global batch is the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import penstock

if TYPE_CHECKING:
    from concurrent.futures import Future

GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 8, 3, 5


class Noisy(Dataset[dict[str, Any]]):
    """A vector that belongs to the index, and noise that is drawn anew in each epoch."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = penstock.sample().rng.standard_normal(8, np.float32)
        return {"index": index, "noisy": noise + index / 100, "clean": np.full(8, index / 100, np.float32)}


def last_complete(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end: ``.metadata`` comes last."""
    complete = [file.parent for file in folder.glob("step-*/.metadata")]
    return max(complete, key=lambda one: int(one.name.removeprefix("step-")), default=None)


def train(folder: Path, die_after: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = penstock.Loader.from_dataset(
        Noisy(), batch_size=GLOBAL_BATCH // ranks, shuffle=True, seed=1, num_workers=1
    )
    # the upload's collectives must not mix with those of training
    step, in_background = 0, dist.new_group(backend="gloo")
    upload: Future[Any] | None = None

    def states() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "step": step, "loader": loader.state_dict()}

    if found := last_complete(folder):
        saved = states()
        dcp.load(saved, checkpoint_id=found)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
        print(f"rank {rank} of {ranks} continues after step {step}, in epoch {loader.epoch}", flush=True)
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            loss = (model(batch["noisy"]) - batch["clean"]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            with (folder / f"seen-{rank}.jsonl").open("a") as lines:
                rows = list(zip(batch["index"].tolist(), batch["noisy"][:, 0].tolist(), strict=True))
                lines.write(json.dumps({"step": step, "epoch": epoch, "rows": rows}) + "\n")
            if step % SAVE_EVERY == 0:
                if upload is not None:
                    upload.result()  # one at a time; raises if it failed
                upload = dcp.async_save(states(), checkpoint_id=folder / f"step-{step}", process_group=in_background)
            if step == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
    if upload is not None:
        upload.result()
    loader.close()
    print(f"rank {rank}: loss {loss.item():.3f} after {step} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--die-after", type=int, default=0)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    arguments.folder.mkdir(exist_ok=True)
    train(arguments.folder, arguments.die_after)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
