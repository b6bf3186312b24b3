"""Test tools for custom graphs and nodes; penstock's own are tested with them, too.

`assert_resumes_everywhere` is the resume law and `assert_order_is_pure` the law of orders; `Tagged` is a dataset whose
samples carry their own address.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from penstock._errors import StateMismatch
from penstock._fetch.indices import Indices
from penstock._fetch.sample import sample
from penstock._loader.state_dict import differences
from penstock._nodes.index_node import index_of, left_at
from penstock._nodes.node import EndOfEpoch, Node, epoch_of, place_of
from penstock._nodes.parallel_mapper import ParallelMapper
from penstock._nodes.rank_checks import downstream_of_sharder, users
from penstock._random.global_rng import global_states, put_globals, seed_globals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock._loader.loader import Loader
    from penstock._random.order import Order


__all__ = ["Tagged", "assert_order_is_pure", "assert_resumes_everywhere", "plain"]


class Tagged:
    """A dataset whose item i, loaded in epoch e, is ``1000 * e + i``, so a lost or repeated item names its own origin.

    Args:
        n: The length, up to 1000.
    """

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return 1000 * sample().epoch + index


def plain(item: Any) -> Any:
    """``item`` with tensors and arrays replaced by nested lists and their dtype, so that it compares by value;
    containers stay.
    """
    if isinstance(item, torch.Tensor | np.ndarray):
        return (str(item.dtype), item.tolist())
    if isinstance(item, Indices):
        return ("Indices", item.epoch, plain(item.positions), plain(item.values))
    if isinstance(item, dict):
        return {key: plain(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [plain(value) for value in item]
    return item


def assert_resumes_everywhere(build: Callable[[], Node[Any] | Loader[Any]], *, steps: int) -> None:
    """Check that stopping after any step and resuming elsewhere changes no item and no state.

    Each state goes through JSON, is checked like one from a file, and is loaded into a newly built graph. That graph
    must then produce the same items and the same states, in the same order, as the graph that never stopped, although
    the global random numbers are seeded differently, as in another process. If worker threads draw from those, or from
    a generator that they share, no resume can be exact, and the error says so. One state is loaded on every rank, so if
    a node of yours has a state of its own, two ranks are also read, and their states compared; and the first epoch is
    left after one item, because the next one must not depend on that (but for an endless stream, whose next epoch
    begins there). If one overrides `next`, the length of the first epoch is compared with what the graph counts.

    Args:
        build: Builds a new graph, or a new `Loader` over one, and seeds what it draws itself; it is called up to
            ``steps + 6`` times. For two ranks, ``RANK`` and ``WORLD_SIZE`` are set.
        steps: How many items to compare, markers included. Choose enough to cross two epoch ends and to see items of
            two epochs.

    Raises:
        AssertionError: Names the step and the difference, or the code that may draw.
    """
    generators = global_states()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* drew from .* in worker threads", UserWarning)
            _assert_resumes(build, steps, generators)
    finally:
        put_globals(generators)


def _assert_resumes(build: Callable[[], Node[Any] | Loader[Any]], steps: int, generators: tuple[Any, ...]) -> None:
    make = _Stepper if isinstance(first := build(), Node) else _LoaderStepper
    whole = make(first)
    states, items = [whole.state()], []
    nodes = list(whole.root.chain())
    mappers = [node for node in nodes if isinstance(node, ParallelMapper)]
    watches = [watch for node in mappers if (watch := node.executor.draws) is not None]
    looks = [watch.look() for watch in watches]
    given = 0  # items of the first epoch
    try:
        for _ in range(steps):
            items.append(plain(whole.step()))
            states.append(whole.state())
            given += not whole.crossed
    finally:
        whole.close()
    message = next((watch.message for watch in watches if watch.message), None)
    assert message is None, message
    # A watch looks only while the loop waits, and here it may never wait.
    why = "".join(
        f". {drawn}" for watch, look in zip(watches, looks, strict=True) if (drawn := watch.message_if_drawn(look))
    )
    with_state = users(nodes, "get_state")
    if without := [
        node for node in nodes if users([node], "transform") + users([node], "next") and node not in with_state
    ]:
        why += (
            f". A node that keeps something from item to item overrides get_state, reset, start_of and check: look at "
            f"{_named(without)}"
        )
    crossed = whole.crossed
    assert crossed >= 2, (
        f"{steps} steps cross {crossed} epoch ends, but at least 2 are needed to test the states there. Use more steps."
    )
    assert whole.filled >= 2, (
        f"only {whole.filled} of the first {crossed + 1} epochs had an item: a node must not end for good after its "
        f"first epoch."
    )
    if own := users(nodes, "next"):
        counts = left_at(whole.root, whole.root.start_of(0))
        assert counts in (None, given), (
            f"the first epoch had {given} items, but the graph counts {counts}. A node that delivers more or fewer "
            f"items than it gets overrides counted, which returns their number or None: look at {_named(own)}."
        )
    for stop in range(steps + 1):
        seed_globals(stop, 0, 0)  # as in another process
        try:
            _assert_goes_on(make(build()), stop, items, states, why)
        except (AssertionError, StateMismatch) as exc:
            put_globals(generators)
            as_before = _goes_on(make(build()), stop, items, states)
            seed_globals(stop, 0, 0)
            if as_before and not _goes_on(make(build()), stop, items, states):
                exc.add_note(
                    "With the global random numbers as they were before the first graph, this resume is right. So "
                    "something draws from them that penstock does not seed, or build makes something of them: draw "
                    "from penstock.sample().rng, and seed in build what it draws."
                )
            raise
    if (own := users(nodes, "get_state")) and not index_of(whole.root).facts.carries_over_epochs:
        _assert_left_early(make(build()), items, states[0], _named(own))
    if own := users(downstream_of_sharder(whole.root), "get_state"):
        _assert_equal_on_ranks(lambda: make(build()), steps, _named(own))


def _assert_goes_on(resumed: Any, stop: int, items: list[Any], states: list[str], why: str) -> None:
    """Compare what comes after the state ``stop`` with the rest of ``items``, and with the states after them."""
    try:
        resumed.load(states[stop])
        now = resumed.state()
        assert now == states[stop], (
            f"a graph reset to the state after {stop} steps reports a different one at once: "
            f"{_changed(_opened(states[stop]), _opened(now))}"
        )
        for step in range(stop, len(items)):
            item, now = plain(resumed.step()), resumed.state()
            assert item == items[step], (
                f"resumed after {stop} steps, step {step} gives another item: {_changed(items[step], item)}{why}"
            )
            assert now == states[step + 1], (
                f"resumed after {stop} steps, the state after step {step} is another: "
                f"{_changed(_opened(states[step + 1]), _opened(now))}"
            )
    finally:
        resumed.close()


def _goes_on(resumed: Any, stop: int, items: list[Any], states: list[str]) -> bool:
    with suppress(AssertionError, StateMismatch):
        _assert_goes_on(resumed, stop, items, states, "")
        return True
    return False


def _changed(before: Any, now: Any) -> str:
    """The first difference between two plain items or two states."""
    first, *others = differences(before, now) or [f"was {before!r:.80} and is {now!r:.80}"]
    return first.strip() + (f", and {len(others)} more differences" if others else "")


def _opened(state: str) -> Any:
    """A state, to compare by its fields; that of a loader has another text in it."""
    opened = json.loads(state)
    return json.loads(opened["penstock"]) if "penstock" in opened else opened


def _assert_left_early(one: Any, items: list[Any], start: str, own: str) -> None:
    """Compare the epoch after one that was left after its first item with the epoch in ``items``, which begin at the
    state ``start``.
    """
    try:
        one.step()
        one.leave(start)
        for step, item in enumerate(items[one.second_epoch_in(items) :]):
            now = plain(one.step())
            assert now == item, (
                f"the first epoch was left after one item, and item {step} of the second differs from that after a "
                f"whole epoch: {_changed(item, now)}. After a break a loader begins with start_of of the next epoch, "
                f"so what goes on over epochs is lost. Look at {own}: begin each epoch anew, or keep it outside of the "
                f"loader."
            )
    finally:
        one.close()


def _named(nodes: list[Node[Any]]) -> str:
    return ", ".join(type(node).__name__ for node in nodes)


def _assert_equal_on_ranks(make: Callable[[], Any], steps: int, own: str) -> None:
    """Compare the states of two ranks wherever both are at the same place.

    A graph whose ranks are given has the same rank twice, and passes.
    """
    states: list[list[Any]] = []
    for rank in range(2):
        with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE="2"):
            one = make()
            try:
                states.append([(one.step(), one.root.get_state())[1] for _ in range(steps)])
            finally:
                one.close()
    for step, (first, second) in enumerate(zip(*states, strict=True)):
        assert first == second or place_of(first) != place_of(second), (
            f"after step {step}, the state on rank 0 of 2 is {first} and on rank 1 {second}. One state is loaded on "
            f"every rank, so a node must not keep what depends on the rank's own items. Look at {own}, or keep it "
            f"outside of the loader."
        )


def assert_order_is_pure(
    order: Order, *, items: int | None = None, epochs: int = 3, again: Order | None = None
) -> None:
    """Check that the indices of an order depend on its settings, the epoch and the position, and on nothing else.

    Reads the order whole, backwards, in pieces, every third position, and one by one, with other epochs in between;
    then from a copy, and with the global generators seeded differently. The indices must be the same each time.

    Args:
        order: The order to check.
        items: Length of the dataset, which every index must be below. Default: the length of the order.
        epochs: How many epochs to check, from 0.
        again: The same order, built again, to detect random draws at construction.

    Raises:
        AssertionError: Says how the order was read, and at which position it differed.
    """
    n, settings = len(order), order.settings()
    assert json.loads(json.dumps(settings)) == settings, f"settings() must return JSON, but returned {settings}"
    positions = np.arange(n)
    whole = [order.indices(epoch, positions) for epoch in range(epochs)]
    for epoch, indices in enumerate(whole):
        assert isinstance(indices, np.ndarray), (
            f"indices() must return an int64 array, but returned a {type(indices).__name__}"
        )
        assert _is_int64s(indices, n), f"{n} positions gave {indices.dtype} of shape {indices.shape}"
        assert not np.shares_memory(indices, positions), "indices() must return a new array, but returned the positions"
        within = (indices >= 0) & (indices < (n if items is None else items))
        assert within.all(), (
            f"epoch {epoch}, position {np.argmin(within)}: {indices[np.argmin(within)]} is not an index of the dataset"
        )
    assert np.array_equal(positions, np.arange(n)), "indices() wrote to the positions"
    copied = copy.deepcopy(order)
    for epoch, indices in reversed(list(enumerate(whole))):
        for how, chosen in _ways(n):
            order.indices((epoch + 1) % epochs, positions)
            _assert_same(order, epoch, chosen, indices, f"read {how}")
        for how, other in (("a copy of it", copied), ("built again, it", again)):
            if other is not None:
                _assert_same(other, epoch, positions, indices, how)
    for how, other in (("a copy of it", copied), ("built again, it", again), ("having been read, it", order)):
        assert other is None or other.settings() == settings, (
            f"{how} has the settings {other.settings()}, and it had {settings}"
        )
    generators = global_states()
    try:
        for seed in (1, 2):
            seed_globals(seed, 0, 0)
            _assert_same(order, 0, positions, whole[0], "with the global generators moved, it")
    finally:
        put_globals(generators)


def _ways(n: int) -> Iterator[tuple[str, Any]]:
    positions = np.arange(n)
    yield "backwards", positions[::-1].copy()
    yield "by every third position", positions[::3]
    yield "at no position", positions[:0]
    for begin in range(0, n, max(1, n // 7)):
        yield "in pieces", positions[begin : begin + max(1, n // 7)]
    for position in {0, n // 3, n - 1} & set(range(n)):
        yield "one by one", np.array([position])


def _assert_same(order: Order, epoch: int, positions: Any, whole: Any, how: str) -> None:
    came, expected = order.indices(epoch, positions), whole[positions]
    assert _is_int64s(came, len(positions)), (
        f"{how}, {len(positions)} positions gave {came.dtype} of shape {came.shape}"
    )
    if not np.array_equal(came, expected):
        at = int(np.flatnonzero(came != expected)[0])
        raise AssertionError(
            f"{how} gave {came[at]} at position {positions[at]} of epoch {epoch}, not {expected[at]} as before"
        )


def _is_int64s(indices: Any, n: int) -> bool:
    return bool(indices.dtype == np.int64) and indices.shape == (n,)


class _Stepper:
    """Runs a node step by step; a marker is a step, too."""

    def __init__(self, node: Any) -> None:
        self.node = self.root = node
        self.crossed = self.filled = 0  # epochs that have ended, and those that had an item
        self.empty = True  # the current one

    def state(self) -> str:
        return json.dumps(self.node.state_dict(), sort_keys=True)

    def load(self, state: str) -> None:
        loaded = json.loads(state)
        self.node.check(loaded)
        self.node.reset(loaded)

    def step(self) -> Any:
        item = next(self.node)
        is_marker = isinstance(item, EndOfEpoch)
        self.crossed += is_marker
        self.filled += self.empty and not is_marker
        self.empty = is_marker
        return item

    def leave(self, start: str) -> None:
        """What a loader does at the next ``iter`` after a break in the epoch of ``start``."""
        self.node.reset(self.node.start_of(epoch_of(json.loads(start)) + 1))

    def second_epoch_in(self, items: list[Any]) -> int:
        return next(step for step, item in enumerate(items) if isinstance(item, EndOfEpoch)) + 1

    def close(self) -> None:
        self.node.shutdown()


class _LoaderStepper:
    """Runs a loader batch by batch, across epoch ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.root = loader.root
        self.iterator = iter(loader)
        self.crossed = self.filled = 0  # epochs that have ended, and those that had an item
        self.empty = True  # the current one

    def state(self) -> str:
        return json.dumps(self.loader.state_dict())

    def load(self, state: str) -> None:
        self.loader.load_state_dict(json.loads(state))

    def step(self) -> Any:
        for _ in range(3):  # a state of an epoch's last batch begins with the empty remainder
            for batch in self.iterator:
                self.filled += self.empty
                self.empty = False
                return (self.loader.epoch, batch)
            self.crossed += 1
            self.empty = True
            self.iterator = iter(self.loader)
        raise AssertionError(f"epochs {self.loader.epoch - 2} and {self.loader.epoch - 1} had no batch.")

    def leave(self, start: str) -> None:
        self.iterator = iter(self.loader)

    def second_epoch_in(self, items: list[Any]) -> int:
        return next(step for step, (epoch, _) in enumerate(items) if epoch > items[0][0])

    def close(self) -> None:
        self.loader.close()
