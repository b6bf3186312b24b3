"""Packs and buckets: how full, at what cost, and how long ranks wait for each other.

    python examples/benchmarks/groups.py [DOCUMENTS]

Documents have lognormal lengths with a mean of 645 tokens and are packed to 4096. Utterances last 8.5 s on average and
are put into batches of at most 200 s and 64 utterances. In the last table 8 ranks take turns at the batches, and a step
takes as long as its most expensive batch: padded length, plus a quadratic part as large at 20 s. Nothing is loaded.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from penstock import Buckets, Packs
from penstock.nodes import Cycler, Grouper, Sharder
from penstock.orders import ShuffledOrder

N = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
RANKS, BUDGET, MOST = 8, 200.0, 64


def documents() -> np.ndarray:
    return np.maximum(1, np.random.default_rng(0).lognormal(5.8, 1.16, N)).astype(np.int64)


def utterances() -> np.ndarray:
    return np.random.default_rng(3).lognormal(1.9, 0.7, N).clip(0.5, 35)


def walked(node: Any) -> tuple[int, float]:
    """The number of groups in an epoch, and the microseconds for each document: the least of three times."""
    took_s = []
    for _ in range(3):
        groups, place, begin = 0, node.start(0), time.perf_counter()
        while place is not None:
            items, behind = node.read(place, 64)
            groups, place = groups + len(items), behind if len(items) else None
        took_s.append(time.perf_counter() - begin)
    return groups, min(took_s) / N * 1e6


def packs() -> None:
    lengths = documents()
    print("| packs of 4096 | filled | us a document | a jump, ms |\n|---|---|---|---|")
    for block in (64, 256, 1024, 4096, 16_384):
        node = Grouper(ShuffledOrder(N, 1), Packs(lengths, 4096, block=block))
        groups, us = walked(node)
        jumps = []
        for place in range(2, 7):
            at = N // block * place // 8
            begin = time.perf_counter()
            node.read({"epoch": 0, "block": at, "taken": 0, "position": at}, 1)
            jumps.append(time.perf_counter() - begin)
        print(f"| block {block} | {lengths.sum() / (4096 * groups):.2%} | {us:.1f} | {min(jumps) * 1000:.1f} |")
    print()


def buckets() -> None:
    lengths = utterances()
    print("| batches of 200 s | padding | us an utterance | 8 ranks wait |\n|---|---|---|---|")
    plain = list(np.array_split(np.random.default_rng(0).permutation(N), N * lengths.mean() // BUDGET))
    report("no buckets", lengths, plain, 0.0)
    for name, alike in (
        ("single batches shuffled", 1),
        ("runs of 7: not aligned with the ranks", 7),
        ("runs of 8", 8),
        ("runs of 64", 64),
    ):
        node = Sharder(
            Cycler(Grouper(ShuffledOrder(N, 1), Buckets(lengths, BUDGET, max_samples=MOST, same_size_run=alike))), 0, 1
        )
        _, us = walked(node)
        report(name, lengths, [item.values for item in node.read(node.start(0), N)[0]], us)


def report(name: str, lengths: np.ndarray, batches: list[np.ndarray], us: float) -> None:
    longest = np.array([lengths[batch].max() for batch in batches])
    sizes = longest * np.array(list(map(len, batches)))
    cost = (sizes * (1 + longest / 20))[: len(batches) // RANKS * RANKS].reshape(-1, RANKS)
    wait = 1 - cost.mean() / cost.max(axis=1).mean()
    print(f"| {name} | {1 - lengths.sum() / sizes.sum():.1%} | {us:.1f} | {wait:.1%} |")


if __name__ == "__main__":
    packs()
    buckets()
