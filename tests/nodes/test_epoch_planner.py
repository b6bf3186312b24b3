"""SamplerWrapper as a state machine against a list of epochs, and samplers that remember."""

from __future__ import annotations

import multiprocessing
import warnings
import zlib
from contextlib import ExitStack
from threading import Lock
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock import StateMismatch
from penstock._fetch.indices import Indices
from penstock._nodes import sampler_reading
from penstock.nodes import SamplerWrapper

LENGTHS = [9, 0, 10, 6]
"""Items in epoch e, by e % 4."""
BROKEN = 2, 6
"""The epoch, by e % 4, and the item at which a sampler that breaks does."""
BLOCK = 4


def length_of(epoch: int) -> int:
    return LENGTHS[epoch % 4]


def items_of(epoch: int, batches: bool) -> list[Any]:
    """Item i of epoch e is 1000 * e + i, or a batch of i % 3 samples that go on from the batch before."""
    if not batches:
        return [1000 * epoch + i for i in range(length_of(epoch))]
    starts = np.cumsum([0] + [i % 3 for i in range(length_of(epoch))]).tolist()
    return [list(range(1000 * epoch + starts[i], 1000 * epoch + starts[i + 1])) for i in range(length_of(epoch))]


class Told:
    """The epochs of `items_of`, by `set_epoch`."""

    def __init__(self, batches: bool = False, breaks: bool = False) -> None:
        self.batches, self.breaks, self.epoch, self.readings = batches, breaks, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.readings += 1
        for i, item in enumerate(items_of(self.epoch, self.batches)):
            if self.breaks and (self.epoch % 4, i) == BROKEN:
                raise KeyError("no such bucket")
            yield item


class Sized(Told):
    def __len__(self) -> int:
        return length_of(self.epoch)


class Lying(Told):
    """One too many, of one epoch in four."""

    def __len__(self) -> int:
        return length_of(self.epoch) + (self.epoch % 4 == 3)


class Remembering:
    """The epochs of `items_of`, the next one once one was read to its end, whatever epoch it is asked for."""

    def __init__(self, batches: bool = False, breaks: bool = False) -> None:
        self.batches, self.epoch = batches, 0

    def __iter__(self) -> Any:
        yield from items_of(self.epoch, self.batches)
        self.epoch += 1


class Staying:
    """Cannot go to another process, but be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)(self.batches, self.breaks)  # type: ignore[attr-defined,call-arg]

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


class StayingTold(Staying, Told):
    pass


class StayingSized(Staying, Sized):
    pass


class StayingLying(Staying, Lying):
    pass


class StayingRemembering(Staying, Remembering):
    def __init__(self, batches: bool = False, breaks: bool = False) -> None:
        super().__init__(batches)
        self.breaks = False


KINDS: dict[str, list[Any]] = {
    "here": [Told, Sized, Lying],
    "thread": [StayingTold, StayingSized, StayingLying, StayingRemembering],  # once an epoch was read here
    "process": [Told, Sized, Lying, Remembering],
}


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_reading, "CHUNK", BLOCK)


def values(plan: Any) -> list[int]:
    return plan.values.tolist()  # type: ignore[no-any-return]


def test_a_memory_that_cannot_be_led_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Seen to fail: epoch 5 was given the order of epoch 1, without a word."""
    sampler = Remembering()
    sampler.lock = Lock()  # type: ignore[attr-defined]
    node = SamplerWrapper(sampler)
    assert len(list(node)) == length_of(0)
    assert not caplog.records
    node.reset(node.start(5))
    next(node)
    assert "Remembering can be neither pickled nor copied, so epoch 5 is what it yields next." in caplog.text
    node.shutdown()


class Grows:
    """Every epoch begins like the first, with an empty batch, and ends with one item more every few epochs."""

    def __init__(self, batches: bool, every: int) -> None:
        self.batches, self.every, self.epoch = batches, every, 0

    def __iter__(self) -> Any:
        for i in [*range(2 * BLOCK), *range(100, 100 + self.epoch // self.every)]:
            yield [i] * (i > 0) if self.batches else i
        self.epoch += 1


@pytest.mark.parametrize(("position", "every"), [(1, 1), (2 * BLOCK, 1)])
def test_a_memory_that_shows_only_at_the_end_of_an_epoch_is_found(blocks: None, position: int, every: int) -> None:
    """Where the state's checksum is that of any epoch. Seen to fail: epoch 3 ended like epoch 0."""
    node = SamplerWrapper(Grows(False, every))
    checksum = zlib.crc32(np.arange(position).astype("<i8").tobytes())
    node.reset({"epoch": 3, "position": position, "checksum": checksum})
    assert [item.values for item in node if item.values >= 100] == [100, 101, 102][: 3 // every]
    node.shutdown()


def test_a_state_of_another_run_is_refused_although_the_plan_is_in_hand() -> None:
    """Seen to fail: `read` that takes the plan of an epoch without a look at the checksum."""
    node = SamplerWrapper(Told(), plan_ahead=False)
    _, state = node.read(node.start(0), 5)
    with pytest.raises(StateMismatch):
        node.read({**state, "checksum": state["checksum"] ^ 1}, 1)
    assert node.read(state, 1)[0][0].values == 5


# SamplerWrapper, against a list of epochs.


class AgainstAList(RuleBasedStateMachine):
    """A `SamplerWrapper` read, reset, saved, interrupted, in blocks and in whole epochs, some empty and one that raises; a model says what must come.

    Seen to fail: `PlanSource.order` that keeps the plan under way whatever is asked for; `resume` that does not forget what was under way;
    ``next_epoch`` kept when an epoch was given up; `reset` that keeps a plan without comparing the checksum.
    """

    place = "here"

    @initialize(data=st.data(), batches=st.booleans(), breaks=st.booleans())
    def begin(self, data: Any, batches: bool, breaks: bool) -> None:
        self.patched = ExitStack()
        for name, size in (("CHUNK", BLOCK), ("LARGE", 100), ("BATCHES", 2)):
            self.patched.enter_context(mock.patch.object(sampler_reading, name, size))
        kind = data.draw(st.sampled_from(KINDS[self.place]))
        self.sampler = kind(batches, breaks)
        self.breaks = breaks and not issubclass(kind, Remembering)
        self.batches, self.is_sized, self.lies = batches, issubclass(kind, Sized | Lying), issubclass(kind, Lying)
        self.counts = self.is_sized
        self.node = SamplerWrapper(self.sampler, batches=batches, plan_ahead=self.place != "here")
        self.node.reset(None)
        self.epoch = self.position = 0
        self.place = self.node.start(0)
        self.states = [self.place]

    # The model.

    def item(self, position: int) -> Indices:
        items = items_of(self.epoch, self.batches)
        if not self.batches:
            return Indices(self.epoch, position, items[position])
        before = sum(map(len, items[:position]))
        return Indices(self.epoch, np.arange(before, before + len(items[position])), np.array(items[position], np.int64))

    def state(self) -> dict[str, int]:
        samples = np.hstack([np.empty(0, np.int64), *items_of(self.epoch, self.batches)[: self.position]]).astype("<i8")
        return {"epoch": self.epoch, "position": self.position, "checksum": zlib.crc32(samples.tobytes())}

    def raises(self, last: int) -> bool:
        """Whether reading up to item ``last`` meets the broken one: it is in a block that has been asked for, or in the epoch."""
        if not self.breaks or self.epoch % 4 != BROKEN[0]:
            return False
        return self.is_sized or last >= BROKEN[1] // BLOCK * BLOCK

    def reads(self, last: int, act: Any) -> Any:
        """What ``act`` gives, if it is not to raise; it reads up to item ``last``."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if self.raises(last):
                with pytest.raises(KeyError, match="no such bucket"):
                    act()
                return None
            given = act()
        if caught:
            assert self.lies, [str(warning.message) for warning in caught]
            assert self.epoch % 4 == 3
            assert len(caught) == 1, "and only once, because then it is no more `lies`"
            self.counts = self.lies = False
        return given

    # What may happen.

    @rule(n=st.integers(1, 5), every=st.integers(1, 3), first=st.integers(0, 2))
    def take(self, n: int, every: int, first: int) -> None:
        first = min(first, every - 1)
        end = min(self.position + n * every, length_of(self.epoch))
        given = self.reads(max(end - 1, self.position), lambda: self.node.read(self.place, n, every, first))
        if given is None:
            return
        items, self.place = given
        assert list(items) == [self.item(position) for position in range(self.position + first, end, every)]
        self.position = end
        self.states.append(self.place)

    @precondition(lambda self: self.is_sized and length_of(self.epoch))
    @rule(position=st.integers(0, 25))
    def look(self, position: int) -> None:
        given = self.reads(0, lambda: self.node.peek(self.place, np.array([position])))
        if given is not None and not self.batches:
            assert given[0] == Indices(self.epoch, position, items_of(self.epoch, False)[position % length_of(self.epoch)])

    @rule(data=st.data())
    def go_back(self, data: Any) -> None:
        self.stand_at(data.draw(st.sampled_from(self.states)))

    @rule(epoch=st.integers(0, 7))
    def jump(self, epoch: int) -> None:
        self.stand_at(self.node.start(epoch))

    @rule()
    def go_on(self) -> None:
        self.epoch += self.position > 0
        self.position = 0
        self.place = self.node.seek(self.node.restart(self.place))

    @rule()
    def next_epoch(self) -> None:
        self.stand_at(self.node.start(self.epoch + 1))

    @rule(epoch=st.integers(0, 7))
    def interrupt(self, epoch: int) -> None:
        self.node.interrupt()
        self.stand_at(self.node.start(epoch))

    @rule(data=st.data())
    def go_to_another_run(self, data: Any) -> None:
        """A state with the checksum of other samples."""
        # What does not fit is looked for behind a replay of the epochs before, and the replay of a broken one raises its error.
        states = [one for one in self.states if one["position"] and not (self.breaks and one["epoch"] >= BROKEN[0])]
        state = data.draw(st.sampled_from(states or [self.node.start(0)]))
        if not state["position"]:
            return
        here = self.place
        self.stand_at({**state, "checksum": state["checksum"] ^ 1})
        with pytest.raises(StateMismatch, match=rf"in epoch {self.epoch} up to position {self.position}: the state has the checksum"):
            self.node.read(self.place, 1)
        self.stand_at(here)

    def stand_at(self, state: dict[str, int]) -> None:
        self.node.check(state)
        self.place = self.node.seek(state)
        self.epoch, self.position = state["epoch"], state["position"]

    @invariant()
    def the_state_is_the_model_s(self) -> None:
        if hasattr(self, "node"):
            assert self.place == self.state()

    @invariant()
    def what_is_counted_is_true(self) -> None:
        if hasattr(self, "node"):
            items = self.node.claimed(self.epoch)
            true = length_of(self.epoch)
            if not self.counts:
                assert items in ((None,) if self.is_sized else (None, true))
            elif not self.lies or self.epoch % 4 != 3:
                assert items == true
            assert self.node.left(self.place) == (None if items is None else items - self.position)

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.shutdown()
            self.patched.close()


class InAThread(AgainstAList):
    place = "thread"


class InAProcess(AgainstAList):
    place = "process"


class TestHere(AgainstAList.TestCase):
    settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


class TestInAThread(InAThread.TestCase):
    settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@pytest.mark.slow
@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="blocks would be of the usual size")
class TestInAProcess(InAProcess.TestCase):
    settings = settings(max_examples=6, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
