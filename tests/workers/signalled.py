"""A training program that gets signals, for ``test_signals.py``.

It reads cases from its standard input and forks itself for each, in a new session, so that torch is imported only once.
For each case it prints a process id, and later an exit code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import Sampler

sys.path.append(str(Path(__file__).parents[1] / "support"))
from sessions import session

from penstock import Loader, sample

N, BATCH, EPOCHS = 24, 2, 2


class Who:
    """Sample i of epoch e is 1000 e + i, together with the process that loaded it."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([1000 * sample().epoch + index, os.getpid()])


class Shuffled(Sampler[int]):
    """Draws from a global generator, so that a helper process plans its epochs."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Any:
        return iter(random.sample(range(N), N))


class Tell:
    """A worker writes a byte into a pipe once it has started, so its signal handlers are set."""

    def __init__(self, fifo: Path) -> None:
        self.fifo = fifo

    def __call__(self, worker: int) -> None:
        with self.fifo.open("wb") as told:
            told.write(b"!")


def build(method: str, started: Path | None = None, *, ahead: bool = True) -> Loader[Any]:
    if method.startswith("plans"):
        multiprocessing.set_start_method(method.removeprefix("plans by "), force=True)
        return Loader.from_dataset(Who(), batch_size=BATCH, sampler=Shuffled(), seed=7, plan_ahead=ahead)
    options: dict[str, Any] = {"method": "thread"}
    if method != "thread":
        options = {"multiprocessing_context": method, "worker_init_fn": Tell(started) if started is not None else None}
    return Loader.from_dataset(
        Who(), batch_size=BATCH, prefetch_factor=2, num_workers=1 if method == "spawn" else 2, **options
    )


class Program:
    """One case: ``method``, ``number`` of the signal, what the program does about it (``answer``), and a ``folder`` for
    what is said."""

    def __init__(self, method: str, number: int, answer: str, folder: str) -> None:
        self.method, self.number, self.answer, self.folder = method, number, answer, Path(folder)
        self.answers = os.open(self.folder / "answers", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.arrived, self.arrive = os.pipe()
        os.mkfifo(self.folder / "started")
        self.started = os.open(self.folder / "started", os.O_RDWR)
        if answer in ("flag", "raise", "reap"):
            signal.signal(number, self.handle)
        elif answer == "ignore":
            signal.signal(number, signal.SIG_IGN)
        elif answer == "default" and number == signal.SIGINT:
            # It may come just before the wait for it begins, which it then does not interrupt: so it also writes to
            # what is waited for.
            os.set_blocking(self.arrive, False)
            signal.set_wakeup_fd(self.arrive)

    def handle(self, number: int, frame: Any) -> None:
        os.write(self.answers, f"{os.getpid()}\n".encode())
        if self.answer == "reap":
            while any(alive_or_reaped() for _ in range(100)):
                pass
            return
        os.write(self.arrive, b"!")
        if self.answer == "raise":
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(7)

    def run(self) -> None:
        raised: BaseException | None = None
        with build(self.method, self.folder / "started") as loader:
            batches = iter(loader)
            if self.answer == "storm":
                signal.signal(self.number, lambda *_: os.write(self.answers, f"{os.getpid()}\n".encode()))
                self.tell("ready")
            got = [next(batches) for _ in range(3)]
            for _ in range({"fork": 2, "forkserver": 2, "spawn": 1}.get(self.method, 0)):
                os.read(self.started, 1)
            before = helpers()
            if self.answer in ("default", "flag", "raise"):
                try:
                    self.tell("ready")
                    os.read(self.arrived, 1)
                except (KeyboardInterrupt, SystemExit) as stop:
                    if self.answer == "default":
                        raise
                    raised = stop
            got += [next(batches) for _ in range(3)]
            after = helpers()
            workers = {int(pid) for batch in got for pid in batch[:, 1]} - {os.getpid()}
            if workers:
                os.kill(min(workers), signal.SIGKILL)
            got += list(batches)
            got += [batch for _ in range(EPOCHS - 1) for batch in loader]
        expected = [1000 * epoch + index for epoch in range(EPOCHS) for index in range(N)]
        if self.method.startswith("plans"):
            with build(self.method, ahead=False) as loader:
                expected = [int(value) for _ in range(EPOCHS) for batch in loader for value in batch[:, 0]]
        said = {
            "values": [int(value) for batch in got for value in batch[:, 0]],
            "expected": expected,
            "before": before,
            "after": after,
        }
        (self.folder / "result").write_text(json.dumps(said))
        if raised is not None:
            raise raised

    def tell(self, what: str) -> None:
        (self.folder / "ready").write_text(what)


def alive_or_reaped() -> bool:
    """Reap one child, if there is one to reap."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def helpers() -> list[int]:
    """The processes that work for this one, including those whose fork server has died, but without `multiprocessing`'s
    own helpers."""
    return sorted(process.pid for process in session(os.getpid()) if process.pid != os.getpid() and works(process))


def works(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        words = " ".join(process.cmdline())
        return (
            words != ""
            and "resource_tracker" not in words
            and not ("forkserver" in words and process.ppid() == os.getpid())
        )
    return False


def main() -> None:
    while line := sys.stdin.readline():
        case = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            folder = Path(case["folder"])
            for fd, name in ((1, "output"), (2, "errors")):
                os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), fd)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            faulthandler.enable()  # of this process's stderr
            Program(**case).run()
            return
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
