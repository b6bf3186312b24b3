"""Digits held in memory compared with digits loaded sample by sample: the same batches, many times faster.

python resident.py [--device cuda]        # needs: pip install torch-penstock scikit-learn
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

import penstock

EPOCHS = 20


class Digits(Dataset):
    """Images as if read from files: one by one, to be scaled by a transform."""

    def __init__(self) -> None:
        self.images, self.labels = load_digits(return_X_y=True)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(self.images[index] / 16, dtype=torch.float32).reshape(1, 8, 8), int(self.labels[index])


def shifted(batch: list[torch.Tensor], rng: penstock.BatchRng) -> list[torch.Tensor]:
    """Random augmentation of a whole batch, on its device: shifts every image by up to one pixel, the same on any
    number of ranks.
    """
    images, labels = batch
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    down, right = rng.integers(0, 3, 2).unbind(dim=1)
    at = torch.arange(8, device=images.device)
    rows, columns = (down[:, None] + at)[:, :, None], (right[:, None] + at)[:, None, :]
    return [padded[torch.arange(len(images), device=images.device)[:, None, None], 0, rows, columns][:, None], labels]


def us_per_batch(loader: object) -> float:
    """Microseconds per batch, including epoch boundaries."""
    batches = sum(1 for _ in loader)
    start = time.perf_counter()
    for _ in range(EPOCHS):
        for _ in loader:
            pass
    return (time.perf_counter() - start) / (EPOCHS * batches) * 1e6


def main() -> None:
    """Compare, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    digits = Digits()
    resident = penstock.Resident(digits, options.device)
    with (
        penstock.Loader.from_dataset(digits, batch_size=64, shuffle=True) as one_by_one,
        penstock.Loader.from_dataset(resident, batch_size=64, shuffle=True) as at_once,
    ):
        for (images, labels), (held, held_labels) in zip(one_by_one, at_once, strict=True):
            assert images.equal(held.cpu())
            assert labels.equal(held_labels.cpu())
        print("one epoch compared: every batch is the same, value for value")
        builds = {
            "DataLoader": DataLoader(digits, 64, shuffle=True),
            "penstock, sample by sample": one_by_one,
            "penstock, resident": at_once,
        }
        times = {name: [us_per_batch(loader) for _ in range(3)] for name, loader in builds.items()}
    for name, measured in times.items():
        ratio = statistics.median(times["DataLoader"]) / statistics.median(measured)
        print(f"{name:28}{statistics.median(measured):9.1f} us per batch {ratio:7.1f} x")

    resident.augment = shifted
    with penstock.Loader.from_dataset(resident, batch_size=64, shuffle=True) as augmented:
        images, _ = next(iter(augmented))
        print(f"augmented on {images.device}: {tuple(images.shape)}, {images.dtype}")


if __name__ == "__main__":
    main()
