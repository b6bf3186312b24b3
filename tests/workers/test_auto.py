"""The number of workers, decided from measurements: tables of made-up machines, and Hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock._workers.auto import Controller, Measurement

MOST = 16
Machine = Callable[[int], Measurement]


def machine(speed: Callable[[int], float], step_s: float, most: int = MOST, seem_busy: float = 1.0) -> Machine:
    """Workers that deliver ``speed(n)`` batches a second if nobody makes them wait, to a loop whose steps take
    ``step_s``.

    They seem to be at work for less of that time, by the factor ``seem_busy``, as if they waited for each other.
    """

    def measured(workers: int) -> Measurement:
        rate = speed(workers) if step_s == 0 else min(speed(workers), 1 / step_s)
        return Measurement(
            workers,
            rate,
            stall=max(0.0, 1 - rate * step_s),
            busy=seem_busy * min(workers, workers * rate / speed(workers)),
            most=most,
        )

    return measured


def run(controller: Controller, of: Machine, measurements: int = 60) -> list[int]:
    """The numbers that it takes, without repeats."""
    numbers = [controller.number]
    for _ in range(measurements):
        if (number := controller.decide(of(controller.number))) != numbers[-1]:
            numbers.append(number)
    return numbers


def linear(workers: int) -> float:
    return float(workers)


def two_cores(workers: int) -> float:
    return min(workers, 2.0)


def disk(workers: int) -> float:
    """Four and a half workers saturate it."""
    return min(workers, 4.5)


@pytest.mark.parametrize(
    ("speed", "step_s", "most", "numbers"),
    [
        pytest.param(linear, 2.0, MOST, [1], id="the loop is slower than one worker"),
        pytest.param(linear, 0.0, MOST, [1, 2, 4, 8, 16], id="waiting, and a loop that does nothing"),
        pytest.param(linear, 1 / 6, MOST, [1, 2, 4, 6], id="waiting, and six are enough"),
        pytest.param(linear, 1 / 3.2, MOST, [1, 2, 4], id="waiting, and four are enough"),
        pytest.param(linear, 1 / 1.2, MOST, [1, 2], id="waiting, and two are enough"),
        pytest.param(lambda n: float(n * n), 1 / 7, MOST, [1, 2, 4, 3], id="too many, of whom some are idle"),
        pytest.param(two_cores, 0.0, MOST, [1, 2, 4, 2], id="what does not help is given back"),
        pytest.param(two_cores, 0.0, 2, [1, 2], id="the bound"),
        pytest.param(lambda n: 1.0, 0.0, MOST, [1, 2, 1], id="tiny work, which one worker hands over as fast"),
        pytest.param(lambda n: 1 / n, 0.0, MOST, [1, 2, 1], id="threads that fight for a lock"),
        pytest.param(disk, 0.0, MOST, [1, 2, 4, 8, 6], id="a disk that five saturate"),
        pytest.param(lambda n: min(n, 5.5), 0.0, MOST, [1, 2, 4, 8, 6], id="half of the growth was worth it"),
        pytest.param(lambda n: min(n, 13.0), 0.0, MOST, [1, 2, 4, 8, 16], id="most of the growth was worth it"),
    ],
)
def test_the_numbers_that_it_takes(speed: Callable[[int], float], step_s: float, most: int, numbers: list[int]) -> None:
    """Seen to fail: growth kept that gained nothing; idle workers that stayed."""
    controller = Controller()
    assert run(controller, machine(speed, step_s, most)) == numbers
    assert controller.settled
    assert controller.changes == len(numbers) - 1


def test_one_odd_measurement_changes_nothing() -> None:
    """A hiccup in the middle of growing: measured again before anything is given back. Seen to fail: given back at
    once."""
    controller, of = Controller(), machine(linear, 1 / 6)
    while controller.number < 4:
        controller.decide(of(controller.number))
    assert controller.decide(Measurement(4, rate=1.0, stall=0.8, busy=4, most=MOST)) == 4
    run(controller, of)
    assert controller.number == 6
    assert controller.decide(Measurement(6, rate=0.1, stall=0.9, busy=6, most=MOST)) == 6
    assert controller.decide(of(6)) == 6
    assert controller.settled


def test_it_follows_a_loop_that_becomes_faster_and_slower() -> None:
    """Seen to fail: a settled number that stayed for good."""
    controller = Controller()
    run(controller, machine(linear, 1 / 3))
    assert controller.number == 3
    run(controller, machine(linear, 1 / 9))
    assert 9 <= controller.number <= 10
    run(controller, machine(linear, 2.0))
    assert controller.number == 2


def test_it_takes_longer_to_be_moved_each_time() -> None:
    """A loop that changes after every few measurements. Seen to fail: patience that does not grow."""
    controller = Controller()
    for turn in range(400):
        run(controller, machine(linear, (1 / 3, 1 / 9)[turn % 2]), measurements=8)
    assert controller.changes < 60


def test_less_room_is_heeded_at_once_and_more_is_used() -> None:
    """Seen to fail: more workers than there may be, until the next growing."""
    controller = Controller()
    run(controller, machine(linear, 0.0, most=8))
    assert controller.number == 8
    assert controller.decide(machine(linear, 0.0, most=3)(8)) == 3
    assert "allows no more" in controller.why
    run(controller, machine(linear, 0.0, most=12))
    assert controller.number == 12


def test_a_number_that_the_system_refuses_is_not_asked_for_again_at_once() -> None:
    controller, of = Controller(), machine(linear, 0.0)
    while controller.number < 4:
        controller.decide(of(controller.number))
    controller.refused(3)
    assert (controller.number, controller.settled) == (3, True)
    assert run(controller, of, measurements=2) == [3]


@settings(max_examples=100, deadline=None)
@example(gains=[1.7] * 40, step_s=1 / 6, most=MOST, seem_busy=0.3)  # six are needed, and two of them seem to be
@given(
    gains=st.lists(st.floats(0.3, 2.0), min_size=40, max_size=40),
    step_s=st.one_of(st.just(0.0), st.floats(0.001, 5.0)),
    most=st.integers(1, 40),
    seem_busy=st.floats(0.1, 1.0),
)
def test_constant_measurements_settle_after_a_bounded_number_of_changes(
    gains: list[float], step_s: float, most: int, seem_busy: float
) -> None:
    """Any machine whatever, also one on which more workers are slower now and then. Seen to fail: idle workers were
    tried again and again, whether or not the loop had changed."""
    speeds = [1.0]
    for number, gain in enumerate(gains, 1):
        speeds.append(speeds[-1] * (1 + (gain - 0.7) / number))
    controller, of = Controller(), machine(lambda n: speeds[n], step_s, most, seem_busy)
    run(controller, of, 100)
    assert controller.settled
    before = controller.changes
    assert before <= 4 + 3 * math.ceil(math.log2(most + 1))
    run(controller, of, 300)
    assert controller.changes == before


ANYTHING = st.tuples(
    st.floats(0.0, 1e6), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(1, 64), st.integers(1, 40), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ANYTHING, max_size=20))
def test_measurements_that_make_no_sense_together_leave_it_within_bounds(
    measured: list[tuple[float, float, float, int, int, bool]],
) -> None:
    controller = Controller()
    for rate, stall, busy, most, times, refuses in measured:
        for _ in range(times):
            number = controller.number
            assert controller.decide(Measurement(number, rate, stall, busy * number, most)) == controller.number
            assert 1 <= controller.number <= most
            assert controller.why
        if refuses and controller.number > 1:
            controller.refused(controller.number - 1)
            assert 1 <= controller.number <= most
