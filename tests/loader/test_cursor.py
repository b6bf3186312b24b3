"""Where a loader's next iterator starts, whatever a trainer calls before it and in whatever order: a state machine against a list of epochs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock import Loader, StateError
from penstock.testing import Tagged

N = 2


def saved() -> dict[tuple[int, int], Any]:
    """The states of two epochs, by epoch and position."""
    with Loader.from_dataset(Tagged(N)) as loader:
        states = {(0, 0): loader.state_dict()}
        for _ in range(2):
            for _ in loader:
                states[loader.epoch, loader.position] = loader.state_dict()
            states[loader.epoch, 0] = loader.state_dict()
    return states


STATES = saved()
AHEAD = st.sampled_from([0, 1, 1, 2, -1])
"""Which epoch is asked for, counted from the one where the loader stands."""


class AgainstAList(RuleBasedStateMachine):
    """At each step the numbers and the state are compared. The model is where the loader stands (a position of `N`: at the end of the epoch, which nobody has seen yet) and what was asked of it since.

    Seen to fail: an `end_epoch` that is not idempotent, or that behind an end gives up the next epoch; `fresh` not set by a mark; the sampler's view
    refused like a request; a completed epoch taken for another one; `load` that keeps the end unseen whatever ``restart_on_stop_iteration`` says.
    """

    @initialize(
        restart=st.sampled_from([None, True, False]), infinite=st.sampled_from([False, False, True]), workers=st.sampled_from([0, 0, 0, 2])
    )
    def begin(self, restart: bool | None, infinite: bool, workers: int) -> None:
        self.restart, self.infinite = restart, infinite
        words: dict[str, Any] = {"infinite": infinite, "restart_on_stop_iteration": restart, "num_workers": workers, "method": "thread"}
        self.loader = Loader.from_dataset(Tagged(N), **words)
        self.iterator: Any = None
        self.at = (0, 0)
        self.loaded = False
        self.asked: int | None = None
        self.by_sampler = False

    @property
    def here(self) -> tuple[int, int]:
        epoch, position = self.at
        return (epoch + 1, 0) if self.loaded and self.restart and position == N else self.at

    def target(self) -> tuple[int, int] | None:
        """Where the next iterator starts; None: it is refused."""
        (epoch, position), asked = self.at, self.asked
        completes = position == N and asked == epoch + 1
        if not self.loaded:
            if asked is not None:
                return asked, 0
            return self.at if position == 0 or self.infinite else (epoch + 1, 0)
        if self.by_sampler and not completes:
            asked = None
        if asked not in (None, epoch) and not completes:
            return None
        passes = completes or self.infinite or (self.restart is True and asked is None)
        return (epoch + 1, 0) if passes and position == N else self.at

    @rule(items=st.integers(1, N + 2), ahead=st.none() | AHEAD, by_sampler=st.booleans())
    def start(self, items: int, ahead: int | None, by_sampler: bool) -> None:
        if ahead is not None:
            self.ask(ahead, by_sampler)
        target, iterator = self.target(), iter(self.loader)
        self.asked = None
        if target is None:
            with pytest.raises(StateError, match=f"the loaded state is in epoch {self.here[0]}. Start your loop at loader.epoch"):
                next(iterator)
            self.iterator = None
            return
        if self.iterator is not None:
            self.older = self.iterator
        self.at, self.loaded, self.iterator = target, False, iterator
        self.read(items)

    @precondition(lambda self: self.iterator is not None)
    @rule(items=st.integers(1, N + 1))
    def read(self, items: int) -> None:
        while items and self.iterator is not None:
            self.advance()
            items -= 1

    def advance(self) -> None:
        epoch, position = self.at
        if self.infinite and position == N:
            epoch, position = epoch + 1, 0
        batch = next(self.iterator, None)
        if position < N:
            assert batch is not None
            assert batch.tolist() == [1000 * epoch + position]
            self.at = epoch, position + 1
            return
        assert batch is None
        assert list(self.iterator) == []
        self.at, self.iterator = self.at if self.restart is False else (epoch + 1, 0), None

    @precondition(lambda self: self.iterator is not None and hasattr(self, "older"))
    @rule()
    def take_from_an_older_one(self) -> None:
        with pytest.raises(RuntimeError, match="newer one|a state was loaded"):
            next(self.older)
        del self.older

    @rule()
    def make_one_that_never_starts(self) -> None:
        iter(self.loader)

    @rule(at=st.sampled_from(sorted(STATES)))
    def load(self, at: tuple[int, int]) -> None:
        self.loader.load_state_dict(STATES[at])
        if self.iterator is not None:
            with pytest.raises(RuntimeError, match="a state was loaded"):
                next(self.iterator)
        self.at, self.loaded, self.iterator = at, True, None
        if self.restart is False and self.at[0] and not self.at[1]:
            self.at = self.at[0] - 1, N  # the end of the epoch before is to be seen again

    @rule(at=st.sampled_from(sorted(STATES)), items=st.integers(1, N + 2), ahead=st.none() | AHEAD, by_sampler=st.booleans())
    def resume(self, at: tuple[int, int], **words: Any) -> None:
        self.load(at)
        self.start(**words)

    @rule(ahead=AHEAD, by_sampler=st.booleans())
    def ask(self, ahead: int, by_sampler: bool) -> None:
        if self.infinite:
            return
        self.asked, self.by_sampler = max(0, self.at[0] + ahead), by_sampler
        (self.loader.sampler if by_sampler else self.loader).set_epoch(self.asked)

    @rule()
    def end_epoch(self) -> None:
        self.loader.end_epoch()
        if self.at[1]:
            assert self.iterator is None or list(self.iterator) == []
            self.at, self.loaded, self.iterator = (self.at[0] + 1, 0), False, None

    @rule()
    def refresh(self) -> None:
        self.loader.refresh()

    @invariant()
    def numbers_agree(self) -> None:
        if hasattr(self, "loader"):
            told = self.loader.epoch, self.loader.position, self.loader.remaining, self.loader.is_last
            assert told == (*self.here, N - self.here[1], self.here[1] == N)
            assert self.at not in STATES or self.at[1] == N or self.loader.state_dict() == STATES[self.at]
            assert self.infinite or len(self.loader) == N

    def teardown(self) -> None:
        if hasattr(self, "loader"):
            self.loader.close()


AgainstAList.TestCase.settings = settings(max_examples=200, stateful_step_count=15, deadline=None, phases=[Phase.generate, Phase.shrink])
TestAgainstAList = AgainstAList.TestCase
