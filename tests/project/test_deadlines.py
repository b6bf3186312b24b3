"""What passes a deadline tells where it was, with all that it has started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import pytest_timeout
from sessions import started_by

HANGS = """
import os, threading, time

def first(): print(flush=True); time.sleep(1000)
def second(): threading.Thread(target=third).start(); time.sleep(1000)
def third(): print(flush=True); time.sleep(1000)

first() if os.fork() else second()
"""


def test_all_processes_past_a_deadline_show_their_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: only the first process was killed, and nobody said anything."""
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["\n"] * 2
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0)
    said = capfd.readouterr().out
    assert all(f"in {name}\n" in said for name in ("first", "second", "third")), said


def test_so_do_those_of_a_test_that_is_past_its_own(capfd: pytest.CaptureFixture[str], pytestconfig: pytest.Config) -> None:
    """Seen to fail: it showed its own threads only."""
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["\n"] * 2
    pytest_timeout.dump_stacks(pytestconfig.get_terminal_writer())
    process.communicate()
    said = capfd.readouterr().err
    assert all(f"in {name}\n" in said for name in ("first", "second", "third")), said
    assert started_by(os.getpid()) == []
