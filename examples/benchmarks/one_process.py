"""Loaders in the same process, in turns: the time of a batch, and what it costs beyond load and collate.

    python one_process.py [--workloads text python decode] [--threads 0] [--processes 6] [--turns 10] [--seconds 0.1]
    python one_process.py --apart [--workloads python]
        a process for each: how long the dataset's own function takes there

`loaders.py` gives each loader a process of its own, as a user would. But where a process has its memory decides, for as
long as it lives, how fast the same JPEG decoder or the same loop in Python runs in it: by up to 16 %. Here the loaders
share a process, and there are several. A ratio is the median of all turns' ratios, with its 95 % interval; the medians
of the processes follow.

Without threads the other is `DataLoader`, and a time is the thread's CPU time. With threads it is torchdata.nodes, and
a time is that of the clock. A turn begins when what was loaded ahead is used up, and the next one when the workers have
loaded ahead again, so that nobody works in another's turn.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from loader_peers import WORKLOADS, Collated, Workload
from tables import verdict
from torch.utils.data import DataLoader, RandomSampler

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OTHERS = ("DataLoader", "torchdata.nodes")  # without and with threads
AHEAD = 8  # batches that a thread may have loaded ahead


def bare(dataset: Any, size: int, collate: Any) -> Iterator[Any]:
    """Load and collate, and nothing else."""
    while True:
        for indices in torch.randperm(len(dataset)).split(size):
            if len(indices) == size:
                yield collate([dataset[index] for index in indices.tolist()])


def with_nodes(dataset: Any, size: int, collate: Any, threads: int) -> Iterator[Any]:
    """torchdata.nodes, with worker threads."""
    import torchdata.nodes as tn

    node = tn.Batcher(tn.SamplerWrapper(RandomSampler(dataset)), size)
    node = tn.ParallelMapper(node, Collated(dataset, collate), num_workers=threads, method="thread")
    return forever(tn.Loader(tn.Prefetcher(node, prefetch_factor=2 * threads)))


def turn_us(batches: Iterator[Any], seconds: float, threads: int) -> float:
    """Time per batch, in us."""
    clock = time.perf_counter if threads else time.thread_time
    for _ in range(AHEAD * threads):
        next(batches)
    began, until, count = clock(), time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        next(batches)
        count += 1
    time_us = 1e6 * (clock() - began) / count
    time.sleep(seconds if threads else 0)
    return time_us


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


class Timed:
    """A dataset, and how long each of its samples took, in us."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.took_us: list[float] = []

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        began = time.perf_counter()
        sample = self.dataset[index]
        self.took_us.append(1e6 * (time.perf_counter() - began))
        return sample


def opened(workload: Workload, dataset: Any, threads: int) -> dict[str, Iterator[Any]]:
    """The loaders; none has begun."""
    size = workload.batch_size
    shared: dict[str, Any] = {"batch_size": size, "shuffle": True, "drop_last": True, "collate_fn": workload.collate}
    return {
        "bare": bare(dataset, size, workload.collate),
        OTHERS[threads > 0]: with_nodes(dataset, size, workload.collate, threads)
        if threads
        else forever(DataLoader(dataset, **shared)),
        "penstock": forever(penstock.Loader.from_dataset(dataset, **shared, num_workers=threads, method="thread")),
    }


def inside_us(name: str, reader: str, seconds: float) -> float:
    """The median time of a sample in the dataset's own function, if only ``reader`` runs in this process."""
    torch.set_num_threads(1)
    dataset = Timed(WORKLOADS[name].make(WORKLOADS[name].length))
    batches, until = opened(WORKLOADS[name], dataset, 0)[reader], time.perf_counter() + seconds
    while time.perf_counter() < until:
        next(batches)
    return statistics.median(dataset.took_us)


def measured(name: str, threads: int, turns: int, seconds: float) -> list[dict[str, float]]:
    """The turns of one process."""
    torch.set_num_threads(1)
    readers = opened(WORKLOADS[name], WORKLOADS[name].make(WORKLOADS[name].length), threads)
    for reader in readers.values():
        for _ in range(20):
            next(reader)
    # nobody always comes after the same one
    orders = (random.Random(turn).sample(list(readers), len(readers)) for turn in range(turns))
    return [{one: turn_us(readers[one], seconds, threads) for one in order} for order in orders]


def in_its_own(function: Any, *arguments: Any) -> Any:
    """What ``function`` returns in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    """Measure each workload, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=["text", "python", "decode"])
    parser.add_argument("--threads", type=int, default=0, help="worker threads of each loader")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--turns", type=int, default=10, help="in each process")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a turn")
    parser.add_argument("--apart", action="store_true", help="a process for each loader, without threads")
    options = parser.parse_args()
    if options.apart:
        for name in options.workloads:
            took: dict[str, list[float]] = {one: [] for one in ("bare", OTHERS[0], "penstock")}
            for _, one in itertools.product(range(options.processes), took):
                took[one].append(in_its_own(inside_us, name, one, options.turns * options.seconds))
            each = (f"{one} {statistics.median(us):.0f} ({min(us):.0f} to {max(us):.0f})" for one, us in took.items())
            print(f"{name}: us a sample in the dataset's own function: {', '.join(each)}", flush=True)
        return
    for name in options.workloads:
        of_each = [
            in_its_own(measured, name, options.threads, options.turns, options.seconds)
            for _ in range(options.processes)
        ]
        other = OTHERS[options.threads > 0]
        turns = [turn for process in of_each for turn in process]
        bare_us = statistics.median(turn["bare"] for turn in turns)
        beyond = (
            f"{one} {statistics.median(turn[one] - turn['bare'] for turn in turns):.0f}" for one in ("penstock", other)
        )
        print(f"{name}: load and collate {bare_us:.0f} us a batch, beyond that {', '.join(beyond)}")
        ratios = [[turn[other] / turn["penstock"] for turn in process] for process in of_each]
        each = ", ".join(f"{statistics.median(process):.2f}" for process in ratios)
        print(
            f"    penstock / {other}: {verdict([ratio for process in ratios for ratio in process])}; by process {each}",
            flush=True,
        )


if __name__ == "__main__":
    main()
