"""Streams with a state, written in the usual ways: resumed at every step, read by several loaders, interrupted."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest
from pairwise import pairwise
from resumable import Resumable
from torch.utils.data import IterableDataset

from penstock import GraphError, Loader

N = 6


class Pass:
    def __init__(self):
        self.i = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i == N:
            raise StopIteration
        self.i += 1
        return self.i - 1

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


class WithFlag(Pass, IterableDataset):
    """Its own iterator, which starts over unless a state was loaded."""

    loaded = False

    def __iter__(self):
        self.i, self.loaded = self.i if self.loaded else 0, False
        return self

    def load_state_dict(self, state):
        self.i, self.loaded = state["i"], True


class StateOfTheLastPass(IterableDataset):
    """Its state is that of its last iterator; a state is loaded into a new one."""

    def __iter__(self):
        self.it = Pass()
        return self.it

    def state_dict(self):
        return self.it.state_dict()

    def load_state_dict(self, state):
        self.it = Pass()
        self.it.load_state_dict(state)


class HasStatefulPasses(IterableDataset):
    """Has no state; its iterators have."""

    def __iter__(self):
        return Pass()


class StateOfItsOwnPass(Pass, IterableDataset):
    """Has no state before its first ``__iter__``, which begins anew."""

    def __init__(self):
        pass

    def __iter__(self):
        self.i = 0
        return self


class BeginsAnew(IterableDataset):
    """Its own iterator, without a state."""

    def __iter__(self):
        self.i = 0
        return self

    __next__ = Pass.__next__


class GoesOn(Resumable):
    """A generator that continues from the dataset's position."""

    fails_at = None

    def __init__(self):
        super().__init__(N, self.item_at)

    def item_at(self, at):
        if at == self.fails_at:
            raise KeyboardInterrupt
        return at


KINDS = [WithFlag, StateOfTheLastPass, HasStatefulPasses, StateOfItsOwnPass, BeginsAnew, GoesOn]


def loading(stream, **words):
    return Loader.from_dataset(stream, 2, collate_fn=list, **words)


def epoch(loader):
    return [item for batch in loader for item in batch]


@pytest.mark.filterwarnings("ignore:BeginsAnew has no state_dict")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "taken", "used"), [*((2, taken, taken % 2 > 0) for taken in range(5)), (4, 2, False), (4, 3, True)]
)
def test_resumes_at_every_step_and_goes_on_for_epochs(kind, size, taken, used):
    """Seen to fail: a state that was loaded twice gave an empty epoch; one loaded before ``__iter__`` only began at 0,
    if the stream had been read; one whose last batch was short gave an empty epoch after it; an AttributeError of the
    user's at the first batch."""

    def loading(stream):
        return Loader.from_dataset(stream, size, collate_fn=list)

    with loading(kind()) as loader:
        items, batches = [], iter(loader)
        while taken:
            try:
                items += next(batches)
                taken -= 1
            except StopIteration:
                batches = iter(loader)
        state = loader.state_dict()
    stream = kind()
    if used:
        with loading(stream) as loader:
            epoch(loader)
    with loading(stream) as loader:
        loader.load_state_dict(state)
        left = epoch(loader)
        assert (items + left)[-N:] == list(range(N))
        assert [epoch(loader) for _ in range(2)] == [list(range(N))] * 2


def test_what_an_interrupt_has_left_in_the_middle_begins_anew_in_another_loader():
    """Seen to fail: its position was mistaken for one that its owner had moved it to."""
    stream = GoesOn()
    stream.fails_at = 3
    with loading(stream) as loader, pytest.raises(KeyboardInterrupt):
        epoch(loader)
    stream.fails_at = None
    with loading(stream) as loader:
        assert [epoch(loader), epoch(loader)] == [list(range(N))] * 2


@pytest.mark.parametrize("kind", [WithFlag, GoesOn])
def test_two_loaders_in_turns_over_one_stream_are_refused(kind):
    """Seen to fail silently: each took items that the other missed."""
    stream = kind()
    with loading(stream) as one, loading(stream) as other:
        batches = iter(one)
        assert next(batches) == [0, 1]
        assert next(iter(other)) == [0, 1]
        with pytest.raises(GraphError, match="another loader has begun to read this .*, which has only one position"):
            next(batches)
        one.load_state_dict(one.state_dict())
        assert epoch(one) == [2, 3, 4, 5]


class Texts(IterableDataset):
    """As torchtitan's ``HuggingFaceTextDataset``: cuts texts into rows, and its ``"epoch"`` (or ``key``) is a number of
    its own, which seeds its shuffle.

    ``renews``: at its end it starts over, otherwise every later pass is empty.
    """

    def __init__(self, renews, key, rank=0, world_size=1):
        self.key = key
        self.texts = [list(range(10 * i, 10 * i + i % 5 + 1)) for i in range(rank, 14, world_size)]
        self.renews, self.sample, self.buffer, self.epoch = renews, 0, [], 0

    def __iter__(self):
        order = list(range(len(self.texts)))
        random.Random(self.epoch).shuffle(order)
        for place in order[self.sample :]:
            self.sample += 1
            self.buffer = self.buffer + self.texts[place]
            while len(self.buffer) >= 4:
                row, self.buffer = self.buffer[:4], self.buffer[4:]
                yield row
        if self.renews:
            self.sample, self.epoch = 0, self.epoch + 3

    def state_dict(self):
        return {"token_buffer": self.buffer, "sample_idx": self.sample, self.key: self.epoch}

    def load_state_dict(self, state):
        self.buffer, self.sample, self.epoch = state["token_buffer"], state["sample_idx"], state[self.key]


def walked(loader):
    """Its batches, and its epochs where they end."""
    for _ in range(4):
        epoch = loader.epoch
        yield from loader
        yield f"end of {epoch}"


@pytest.mark.parametrize(
    ("renews", "key", "ways", "left_early"),
    pairwise([False, True], ["epoch", "shuffles"], [(None, 0, 1), ("items", 1, 2), ("own", 1, 2)], [False, True]),
)
def test_a_users_epoch_is_its_own(renews, key, ways, left_early, caplog):
    """Stopped after every batch and at every epoch's end. Seen to fail: we wrote our epoch over the stream's, and the
    epoch that followed was another one."""
    split, rank, world_size = ways

    def make():
        stream = Texts(renews, key, *((rank, world_size) if split == "own" else ()))
        return loading(stream, split=split, tail="drop", rank=rank, world_size=world_size)

    states, items, begun = [], [], 0
    with make() as loader:
        if left_early:
            next(iter(loader))
            loader.end_epoch()
            begun = 1
        for item in walked(loader):
            items.append(item)
            states.append(loader.state_dict())
    assert items.count("end of 0") == 1 - begun
    assert renews == isinstance(items[-2], list)
    for done, state in enumerate(states, 1):
        with make() as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            assert list(islice(walked(loader), len(items) - done)) == items[done:]
    assert left_early or "means reading from" not in caplog.text, (
        "an epoch begins where the one before ended, and nothing is read for that"
    )
    # the form before: it did not say where the epoch before ended
    if not left_early and split is None and key == "epoch":
        done = items.index("end of 0") + 1
        saved = json.loads(states[done - 1]["penstock"])
        assert saved["state"]["source"].pop("after")["ended"]
        with make() as loader:
            loader.load_state_dict({"penstock": json.dumps(saved)})
            assert list(islice(walked(loader), len(items) - done)) == items[done:]
        assert "start of epoch 1 means reading from epoch 0 on" in caplog.text
