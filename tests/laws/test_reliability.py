"""The table of faults: what happens to a run, and how soon, for each fault and each kind of worker.

With ``PENSTOCK_WRITE_DOCS=1`` the run also writes docs/reliability.md; otherwise it only checks.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import json
import logging
import os
import queue
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import IterableDataset
from worker_pids import worker_pids

import penstock
from penstock import Loader
from penstock._memory.parcel import Parcel
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- table of faults: written by tests/laws/test_reliability.py -->", "<!-- end of the table -->"
WRITING = os.environ.get("PENSTOCK_WRITE_DOCS") == "1"

N, BATCH, BAD, READ_BEFORE = 40, 4, 13, 3
TIMEOUT_S = 1.0
METHODS = ["thread", "fork", "forkserver", "spawn"]
RARELY = [] if WRITING else [pytest.mark.soak]


# What happens, once, in the worker that loads sample BAD.


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no pickling")


class KillsItsWriter:
    """Part of a result; pickling it ends the process, while the result is being sent."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return (int, ())


def killed(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_allocation(folder: Path) -> None:
    memory = [bytearray(2**20) for _ in range(32)]
    os.kill(os.getpid(), signal.SIGKILL)
    del memory


def killed_with_a_lock(folder: Path) -> None:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGKILL)


def exits_hard(folder: Path) -> None:
    os._exit(3)


def exits(folder: Path) -> None:
    sys.exit(3)


def segfault(folder: Path) -> None:
    faulthandler.disable()  # that of pytest, which would print the stack of this process
    ctypes.string_at(0)


RELEASED = threading.Event()
"""For threads, which must end with the test. Processes do not see it."""


def stuck(folder: Path) -> None:
    RELEASED.wait()


def raises(folder: Path) -> None:
    raise Unpicklable("cannot be pickled")


def leaks_descriptors(folder: Path) -> Any:
    """All of it in a worker process. In the user's own process, only the next request is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if os.getpid() == int((folder / "pid").read_text()):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            open("/dev/null").close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    with contextlib.suppress(OSError):
        while True:
            os.open("/dev/null", os.O_RDONLY)
    return torch.zeros(500_000)  # needs a descriptor to travel


def returns_a_function(folder: Path) -> Any:
    return lambda: None


def returns_a_trap(folder: Path) -> Any:
    return KillsItsWriter()


@dataclass(frozen=True)
class Fault:
    """``happens``: runs in the worker; None: the reader kills workers. ``raises``: the error in place of a lost
    batch."""

    label: str
    happens: Callable[[Path], Any] | None
    raises: str = ""
    raises_in_thread: str | None = None  # None: kills the process, so that threads have nothing to answer


FAULTS = {
    "working": Fault("SIGKILL while it works", killed),
    "idle": Fault("SIGKILL while it is idle", None),
    "exit": Fault("`os._exit`", exits_hard),
    "sysexit": Fault("`sys.exit` in a transform", exits, "SampleError", "SampleError"),
    "segfault": Fault("segmentation fault", segfault),
    "oom": Fault("out-of-memory kill (simulated: SIGKILL amid allocations)", killed_in_allocation),
    "unpicklable": Fault("a result that cannot be pickled", returns_a_function, "SampleError", ""),
    "descriptors": Fault("file descriptors exhausted", leaks_descriptors, "", "OSError"),
    "lock": Fault("SIGKILL while it holds a (file) lock", killed_with_a_lock),
    "writing": Fault("SIGKILL while it writes a result", returns_a_trap),
    "startup": Fault("SIGKILL during its start-up", None),
    "again": Fault("a worker just replaced is killed again", killed),
    "all": Fault("SIGKILL of all workers at once", None),
    "stuck": Fault(f"stuck, with `timeout={TIMEOUT_S:g}`", stuck, "TimeoutError", "TimeoutError"),
    "exception": Fault("an exception that cannot be pickled", raises, "SampleError", "Unpicklable"),
    "live": Fault("a stream that gives a batch only when the loop has used the one before", None, "", ""),
}


class Faulty:
    """Sample i is ``(i, a tensor)``. Its fault happens once; a file in ``folder`` records that, and when."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder = folder
        self.fault = fault

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        happens = FAULTS[self.fault].happens
        data = torch.full((5000,), float(index))
        again = self.fault == "again" and index == BAD + 1
        if happens is not None and ((index == BAD and first(self.folder)) or (again and first(self.folder, "2"))):
            return index, happens(self.folder), data
        if self.fault == "lock":
            with (self.folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
        return index, None, data


def first(folder: Path, name: str = "") -> bool:
    """Whether this is the first time, in any process; the file then holds the time."""
    try:
        with (folder / f"fault{name}").open("x") as file:
            file.write(str(time.monotonic()))
    except FileExistsError:
        return False
    return True


class Fed(IterableDataset[int]):
    """What the loop puts into a queue, up to None."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[int]:
        while (item := self.items.get(timeout=100)) is not None:
            yield item


class Dies:
    """A ``worker_init_fn`` that is killed the first time."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder = folder
        self.fault = fault

    def __call__(self, worker: int = 0) -> None:
        if self.fault == "startup" and first(self.folder):
            killed(self.folder)


def same(samples: list[Any]) -> list[Any]:
    return samples


# A run, and its record.


@dataclass
class Seen:
    """The samples of the epoch, each error with its time, and when the sample BAD (or what is read next) came; seconds
    since the fault."""

    samples: list[int]
    errors: list[tuple[str, str, float]]
    recovered_s: float = 0.0


def read(batches: Any, fault: str, folder: Path, pids: Callable[[], list[int]], started: Callable[[], None]) -> Seen:
    """Read an epoch, and continue after errors. Kills workers if that is the fault. Calls ``started`` after the first
    batch."""
    seen, came = Seen([], []), []
    while True:
        if len(came) == READ_BEFORE and fault in ("idle", "all") and first(folder):
            time.sleep(0.2)  # a training step: by its end the workers have nothing to do
            victims = pids()
            (folder / "fault").write_text(str(time.monotonic()))
            for pid in victims if fault == "all" else victims[:1]:
                os.kill(pid, signal.SIGKILL)
        try:
            batch = next(batches)
        except StopIteration:
            break
        except Exception as error:
            seen.errors.append(
                (type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", ())]), time.monotonic())
            )
            if len(seen.errors) == 4:
                break
            continue
        came.append((time.monotonic(), [sample[0] for sample in batch]))
        if len(came) == 1:
            started()
        del batch
    began = float((folder / "fault").read_text())
    seen.samples = [index for _, batch in came for index in batch]
    seen.errors = [(kind, text, at - began) for kind, text, at in seen.errors]
    seen.recovered_s = min((at - began for at, batch in came if at > began and batch[-1] >= BAD), default=float("nan"))
    return seen


class Watch(logging.Handler):
    """When the first death was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.at: float | None = None
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())
        if self.at is None:
            self.at = time.monotonic()


KILLS = {
    (fault, "thread"): "n/a: it kills the process itself"
    for fault, about in FAULTS.items()
    if about.raises_in_thread is None
}
RESULTS: dict[tuple[str, str], str] = {**KILLS}
OFTEN = [("startup", "forkserver")]
CASES = [
    pytest.param(fault, method, marks=[] if method in ("thread", "fork") or (fault, method) in OFTEN else RARELY)
    for fault in FAULTS
    for method in METHODS
    if (fault, method) not in KILLS
]


@pytest.mark.parametrize(("fault", "method"), CASES)
def test_every_sample_comes_once_and_in_order_or_the_error_says_why(
    fault: str, method: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Seen to fail for each fault that kills, when `_replace` did not requeue the tasks (it hangs)."""
    limit_s = 1.0 if WRITING or request.config.getoption("soak") else 100.0  # a machine that is slow is no fault
    RESULTS[fault, method] = tried(fault, method, tmp_path, limit_s)


def tried(fault: str, method: str, folder: Path, limit_s: float) -> str:
    """What the page says of a fault, after it has been checked; ``tests/workers/ray_cases.py`` asks, too."""
    expected = raised_for(fault, method)
    (folder / "pid").write_text(str(os.getpid()))
    options: dict[str, Any] = {"method": method} if method in ("thread", "ray") else {"multiprocessing_context": method}
    if fault == "stuck":
        options["timeout"] = 60.0  # until the first workers have started

    def started() -> None:
        if fault == "stuck":
            set_timeout(loader, TIMEOUT_S)

    if fault == "live":
        source, came = Fed(), []
        source.items.put(0)
        with Loader.from_dataset(source, num_workers=2, **options) as loader:
            for number, batch in enumerate(loader, 1):
                came += batch.tolist()
                source.items.put(number if number < N else None)
        assert came == list(range(N))
        return "continues"

    RELEASED.clear()
    log, watch = logging.getLogger("penstock"), Watch()
    log.addHandler(watch)
    loader = Loader.from_dataset(
        Faulty(folder, fault),
        batch_size=BATCH,
        num_workers=2,
        collate_fn=same,
        worker_init_fn=Dies(folder, fault),
        prefetch_next_epoch=False,
        **options,
    )
    try:
        seen = read(iter(loader), fault, folder, partial(pids_of, loader), started)
        set_timeout(loader, None)
        RELEASED.set()
        deadline = time.monotonic() + 100
        whole = [sample[0] for batch in loader for sample in batch]
        # the rest was quicker than a death
        while fault in ("idle", "startup") and watch.at is None and time.monotonic() < deadline:
            assert whole == [sample[0] for batch in loader for sample in batch]
    finally:
        log.removeHandler(watch)
        loader.close(timeout=8.0)
    kept = [index for index in range(N) if not expected or index // BATCH != BAD // BATCH]
    assert seen.samples == kept, (fault, seen)
    assert whole == list(range(N))
    assert [kind for kind, _, _ in seen.errors] == ([expected] if expected else []), (fault, seen.errors)
    began = float((folder / "fault").read_text())
    detected = seen.errors[0][2] if expected else watch.at - began if watch.at is not None else None
    if expected:
        assert re.search(rf"dataset ind\w+ .*\b{BAD}\b", seen.errors[0][1]), seen.errors
    if fault == "stuck":
        assert detected is not None
        assert detected <= TIMEOUT_S + 10 * limit_s
    elif expected is not None and (expected or (FAULTS[fault].raises == "" and method != "thread")):
        assert detected is not None
        assert 0 <= detected <= limit_s, watch.records
    outcome = f"`{expected}`, then continues" if expected else "continues"
    times = "" if detected is None else f"; {shown(detected)} / {shown(seen.recovered_s)}"
    return outcome + times


def raised_for(fault: str, method: str) -> str | None:
    """The error in place of the batch, or an empty text."""
    if method == "thread":
        return FAULTS[fault].raises_in_thread
    # Ray sends classes and functions by value
    return "" if method == "ray" and fault == "unpicklable" else FAULTS[fault].raises


def set_timeout(loader: Loader[Any], seconds: float | None) -> None:
    loader.root.executor._options.timeout = seconds  # type: ignore[attr-defined]


def pids_of(loader: Loader[Any]) -> list[int]:
    workers = next(node.workers for node in loader.statistics().nodes if node.workers is not None)
    if workers.method != "ray":
        return worker_pids()
    executor: Any = loader.root.executor  # type: ignore[attr-defined]
    return [
        int(said[1]) for actor in executor._pool._actors if (said := re.search(r"pid (\d+)", actor.where))
    ]  # one that starts has not said it yet


def shown(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


# Healing for long.


@pytest.mark.soak
def test_a_soak_of_200_epochs_with_a_kill_every_few_batches(caplog: pytest.LogCaptureFixture) -> None:
    """The sequence is exact, and neither memory nor descriptors grow, here and in the process that forks. Seen to fail:
    `remove` without `close`."""
    caplog.set_level(logging.ERROR, "penstock")
    epochs, n = 200, 16
    with Loader.from_dataset(
        Tagged(n),
        batch_size=2,
        shuffle=True,
        seed=1,
        num_workers=2,
        multiprocessing_context="fork",
        max_restarts=10_000,
    ) as loader:
        order = Loader.from_dataset(Tagged(n), batch_size=2, shuffle=True, seed=1)
        batches = 0
        killed: set[int] = set()
        sizes = []
        for epoch in range(epochs):
            for ours, expected in zip(loader, order, strict=True):
                assert ours.tolist() == expected.tolist()
                batches += 1
                if batches % 5 == 0 and (pids := worker_pids()):  # none was needed since the last one died
                    pid = pids[batches % len(pids)]
                    if pid not in killed:  # otherwise the worker was not needed since its last death
                        zygote = psutil.Process(pid).parent()
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
            if epoch % 50 == 49:
                gc.collect()
                here = psutil.Process()
                assert zygote is not None
                sizes.append((here.memory_info().rss, here.num_fds(), zygote.memory_info().rss, zygote.num_fds()))
        assert len(killed) >= 200
        assert len(killed) - 2 <= loader.statistics().nodes[-1].workers.restarts <= len(killed)
    first_, last = sizes[0], sizes[-1]
    assert last[1] <= first_[1] + 2, sizes
    # it reaps dead workers when it forks the next one: at most two, with three descriptors each
    assert last[3] <= first_[3] + 2 * 3, sizes
    assert last[0] < first_[0] + 10 * 2**20, sizes
    assert last[2] < first_[2] + 10 * 2**20, sizes


class DiesInTheMiddle:
    """Sample 3 has its worker killed when half of its batch has been copied into shared memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 3 and first(self.folder):
            whole = Parcel.write

            def half(parcel: Parcel, memory: memoryview, start: int = 0) -> None:
                memory[start : start + 4096] = bytes([255]) * 4096
                os.kill(os.getpid(), signal.SIGKILL)
                whole(parcel, memory, start)

            Parcel.write = half  # type: ignore[method-assign]
        return torch.full((50_000,), float(index))


def test_a_result_that_was_written_by_half_is_never_seen(tmp_path: Path) -> None:
    """A list of samples is always copied, while a batch may be made in a slot, if the worker was lent one before it
    began."""
    dataset = DiesInTheMiddle(tmp_path)
    with Loader.from_dataset(
        dataset, batch_size=2, num_workers=2, multiprocessing_context="fork", collate_fn=list
    ) as loader:
        for number, batch in enumerate(loader):
            assert torch.stack(batch).eq(torch.tensor([[2.0 * number], [2.0 * number + 1]])).all()
        assert loader.statistics().nodes[-1].workers.restarts == 1


class Noise(Tagged):
    """Draws from every generator."""

    def __getitem__(self, index: int) -> Any:
        numbers = [random.random(), np.random.random(), torch.rand(()).item(), penstock.sample().rng.random()]
        return torch.tensor([super().__getitem__(index), *numbers], dtype=torch.float64)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_augmentation_is_the_same_after_deaths_and_resumes(method: str) -> None:
    """Bit for bit the same as inline and undisturbed. Seen to fail: without `rekey_globals`."""

    def build(**options: Any) -> Any:
        return Loader.from_dataset(Noise(12), batch_size=2, shuffle=True, seed=6, **options)

    with build() as loader:
        expected = [batch.tolist() for _ in range(2) for batch in loader]
    workers = {"num_workers": 2, "multiprocessing_context": method, "max_restarts": 100}
    seen = []
    with build(**workers) as loader:
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == 3:
                os.kill(worker_pids()[0], signal.SIGKILL)
            if len(seen) == 5:
                break
        state = loader.state_dict()
    with build(**workers) as loader:
        loader.load_state_dict(state)
        seen += [batch.tolist() for _ in range(2) for batch in loader]
    assert seen == expected


# Ends.

PROGRAM = """
import os, threading
import penstock

class Slow:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index > 5 and {stuck}:
            threading.Event().wait()
        return index

def sent(name, to):  # by another process, while this one goes on
    os.posix_spawn("/bin/sh", ["sh", "-c", f"kill -s {{name}} -- {{to}}"], os.environ)

def main():
    loader = penstock.Loader.from_dataset(Slow(), batch_size=2, num_workers=2, **{options!r})
    try:
        while True:  # threads come to the end of the epoch before the signal does
            for batch in loader:
                if batch[0] == 4:
                    print("here", flush=True)
                    {end}
    except KeyboardInterrupt:
        print("interrupted", flush=True)

if __name__ == "__main__":
    main()
"""
ENDS = {
    "exit with it alive": ("return", 0, "here\n"),
    "an exception in the loop": (
        "raise LookupError('of the user')",
        1,
        "here\nTraceback .*\nLookupError: of the user\n",
    ),
    "Ctrl-C": ("sent('INT', -os.getpgid(0))", 0, "here\ninterrupted\n"),
    "SIGTERM": ("sent('TERM', os.getpid())", -signal.SIGTERM, "here\n"),
    "SIGKILL": ("sent('KILL', os.getpid())", -signal.SIGKILL, "here\n"),
}

ENDED_OFTEN = [
    ("exit with it alive", "fork"),
    ("an exception in the loop", "thread"),
    ("Ctrl-C", "fork"),
    ("SIGTERM", "spawn"),
    ("SIGKILL", "fork"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "method"),
    [pytest.param(*case, marks=[] if case in ENDED_OFTEN else pytest.mark.soak) for case in product(ENDS, METHODS)],
)
def test_nothing_is_left_and_nothing_is_said(
    end: str, method: str, tmp_path: Path, run_program: Callable[..., str]
) -> None:
    """In the middle of samples that never come (threads: of none, for they cannot be stopped).

    Seen to fail: without `_end_with` (SIGKILL); without `ensure_running` (Ctrl-C while the second worker is still being
    spawned).
    """
    statement, code, expected = ENDS[end]
    options = {"method": "thread"} if method == "thread" else {"multiprocessing_context": method}
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(options=options, end=statement, stuck=method != "thread"))
    said = run_program(file, code=code)
    assert re.fullmatch(expected, said, re.DOTALL), said
    assert said.count("Traceback") == (code == 1)


# Elsewhere than on Linux.

ELSEWHERE = """
import multiprocessing.connection, os, select, signal, socket, sys, tempfile
import torch, torchdata.nodes, torch.distributed.device_mesh
for name in [name for name in sys.modules if name.partition(".")[0] == "penstock"]:
    del sys.modules[name]  # it is imported here for the first time
sys.modules["fcntl"] = sys.modules["resource"] = None
for module, names in (
    (os, ["fork", "memfd_create", "pidfd_open", "posix_fallocate", "register_at_fork"]),
    (select, ["poll", "epoll"]),
    (socket, ["send_fds", "recv_fds", "CMSG_LEN", "MSG_CMSG_CLOEXEC", "AF_UNIX"]),
    (signal, ["SIGKILL", "SIGBUS", "pthread_sigmask"]),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
import penstock
loader = penstock.Loader.from_dataset(list(range(6)), batch_size=2, num_workers=2, method="thread")
assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
loader.close()
try:
    penstock.Loader.from_dataset(list(range(6)), batch_size=2, num_workers=2)
except RuntimeError as error:
    assert 'method="thread"' in str(error)
else:
    raise AssertionError
print("well", end="")
"""


@pytest.mark.slow
def test_it_imports_and_runs_threads_where_linux_is_not(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """Without the modules and signals that Windows lacks. Seen to fail: `import fcntl` at the top, `signal.SIGBUS` in a
    table."""
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    assert run_program(tmp_path / "elsewhere.py") == "well"


# The page.


def test_the_page_has_every_fault() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert [fault.label for fault in FAULTS.values() if f"| {fault.label} |" not in table] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not WRITING, reason="nothing is to be written")
def test_write_the_page(tmp_path: Path) -> None:
    missing = [(fault, method) for fault in FAULTS for method in METHODS if (fault, method) not in RESULTS]
    assert not missing, "run the whole file to write the page"
    head = ["fault", *(f"penstock {method}" for method in METHODS), "penstock Ray"]
    ray = on_ray(tmp_path)
    rows = [[fault.label, *(RESULTS[name, method] for method in METHODS), ray[name]] for name, fault in FAULTS.items()]
    table = "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")


def on_ray(folder: Path) -> dict[str, str]:
    """The column of Ray, by a case of its tests, which has a cluster."""
    program, support = Path(__file__).parents[1] / "workers" / "ray_cases.py", Path(__file__).parents[1] / "support"
    path = os.pathsep.join([str(program.parents[1] / "laws"), str(support), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(program)]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command,
        input="the_table_of_faults\n",
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
        check=True,
    )
    assert '["the_table_of_faults", null]' in done.stdout, done.stdout
    found: dict[str, str] = json.loads((folder / "faults.json").read_text())
    return found
