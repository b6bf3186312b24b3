"""How far one loader scales: batches per second against the number of workers, and the price of an index against the
number of ranks and shards.

    python scale.py [--workers 1 2 4 8 16 32 64] [--loaders NAME ...] [--sleep-ms 10] [--seconds 1] [--repeats 3]
    [--json FILE]

Workers: a batch takes its worker ``--sleep-ms``, asleep, so that neither the work nor the number of cores is the limit.
What is left is the thread that reads the loader: it hands out tasks and takes in batches (8 samples of 256 float32). It
does nothing with them. ``share`` is the share of ``workers / sleep``, ``consumer`` the CPU time of the reading thread
per batch, and ``process`` that of its process, with the threads that `DataLoader` feeds its workers by (and, for worker
threads, with the workers). Loaders take turns; a cell is the median of the repeats.

Ranks: what a rank's index level (order, epochs, ranks, batches of indices) costs per batch of 256, alone in one process
that is told its rank and the world size. The order is shuffled, and has 2 to the 33 samples.

Shards: the same for 100,000 shards of 1000 records each, counted or not, with what it takes to begin and how much
memory, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH_SIZE, FEATURES = 8, 256
RANK_BATCH_SIZE, SAMPLES = 256, 2**33
SHARDS, RECORDS = 100_000, 1000
JUMPS = 50


class Asleep(Dataset[Any]):
    """Rows that take ``sleep_s`` a batch to load, and no CPU time."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s
        self.row = np.zeros(FEATURES, np.float32)

    def __len__(self) -> int:
        return 10**9

    def __getitems__(self, indices: list[int]) -> list[np.ndarray]:
        time.sleep(self.sleep_s)
        return [self.row] * len(indices)


def ours(dataset: Asleep, workers: int, method: Any) -> tuple[Iterator[Any], Callable[[], None]]:
    options: dict[str, Any] = (
        {"ray_options": {"num_cpus": 0}} if method == "ray" else {"multiprocessing_context": "fork"}
    )
    loader: penstock.Loader[Any] = penstock.Loader.from_dataset(
        dataset, BATCH_SIZE, num_workers=workers, method=method, **options
    )
    return iter(loader), loader.close


def theirs(dataset: Asleep, workers: int) -> tuple[Iterator[Any], Callable[[], None]]:
    batches: Any = iter(DataLoader(dataset, BATCH_SIZE, num_workers=workers, multiprocessing_context="fork"))
    return batches, batches._shutdown_workers


LOADERS: dict[str, Callable[[Asleep, int], tuple[Iterator[Any], Callable[[], None]]]] = {
    "penstock, threads": lambda dataset, workers: ours(dataset, workers, "thread"),
    "penstock, processes": lambda dataset, workers: ours(dataset, workers, "process"),
    "penstock, Ray": lambda dataset, workers: ours(dataset, workers, "ray"),
    "DataLoader": theirs,
}


def speed(loader: str, workers: int, sleep_s: float, seconds: float) -> dict[str, float]:
    """Read ``loader`` for ``seconds``, once all workers are at work."""
    batches, close = LOADERS[loader](Asleep(sleep_s), workers)
    try:
        for _ in range(8 * workers + 16):
            next(batches)
        count, start, thread, process = 0, time.perf_counter(), time.thread_time(), time.process_time()
        while (passed := time.perf_counter() - start) < seconds:
            next(batches)
            count += 1
        thread, process = time.thread_time() - thread, time.process_time() - process
    finally:
        close()
    rate = count / passed
    return {
        "batches_per_s": rate,
        "share": rate * sleep_s / workers,
        "consumer_us": thread / count * 1e6,
        "process_us": process / count * 1e6,
    }


def index_cost(order: Any, world_size: int, batches: int) -> dict[str, float]:
    """CPU time of the last rank's index level: per batch, and to resume in the middle of an epoch, with the first
    batch.
    """
    cycler = penstock.nodes.Cycler(penstock.nodes.Sampler(order))
    level: Any = penstock.nodes.Batcher(
        penstock.nodes.Sharder(cycler, world_size - 1, world_size, tail="drop"), RANK_BATCH_SIZE
    )
    level.reset(level.start_of(0))
    for _ in range(64):
        next(level)
    state = level.get_state()
    start = time.process_time()
    for _ in range(batches):
        next(level)
    each = (time.process_time() - start) / batches
    start = time.process_time()
    for _ in range(JUMPS):
        level.reset(state)
        next(level)
    return {"batch_us": each * 1e6, "jump_us": (time.process_time() - start) / JUMPS * 1e6}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def lines_of(shard: str) -> Iterator[int]:
    return iter(range(RECORDS))


def shard_cost(counted: bool, world_size: int, batches: int) -> dict[str, float]:
    """The same over many shards, with the seconds and the memory that it takes to begin."""
    names = [f"s3://bucket/corpus/part-{number:06}.jsonl.zst" for number in range(SHARDS)]
    memory, start = resident_mb(), time.perf_counter()
    if counted:
        data: Any = penstock.Shards(names, open=lines_of, counts=[RECORDS] * SHARDS)
    else:
        data = penstock.Stream(names, open=lines_of, epoch_size=2**20 * world_size, lanes=8 * world_size)
    order = data.order(shuffle=True, seed=1)
    assert order is not None
    begun = index_cost(order, world_size, 1)
    begin_s = time.perf_counter() - start
    return {**begun, **index_cost(order, world_size, batches), "begin_s": begin_s, "MB": resident_mb() - memory}


def apart(what: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """``what(*args)`` in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(what, args)


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    """Measure in turns, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument(
        "--loaders", nargs="+", choices=LOADERS, default=[name for name in LOADERS if not name.endswith("Ray")]
    )
    parser.add_argument("--sleep-ms", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--batches", type=int, default=2000, help="batches of indices")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every row there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    load = os.getloadavg()[0]
    order = penstock.orders.ShuffledOrder(SAMPLES, seed=1)
    if "penstock, Ray" in args.loaders:
        import ray

        ray.init(log_to_driver=False, include_dashboard=False)
    rows: list[dict[str, Any]] = []
    for repeat in range(args.repeats):
        for workers in args.workers:
            for loader in args.loaders:
                measured = speed(loader, workers, args.sleep_ms / 1e3, args.seconds)
                rows.append(
                    {"loader": loader, "workers": workers, "repeat": repeat, "load": os.getloadavg()[0], **measured}
                )
        rows += [
            {
                "world_size": size,
                "repeat": repeat,
                "load": os.getloadavg()[0],
                **apart(index_cost, order, size, args.batches),
            }
            for size in args.world_sizes
        ]
        rows += [
            {"counted": counted, "size": size, "repeat": repeat, **apart(shard_cost, counted, size, args.batches)}
            for counted in (True, False)
            for size in (1, max(args.world_sizes))
        ]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))

    print(
        f"{args.sleep_ms:g} ms asleep a batch, {os.cpu_count()} cores, load {load:.1f} to {os.getloadavg()[0]:.1f}, "
        f"{args.repeats} repeats\n"
    )
    print("| workers | loader | batches/s | share | consumer us | process us |\n|---|---|---|---|---|---|")
    for workers in args.workers:
        for loader in args.loaders:
            one = medians(
                [_numbers(row) for row in rows if (row.get("loader"), row.get("workers")) == (loader, workers)]
            )
            print(
                f"| {workers} | {loader} | {one['batches_per_s']:.0f} | {one['share']:.0%} | {one['consumer_us']:.0f} "
                f"| {one['process_us']:.0f} |"
            )
    print("\n| world size | us per batch of indices | us to jump into an epoch |\n|---|---|---|")
    for world_size in args.world_sizes:
        one = medians([_numbers(row) for row in rows if row.get("world_size") == world_size])
        print(f"| {world_size} | {one['batch_us']:.1f} | {one['jump_us']:.0f} |")
    print(
        f"\n{SHARDS:,} shards:\n\n| records | world size | us per batch of indices | us to jump | s to begin | MB |\n"
        f"|---|---|---|---|---|---|"
    )
    for counted in (True, False):
        for size in (1, max(args.world_sizes)):
            one = medians([_numbers(row) for row in rows if (row.get("counted"), row.get("size")) == (counted, size)])
            print(
                f"| {'counted' if counted else 'not counted'} | {size} | {one['batch_us']:.1f} | {one['jump_us']:.0f} "
                f"| {one['begin_s']:.2f} | {one['MB']:.0f} |"
            )


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


if __name__ == "__main__":
    main()
