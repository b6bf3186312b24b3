"""A signal handler raises an ordinary exception while the consumer waits: nothing is left locked, and no wake-up is lost.

Afterwards the same object must work as if nothing had happened.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from strikes import Alarm, Strikes, alarm, answering

from penstock._nodes.plan_source import PlanRequest, PlanSource
from penstock._workers.thread_pool import ThreadPool
from penstock.nodes import Cycler, Node, Prefetcher, Sampler
from penstock.orders import SequentialOrder

if TYPE_CHECKING:
    from collections.abc import Callable


def every_line(act: Callable[[], Any], then: Callable[[], None]) -> int:
    """Strike at each line of ``act``, those of the standard library too, and each time see that ``then`` ends; how many lines there were."""
    with answering(alarm) as send:
        strikes, struck = Strikes(send, within=""), True
        while struck:
            try:
                _, struck = strikes(act)
            except Alarm:
                struck = True
            then()
    return len(strikes.at)


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


def test_a_planner_goes_on():
    """Seen to hang: as above. Seen to fail: the answer to one request given to another (an order that keeps the older job)."""
    plans, planner = PlanSource(), SlowPlanner()
    epochs = iter(range(10**6))

    def plan() -> None:
        epoch = next(epochs)
        assert plans.get(planner, PlanRequest(epoch)) == epoch
        plans.order(planner, PlanRequest(-epoch))
        assert plans.get(planner, PlanRequest(-epoch)) == -epoch

    assert every_line(plan, plan) > 20
    plans.shutdown()


class SlowPlanner:
    place = "thread"

    def __call__(self, request):
        time.sleep(0.001)
        return request.epoch
