"""For a machine with an accelerator: is the copy hidden, does the device ever wait, and how fast is resident data?

    python device.py [--repeats 5] [--steps 200] [--workers 8] [--budget-s 600] [--json figures.json]

There are four measurements, each interleaved with ``DataLoader`` in the same run:

- Supply: the time per batch if the consumer does nothing with it.
- Overlap: a step computes for longer than it takes to make and copy its batch. *Hidden* is the share of the copy time
  that does not lengthen the step, compared with a batch that is already on the device: 100 % if `ToDevice` works. The
  row "copied in the step" must show about 0 %.
- Epochs: the share of time in which the device is idle, over epochs of 50 batches.
- Resident: batches gathered on the device, in bytes per second, compared with a bare ``index_select`` of the same rows.

Without an accelerator the program says so and measures nothing. It starts no further repeat after ``--budget-s``
seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH_SIZE, SHAPE = 64, (3, 224, 224)
EPOCH = 50
"""Batches."""
THERE, IN_STEP = "no loader, batch there already", "no loader, copied in the step"


class Images(Dataset):
    """Float32 images converted from uint8."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.stored = np.random.default_rng(0).integers(0, 256, (256, *SHAPE), dtype=np.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        return self.stored[index % 256].astype(np.float32)


class Timer:
    """Seconds on the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self.streams: Any = torch.get_device_module(device)

    def event(self) -> Any:
        """An event at the current point of the current stream."""
        event = self.streams.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, work: Callable[[], Any], times: int = 20) -> float:
        """Median time of ``work`` on the device."""
        measured = []
        for _ in range(times):
            start, _, end = self.event(), work(), self.event()
            end.synchronize()
            measured.append(start.elapsed_time(end) / 1000)
        return statistics.median(measured)

    def wall(self, batches: Iterator[torch.Tensor], step: Callable[[torch.Tensor], Any], steps: int) -> float:
        """Wall-clock seconds per step, including the device's work."""
        for _ in range(10):
            step(next(batches))
        self.streams.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step(next(batches))
        self.streams.synchronize()
        return (time.perf_counter() - start) / steps


class Bench:
    """The measurements of one run, and their equipment."""

    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self.device, self.options, self.timer = device, options, Timer(device)
        self.deadline = time.monotonic() + options.budget_s
        self.pinned = torch.ones(BATCH_SIZE, *SHAPE).pin_memory()
        self.held = torch.ones(BATCH_SIZE, *SHAPE, device=device)
        self.matrix = torch.rand(4096, 4096, device=device)
        self.copy_s = self.timer.seconds(lambda: self.held.copy_(self.pinned, non_blocking=True))
        self.product_s = self.timer.seconds(lambda: torch.mm(self.matrix, self.matrix))

    def sources(self, length: int) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Iterator[torch.Tensor]]]]:
        """How to build each source of batches, and how to read it endlessly."""
        dataset, device = Images(length), self.device
        shared: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": self.options.workers}
        ours = {**shared, "device": device, "infinite": True}

        def endlessly(loader: DataLoader) -> Iterator[torch.Tensor]:
            """As the documentation of `DataLoader` recommends: pinned, copied without blocking; epoch after epoch."""
            while True:
                for batch in loader:
                    yield batch.to(device, non_blocking=True)

        return {
            THERE: (lambda: self.held, itertools.repeat),
            IN_STEP: (
                lambda: self.pinned,
                lambda batch: (batch.to(device, non_blocking=True) for _ in itertools.count()),
            ),
            "penstock, threads": (lambda: penstock.Loader.from_dataset(dataset, method="thread", **ours), iter),
            "penstock, processes": (lambda: penstock.Loader.from_dataset(dataset, **ours), iter),
            "DataLoader, pinned, persistent": (
                lambda: DataLoader(dataset, pin_memory=True, persistent_workers=True, **shared),
                endlessly,
            ),
        }

    def seconds(self, length: int, step: Callable[[torch.Tensor], Any]) -> dict[str, list[float]]:
        """Seconds per step for every source, interleaved."""
        found: dict[str, list[float]] = {}
        for repeat in range(self.options.repeats):
            if repeat and time.monotonic() > self.deadline:
                break
            for name, (build, read) in self.sources(length).items():
                source = build()
                found.setdefault(name, []).append(self.timer.wall(read(source), step, self.options.steps))
                getattr(source, "close", lambda: None)()
                del source
        return found

    def supply(self) -> dict[str, Any]:
        """Batches that the consumer does nothing with."""
        return {
            name: {"batch_ms": _ms(took)}
            for name, took in self.seconds(10**6, lambda batch: None).items()
            if name != THERE
        }

    def training(self, length: int, compute_s: float) -> dict[str, Any]:
        """Steps that compute for about ``compute_s`` seconds each."""
        products = max(1, round(compute_s / self.product_s))

        def step(batch: torch.Tensor) -> None:
            for _ in range(products):
                torch.mm(self.matrix, self.matrix)
            batch.sum()

        found = self.seconds(length, step)
        bare = statistics.median(found[THERE])
        return {
            name: {
                "step_ms": _ms(seconds),
                "device_idle": max(0.0, 1 - bare / (took := statistics.median(seconds))),
                "copy_hidden": min(1.0, max(0.0, 1 - (took - bare) / self.copy_s)),
                "repeats": len(seconds),
            }
            for name, seconds in found.items()
        }

    def resident(self) -> dict[str, float]:
        """Rows gathered on the device."""
        rows = penstock.Resident(Images(4096), self.device, num_workers=self.options.workers)
        at = torch.randint(0, len(rows), (BATCH_SIZE,), device=self.device)
        bare = self.timer.seconds(lambda: rows.fields.index_select(0, at), 50)
        nbytes = rows.fields[0].nbytes * BATCH_SIZE
        with penstock.Loader.from_dataset(rows, batch_size=BATCH_SIZE, shuffle=True, infinite=True) as loader:
            took = self.timer.wall(iter(loader), lambda batch: None, self.options.steps)
        return {"batch_us": took * 1e6, "gb_s": nbytes / took / 1e9, "index_select_gb_s": nbytes / bare / 1e9}


def _ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1000


def measure(device: torch.device, options: argparse.Namespace) -> None:
    """Measure everything; print and write each figure as soon as it is known."""
    bench = Bench(device, options)
    machine = {
        "device": bench.timer.streams.get_device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
    }
    figures: dict[str, Any] = {
        "machine": machine,
        "workers": options.workers,
        "steps": options.steps,
        "copy_ms": bench.copy_s * 1000,
    }
    print(f"{', '.join(f'{key} {value}' for key, value in machine.items())}; {options.workers} workers")
    print(f"batches of {BATCH_SIZE} x {SHAPE} float32, {bench.copy_s * 1000:.2f} ms to copy")

    def keep() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")

    figures["supply"] = bench.supply()
    print("\nsupply")
    for name, row in figures["supply"].items():
        print(f"  {name:32}{row['batch_ms']:8.2f} ms per batch")
    keep()

    slowest_s = max(row["batch_ms"] for name, row in figures["supply"].items() if name.startswith("penstock")) / 1000
    for title, length, compute_s in (
        ("overlap", 10**6, 1.5 * max(2 * bench.copy_s, slowest_s)),
        ("epochs", EPOCH * BATCH_SIZE, 3 * max(2 * bench.copy_s, slowest_s)),
    ):
        figures[title] = bench.training(length, compute_s)
        print(f"\n{title}")
        for name, row in figures[title].items():
            print(
                f"  {name:32}{row['step_ms']:8.2f} ms a step   device idle {row['device_idle']:6.1%}   copy hidden "
                f"{row['copy_hidden']:6.1%}"
            )

    figures["resident"] = row = bench.resident()
    print(
        f"\nresident: {row['gb_s']:.0f} GB/s through the loader, {row['index_select_gb_s']:.0f} GB/s with bare "
        f"index_select",
        end="",
    )
    print(f" ({row['batch_us']:.0f} us per batch)")
    keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--budget-s", type=float, default=600)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        print("this machine has no accelerator, so there is nothing to measure")
        return
    measure(torch.empty(0, device=torch.accelerator.current_accelerator()).device, options)  # with its index


if __name__ == "__main__":
    main()
