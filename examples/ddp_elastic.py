"""For jobs whose number of GPUs changes: train on 2 ranks, get killed, continue on 3, then on 1, with every sample once
and in order.

python ddp_elastic.py                                                # the whole story; it starts torchrun itself
torchrun --nproc-per-node=4 ddp_elastic.py FOLDER LAST-STEP          # one run: starts or continues in FOLDER

Loader, model and optimizer are saved together by torch.distributed.checkpoint. The global batch is 48 on any number of
ranks. Needs: pip install torch-penstock scikit-learn
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import penstock

GLOBAL_BATCH = 48
SAVE_EVERY = 10


def digits() -> TensorDataset:
    """8 x 8 pixels, the digit, and the sample's own number, so that we can see where it went."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels), torch.arange(len(labels))
    )


def new_loader(batch_size: int) -> penstock.Loader:
    """The loader asks torch.distributed for its rank when it delivers its first batch."""
    return penstock.Loader.from_dataset(
        digits(), batch_size=batch_size, shuffle=True, seed=1, drop_last=True, num_workers=1
    )


class Training:
    """Model and optimizer, in a form that torch.distributed.checkpoint loads on any number of ranks."""

    def __init__(self, device: torch.device):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
        self.model = DistributedDataParallel(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.step = 0

    def learn(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        loss = cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def checkpoints(folder: Path) -> list[Path]:
    """All complete checkpoints, oldest first; torch.distributed.checkpoint writes .metadata last."""
    return sorted(file.parent for file in folder.glob("step-*/.metadata"))


def train(folder: Path, last_step: int, die_at: int) -> None:
    """One run, on the ranks started by torchrun."""
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    training, loader = Training(device), new_loader(GLOBAL_BATCH // ranks)
    everything = {"training": training, "loader": loader}
    if found := checkpoints(folder):
        dcp.load(everything, checkpoint_id=found[-1])
    if rank == 0:
        print(
            f"{ranks} ranks begin at step {training.step}: epoch {loader.epoch}, batch {loader.position} of "
            f"{len(loader)}",
            flush=True,
        )

    loss = 0.0
    while training.step < last_step:
        for images, labels, numbers in loader:
            if training.step == die_at and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = training.learn(images.to(device), labels.to(device))
            log(folder, training.step, numbers)
            if training.step % SAVE_EVERY == 0:
                dcp.save(everything, checkpoint_id=folder / f"step-{training.step:06}")
            if training.step == last_step:
                break
    if rank == 0:
        print(f"{ranks} ranks end at step {training.step}, with a loss of {loss:.3f}", flush=True)
    loader.close()
    dist.destroy_process_group()


def log(folder: Path, step: int, numbers: torch.Tensor) -> None:
    """Record which samples all ranks have just trained on, in the order of the global sequence, which is dealt like
    cards.
    """
    hands = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(hands, numbers)
    if dist.get_rank() == 0:
        with (folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps([step, torch.stack(hands, dim=1).flatten().tolist()]) + "\n")


def launch(ranks: int, folder: Path, last_step: int, die_at: int = -1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    arguments = [str(folder), str(last_step), str(die_at)]
    return subprocess.run(
        command + arguments, env={"OMP_NUM_THREADS": "1", **os.environ}, stderr=subprocess.PIPE, text=True
    )


def story() -> None:
    """2 ranks, one of which is killed at step 25; then 3 ranks from the last checkpoint; then 1."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killed = launch(2, folder, last_step=200, die_at=25)
        assert "Signal 9 (SIGKILL)" in killed.stderr, killed.stderr
        print(
            f"a rank was killed by SIGKILL, and torchrun exited with {killed.returncode}; the last checkpoint is "
            f"{checkpoints(folder)[-1].name}"
        )
        for ranks, last_step in ((3, 50), (1, 80)):
            run = launch(ranks, folder, last_step)
            assert run.returncode == 0, run.stderr
        lines = (folder / "samples.jsonl").read_text().splitlines()
        steps = dict(map(json.loads, lines))  # steps 21 to 25 appear twice; the later ones count

    with new_loader(GLOBAL_BATCH) as loader:
        batches = [numbers.tolist() for _ in range(3) for _, _, numbers in loader]
    uninterrupted = dict(enumerate(batches[:80], start=1))
    print(
        f"80 steps over 3 epochs on 2, 3 and 1 ranks; the global sequence of samples is identical: "
        f"{steps == uninterrupted}"
    )
    assert steps == uninterrupted


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1)
    else:
        story()
