"""An ``IterableDataset`` that splits itself by worker, read by ``DataLoader``, by lanes in its own epochs, and as an
endless `Stream`.

    python iterable.py [--turns 6] [--seconds 4] [--workers 2] [--batch-size 64] [--lanes 64] [--only NAME ...]

The loaders take turns, and each has ``--workers`` processes. A sample is 512 floats; making one computes, or sleeps,
for as long as its row says. "no loader" are as many processes that make samples and do nothing else. Throughput and CPU
time of the training process, a sample, are medians of the ratios to ``DataLoader`` in the same turn, with quartiles.
The machine should be idle.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import multiprocessing
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.queues import SimpleQueue

ENDLESS = 2**40


class Samples(IterableDataset[torch.Tensor]):
    """Endless: worker k of n yields samples k, k + n, and so on."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for number in range(0 if info is None else info.id, ENDLESS, 1 if info is None else info.num_workers):
            self.work()
            yield torch.full((512,), float(number))


def compute(rounds: int) -> None:
    """Computes without memory: how fast a loop of Python is depends on where in memory its numbers happen to lie."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)


def rounds_in(seconds: float) -> int:
    """How many rounds of `compute` take so long on a free core."""
    began = time.perf_counter()
    compute(10**6)
    return int(seconds / (time.perf_counter() - began) * 10**6)


def rate_of(loader: Any, batch_size: int, seconds: float) -> tuple[float, float]:
    """Samples per second, and CPU time of this process per sample, after a quarter of the time."""
    batches = iter(loader)
    for duration in (seconds / 4, seconds):
        began, used, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < duration:
            next(batches)
            count += batch_size
        took, used = time.perf_counter() - began, time.process_time() - used
    if isinstance(loader, penstock.Loader):
        loader.close()
    return count / took, used / count


def make(work: Callable[[], Any], seconds: float, rates: SimpleQueue[float]) -> None:
    """What a process without a loader does; puts its samples per second into ``rates``."""
    torch.set_num_threads(1)
    samples, began, count = iter(Samples(work)), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(samples)
        count += 1
    rates.put(count / (time.perf_counter() - began))


def alone(work: Callable[[], Any], workers: int, seconds: float) -> tuple[float, float]:
    """The same without a loader."""
    rates: SimpleQueue[float] = multiprocessing.SimpleQueue()
    processes = [multiprocessing.Process(target=make, args=(work, seconds, rates)) for _ in range(workers)]
    for process in processes:
        process.start()
    rate = sum(rates.get() for _ in processes)
    for process in processes:
        process.join()
    return rate, math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works: dict[str, Callable[[], Any]] = {
        "nothing": int,
        "computes 10 us": partial(compute, rounds_in(1e-5)),
        "computes 1 ms": partial(compute, rounds_in(1e-3)),
        "sleeps 1 ms": partial(time.sleep, 1e-3),
    }
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=list(works), default=list(works), metavar="NAME")
    given = parser.parse_args()
    size, workers = given.batch_size, given.workers
    print(f"{'':16}{'':12}{'samples/s':>10}{'throughput':>26}{'CPU of this process':>26}")
    for name in given.only:
        data = Samples(works[name])
        loaders: dict[str, Callable[[], Any]] = {
            "DataLoader": lambda data=data: DataLoader(data, batch_size=size, num_workers=workers),
            "own epochs": lambda data=data: penstock.Loader.from_dataset(
                data, batch_size=size, num_workers=workers, lanes=workers
            ),
            "stream": lambda data=data: penstock.Loader.from_dataset(
                penstock.Stream(data, lanes=given.lanes, epoch_size=ENDLESS), batch_size=size, num_workers=workers
            ),
        }
        found: dict[str, list[tuple[float, float]]] = {loader: [] for loader in (*loaders, "no loader")}
        for _ in range(given.turns):
            for loader, build in loaders.items():
                found[loader].append(rate_of(build(), size, given.seconds))
            found["no loader"].append(alone(works[name], workers, given.seconds))
        for loader, rates in found.items():
            ratios = zip(
                *((a / b, c / d) for (a, c), (b, d) in zip(rates, found["DataLoader"], strict=True)), strict=True
            )
            shown = []
            for ratio in ratios:
                low, middle, high = statistics.quantiles(ratio, n=4, method="inclusive")
                shown.append(f"{middle:.3f} ({low:.3f} to {high:.3f})" if middle == middle else "")
            rate = statistics.median(rate for rate, _ in rates)
            print(f"{name:16}{loader:12}{rate:10,.0f}{shown[0]:>26}{shown[1]:>26}", flush=True)


if __name__ == "__main__":
    main()
