"""Worker threads: one pool, gates instead of sleeps."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import pytest

from penstock import Loader
from penstock._errors import ClosedError, SampleError
from penstock._workers.lifetime import closing_within
from penstock._workers.pool import IDLE
from penstock._workers.thread_pool import ThreadPool


class Gated:
    """A task is a number: None at once, an exception raised, an `Event` waited for."""

    def __call__(self, task, cell, allocate):
        cell[0] = 7
        if isinstance(task, threading.Event):
            assert task.wait(100)
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
    event = threading.Event()
    yield event
    event.set()


def result(pool, job):
    while not job.done:
        pool.wait([job], 20)
    return job.result()


def begun(pool, job):
    """Wait until a thread has taken the job. Nothing signals that, so this polls."""
    while job.worker == IDLE or pool._core.cells[job.worker][0] == IDLE:
        time.sleep(0)


def test_a_signal_that_closes_while_the_lock_is_held_does_not_hang():
    """As a SIGTERM handler may do. Seen to hang: `Lock` instead of `RLock`."""
    pool = ThreadPool(Gated(), 2)
    pool.start()
    with pool._core.lock:
        pool.interrupt()
    pool.shutdown()


def test_results_are_those_of_their_tasks(pools):
    pool = pools(3)
    jobs = [pool.submit(task) for task in range(200)]
    assert [result(pool, job) for job in jobs] == list(range(200))
    assert {job.worker for job in jobs} <= {0, 1, 2}
    assert pool.statistics().tasks == 200


@pytest.mark.parametrize("error", [ValueError("x"), OSError(2, "no file")])
def test_an_error_is_raised_as_it_is_with_a_note(pools, error):
    with pytest.raises(type(error)) as caught:
        result(pool := pools(1), pool.submit(error))
    assert caught.value is error
    assert error.__notes__ == ["in worker thread 0 (penstock-map-0)"]


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_error_that_means_something_to_loops_is_wrapped(pools, kind):
    """And its thread lives on. Seen to fail: `except Exception` in `_run` (the job is never done)."""
    pool = pools(1)
    with pytest.raises(SampleError, match=f"{kind.__name__} came out of user code in worker thread 0"):
        result(pool, pool.submit(kind()))
    assert result(pool, pool.submit(5)) == 5


def test_a_stuck_thread_is_given_up_and_named(pools, gate):
    """The pool continues; the late result is dropped. Seen to fail: `finish` that writes into a job that is done."""
    pool = pools(2)
    held = pool.submit(gate)
    begun(pool, held)
    pool.wait([held], 0.01)
    with pytest.raises(TimeoutError, match=rf"waited 0.01 s for Event row 7, in worker thread {held.worker}, which cannot be stopped"):
        held.result()
    assert pool.statistics().stuck == 1
    assert [result(pool, pool.submit(task)) for task in range(9)] == list(range(9))
    gate.set()
    both = threading.Barrier(2, timeout=100)
    pool._core.work.__class__ = type("Meeting", (Gated,), {"__call__": lambda self, task, cell, allocate: both.wait()})
    assert sorted(result(pool, job) for job in [pool.submit(0), pool.submit(0)]) == [0, 1]  # both threads work
    assert held.value is None
    assert pool.statistics().stuck == 0


def test_when_all_threads_are_stuck_the_error_says_so(pools, gate):
    """Jobs that wait behind them are not lost."""
    pool = pools(2)
    held = [pool.submit(gate) for _ in range(2)]
    for job in held:
        begun(pool, job)
        pool.wait([job], 0.01)
    waiting = pool.submit(5)
    with pytest.raises(
        TimeoutError, match=r"no worker thread has begun; 2 of 2 are stuck: worker thread 0 in Event row 7; worker thread 1 in"
    ):
        pool.wait([waiting], 0.01)
    gate.set()
    assert result(pool, waiting) == 5


def test_interrupt_ends_a_wait_and_discard_forgets(pools, gate):
    """Seen to fail: `interrupt` without `notify_all` (it hangs)."""
    pool = pools(1)
    held, queued = pool.submit(gate), pool.submit(1)
    timer = threading.Timer(0.02, pool.interrupt)
    timer.start()
    with pytest.raises(ClosedError):
        pool.wait([held], None)
    timer.join()
    pool.discard()
    gate.set()
    assert result(pool, pool.submit(3)) == 3
    assert not queued.done


def test_shutdown_ends_a_wait(pools, gate):
    """Seen to fail: `stop` that tells the threads only (it hangs)."""
    pool = pools(1)
    job = pool.submit(gate)
    begun(pool, job)
    timer = threading.Timer(0.02, pool._core.stop)
    timer.start()
    with pytest.raises(ClosedError):
        pool.wait([job], None)
    timer.join()


def test_a_stuck_thread_is_left_behind_by_name(gate, caplog):
    """A daemon, so that it does not hold up the interpreter's exit."""
    pool = ThreadPool(Gated(), 2)
    pool.start()
    begun(pool, pool.submit(gate))
    began = time.monotonic()
    closing_within(0.05, pool.shutdown)
    assert time.monotonic() - began < 1
    assert "thread penstock-map-0 is still at work" in caplog.text or "thread penstock-map-1 is still at work" in caplog.text
    stuck = [thread for thread in pool._core.threads.values() if thread.is_alive()]
    assert len(stuck) == 1
    assert stuck[0].daemon
    pool.shutdown()
    gate.set()
    stuck[0].join(100)
    with pytest.raises(ClosedError):
        pool.start()


def test_many_stuck_threads_take_no_longer_than_one(gate, caplog):
    """Seen to fail: `join` that gives each of them its own time to wake (1.6 s)."""
    pool = ThreadPool(Gated(), 16)
    pool.start()
    for job in [pool.submit(gate) for _ in range(16)]:
        begun(pool, job)
    began = time.monotonic()
    pool.shutdown(0.05)
    assert time.monotonic() - began < 1
    assert caplog.text.count("is still at work") == 16
    gate.set()
    for thread in pool._core.threads.values():
        thread.join(100)


class Stuck:
    def __init__(self, gate):
        self.gate = gate
        self.begun = threading.Event()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2:
            self.begun.set()
            assert self.gate.wait(100)
        return index


def test_a_loader_goes_on_after_a_timeout_and_close_names_the_thread(gate, caplog):
    """Of batches [0, 1], [2, 3], ... the second one hangs."""
    dataset = Stuck(gate)
    loader = Loader.from_dataset(dataset, batch_size=2, num_workers=2, method="thread", timeout=0.05)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    assert dataset.begun.wait(100)
    with pytest.raises(TimeoutError, match=r"dataset index 2 \(epoch 0, position 2\), in worker thread"):
        next(batches)
    assert next(batches).tolist() == [4, 5]
    loader.close(timeout=0.05)
    assert "is still at work" in caplog.text
    gate.set()


def test_a_jump_while_another_thread_closes_the_pool_leaves_no_thread(pools, monkeypatch):
    """Seen to fail: `discard` took the wake-ups of `stop` out of the inbox, and idle threads waited on."""
    pool = pools(2)
    threads = list(pool._core.threads.values())
    clear = pool._core.clear

    def clear_as_it_is_closed():
        pool._core.stopped = True  # as in `stop`; the wake-ups that it sends go with this
        clear()

    monkeypatch.setattr(pool._core, "clear", clear_as_it_is_closed)
    pool.discard()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)


def test_an_abandoned_pool_ends_its_threads():
    pool = ThreadPool(Gated(), 2)
    pool.start()
    threads = list(pool._core.threads.values())
    del pool
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)


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
