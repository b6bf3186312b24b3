"""``python -m penstock bench``: measures a loader, of penstock or any other, as a training loop would use it.

With ``--compare`` also the same data inline, in threads, in processes and on Ray, each in a separate process. They are
alive at once and take turns of a few seconds, so other load on the machine affects all of them. What the user's code
prints there goes to stderr.
"""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO, final

import numpy as np
import torch

from penstock._command.target import TargetError, built, described, is_dataset, with_workers, workers_of
from penstock._loader.loader import Loader
from penstock._observe.loop_clock import LoopClock
from penstock._observe.report import size_of, time_of
from penstock._workers.limits import cores, entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from penstock._statistics import LoaderStatistics

ROUNDS: Final = 5
_WARM_SHARE: Final = 0.2
"""The fraction of a turn, at its beginning, that is discarded: until the queues have reached their steady state."""
_ALIKE: Final = 0.95
"""A loader with at least this fraction of the fastest one's throughput counts as equally fast."""
_STALLED: Final = 0.05
"""A loop that waits for a smaller share of its time has no reason to change its loader."""
_END: Final = object()


class Turn(NamedTuple):
    """What a loop saw in one turn.

    ``epoch_s`` is how long it waited for the first batch of an epoch, None if no epoch began; ``report`` is the
    loader's.
    """

    samples_per_s: float
    batch_s: float
    stall_share: float
    epoch_s: float | None
    memory: int
    report: str


@final
class Row:
    """One way to load the data, and its results.

    Args:
        method: ``"given"``, ``"inline"``, ``"thread"``, ``"process"`` or ``"ray"``.
        pool: The process that measures it; None: this one.

    Attributes:
        name: A description.
        num_workers: Number of workers.
        first_s: Seconds to its first batch.
        turns: What was measured.
        error: Why it could not be measured; empty if it could.
    """

    def __init__(self, method: str, pool: Executor | None = None) -> None:
        self.method, self.name, self._pool = method, method, pool
        self.num_workers, self.first_s, self.error = 0, 0.0, ""
        self.turns: list[Turn] = []

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``function`` where this row is measured; None after an error."""
        try:
            return function(*arguments) if self._pool is None else self._pool.submit(function, *arguments).result()
        except TargetError as exc:
            self.error = str(exc)
        except BrokenProcessPool:
            self.error = "its process was killed"
        except Exception as exc:
            traceback.print_exc()
            self.error = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"[:200]
        return None

    def typical(self, what: str) -> float:
        """The median over the turns."""
        return float(median(getattr(turn, what) for turn in self.turns))


def bench(
    target: str,
    seconds: float,
    step_s: float,
    compare: bool,
    num_workers: int | None,
    batch_size: int,
    out: TextIO,
    err: TextIO,
) -> int:
    """Measure what ``target`` names, and print a table and what follows from it.

    Args:
        target: See `built`.
        seconds: Per row, over all its turns.
        step_s: Seconds for a training step; 0: none.
        compare: Measure the same data with each kind of workers, too.
        num_workers: Number of workers; None: as many as the given loader has, or one per core.
        batch_size: Batch size for a dataset.
        out: Stream for the table.
        err: Stream for errors.

    Returns:
        The exit code: 1 if nothing could be measured, 2 if there is nothing to measure.
    """
    others = ["inline", "thread", "process", "ray"] if compare else []
    rows: list[Row] = []
    with contextlib.ExitStack() as ends:
        for method in ("given", *others):  # one after another, so that each can start undisturbed
            if method == "ray" and not rows[0].ask(_has_cluster):
                continue
            row = Row(method, ends.enter_context(_apart()) if compare else None)
            ends.callback(row.ask, _end)
            row.name, row.num_workers, row.first_s = row.ask(_begin, target, method, num_workers, batch_size) or (
                method,
                0,
                0.0,
            )
            if method == "given" and row.error:
                print(f"penstock bench: {row.error}", file=err)
                return 2
            rows.append(row)
        if rows[0].name in [row.name for row in rows[1:]]:
            del rows[0]  # the same loader once more
        for number in range(ROUNDS):
            for row in rows if number % 2 else reversed(rows):
                if not row.error and (turn := row.ask(_turn, seconds / ROUNDS, step_s)) is not None:
                    row.turns.append(turn)
    for row in rows:
        if not row.turns and not row.error:
            row.error = (
                "it can be read only once, and ended too soon. Name a function that returns a new one with more "
                "batches."
            )
    best = recommended(rows)
    print(
        table(rows, step_s),
        "",
        "Nothing could be measured." if best is None else advice(best, step_s),
        sep="\n",
        file=out,
    )
    return 1 if best is None else 0


def _apart() -> ProcessPoolExecutor:
    """A process in which no other loader has warmed anything up."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare, (multiprocessing.get_start_method(),))


# Functions that run where a row is measured.

_readers: list[Reader] = []


def _prepare(start_method: str) -> None:
    os.dup2(2, 1)
    # as in the user's script; a process that is spawned would spawn its own
    multiprocessing.set_start_method(start_method, force=True)


def _begin(target: str, method: str, num_workers: int | None, batch_size: int) -> tuple[str, int, float]:
    """The name of the loader, how many workers it has, and the seconds to its first batch."""
    loader = built(target)
    workers = 0 if method in ("given", "inline") else num_workers or workers_of(loader) or int(cores())
    if method != "given" or is_dataset(loader):
        loader = with_workers(loader, workers, method if workers else "thread", batch_size)
    reader = Reader(loader)
    _readers.append(reader)
    return described(loader), workers, reader.first_s


def _has_cluster() -> bool:
    ray = sys.modules.get("ray")
    return "RAY_ADDRESS" in os.environ or (ray is not None and ray.is_initialized())


def _turn(seconds: float, step_s: float) -> Turn | None:
    return _readers[-1].turn(seconds, step_s)


def _end() -> None:
    while _readers:
        _readers.pop().close()


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
        self._in_batches = (
            getattr(loader, "batch_size", 1) is not None or getattr(loader, "batch_sampler", None) is not None
        )
        start = time.perf_counter()
        self._batches: Iterator[Any] | None = iter(loader)
        self.reads_once = self._batches is loader
        if next(self._batches, _END) is _END:
            raise TargetError(f"the {type(loader).__name__} yields nothing: its first epoch has no batch.")
        self.first_s = time.perf_counter() - start

    def turn(self, seconds: float, step_s: float) -> Turn | None:
        """Read for ``seconds``, and spend ``step_s`` on each batch; None if an iterable that can be read only once has
        ended.
        """
        if not self.reads_once:
            self.loop(seconds * _WARM_SHARE, step_s)
        loop = self.loop(seconds * (1 - _WARM_SHARE), step_s)
        if loop.batches < 2:
            return None
        batch_s = (loop.elapsed_s - loop.first_wait_s) / (loop.batches - 1)
        starts = loop.epoch_start_waits
        report = self._loader.report() if isinstance(self._loader, Loader) else ""
        return Turn(
            loop.samples_per_s,
            batch_s,
            loop.stall_share,
            starts.p50_s if starts.count else None,
            memory_of_processes(),
            report,
        )

    def loop(self, seconds: float, step_s: float) -> LoaderStatistics:
        """What a loop of ``seconds`` sees."""
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
    return (
        len(lists[0])
        if lists and (is_mapping or isinstance(batch, tuple))
        else 1
        if is_mapping
        else max(1, len(inside))
    )


def memory_of_processes() -> int:
    """Bytes of this process and all that it started (PSS: memory that several share is divided among them); 0 where the
    system does not tell, which only Linux does.
    """
    return sum(1024 * kib for pid in _family() for kib in entries(Path(f"/proc/{pid}/smaps_rollup"), "Pss:"))


def _family() -> set[int]:
    """This process, its children, their children, and so on."""
    parents: dict[int, int] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(path) as file:  # the process may have ended
            parents[int(path.split("/")[2])] = int(file.read().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found


def table(rows: list[Row], step_s: float) -> str:
    """The results, a line for each row."""
    width = max(len(row.name) for row in rows)
    lines = [
        f"{'':{width}}  {'samples/s':>10}  {'from-to':>17}  {'stall':>5}  {'first batch':>11}  {'next epoch':>10}  "
        f"{'memory':>9}"
    ]
    for row in rows:
        if row.error:
            lines.append(f"{row.name:{width}}  {row.error}")
            continue
        rates = [turn.samples_per_s for turn in row.turns]
        epochs = [turn.epoch_s for turn in row.turns if turn.epoch_s is not None]
        stall = f"{row.typical('stall_share'):.0%}" if step_s else "-"
        lines.append(
            f"{row.name:{width}}  {median(rates):>10,.0f}  {f'{min(rates):,.0f}-{max(rates):,.0f}':>17}  {stall:>5}  "
            f"{time_of(row.first_s):>11}  {time_of(median(epochs)) if epochs else '-':>10}  "
            f"{size_of(max(turn.memory for turn in row.turns)):>9}"
        )
    return "\n".join(lines)


def recommended(rows: list[Row]) -> Row | None:
    """The simplest of penstock's loaders that is as fast as the fastest one, or the only loader; None if none could be
    measured.
    """
    ours = [row for row in rows if not row.error and (row.method != "given" or len(rows) == 1)]
    fastest = max((row.typical("samples_per_s") for row in ours), default=0.0)
    return next((row for row in ours if row.typical("samples_per_s") >= _ALIKE * fastest), None)


def advice(row: Row, step_s: float) -> str:
    """What to conclude from a row, in a few sentences."""
    stall, report = row.typical("stall_share"), row.turns[-1].report
    if not step_s:
        said = (
            f"It keeps up with training steps of {time_of(row.typical('batch_s'))} or longer. To see how long yours "
            f"waits, pass --step-ms."
        )
    elif report and row.method == "given":  # with --compare a report would count the turns of the other rows as steps
        said = report
    elif stall < _STALLED:
        said = f"The training step waits only {stall:.1%} of the time for data, so a faster loader would not help."
    else:
        said = (
            f"The training step waits {stall:.0%} of the time for data; without that it would run "
            f"{1 / (1 - stall):.2f} times as fast."
        )
    if row.method == "given":
        return said
    workers = "num_workers=0" if row.method == "inline" else f'num_workers={row.num_workers}, method="{row.method}"'
    threads = (
        "Threads share the global random generators: a dataset that draws from them must use penstock.sample().rng, or "
        "processes."
    )
    return "\n".join([f"Use penstock with {workers}.", said, *[threads] * (row.method == "thread")])
