"""For plain DDP without a trainer: the loader asks torch.distributed for its rank, and all ranks save the same state.

python plain_ddp.py                             # one rank
torchrun --nproc-per-node 2 plain_ddp.py        # two ranks; either can continue from the other's checkpoint
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import penstock

EPOCHS = 3


def train(file: Path, *, stop_after: int | None = None) -> list[int]:
    """Train from the checkpoint in ``file``, if there is one; returns the indices that this rank saw."""
    x = torch.linspace(-1, 1, 48).unsqueeze(1)
    data = TensorDataset(torch.arange(48), x, 3 * x + 1)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    with penstock.Loader.from_dataset(data, batch_size=4, shuffle=True, num_workers=1) as loader:
        if file.exists():
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            loader.load_state_dict(saved["loader"])
        for epoch in range(loader.epoch, EPOCHS):
            for step, (index, inputs, targets) in enumerate(loader):
                optimizer.zero_grad()
                (model(inputs) - targets).square().mean().backward()
                optimizer.step()
                seen += index.tolist()
                if (epoch, step) == (1, stop_after):
                    if dist.get_rank() == 0:
                        torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, file)
                    dist.barrier()
                    return seen
    return seen


def main() -> None:
    """Train once without a stop, then in two runs, and compare."""
    if not dist.is_torchelastic_launched():
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
            compare(Path(folder))
    else:
        dist.init_process_group("gloo")
        shared = [tempfile.mkdtemp()]
        dist.broadcast_object_list(shared)
        compare(Path(shared[0]))
    dist.destroy_process_group()


def compare(folder: Path) -> None:
    """Check that the two runs see the same samples as the single run."""
    whole = train(folder / "none.pt")
    both = train(folder / "last.pt", stop_after=2) + train(folder / "last.pt")
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: {len(whole)} samples, the same in two runs: "
        f"{both == whole}"
    )
    assert both == whole


if __name__ == "__main__":
    main()
