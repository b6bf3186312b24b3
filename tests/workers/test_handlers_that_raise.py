"""A signal handler raises an ordinary exception while the consumer waits: nothing is left locked, and no wake-up is lost.

The exception is raised at each line that the wait runs, one after another, in the standard library too: a trace function is a signal that comes
on command. Afterwards the same object must work as if nothing had happened.
"""

from __future__ import annotations

import gc
import linecache
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Loader, SourceError
from penstock._nodes.plan_source import PlanRequest, PlanSource
from penstock._workers.thread_pool import ThreadPool
from penstock.nodes import Cycler, Node, Prefetcher, Sampler
from penstock.orders import SequentialOrder
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable


class Alarm(ValueError):
    """The exception that the handler raises."""


def struck_at(line: int, act: Callable[[], Any]) -> bool:
    """Whether ``act`` was interrupted, at the ``line``-th line that it runs in this thread."""
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        # Python handles no signal before the clean-up of a with statement on a lock, but it does call a trace function.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith("with "):
            lines += 1
            if lines == line:
                raise Alarm
        return trace

    sys.settrace(trace)
    try:
        act()
    except Alarm:
        return True
    finally:
        sys.settrace(None)
    return False


def every_line(act: Callable[[], Any], then: Callable[[], None]) -> int:
    """Strike at each of the first lines of ``act``, and each time see that ``then`` ends; how often it was struck. How many lines a wait has, depends
    on timing."""
    struck = 0
    for line in range(1, 100):
        struck += struck_at(line, act)
        then()
    return struck


class Slow:
    """Takes long enough that the consumer waits for it."""

    def __call__(self, task, cell, allocate):
        time.sleep(0.001)
        return task

    def name(self, task, row):
        return f"{task}"


def test_a_pool_goes_on():
    """Seen to fail: `threading.Condition`, which is released twice ("cannot release un-acquired lock"), or tells a thread that is gone."""
    pool = ThreadPool(Slow(), 2)
    pool.start()

    def load() -> None:
        jobs = [pool.submit(task) for task in range(3)]
        while not all(job.done for job in jobs):
            pool.wait([job for job in jobs if not job.done], 20)
        assert [job.result() for job in jobs] == [0, 1, 2]

    assert every_line(load, load) > 20
    pool.shutdown()
    assert not any(thread.is_alive() for thread in pool._core.threads.values())


class Slowly(Node):
    def transform(self, item):
        time.sleep(0.001)
        return item


def test_a_reader_goes_on():
    """Seen to hang: the reader is told that there is room behind the taking, and an exception between the two keeps it asleep."""
    node = Prefetcher(Slowly(Cycler(Sampler(SequentialOrder(10**6)))), 1)
    last = next(node).values

    def read() -> None:
        nonlocal last
        for _ in range(3):
            value = next(node).values
            assert value > last
            last = value

    assert every_line(read, read) > 20
    node.shutdown()


@pytest.mark.parametrize("place", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_planner_goes_on(place):
    """Seen to hang: as above. Seen to fail: the answer to one request given to another (an order that keeps the older job)."""
    plans = PlanSource(SlowPlanner(place))
    epochs = iter(range(10**6))

    def plan() -> None:
        epoch = next(epochs)
        assert plans.get(PlanRequest(epoch)) == epoch
        plans.order(PlanRequest(-epoch))
        assert plans.get(PlanRequest(-epoch)) == -epoch

    assert every_line(plan, plan) > 20
    plans.shutdown()


class SlowPlanner:
    def __init__(self, place):
        self.place = place

    def __call__(self, request):
        time.sleep(0.001)
        return request.epoch


@pytest.mark.soak
@pytest.mark.parametrize("roof", [lambda node: node, Prefetcher], ids=["threads", "threads under a Prefetcher"])
def test_a_loop_that_catches_the_alarm_goes_on(roof):
    """A thousand real signals. Seen to fail: a `RuntimeError` about a lock in one of 2000, and once a hang.

    Nothing is collected meanwhile: what a handler raises in a finalizer that the garbage collector calls, Python can only print.
    """
    armed = False

    def handler(number: int, frame: Any) -> None:
        if armed:
            raise Alarm

    gc.collect()
    gc.disable()
    before = signal.signal(signal.SIGALRM, handler)
    alarms = 0
    try:
        with Loader(roof(Loader.from_dataset(Tagged(10**6), batch_size=1, num_workers=2, method="thread").root)) as loader:
            batches = iter(loader)
            for number in range(1000):
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, 0.00005 + number % 20 * 0.0001)
                    for _ in range(10000):
                        next(batches)
                except Alarm:
                    armed = False
                    alarms += 1
                except SourceError:
                    armed = False
                    loader.load_state_dict(loader.state_dict())
                    batches = iter(loader)
                armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert alarms > 500
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]
