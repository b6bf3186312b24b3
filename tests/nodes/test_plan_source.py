"""PlanSource: plans made in a real thread, in a real process and here; one ahead, interrupted, jumped, failed and ended."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from penstock import ClosedError, WorkerDied
from penstock._nodes.epoch_planner import EpochPlanner
from penstock._nodes.plan_source import Place, PlanRequest, PlanSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AWAY: list[Place] = ["thread", "process"]


class Tenfold:
    """Plans 10 * epoch. Says that it has begun, and for epoch ``held`` waits until it may go on."""

    def __init__(self, place: Place, held: int = -1) -> None:
        self.place = place
        self.held = held
        self.begun, self.begin = os.pipe()
        self.gate, self.go = os.pipe()

    def __call__(self, request: PlanRequest) -> int:
        os.write(self.begin, bytes([request.epoch]))
        if request.epoch == self.held:
            os.read(self.gate, 1)
        return 10 * request.epoch

    def asked(self) -> int:
        """The next epoch that was begun."""
        return os.read(self.begun, 1)[0]

    def close(self) -> None:
        for fd in (self.begun, self.begin, self.gate, self.go):
            os.close(fd)


@pytest.fixture
def source() -> Iterator[Callable[..., tuple[PlanSource[int], Tenfold]]]:
    made: list[tuple[PlanSource[int], Tenfold]] = []

    def build(place: Place, held: int = -1) -> tuple[PlanSource[int], Tenfold]:
        planner = Tenfold(place, held)
        made.append((PlanSource(planner), planner))
        return made[-1]

    yield build
    for plans, planner in made:
        os.write(planner.go, b"!")
        plans.shutdown()
        planner.close()


@pytest.mark.parametrize("place", AWAY)
def test_what_is_ordered_is_made_meanwhile_and_once(source: Any, place: Place) -> None:
    """Seen to fail: `get` that submits what is under way already (epoch 1 was begun twice)."""
    plans, planner = source(place)
    assert plans.get(PlanRequest(0)) == 0
    plans.order(PlanRequest(1))
    assert [planner.asked(), planner.asked()] == [0, 1], "nobody has waited for epoch 1"
    plans.order(PlanRequest(1))
    assert plans.get(PlanRequest(1)) == 10
    assert plans.get(PlanRequest(2)) == 20
    assert planner.asked() == 2


@pytest.mark.parametrize("place", AWAY)
def test_a_jump_is_answered_behind_what_is_under_way(source: Any, place: Place) -> None:
    """Seen to fail: the plan under way given for the one asked for."""
    plans, planner = source(place, held=1)
    assert plans.get(PlanRequest(0)) == 0
    plans.order(PlanRequest(1))
    assert [planner.asked(), planner.asked()] == [0, 1]
    os.write(planner.go, b"!")
    assert plans.get(PlanRequest(7)) == 70
    assert plans.get(PlanRequest(2)) == 20


@pytest.mark.parametrize("place", AWAY)
def test_an_interrupt_gets_a_waiting_get_out_until_it_is_resumed(source: Any, place: Place) -> None:
    """Seen to fail: `resume` that keeps what was under way (a job that the pool has forgotten is waited for forever)."""
    plans, planner = source(place, held=1)
    told = []

    def read() -> None:
        with pytest.raises(ClosedError) as caught:
            plans.get(PlanRequest(1))
        told.append(caught.type)

    reader = threading.Thread(target=read)
    reader.start()
    assert planner.asked() == 1
    plans.interrupt()
    reader.join(100)
    assert told == [ClosedError]
    with pytest.raises(ClosedError):
        plans.get(PlanRequest(1))
    plans.resume()
    os.write(planner.go, b"!!")
    assert plans.get(PlanRequest(1)) == 10


@pytest.mark.parametrize("place", AWAY)
def test_a_plan_that_is_ready_outlives_an_interrupt(source: Any, place: Place) -> None:
    """A sampler that can only go forward would give another one. Seen to fail: `resume` that drops whatever was ordered (epoch 1 was begun twice)."""
    plans, planner = source(place)
    assert plans.get(PlanRequest(0)) == 0
    plans.order(PlanRequest(1))
    plans._pool.wait([plans._ordered[1]], 20)
    plans.interrupt()
    plans.resume()
    assert plans.get(PlanRequest(1)) == 10
    assert plans.get(PlanRequest(2)) == 20
    assert [planner.asked() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("place", AWAY)
def test_an_interrupt_before_the_first_plan_is_not_lost(source: Any, place: Place) -> None:
    """Seen to hang: the wait began behind it, because there was no pool yet to tell."""
    plans, planner = source(place, held=0)
    plans.interrupt()
    with pytest.raises(ClosedError):
        plans.get(PlanRequest(0))
    plans.resume()
    os.write(planner.go, b"!")
    assert plans.get(PlanRequest(1)) == 10


@pytest.mark.parametrize("place", AWAY)
def test_none_is_made_behind_the_end(source: Any, place: Place) -> None:
    plans, _ = source(place)
    assert plans.get(PlanRequest(0)) == 0
    plans.shutdown()
    plans.shutdown()
    with pytest.raises(ClosedError):
        plans.get(PlanRequest(1))


@pytest.mark.parametrize("place", AWAY)
def test_nothing_is_started_behind_the_end(place: Place) -> None:
    """A handler, or another thread, may close the loader while the planner is asked where it plans. Seen to fail: what was started then stayed."""

    class Closes:
        @property
        def place(self) -> Place:
            plans.shutdown()
            return place

        def __call__(self, request: PlanRequest) -> int:
            return 0

    plans = PlanSource(Closes())
    with pytest.raises(ClosedError):
        plans.get(PlanRequest(0))


def test_a_planner_may_move_after_a_plan_that_was_made_here(source: Any) -> None:
    plans, planner = source("here")
    plans.order(PlanRequest(5))
    assert plans.get(PlanRequest(0)) == 0
    assert planner.asked() == 0, "nothing is made ahead here"
    planner.place = "thread"
    plans.order(PlanRequest(1))
    assert planner.asked() == 1
    assert plans.get(PlanRequest(1)) == 10


class Broken:
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise KeyError("no such bucket")


class Fatal:
    def __iter__(self) -> Iterator[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield 0


def test_an_error_from_the_process_shows_the_user_s_frames_and_no_others() -> None:
    """Seen to fail: the traceback as it was raised, which begins in the worker's loop."""
    plans = PlanSource(EpochPlanner(Broken(), 0, batches=False))
    with pytest.raises(KeyError, match="no such bucket") as caught:
        plans.get(PlanRequest(3))
    plans.shutdown()
    shown = str(caught.value.__cause__)
    assert "in __iter__" in shown
    assert "penstock" not in shown.replace(__file__, "")
    assert "while Broken was asked for the indices of epoch 3" in caught.value.__notes__


def test_a_process_that_dies_names_the_epoch_and_the_remedy() -> None:
    """And is not replaced: another one would not know how far the sampler was read."""
    plans = PlanSource(EpochPlanner(Fatal(), 0, batches=False))
    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"the plan of epoch 0: signal SIGKILL.*plan_ahead=False"):
            plans.get(PlanRequest(0))
    plans.shutdown()
