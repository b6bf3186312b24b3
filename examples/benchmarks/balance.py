"""Global batches dealt by cost: how much more the slowest rank has than the mean, what dealing takes, and how long
ranks wait.

    python examples/benchmarks/balance.py [--steps 40]

Documents have lognormal lengths with a mean of 645 tokens, and cost what they are long. The first table compares the
rank with the most tokens with the mean: as dealt without `balance`, with it, and as Karmarkar and Karp's differencing
deals all ranks' documents at once, with equal numbers (the rule of verl and others, which need the lengths of all ranks
in one place). No rule can beat the longest document with the shortest ones, or the mean. The second table is CPU time
of the thread that reads. In the third, four processes with gloo sleep for as long as their batch costs, and then wait
for each other. Nothing is loaded in the first two.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import time
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from penstock import Loader, Packs
from penstock.orders import ShuffledOrder

N = 200_000
COSTS = np.maximum(1, np.random.default_rng(0).lognormal(5.8, 1.16, N)).astype(np.int64)
NANOSECONDS = 40_000
"""A token of the third table sleeps so long."""


def karmarkar_karp(costs: np.ndarray, ranks: int) -> list[int]:
    """The sums of ``ranks`` parts with equal numbers: rows of neighbours by cost, of which the two with the largest
    differences are merged, large to small.
    """
    rows = np.sort(costs)[::-1].reshape(-1, ranks)
    heap = [(int(row[-1] - row[0]), number, row.tolist()) for number, row in enumerate(rows)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = sorted((a + b for a, b in zip(one, reversed(other), strict=True)), reverse=True)
        heapq.heappush(heap, (merged[-1] - merged[0], number, merged))
    return heap[0][2]


def best(costs: np.ndarray, ranks: int) -> float:
    """No rank can have less than the longest document and the shortest that fill its batch, nor all of them less than
    the mean.
    """
    ordered, size = np.sort(costs), len(costs) // ranks
    return max(costs.sum() / ranks, ordered[-1] + ordered[: size - 1].sum())


def batches(ranks: int, rank: int, size: int, balance: Any, n: int = N, **words: Any) -> Any:
    """The part of a loader's graph that finds the indices of its batches."""
    loader = Loader.from_dataset(
        range(n), size, shuffle=True, seed=1, rank=rank, world_size=ranks, tail="drop", balance=balance, **words
    )
    return loader.root.source


def slowest(steps: int) -> None:
    print("| ranks x batch | without | `balance` | Karmarkar-Karp | bound |\n|---|---|---|---|---|")
    for ranks, size in ((2, 8), (8, 4), (8, 8), (8, 32), (64, 4), (64, 8), (64, 32), (512, 8)):
        count = min(steps, N // (ranks * size))
        sums = {}
        for name, balance in (("without", None), ("balance", COSTS)):
            nodes = [batches(ranks, rank, size, balance) for rank in range(ranks)]
            hands = [node.read(node.start(0), count)[0] for node in nodes]
            sums[name] = np.array([[COSTS[hand[step].values].sum() for hand in hands] for step in range(count)])
        order = ShuffledOrder(N, 1).indices(0, np.arange(count * ranks * size)).reshape(count, -1)
        assert (sums["balance"].sum(1) == COSTS[order].sum(1)).all()
        mean = sums["without"].mean()
        karp = np.mean([max(karmarkar_karp(COSTS[row], ranks)) for row in order]) / mean
        bound = np.mean([best(COSTS[row], ranks) for row in order]) / mean
        row = [sums[name].max(1).mean() / mean for name in ("without", "balance")] + [karp, bound]
        print(f"| {ranks} x {size} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
    print()


def taken_us(node: Any, count: int) -> float:
    """The microseconds of a batch: the least of five times."""
    place = node.seek(node.start(0))
    found = []
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(count):
            _, place = node.read(place, 1)
        found.append((time.thread_time() - begin) / count * 1e6)
    return min(found)


def cost() -> None:
    print("| us a batch | without | with `balance` |\n|---|---|---|")
    many = np.tile(COSTS, 20)  # so that 4096 ranks have batches enough
    for ranks, size in ((1, 8), (8, 8), (64, 8), (64, 32), (4096, 8)):
        count = min(100, len(many) // ranks // size // 5)
        both = [taken_us(batches(ranks, 0, size, balance, len(many)), count) for balance in (None, many)]
        print(f"| {ranks} rank{'s' * (ranks > 1)}, batches of {size} | {both[0]:.1f} | {both[1]:.1f} |")
    for ranks, size in ((8, 4), (64, 4)):
        both = [
            taken_us(batches(ranks, 0, size, balance, groups=Packs(COSTS, 4096)), 20) for balance in (None, np.square)
        ]
        print(f"| {ranks} ranks, {size} packs of 4096 | {both[0]:.1f} | {both[1]:.1f} |")
    print()


def rank(number: int, ranks: int, steps: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=number, world_size=ranks)
    for size in (4, 8):
        for name, balance in (("without", None), ("`balance`", COSTS)):
            waited_s = 0.0
            with Loader.from_dataset(
                torch.arange(N), size, shuffle=True, seed=1, drop_last=True, balance=balance
            ) as loader:
                for batch in islice(loader, steps):
                    time.sleep(COSTS[batch.numpy()].sum() * NANOSECONDS / 1e9)
                    begin = time.perf_counter()
                    dist.barrier()
                    waited_s += time.perf_counter() - begin
                    if loader.position == 1:
                        began, waited_s = time.perf_counter(), 0.0
            took_s = torch.tensor([time.perf_counter() - began, waited_s])
            dist.all_reduce(took_s)
            if number == 0:
                print(
                    f"| {ranks} ranks, batches of {size}, {name} | {took_s[0] / ranks:.1f} | "
                    f"{took_s[1] / took_s[0]:.0%} |",
                    flush=True,
                )
    dist.destroy_process_group()


def waiting(steps: int) -> None:
    print("| four processes | s | of it waiting for the slowest |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (4, steps, folder), nprocs=4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    slowest(asked.steps)
    cost()
    waiting(asked.steps)
