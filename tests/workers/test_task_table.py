"""TaskTable: interrupted at every line, and as a state machine against lists."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strikes import Strikes

from penstock import ClosedError, WorkerDied
from penstock._workers.pool import Job
from penstock._workers.processes import task_table
from penstock._workers.processes.task_table import TaskTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._workers.processes.task_table import PendingTask


class CountedJob(Job):
    """Counts how often it is settled."""

    def __init__(self, task: Any) -> None:
        self.settled = 0
        super().__init__(task)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "done" and value:
            self.settled += 1


def table_of(count: int, owners: Sequence[int | None] = ()) -> tuple[TaskTable, list[CountedJob]]:
    """A table of ``count`` tasks; the first have ``owners``."""
    table, jobs = TaskTable(), [CountedJob(n) for n in range(count)]
    for job, owner in itertools.zip_longest(jobs, owners):
        table.add(job, b"%d" % job.task, owner)
    return table, jobs


def taken(table: TaskTable, owner: int | None = None) -> PendingTask:
    """The next task, which there must be."""
    task = table.take(owner)
    assert task is not None
    return task


def drained(table: TaskTable, owner: int | None = None) -> list[int]:
    """Take and finish all tasks that wait for ``owner``, in order."""
    tasks = list(iter(lambda: table.take(owner), None))
    for task in tasks:
        table.finish(task, task.body)
    return [task.number for task in tasks]


CHANGES: dict[str, Callable[[TaskTable, list[PendingTask]], Any]] = {
    "add": lambda table, held: table.add(CountedJob(5), b"5"),
    "add for an owner": lambda table, held: table.add(CountedJob(5), b"5", 1),
    "take": lambda table, held: table.take(),
    "take what is owned": lambda table, held: table.take(1),
    "finish": lambda table, held: table.finish(held[0], held[0].body),
    "blame": lambda table, held: table.blame(held[0], 7),
    "requeue": lambda table, held: table.requeue(held),
    "restart": lambda table, held: table.restart(),
    "discard": lambda table, held: table.discard(lambda: ClosedError("moved")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_restart_mends_a_change_that_was_interrupted_at_any_line(name: str) -> None:
    """Seen to fail: `restart` that keeps the backlog; that brings back jobs that are done; `finish` that forgets a task
    before its job is done."""
    strikes, stopped = Strikes(within=task_table.__file__, each_time=True), True
    while stopped:
        table, jobs = table_of(7, [None, None, None, None, None, 1, 1])
        held = [taken(table), taken(table), taken(table)]
        table.finish(held.pop(), b"2")
        _, stopped = strikes(lambda table=table, held=held: CHANGES[name](table, held))
        table.restart()
        undone = [job.task for job in jobs if not job.done]
        assert [*drained(table)[: len([n for n in undone if n < 5])], *drained(table, 1)[:2]] == undone, strikes.last
        assert [job.settled for job in jobs] == [1] * 7, strikes.last
        assert all(job.value == b"%d" % job.task and job.error is None for job in jobs if job.task in undone), (
            strikes.last
        )
    assert strikes.at


def test_a_signal_handler_may_discard_everything_in_the_middle_of_finish() -> None:
    """Seen to fail: `finish` that expects the task to be wanted still."""

    class Struck(CountedJob):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "value" and value is not None:
                table.discard(lambda: ClosedError("moved"))

    table = TaskTable()
    table.add(job := Struck(0), b"0")
    table.finish(taken(table), b"0")
    assert (job.done, job.value, job.error, len(table)) == (True, b"0", None, 0)


class AgainstLists(RuleBasedStateMachine):
    """Workers do tasks in order and may die at any time; lists say where every task should be. Some tasks have an
    owner, one of the workers.

    Seen to fail: `requeue` without `reversed`; `requeue` and `restart` that bring back what was discarded; `discard`
    that keeps the backlog; `restart` without what the workers held; `finish` that settles a job twice, or counts it as
    another number; `waiting_for` that counts the tasks of other owners; `fail` that gives the tasks so far another
    error.
    """

    @initialize()
    def begin(self) -> None:
        self.table = TaskTable()
        self.jobs: list[CountedJob] = []
        self.expected: dict[int, Any] = {}  # the result of each task that has ended
        self.finished = 0
        self.owners: list[int | None] = []
        self.backlog: dict[int | None, list[int]] = {None: [], 0: [], 1: []}  # by owner
        self.workers: list[list[PendingTask]] = [[], []]
        self.deaths: list[tuple[int, int]] = []

    @rule(count=st.integers(1, 4), owner=st.sampled_from([None, 0, 1]))
    def submit(self, count: int, owner: int | None) -> None:
        for number in range(len(self.jobs), len(self.jobs) + count):
            self.jobs.append(CountedJob(number))
            self.owners.append(owner)
            self.table.add(self.jobs[-1], b"%d" % number, owner)
            self.backlog[owner].append(number)

    @rule(worker=st.integers(0, 1), count=st.integers(1, 4), own=st.booleans())
    def feed(self, worker: int, count: int, own: bool) -> None:
        owner = worker if own else None
        for number in self.backlog[owner][:count]:
            task = taken(self.table, owner)
            assert (task.number, task.body, task.job, task.owner) == (number, b"%d" % number, self.jobs[number], owner)
            self.workers[worker].append(task)
        del self.backlog[owner][:count]
        assert self.backlog[owner] or self.table.take(owner) is None

    def end(self, task: PendingTask, value: Any = None, error: Any = None) -> None:
        self.finished += task.number not in self.expected
        self.expected.setdefault(task.number, error or value)
        self.table.finish(task, value, error)

    def busy(self, number: int) -> list[PendingTask]:
        """The tasks of one of the workers that hold any."""
        workers = [tasks for tasks in self.workers if tasks]
        return workers[number % len(workers)]

    @precondition(lambda self: any(self.workers))
    @rule(worker=st.integers(0, 1), fails=st.booleans())
    def answer(self, worker: int, fails: bool) -> None:
        task = self.busy(worker).pop(0)
        self.end(task, *((None, ValueError(task.number)) if fails else (task.number, None)))

    @precondition(lambda self: any(self.workers))
    @rule(worker=st.integers(0, 1), row=st.sampled_from([0, 1, None]))
    def die(self, worker: int, row: int | None) -> None:
        """On ``row`` of its oldest task; None: between two tasks."""
        held = self.busy(worker)
        if row is not None:
            again = (held[0].number, row) in self.deaths
            assert self.table.blame(held[0], row) == again
            self.deaths.append((held[0].number, row))
            if again:
                self.end(held[0], error=ChildProcessError(row))
        self.table.requeue(held)
        for owner, backlog in self.backlog.items():
            backlog[:0] = [task.number for task in held if task.number not in self.expected and task.owner == owner]
        held.clear()

    @precondition(lambda self: any(self.workers))
    @rule(worker=st.integers(0, 1))
    def give_up(self, worker: int) -> None:
        """The worker still holds the task, until it dies or answers after all."""
        self.end(self.busy(worker)[0], error=TimeoutError())

    @rule()
    def discard(self) -> None:
        self.table.discard(lambda: ClosedError("moved"))
        self.end_all(ClosedError)

    @rule()
    def restart(self) -> None:
        self.table.restart()
        self.workers = [[], []]
        undone = [number for number in range(len(self.jobs)) if number not in self.expected]
        self.backlog = {owner: [number for number in undone if self.owners[number] == owner] for owner in self.backlog}

    def end_all(self, error: Any) -> None:
        self.backlog = {None: [], 0: [], 1: []}
        for number in range(len(self.jobs)):
            self.expected.setdefault(number, error)

    @invariant()
    def every_job_is_where_it_should_be(self) -> None:
        if not hasattr(self, "table"):
            return
        assert self.table.waiting == sum(map(len, self.backlog.values()))
        assert {owner: self.table.waiting_for(owner) for owner in self.backlog} == {
            owner: len(tasks) for owner, tasks in self.backlog.items()
        }
        assert self.table.finished == self.finished
        assert self.table.owned or not (self.backlog[0] or self.backlog[1])
        assert len(self.table) == len(self.jobs) - len(self.expected)
        assert self.table.next_number == len(self.jobs)
        assert [job.settled for job in self.jobs] == [int(number in self.expected) for number in range(len(self.jobs))]
        for number, outcome in self.expected.items():
            job = self.jobs[number]
            assert outcome in (job.value, job.error, type(job.error))

    def teardown(self) -> None:
        """Whatever happened, each remaining task is done exactly once."""
        if not hasattr(self, "table"):
            return
        while any(self.workers):
            self.die(0, None)
        assert {owner: drained(self.table, owner) for owner in self.backlog} == self.backlog
        assert [job.settled for job in self.jobs] == [1] * len(self.jobs)
        jobs = [CountedJob(None), CountedJob(None)]
        self.table.add(jobs[0], b"")
        self.table.fail(lambda: WorkerDied("once too often"))
        self.table.add(jobs[1], b"")
        assert [(type(job.error), job.settled) for job in jobs] == [(WorkerDied, 1)] * 2
        assert (len(self.table), self.table.waiting) == (0, 0)


class TestAgainstLists(AgainstLists.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
