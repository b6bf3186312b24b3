"""`DeliveryWindow`: a state machine against two plain lists."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock._nodes.delivery_window import DeliveryWindow, Entry
from penstock._workers.pool import Job
from penstock.nodes import EndOfEpoch

MARK, ERROR, ITEM = "mark", "error", "item"


def entry(kind: str, state: int) -> Entry:
    value = {MARK: EndOfEpoch(0), ERROR: ValueError(), ITEM: None}[kind]
    return Entry(value, Job(state) if kind == ITEM else None, state)


class Against(RuleBasedStateMachine):
    """The script lists the items of the source; its state after item k is k + 1. The model knows which items were delivered."""

    @initialize(
        script=st.lists(st.sampled_from([ITEM, ITEM, ITEM, MARK, ERROR]), min_size=5, max_size=30),
        in_order=st.booleans(),
        most=st.integers(1, 4),
        prefetch_next_epoch=st.booleans(),
        delivered=st.sets(st.integers(0, 4)),
    )
    def begin(self, script: list[str], in_order: bool, most: int, prefetch_next_epoch: bool, delivered: set[int]) -> None:
        self.script, self.most, self.prefetch_next_epoch = script, most, prefetch_next_epoch
        self.out = [place for place in sorted(delivered) if script[place] == ITEM]
        self.raised: int | None = None  # the last step raised this item, so the state is still the one before it
        self.begin_at(0, self.out, in_order)

    @precondition(lambda self: self.window.ahead or self.raised is not None)
    @rule(in_order=st.booleans(), most=st.integers(1, 4))
    def resume(self, in_order: bool, most: int) -> None:
        """Save the state, and continue from it in a new window, which may be narrower or wider."""
        self.most = most
        if self.raised is not None:
            self.out.remove(self.raised)
            self.raised = None
        self.begin_at(self.window.base, self.window.ahead, in_order)

    def begin_at(self, base: int, ahead: list[int], in_order: bool) -> None:
        self.window = DeliveryWindow(in_order)
        self.window.restart(base, ahead)
        self.pulled = base
        self.here: dict[int, Entry] = {}

    @rule()
    def fill(self) -> None:
        self.settle()
        while self.window.has_room(self.most, self.prefetch_next_epoch):
            self.pull()

    def pull(self) -> None:
        if self.pulled == len(self.script):
            self.window.exhaust()
            return
        place = self.pulled
        assert self.window.comes_delivered == (place in self.out)
        self.here[place] = Entry(None, None, place + 1) if place in self.out else entry(self.script[place], place + 1)
        self.window.push(self.here[place])
        self.pulled += 1

    def settle(self) -> None:
        """The next step begins."""
        if self.window.unsettled:
            self.window.settle()
        self.raised = None

    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        under_way = [one.job for one in self.here.values() if one.job is not None and not one.job.done]
        if under_way:
            data.draw(st.sampled_from(under_way)).done = True

    @precondition(lambda self: self.here)
    @rule(fails=st.booleans())
    def hand_out(self, fails: bool) -> None:
        self.settle()
        candidates = self.window.candidates()
        left = [place for place in self.here if place not in self.out]
        stop = next((k for k, place in enumerate(left) if self.script[place] != ITEM), len(left))
        expected = (left[: max(stop, 1)])[: 1 if self.window.in_order else None]
        assert [one.state - 1 for one in candidates] == expected
        one = next((one for one in candidates if one.job is None or one.job.done), None)
        if one is None:
            return
        place = one.state - 1
        self.out.append(place)
        if self.script[place] == ERROR or (fails and one.job is not None):
            self.window.fail(one)
            self.raised = place
        else:
            self.window.deliver(one)

    @invariant()
    def the_state_says_what_was_handed_out(self) -> None:
        """Seen to fail: `settle` that passes a waiting entry; distances from the newest entry; a failure that is settled at once."""
        if not hasattr(self, "window"):
            return
        settled = set(self.out) - {self.raised}
        assert {*range(self.window.base), *(self.window.base + place for place in self.window.ahead)} == settled
        assert self.window.under_way == sum(one.job is not None and not one.delivered for one in self.here.values())
        assert self.window.under_way <= self.most
        youngest = max(self.here, default=None)
        assert self.window.place == (self.window.base if youngest is None else youngest + 1)


class TestAgainstTwoLists(Against.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
