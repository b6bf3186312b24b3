"""What passes a deadline tells where it was, with all that it has started."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import pytest_timeout

if TYPE_CHECKING:
    from pathlib import Path

    from programs import Programs

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


def test_so_does_a_program_that_hangs(programs: Programs, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A fork of the server, with a process below it. Another server takes the place of the one that is ended with
    them."""
    os.mkfifo(tmp_path / "up")
    (tmp_path / "hangs.py").write_text(f"import sys; sys.stdout = open('up', 'w')\n{HANGS}")
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(programs.run, tmp_path / "hangs.py", cwd=tmp_path)
        with (tmp_path / "up").open() as up:
            assert [up.readline() for _ in range(2)] == ["\n"] * 2
        pytest_timeout.dump_stacks(pytestconfig.get_terminal_writer())
        said = str(hung.exception())
    assert "hangs.py has not ended, and what ran it is dead" in said
    assert all(f"in {name}\n" in said for name in ("first", "second", "third")), said
    (tmp_path / "ends.py").write_text("import os, sys; print(os.getcwd(), *sys.argv[1:], __name__)")
    assert programs.run(tmp_path / "ends.py", 1, "2 3", cwd=tmp_path) == f"{tmp_path} 1 2 3 __main__\n"
    (tmp_path / "fails.py").write_text("import os; os.environ['RANK'] == '1' and 1 / 0; import signal; signal.pause()")
    with pytest.raises(AssertionError, match=r"fails.py ended with \[-9, 1, -9\](.|\n)*ZeroDivisionError"):
        programs.run(tmp_path / "fails.py", cwd=tmp_path, ranks=3)


def test_a_test_has_the_timeout_of_its_mark(request: pytest.FixtureRequest) -> None:
    """60 s. Seen to fail: 900 for all, so that a hang took a quarter of an hour."""
    assert [mark.args for mark in request.node.iter_markers("timeout")] == [(60.0,)]
