"""On a machine with an accelerator: is the copy hidden, does the device ever wait, and how fast is resident data?

    python benchmark_device.py [--repeats 5] [--steps 200]

Three measurements, each against ``DataLoader`` in the same run, in turns:

- Overlap: a step computes for about as long as its batch takes to copy. Hidden is the share of the copy's time that the step does not
  take longer than without any copy: 100 % where `ToDevice` works, and 0 % where copies block.
- Epochs: the share of time in which the device has nothing to do, over epochs of 50 batches.
- Resident: batches gathered on the device, as bytes a second, against a bare ``index_select`` of the same rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BATCH_SIZE, SHAPE = 64, (3, 224, 224)


class Images(Dataset):
    """Float32 images made from uint8."""

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
        self.device = device
        self.streams: Any = torch.get_device_module(device)

    def event(self) -> Any:
        """The present moment of the current stream."""
        event = self.streams.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, work: Callable[[], None], times: int) -> float:
        """Median time of ``work`` on the device."""
        measured = []
        for _ in range(times):
            start, _, end = self.event(), work(), self.event()
            end.synchronize()
            measured.append(start.elapsed_time(end) / 1000)
        return statistics.median(measured)


def endlessly(loader: DataLoader, device: torch.device) -> Iterator[torch.Tensor]:
    """A `DataLoader` as its documentation recommends it: pinned, copied without blocking; epoch after epoch."""
    while True:
        for batch in loader:
            yield batch.to(device, non_blocking=True)


def wall(batches: Iterator[torch.Tensor], step: Callable[[torch.Tensor], None], steps: int, timer: Timer) -> float:
    """Seconds for a step, the device's work included."""
    for _ in range(10):
        step(next(batches))
    timer.streams.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step(next(batches))
    timer.streams.synchronize()
    return (time.perf_counter() - start) / steps


def builds(device: torch.device, dataset: Images, workers: int) -> dict[str, tuple[Callable[[], Iterable], Callable[[Any], Iterator]]]:
    """How each loader is built, and how it is read for ever."""
    shared: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": workers}
    ours = {**shared, "device": device, "endless": True}
    return {
        "penstock, threads": (lambda: penstock.Loader.from_dataset(dataset, method="thread", **ours), iter),
        "penstock, processes": (lambda: penstock.Loader.from_dataset(dataset, **ours), iter),
        "DataLoader, pinned, persistent": (
            lambda: DataLoader(dataset, pin_memory=True, persistent_workers=True, **shared),
            lambda loader: endlessly(loader, device),
        ),
    }


def main() -> None:
    """Measure in turns, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        print("this machine has no accelerator, so there is nothing to measure")
        return
    device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
    timer = Timer(device)
    print(
        f"{timer.streams.get_device_name(device)}, torch {torch.__version__}, {options.workers} workers, batches of {BATCH_SIZE} x {SHAPE} float32"
    )

    pinned = torch.empty(BATCH_SIZE, *SHAPE, pin_memory=True)
    target = torch.empty_like(pinned, device=device)
    copy_s = timer.seconds(lambda: target.copy_(pinned, non_blocking=True), 20)
    matrix = torch.rand(4096, 4096, device=device)
    products = max(1, round(copy_s / timer.seconds(lambda: torch.mm(matrix, matrix), 20)))

    def computing(times: int) -> Callable[[torch.Tensor], None]:
        """A step that computes for ``times`` as long as a copy takes."""

        def step(batch: torch.Tensor) -> None:
            for _ in range(products * times):
                torch.mm(matrix, matrix)
            batch.sum()

        return step

    held = torch.rand(BATCH_SIZE, *SHAPE, device=device)
    for title, length, times in (("overlap", 10**6, 3), ("epochs of 50 batches", 50 * BATCH_SIZE, 10)):
        step = computing(times)
        bare = timer.seconds(partial(step, held), 20)
        print(f"\n{title}: a step computes for {bare * 1000:.2f} ms, its batch takes {copy_s * 1000:.2f} ms to copy")
        compare(Images(length), step, bare, copy_s, device, timer, options)
    resident(device, timer, options)


def compare(
    dataset: Images,
    step: Callable[[torch.Tensor], None],
    bare: float,
    copy_s: float,
    device: torch.device,
    timer: Timer,
    options: argparse.Namespace,
) -> None:
    """Every loader in turns, and a line for each."""
    found: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for name, (build, read) in builds(device, dataset, options.workers).items():
            loader = build()
            found.setdefault(name, []).append(wall(read(loader), step, options.steps, timer))
            getattr(loader, "close", lambda: None)()
    for name, seconds in found.items():
        took = statistics.median(seconds)
        hidden = max(0.0, 1 - max(0.0, took - bare) / copy_s)
        print(f"{name:32}{took * 1000:8.2f} ms a step   device idle {max(0.0, 1 - bare / took):6.1%}   copy hidden {hidden:6.1%}")


def resident(device: torch.device, timer: Timer, options: argparse.Namespace) -> None:
    """Rows gathered on the device."""
    rows = penstock.Resident(Images(4096), device, num_workers=options.workers)
    at = torch.randint(0, len(rows), (BATCH_SIZE,), device=device)
    bare = timer.seconds(lambda: rows.fields.index_select(0, at), 50)
    nbytes = rows.fields[0].nbytes * BATCH_SIZE
    with penstock.Loader.from_dataset(rows, batch_size=BATCH_SIZE, shuffle=True, endless=True) as loader:
        took = wall(iter(loader), lambda batch: None, options.steps, timer)
    print(
        f"\nresident: {nbytes / took / 1e9:.0f} GB/s through the loader, {nbytes / bare / 1e9:.0f} GB/s by bare index_select ({took * 1e6:.0f} us a batch)"
    )


if __name__ == "__main__":
    main()
