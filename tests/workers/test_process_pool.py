"""Worker processes: real processes, real signals. Waits are for messages (FIFOs, pipes, deaths), never for time to
pass.

A task is a tuple (function, arguments...); the functions below run in the workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from children import in_a_child
from leaks import no_leaks
from strikes import Strikes, in_turn
from torch.utils.data import get_worker_info

import penstock
from comparison import difference
from penstock._errors import ClosedError, SampleError, WorkerDied
from penstock._workers.pool import IDLE, Job
from penstock._workers.process_pool import ProcessPool
from penstock._workers.processes.protocol import Setup
from penstock._workers.processes.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableSequence

# A new interpreter imports torch, which takes many seconds on a busy machine.
METHODS = ["fork", *(pytest.param(method, marks=pytest.mark.soak) for method in ("forkserver", "spawn"))]
# `multiprocessing` keeps the memory of its first value for the life of the program
HEAP = multiprocessing.RawValue("i")
BIG = 100_000  # float32: does not fit the small buffer, so it travels in a slot


class Work:
    dataset = "the dataset"

    def __call__(self, task: Any, cell: MutableSequence[int], allocate: Any) -> Any:
        function, *arguments = task
        return function(cell, *arguments)

    def name(self, task: Any, row: int) -> str:
        return f"{task[0].__name__} row {row}"


@pytest.fixture
def pools() -> Iterator[Callable[..., ProcessPool]]:
    with contextlib.ExitStack() as stack:

        def make(workers: int = 2, *, method: str = "fork", work: Any = None, **options: Any) -> ProcessPool:
            setup = Setup(
                Work() if work is None else work, workers, options.pop("seed", 0), options.pop("worker_init_fn", None)
            )
            pool = ProcessPool(setup, multiprocessing_context=method, **options)
            stack.callback(pool.shutdown)
            pool.start()
            return pool

        yield make
    gc.collect()


@pytest.mark.parametrize("method", METHODS)
def test_what_the_consumer_was_handling_at_the_fork_is_no_context_of_errors(pools: Any, method: str) -> None:
    """Seen to fail: "During handling of the above exception" in the worker's traceback, with frames of the
    consumer's."""
    try:
        raise LookupError("of the consumer's")
    except LookupError:
        pool = pools(1, method=method)
        with pytest.raises(ValueError, match="of the worker's") as caught:
            done(pool, raises_in_turn)
    shown = str(caught.value.__cause__)
    assert "first of the worker's" in shown
    assert "of the consumer's" not in shown


def raises_in_turn(cell: Any) -> None:
    try:
        raise KeyError("first of the worker's")
    except KeyError:
        raise ValueError("of the worker's")  # noqa: B904  # with a context


def done(pool: ProcessPool, *task: Any) -> Any:
    return result(pool, pool.submit(task))


def result(pool: ProcessPool, job: Job) -> Any:
    while not job.done:
        pool.wait([job], 100.0)
    return job.result()


def warm(pool: ProcessPool) -> None:
    """Wait until every worker has done a task."""
    missing = set(range(len(pool.pids)))
    while missing:
        jobs = [pool.submit((echo, None)) for _ in pool.pids]
        for job in jobs:
            result(pool, job)
        missing -= {job.worker for job in jobs}


def has_started(fifo: Path) -> None:
    """Wait until `stuck` has begun."""
    fifo.read_bytes()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


# Work for the workers.


def echo(cell: Any, value: Any) -> Any:
    return value


def full(cell: Any, size: int, value: float) -> torch.Tensor:
    return torch.full((size,), value)


def make(cell: Any, name: str) -> Any:
    return VALUES[name]()


def stuck(cell: Any, fifo: Path, row: int = IDLE) -> None:
    cell[0] = row
    fifo.write_bytes(b"here")
    threading.Event().wait()


def tells(cell: Any, fifo: Path) -> None:
    fifo.write_bytes(b"here")


def once(cell: Any, flag: Path, fault: Callable[[], Any], value: Any) -> Any:
    """Runs into ``fault`` the first time only, and if two run at once, only one does."""
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return value
    fault()
    return value


def always(cell: Any, row: int, fault: Callable[[], Any]) -> None:
    cell[0] = row
    fault()


def noted(cell: Any, file: Path, value: Any) -> Any:
    with file.open("a") as log:
        log.write(f"{value}\n")
    return value


def noted_then_held(cell: Any, file: Path, fifo: Path, value: Any) -> Any:
    noted(cell, file, value)
    fifo.write_bytes(b"here")
    fifo.read_bytes()
    return value


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_hard() -> None:
    os._exit(3)


def segfault() -> None:
    faulthandler.disable()  # pytest's, which would print this process's stack
    ctypes.string_at(0)


def die_with_a_helper(cell: Any, file: Path) -> int:
    """Fork a process that inherits every pipe, and die. The second time, return the pid of that process."""
    if not file.exists():
        helper = os.fork()
        if helper == 0:
            signal.alarm(100)
            signal.pause()
        file.write_text(str(helper))
        kill_myself()
    return int(file.read_text())


def about_me(cell: Any) -> Any:
    info: Any = get_worker_info()
    seeds = (random.random(), np.random.random(), torch.rand(1).item())
    return (
        info.id,
        info.num_workers,
        info.dataset,
        torch.get_num_threads(),
        seeds,
        multiprocessing.current_process().name,
    )


def fail(cell: Any, kind: Callable[..., BaseException], *arguments: Any) -> None:
    error = kind(*arguments)
    error.add_note("a note")
    raise error


# Values.


VALUES: dict[str, Callable[[], Any]] = {
    **{
        f"{dtype}"[6:]: lambda dtype=dtype: torch.arange(100_000).remainder(2).to(dtype)
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int16,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float64,
            torch.complex64,
        )
    },
    "empty": lambda: [torch.empty(0), torch.empty(0, 3, dtype=torch.bfloat16), np.empty((2, 0))],
    "scalar": lambda: [torch.tensor(3), torch.tensor(3.0, dtype=torch.bfloat16), np.array(4), np.float32(5)],
    "transposed": lambda: torch.arange(100_000).reshape(100, 1000).T,
    "strided": lambda: torch.arange(200_000)[::2],
    "expanded": lambda: torch.ones(1).expand(50_000),
    "conjugated": lambda: torch.full((50_000,), 1 + 2j).conj(),
    "negative": lambda: torch.full((50_000,), 1 + 2j).conj().imag,
    "bytes": lambda: [b"x" * number for number in (0, 9_000, 5, 20_000)],
    "bytes and more": lambda: [bytes(20_000), bytearray(20_000), b""],
    "bytes in a tuple": lambda: (bytes(20_000), bytes(9_000)),
    "gradient": lambda: torch.ones(100_000, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(100_000)),
    "sparse": lambda: torch.eye(300).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(100_000), 0.1, 0, torch.qint8),
    "shared": lambda: torch.ones(100_000).share_memory_(),
    "array": lambda: np.arange(100_000.0),
    "fortran": lambda: np.asfortranarray(np.arange(100_000.0).reshape(100, 1000)),
    "array_strided": lambda: np.arange(200_000)[::2],
    "array_read_only": lambda: np.broadcast_to(np.arange(3.0), (1000, 3)),
    "records": lambda: np.zeros(10_000, dtype=[("a", "i4"), ("b", "f8", 3)]),
    "dates": lambda: np.array(["2020-01-01"] * 10_000, dtype="M8[D]"),
    "objects": lambda: np.array([None, "a", 1]),
    "masked": lambda: np.ma.masked_equal(np.arange(100_000), 3),
    "text": lambda: ["x" * 100_000, b"y" * 100_000, bytearray(b"z" * 100_000)],
    "nothing": lambda: None,
    "nested": lambda: {"a": (1, [torch.ones(50_000), {"b": np.ones(50_000)}]), "c": {}, "d": 0},
}


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantized tensors
def test_every_kind_of_value_arrives(pools: Any) -> None:
    """Seen to fail: without the test for `requires_grad`; bytes that are views of the slot; anything with a length
    taken for bytes."""
    pool = pools(1)
    for name, value in VALUES.items():
        assert difference(done(pool, make, name), value()) is None, name


def test_plain_results_can_be_written_to(pools: Any) -> None:
    pool = pools(1)
    for value in (done(pool, full, BIG, 1.0), done(pool, full, 10, 1.0)):
        value += 1
        assert value.eq(2).all()
        assert not value._is_view()
        assert not value.is_shared()


def test_tasks_of_any_size_arrive(pools: Any) -> None:
    pool = pools()
    jobs = [pool.submit((echo, bytes(size))) for size in (1, 60_000, 70_000, 5_000_000) * 5]
    assert [len(result(pool, job)) for job in jobs] == [1, 60_000, 70_000, 5_000_000] * 5


def policy(cell: Any) -> int:
    return os.sched_getscheduler(0)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_does_not_take_the_core_of_the_training_loop(pools: Any, method: str) -> None:
    """Seen to fail: without `_let_the_consumer_run`."""
    assert done(pools(1, method=method), policy) == os.SCHED_BATCH


def test_a_policy_that_the_user_has_chosen_stays(pools: Any) -> None:
    """Seen to fail: the policy set unconditionally."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        pool = pools(1)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    assert done(pool, policy) == os.SCHED_IDLE


# Owners.


def whose(cell: Any, value: int) -> tuple[int, int]:
    info: Any = get_worker_info()
    return info.id, value


@pytest.mark.parametrize("queue_size", [1, 8])
def test_an_owner_that_is_behind_holds_up_its_own_tasks_only(
    pools: Any, tmp_path: Path, fifo: Path, queue_size: int
) -> None:
    """Its queue stays bounded, and its tasks wait for it, in order. Seen to fail: `_feed` that stops at the first
    worker whose queue is full."""
    pool = pools(2, queue_size=queue_size)
    warm(pool)
    log = tmp_path / "log"
    behind = [
        pool.submit((noted_then_held, log, fifo, 0), 0),
        *(pool.submit((noted, log, value), 0) for value in range(1, 20)),
    ]
    has_started(fifo)
    others = [pool.submit((whose, value), 1) for value in range(20)]
    assert [result(pool, job) for job in others] == [(1, value) for value in range(20)]
    assert result(pool, pool.submit((whose, 20))) == (1, 20)
    assert [job.worker for job in behind] == [0] * queue_size + [IDLE] * (20 - queue_size)
    fifo.write_bytes(b"go")
    assert [result(pool, job) for job in behind] == list(range(20))
    assert log.read_text().split() == [str(value) for value in range(20)]


def held_by(cell: Any, fifo: Path) -> None:
    fifo.read_bytes()


@pytest.mark.parametrize("refilled", [0, 1])
def test_a_worker_that_is_refilled_gets_no_run_of_tasks(pools: Any, tmp_path: Path, refilled: int) -> None:
    """Results are wanted in order, and it does one after the other: whoever waits for the second would wait twice as
    long.

    Seen to fail: only the worker that was to be refilled got tasks, four in a row; and it got two, because with the
    first of them it is as loaded as the other, which is about to finish one.
    """
    pool = pools(2, queue_size=8, refill_at=4)
    warm(pool)
    jobs = []
    for number in range(10):
        os.mkfifo(tmp_path / f"{number}")
        jobs.append(pool.submit((held_by, tmp_path / f"{number}")))
    of_each: list[list[int]] = [
        [number for number in range(10) if jobs[number].worker == worker] for worker in range(2)
    ]
    assert [len(held) for held in of_each] == [5, 5]
    waiting = [pool.submit((whose, value)) for value in range(7)]
    assert [job.worker for job in waiting] == [IDLE] * 7, "nobody holds few enough to be refilled"
    first = of_each[refilled].pop(0)
    (tmp_path / f"{first}").write_bytes(b"go")
    result(pool, jobs[first])
    given = [job.worker for job in waiting]
    assert given == [refilled, 1 - refilled] * 3 + [refilled]
    releases = [
        threading.Thread(target=lambda held=held: [(tmp_path / f"{n}").write_bytes(b"go") for n in held])
        for held in of_each
    ]
    for release in releases:
        release.start()
    for job in [*jobs, *waiting]:
        result(pool, job)
    for release in releases:
        release.join()


# Slots.


def test_a_burst_of_kept_batches_is_given_back(pools: Any) -> None:
    """Seen to fail: no `_drop` in `lend`."""
    pool = pools(1)
    kept = [done(pool, full, BIG, value) for value in range(40)]
    most = pool.statistics().slot_bytes
    kept.clear()
    worker = psutil.Process(pool.pids[0])
    mapped = worker.memory_info().shared
    for value in range(60):
        done(pool, full, BIG, value)
    assert pool.statistics().slot_bytes < most / 10
    assert worker.memory_info().shared < mapped - most / 2


def test_slots_that_are_too_small_are_replaced(pools: Any) -> None:
    """Seen to fail: `take_answer` that counts every slot it returns as ``useful``."""
    pool = pools(1)
    for size in range(BIG, 20 * BIG, BIG):
        assert torch.equal(done(pool, full, size, 1.0), torch.ones(size))
    assert pool.statistics().slots <= 2
    for _ in range(40):
        done(pool, full, 20 * BIG, 1.0)
    assert pool.statistics().slots <= 2


def _little_memory(worker: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # a memfd is a file to the kernel


def test_a_shortage_of_memory_is_an_error_that_says_so(pools: Any) -> None:
    """Seen to fail: without `posix_fallocate` and `ftruncate` the worker dies of SIGBUS."""
    pool = pools(1, worker_init_fn=_little_memory)
    with pytest.raises(MemoryError, match="no shared memory for a result of 4000"):
        done(pool, full, 1_000_000, 1.0)
    assert len(done(pool, full, BIG, 1.0)) == BIG
    with pytest.raises(MemoryError):
        done(pool, fail, ValueError, "x" * 5_000_000)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """In this process, such that the lowest free number is the limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_consumer_without_descriptors_is_told_so_and_goes_on(pools: Any) -> None:
    """Seen to fail: `WorkerHandle._map` that assumes that a descriptor came (an IndexError, and every worker
    replaced)."""
    pool = pools(1)
    warm(pool)
    pids = pool.pids
    with no_descriptor_left():
        for task in ((full, BIG, 1.0), (echo, bytes(100_000))):
            job = pool.submit(task)
            with pytest.raises(OSError, match=r"\[Errno 24\]"):
                result(pool, job)
            assert done(pool, echo, 1) == 1
    assert torch.equal(done(pool, full, BIG, 2.0), torch.full((BIG,), 2.0))
    assert pool.pids == pids


# Deaths.


@pytest.mark.parametrize(
    ("method", "fault", "words"),
    [
        ("fork", kill_myself, "SIGKILL"),
        ("fork", exit_hard, "exit code 3"),
        ("fork", segfault, "SIGSEGV"),
        ("forkserver", segfault, "SIGSEGV"),
        ("spawn", exit_hard, "exit code 3"),
    ],
)
def test_a_worker_that_dies_in_a_task_is_replaced(
    pools: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, fault: Any, words: str
) -> None:
    """Seen to fail: `_replace` without `requeue` (the job is never done)."""
    pool = pools(2 if method == "fork" else 1, method=method)
    jobs = [
        pool.submit((once, tmp_path / "flag", fault, value) if value == 3 else (echo, value)) for value in range(20)
    ]
    assert [result(pool, job) for job in jobs] == list(range(20))
    assert pool.statistics().restarts == 1
    assert len(caplog.records) == 1
    assert words in caplog.text
    assert "once row -1" in caplog.text


class DiesAtStart:
    def __init__(self, flag: Path, fault: Callable[[], Any]) -> None:
        self.flag = flag
        self.fault = fault

    def __call__(self, worker: int) -> None:
        once(None, self.flag, self.fault, None)


def test_a_worker_that_ends_itself_at_its_start_is_not_replaced(pools: Any, tmp_path: Path) -> None:
    pool = pools(1, worker_init_fn=DiesAtStart(tmp_path / "flag", exit_hard))
    with pytest.raises(WorkerDied, match=r"while it started: exit code 3.*__main__"):
        done(pool, echo, 1)


def test_what_a_worker_had_answered_is_not_done_again(pools: Any, tmp_path: Path, fifo: Path) -> None:
    """More than one read can take. Seen to fail: `_replace` that does not read the rest of the channel."""
    pool = pools(1, queue_size=8)
    warm(pool)
    log = tmp_path / "log"
    jobs = [*(pool.submit((noted, log, value)) for value in range(7)), pool.submit((noted_then_held, log, fifo, 7))]
    has_started(fifo)
    worker = psutil.Process(pool.pids[0])
    waiting = Path(f"/proc/{worker.ppid()}/syscall")  # what the process that forks workers waits in
    idle = waiting.read_text().split()[0]
    worker.kill()
    while psutil.pid_exists(worker.pid) or waiting.read_text().split()[0] != idle:
        time.sleep(0)  # until the death has been reported, before any answer has been read
    release = threading.Thread(target=lambda: (has_started(fifo), fifo.write_bytes(b"go")))
    release.start()
    assert [result(pool, job) for job in jobs] == list(range(8))
    release.join()
    assert log.read_text().split() == list("012345677")


@pytest.mark.parametrize("owner", [None, 0])
def test_unfinished_tasks_come_first_and_in_order(pools: Any, tmp_path: Path, owner: int | None) -> None:
    """Those of an owner by its replacement, though another worker is idle. Seen to fail: `requeue` without `reversed`,
    or that forgets the owner."""
    pool = pools(1 if owner is None else 2, queue_size=3)
    log = tmp_path / "log"
    jobs = [pool.submit((once, tmp_path / "flag", kill_myself, 0), owner)]
    jobs += [pool.submit((noted, log, value), owner) for value in range(1, 8)]
    assert [result(pool, job) for job in jobs] == list(range(8))
    assert log.read_text().split() == [str(value) for value in range(1, 8)]
    assert {job.worker for job in jobs} == {0}
    assert pool.statistics().restarts == 1


def test_a_row_that_kills_twice_is_named(pools: Any) -> None:
    """Seen to fail: without `blame` the budget is used up instead."""
    pool = pools()
    bad = pool.submit((always, 7, kill_myself))
    good = [pool.submit((echo, value)) for value in range(10)]
    with pytest.raises(SampleError, match=r"always row 7 has killed two workers.*SIGKILL"):
        result(pool, bad)
    assert [result(pool, job) for job in good] == list(range(10))
    assert pool.statistics().restarts == 2


def test_the_budget_ends_in_an_error(pools: Any, tmp_path: Path) -> None:
    pool = pools(1, max_restarts=1)
    jobs = [pool.submit((once, tmp_path / f"flag{n}", kill_myself, n)) for n in range(2)]
    assert result(pool, jobs[0]) == 0
    with pytest.raises(WorkerDied, match=r"once row -1: signal SIGKILL.*max_restarts=1"):
        result(pool, jobs[1])
    with pytest.raises(WorkerDied):
        done(pool, echo, 1)


def test_a_helper_process_of_the_dataset_hides_no_death(pools: Any, tmp_path: Path) -> None:
    """Seen to fail: `watch` with sentinels only (the helper keeps them open)."""
    pool = pools(1)
    warm(pool)
    helper = done(pool, die_with_a_helper, tmp_path / "helper")
    os.kill(helper, signal.SIGKILL)  # it still lives


def test_the_death_of_the_zygote_is_an_error(pools: Any) -> None:
    pool = pools(2)
    warm(pool)
    os.kill(psutil.Process(pool.pids[0]).ppid(), signal.SIGKILL)
    job = pool.submit((stuck, Path("/dev/null")))
    with pytest.raises(WorkerDied, match="that forks the workers"):
        result(pool, job)


# Errors.


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(KeyError, ("x",)), (OSError, (2, "no file")), (UnicodeDecodeError, ("utf8", b"x", 0, 1, "bad"))],
)
def test_an_error_arrives_as_what_it_was(pools: Any, kind: Any, arguments: Any) -> None:
    pids = (pool := pools(1)).pids
    with pytest.raises(kind) as caught:
        done(pool, fail, kind, *arguments)
    assert caught.value.args == arguments
    assert caught.value.__notes__ == ["a note", f"in worker process 0 (pid {pids[0]})"]
    assert "in fail" in str(caught.value.__cause__)
    assert "worker process 0" in str(caught.value.__cause__)


class Exits:
    """Where it is unpickled, which is not where it was pickled."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.pid:
            sys.exit(3)


class ExplodingError(Exception):
    def __init__(self, inside: Exits) -> None:
        super().__init__(inside)

    def __str__(self) -> str:
        return "explodes"


def explosive(cell: Any) -> Exits:
    return Exits()


def raises_explosive(cell: Any) -> None:
    raise ExplodingError(Exits())


@pytest.mark.parametrize("function", [explosive, raises_explosive])
def test_a_result_or_an_error_that_exits_as_it_is_unpickled_ends_no_program(pools: Any, function: Any) -> None:
    """Seen to fail: SystemExit came out of `wait`, and the workers were replaced each time."""
    pool = pools(1)
    with pytest.raises(SampleError, match=r"rebuilt here: SystemExit: 3|ExplodingError: explodes"):
        done(pool, function)
    assert done(pool, echo, 1) == 1
    assert pool.statistics().restarts == 0


def _init_fails(worker: int) -> None:
    raise LookupError(f"in worker {worker}")


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_cannot_start_says_why(pools: Any, method: str) -> None:
    """Seen to fail: `worker_main` without its `except` (it ends in `WorkerDied`)."""
    pool = pools(method=method, worker_init_fn=_init_fails)
    with pytest.raises(LookupError, match="in worker") as caught:
        done(pool, echo, 1)
    assert "_init_fails" in str(caught.value.__cause__)
    assert pool.statistics().restarts == 0


class Sharing(Work):
    """A dataset with a lock, a value, a queue and an event of `multiprocessing`'s own."""

    def __init__(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        self.lock, self.value, self.queue, self.event = (
            context.Lock(),
            context.Value("i", 3),
            context.SimpleQueue(),
            context.Event(),
        )
        self.array = context.Array("d", [1.0, 2.0])

    def __call__(self, task: Any, cell: Any, allocate: Any) -> Any:
        if task == "die":
            return once(cell, *self.flag)
        with self.lock:
            self.value.value += task
            self.array[0] += task
        self.queue.put(os.getpid())
        self.event.set()
        return task

    flag: Any = None


@pytest.mark.parametrize("method", METHODS)
def test_a_dataset_may_hold_locks_values_and_queues(pools: Any, method: str, tmp_path: Path) -> None:
    """As with `DataLoader`, and in replaced workers too. Seen to fail: descriptors closed after the first hello."""
    work = Sharing(method)
    work.flag = (tmp_path / "flag", kill_myself, None)
    pool = pools(2, method=method, work=work)
    for task in (2, "die", 2):
        results = [result(pool, pool.submit(task)) for _ in range(4)]
        assert results == [task if task == 2 else None] * 4
    assert (work.value.value, work.array[0], work.event.is_set()) == (19, 17.0, True)
    assert {work.queue.get() for _ in range(8)}
    assert pool.statistics().restarts == 1
    pool.shutdown()
    work.queue.close()


@pytest.mark.slow
def test_a_lock_of_another_start_method_is_refused(pools: Any) -> None:
    with pytest.raises(TypeError, match="cannot be pickled.*fork context"):
        pools(1, method="spawn", work=Sharing("fork"))


class SharedTensors(Work):
    """A dataset with tensors in shared memory, and one that is not."""

    def __init__(self) -> None:
        self.size = torch.zeros(1, dtype=torch.int64).share_memory_()
        table = torch.arange(12.0).reshape(3, 4).share_memory_()
        self.row, self.turned = table[1], table[::2].t()
        self.net = torch.nn.Linear(2, 1).share_memory()
        self.empty = torch.empty(0, 3).share_memory_()
        self.own = torch.zeros(1)

    def __call__(self, task: Any, cell: Any, allocate: Any) -> Any:
        seen = self.seen()
        for one in self.tensors():
            one.detach().add_(1)
        return seen, self.looks(), self.empty.shape

    def tensors(self) -> list[torch.Tensor]:
        return [self.size, self.row, self.turned, self.net.bias, self.own]

    def seen(self) -> list[float]:
        return [one.flatten()[0].item() for one in self.tensors()]

    def looks(self) -> list[Any]:
        tensors = self.tensors()
        apart = self.row.data_ptr() - self.turned.data_ptr()
        return [apart, *((one.shape, one.stride(), one.storage_offset(), one.requires_grad) for one in tensors)]


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(one, marks=pytest.mark.slow) for one in ("forkserver", "spawn"))]
)
def test_tensors_in_shared_memory_are_shared(pools: Any, method: str) -> None:
    """What the loop writes is seen by a worker, and by one that takes its place, and the other way round. Seen to
    fail: each worker had copies; two views were of two copies.
    """
    share_tensors(pools, method)


class OfFile(Work):
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __call__(self, task: Any, cell: Any, allocate: Any) -> Any:
        return self.values.tolist()


@pytest.mark.slow
def test_the_memory_of_a_file_is_sent_as_it_is(pools: Any, tmp_path: Path) -> None:
    """Another file may have its name by then. Seen to fail: with the file opened by its name, which made it longer."""
    file, other = tmp_path / "values", tmp_path / "other"
    values = torch.from_file(str(file), shared=True, size=4)
    values.copy_(torch.arange(4))
    other.write_bytes(bytes(8))
    os.replace(other, file)
    pool = pools(1, method="spawn", work=OfFile(values))
    assert result(pool, pool.submit(0)) == [0, 1, 2, 3]
    assert file.stat().st_size == 8


@pytest.mark.slow
def test_tensors_that_torch_shares_by_name_are_shared(pools: Any) -> None:
    """In a child, because torch's manager lives as long as the program. Seen to fail: they were passed by
    descriptor, and most of 200 were copied.
    """

    def body(_: Any) -> None:
        torch.multiprocessing.set_sharing_strategy("file_system")
        share_tensors(pools, "spawn")
        assert share_many(pools) == [1] * 200

    in_a_child(body)()


def share_tensors(pools: Any, method: str) -> None:
    work = SharedTensors()
    pool = pools(1, method=method, work=work, max_restarts=2)
    for number in range(3):
        for one in work.tensors():
            one.detach().fill_(10 * number)
        seen, looks, empty = result(pool, pool.submit(0))
        assert (seen[:-1], empty) == ([10 * number] * 4, (0, 3))
        assert looks == work.looks()
        assert work.seen() == [10 * number + 1] * 4 + [10 * number]
        os.kill(pool.pids[0], signal.SIGKILL)
    pool.shutdown()


@pytest.mark.slow
def test_of_many_tensors_in_shared_memory_some_are_copied(pools: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Seen to fail: it raised; nothing was said."""
    assert share_many(pools) == [1] * 64 + [0] * 136
    (said,) = caplog.messages
    assert said.startswith("136 tensors in shared memory are copied for each worker process")


def share_many(pools: Any) -> Any:
    work = ManyShared()
    pool = pools(1, method="spawn", work=work)
    for one in work.tensors:
        one.fill_(1)
    seen = result(pool, pool.submit(0))
    pool.shutdown()
    return seen


class ManyShared(Work):
    def __init__(self) -> None:
        self.tensors = [torch.zeros(1).share_memory_() for _ in range(200)]

    def __call__(self, task: Any, cell: Any, allocate: Any) -> Any:
        return [int(one) for one in self.tensors]


class Resized:
    """Its samples are a size that the loop sets; it counts them."""

    def __init__(self) -> None:
        self.size, self.count = (torch.zeros(1, dtype=torch.int64).share_memory_() for _ in range(2))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return int(self.size)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_loop_sets_a_shared_tensor_between_epochs(method: str) -> None:
    """Seen to fail: all samples were of the first size, and none was counted."""
    data = Resized()
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": method, "prefetch_next_epoch": False}
    with penstock.Loader.from_dataset(data, 4, **options) as loader:
        for size in (32, 64, 96):
            data.size.fill_(size)
            assert [batch.tolist() for batch in loader] == [[size] * 4] * 2
    assert data.count.item() == 25  # the first one is compared


# Life.


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_is_set_up_as_by_dataloader(pools: Any, method: str) -> None:
    """Seen to fail: NumPy seeded from `seed` alone."""
    pool = pools(method=method, seed=5)
    warm(pool)
    jobs = [pool.submit((about_me,)) for _ in range(2)]
    told = {job.worker: result(pool, job) for job in jobs}
    while len(told) < 2:
        job = pool.submit((about_me,))
        told.setdefault(job.worker, result(pool, job))
    assert [(one[0], *one[1:4]) for _, one in sorted(told.items())] == [
        (0, 2, "the dataset", 1),
        (1, 2, "the dataset", 1),
    ]
    assert all(a != b for a, b in zip(told[0][4], told[1][4], strict=True))
    assert told[0][5] == "penstock-map-0"


@pytest.mark.parametrize("method", METHODS)
def test_a_stuck_worker_is_killed_after_the_timeout(
    pools: Any, fifo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Its task fails with its name, and its replacement does the others. Seen to fail: `_give_up` without `kill` (the
    queued one hangs)."""
    pool = pools(1, method=method, queue_size=3)
    warm(pool)
    (pid,) = pool.pids
    job = pool.submit((stuck, fifo, 12))
    queued = [pool.submit((echo, value)) for value in range(5)]
    has_started(fifo)
    pool.wait([job], 0.01)
    with pytest.raises(
        TimeoutError,
        match=rf"waited 0.01 s for stuck row 12, in worker process 0 \(pid {pid}\)\. That worker is killed",
    ):
        job.result()
    assert [result(pool, one) for one in queued] == list(range(5))
    assert pool.statistics().restarts == 1
    assert not psutil.pid_exists(pid)
    assert f"(pid {pid}) did not answer in time (timeout=0.01) and was killed while loading stuck row 12" in caplog.text


def test_a_stopped_worker_is_stuck_too(pools: Any) -> None:
    pool = pools(1)
    warm(pool)
    os.kill(pool.pids[0], signal.SIGSTOP)
    job = pool.submit((echo, 1))
    with pytest.raises(TimeoutError, match="echo row -1, in worker process 0 .*, where it has not begun"):
        pool.wait([job], 0.01)
    assert result(pool, job) == 1
    assert pool.statistics().restarts == 1


def test_a_task_that_no_worker_has_begun_is_still_to_come(pools: Any, fifo: Path) -> None:
    """Out of order, the pool gives up on the stuck task. A timeout of tasks queued behind it loses nothing."""
    pool = pools(1, queue_size=1)
    warm(pool)
    held = pool.submit((noted_then_held, Path("/dev/null"), fifo, 5))
    waiting = pool.submit((echo, 6))
    has_started(fifo)
    with pytest.raises(TimeoutError, match="echo row -1, which no worker process has begun"):
        pool.wait([waiting], 0.01)
    fifo.write_bytes(b"go")
    assert (result(pool, held), result(pool, waiting)) == (5, 6)
    assert pool.statistics().restarts == 0


def test_interrupt_ends_a_wait_and_discard_forgets(pools: Any, fifo: Path, tmp_path: Path) -> None:
    """Seen to fail: no byte into the pipe (it hangs); no `WANTED` (the queued task is done)."""
    pool = pools(1, queue_size=3)
    warm(pool)
    log = tmp_path / "log"
    held = pool.submit((noted_then_held, log, fifo, 1))
    queued = pool.submit((noted, log, 2))
    has_started(fifo)
    thread = threading.Timer(0.05, pool.interrupt)
    thread.start()
    for _ in range(2):
        with pytest.raises(ClosedError):
            pool.wait([held], None)
    thread.join()
    pool.discard()
    assert held.done
    assert isinstance(queued.error, ClosedError)
    fifo.write_bytes(b"go")
    assert done(pool, noted, log, 3) == 3
    assert log.read_text().split() == ["1", "3"]
    pool.interrupt()
    pool.discard()
    assert done(pool, echo, 4) == 4


def test_an_interrupt_is_not_lost_with_the_byte_of_an_older_one(
    pools: Any, fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt between the check of the flag and the read of the bytes. Seen to hang: a wait that relies on the
    byte alone."""
    pool = pools(1)
    warm(pool)
    drain = Supervisor.drain_wake
    monkeypatch.setattr(Supervisor, "drain_wake", lambda _: None)
    pool.interrupt()
    pool.discard()  # has overtaken the byte
    job = pool.submit((stuck, fifo))
    has_started(fifo)

    def interrupt_and_drain(supervisor: Supervisor) -> None:
        monkeypatch.undo()
        pool.interrupt()
        drain(supervisor)

    monkeypatch.setattr(Supervisor, "drain_wake", interrupt_and_drain)
    with pytest.raises(ClosedError):
        pool.wait([job], None)


def test_discarded_results_hold_no_slot(pools: Any, fifo: Path) -> None:
    """Seen to fail: `take_answer` that does not return the slot of a finished job."""
    pool = pools(1)
    warm(pool)
    for value in range(10):
        pool.submit((full, BIG, value))
        pool.submit((tells, fifo))
        has_started(fifo)  # the result is there, and has not been read
        pool.discard()
        assert done(pool, echo, value) == value
    assert torch.equal(done(pool, full, BIG, 7.0), torch.full((BIG,), 7.0))
    assert pool.statistics().slots <= 2


@pytest.mark.parametrize("method", METHODS)
def test_a_stuck_worker_is_ended_in_time(pools: Any, method: str, fifo: Path) -> None:
    """By another thread, which ends a wait, too. Seen to fail: lifelines left open until `kill` (2 s)."""
    pool = pools(method=method)
    warm(pool)
    job = pool.submit((stuck, fifo))
    has_started(fifo)
    pids = pool.pids
    thread = threading.Timer(0.05, pool.shutdown, [1.0])
    thread.start()
    with pytest.raises(ClosedError):
        pool.wait([job], None)
    thread.join()
    assert not any(map(psutil.pid_exists, pids))
    pool.shutdown()
    with pytest.raises(ClosedError):
        pool.submit((echo, 1))


@pytest.mark.slow
def test_nothing_is_left_behind_by_healing_often(pools: Any) -> None:
    """Seen to fail: `Supervisor.remove` without `close`."""
    pool = pools(1, max_restarts=100)
    warm(pool)
    zygote = psutil.Process(pool.pids[0]).parent()
    assert zygote is not None
    held = zygote.num_fds()
    with no_leaks_but_workers():
        for value in range(15):
            assert done(pool, full, BIG, value)[0] == value
            os.kill(pool.pids[0], signal.SIGKILL)
        warm(pool)
    assert pool.statistics().restarts >= 15
    assert zygote.num_fds() <= held + 1
    assert len(zygote.children()) == 1


@contextlib.contextmanager
def no_leaks_but_workers() -> Iterator[None]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


KILLED = """
import os, select, signal, threading
from penstock import Loader

class Stuck:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        if index:
            threading.Event().wait()
        return index

def main():
    loader = Loader.from_dataset(Stuck(), batch_size=1, num_workers=2, multiprocessing_context={method!r})
    next(iter(loader))
    workers = [os.pidfd_open(pid) for pid in loader.root.executor._pool.pids]
    if os.fork() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
        for worker in workers:
            select.select([worker], [], [])
        print("they have ended", flush=True)
        os._exit(0)
    signal.pause()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_workers_end_with_a_killed_parent(tmp_path: Path, run_program: Any, method: str) -> None:
    """In the middle of a task, while a fork of the parent lives. Seen to fail: without `_end_with`."""
    (tmp_path / "killed.py").write_text(KILLED.format(method=method))
    assert run_program(tmp_path / "killed.py", killed=True) == "they have ended\n"


EACH = pytest.param(1, marks=pytest.mark.soak)


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, EACH])
def test_an_interrupt_at_any_line_of_the_start_leaves_nothing(every: int) -> None:
    """It is started again, ended, or dropped: with ``every=3``, one of these behind each line.

    Seen to fail: nobody knew of the zygote yet, which became a zombie; two wakers; every signal blocked for good.
    """
    strikes = {then: Strikes() for then in ("start", "shutdown", "drop")}
    begins = {then: 1 + number % every for number, then in enumerate(strikes)}

    def strike(then: str) -> bool:
        with no_leaks(20):
            pool = ProcessPool(Setup(Work(), 1), multiprocessing_context="fork")
            _, stopped = strikes[then](pool.start, every if strikes[then].at else begins[then])
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
            if then == "start":
                pool.start()
                assert done(pool, echo, 1) == 1
            if then != "drop":
                pool.shutdown()
            del pool
            gc.collect()
        return stopped

    in_turn(strikes, strike)
    assert all(len(one.at) > 50 for one in strikes.values())


@pytest.mark.slow
@pytest.mark.parametrize("every", [7, EACH])
def test_a_shutdown_by_another_thread_at_any_line_of_the_start_leaves_nothing(every: int) -> None:
    """It has less time than the start takes. Seen to fail: the processes stayed, and their pipes."""
    closed = 0

    def shutdown() -> None:
        other = threading.Thread(target=pool.shutdown, args=(0.0,))
        other.start()
        other.join()

    strikes, struck = Strikes(shutdown), True
    while struck:
        with no_leaks(20):
            pool = ProcessPool(Setup(Work(), 1), multiprocessing_context="fork")
            try:
                _, struck = strikes(pool.start, every)
            except ClosedError as error:
                closed += "closed while its worker processes were starting" in str(error)
                assert pool.pids == ()
            pool.shutdown()
    assert closed > 10


@pytest.fixture
def own_server() -> Iterator[None]:
    """A fork server that this test may start, stop and kill."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def blocked(pipe: Any) -> None:
    pipe.send(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.slow
@pytest.mark.usefixtures("own_server")
def test_the_fork_server_has_the_signal_mask_of_the_program(pools: Any) -> None:
    """It forks for the program too. Seen to fail: SIGINT blocked, so that what the program had it fork was deaf to
    Ctrl-C; every signal blocked, if it had died a moment before: it did not hear of deaths, and whoever waited for the
    exit code of its child waited forever.
    """
    done(pools(1, method="forkserver"), echo, 0)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=blocked, args=(theirs,))
    process.start()
    assert ours.recv() == set()
    process.join(100)
    ours.close()
    theirs.close()


@pytest.mark.slow
@pytest.mark.usefixtures("own_server")
def test_a_fork_server_that_does_not_answer_holds_up_no_shutdown(pools: Any) -> None:
    """It alone has the exit codes of the workers. Seen to hang: a wait for them without an end."""
    pool = pools(1, method="forkserver")
    (worker,) = [psutil.Process(pid) for pid in pool.pids]
    done(pool, echo, 0)
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGSTOP)
    try:
        pool.shutdown(1.0)
        assert worker.status() == psutil.STATUS_ZOMBIE
    finally:
        os.kill(server, signal.SIGCONT)
