"""DeliveryWindow: against what was pulled and delivered, by number."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock._nodes.delivery_window import DeliveryWindow, Entry
from penstock._nodes.node import EndOfEpoch
from penstock._workers.pool import Job

YES, NO = (lambda: True), (lambda: False)


def push(window: DeliveryWindow, value: Any = None) -> Entry:
    """Pull one more item: a marker or an error as ``value``, else a job. The state after the n-th item since the start
    is n."""
    job = None if value is not None or window.comes_delivered else Job(window.place)
    window.push(entry := Entry(value, job, window.place + 1))
    return entry


def window_of(
    *values: Any, in_order: bool = True, base: int = 0, delivered: tuple[int, ...] = ()
) -> tuple[DeliveryWindow, list[Entry]]:
    window = DeliveryWindow(in_order)
    window.restart(base, delivered)
    return window, [push(window, value) for value in values]


def state_of(window: DeliveryWindow) -> tuple[int, list[int]]:
    return window.base, window.ahead


STEPS = ["pull"] * 4 + ["deliver"] * 4 + ["fail", "load"]


def test_each_item_is_delivered_once_wherever_the_state_is_loaded() -> None:
    """Items are pulled, delivered or fail in any order that `candidates` allows, and the state is loaded at any step:
    walks by chance.

    Seen to fail: `restart` that forgets what was delivered; `_count_ahead` without what will be pulled; `push` that
    leaves a delivered entry in front; `fail` that moves the state at once; and `candidates` with an entry that was
    delivered.
    """
    for seed in range(100):
        walk(random.Random(seed))


def walk(chance: random.Random) -> None:
    in_order = chance.random() < 0.2
    window, entries = window_of(in_order=in_order, base=100)[0], {}
    gone: set[int] = set()
    for step in chance.choices(STEPS, k=40):
        if step == "pull":
            number = window.place
            assert window.comes_delivered == (number in gone)
            entries[number] = push(window)
        elif step == "load":
            entries = {}
            in_order = chance.random() < 0.2
            base, ahead = state_of(window)
            window = window_of(in_order=in_order, base=base, delivered=tuple(ahead))[0]
        elif window.candidates():
            entry = chance.choice(window.candidates())
            number = entry.state - 1
            assert number not in gone
            if step == "deliver":
                window.deliver(entry)
            else:
                before = state_of(window)
                window.fail(entry)
                assert (state_of(window), window.unsettled, window.is_clear) == (before, True, False)
                window.settle()
            gone.add(number)
        undone = [number for number in entries if number not in gone]
        pulled = max(entries, default=window.base - 1) + 1
        oldest = min(undone, default=pulled)
        assert state_of(window) == (oldest, [number - oldest for number in sorted(gone) if number >= oldest])
        assert window.candidates() == [entries[number] for number in (undone[:1] if in_order else undone)]
        assert (window.under_way, window.place, window.unsettled) == (len(undone), pulled, False)
        assert window.has_room(3, NO) == (len(undone) < 3 and pulled - oldest < 16)


def test_a_marker_or_an_error_is_never_passed() -> None:
    """Seen to fail: `candidates` that looks behind a marker, or gives none if it comes first."""
    window, (first, second, marker, third) = window_of(None, None, EndOfEpoch(0), None, in_order=False)
    assert window.candidates() == [first, second]
    window.deliver(second)
    assert window.candidates() == [first]
    window.deliver(first)
    assert (window.candidates(), window.under_way, state_of(window)) == ([marker], 1, (2, []))
    window.deliver(marker)
    assert (window.candidates(), window.under_way, state_of(window)) == ([third], 1, (3, []))


@pytest.mark.parametrize("in_order", [True, False])
def test_the_end_of_the_source_is_no_candidate_and_needs_the_window(in_order: bool) -> None:
    window, (only,) = window_of(None, in_order=in_order)
    window.exhaust()
    assert (window.candidates(), window.has_room(3, YES), window.is_clear) == ([only], False, False)
    window.deliver(only)
    assert (window.candidates(), window.has_room(3, YES), window.is_clear) == ([], False, False)
    window.restart(0)
    assert (window.has_room(3, YES), window.is_clear) == (True, True)


def test_there_is_room_behind_a_marker_if_it_may_be_passed_and_never_behind_an_empty_epoch_or_an_error() -> None:
    """Seen to fail: a source without items that is pulled forever; an item pulled behind an error that nobody has
    seen."""
    window, _ = window_of(None, EndOfEpoch(0))
    assert (window.has_room(3, YES), window.has_room(3, NO), window.holds_error) == (True, False, False)
    push(window, EndOfEpoch(1))
    assert not window.has_room(3, YES)
    window, _ = window_of(EndOfEpoch(0), EndOfEpoch(1))
    assert not window.has_room(3, YES)
    window, _ = window_of(EndOfEpoch(0))
    assert (window.has_room(3, YES), window.has_room(3, NO)) == (True, False)
    window, (error,) = window_of(ValueError("source"))
    assert (window.has_room(3, YES), window.holds_error) == (False, True)
    window.fail(error)
    window.settle()
    assert (window.has_room(3, YES), window.holds_error, state_of(window)) == (True, False, (1, []))


def test_as_many_jobs_are_under_way_as_there_may_be_and_four_times_as_many_entries_wait() -> None:
    """Seen to fail: a window that grows without bound behind one slow item."""
    window, (oldest,) = window_of(None, in_order=False)
    for pulled in range(1, 12):
        assert window.has_room(2, NO), pulled
        window.deliver(push(window))
    assert not window.has_room(2, NO)
    assert (window.under_way, window.candidates(), state_of(window)) == (1, [oldest], (0, list(range(1, 12))))
    assert [window_of(None, None)[0].has_room(most, NO) for most in (1, 2, 3)] == [False, False, True]


def test_ready_counts_jobs_that_are_done_and_not_delivered() -> None:
    window, (first, second, _, _) = window_of(None, None, None, EndOfEpoch(0), in_order=False)
    assert window.ready() == 0
    first.job.done = second.job.done = True
    assert window.ready() == 2
    window.deliver(second)
    assert window.ready() == 1


def test_a_failed_job_is_forgotten_and_its_error_can_be_raised_until_then() -> None:
    error = ValueError("source")
    window, (entry,) = window_of(error)
    with pytest.raises(ValueError, match="source") as raised:
        entry.raise_value()
    assert raised.value is error
    window.fail(entry)
    assert (entry.value, window.under_way) == (None, 0)
    window, (entry,) = window_of(None)
    entry.job.error, entry.job.done = error, True
    window.fail(entry)
    assert (entry.job.error, window.under_way, state_of(window)) == (None, 0, (0, []))
