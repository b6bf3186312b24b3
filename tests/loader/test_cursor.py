"""Where a loader's next iterator starts, whatever a trainer calls before it and in whatever order: a state machine against a list of epochs."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torchdata.nodes
from epochs import restarting
from fuzz import fuzzed
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from resumable import Resumable
from torch.utils.data import DistributedSampler, IterableDataset

from penstock import Loader, StateError
from penstock.testing import Tagged, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AHEAD = st.sampled_from([0, 1, 1, 2, -1])
"""Which epoch is asked for, counted from the one where the loader stands."""


class Told:
    """Epoch e has 1 to 3 batches, which begin at 100 * e."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.epoch % 3 + 1

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[100 * self.epoch + k] * (k + 1) for k in range(len(self))])


class Stays(Told):
    """Cannot go to another process, but be copied."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")

    def __deepcopy__(self, memo: Any) -> Any:
        return Stays()


class Remembers(Told):
    """Goes on to the next epoch by itself, and does not say how long one is."""

    set_epoch = __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        yield from [[100 * self.epoch + k] for k in range(self.epoch % 3 + 1)]
        self.epoch += 1


class Walks(Resumable):
    """Has its own generator, which continues from epoch to epoch, and no epoch count."""

    def __init__(self) -> None:
        super().__init__(3, lambda _: self.rng.randrange(1000))
        self.rng = random.Random(3)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.rng.setstate(state["rng"])


class Stream(IterableDataset[int]):
    """Without a state."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * self.epoch, 10 * self.epoch + 2))


class WithLength(Stream):
    def __len__(self) -> int:
        return 2


def updated() -> Any:
    sampler = DistributedSampler(range(5), num_replicas=1, rank=0)
    return torchdata.nodes.Batcher(torchdata.nodes.SamplerWrapper(sampler, epoch_updater=lambda epoch: 2 * epoch + 3), 2, drop_last=False)


def batches(sampler: Callable[[], Any], **more: Any) -> Callable[..., Loader[Any]]:
    return lambda **words: Loader.from_dataset(range(10**6), batch_sampler=sampler(), **more, **words)


def stream(make: Callable[[], Any]) -> Callable[..., Loader[Any]]:
    return lambda **words: Loader.from_dataset(make(), batch_size=None, **words)


SIZED = {
    "a dataset": lambda **words: Loader.from_dataset(Tagged(2), **words),
    "threads": lambda **words: Loader.from_dataset(Tagged(5), 2, num_workers=2, method="thread", **words),
    "lengths that differ": batches(Told, plan_ahead=False),
    "in a thread": batches(Stays),
}
UNSIZED = {
    "a stream": stream(Stream),
    "a stream with a length": stream(WithLength),
    "a stream with a place": stream(lambda: Resumable(2)),
    "a stream that walks": stream(Walks),
    "torchdata's sampler": stream(updated),
    "torchdata's wrapper": stream(lambda: torchdata.nodes.Mapper(torchdata.nodes.IterableWrapper(Walks()), str)),
}
IN_A_PROCESS = {"lengths that differ": batches(Told), "a sampler that remembers": batches(Remembers)}


@cache
def straight(build: Callable[..., Loader[Any]]) -> tuple[list[list[Any]], dict[tuple[int, int], Any]]:
    """The epochs of a run that only reads, and its states in two of them, by epoch and position."""
    epochs: list[list[Any]] = []
    with build() as loader:
        states = {(0, 0): loader.state_dict()}
        for epoch in range(40):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(plain(batch))
                if epoch < 2:
                    states[epoch, len(epochs[-1])] = loader.state_dict()
            if epoch < 2:
                states[epoch + 1, 0] = loader.state_dict()
    return epochs, states


class AgainstAList(RuleBasedStateMachine):
    """At each step the numbers and the state are compared. The model is where the loader stands (an epoch and a position; behind the last item: at
    the epoch's end, which nobody has seen yet) and what was asked of it since.

    Seen to fail: an `end_epoch` that is not idempotent; an end kept unseen whatever ``restart_on_stop_iteration`` says; the sampler's view refused
    like a request; an epoch that was asked for, or a loaded state, with the order of another one.
    """

    sized, unsized = SIZED, UNSIZED

    @initialize(data=st.data(), restart=st.sampled_from([None, True, False]), infinite=st.sampled_from([False, False, True]))
    def begin(self, data: Any, restart: bool | None, infinite: bool) -> None:
        kinds = self.sized | self.unsized
        kind = data.draw(st.sampled_from(sorted(kinds)))
        self.restart, self.infinite, self.is_sized = restart, infinite, kind in self.sized
        self.epochs, self.states = straight(kinds[kind])
        self.loader = restarting(kinds[kind](infinite=infinite), restart)
        self.iterator: Any = None
        self.at = (0, 0)
        self.loaded = False
        self.asked: int | None = None
        self.by_sampler = False

    def is_end(self, at: tuple[int, int]) -> bool:
        return at[1] == len(self.epochs[at[0]])

    @property
    def here(self) -> tuple[int, int]:
        return (self.at[0] + 1, 0) if self.loaded and self.restart and self.is_end(self.at) else self.at

    def target(self) -> tuple[int, int] | None:
        """Where the next iterator starts; None: it is refused."""
        (epoch, position), asked = self.at, self.asked
        completes = self.is_end(self.at) and asked == epoch + 1
        if not self.loaded:
            if asked is not None:
                return asked, 0
            return self.at if position == 0 or self.infinite else (epoch + 1, 0)
        if self.by_sampler and not self.is_sized and asked is not None:
            return (
                self.at if asked == epoch else (asked, 0)
            )  # only reading would show whether a stream is at its end: who asks has counted the batches
        if self.by_sampler and not completes:
            asked = None
        if asked not in (None, epoch) and not completes:
            return None
        passes = completes or self.infinite or (self.restart is True and asked is None)
        return (epoch + 1, 0) if passes and self.is_end(self.at) else self.at

    @rule(items=st.integers(1, 4), ahead=st.none() | AHEAD, by_sampler=st.booleans())
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
    @rule(items=st.integers(1, 4))
    def read(self, items: int) -> None:
        while items and self.iterator is not None:
            self.advance()
            items -= 1

    def advance(self) -> None:
        epoch, position = self.at
        if self.infinite and self.is_end(self.at):
            epoch, position = epoch + 1, 0
        batch = next(self.iterator, None)
        if position < len(self.epochs[epoch]):
            assert batch is not None
            assert plain(batch) == self.epochs[epoch][position]
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

    @rule(data=st.data())
    def load(self, data: Any) -> None:
        if self.asked is not None and not self.is_sized:
            return  # the state would win: test_set_epoch_yields_to_the_state_of_an_unsized_loader
        self.at = data.draw(st.sampled_from(sorted(self.states)))
        self.loader.load_state_dict(self.states[self.at])
        if self.iterator is not None:
            with pytest.raises(RuntimeError, match="a state was loaded"):
                next(self.iterator)
        self.loaded, self.iterator = True, None
        if self.restart is False and self.at[0] and not self.at[1]:
            self.at = self.at[0] - 1, len(self.epochs[self.at[0] - 1])  # the end of the epoch before is to be seen again

    @rule(data=st.data(), items=st.integers(1, 4), ahead=st.none() | AHEAD, by_sampler=st.booleans())
    def resume(self, data: Any, **words: Any) -> None:
        self.load(data)
        self.start(**words)

    @rule(ahead=AHEAD, by_sampler=st.booleans())
    def ask(self, ahead: int, by_sampler: bool) -> None:
        by_sampler = by_sampler and hasattr(self.loader, "sampler")
        if self.infinite or (self.loaded and not self.is_sized and (ahead not in (0, 1) or not by_sampler)):
            return
        self.asked, self.by_sampler = min(max(0, self.at[0] + ahead), 6), by_sampler
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
        if hasattr(self, "loader") and self.is_sized:
            (epoch, position), items = self.here, len(self.epochs[self.here[0]])
            told = self.loader.epoch, self.loader.position, self.loader.remaining, self.loader.is_last
            assert told == (epoch, position, items - position, position == items)
            assert self.at not in self.states or self.is_end(self.at) or self.loader.state_dict() == self.states[self.at]
            assert self.infinite or len(self.loader) == items

    def teardown(self) -> None:
        if hasattr(self, "loader"):
            self.loader.close()


class InAProcess(AgainstAList):
    sized, unsized = dict(list(IN_A_PROCESS.items())[:1]), dict(list(IN_A_PROCESS.items())[1:])


def machine(kind: type[RuleBasedStateMachine], examples: int) -> Any:
    kind.TestCase.settings = settings(fuzzed(examples), stateful_step_count=15, phases=[Phase.generate, Phase.shrink])
    ignored = pytest.mark.filterwarnings("ignore:(Stream|WithLength) has no state_dict", "ignore:Stays cannot be pickled")
    return pytest.mark.slow(ignored(kind.TestCase))


TestAgainstAList = machine(AgainstAList, 300)
TestInAProcess = machine(InAProcess, 20)
