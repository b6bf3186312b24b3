"""What an epoch boundary costs: the wait for the first batch of an epoch, compared with the wait for any other batch.

    python epoch_gap.py [--batches 50] [--workers 2] [--epochs 20] [--repeats 3] [--step-ms 1]

Tiny samples (32 float32), batches of 64, ``--batches`` per epoch. The consumer computes for ``--step-ms`` per batch
without holding Python's lock, like a training step. The time varies a little, because two workers in lockstep finish in
pairs, and 50 is even. Loaders are interleaved. The other loaders are set up as their documentation recommends. With
``--workers 0``, only the loaders that work without are measured.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
import torchdata.nodes as tn
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BATCH_SIZE = 64


class Rows(Dataset):
    """Tiny samples."""

    def __init__(self, batches: int) -> None:
        self.rows = np.random.default_rng(0).random((batches * BATCH_SIZE, 32), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[index]


def nodes(dataset: Rows, workers: int) -> tn.Loader:
    """torchdata.nodes, with worker processes that make whole batches."""
    batches = tn.Batcher(tn.SamplerWrapper(RandomSampler(dataset)), BATCH_SIZE)
    return tn.Loader(
        tn.ParallelMapper(
            batches, Collated(dataset), num_workers=workers, method="process", multiprocessing_context="fork"
        )
    )


class Collated:
    """Turn indices into a batch."""

    def __init__(self, dataset: Rows) -> None:
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> torch.Tensor:
        return default_collate([self.dataset[index] for index in indices])


def waits(loader: Iterable[torch.Tensor], epochs: int, step: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Seconds of waiting for the first batch of each epoch except the very first, and for every other batch."""
    first, other = [], []
    start = time.perf_counter()
    for _ in range(epochs):
        times = []
        for _ in loader:
            times.append(time.perf_counter() - start)
            step()
            start = time.perf_counter()
        first.append(times[0])
        other += times[1:]
    return first[1:], other


def main() -> None:
    """Measure the loaders in turns, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=1)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dataset, work = Rows(options.batches), torch.rand(256, 256)
    start = time.perf_counter()
    for _ in range(100):
        work @ work
    products = round(options.step_ms / 1000 / ((time.perf_counter() - start) / 100))

    jitter = random.Random(0)

    def step() -> None:
        for _ in range(round(products * jitter.uniform(0.5, 1.5))):
            work @ work

    shared = {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": options.workers}
    inline: dict[str, tuple[int, Callable[[], Iterable[torch.Tensor]]]] = {
        "penstock": (options.epochs, lambda: penstock.Loader.from_dataset(dataset, **shared)),
        "DataLoader": (options.epochs, lambda: DataLoader(dataset, **shared)),
    }
    builds = (
        inline
        if not options.workers
        else {
            "penstock, threads": (
                options.epochs,
                lambda: penstock.Loader.from_dataset(dataset, method="thread", **shared),
            ),
            "penstock, processes": (options.epochs, lambda: penstock.Loader.from_dataset(dataset, **shared)),
            "DataLoader": (4, lambda: DataLoader(dataset, **shared)),
            "DataLoader, persistent": (options.epochs, lambda: DataLoader(dataset, persistent_workers=True, **shared)),
            "torchdata.nodes, processes": (4, lambda: nodes(dataset, options.workers)),
        }
    )
    firsts: dict[str, list[float]] = {name: [] for name in builds}
    others: dict[str, list[float]] = {name: [] for name in builds}
    for _ in range(options.repeats):
        for name, (epochs, build) in builds.items():
            first, other = waits(build(), epochs, step)
            firsts[name] += first
            others[name] += other
    print(f"wait for a batch in ms, {options.step_ms} ms of work per batch")
    print(f"{'':28}{'median: first':>14}{'other':>9}{'ratio':>8}{'mean: first':>14}{'other':>9}{'ratio':>8}")
    for name in builds:
        columns = ""
        for average in (statistics.median, statistics.mean):
            first, other = average(firsts[name]), average(others[name])
            columns += f"{1000 * first:14.3f}{1000 * other:9.3f}{first / other:8.2f}"
        print(f"{name:28}{columns}")


if __name__ == "__main__":
    main()
