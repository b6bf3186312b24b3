"""Whether ``num_workers="auto"`` finds a good number: it against every fixed number, on work that waits, decodes JPEGs,
or computes in Python.

    python auto.py [--rounds 9] [--seconds 1] [--workloads waiting jpeg python]

Needs Pillow. First the automatic loader is read until it has settled; then all loaders are read in turns. Of each round
the program takes the ratio of the automatic loader's throughput to that of the fixed number that is best in the median,
so what else the machine does falls on both; printed is the median of these ratios. A fixed number is *enough* if it
reaches 95 % of the best one. Goal: a ratio of 0.9 or more, with at most one worker more than the least number that is
enough.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES, BATCH_SIZE, ENOUGH = 100_000, 8, 0.95


class Waiting:
    """A sample takes 10 ms, asleep: a slow disk, a network."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


class Jpegs:
    """A sample is a JPEG of 256 x 256 pixels, decoded by Pillow, which releases Python's lock."""

    def __init__(self) -> None:
        pixels = np.random.default_rng(0).normal(128, 40, (32, 32, 3)).clip(0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((256, 256)).save(file, "JPEG", quality=90)
        self.jpeg = file.getvalue()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array(Image.open(io.BytesIO(self.jpeg)))


class Python:
    """A sample takes a few ms in Python's interpreter."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return sum(number * number % 7 for number in range(20_000 + index % 100))


class Workload(NamedTuple):
    """What is measured: with which workers, how long a training step takes (asleep, as if on a GPU), and the fixed
    numbers.
    """

    dataset: Callable[[], Any]
    method: str
    step_s: float
    numbers: tuple[int, ...]


WORKLOADS = {
    "waiting": Workload(Waiting, "thread", 0.015, (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)),
    "jpeg": Workload(Jpegs, "thread", 0.0, (1, 2, 3, 4)),
    "python": Workload(Python, "process", 0.0, (1, 2, 3, 4)),
}


class Reader:
    """One loader, read for a while now and then."""

    def __init__(self, workload: Workload, num_workers: Any) -> None:
        self.loader = penstock.Loader.from_dataset(
            workload.dataset(),
            BATCH_SIZE,
            num_workers=num_workers,
            prefetch_factor=2,
            method=workload.method,
            infinite=True,
        )
        self._batches: Iterator[Any] = iter(self.loader)
        self._step_s = workload.step_s

    def read(self, seconds: float, *, skip: int = 0) -> float:
        """Batches in a second, for so long; ``skip`` batches before that do not count."""
        for _ in range(skip):
            self._read()
        count, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            self._read()
            count += 1
        return count / elapsed

    def _read(self) -> None:
        next(self._batches)
        if self._step_s:
            time.sleep(self._step_s)

    @property
    def depth(self) -> int:
        """Batches loaded ahead while others were read."""
        return self.loader.statistics().nodes[-1].depth

    @property
    def choice(self) -> penstock.statistics.WorkerChoice:
        """What the automatic loader has chosen."""
        workers = self.loader.statistics().nodes[-1].workers
        assert workers is not None
        assert workers.choice is not None
        return workers.choice


def measured(name: str, rounds: int, seconds: float, patience_s: float) -> list[str]:
    """Measure one workload; returns lines of text."""
    workload = WORKLOADS[name]
    auto = Reader(workload, "auto")
    began = time.perf_counter()
    while not auto.choice.settled and time.perf_counter() - began < patience_s:
        auto.read(0.5)
    settling_s, first = time.perf_counter() - began, auto.choice
    readers = {"auto": auto, **{str(number): Reader(workload, number) for number in workload.numbers}}
    rates: dict[str, list[float]] = {key: [] for key in readers}
    names = list(readers)
    for turn in range(rounds + 1):
        for key in names[turn % len(names) :] + names[: turn % len(names)]:
            rate = readers[key].read(seconds, skip=2 * readers[key].depth + 4)
            if turn:  # the first round starts them
                rates[key].append(rate)
    choice = auto.choice
    for reader in readers.values():
        reader.loader.close()
    medians = {key: statistics.median(found) for key, found in rates.items()}
    best = max(names[1:], key=medians.__getitem__)
    enough = next(number for number in workload.numbers if medians[str(number)] >= ENOUGH * medians[best])
    ratio = statistics.median(mine / other for mine, other in zip(rates["auto"], rates[best], strict=True))
    verdict = "as it should be" if ratio >= 0.9 and choice.workers <= enough + 1 else "MISSED"
    return [
        (
            f"{name}: {ratio:.2f} of the best fixed number ({best}); {choice.workers} {workload.method} workers, "
            f"{enough} are enough: {verdict}"
        ),
        f"    batches/s: {', '.join(f'{key}: {rate:.1f}' for key, rate in medians.items())}",
        f"    settled at {first.workers} after {settling_s:.0f} s; {choice.changes} changes in all; {choice.why}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that the automatic loader gets to settle")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    options = parser.parse_args()
    for name in options.workloads:
        print("\n".join(measured(name, options.rounds, options.seconds, options.patience)), flush=True)


if __name__ == "__main__":
    main()
