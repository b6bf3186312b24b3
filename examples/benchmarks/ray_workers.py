"""What workers on a Ray cluster cost, beside the bare actor calls that nobody can do without, in turns, on this
machine.

    python examples/benchmarks/ray_workers.py [--repeats 5] [--json FILE]

Two actors, two results on their way for each. *Bare* is a call of an actor that returns the batch as an array,
`ray.get`, and one copy of it out of Ray's store; *penstock* is the loop over a loader with ``method="ray"``,
*processes* the same with worker processes. The samples cost nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock

ray: Any = importlib.import_module("ray") if importlib.util.find_spec("ray") else None
WORKERS, AHEAD = 2, 2
SIZES = {"4 KB": (1024,), "38.5 MB": (64, 3, 224, 224)}
BATCHES = {"4 KB": 3000, "38.5 MB": 80}


class Batches:
    """One sample is a batch, taken from memory."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full(self.shape, float(i))


class Bare:
    """What the bare call calls."""

    def batch(self, shape: tuple[int, ...], i: int) -> np.ndarray:
        return np.full(shape, float(i), np.float32)


class Ours:
    """A loop over a loader."""

    def __init__(self, size: str, method: str) -> None:
        began = time.perf_counter()
        self.loader = penstock.Loader.from_dataset(
            Batches(SIZES[size]), batch_size=None, num_workers=WORKERS, method=method, infinite=True
        )
        self.batches = iter(self.loader)
        next(self.batches)
        self.first_s = time.perf_counter() - began

    def take(self, n: int) -> None:
        for _ in range(n):
            next(self.batches)

    def close(self) -> None:
        self.loader.close()


class Calls:
    """The bare calls."""

    def __init__(self, size: str) -> None:
        began = time.perf_counter()
        self.shape = SIZES[size]
        actor = ray.remote(Bare)
        self.actors = [actor.remote() for _ in range(WORKERS)]
        self.copy = np.empty(self.shape, np.float32)
        self.take(1)
        self.first_s = time.perf_counter() - began

    def take(self, n: int) -> None:
        on_its_way: deque[Any] = deque()
        for i in range(n):
            on_its_way.append(self.actors[i % WORKERS].batch.remote(self.shape, i))
            if len(on_its_way) == WORKERS * AHEAD:
                self.copy[:] = ray.get(on_its_way.popleft())
        for one in on_its_way:
            self.copy[:] = ray.get(one)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def measured(size: str, repeats: int) -> dict[str, Any]:
    """Milliseconds a batch, of the clock and of this process's CPU: medians over rounds in turns."""
    kinds = {"bare": Calls(size), "penstock": Ours(size, "ray"), "processes": Ours(size, "process")}
    found: dict[str, Any] = {name: {"ms": [], "cpu_ms": []} for name in kinds}
    try:
        for kind in kinds.values():
            kind.take(BATCHES[size] // 4)
        for _ in range(repeats):
            for name, kind in kinds.items():
                cpu, began = time.process_time(), time.perf_counter()
                kind.take(BATCHES[size])
                found[name]["ms"].append((time.perf_counter() - began) / BATCHES[size] * 1e3)
                found[name]["cpu_ms"].append((time.process_time() - cpu) / BATCHES[size] * 1e3)
    finally:
        for kind in kinds.values():
            kind.close()
    ratio = statistics.median(p / b for p, b in zip(found["penstock"]["ms"], found["bare"]["ms"], strict=True))
    medians = {name: {what: statistics.median(values) for what, values in one.items()} for name, one in found.items()}
    return {**medians, "first_s": {name: kind.first_s for name, kind in kinds.items()}, "penstock / bare": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ray.init(log_to_driver=False, logging_level="warning")
    results = {"python": platform.python_version(), "ray": ray.__version__, "torch": torch.__version__}
    for size in SIZES:
        results[size] = found = measured(size, args.repeats)
        for name in ("bare", "penstock", "processes"):
            one = found[name]
            print(
                f"{size:>8}  {name:10} {one['ms']:8.2f} ms a batch, {one['cpu_ms']:7.2f} ms of this process's CPU; "
                f"first after {found['first_s'][name]:.2f} s"
            )
        print(f"{size:>8}  penstock / bare: {found['penstock / bare']:.2f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
