"""Worker threads: one pool, gates instead of sleeps."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

import pytest
from strikes import Strikes

from penstock._errors import ClosedError
from penstock._workers.lifetime import closing_within
from penstock._workers.thread_pool import ThreadPool


class Gate(threading.Event):
    """Tells how many have come to it."""

    def __init__(self):
        super().__init__()
        self.came = threading.Semaphore(0)


class Gated:
    """A task is a number: None at once, an exception raised, a `Gate` or a `Barrier` waited for."""

    def __call__(self, task, cell, allocate):
        cell[0] = 7
        if isinstance(task, Gate):
            task.came.release()
            assert task.wait(100)
        if isinstance(task, threading.Barrier):
            return task.wait()
        if isinstance(task, BaseException):
            raise task
        return task

    def name(self, task, row):
        return f"{type(task).__name__} row {row}"


@pytest.fixture
def pools():
    with contextlib.ExitStack() as stack:

        def make(workers=2):
            pool = ThreadPool(Gated(), workers)
            stack.callback(pool.shutdown)
            pool.start()
            pool.start()
            return pool

        yield make


@pytest.fixture
def gate():
    """A gate that is always opened at the end of the test."""
    one = Gate()
    yield one
    one.set()


def result(pool, job):
    while not job.done:
        pool.wait([job], 20)
    return job.result()


def begun(gate):
    """Wait until a thread has come to the gate."""
    assert gate.came.acquire(timeout=100)


def threads_of(pool):
    return [thread for thread in threading.enumerate() if thread.ident in pool.threads]


def test_a_stuck_thread_is_given_up_and_named(pools, gate):
    """The pool continues; the late result is dropped. Seen to fail: `finish` that writes into a job that is done."""
    pool = pools(2)
    held = pool.submit(gate)
    begun(gate)
    pool.wait([held], 0.01)
    with pytest.raises(
        TimeoutError, match=rf"waited 0.01 s for Gate row 7, in worker thread {held.worker}, which cannot be stopped"
    ):
        held.result()
    assert pool.statistics().stuck == 1
    assert [result(pool, pool.submit(task)) for task in range(9)] == list(range(9))
    gate.set()
    both = threading.Barrier(2, timeout=100)
    assert sorted(result(pool, job) for job in [pool.submit(both), pool.submit(both)]) == [0, 1]  # both threads work
    assert held.value is None
    assert pool.statistics().stuck == 0


def test_when_all_threads_are_stuck_the_error_says_so(pools, gate):
    """Jobs that wait behind them are not lost."""
    pool = pools(2)
    held = [pool.submit(gate) for _ in range(2)]
    for job in held:
        begun(gate)
        pool.wait([job], 0.01)
    waiting = pool.submit(5)
    with pytest.raises(
        TimeoutError,
        match=r"no worker thread has begun; 2 of 2 are stuck: worker thread 0 in Gate row 7; worker thread 1 in",
    ):
        pool.wait([waiting], 0.01)
    gate.set()
    assert result(pool, waiting) == 5


@pytest.mark.parametrize("act", ["interrupt", "stop"])
def test_a_wait_is_ended_and_discard_forgets(pools, gate, act):
    """Seen to hang: `interrupt` without `notify_all`; `stop` that tells the threads only."""
    pool = pools(1)
    held, queued = pool.submit(gate), pool.submit(1)
    begun(gate)
    timer = threading.Timer(0.02, pool.interrupt if act == "interrupt" else pool.abandon)
    timer.start()
    with pytest.raises(ClosedError):
        pool.wait([held], None)
    timer.join()
    if act == "interrupt":
        pool.discard()
        gate.set()
        assert result(pool, pool.submit(3)) == 3
        assert not queued.done


def test_stuck_threads_are_left_behind_by_name(gate, caplog):
    """Daemons, so that they do not hold up the interpreter's exit. Seen to fail: `join` that gives each of them its own
    time to wake (1.6 s)."""
    pool = ThreadPool(Gated(), 17)
    pool.start()
    for _ in [pool.submit(gate) for _ in range(16)]:
        begun(gate)
    began = time.monotonic()
    closing_within(0.05, pool.shutdown)
    assert time.monotonic() - began < 1
    stuck = threads_of(pool)
    assert [thread.daemon for thread in stuck] == [True] * 16
    assert sorted(record.getMessage().partition(" is still busy")[0] for record in caplog.records) == sorted(
        f"thread {thread.name}" for thread in stuck
    )
    pool.shutdown()
    gate.set()
    for thread in stuck:
        thread.join(100)
    with pytest.raises(ClosedError):
        pool.start()


def test_a_close_at_any_line_of_a_jump_leaves_no_thread():
    """By another thread, or by a handler of SIGTERM. Seen to fail: `discard` took the wake-ups of `stop` out of the
    inbox."""
    strikes, struck = Strikes(lambda: pool.abandon()), True
    while struck:
        pool = ThreadPool(Gated(), 2)
        pool.start()
        threads = threads_of(pool)
        with contextlib.suppress(ClosedError):
            _, struck = strikes(pool.discard)
        for thread in threads if struck else ():
            thread.join(100)
            assert not thread.is_alive(), strikes.last
        pool.shutdown()
    assert strikes.at


def test_a_waiting_thread_keeps_no_batch(pools):
    """Seen to fail: without the `del` in `_run`."""

    class Big:
        pass

    pool = pools(1)
    job = pool.submit(Big())
    ref = weakref.ref(result(pool, job))
    job.task = job.value = None
    deadline = time.monotonic() + 100
    while ref() is not None and time.monotonic() < deadline:
        time.sleep(0)
    assert ref() is None
