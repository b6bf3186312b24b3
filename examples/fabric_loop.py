"""Fabric: put the loader into the dict that you save, not into setup_dataloaders.

python fabric_loop.py        # needs: pip install 'torch-penstock[lightning]'
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import TensorDataset

import penstock


def train(file: Path, *, resume: bool) -> list[int]:
    """Three epochs of twelve batches, or the rest of them; saves in the middle of the second."""
    fabric = Fabric(accelerator="cpu", devices=1)
    x = torch.linspace(-1, 1, 48).unsqueeze(1)
    data = TensorDataset(torch.arange(48), x, 3 * x + 1)
    model = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[int] = []
    with penstock.Loader.from_dataset(data, batch_size=4, shuffle=True, num_workers=2) as loader:
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        if resume:
            fabric.load(file, state)
        for epoch in range(loader.epoch, 3):
            for batch in loader:
                index, inputs, targets = fabric.to_device(batch)
                optimizer.zero_grad()
                fabric.backward((model(inputs) - targets).square().mean())
                optimizer.step()
                seen += index.tolist()
                if (epoch, loader.position) == (1, 6) and not resume:
                    fabric.save(file, state)
    return seen


def main() -> None:
    """Train once without a stop, then again from the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        whole = train(Path(folder) / "state.ckpt", resume=False)
        resumed = train(Path(folder) / "state.ckpt", resume=True)
    print(
        f"single run: {len(whole)} samples; from the checkpoint: {len(resumed)}, and they are the last ones of the single run: {resumed == whole[72:]}"
    )
    assert resumed == whole[72:]


if __name__ == "__main__":
    main()
