"""Do the slow part of a dataset once: only the first epoch pays for it, not the later epochs and later runs.

python cached.py        # needs: pip install torch-penstock scikit-learn
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import penstock


class Relief:
    """scikit-learn's digits, enlarged and smoothed many times: slow, and the same every time."""

    def __init__(self, log: Path) -> None:
        self.images, self.labels = load_digits(return_X_y=True)
        self.log = log

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        with self.log.open("a") as log:  # one byte per call, from any process
            log.write(".")
        image = np.kron(self.images[index].reshape(8, 8) / 16, np.ones((12, 12))).astype(np.float32)
        for _ in range(40):
            image = sum(np.roll(image, shift, axis) for shift in (-1, 1) for axis in (0, 1)) / 4
        return image, int(self.labels[index])


class Shifted:
    """Random augmentation of what the cache returns: new in every epoch."""

    def __init__(self, samples: penstock.Cached) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = self.samples[index]
        return np.roll(image, penstock.sample().rng.integers(-8, 9, size=2), axis=(0, 1)), label


def run(name: str, log: Path, folder: Path, epochs: int) -> None:
    """Read the data, and print the time of each epoch."""
    digits = Shifted(penstock.Cached(Relief(log), folder, fingerprint="kron 12, smoothed 40 times"))
    with penstock.Loader.from_dataset(digits, batch_size=32, shuffle=True, num_workers=2, prefetch_next_epoch=False) as loader:
        for epoch in range(epochs):
            calls, began = log.stat().st_size, time.perf_counter()
            mean = np.mean([float(images.mean()) for images, _ in loader])
            took = time.perf_counter() - began
            print(f"{name}, epoch {epoch}: {took:5.2f} s, {log.stat().st_size - calls:3} dataset calls, mean {mean:.4f}")


def main() -> None:
    """A run of three epochs, and a second run that finds all samples in the cache."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calls"
        log.touch()
        run("first run", log, Path(folder) / "relief", epochs=3)
        run("second run", log, Path(folder) / "relief", epochs=1)


if __name__ == "__main__":
    main()
