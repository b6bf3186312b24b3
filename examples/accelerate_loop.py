"""For Accelerate: AccelerateLoader moves the batches, is saved by save_state, and synchronizes the last window of an
epoch.

python accelerate_loop.py        # needs: pip install '.[accelerate]'
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import TensorDataset

import penstock
from penstock.integrations.accelerate import AccelerateLoader


def train(folder: str, *, resume: bool) -> tuple[list[int], int]:
    """Three epochs of twelve batches, in windows of five, saved in the middle of the second; returns the samples and
    the optimizer steps.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=5)
    x = torch.linspace(-1, 1, 48).unsqueeze(1)
    data = TensorDataset(torch.arange(48), x, 3 * x + 1)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen, steps = [], 0
    with penstock.Loader.from_dataset(data, batch_size=4, shuffle=True, num_workers=2) as loader:
        batches = accelerator.prepare(AccelerateLoader(loader, accelerator))
        if resume:
            accelerator.load_state(folder)
        for epoch in range(loader.epoch, 3):
            for index, inputs, targets in batches:
                with accelerator.accumulate(model):
                    accelerator.backward((model(inputs) - targets).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                seen += index.tolist()
                steps += accelerator.sync_gradients
                if (epoch, loader.position) == (1, 6) and not resume:
                    accelerator.save_state(folder)
    return seen, steps


def main() -> None:
    """Train once without a stop, then again from the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        whole, steps = train(folder, resume=False)
        resumed, _ = train(folder, resume=True)
    print(f"{steps} steps: 12 batches in windows of 5 make 3 steps per epoch, including the short window")
    print(
        f"single run: {len(whole)} samples; from the checkpoint: {len(resumed)}, and they are the last ones of the "
        f"single run: {resumed == whole[72:]}"
    )
    assert (resumed, steps) == (whole[72:], 9)


if __name__ == "__main__":
    main()
