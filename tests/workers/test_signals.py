"""Signals to a program and to all of its processes at once, as a terminal, a job scheduler and ``kill -TERM -PGID``
send them.

Real processes in their own session, real signals. The program is ``signalled.py``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from children import in_a_child
from sessions import end_with_stacks, session

from penstock._errors import WorkerDied
from penstock._workers.process_pool import ProcessPool
from penstock._workers.processes.protocol import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="the program forks itself"),
]

METHODS = ["thread", "fork", "forkserver", "spawn", "plans by fork", "plans by forkserver", "plans by spawn"]
PROCESSES = ["fork", "forkserver", "spawn"]
INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
OTHERS = [signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGXCPU, getattr(signal, "SIGRTMIN", USR1)]


def table(*columns: list[Any], fast: list[Any]) -> list[Any]:
    """Every combination; all but the ``fast`` ones are for ``make soak``."""
    rows = itertools.product(*columns)
    return [pytest.param(*row, marks=[] if row in fast or row[0] in fast else pytest.mark.soak) for row in rows]


class Case:
    """One run of the program."""

    def __init__(self, server: subprocess.Popen[str], folder: Path, method: str, number: int, answer: str) -> None:
        self._server, self.folder = server, folder
        os.mkfifo(folder / "ready")
        self.ready = os.open(folder / "ready", os.O_RDWR)
        assert server.stdin is not None
        server.stdin.write(
            json.dumps({"method": method, "number": number, "answer": answer, "folder": str(folder)}) + "\n"
        )
        server.stdin.flush()
        self.pid = self.said()
        self.code: int | None = None

    def until_ready(self) -> None:
        watched = os.pidfd_open(self.pid)
        is_ready = self.ready in select.select([self.ready, watched], [], [])[0]
        os.close(watched)
        assert is_ready, f"it ended too early: {self.errors}"

    def ended(self) -> int:
        """Its exit code, once it has ended. A process that it leaves behind is an error."""
        self.code = self.said()
        for process in session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                watched = os.pidfd_open(process.pid)
                select.select([watched], [], [], 10)
                os.close(watched)
        assert session(self.pid) == []
        return self.code

    def delivered(self) -> dict[str, list[int]]:
        """Its final report: every value in order."""
        result: dict[str, list[int]] = json.loads((self.folder / "result").read_text())
        assert result["values"] == result["expected"]
        return result

    @property
    def answered_by(self) -> list[int]:
        return [int(line) for line in (self.folder / "answers").read_text().split()]

    @property
    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    def said(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    program = Path(__file__).with_name("signalled.py")
    with subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def program(server: subprocess.Popen[str], tmp_path: Path) -> Iterator[Callable[..., Case]]:
    cases: list[Case] = []

    def run(*arguments: Any) -> Case:
        cases.append(Case(server, tmp_path, *arguments))
        return cases[-1]

    yield run
    for case in cases:
        os.close(case.ready)
        if left := session(case.pid):
            end_with_stacks(left)
            print(case.errors)
        if case.code is None:
            case.code = case.said()


@pytest.mark.parametrize(
    ("method", "number", "answer"),
    [
        *table(
            METHODS,
            [INT, TERM, USR1],
            ["flag", "raise"],
            fast=[
                ("thread", INT, "raise"),
                ("fork", INT, "flag"),
                ("fork", TERM, "flag"),
                ("fork", USR1, "raise"),
                ("spawn", INT, "raise"),
                ("plans by fork", TERM, "raise"),
            ],
        ),
        *table(["fork"], OTHERS, ["raise"], fast=[("fork", signal.SIGHUP, "raise")]),
    ],
)
def test_a_signal_to_the_group_is_the_main_processs_to_answer(
    program: Any, method: str, number: signal.Signals, answer: str
) -> None:
    """It answers once, and reads on: the same processes deliver every batch, and one that is killed afterwards is
    replaced.

    Seen to fail: the handler ran in every process of a fork; one that raises ended the process that forks workers,
    "possibly out of memory"; SIGTERM ended all processes before the program had answered it.
    """
    case = program(method, number, answer)
    case.until_ready()
    os.kill(case.pid, number) if number == signal.SIGALRM else os.killpg(
        case.pid, number
    )  # another process's alarm ends a worker, as in any program
    code = {"flag": 0, "raise": 7 if number != signal.SIGINT else -signal.SIGINT}[answer]
    assert (case.ended(), case.answered_by) == (code, [case.pid]), case.errors
    result = case.delivered()
    assert result["before"] == result["after"]
    assert case.errors.count("It is replaced") == (method in PROCESSES), case.errors
    assert case.errors.count("Traceback") == (code == -signal.SIGINT), case.errors


@pytest.mark.parametrize(
    ("method", "number"),
    table(
        METHODS, [INT, TERM, USR1], fast=[("thread", INT), ("fork", INT), ("forkserver", TERM), ("plans by fork", USR1)]
    ),
)
def test_a_signal_that_ends_the_program_ends_all(program: Any, method: str, number: signal.Signals) -> None:
    """No process is left, and nothing is printed except Python's traceback of Ctrl-C."""
    case = program(method, number, "default")
    case.until_ready()
    os.killpg(case.pid, number)
    assert case.ended() == -number
    assert case.errors.count("Traceback") == (number == signal.SIGINT), case.errors
    assert number == signal.SIGINT or case.errors == ""


@pytest.mark.parametrize(
    ("method", "answer"), table(METHODS, ["ignore", "reap"], fast=[("fork", "reap"), ("plans by fork", "ignore")])
)
def test_children_that_others_reap_are_replaced_and_closed_all_the_same(program: Any, method: str, answer: str) -> None:
    """SIGCHLD ignored, or a handler that waits for any child. Seen to fail: a traceback at every close; no
    replacement."""
    case = program(method, signal.SIGCHLD, answer)
    assert case.ended() == 0, case.errors
    case.delivered()
    assert set(case.answered_by) <= {case.pid}
    assert case.errors.count("It is replaced") == (method in PROCESSES), case.errors
    assert "Traceback" not in case.errors


@pytest.mark.parametrize("method", table(["fork", "spawn", "plans by fork", "plans by spawn"], fast=["fork"]))
def test_signals_while_processes_are_started_are_the_main_processs_to_answer(program: Any, method: str) -> None:
    """One after the other, from before the first process is started until the last batch.

    Seen to fail: a child with the program's handlers until it set its own; a child killed by a new interpreter's
    default handlers.
    """
    case = program(method, signal.SIGUSR1, "storm")
    case.until_ready()
    while not (case.folder / "result").exists() and psutil.Process(case.pid).status() != psutil.STATUS_ZOMBIE:
        os.killpg(case.pid, signal.SIGUSR1)
    assert case.ended() == 0, case.errors
    result = case.delivered()
    assert set(case.answered_by) == {case.pid}
    assert result["before"] == result["after"]
    assert case.errors.count("It is replaced") == (method in PROCESSES), case.errors
    assert "Traceback" not in case.errors


STUCK = """
import contextlib, pathlib, threading
from penstock import Loader
from penstock._workers.processes.launchers import ByContext

class Stuck:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index >= 4:
            pathlib.Path("fifo").write_bytes(b"here")
            threading.Event().wait()
        return index

def main():
    global loader
    loader = Loader.from_dataset(Stuck(), batch_size=2, num_workers=1, multiprocessing_context={method!r})
    assert next(iter(loader)).tolist() == [0, 1]
    pathlib.Path("fifo").read_bytes()
    really = ByContext.join
    def interrupted(*arguments):
        ByContext.join = really
        raise KeyboardInterrupt
    ByContext.join = interrupted
    with contextlib.suppress(KeyboardInterrupt):
        loader.close()
        raise AssertionError

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param(method, marks=pytest.mark.soak) for method in ("spawn", "forkserver")])
def test_a_program_whose_close_was_interrupted_beside_a_stuck_sample_ends(
    method: str, run_script: Any, tmp_path: Path
) -> None:
    """Seen to hang: `multiprocessing` waited at exit for a worker that nobody had killed, because the interrupted close
    counted as done."""
    os.mkfifo(tmp_path / "fifo")
    program = tmp_path / "program.py"
    program.write_text(STUCK.format(method=method))
    assert run_script(program) == ""


# One process of a pool. A task is a function, called in the worker.


class Work:
    def __call__(self, task: Any, cell: Any, allocate: Any) -> Any:
        return task()

    def name(self, task: Any, row: int) -> str:
        return task.__name__


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool(Setup(Work(), 1), multiprocessing_context="fork")
    pool.start()
    yield pool
    pool.shutdown()


def done(pool: ProcessPool, task: Callable[[], Any]) -> Any:
    job = pool.submit(task)
    while not job.done:
        pool.wait([job], 100.0)
    return job.result()


def terminate_what_it_starts() -> list[int]:
    """How a program and its fork, made like multiprocessing's, end."""
    program = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    program.terminate()
    fork = os.fork()
    if fork == 0:
        signal.alarm(10)
        signal.pause()
        os._exit(0)
    os.kill(fork, signal.SIGTERM)  # so early that the fork may not have run at all
    return [program.wait(), os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])]


def terminate_itself() -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    return os.getpid()


def test_sigterm_to_one_worker_passes_it_by(pool: ProcessPool) -> None:
    """And to the process that forks workers. SIGKILL ends a worker, and another one takes its place."""
    zygote = psutil.Process(pool.pids[0]).ppid()
    os.kill(zygote, signal.SIGTERM)
    assert done(pool, terminate_itself) == done(pool, os.getpid) == pool.pids[0]
    os.kill(pool.pids[0], signal.SIGKILL)
    assert done(pool, os.getppid) == zygote
    assert pool.statistics().restarts == 1


def test_what_user_code_starts_in_a_worker_can_be_terminated(pool: ProcessPool) -> None:
    """Seen to fail: with SIGTERM ignored in the worker, which programs inherit; and without the hook at forks."""
    assert done(pool, terminate_what_it_starts) == [-signal.SIGTERM, -signal.SIGTERM]


def test_a_handler_of_native_code_stays(tmp_path: Path) -> None:
    """``kill -USR1`` shows the stack of a worker, as it does for the main process. Seen to fail: SIGUSR1 always
    ignored."""
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        pool = ProcessPool(Setup(Work(), 1), multiprocessing_context="fork")
        pool.start()
        try:
            done(pool, ask_for_its_stack)
        finally:
            pool.shutdown()
            faulthandler.unregister(signal.SIGUSR1)
    assert "ask_for_its_stack" in (tmp_path / "stacks").read_text()


def ask_for_its_stack() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_the_death_of_the_process_that_forks_workers_is_told_with_its_cause(pool: ProcessPool) -> None:
    """Seen to fail: the error always blamed a lack of memory."""
    zygote = psutil.Process(pool.pids[0]).ppid()
    os.kill(zygote, signal.SIGXCPU)
    os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"pid {zygote}\) has died: signal SIGXCPU, sent by another process"):
        done(pool, os.getpid)


class DiesWithItsServer(Work):
    """The first worker that starts ends the fork server, and then itself, as a signal to the whole group may."""

    def __init__(self, first: Path) -> None:
        self.first = first
        first.touch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with contextlib.suppress(FileNotFoundError):
            self.first.unlink()
            server = os.pidfd_open(os.getppid())
            signal.pidfd_send_signal(server, signal.SIGKILL)
            select.select([server], [], [])
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_in_its_start_with_the_fork_server_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has its exit code then; `multiprocessing` says 255. Seen to fail: refused as a script without
    `if __name__ == "__main__":`."""
    pool = ProcessPool(Setup(DiesWithItsServer(tmp_path / "first"), 1), multiprocessing_context="forkserver")
    pool.start()
    try:
        assert done(pool, os.getpid) == pool.pids[0]
    finally:
        pool.shutdown()
    assert pool.statistics().restarts == 1
    assert "died while it started: nobody knows how" in caplog.text


def test_a_program_that_a_broken_pipe_ends_is_not_ended_by_a_dead_worker() -> None:
    """As in scripts that print into ``head``. Seen to fail: the first task for a worker that had just died ended the
    program."""

    def program(_: Any) -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        pool = ProcessPool(Setup(Work(), 1), multiprocessing_context="fork")
        pool.start()
        first = done(pool, os.getpid)
        dead = os.pidfd_open(first)
        os.kill(first, signal.SIGKILL)
        select.select([dead], [], [])
        assert done(pool, os.getpid) != first
        pool.shutdown()

    in_a_child(program)()
