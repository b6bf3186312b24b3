"""Workers that hang for good are told from those that are slow, and each worker has its own position in a file that it
has inherited."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from penstock import Loader, SampleError, WorkerDied
from penstock._workers import asleep
from penstock._workers.asleep import HangWatch

if TYPE_CHECKING:
    from collections.abc import Callable

linux = pytest.mark.skipif(
    not Path("/proc/self/syscall").exists(), reason="the system does not show what a process waits for"
)
forks = pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork", reason="only a fork has its parent's locks and files"
)

FOREVER = {
    "a lock acquired twice": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "two threads that wait for each other": (
        "event = threading.Event(); other = threading.Thread(target=event.wait); other.start(); other.join()"
    ),
}
SLOW = {
    "a lock with a time limit": "lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=600)",
    "a pipe": "os.read(os.pipe()[0], 1)",
    "a thread that sleeps": "other = threading.Thread(target=time.sleep, args=[600]); other.start(); other.join()",
    "a lock shared with other processes": "lock = multiprocessing.Lock(); lock.acquire(); lock.acquire()",
    "a lock, and an alarm that will ring": (
        "signal.signal(signal.SIGALRM, print); signal.alarm(600); lock = threading.Lock(); lock.acquire(); "
        "lock.acquire()"
    ),
    "a lock, and a child that will end": (
        "signal.signal(signal.SIGCHLD, print); lock = threading.Lock(); lock.acquire(); lock.acquire()"
    ),
}


def found(code: str) -> bool:
    """Whether a process that runs ``code`` is found to hang, once all its threads sleep."""
    code = f"import multiprocessing, os, signal, threading, time; print(flush=True); {code}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            slept = None
            while slept != (slept := [Path(thread, "stat").read_text() for thread in asleep.threads_of(process.pid)]):
                time.sleep(0.1)  # until nothing has moved
            watch = HangWatch(0.0)
            assert watch.found([process.pid], 1.0) == [], "it is not yet due"
            assert watch.found([process.pid], 2.0) == [], "one look is no proof"
            return watch.found([process.pid], 4.0) == [process.pid]
        finally:
            process.kill()


@linux
@pytest.mark.parametrize("code", FOREVER.values(), ids=FOREVER)
def test_a_process_whose_threads_all_wait_for_good_hangs(code: str) -> None:
    assert found(code)


@linux
@pytest.mark.parametrize("code", SLOW.values(), ids=SLOW)
def test_a_process_that_something_can_wake_does_not_hang(code: str) -> None:
    """Fails if the time limit, the kind of the futex, the other threads or the handled signals are not looked at."""
    assert not found(code)


@linux
def test_a_stopped_process_does_not_hang() -> None:
    """Fails if its state is not looked at: a thread that was woken, but stopped before it ran, looks as if it still
    waited."""
    code = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            while not asleep.never_woken(process.pid):
                time.sleep(0.01)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert asleep.never_woken(process.pid) is None
        finally:
            process.kill()


class Pooled:
    """A pool of threads made in ``__init__``: a fork of it has no threads."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.one = self.pool.submit(int, 1).result()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index if index < 2 else self.pool.submit(int, index).result()


@linux
@forks
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_sample_that_hangs_in_a_fork_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the loader waits: nothing would ever come. Each way out that the message names is then right."""
    monkeypatch.setattr(asleep, "BETWEEN_LOOKS_S", 0.2)
    dataset = Pooled()
    with Loader.from_dataset(dataset, batch_size=2, num_workers=1) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(
            SampleError,
            match=r'dataset index 2 .* hangs in worker process 0 .*"spawn" or "forkserver", or method="thread"',
        ):
            next(batches)
    with Loader.from_dataset(dataset, batch_size=4, num_workers=2, method="thread") as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def make_a_pool(worker: int) -> None:
        dataset.pool = ThreadPoolExecutor(1)

    with Loader.from_dataset(dataset, batch_size=4, num_workers=2, worker_init_fn=make_a_pool) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    dataset.pool.shutdown()


@linux
@forks
def test_a_worker_that_hangs_in_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asleep, "BETWEEN_LOOKS_S", 0.2)
    with (
        Loader.from_dataset(range(4), num_workers=1, worker_init_fn=lock_twice) as loader,
        pytest.raises(WorkerDied, match="its start hangs in worker process 0"),
    ):
        next(iter(loader))


def lock_twice(worker: int) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


class Rows:
    """Rows of a file opened in ``__init__``."""

    def __init__(self, file: IO[bytes], width: int) -> None:
        self.file = file
        self.width = width
        self.file.read(5)

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> bytes:
        self.file.seek(index * self.width)
        return self.file.read(self.width)


def opened_to_read(path: Path) -> IO[bytes]:
    return path.open("rb")


def opened_to_change(path: Path) -> IO[bytes]:
    return path.open("r+b", buffering=0)


def without_a_name(path: Path) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    file.write(path.read_bytes())
    file.seek(0)
    return file


@forks
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not show which files are open")
@pytest.mark.parametrize("opened", [opened_to_read, opened_to_change, without_a_name])
def test_a_file_opened_before_the_fork_is_read_right(opened: Callable[[Path], IO[bytes]], tmp_path: Path) -> None:
    """Fails if workers share the position in a file: in five runs of five, 3 to 20 of these 200 rows were others."""
    width = 200_000
    (tmp_path / "rows").write_bytes(b"".join(bytes([row]) * width for row in range(200)))
    with opened(tmp_path / "rows") as file:
        dataset = Rows(file, width)
        at = file.tell()
        with Loader.from_dataset(dataset, batch_size=4, num_workers=4, collate_fn=list) as loader:
            seen = [row for batch in loader for row in batch]
        assert [(row[0], len(row), len({*row})) for row in seen] == [(row, width, 1) for row in range(200)]
        assert file.tell() == at
        assert file.read(1) == bytes([at // width])


@forks
def test_duplicates_of_a_descriptor_share_their_position_also_in_a_worker(tmp_path: Path) -> None:
    """And two descriptors of one file do not. Seen to fail: what was sought by one was read at the other's place."""
    (tmp_path / "rows").write_bytes(bytes(range(200)))
    with (
        (tmp_path / "rows").open("rb", 0) as file,
        (tmp_path / "rows").open("rb", 0) as other,
        open(os.dup(file.fileno()), "rb", 0) as same,
    ):
        other.seek(7)

        def read(index: int) -> int:
            file.seek(index)
            return 1000 * same.read(1)[0] + other.tell()

        with Loader.from_dataset(Mapped(read), batch_size=4, num_workers=2) as loader:
            assert [value for batch in loader for value in batch.tolist()] == [1000 * index + 7 for index in range(100)]


@forks
def test_what_workers_write_into_one_log_stays_behind_each_other(tmp_path: Path) -> None:
    """Fails if a file that is only written gets a position of its own: the workers would write over each other's
    lines."""
    with (tmp_path / "log").open("wb", buffering=0) as log:

        def noted(index: int) -> int:
            log.write(b"%03d\n" % index)
            return index

        with Loader.from_dataset(
            Mapped(noted), 4, num_workers=2, prefetch_next_epoch=False, seed_global_rngs=False
        ) as loader:
            assert sum(len(batch) for batch in loader) == 100
    assert sorted((tmp_path / "log").read_text().split()) == [f"{index:03}" for index in range(100)]


@forks
def test_what_workers_print_into_a_file_stays_behind_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    """Fails if the file behind a standard stream gets a position of its own under another descriptor, as pytest's does:
    3 of 100 lines were left."""

    def told(index: int) -> int:
        os.write(sys.stdout.fileno(), b"worker %02d\n" % index)  # in one piece
        return index

    with Loader.from_dataset(
        Mapped(told), 4, num_workers=2, prefetch_next_epoch=False, seed_global_rngs=False
    ) as loader:
        for batch in loader:
            os.write(sys.stdout.fileno(), b"loop %d\n" % batch.tolist()[0])
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line for line in lines if line[0] == "w") == [f"worker {index:02}" for index in range(100)]
    assert [line for line in lines if line[0] == "l"] == [f"loop {index}" for index in range(0, 100, 4)]


class Mapped:
    def __init__(self, function: Callable[[int], Any]) -> None:
        self.function = function

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.function(index)
