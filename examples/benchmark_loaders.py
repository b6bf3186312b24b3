"""Data loaders side by side: speed, CPU time, epoch boundaries, stalls, the first batch, memory.

    python benchmark_loaders.py [--workloads W1 W2 ...] [--loaders NAME ...] [--repeats 5] [--seconds 2] [--quick]
                                [--metrics speed boundary stall memory] [--step compute] [--check] [--memory] [--json FILE] [--plot FILE]

The workloads and the loaders' settings are in benchmark_peers.py. Batches of 64, shuffled, 2 workers (W5: 32). Loaders are interleaved,
every measurement has its own process, and the figures are medians over the repeats. A ratio is the median of the ratios to plain DataLoader
in the same round (in W1T: to the best of the DataLoaders). If a loader is not installed, fails or takes too long, its line says so.

The columns:

- samples/s: after a warm-up, within epochs; boundary and period show what the end of an epoch costs.
- us CPU: CPU time of all processes together, per sample, including the ends of epochs.
- boundary: the median wait for an epoch's first batch, divided by the median wait for the others, for a consumer that only waits. If
  batches come in bunches, the others' wait is close to zero; gap is the first batch's wait itself.
- period: the time from epoch to epoch, divided by the time that its batches take at the steady speed; 1 means that epoch ends cost nothing.
  It may be slightly less, because these epochs are short and their rows stay in the CPU cache.
- stall: the share of time that a consumer waits if it computes for 1.2 times the loader's steady time per batch, without Python's lock;
  in W5 and with ``--step sleep`` it sleeps instead. On a small machine, computing takes a core from the workers.
- first: from building the loader to its first batch, after packages are imported and the dataset exists.
- peak: the largest memory of all processes together while loading, including dataset and packages; shared pages count once (PSS).

"no loader" is the work alone: processes that load samples and discard them, so no loader can be faster.

Before a loader is measured, one epoch is checked: shapes and types, and that each sample comes once. ``--check`` stops there.
``--memory`` adds a dataset of 2 million Python objects, read for one epoch. ``--workloads`` without a name leaves out everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from benchmark_peers import (
    BATCH_SIZE,
    LOADERS,
    REFERENCE,
    WORKLOADS,
    Calibration,
    Loader,
    Opened,
    Task,
    Workload,
    calibrate,
    write_shards,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

METRICS = ("speed", "boundary", "stall", "memory")
BUSY = 1.2  # the stall consumer's time per batch, as a multiple of the loader's steady time
LEAST_EPOCHS, MOST_EPOCHS = 4, 60
NO_LOADER = "no loader, processes"
MEMORY_LOADERS = (REFERENCE, "penstock, threads", "penstock, processes")
PEERS = ("torch", "torchdata", "grain", "spdl", "mosaicml-streaming", "penstock", "numpy", "pillow")


# --------------------------------------------------------------------------------------------- in a child: one measurement of one loader


@dataclass(frozen=True)
class Bench:
    """What every measurement needs.

    Args:
        load: Builds the loader.
        take: What the consumer does with a batch: in W4 it copies it, otherwise nothing.
        dataset: The dataset to load.
        workload: Its kind.
        seconds: How long to measure.
        step_s: The loader's steady time per batch, if known already.
        sleeps: Whether the stall consumer sleeps instead of computing.
    """

    load: Callable[[], Opened]
    take: Callable[[torch.Tensor], object]
    dataset: Any
    workload: Workload
    seconds: float
    step_s: float
    sleeps: bool

    @property
    def lead(self) -> int:
        """Batches at the start of an epoch that may have been loaded earlier."""
        return max(16, 2 * self.workload.workers)


def as_tensor(batch: Any) -> torch.Tensor:
    """The batch as a tensor: Grain and SPDL return arrays, a TensorDataset returns tuples of one."""
    if isinstance(batch, list | tuple):
        batch = batch[0]
    return batch if isinstance(batch, torch.Tensor) else torch.from_numpy(np.asarray(batch))


def forever(opened: Opened) -> Iterator[tuple[int, torch.Tensor]]:
    """(place in its epoch, batch), epoch after epoch."""
    while True:
        for place, batch in enumerate(opened.epoch()):
            yield place, as_tensor(batch)


def compare(batch: torch.Tensor, dataset: Any) -> None:
    """Refuse a batch that does not fit the dataset's samples."""
    sample = as_tensor(dataset[0])
    expected, actual = (sample.dtype, *sample.shape), (batch.dtype, *batch.shape[1:])
    if expected != actual or not 0 < len(batch) <= BATCH_SIZE:
        raise ValueError(f"got a batch of {len(batch)} samples of {actual}, but samples are {expected}")


def tree() -> list[psutil.Process]:
    """This process and all of its descendants."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def tree_cpu_s() -> float:
    """CPU seconds of this process and its descendants, including those that have ended."""
    total = 0.0
    for process in tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def tree_pss() -> int:
    """Bytes of memory of this process and its descendants; a page shared by n of them counts 1/n for each."""
    total = 0
    for process in tree():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


class PeakMemory:
    """The largest `tree_pss` while this context is open, sampled by a thread 20 times a second."""

    def __enter__(self) -> PeakMemory:
        self.bytes = tree_pss()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.bytes = max(self.bytes, tree_pss())


class Step:
    """A training step on the CPU: small matrix products, without Python's lock, until a deadline."""

    def __init__(self, seconds: float) -> None:
        sizes = (32, 64, 128, 256, 512)
        self.matrix = torch.rand(sizes[0], sizes[0])
        for size in sizes[1:]:
            larger = torch.rand(size, size)
            start = time.perf_counter()
            for _ in range(5):
                larger @ larger
            if (time.perf_counter() - start) / 5 > seconds / 10:
                break
            self.matrix = larger

    def until(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            self.matrix @ self.matrix


def measure_speed(bench: Bench) -> dict[str, float]:
    """Time to the first batch, then steady speed and CPU time."""
    start = time.perf_counter()
    opened = bench.load()
    stream = forever(opened)
    _, batch = next(stream)
    first_s = time.perf_counter() - start
    compare(batch, bench.dataset)
    warm_up(stream, bench)

    cpu_s = tree_cpu_s()
    samples = steady_batches = steady_samples = 0
    steady_s = 0.0
    last = time.perf_counter()
    for count, (place, batch) in enumerate(stream):
        bench.take(batch)
        now = time.perf_counter()
        samples += len(batch)
        if min(count, place) >= bench.lead:
            steady_s += now - last
            steady_samples += len(batch)
            steady_batches += 1
        last = now
        if steady_s >= bench.seconds and steady_batches % bench.workload.workers == 0:  # workers that start together finish together
            break
    cpu_s = tree_cpu_s() - cpu_s
    opened.close()
    return {
        "first_ms": 1000 * first_s,
        "samples_per_s": steady_samples / steady_s,
        "step_s": steady_s / steady_batches,
        "cpu_us": 1e6 * cpu_s / samples,
    }


def warm_up(stream: Iterator[tuple[int, torch.Tensor]], bench: Bench) -> None:
    """Drain what was loaded ahead, then load for a while."""
    end = time.perf_counter() + bench.seconds / 4
    for count, (_, batch) in enumerate(stream):
        bench.take(batch)
        if count >= bench.lead and time.perf_counter() >= end:
            return


def measure_boundary(bench: Bench) -> dict[str, float]:
    """Waits for the first batch of an epoch and for the others, and the time from epoch to epoch, without the first epoch."""
    opened = bench.load()
    firsts, others, begins = [], [], []
    start = time.perf_counter()
    for place, batch in forever(opened):
        now = time.perf_counter()
        if place == 0:
            begins.append(now)
        if len(begins) > 1:
            (others if place else firsts).append(now - start)
        if len(firsts) > MOST_EPOCHS or (len(firsts) > LEAST_EPOCHS and now - begins[1] > bench.seconds):
            break
        bench.take(batch)
        start = time.perf_counter()
    opened.close()
    first_s, other_s = statistics.median(firsts), statistics.median(others)
    period_s = statistics.median(after - before for before, after in itertools.pairwise(begins[1:]))
    return {"boundary": first_s / other_s, "first_wait_ms": 1000 * first_s, "wait_ms": 1000 * other_s, "period_s": period_s}


def measure_stall(bench: Bench) -> dict[str, float]:
    """The share of time that a consumer waits if it is a little slower than the loader."""
    busy_s = BUSY * bench.step_s
    step = Step(busy_s)
    opened = bench.load()
    stream = forever(opened)
    waited_s = total_s = 0.0
    count = 0
    while total_s < bench.seconds:
        start = time.perf_counter()
        _, batch = next(stream)
        got = time.perf_counter()
        bench.take(batch)
        if bench.sleeps:
            time.sleep(busy_s)
        else:
            step.until(got + busy_s)
        count += 1
        if count > bench.lead:
            waited_s += got - start
            total_s += time.perf_counter() - start
    opened.close()
    return {"stall": waited_s / total_s}


def measure_memory(bench: Bench) -> dict[str, float]:
    """Peak memory while loading."""
    with PeakMemory() as peak:
        opened = bench.load()
        stream = forever(opened)
        warm_up(stream, bench)
        end = time.perf_counter() + bench.seconds
        for _, batch in stream:
            bench.take(batch)
            if time.perf_counter() >= end:
                break
    opened.close()
    return {"peak_mb": peak.bytes / 2**20}


def marks(batch: torch.Tensor, workload: Workload) -> list[float]:
    """What identifies a sample: its number, or else the sum of its contents."""
    return (batch[:, 0] if workload.tagged else batch.flatten(1).sum(1, dtype=torch.float64)).tolist()


def check(bench: Bench) -> dict[str, Any]:
    """Check one epoch: every batch fits the samples, and every sample comes once."""
    opened = bench.load()
    seen: list[float] = []
    for batch in map(as_tensor, opened.epoch()):
        compare(batch, bench.dataset)
        seen += marks(batch, bench.workload)
    opened.close()
    count = len(bench.dataset)
    if len(seen) != count:
        raise ValueError(f"got {len(seen)} samples instead of {count}")
    samples = () if bench.workload.tagged else map(bench.dataset.__getitem__, range(count))
    expected = [mark for sample in samples for mark in marks(as_tensor(sample)[None], bench.workload)] or list(range(count))
    if sorted(seen) != sorted(expected):
        raise ValueError(f"got {count} samples, but not each of the {count} once")
    return {"ok": f"{count} samples, each once"}


def copier(shape: tuple[int, ...]) -> Callable[[torch.Tensor], object]:
    """Copies a batch into memory that exists already."""
    target = torch.empty(BATCH_SIZE, *shape)
    return lambda batch: target[: len(batch)].copy_(batch)


def measure_limit(dataset: Any, seconds: float) -> dict[str, float]:
    """W4 without a loader: GB/s of the consumer's copy, and of two threads that only write rows into existing memory."""
    shape = dataset[0].shape
    size = BATCH_SIZE * dataset[0].nbytes
    batch, copy = torch.ones(BATCH_SIZE, *shape), copier(shape)
    rows = [np.empty((BATCH_SIZE, *shape), dtype=np.float32) for _ in range(2)]

    def make(place: int) -> None:
        for number in range(BATCH_SIZE):
            np.copyto(rows[place][number], dataset.store[(place * BATCH_SIZE + number) % len(dataset.store)])

    def two() -> None:
        threads = [threading.Thread(target=make, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    copy_s, two_s = (call_s(function, seconds) for function in (lambda: copy(batch), two))
    return {"copy_gb_s": size / copy_s / 1e9, "make_gb_s": 2 * size / two_s / 1e9, "batch_gb": size / 1e9}


def measure_work(dataset: Any, workers: int, seconds: float) -> dict[str, float]:
    """The work without a loader: processes that load samples and discard them."""
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(workers)
    told = context.SimpleQueue()

    def work(first: int) -> None:
        torch.set_num_threads(1)
        places = itertools.cycle(range(first, len(dataset), workers))
        for _ in range(BATCH_SIZE):
            dataset[next(places)]
        ready.wait()
        samples, start, cpu = 0, time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - start) < seconds:
            dataset[next(places)]
            samples += 1
        told.put((samples, elapsed, time.process_time() - cpu))

    processes = [context.Process(target=work, args=(first,)) for first in range(workers)]
    for process in processes:
        process.start()
    all_told = [told.get() for _ in processes]
    for process in processes:
        process.join()
    samples_per_s = sum(samples / elapsed for samples, elapsed, _ in all_told)
    return {"samples_per_s": samples_per_s, "cpu_us": 1e6 * sum(cpu for _, _, cpu in all_told) / sum(samples for samples, _, _ in all_told)}


def call_s(function: Callable[[], object], seconds: float) -> float:
    """Median seconds per call."""
    function()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Words:
    """Python objects, whose reference counts are written whenever they are read."""

    def __init__(self, count: int) -> None:
        self.words = [f"word {number}" for number in range(count)]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> int:
        return len(self.words[index])


def measure_objects(loader: Loader, count: int) -> dict[str, float]:
    """Peak memory during one epoch over many Python objects."""
    empty = tree_pss()
    dataset = Words(count)
    before = tree_pss()
    with PeakMemory() as peak:
        opened = loader.build(Task(dataset, 2, waiting=False, batch_bytes=8 * BATCH_SIZE))
        samples = sum(len(as_tensor(batch)) for batch in opened.epoch())
    opened.close()
    if samples != count:
        raise ValueError(f"got {samples} samples instead of {count}")
    return {"dataset_mb": (before - empty) / 2**20, "before_mb": before / 2**20, "peak_mb": peak.bytes / 2**20}


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job for the parent."""
    torch.set_num_threads(1)
    loader = LOADERS.get(job["loader"])
    for module in loader.modules if loader else ():
        importlib.import_module(module)
    if job["metric"] == "objects":
        return measure_objects(loader, job["count"])
    workload = WORKLOADS[job["workload"]]
    short = job["metric"] == "boundary" or (job["metric"] == "check" and not job["workload"].startswith("W1"))
    dataset = workload.make(Calibration(**job["calibration"]), workload.short * BATCH_SIZE if short else workload.length)
    if job["metric"] == "work":
        return measure_work(dataset, workload.workers, job["seconds"])
    if job["metric"] == "limit":
        return measure_limit(dataset, job["seconds"])
    if job["metric"] == "shards":
        write_shards(dataset, job["shards"])
        return {}
    sample = as_tensor(dataset[0])
    size = BATCH_SIZE * sample.nbytes
    task = Task(dataset, workload.workers, waiting=job["workload"] == "W5", batch_bytes=size, shards=job["shards"])
    take = copier(tuple(sample.shape)) if job["workload"] == "W4" else lambda batch: None
    bench = Bench(lambda: loader.build(task), take, dataset, workload, job["seconds"], job["step_s"], task.waiting or job["sleep"])
    kinds = {"speed": measure_speed, "boundary": measure_boundary, "stall": measure_stall, "memory": measure_memory, "check": check}
    return kinds[job["metric"]](bench)


# ----------------------------------------------------------------------------------------------- in the parent: turns, tables, pictures


def run(job: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The child's answer, or why there is none."""
    job = {"workload": None, "loader": None, "shards": None, "step_s": 0.0} | job
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            end_group(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            out, err = (error.stdout or b"").decode(), f"not done after {timeout:.0f} s"
    answers = [line for line in out.splitlines() if line.startswith("{")]
    if answers:  # it comes last: who hangs or breaks at the interpreter's end was measured all the same
        return json.loads(answers[-1])
    said = [line for line in err.splitlines() if line.strip() and not line.startswith(" ")]
    return {"failed": said[-1] if said else f"ended with {process.returncode}"}


def end_group(process: subprocess.Popen[str]) -> None:
    """End a child and its workers. The first signal spares Python's resource tracker, which then frees shared memory."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
            return


class Program:
    """All measurements of one call of this program."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.seconds = 0.3 if options.quick else options.seconds
        self.repeats = 1 if options.quick else options.repeats
        self.calibration = calibrate()
        self.rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
        self.failed: dict[str, dict[str, str]] = {}
        self.limits: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}

    def child(self, **job: Any) -> dict[str, Any]:
        always = {"calibration": asdict(self.calibration), "seconds": self.seconds, "sleep": self.options.step == "sleep"}
        return run(always | job, self.options.timeout)

    def measure(self, workload: str) -> None:
        """Rounds of one workload, in which its loaders take turns."""
        with tempfile.TemporaryDirectory() as folder:
            names = self.chosen(workload)
            self.rounds[workload] = {name: [] for name in names}
            self.failed[workload] = {}
            shards = self.shards(workload, names, folder)
            for number in range(self.repeats):
                for name in names:
                    if name not in self.failed[workload]:
                        print(f"{workload}, round {number + 1} of {self.repeats}: {name}", file=sys.stderr, flush=True)
                        self.measure_loader(workload, name, shards)
        if workload == "W4" and not self.options.check:
            self.limits[workload] = self.child(workload=workload, metric="limit")

    def chosen(self, workload: str) -> list[str]:
        """Names of a workload's loaders, among those requested."""
        names = [name for name, loader in LOADERS.items() if workload in loader.workloads]
        if workload in ("W2", "W3") and "speed" in self.options.metrics and not self.options.check:
            names.insert(0, NO_LOADER)
        asked = self.options.loaders
        return [name for name in names if not asked or name in asked or any(name.startswith(f"{one},") for one in asked)]

    def shards(self, workload: str, names: list[str], folder: str) -> str:
        """Write shards if a loader needs them."""
        name = "MosaicML Streaming"
        if name in names:
            said = self.child(workload=workload, loader=name, metric="shards", shards=folder)
            if "failed" in said:
                self.failed[workload][name] = said["failed"]
        return folder

    def measure_loader(self, workload: str, name: str, shards: str) -> None:
        """One turn of one loader."""
        told: dict[str, Any] = {}
        metrics = [] if self.options.check else [metric for metric in METRICS if metric in self.options.metrics]
        if name == NO_LOADER:
            metrics = ["work"]
        elif not self.rounds[workload][name]:
            metrics.insert(0, "check")
        for metric in metrics:
            said = self.child(workload=workload, loader=name, metric=metric, shards=shards, step_s=told.get("step_s", 0.0))
            if "failed" in said:
                self.failed[workload][name] = f"{metric}: {said['failed']}"
                return
            told |= said
        if {"period_s", "step_s"} <= told.keys():
            told["period"] = told["period_s"] / (WORKLOADS[workload].short * told["step_s"])
        self.rounds[workload][name].append(told)

    def reference(self, workload: str) -> str | None:
        """The loader to compare with: plain DataLoader, or the best one if there are several."""
        several = [name for name in self.rounds[workload] if name.startswith(REFERENCE)]
        names = [REFERENCE] if REFERENCE in several else several
        speeds = {name: self.median(workload, name, "samples_per_s") for name in names}
        known = {name: speed for name, speed in speeds.items() if speed is not None}
        return max(known, key=lambda name: known[name]) if known else None

    def median(self, workload: str, name: str, key: str) -> float | None:
        """The median over the rounds, if it was measured."""
        values = [told[key] for told in self.rounds[workload][name] if key in told]
        return statistics.median(values) if values else None

    def ratio(self, workload: str, name: str) -> float | None:
        """The median of the rounds' ratios to the reference."""
        reference = self.reference(workload)
        if reference is None:
            return None
        pairs = zip(self.rounds[workload][name], self.rounds[workload][reference], strict=False)
        ratios = [one["samples_per_s"] / other["samples_per_s"] for one, other in pairs if "samples_per_s" in one]
        return statistics.median(ratios) if ratios else None

    def measure_objects(self) -> None:
        """The section on memory."""
        count = 200_000 if self.options.quick else 2_000_000
        for name in MEMORY_LOADERS:
            print(f"{count} Python objects: {name}", file=sys.stderr, flush=True)
            self.objects[name] = {"count": count} | self.child(loader=name, metric="objects", count=count)

    def machine(self) -> dict[str, str]:
        """The machine, and the versions of everything."""
        versions = {}
        for peer in PEERS:
            try:
                versions[peer] = importlib.metadata.version(peer)
            except importlib.metadata.PackageNotFoundError:
                versions[peer] = "from the path" if importlib.util.find_spec(peer) else "not installed"
        return {"cores": str(len(os.sched_getaffinity(0))), "system": platform.system(), "Python": platform.python_version(), **versions}

    def data(self) -> dict[str, Any]:
        """Everything, for --json."""
        return {
            "machine": self.machine(),
            "options": vars(self.options),
            "calibration": asdict(self.calibration),
            "limits": self.limits,
            "rounds": self.rounds,
            "failed": self.failed,
            "objects": self.objects,
        }


def shown(value: float | None, form: str) -> str:
    """A number for a column, or a placeholder."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


COLUMNS: dict[str, tuple[str, Callable[[Program, str, str], str]]] = {
    "samples/s": ("11", lambda program, *at: shown(program.median(*at, "samples_per_s"), ",.0f")),
    "ratio": ("8", lambda program, *at: shown(program.ratio(*at), ".2f")),
    "us CPU": ("9", lambda program, *at: shown(program.median(*at, "cpu_us"), ".1f")),
    "boundary": ("10", lambda program, *at: shown(program.median(*at, "boundary"), ",.2f")),
    "gap ms": ("9", lambda program, *at: shown(program.median(*at, "first_wait_ms"), ",.2f")),
    "period": ("8", lambda program, *at: shown(program.median(*at, "period"), ".2f")),
    "stall %": ("9", lambda program, *at: shown(percent(program.median(*at, "stall")), ".1f")),
    "first ms": ("10", lambda program, *at: shown(program.median(*at, "first_ms"), ",.0f")),
    "peak MB": ("9", lambda program, *at: shown(program.median(*at, "peak_mb"), ",.0f")),
}


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def print_machine(program: Program) -> None:
    """Print the machine."""
    print(", ".join(f"{name} {value}" for name, value in program.machine().items()))
    at = program.calibration
    print(f"W2: an image of {at.side} x {at.side} takes {at.image_ms:.2f} ms; W3: {at.loops} loops take {at.loop_ms:.2f} ms")
    print(f"medians of {program.repeats} rounds, {program.seconds} s each")


def print_table(program: Program, workload: str) -> None:
    """One line for each loader."""
    kind = WORKLOADS[workload]
    reference = program.reference(workload)
    print(f"\n{workload}: {kind.title}; {kind.workers} workers" + (f"; ratio to {reference}" if reference else ""))
    bytes_of_sample = 1e9 * program.limits.get(workload, {}).get("batch_gb", 0) / BATCH_SIZE
    heads = "".join(f"{head:>{width}}" for head, (width, _) in COLUMNS.items())
    print(f"{'':34}{heads}" + (f"{'GB/s':>8}" if bytes_of_sample else ""))
    for name in program.rounds[workload]:
        failed = program.failed[workload].get(name)
        if failed:
            print(f"{name:34}  {failed}, in round {len(program.rounds[workload][name]) + 1}")
        if failed and not program.rounds[workload][name]:
            continue
        line = "".join(f"{told(program, workload, name):>{width}}" for width, told in COLUMNS.values())
        speed = program.median(workload, name, "samples_per_s")
        print(f"{name:34}{line}" + (f"{bytes_of_sample * speed / 1e9:8.2f}" if bytes_of_sample and speed else ""))
    print_limit(program, workload)


def print_limit(program: Program, workload: str) -> None:
    """The limit that the work itself sets."""
    if workload == "W5":
        print(f"limit: {WORKLOADS[workload].workers / 0.005:,.0f} samples/s")
    elif "failed" in program.limits.get(workload, {}):
        print(f"limit: {program.limits[workload]['failed']}")
    elif workload in program.limits:
        copy, make = program.limits[workload]["copy_gb_s"], program.limits[workload]["make_gb_s"]
        print(f"limit: the consumer's copy {copy:.2f} GB/s; two threads that only write rows {make:.2f} GB/s;", end=" ")
        print(f"one after the other {1 / (1 / copy + 1 / make):.2f} GB/s, side by side {min(copy, make):.2f} GB/s")


def print_checks(program: Program, workload: str) -> None:
    """One line for each loader."""
    print(f"\n{workload}: {WORKLOADS[workload].title}")
    for name, rounds in program.rounds[workload].items():
        print(f"{name:34}  {program.failed[workload].get(name) or rounds[0]['ok']}")


def print_objects(program: Program) -> None:
    """The section on memory."""
    print(f"\n{next(iter(program.objects.values()))['count']:,} Python objects, one epoch, 2 workers")
    print(f"{'':34}{'dataset MB':>12}{'before MB':>11}{'peak MB':>9}{'added MB':>10}{'added/dataset':>15}")
    for name, told in program.objects.items():
        if "failed" in told:
            print(f"{name:34}  {told['failed']}")
            continue
        dataset, before, peak = told["dataset_mb"], told["before_mb"], told["peak_mb"]
        print(f"{name:34}{dataset:12,.0f}{before:11,.0f}{peak:9,.0f}{peak - before:10,.0f}{(peak - before) / dataset:15.2f}")


def draw(program: Program, file: Path) -> None:
    """Bars: how many times as fast as DataLoader, for each workload."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    counts = [len(names) for names in program.rounds.values()]
    size = {"figsize": (9, 0.9 + 0.3 * sum(counts)), "height_ratios": [count + 2 for count in counts]}
    figure, panels = plt.subplots(len(counts), squeeze=False, layout="constrained", **size)
    for axes, workload in zip(panels[:, 0], program.rounds, strict=True):
        ratios = {name: program.ratio(workload, name) for name in reversed(program.rounds[workload])}
        bars = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        colors = [
            "#d1495b" if name.startswith("penstock") else "#30638e" if name == program.reference(workload) else "#9aa5b1" for name in bars
        ]
        axes.barh(list(bars), list(bars.values()), color=colors)
        for place, ratio in enumerate(bars.values()):
            axes.text(ratio, place, f" {ratio:.2f}", va="center", fontsize=8)
        axes.axvline(1, color="#30638e", linewidth=0.8, alpha=0.4)
        axes.margins(x=0.1)
        axes.tick_params(axis="y", labelsize=8)
        axes.set_title(f"{workload}: {WORKLOADS[workload].title}", loc="left", weight="bold", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("samples/s, relative to DataLoader")
    figure.savefig(file, dpi=120)


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="W")
    parser.add_argument("--loaders", nargs="+", metavar="NAME", help="full names, or the part before a comma; default: all")
    parser.add_argument("--metrics", nargs="+", choices=METRICS, default=list(METRICS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--step", choices=("compute", "sleep"), default="compute", help="what the stall consumer does")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one measurement")
    parser.add_argument("--quick", action="store_true", help="one round of 0.3 s: does everything run?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "stall" in options.metrics and "speed" not in options.metrics:
        parser.error("a stall is measured against the loader's speed: add speed to --metrics")
    return options


def main() -> None:
    """Measure in turns, print, draw."""
    options = parsed()
    if options.child is not None:
        try:
            said = child(options.child)
        except Exception as error:
            said = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
        return
    program = Program(options)
    print_machine(program)
    for workload in options.workloads:
        program.measure(workload)
        (print_checks if options.check else print_table)(program, workload)
        sys.stdout.flush()
    if options.memory:
        program.measure_objects()
        print_objects(program)
    if options.json:
        options.json.write_text(json.dumps(program.data(), indent=1, default=str))
    if options.plot and not options.check:
        draw(program, options.plot)


if __name__ == "__main__":
    main()
