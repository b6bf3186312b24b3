"""Signals to a program and to all of its processes at once, as a terminal, a job scheduler and ``kill -TERM -PGID`` send them.

Real processes in a session of their own, real signals. What the program does is in ``signalled.py``.
"""

from __future__ import annotations

import contextlib
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
from sessions import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="the program forks itself"),
]

METHODS = ["thread", "fork", "forkserver", "spawn", "plans by fork", "plans by forkserver", "plans by spawn"]
PROCESSES = ["fork", "forkserver", "spawn"]
INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


def table(*columns: list[Any], fast: list[Any]) -> list[Any]:
    """Every combination; all but the ``fast`` ones are slow."""
    rows = itertools.product(*columns)
    return [pytest.param(*row, marks=[] if row in fast or row[0] in fast else pytest.mark.slow) for row in rows]


class Case:
    """One run of the program."""

    def __init__(self, server: subprocess.Popen[str], folder: Path, method: str, number: int, answer: str) -> None:
        self._server, self.folder = server, folder
        os.mkfifo(folder / "ready")
        assert server.stdin is not None
        server.stdin.write(json.dumps({"method": method, "number": number, "answer": answer, "folder": str(folder)}) + "\n")
        server.stdin.flush()
        self.pid = self._said()
        self.code: int | None = None

    def until_ready(self) -> None:
        (self.folder / "ready").read_text()

    def ended(self) -> int:
        """Its exit code, once it has ended; whoever it leaves behind is an error."""
        self.code = self._said()
        for process in session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                watched = os.pidfd_open(process.pid)
                select.select([watched], [], [], 10)
                os.close(watched)
        assert session(self.pid) == []
        return self.code

    def delivered(self) -> dict[str, list[int]]:
        """What it says in the end: every value in order."""
        result: dict[str, list[int]] = json.loads((self.folder / "result").read_text())
        assert result["values"] == result["expected"]
        return result

    @property
    def answered_by(self) -> list[int]:
        return [int(line) for line in (self.folder / "answers").read_text().split()]

    @property
    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    def _said(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    program = Path(__file__).with_name("signalled.py")
    with subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
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
        for straggler in session(case.pid):
            os.kill(straggler.pid, signal.SIGKILL)
        if case.code is None:
            case.code = case._said()


@pytest.mark.parametrize(
    ("method", "number", "answer"),
    table(
        METHODS,
        [INT, TERM, USR1],
        ["flag", "raise"],
        fast=[
            ("thread", INT, "raise"),
            ("fork", INT, "flag"),
            ("fork", TERM, "flag"),
            ("fork", USR1, "raise"),
            ("plans by fork", TERM, "raise"),
        ],
    ),
)
def test_a_signal_to_the_group_is_the_main_processs_to_answer(program: Any, method: str, number: signal.Signals, answer: str) -> None:
    """It answers once, and goes on reading: the same processes bring every batch, and heal when one of them is killed afterwards.

    Seen to fail: the handler ran in every process of a fork; one that raises ended the process that forks workers, "possibly out of memory"; SIGTERM
    ended all processes before the program had answered it.
    """
    case = program(method, number, answer)
    case.until_ready()
    os.killpg(case.pid, number)
    code = {"flag": 0, "raise": 7 if number != signal.SIGINT else -signal.SIGINT}[answer]
    assert (case.ended(), case.answered_by) == (code, [case.pid]), case.errors
    result = case.delivered()
    assert result["before"] == result["after"]
    assert case.errors.count("It is replaced") == (method in PROCESSES), case.errors
    assert case.errors.count("Traceback") == (code == -signal.SIGINT), case.errors


@pytest.mark.parametrize(
    ("method", "number"),
    table(METHODS, [INT, TERM, USR1], fast=[("thread", INT), ("fork", INT), ("fork", TERM), ("plans by fork", USR1)]),
)
def test_a_signal_that_ends_the_program_ends_all(program: Any, method: str, number: signal.Signals) -> None:
    """No process is left, and nothing is said but what Python says of Ctrl-C."""
    case = program(method, number, "default")
    case.until_ready()
    os.killpg(case.pid, number)
    assert case.ended() == -number
    assert case.errors.count("Traceback") == (number == signal.SIGINT), case.errors
    assert number == signal.SIGINT or case.errors == ""


@pytest.mark.parametrize(("method", "answer"), table(METHODS, ["ignore", "reap"], fast=[("fork", "reap"), ("plans by fork", "ignore")]))
def test_children_that_others_reap_are_replaced_and_closed_all_the_same(program: Any, method: str, answer: str) -> None:
    """SIGCHLD ignored, or a handler that waits for any child. Seen to fail: a traceback at every close; no replacement."""
    case = program(method, signal.SIGCHLD, answer)
    assert case.ended() == 0, case.errors
    case.delivered()
    assert set(case.answered_by) <= {case.pid}
    assert case.errors.count("It is replaced") == (method in PROCESSES), case.errors
    assert "Traceback" not in case.errors


@pytest.mark.parametrize(
    "number",
    table([signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGXCPU, getattr(signal, "SIGRTMIN", USR1)], fast=[signal.SIGHUP]),
)
def test_so_is_every_signal_that_the_program_has_a_handler_for(program: Any, number: signal.Signals) -> None:
    """But for SIGALRM: that of another process is not sent to a group, and ends a worker, as everywhere."""
    case = program("fork", number, "raise")
    case.until_ready()
    os.kill(case.pid, number) if number == signal.SIGALRM else os.killpg(case.pid, number)
    assert (case.ended(), case.answered_by) == (7, [case.pid]), case.errors
    case.delivered()
    assert case.errors.count("It is replaced") == 1, case.errors


@pytest.mark.parametrize("method", table(["fork", "spawn", "plans by fork", "plans by spawn"], fast=["fork"]))
def test_signals_while_processes_are_started_are_the_main_processs_to_answer(program: Any, method: str) -> None:
    """One after the other, from before the first process is started until the last batch.

    Seen to fail: a child that had the program's handlers until it had set its own; one that a new interpreter's defaults ended.
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
