"""The table of faults: what happens to a run, for each fault and each kind of worker, and how soon.

With ``PENSTOCK_WRITE_DOCS=1`` the run also puts the same faults to the peers and writes docs/reliability.md; without, it only
checks. Each peer runs in a process of its own, with a hard limit: this file is also the program for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock import Loader

pytestmark = pytest.mark.timeout(60)
PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- table of faults: written by tests/test_reliability.py -->", "<!-- end of the table -->"
WRITING = os.environ.get("PENSTOCK_WRITE_DOCS") == "1"

N, BATCH, BAD, READ_BEFORE = 40, 4, 13, 3
TIMEOUT_S = 1.0
LIMIT_S = 10.0  # for a peer's whole run, its start included
METHODS = ["thread", "fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("forkserver", "spawn"))]
PEERS = ["DataLoader", "nodes process", "nodes thread"]


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
    faulthandler.disable()
    ctypes.string_at(0)


RELEASED = threading.Event()
"""For threads, which must end with the test; no process hears of it."""


def stuck(folder: Path) -> None:
    RELEASED.wait()


def raises(folder: Path) -> None:
    raise Unpicklable("cannot be pickled")


def leaks_descriptors(folder: Path) -> Any:
    """All that there are, in a worker process; where that is the user's own, only what it asks for next is refused."""
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
    """``happens``: in the worker; None: the reader kills workers. ``raises``: what stands for the batch, where it is lost."""

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
}


class Faulty:
    """Sample i is ``(i, a tensor)``. Meets with its fault once; ``folder`` remembers that, and when."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder = folder
        self.fault = fault

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        happens = FAULTS[self.fault].happens
        data = torch.full((5000,), float(index))
        if happens is not None and (index == BAD and first(self.folder) or self.fault == "again" and index == BAD + 1 and first(self.folder, "2")):
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


# A run, and what was seen of it.


@dataclass
class Seen:
    """The samples of the epoch, each error with its time, and when the sample BAD (or what is read next) came; seconds since the fault."""

    samples: list[int]
    errors: list[tuple[str, str, float]]
    recovered_s: float = 0.0


def read(batches: Any, fault: str, folder: Path, pids: Callable[[], list[int]], started: Callable[[], None] = lambda: None) -> Seen:
    """Read an epoch, and go on after errors; kill workers where that is the fault. Calls ``started`` behind the first batch."""
    seen = Seen([], [])
    came: list[tuple[float, list[int]]] = []
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
        except BaseException as error:
            seen.errors.append((type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", ())]), time.monotonic()))
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


RESULTS: dict[tuple[str, str], str] = {}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_sample_comes_once_and_in_order_or_the_error_says_why(fault: str, method: str, tmp_path: Path) -> None:
    """Seen to fail for each fault that kills when `_replace` did not take up the tasks again (it hangs)."""
    about = FAULTS[fault]
    if method == "thread" and about.raises_in_thread is None:
        RESULTS[fault, method] = "n/a: it kills the process itself"
        return
    (tmp_path / "pid").write_text(str(os.getpid()))
    options: dict[str, Any] = {"method": "thread"} if method == "thread" else {"multiprocessing_context": method}
    if fault == "stuck":
        options["timeout"] = 30.0  # until the first workers have started

    def started() -> None:
        if fault == "stuck":
            loader.root._timeout = TIMEOUT_S  # type: ignore[attr-defined]

    RELEASED.clear()
    log, watch = logging.getLogger("penstock"), Watch()
    log.addHandler(watch)
    loader = Loader.from_dataset(
        Faulty(tmp_path, fault), batch_size=BATCH, num_workers=2, collate_fn=same, worker_init_fn=Dies(tmp_path, fault), run_ahead=False, **options
    )
    try:
        seen = read(iter(loader), fault, tmp_path, lambda: list(loader.root._pool.pids), started)  # type: ignore[attr-defined]
        loader.root._timeout = None  # type: ignore[attr-defined]
        RELEASED.set()
        whole = [sample[0] for batch in loader for sample in batch]
    finally:
        log.removeHandler(watch)
        loader.close(timeout=8.0)
    expected = about.raises_in_thread if method == "thread" else about.raises
    kept = [index for index in range(N) if not expected or index // BATCH != BAD // BATCH]
    assert seen.samples == kept
    assert whole == list(range(N))
    assert [kind for kind, _, _ in seen.errors] == ([expected] if expected else [])
    began = float((tmp_path / "fault").read_text())
    detected = seen.errors[0][2] if expected else watch.at - began if watch.at is not None else None
    if expected:
        assert re.search(rf"dataset ind\w+ .*\b{BAD}\b", seen.errors[0][1]), seen.errors
    if fault == "stuck":
        assert detected is not None
        assert detected <= TIMEOUT_S + 1
    elif expected is not None and (expected or method != "thread"):
        assert detected is not None
        assert 0 <= detected <= 1, watch.records
    outcome = f"`{expected}`, then goes on" if expected else "goes on"
    times = "" if detected is None else f"; {shown(detected)} / {shown(seen.recovered_s)}"
    RESULTS[fault, method] = outcome + times


def shown(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


# The page.


def test_the_page_has_every_fault() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert [fault.label for fault in FAULTS.values() if f"| {fault.label} |" not in table] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not WRITING, reason="the peers are run only to write the page")
def test_write_the_page(tmp_path: Path) -> None:
    ours = ["thread", "fork", "forkserver", "spawn"]
    missing = [(fault, method) for fault in FAULTS for method in ours if (fault, method) not in RESULTS]
    assert not missing, "run the whole file to write the page"
    head = ["fault", *(f"penstock {method}" for method in ours), *PEERS]
    rows = [head, ["---"] * len(head)]
    for name, fault in FAULTS.items():
        peers = []
        for peer in PEERS:
            folder = tmp_path / f"{name} {peer}"
            folder.mkdir()
            alone = peer == "nodes thread" and fault.raises_in_thread is None
            peers.append("n/a" if alone else peer_cell(peer, name, folder))
        rows.append([fault.label, *(RESULTS[name, method] for method in ours), *peers])
    text = PAGE.read_text()
    head_text, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    PAGE.write_text(f"{head_text}{BEGIN}\n\n{table}\n\n{END}{tail}")


# The peers, each in a process of its own.


def peer_cell(peer: str, fault: str, folder: Path) -> str:
    """What a peer did, in words; it is killed with its whole session after LIMIT_S."""
    process = subprocess.Popen(
        [sys.executable, __file__, peer, fault, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        output = ""
    finally:
        ended = process.poll() is not None
        for straggler in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(straggler.pid) == process.pid:
                    straggler.kill()
        process.communicate()
    if not ended:
        return f"hangs (> {LIMIT_S:g} s)"
    if not output:
        return f"the run ends ({'signal' if process.returncode < 0 else 'exit code'} {abs(process.returncode)})"
    seen = Seen(**json.loads(output))
    lost = N - len(set(seen.samples))
    if not seen.errors:
        words = "goes on" if not lost else f"goes on in silence, {lost} samples lost"
        return words + (f"; {shown(seen.recovered_s)}" if seen.recovered_s == seen.recovered_s else "")
    if lost <= BATCH and len(seen.errors) == 1:
        return f"`{seen.errors[0][0]}`, then goes on; {shown(seen.errors[0][2])}"
    return f"`{seen.errors[0][0]}` after {shown(seen.errors[0][2])}, the run is over"


class Mapped:
    """What torchdata's ParallelMapper is given."""

    def __init__(self, dataset: Faulty, dies: Dies) -> None:
        self.dataset = dataset
        self.dies = dies

    def __call__(self, indices: list[int]) -> list[Any]:
        self.dies()
        return [self.dataset[index] for index in indices]


def peer(name: str, fault: str, folder: Path) -> None:
    """The program that `peer_cell` runs."""
    (folder / "pid").write_text(str(os.getpid()))
    dataset, dies = Faulty(folder, fault), Dies(folder, fault)
    timeout = TIMEOUT_S if fault == "stuck" else 0
    batches: Any
    if name == "DataLoader":
        batches = iter(
            torch.utils.data.DataLoader(
                dataset, BATCH, num_workers=2, collate_fn=same, worker_init_fn=dies, timeout=timeout, multiprocessing_context="fork"
            )
        )
    else:
        from torchdata import nodes

        source = nodes.IterableWrapper([list(range(start, start + BATCH)) for start in range(0, N, BATCH)])
        batches = iter(nodes.Loader(nodes.ParallelMapper(source, Mapped(dataset, dies), 2, method=name.split()[1], multiprocessing_context="fork")))
    children = psutil.Process().children
    seen = read(batches, fault, folder, lambda: [child.pid for child in children()])
    print(json.dumps(vars(seen)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    peer(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
