"""``python -m penstock bench``: measure a loader, of penstock or any other, as a training loop would use it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch
from torch.utils.data import DataLoader

from penstock._command.memory import memory_of_processes
from penstock._command.target import TargetError, as_loader, built
from penstock._loader.loader import Loader
from penstock._observe.loop_clock import LoopClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock._statistics import LoaderStatistics

_WARM_SHARE: Final = 0.2
"""The fraction of a measurement, at its beginning, that is discarded: until the queues have reached their steady state."""


@final
class Reader:
    """Reads a loader epoch after epoch, and times each wait.

    Args:
        loader: Any iterable.

    Raises:
        TargetError: It yields nothing.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._in_batches = getattr(loader, "batch_size", 1) is not None or getattr(loader, "batch_sampler", None) is not None
        start = time.perf_counter()
        self._batches: Iterator[Any] | None = iter(loader)
        self.reads_once = self._batches is loader
        if next(self._batches, _END) is _END:
            raise TargetError(f"the {type(loader).__name__} yields nothing: its first epoch has no batch.")
        self.first_s = time.perf_counter() - start

    def run(self, seconds: float, step_s: float = 0.0) -> LoaderStatistics:
        """Read for ``seconds``, of which the first part is discarded, and spend ``step_s`` on each batch.

        An iterable that can be read only once continues from its current position, for less time if it ends.

        Raises:
            TargetError: It has already ended.
        """
        if not self.reads_once:
            self._loop(seconds * _WARM_SHARE, step_s)
        loop = self._loop(seconds * (1 - _WARM_SHARE), step_s)
        if loop.batches < 2:
            raise TargetError(
                "this loader can be read only once, and ended before anything was measured. Name a function that returns a new one with more batches."
            )
        return loop

    def _loop(self, seconds: float, step_s: float) -> LoaderStatistics:
        clock, rows, batches, end = LoopClock(), 0, 0, time.perf_counter() + seconds
        while self._batches is not None and (batches < 2 or time.perf_counter() < end):
            asked = time.perf_counter_ns()
            batch = next(self._batches, _END)
            if batch is _END:
                self._batches = None if self.reads_once else iter(self._loader)
                batch = next(self._batches or iter(()), _END)
                if batch is _END:
                    break
                clock.mark()
            clock.got(self._loader, asked, time.perf_counter_ns())
            if step_s:
                time.sleep(step_s)
            batches += 1
            rows += rows_of(batch) if self._in_batches else 1
        return replace(clock.statistics(), samples=rows)

    def close(self) -> None:
        """Stop everything that the loader has started."""
        self._batches = None
        if isinstance(self._loader, Loader):
            self._loader.close()
        self._loader = None


_END: Final = object()


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """The result of `measure`.

    Attributes:
        name: A description of what was measured.
        build_s: Seconds that the factory took.
        first_s: Seconds from ``iter`` to the first batch.
        free: A loop that did nothing with its batches.
        stepped: A loop with a training step; None if no step was given.
        step_s: Seconds that the step should have taken.
        memory: Peak memory in bytes, and number of processes; None if unknown.
        memory_before: Bytes before the loader was built.
        reads_once: It could be read only once, so there was no second epoch.
        report: The loader's own report, if it is a penstock loader.
    """

    name: str
    build_s: float
    first_s: float
    free: LoaderStatistics
    stepped: LoaderStatistics | None
    step_s: float
    memory: tuple[int, int] | None
    memory_before: int
    reads_once: bool
    report: str = ""


def measure(target: str, seconds: float, step_s: float, batch_size: int) -> Measured:
    """Build what ``target`` names, and measure it: first, if requested, in a loop with a step, then in one that takes batches as fast as they come.

    Raises:
        TargetError: There is nothing to measure.
    """
    before = memory_of_processes()
    start = time.perf_counter()
    loader = as_loader(built(target), batch_size)
    build_s = time.perf_counter() - start
    name = described(loader)
    reader = Reader(loader)
    try:
        memory = [memory_of_processes()]
        stepped = reader.run(seconds, step_s) if step_s else None
        report = str(loader.report()) if step_s and isinstance(loader, Loader) and hasattr(loader, "report") else ""
        memory.append(memory_of_processes())
        if stepped is not None and reader.reads_once:
            reader = Reader(built(target))
        free = reader.run(seconds)
        memory.append(memory_of_processes())
    finally:
        reader.close()
    most = max((one for one in memory if one is not None), default=None)
    return Measured(
        name, build_s, reader.first_s, free, stepped, step_s, most, before[0] if before is not None else 0, reader.reads_once, report
    )


def described(loader: Any) -> str:
    """A description of the loader."""
    if isinstance(loader, Loader):
        return repr(loader).strip("<>").partition(": ")[0]
    if isinstance(loader, DataLoader):
        kind = f"{loader.num_workers} worker processes" if loader.num_workers else "no workers"
        return f"{type(loader).__module__.split('.')[0]} {type(loader).__name__} of {type(loader.dataset).__name__}, {kind}"
    return type(loader).__name__


def rows_of(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its tensors and arrays, or else the length of a list."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return len(batch) if batch.ndim else 1
    is_mapping = isinstance(batch, Mapping)
    inside = list(batch.values()) if is_mapping else list(batch) if isinstance(batch, list | tuple) else []
    sizes = {rows_of(one) for one in inside if isinstance(one, torch.Tensor | np.ndarray | Mapping)}
    if len(sizes) == 1:
        return sizes.pop()
    lists = [one for one in inside if isinstance(one, list | tuple)]
    return len(lists[0]) if lists and (is_mapping or isinstance(batch, tuple)) else 1 if is_mapping else max(1, len(inside))


def text_of(found: Measured) -> str:
    """The measurement as a readable table."""
    free = found.free
    lines = [
        found.name,
        "",
        f"built in          {time_of(found.build_s)}",
        f"first batch       {time_of(found.first_s)} after it was requested",
        f"throughput        {free.samples_per_s:,.0f} samples/s, {1 / _each_s(free):,.1f} batches/s of {free.samples / free.batches:,.0f} ({free.batches:,} batches measured)",
        f"epoch boundary    {_boundary(found)}",
    ]
    if found.memory is not None:
        size, processes = found.memory
        lines.append(
            f"memory            {size / 1e6:,.0f} MB in {processes} process{'es' * (processes > 1)}, {found.memory_before / 1e6:,.0f} MB of it before the loader was built"
        )
    if found.stepped is not None:
        loop, waits, step = found.stepped, found.stepped.waits, found.stepped.steps.mean_s
        faster = 1 / (1 - loop.stall_share)
        lines += [
            "",
            f"with a training step of {time_of(found.step_s)}",
            f"stall             {loop.stall_share:.0%} of the time the loop waits for data",
            f"waits             {time_of(waits.p50_s)} median, {time_of(waits.p95_s)} 95th percentile, {time_of(waits.max_s)} longest",
            f"speed             {1 / (step * faster):,.1f} steps/s; if data were free, {1 / step:,.1f}",
            f"headspace         {faster:.2f} x: how much faster the loop would run if data were free",
        ]
    return "\n".join([*lines, "", verdict(found)])


def verdict(found: Measured) -> str:
    """What limits the loop, in a sentence; for a penstock loader, in a few."""
    if found.report:
        return found.report
    keeps_up = f"It keeps up with training steps of {time_of(_each_s(found.free))} or longer."
    if found.stepped is None:
        return f"{keeps_up} To see what is lost, pass the duration of your training step: --step-ms"
    if found.stepped.stall_share >= 0.05:
        return f"data: the training step waits {found.stepped.stall_share:.0%} of the time. {keeps_up}"
    return f"training step: it waits for data only {found.stepped.stall_share:.1%} of the time, so a faster loader would not help."


def _boundary(found: Measured) -> str:
    loop = found.stepped if found.stepped is not None and found.stepped.epochs else found.free
    if not loop.epochs:
        return (
            "not seen, because the loader can be read only once"
            if found.reads_once
            else "not seen, because no epoch ended. Measure for longer: --seconds"
        )
    first, others = loop.epoch_start_waits, loop.waits
    return f"{time_of(first.p50_s)} wait for the first batch of an epoch; {time_of(others.p50_s)} for any other ({first.count} seen)"


def _each_s(loop: LoaderStatistics) -> float:
    """Seconds per batch."""
    return (loop.elapsed_s - loop.first_wait_s) / max(1, loop.batches - 1)


def time_of(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.2g} us"
