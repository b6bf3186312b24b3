"""The leak check sees every kind of leak. Each test plants one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from multiprocessing import Process, get_context
from multiprocessing.shared_memory import SharedMemory

import pytest
from leaks import SHARED_MEMORY, no_leaks


def test_no_leaks_sees_a_thread() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="planted")
    with pytest.raises(AssertionError, match="thread 'planted'"), no_leaks(grace_s=0):
        thread.start()
    gate.set()
    thread.join()


def test_no_leaks_sees_a_zombie() -> None:
    with pytest.raises(AssertionError, match=r"zombie"), no_leaks(grace_s=0):
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.waitpid(pid, 0)


def test_no_leaks_sees_a_grandchild() -> None:
    command = "import subprocess as s, sys; s.run([sys.executable, '-S', '-c', 'print(0, flush=True); input()'])"
    with ExitStack() as stack, pytest.raises(AssertionError, match=r"process \d+:.* -c print"), no_leaks(grace_s=0):
        child = stack.enter_context(
            subprocess.Popen([sys.executable, "-S", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        assert child.stdout is not None
        child.stdout.readline()


def test_no_leaks_sees_shared_memory() -> None:
    with pytest.raises(AssertionError, match="shared memory /dev/shm/"), no_leaks(grace_s=0):
        segment = SharedMemory(create=True, size=16)
    segment.close()
    segment.unlink()


def test_no_leaks_leaves_other_programs_their_shared_memory() -> None:
    """Also what nobody has open. Seen to fail: whatever nobody used was taken for a leak of this program."""
    other = (
        "from multiprocessing import resource_tracker, shared_memory as m; s = m.SharedMemory(create=True, size=16); "
        "resource_tracker.unregister(s._name, 'shared_memory'); print(s.name)"
    )
    with no_leaks(grace_s=0):
        name = subprocess.run([sys.executable, "-c", other], check=True, capture_output=True, text=True).stdout.strip()
    left = SharedMemory(name)
    left.close()
    left.unlink()


def test_no_leaks_sees_shared_memory_that_torch_has_left() -> None:
    left = SHARED_MEMORY / f"torch_{os.getpid()}_1_0"
    with pytest.raises(AssertionError, match="shared memory /dev/shm/torch_"), no_leaks(grace_s=0):
        left.touch()
    left.unlink()


def test_no_leaks_sees_an_open_file() -> None:
    with pytest.raises(AssertionError, match=r"open file \d+: /dev/null"), no_leaks(grace_s=0):
        file = os.open(os.devnull, os.O_RDONLY)
    os.close(file)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_no_leaks_lets_the_helpers_of_multiprocessing_live(method: str) -> None:
    with no_leaks():
        worker = get_context(method).Process(target=os.getpid)
        worker.start()
        worker.join()
        worker.close()
        segment = SharedMemory(create=True, size=16)
        segment.close()
        segment.unlink()


def test_no_leaks_waits_for_what_is_being_taken_down() -> None:
    with no_leaks():
        held = Process(target=os.getpid)  # in a cycle, with a pipe of its own: only a collection ends it
        held.start()
        held.join()
        held.me = held  # type: ignore[attr-defined]
        del held


def test_no_leaks_lets_an_error_of_the_body_through() -> None:
    with pytest.raises(ZeroDivisionError), no_leaks():
        _ = 1 / 0
