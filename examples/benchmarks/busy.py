"""Small batches from 2 worker processes, beside programs that compute and programs that sleep and wake.

python examples/benchmarks/busy.py [PAIRS]    # 15 pairs of epochs for each number of programs, some 3 minutes

A pair is an epoch of a ``DataLoader`` with persistent workers and one of penstock, in turns. Printed are the medians in
ms per batch, and the median and the quartiles of their ratio.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from typing import Any

import torch

import penstock

BESIDE = [(0, 0), (4, 0), (8, 0), (0, 4), (0, 8), (4, 4), (8, 8)]
"""How many programs compute, and how many sleep and wake."""


class Small(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of 3 kB that take 50 us of Python."""

    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> torch.Tensor:
        for _ in range(2_000):
            pass
        return torch.full((3, 16, 16), float(index))


def compute() -> None:
    while True:
        sum(range(100_000))


def wake() -> None:
    while True:
        sum(range(20_000))
        time.sleep(0.001)


def epoch_ms(loader: Any) -> float:
    """One epoch, per batch."""
    began, batches = time.perf_counter(), 0
    for _ in loader:
        batches += 1
    return 1e3 * (time.perf_counter() - began) / batches


def main(pairs: int = 15) -> None:
    torch.set_num_threads(1)
    for computing, waking in BESIDE:
        others = [
            multiprocessing.Process(target=what, daemon=True)
            for what, number in ((compute, computing), (wake, waking))
            for _ in range(number)
        ]
        for other in others:
            other.start()
        theirs = torch.utils.data.DataLoader(Small(), 8, shuffle=True, num_workers=2, persistent_workers=True)
        with penstock.Loader.from_dataset(Small(), 8, shuffle=True, num_workers=2, seed=0) as ours:
            epoch_ms(theirs), epoch_ms(ours)
            times: list[tuple[float, float]] = []
            for pair in range(pairs):
                first, second = (theirs, ours) if pair % 2 else (ours, theirs)
                one, other_one = epoch_ms(first), epoch_ms(second)
                times.append((one, other_one) if pair % 2 else (other_one, one))
        for other in others:
            other.terminate()
            other.join()
        ratios = [their / our for their, our in times]
        low, middle, high = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
        their, our = (statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"{computing} compute, {waking} sleep and wake: DataLoader {their:.2f} ms, penstock {our:.2f} ms, "
            f"{middle:.2f} times as fast ({low:.2f} to {high:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
