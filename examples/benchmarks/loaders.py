"""Data loaders side by side: samples per second, CPU time, and the first batch, each against the work without a loader.

    python loaders.py [--workloads NAME ...] [--loaders NAME ...] [--rounds 3] [--turns 3] [--seconds 0.2] [--workers 2]
                                [--quick] [--json FILE] [--docs PAGE]
    python loaders.py --check                   one epoch of everything: shapes, types, and each sample once
    python loaders.py --summary FILE FILE ...   whether runs at different hours agree
    python loaders.py --from FILE --docs PAGE   the tables of an earlier run

The workloads and the loaders' settings are in loader_peers.py, the statistics and the tables in tables.py.

In each round every loader starts afresh, in a process of its own. Then they take turns: one runs, the others are
stopped with all of their workers (SIGSTOP), so every loader sees the same minutes of a machine whose clock and
neighbours wander. Loaders are compared turn by turn. While all are stopped, the CPU time that the machine spends
nevertheless is somebody else's; it is printed beside each table.

"no loader" is the work alone, load and collate, in as many threads or processes as there are workers. It makes new
memory for each batch, so a loader that recycles memory may be faster.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import gzip
import importlib
import importlib.metadata
import json
import multiprocessing.util
import os
import platform
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import tables as tables
import torch
from loader_peers import (
    LOAD_ONLY,
    LOADERS,
    NATIVE,
    NO_LOADER,
    NOTHING,
    WORKLOADS,
    Opened,
    Task,
    Workload,
    build,
    copier,
    names_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODULES = (
    "PIL.Image",
    "grain",
    "grain.experimental",
    "penstock",
    "spdl.pipeline",
    "torchdata.nodes",
    "torchdata.stateful_dataloader",
)
PACKAGES = ("torch", "torchdata", "grain", "spdl", "torch-penstock", "numpy", "pillow")


# ------------------------------------------------------------------------------------ in a process of its own: a loader


def leaves(batch: Any) -> list[Any]:
    """The tensors, arrays and numbers of a batch, those of a dict in the order of its names."""
    if isinstance(batch, dict):
        batch = [batch[name] for name in sorted(batch)]
    return [leaf for part in batch for leaf in leaves(part)] if isinstance(batch, list | tuple) else [batch]


def form(batch: Any) -> list[Any]:
    """What every batch of a workload has in common."""
    return [(str(getattr(leaf, "dtype", type(leaf))).removeprefix("torch."), np.ndim(leaf)) for leaf in leaves(batch)]


def marks(batch: Any) -> list[float]:
    """What identifies the samples of a batch."""
    if numbers := [leaf for leaf in leaves(batch) if isinstance(leaf, int)]:  # of a collate_fn that makes lists
        return numbers
    leaf = torch.as_tensor(batch["input_ids"] if isinstance(batch, dict) and "input_ids" in batch else leaves(batch)[0])
    return leaf.flatten(1).sum(1, dtype=torch.float64).tolist() if leaf.ndim > 1 else leaf.tolist()


class Running:
    """A loader that is measured in turns."""

    def __init__(self, opened: Opened, task: Task) -> None:
        self.opened = opened
        self.workload = task.workload
        self.copy = copier(task) if self.workload.copies and opened.finished is None else None
        self.stream = self._forever()

    def _forever(self) -> Iterator[tuple[int, Any]]:
        """(place in its epoch, batch), epoch after epoch."""
        while True:
            yield from enumerate(self.opened.epoch())

    def turn(self, seconds: float) -> dict[str, float]:
        """Load for so many seconds, and on until workers that finish together have all finished."""
        if self.opened.finished is not None:
            return self._turn_without_a_loader(seconds)
        lead, workers = self.workload.lead, self.workload.workers
        batches = counted = 0
        counted_s = 0.0
        last = time.perf_counter()
        for place, batch in self.stream:
            if self.copy is not None and batch is not None:
                self.copy(batch)
            now = time.perf_counter()
            batches += 1
            if place >= lead:
                counted += 1
                counted_s += now - last
            last = now
            if counted_s >= seconds and (place == 0 if self.workload.ends else batches % workers == 0):
                break
        return {"samples_per_s": counted * self.workload.batch_size / counted_s, "batches": batches}

    def _turn_without_a_loader(self, seconds: float) -> dict[str, float]:
        before = self.opened.finished.copy()
        while (self.opened.finished[:, 1] == before[:, 1]).any():  # a batch that was begun in an earlier turn
            time.sleep(0.001)
        begin = self.opened.finished.copy()
        time.sleep(seconds)
        while (self.opened.finished[:, 1] == begin[:, 1]).any():
            time.sleep(0.001)
        end = self.opened.finished.copy()
        gained = end - begin
        batches = (end - before)[:, 0].sum() / self.workload.batch_size
        return {"samples_per_s": (gained[:, 0] / gained[:, 1]).sum(), "batches": batches}


def serve(name: str, task: Task, seconds: float, tell: Callable[[dict[str, Any]], None], asked: Iterator[str]) -> None:
    """Build a loader, tell how long the first batch took, warm up, and measure whenever asked to, stopped in
    between.
    """
    torch.set_num_threads(1)
    start = time.perf_counter()
    opened = build(name, task)
    running = Running(opened, task)
    if opened.finished is None:
        next(running.stream)
    first_s = time.perf_counter() - start
    running.turn(seconds / 2)
    tell({"first_ms": 1000 * first_s})
    os.killpg(0, signal.SIGSTOP)
    for word in asked:
        if word == "end":
            break
        tell(running.turn(seconds))
        os.killpg(0, signal.SIGSTOP)
    opened.close()


def check(name: str, task: Task, tell: Callable[[dict[str, Any]], None]) -> None:
    """Load one epoch: every batch fits the samples, and each sample comes once."""
    opened = build(name, task)
    collate, dataset, size = task.workload.collate, task.dataset, task.batch_size
    expected = [collate([dataset[index] for index in range(at, at + size)]) for at in range(0, len(dataset), size)]
    got = list(opened.epoch())
    opened.close()
    for batch in got:
        if form(batch) != form(expected[0]):
            raise ValueError(f"got {form(batch)} instead of {form(expected[0])}")
    seen, known = ([mark for batch in batches for mark in marks(batch)] for batches in (got, expected))
    if len(seen) != len(known) or ("cropped" not in task.workload.title and sorted(seen) != sorted(known)):
        raise ValueError(f"got {len(seen)} samples, but not each of the {len(known)} once")
    tell({"ok": f"{len(seen)} samples, each once"})


# ------------------------------------------------------------------------------------- in the program: turns and tables


class Child:
    """A forked process with a loader: the leader of a group that holds all of its workers.

    Args:
        run: What the process does, given how to tell its parent something, and what its parent asks for.
        timeout: Seconds for each answer.
    """

    def __init__(self, run: Callable[[Callable[[dict[str, Any]], None], Iterator[str]], None], timeout: float) -> None:
        self.timeout = timeout
        asks, self._ask = os.pipe()
        self._answers, tells = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run(run, asks, tells)
        os.setpgid(self.pid, self.pid)
        os.close(asks)
        os.close(tells)

    def _run(self, run: Any, asks: int, tells: int) -> None:
        with contextlib.suppress(BaseException):
            os.setpgid(0, 0)
            os.close(self._ask)
            os.close(self._answers)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

            def tell(said: dict[str, Any]) -> None:
                os.write(tells, json.dumps(said).encode() + b"\n")

            try:
                run(tell, (line.strip() for line in os.fdopen(asks)))
            except BaseException:
                tell({"failed": traceback.format_exc().strip().splitlines()[-1]})
            multiprocessing.util._exit_function()
        os._exit(0)

    def told(self) -> dict[str, Any]:
        """The next answer, or why there is none."""
        said = b""
        while not said.endswith(b"\n"):
            ready = select.select([self._answers], [], [], self.timeout)[0]
            more = os.read(self._answers, 4096) if ready else b""
            if not more:
                return {"failed": "ended" if ready else f"not done after {self.timeout:.0f} s"}
            said += more
        return json.loads(said)

    def turn(self) -> dict[str, Any]:
        """Run for one turn, and count the CPU time and context switches of all its processes together."""
        cpu_s, switches = self._usage()
        os.write(self._ask, b"turn\n")
        os.killpg(self.pid, signal.SIGCONT)
        said = self.told()
        if "failed" in said:
            return said
        self.stopped()
        after_s, after = self._usage()
        return said | {
            "batch_us": 1e6 * (after_s - cpu_s) / said["batches"],
            "switches": (after - switches) / said["batches"],
        }

    def stopped(self) -> None:
        """Wait until the process has stopped itself."""
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def _usage(self) -> tuple[float, int]:
        cpu_s, switches = 0.0, 0
        me = psutil.Process(self.pid)
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                # the CPU clock of another process, see clock_getcpuclockid(3)
                cpu_s += time.clock_gettime((~process.pid << 3) | 2)
                ended = process.cpu_times()
                cpu_s += ended.children_user + ended.children_system
                for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
                    switches += int(status.read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])
        return cpu_s, switches

    def ask_to_end(self) -> None:
        """Let it close its loader."""
        with contextlib.suppress(OSError):
            os.write(self._ask, b"end\n")
            os.killpg(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Wait until all of its processes have ended; whoever takes long is told to.

        Python's resource tracker is not, and frees what is left.
        """
        for number, patience_s in ((0, 2), (signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            until = time.monotonic() + patience_s
            while self._alive(number) and time.monotonic() < until:
                number = 0
                time.sleep(0.01)
        os.close(self._ask)
        os.close(self._answers)

    def _alive(self, number: int) -> bool:
        """Send all of its processes this signal, if any is left."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def busy_cores(seconds: float) -> float:
    """How many cores are busy."""
    before = psutil.cpu_times()
    time.sleep(seconds)
    after = psutil.cpu_times()
    return (
        sum(
            getattr(after, kind) - getattr(before, kind)
            for kind in ("user", "nice", "system", "irq", "softirq", "steal")
        )
        / seconds
    )


def wake_up_us(trips: int = 1000, trials: int = 10) -> float:
    """CPU time of waking up another process through a pipe, and of falling asleep: the least of several trials."""

    def echo(tell: Any, asked: Any) -> None:
        while os.read(there[0], 1):
            os.write(back[1], b"x")

    def spent_s() -> float:
        return time.process_time() + time.clock_gettime((~child.pid << 3) | 2)

    there, back = os.pipe(), os.pipe()
    child = Child(echo, 10)
    costs = []
    for _ in range(trials):
        begin_s = spent_s()
        for _ in range(trips):
            os.write(there[1], b"x")
            os.read(back[0], 1)
        costs.append(1e6 * (spent_s() - begin_s) / trips / 2)
    os.kill(child.pid, signal.SIGKILL)
    for pipe in (*there, *back):
        os.close(pipe)
    child.end()
    return min(costs)


class Program:
    """All measurements of one call of this program."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        versions = {"Python": platform.python_version()}
        for package in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        self.data: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "machine": {"cores": len(os.sched_getaffinity(0)), "versions": versions, "wake_up_us": wake_up_us()},
            "options": {name: getattr(options, name) for name in ("rounds", "turns", "seconds", "workers")},
            "rows": [],
            "failed": {},
            "load": {},
        }
        self.begin_s = time.monotonic()

    def measure(self, name: str) -> None:
        """Rounds of one workload."""
        workload = WORKLOADS[name]
        task = task_of(workload, workload.length)
        names = chosen(name, self.options.loaders)
        self.data["load"][name] = []
        failed = self.data["failed"][name] = {}
        for number in range(self.options.rounds):
            print(f"{name}, round {number + 1} of {self.options.rounds}", file=sys.stderr, flush=True)
            children: dict[str, Child] = {}
            try:
                self._round(name, task, number, [one for one in names if one not in failed], children, failed)
            finally:
                for child in children.values():
                    child.ask_to_end()
                for child in children.values():
                    child.end()

    def _round(
        self, name: str, task: Task, number: int, names: list[str], children: dict[str, Child], failed: dict[str, str]
    ) -> None:
        seconds = self.options.seconds * task.workload.turn
        for one in names:
            child = children[one] = Child(
                lambda tell, asked, one=one: serve(one, task, seconds, tell, asked), self.options.timeout
            )
            said = child.told()
            if "failed" in said:
                failed[one] = said["failed"]
                child.end()
                del children[one]
                continue
            child.stopped()
            self.data["rows"].append({"workload": name, "loader": one, "round": number, "turn": None, **said})
        for turn in range(self.options.turns):
            self.data["load"][name].append(busy_cores(0.25))
            for one in random.Random(number * 1000 + turn).sample(list(children), len(children)):
                said = children[one].turn()
                if "failed" in said:
                    failed[one] = said["failed"]
                    children.pop(one).end()
                    continue
                self.data["rows"].append({"workload": name, "loader": one, "round": number, "turn": turn, **said})

    def finish(self) -> dict[str, Any]:
        self.data["took_s"] = time.monotonic() - self.begin_s
        return self.data


def task_of(workload: Workload, length: int) -> Task:
    """The workload's dataset, made once for all loaders."""
    dataset = workload.make(length)
    batch = workload.collate([dataset[index] for index in range(workload.batch_size)])
    return Task(workload, dataset, sum(getattr(leaf, "nbytes", 8) for leaf in leaves(batch)))


def chosen(workload: str, asked: list[str] | None) -> list[str]:
    """Names of a workload's loaders, among those asked for: in full, or the part before the comma."""
    return [name for name in names_of(workload) if not asked or name in asked or name.split(", ")[0] in asked]


def check_all(options: argparse.Namespace) -> bool:
    """One line for each workload and loader."""
    good = True
    for name in options.workloads:
        if name == NOTHING:
            continue
        task = task_of(WORKLOADS[name], 12 * WORKLOADS[name].batch_size)
        for one in chosen(name, options.loaders):
            if one.startswith((NO_LOADER, LOAD_ONLY)):
                continue
            child = Child(lambda tell, asked, one=one, task=task: check(one, task, tell), options.timeout)
            said = child.told()
            child.end()
            good &= "ok" in said
            print(f"{name:10}{one:34}{said.get('ok') or said['failed']}", flush=True)
    return good


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=list(WORKLOADS),
        default=[name for name in WORKLOADS if name != NATIVE],
        metavar="NAME",
    )
    parser.add_argument(
        "--loaders", nargs="+", metavar="NAME", help=f"full names, or the part before a comma, of: {', '.join(LOADERS)}"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help="turns of each loader in a round")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a turn; some workloads take longer ones")
    parser.add_argument("--workers", type=int, default=2, help="threads or processes of each loader")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one answer of a loader")
    parser.add_argument("--quick", action="store_true", help="one round, one turn of 0.1 s: does everything run?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--summary", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    for name, workload in WORKLOADS.items():
        if not workload.waits:
            WORKLOADS[name] = dataclasses.replace(workload, workers=options.workers)
    if options.quick:
        options.rounds, options.turns, options.seconds = 1, 1, 0.1
    return options


def read(file: Path) -> Any:
    """What ``--json`` wrote; the measurements that are kept are compressed."""
    return json.loads(gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes())


def main() -> None:
    """Measure in turns, and print."""
    options = parsed()
    if options.summary:
        print(tables.summary(list(map(read, options.summary))))
        return
    if options.earlier:
        data = read(options.earlier)
    else:
        # threads of the same library in every loader's workers, and none beside them
        if os.environ.get("OMP_NUM_THREADS") != "1":
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": "1"})
        for module in MODULES:  # before the first fork; whoever is not installed fails by name later
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        # import what they take, as the other loaders have done by now; nothing starts
        for method in ("thread", "process"):
            importlib.import_module("penstock").Loader.from_dataset([0], 1, num_workers=1, method=method)
        importlib.import_module("penstock._workers.process_pool")  # which the first batch would import
        gc.collect()
        gc.freeze()  # nobody's first batch is the one that collects what torch's import has left behind
        if options.check:
            sys.exit(not check_all(options))
        program = Program(options)
        for name in options.workloads:
            program.measure(name)
            gc.collect()
            if options.json:
                options.json.write_text(json.dumps(program.finish()))
        data = program.finish()
    print(tables.page(data))
    if options.docs:
        tables.write(options.docs, data)


if __name__ == "__main__":
    main()
