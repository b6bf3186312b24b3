"""What every test shares: nothing may be left behind; and scripts are run as a user would run them."""

from __future__ import annotations

import gc
import io
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import threading
from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_timeout
import torch
from leaks import no_leaks
from programs import Programs
from sessions import Popen, end_with_stacks, started_by
from torchrun import run_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

TIMEOUTS_S = {"soak": 900, "slow": 240}
"""Of a test with this mark; pyproject.toml has that of any other. They end what hangs, with the stacks of all its
processes: no test fails by being slow."""
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
FAILED = pytest.StashKey[bool]()
PROGRAMS = Programs()


@pytest.fixture(autouse=True, scope="module")
def a_small_heap() -> None:
    """Keep what is imported out of the garbage collector's way: hundreds of tests collect, and it would look at all of
    it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fonts() -> None:
    """Have matplotlib open now the files that it keeps open for the life of the process: before a test counts what is
    open."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.suptitle("title $x^{-2}$")
    axes = figure.subplots()
    axes.plot([1, 2], [0.001, 1000.0], label="x")
    axes.set(xlabel="x", yscale="log", title="y")
    axes.legend()
    figure.savefig(io.BytesIO())


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        wake_the_accelerator()
    for thread in threading.enumerate():
        if thread.name == "tqdm_monitor":
            # another library's bar has started it for good, and it would be named among those that may have drawn
            monitor: Any = thread
            monitor.exit()
            monitor.tqdm_cls.monitor = None
    with ExitStack() as stack:
        stack.enter_context(no_leaks())
        yield
        if request.node.stash.get(FAILED, False):
            stack.pop_all()  # the traceback keeps what the test held alive, and one failure is enough
    assert not (FREE_THREADED and sys._is_gil_enabled()), (
        "a module that was imported has switched Python's lock on; PYTHON_GIL=0 keeps it off"
    )


@cache
def wake_the_accelerator() -> None:
    """Open now what a driver keeps open for the life of the process: threads, files, pinned memory."""
    at = torch.ones(1, device=torch.accelerator.current_accelerator())
    torch.ones(1).pin_memory().to(at.device, non_blocking=True)
    (at.reshape(1, 1) @ at.reshape(1, 1)).item()


def pytest_report_header() -> str:
    return (
        f"python {platform.python_version()}{' without its lock' if FREE_THREADED else ''}, torch {torch.__version__}, "
        f"numpy {np.__version__}"
    )


def pytest_configure() -> None:
    # A shell that runs this in the background has it ignore Ctrl-C, and so every program that it starts; some tests
    # press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PYTHONFAULTHANDLER"] = "1"
    subprocess.Popen = Popen  # type: ignore[misc]
    dump_stacks = pytest_timeout.dump_stacks

    def dump_all(terminal: Any) -> None:
        dump_stacks(terminal)
        end_with_stacks([*started_by(os.getpid()), *PROGRAMS.everyone()])

    pytest_timeout.dump_stacks = dump_all


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("soak"):
        terminalreporter.write_line(
            "What takes long and is not worth it on every change was left out: the tests marked soak, which `make "
            "soak` runs."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        action="store_true",
        help="run the tests marked soak, and only them; PENSTOCK_REPEATS multiplies their lengths",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if (
            not item.get_closest_marker("timeout") and config.getoption("timeout") != 0
        ):  # otherwise whoever runs this has a deadline for all of it
            item.add_marker(pytest.mark.timeout(_timeout_s(item)))
    if any("::" in argument for argument in config.args):
        return _skip_where_there_is_no_accelerator(items)  # tests that are named are run
    # not by its keywords, which are also the names of the folders above the checkout
    soaks, others = [], []
    for item in items:
        (soaks if item.get_closest_marker("soak") else others).append(item)
    chosen, left_out = (soaks, others) if config.getoption("soak") else (others, soaks)
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)
    _skip_where_there_is_no_accelerator(items)


def _timeout_s(item: pytest.Item) -> float:
    marks = (seconds for mark, seconds in TIMEOUTS_S.items() if item.get_closest_marker(mark))
    return next(marks, float(item.config.getini("timeout")))


def _skip_where_there_is_no_accelerator(items: list[pytest.Item]) -> None:
    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no accelerator"))


@pytest.fixture
def run_script(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Run a Python file in ``tmp_path``, in a new interpreter; its output, once it has ended well and left no
    process."""
    before_the_timeout_s = 0.9 * _timeout_s(request.node)  # so that a hang is told with what the program said

    def run(script: Path, *arguments: str, deadline_s: float = before_the_timeout_s) -> str:
        return run_alone(tmp_path, [script, *arguments], deadline_s)

    return run


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    PROGRAMS.start()
    yield PROGRAMS
    PROGRAMS.stop()


@pytest.fixture
def run_program(tmp_path: Path, request: pytest.FixtureRequest, programs: Programs) -> Callable[..., str]:
    """Run a Python file in ``tmp_path``, as a fork of a process that has imported torch, on one rank or on several:
    `Programs.run`."""
    return partial(programs.run, cwd=tmp_path, deadline_s=0.9 * _timeout_s(request.node))
