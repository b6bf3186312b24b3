"""A `Ledger` over a `WeightedOrder` that is updated: what is open may be of epochs whose weights are gone."""

from __future__ import annotations

import json
import random
from itertools import islice
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Address, GraphError, Ledger, Loader, StateError, StateMismatch
from penstock.orders import WeightedOrder

N, EPOCH = 40, 6
HALVES = [[1.0] * 20 + [0.0] * 20, [0.0] * 20 + [1.0] * 20]
A, B = HALVES


class Prompts:
    """A sample says where it is, which prompt it is, and what it has drawn."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> list[int]:
        sample = penstock.sample()
        return [1000 * sample.epoch + sample.position, index, int(sample.rng.integers(2**40))]


def build(weights: Any, **words: Any) -> tuple[WeightedOrder, Loader[Any]]:
    order = WeightedOrder(weights, num_samples=EPOCH, seed=1)
    words = {"batch_size": None, "infinite": True, "collate_fn": list, **words}
    return order, Loader.from_dataset(Prompts(), order=order, seed=1, **words)


def whole(weights: Any, epoch: int) -> list[Any]:
    """The oracle: an epoch of a run whose weights never change."""
    _, loader = build(weights, infinite=False)
    with loader:
        loader.set_epoch(epoch)
        return list(loader)


def saved(ledger: Ledger[Any]) -> Any:
    return json.loads(json.dumps(ledger.state_dict()))


VARIANTS = {"A, then B": (A, B), "B": (B, None), "B, then B": (B, B)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("taken", [4, 6, 8])
def test_what_is_open_of_an_epoch_whose_weights_are_gone_is_served(taken: int, variant: str) -> None:
    """Saved inside epoch 0, at its end and inside epoch 1, and loaded by what has only the later weights; then the run
    goes on as it would have. Inside epoch 0 its weights are still needed.

    Seen to fail: without the indices in the state ("epoch 0 was drawn by other weights", or other samples at the end of
    an epoch, where no weights are compared).
    """
    order, loader = build(A)
    with loader, Ledger(loader) as ledger:
        first = [next(ledger) for _ in range(min(taken, EPOCH))]
        saved(ledger)  # seen to fail: what had been saved before the update hid it from later states
        order.update(B)
        first += [next(ledger) for _ in range(taken - len(first))]
        ledger.done(first[0][0])
        state = saved(ledger)
        rest = [next(ledger) for _ in range(20)]
    assert [sample for _, sample in first + rest][: 3 * EPOCH] == whole(A, 0) + whole(B, 1) + whole(B, 2)
    weights, then = VARIANTS[variant]
    order, loader = build(weights)
    with loader, Ledger(loader) as ledger:
        if then is not None:
            order.update(then)
        if taken < EPOCH:
            with pytest.raises(StateMismatch, match="weights was"):
                ledger.load_state_dict(state)
            return
        ledger.load_state_dict(state)
        assert saved(ledger) == state
        assert [next(ledger) for _ in range(len(first) - 1 + len(rest))] == first[1:] + rest
        ledger.load_state_dict(state)  # in the same process
        assert [next(ledger) for _ in range(len(first) - 1)] == first[1:]
        ledger.again(*(Address(at.epoch, at.position) for at, _ in first[1:]))  # as another process sends them
        assert [next(ledger) for _ in range(len(first) - 1)] == first[1:]


def test_what_the_frontier_needs_is_not_replaced() -> None:
    """Epoch 1 goes on by B, so a loader that has only A is refused, and loads once it is updated."""
    order, loader = build(A)
    with loader, Ledger(loader) as ledger:
        first = [next(ledger) for _ in range(4)]
        order.update(B)
        first += [next(ledger) for _ in range(4)]
        state = saved(ledger)
    order, loader = build(A)
    with loader, Ledger(loader) as ledger:
        with pytest.raises(StateMismatch, match="weights was .* all weights"):
            ledger.load_state_dict(state)
        order.update(B)
        ledger.load_state_dict(state)
        assert [next(ledger) for _ in range(8)] == first
        assert [next(ledger)[1] for _ in range(4)] == whole(B, 1)[2:]


def test_an_open_one_outlives_any_number_of_updates() -> None:
    """In one process. Seen to fail: with the address as the caller had sent it, without its indices."""
    order, loader = build(A)
    with loader, Ledger(loader) as ledger:
        at, sample = next(ledger)
        for weights in (B, A, B):
            list(islice(ledger, EPOCH))
            order.update(weights)
        for again in (at, Address(0, 0), Address.from_json(at.json())):
            ledger.again(again)
            assert next(ledger) == (at, sample)
        assert loader.load(at) == sample
        with pytest.raises(GraphError, match="epoch 0 was drawn by other weights"):
            loader.load(Address(0, 1))  # not looked up since


@pytest.mark.parametrize("words", [{}, {"num_workers": 2, "method": "thread"}], ids=["inline", "threads"])
def test_batches_keep_their_indices_too(words: dict[str, Any]) -> None:
    order, loader = build(A, batch_size=4, **words)  # of 4 and of 2
    with loader, Ledger(loader) as ledger:
        first = [next(ledger)]
        order.update(B)
        first += [next(ledger) for _ in range(3)]
        state = saved(ledger)
        assert [sample for _, batch in first for sample in batch] == whole(A, 0) + whole(B, 1)
    _, loader = build(B, batch_size=4, **words)
    with loader, Ledger(loader) as ledger:
        ledger.load_state_dict(state)
        assert [next(ledger) for _ in range(4)] == first
        assert next(ledger)[1] == whole(B, 2)[:4]


def live(seed: int) -> None:
    """Some lives of a run with updates, by chance. The model knows the weights of every epoch."""
    draw = random.Random(seed)
    weights: list[list[float]] = [A]
    sequence: list[Any] = []  # of the epochs whose weights are certain
    opened: list[int] = []
    frontier, waiting = 0, list[int]()
    order, loader = build(A)
    ledger = Ledger(loader)
    kept: Any = None
    for _ in range(draw.randrange(60, 120)):
        epoch = -(-frontier // EPOCH)  # the one that begins next
        what = draw.choice(["next"] * 4 + ["settle", "again", "update", "save", "load"])
        if what == "next":
            if waiting:
                number = waiting.pop(0)
            else:
                number, frontier = frontier, frontier + 1
                opened.append(number)
                if number == len(sequence):
                    weights += weights[-1:] * (number // EPOCH + 1 - len(weights))
                    sequence += whole(weights[number // EPOCH], number // EPOCH)
            at, sample = next(ledger)
            assert (at, sample) == (Address(*divmod(number, EPOCH)), sequence[number])
        elif what == "settle" and opened:
            number = opened.pop(draw.randrange(len(opened)))
            waiting = [one for one in waiting if one != number]
            ledger.done(Address(*divmod(number, EPOCH)))
        elif what == "again" and opened:
            number = draw.choice(opened)
            waiting += [number] * (number not in waiting)
            ledger.again(Address(*divmod(number, EPOCH)))
        elif what == "update":
            new = [draw.random() for _ in range(N)]
            weights = [*(weights + weights[-1:] * epoch)[:epoch], new]
            order.update(new)
        elif what == "save":
            kept = saved(ledger), sorted(opened), frontier, weights[:], len(sequence)
        elif what == "load" and kept is not None:
            if draw.random() < 0.7:
                ledger.close()
                loader.close()
                at_end, now = divmod(kept[2], EPOCH)[::-1]
                # inside an epoch its weights, and then the update, if there was one; between two, those of the next one
                those = (kept[3] + kept[3][-1:] * (now + 1))[now]
                order, loader = build(those, **draw.choice([{}, {"num_workers": 2, "method": "thread"}]))
                ledger = Ledger(loader)
                ledger.load_state_dict(kept[0])
                if at_end and len(kept[3]) > now + 1:
                    order.update(kept[3][now + 1])
            else:  # in the same process, which may have gone on with other weights
                those = (kept[3] + kept[3][-1:] * (kept[2] // EPOCH + 1))[kept[2] // EPOCH]
                order.update(those)
                try:
                    ledger.load_state_dict(kept[0])
                except StateMismatch:
                    # inside an epoch whose weights this process has forgotten, or of a run without updates
                    assert kept[2] % EPOCH or len({str(one) for one in kept[3]}) == 1
                    weights = [*(weights + weights[-1:] * epoch)[:epoch], those]
                    continue
                if len(kept[3]) > kept[2] // EPOCH + bool(kept[2] % EPOCH):
                    order.update(kept[3][-1])
                elif kept[2] % EPOCH == 0:
                    order.update(those)
            opened, waiting, frontier = list(kept[1]), list(kept[1]), kept[2]
            weights, sequence = kept[3][:], sequence[: kept[4]]
        assert sorted(at.epoch * EPOCH + at.position for at in ledger.open) == sorted(opened)  # type: ignore[operator]
    ledger.close()
    loader.close()


def test_what_a_state_does_not_know_it_does_not_say() -> None:
    """Other orders find everything by position, so their states stay as small as they were."""
    with Loader.from_dataset(Prompts(), batch_size=None, shuffle=True, seed=1, infinite=True) as loader:
        ledger = Ledger(loader)
        for _ in range(50):
            next(ledger)
        assert "indices" not in json.loads(saved(ledger)["penstock.ledger"])
    _, loader = build(A, batch_size=2)
    with loader, Ledger(loader) as ledger:
        next(ledger)  # an update may come at any time, also between a load and the first sample
        indices = [index for _, index, _ in whole(A, 0)[:2]]
        assert json.loads(saved(ledger)["penstock.ledger"])["indices"] == [indices]
    lengths = [1 + index % 3 for index in range(N)]
    packs = Loader.from_dataset(
        [[index] * length for index, length in enumerate(lengths)],
        groups=penstock.Packs(lengths, 6),
        order=WeightedOrder(A, EPOCH, seed=1),
        infinite=True,
    )
    with packs, Ledger(packs) as ledger:  # planned ahead, so their weights cannot be updated
        next(ledger)
        assert "indices" not in json.loads(saved(ledger)["penstock.ledger"])


@pytest.mark.parametrize("damage", [[], [1, 2, 3], [-1, 2], ["x", 2], [[1], 2], [1.5, 2], [True, 2], 7, [{}, 2]])
def test_damaged_indices_are_refused(damage: Any) -> None:
    """Seen to fail: a list for a sample, and a negative index, which a dataset takes from its end."""
    order, loader = build(A)
    with loader, Ledger(loader) as ledger:
        for _ in range(2):
            next(ledger)
        order.update(B)
        state = saved(ledger)
        found = json.loads(state["penstock.ledger"])
        assert len(found["indices"]) == 2
        for bad in (damage, {"x": damage}):
            with pytest.raises(StateError, match="damaged"):
                ledger.load_state_dict({"penstock.ledger": json.dumps({**found, "indices": bad})})


class TestTheOrderAlone:
    """What a plain loader must keep of the weights, on which a ledger relies."""

    def test_a_state_from_before_an_update_hides_nothing(self) -> None:
        """A loop saves, updates, and saves again. Seen to fail: later states lacked the update, and at the start of an
        epoch no loader could load them."""
        order, loader = build(A, infinite=False)
        with loader:
            loader.state_dict()
            assert list(loader) == whole(A, 0)
            order.update(B)
            next(iter(loader))
            loader.end_epoch()
            state = loader.state_dict()
        order, loader = build(B, infinite=False)
        with loader:
            loader.load_state_dict(state)
            assert list(loader) == whole(B, 2)
        _, loader = build(A, infinite=False)
        with loader:
            loader.load_state_dict(state)
            with pytest.raises(StateMismatch, match="draws epoch 2 by the weights"):
                list(loader)

    @pytest.mark.parametrize("pending", [False, True])
    def test_a_state_that_is_refused_changes_no_weights(self, pending: bool) -> None:
        """Seen to fail: the rest of the epoch was drawn by the weights before, without a word."""
        with Loader.from_dataset(range(N + 1), infinite=True) as other:
            foreign = other.state_dict()
        order, loader = build(A, infinite=False)
        with loader:
            list(loader)
            order.update(B)
            iterator = iter(loader)
            came = [next(iterator) for _ in range(2)]
            if pending:
                order.update(A)
            state = loader.state_dict()
            with pytest.raises(StateMismatch, match="dataset_length"):
                loader.load_state_dict(foreign)
            assert loader.state_dict() == state
            assert came + list(iterator) == whole(B, 1)
            assert list(loader) == whole(A if pending else B, 2)

    def test_a_committed_position_lies_before_an_update(self) -> None:
        """A trainer that looks ahead has begun the next epoch, by other weights. Seen to fail: no loader could load the
        state."""
        order, loader = build(A)
        with loader:
            loader.commit(0)
            iterator = iter(loader)
            list(islice(iterator, EPOCH))
            order.update(B)
            list(islice(iterator, 2))
            loader.commit(4)
            state = loader.state_dict()
        order, loader = build(A)
        with loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            assert list(islice(iterator, 2)) == whole(A, 0)[4:]
            order.update(B)
            assert list(islice(iterator, EPOCH)) == whole(B, 1)
        _, loader = build(B)
        with loader, pytest.raises(StateMismatch, match="weights was"):
            loader.load_state_dict(state)

    def test_what_a_loaded_state_does_not_know_is_unknown(self) -> None:
        """At an epoch's end no weights are compared. Seen to fail: epoch 0 was found by those of epoch 1."""
        order, loader = build(A)
        with loader:
            list(islice(loader, EPOCH))
            order.update(B)
            state = loader.state_dict()
        _, loader = build(B)
        with loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            for _ in range(2):
                with pytest.raises(GraphError, match="epoch 0 was drawn by other weights"):
                    loader.locate(Address(0, 3))
                iterator = iter(loader)
                assert next(iterator) == whole(B, 1)[0]
                loader.load_state_dict(state)


@pytest.mark.parametrize("seed", range(6))
def test_updated_at_any_time_and_resumed_anywhere(seed: int) -> None:
    """Seen to fail: with the indices of older epochs left out of the state."""
    live(seed)


@pytest.mark.soak
def test_updated_at_any_time_and_resumed_anywhere_in_hundreds_of_chains() -> None:
    for seed in range(1000, 1300):
        live(seed)


def test_the_oracle_draws_by_the_weights() -> None:
    assert {index < 20 for _, index, _ in whole(A, 3)} == {True}
    assert np.array_equal(
        [index for _, index, _ in whole(B, 2)], WeightedOrder(B, EPOCH, seed=1).indices(2, np.arange(EPOCH))
    )
