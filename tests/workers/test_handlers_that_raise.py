"""A signal handler raises an ordinary exception while the consumer waits: nothing is left locked, and no wake-up is
lost.

Afterwards the same object must work as if nothing had happened.
"""

from __future__ import annotations

import multiprocessing
import select
import signal
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
from leaks import no_leaks
from resumable import Resumable
from strikes import Alarm, Strikes, alarm, answering, only_locks_of_c

from penstock import Loader, Stream
from penstock._nodes.plan_source import PlanRequest, PlanSource
from penstock._workers.errands import Errands
from penstock._workers.lifetime import Closing
from penstock._workers.processes.launchers import ByContext
from penstock._workers.processes.protocol import Setup
from penstock._workers.thread_pool import ThreadPool
from penstock.nodes import Cycler, Node, Prefetcher, Sampler
from penstock.orders import SequentialOrder
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def every_line(act: Callable[[], Any], then: Callable[[], None]) -> int:
    """Strike at each line of ``act``, those of the standard library too, and each time see that ``then`` ends; how many
    lines there were."""
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
    """Seen to fail: `threading.Condition`, which is released twice ("cannot release un-acquired lock"), or tells a
    thread that is gone."""
    pool = ThreadPool(Slow(), 2)
    pool.start()

    def load() -> None:
        jobs = [pool.submit(task) for task in range(3)]
        while not all(job.done for job in jobs):
            pool.wait([job for job in jobs if not job.done], 20)
        assert [job.result() for job in jobs] == [0, 1, 2]

    assert every_line(load, load) > 20
    pool.shutdown()
    assert not any(thread.name.startswith("penstock-map") for thread in threading.enumerate())


class Slowly(Node):
    def transform(self, item):
        time.sleep(0.001)
        return item


def test_a_reader_goes_on():
    """Seen to hang: the reader is told that there is room behind the taking, and an exception between the two keeps it
    asleep."""
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
    """Seen to hang: as above. Seen to fail: the answer to one request given to another (an order that keeps the older
    job)."""
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


def test_what_ends_errands_and_pauses_is_no_event():
    """Seen to hang: an interrupt in `threading.Event.set` left it locked, and the next close waited for that
    forever."""
    done = SimpleQueue()
    errands = Errands(lambda number, _: done.put(number), "penstock-test", 2)
    with only_locks_of_c():
        for numbers in ([0, 1, 2], [3, 4]):
            errands.want(dict.fromkeys(numbers, 0.0), -1)
            assert sorted(done.get(timeout=20) for _ in numbers) == numbers
            errands.close()
        closing = Closing()
        closing.set()
        assert closing.wait(20)
        closing.clear()
        assert not closing.wait(0.001)


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_exception_while_a_stream_is_read_arrives_as_itself_and_costs_no_record(retries, on_error):
    """Fails if it passes for the shard's own: retried in silence, or the rest of the shard is skipped, and a bookmark
    keeps that for all future runs."""
    struck = []

    def opened(shard):
        for record in range(6):
            if (shard, record) == (1, 3) and not struck:
                struck.append(shard)
                send()
            yield 6 * shard + record

    data = Stream(3, opened, epoch_size=18, on_error=on_error, retries=retries, bookmarks=False)
    with answering(alarm_of_a_network) as send, Loader.from_dataset(data, batch_size=3) as loader:
        batches, got = iter(loader), []
        with pytest.raises(TimeoutError, match="^late"):
            for batch in batches:
                got += batch.tolist()
        got += [record for batch in batches for record in batch.tolist()]
    assert sorted(got) == list(range(18))


def alarm_of_a_network():
    raise TimeoutError("late")


def test_an_exception_while_an_iterable_is_asked_for_its_state_arrives_as_itself():
    """Fails if the iterable is taken for one without a state: from then on it would be read from its beginning."""
    asked = []

    class Asked(Resumable):
        def state_dict(self):
            if not asked:
                asked.append(self)
                send()
            return super().state_dict()

    with answering(alarm) as send, Loader.from_dataset(Asked(8), batch_size=2) as loader:
        with pytest.raises(Alarm):
            next(iter(loader))
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        assert '{"at": 4}' in loader.state_dict()["penstock"]  # its own state, and not only a count


class Struck(Tagged):
    """A signal comes while it is pickled."""

    def __getstate__(self):
        signal.raise_signal(signal.SIGUSR1)
        return vars(self)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", [Alarm, KeyboardInterrupt])
def test_an_exception_while_the_dataset_is_pickled_arrives_as_itself(method, kind):
    """Fails if whatever is raised meanwhile is taken for the dataset's own error: "cannot be pickled", a TypeError."""

    def handler():
        raise kind("from the handler")

    with (
        no_leaks(),
        answering(handler),
        Loader.from_dataset(Struck(8), num_workers=1, multiprocessing_context=method) as loader,
        pytest.raises(kind, match="^from the"),
    ):
        next(iter(loader))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the collector may close the file of the memory
def test_an_exception_at_any_line_before_workers_are_launched_leaves_nothing():
    """Fails if the memory of the pickled dataset has a descriptor that no object owns yet."""
    setup = Setup(Slow(), 1, 0, None, "penstock-map")
    with answering(alarm) as send:
        strikes, struck = Strikes(send), True
        while struck:
            with no_leaks():
                launcher = ByContext(setup, multiprocessing.get_context("spawn"), select.poll())
                try:
                    _, struck = strikes(launcher.start)
                except Alarm:
                    struck = True
                assert launcher.join(5)
                del launcher
    assert len(strikes.at) > 20


IMPORTING = """
import importlib.abc, signal, sys
import penstock

class Late(Exception): pass

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "penstock.nodes":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGUSR1)

def handler(*_):
    raise Late("from the handler")

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, handler)
    sys.meta_path.insert(0, Finder())
    try:
        with penstock.Loader.from_dataset(range(8), num_workers=1, multiprocessing_context="spawn") as loader:
            next(iter(loader))
    except Late as late:
        print(late)
"""


@pytest.mark.slow
def test_an_exception_while_a_public_module_is_imported_arrives_as_itself(run_script: Any, tmp_path: Path) -> None:
    """Fails if pickling is the first to look up a public name of penstock: pickle turns whatever is raised in that
    import into a PicklingError."""
    program = tmp_path / "importing.py"
    program.write_text(IMPORTING)
    assert run_script(program) == "from the handler\n"
