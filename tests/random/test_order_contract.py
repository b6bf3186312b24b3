"""The contract of orders: what `assert_order_is_pure` sees of those that break it, and what a dataset may bring."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from torch.utils.data import SubsetRandomSampler

import penstock
from penstock import Loader
from penstock.orders import SequentialOrder
from penstock.testing import assert_order_is_pure


class Rotated:
    """The smallest order there is."""

    def __init__(self, n: int = 20) -> None:
        self.n = n
        self.calls = 0

    def __len__(self) -> int:
        return self.n

    def indices(self, epoch: int, positions: Any) -> Any:
        return (positions + epoch) % self.n

    def settings(self) -> dict[str, Any]:
        return {"order": "rotated", "length": self.n}


def rotated_by(indices: Any, settings: Any = None) -> Rotated:
    """One whose ``indices(order, epoch, positions)``, or whose ``settings``, is another."""

    class Impure(Rotated):
        def indices(self, epoch, positions):
            self.calls += 1
            return indices(self, epoch, positions)

        def settings(self):
            return super().settings() if settings is None else settings(self)

    return Impure()


def stale(order, epoch, positions):
    """What it keeps is of the epoch of the last call that was not for a single position."""
    if len(positions) != 1:
        order.kept = epoch
    return (positions + order.kept) % order.n


def writing(order, epoch, positions):
    out = positions.copy()
    positions[:] = 0
    return out


class DrawsWhenBuilt(Rotated):
    drawn = 0

    def __init__(self):
        super().__init__()
        self.offset = DrawsWhenBuilt.drawn = DrawsWhenBuilt.drawn + 1

    def indices(self, epoch, positions):
        return (positions + self.offset) % self.n


def test_a_pure_order_passes():
    assert_order_is_pure(Rotated(), again=Rotated())
    assert_order_is_pure(Rotated(1))
    assert_order_is_pure(Rotated(0))


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (rotated_by(lambda order, epoch, positions: (positions + order.calls) % order.n), "read backwards gave"),
        (rotated_by(stale), "read one by one gave 0 at position 0 of epoch 2, not 2 as before"),
        (
            rotated_by(lambda order, epoch, positions: (np.arange(len(positions)) + epoch) % order.n),
            "read backwards gave 2 at position 19 of epoch 2, not 1 as before",
        ),
        (
            rotated_by(lambda order, epoch, positions: (positions + random.randrange(order.n)) % order.n),
            "gave .* as before",
        ),
        (
            rotated_by(lambda order, epoch, positions: positions + epoch),
            "epoch 1, position 19: 20 is not an index of the dataset",
        ),
        (rotated_by(lambda order, epoch, positions: positions / 2), "20 positions gave float64 of shape"),
        (rotated_by(lambda order, epoch, positions: positions.tolist()), "but returned a list"),
        (rotated_by(lambda order, epoch, positions: positions), "must return a new array"),
        (rotated_by(writing), "wrote to the positions"),
        (rotated_by(Rotated.indices, lambda order: {1: (2, 3)}), "must return JSON"),
        (rotated_by(Rotated.indices, lambda order: {"calls": order.calls}), "has the settings"),
    ],
)
def test_one_that_is_not_is_named(order, why):
    with pytest.raises(AssertionError, match=why):
        assert_order_is_pure(order)


def test_what_is_drawn_when_built_is_seen_by_building_again():
    assert_order_is_pure(DrawsWhenBuilt())
    with pytest.raises(AssertionError, match="built again, it gave"):
        assert_order_is_pure(DrawsWhenBuilt(), again=DrawsWhenBuilt())


class Bringing:
    """A dataset with an order of its own."""

    def __init__(self, n=20):
        self.n = n
        self.asked = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index

    def order(self, *, shuffle, seed):
        self.asked.append((shuffle, seed))
        return Rotated(self.n)


def batches(loader, epochs=2):
    with loader:
        return [batch.tolist() for _ in range(epochs) for batch in loader]


class TestADatasetThatBringsItsOrder:
    def test_is_read_in_that_order(self):
        dataset = Bringing()
        assert batches(Loader.from_dataset(dataset, batch_size=10, shuffle=True, seed=7)) == [
            list(range(10)),
            list(range(10, 20)),
            list(range(1, 11)),
            [*range(11, 20), 0],
        ]
        assert dataset.asked == [(True, 7)]

    def test_is_part_of_the_state(self):
        loader, other = (Loader.from_dataset(dataset, batch_size=10) for dataset in (Bringing(), range(20)))
        with pytest.raises(penstock.StateMismatch, match="order was 'sequential' and is 'rotated'"):
            loader.load_state_dict(other.state_dict())

    def test_may_be_given_another(self):
        assert batches(Loader.from_dataset(Bringing(), batch_size=20, order=SequentialOrder(20)), 1) == [
            list(range(20))
        ]

    @pytest.mark.parametrize("word", ["sampler", "batch_sampler"])
    def test_refuses_a_sampler(self, word):
        with pytest.raises(ValueError, match="Bringing brings its own order, which a sampler would replace"):
            Loader.from_dataset(Bringing(), **{word: SubsetRandomSampler(range(20))})

    def test_must_bring_one(self):
        class Wrong(Bringing):
            def order(self, *, shuffle, seed):
                return list(range(20))

        with pytest.raises(
            TypeError,
            match=r"Wrong.order\(shuffle=, seed=\) returned a list, but an order has __len__, indices and settings",
        ):
            Loader.from_dataset(Wrong())

    def test_may_bring_none_for_once(self):
        class Usual(Bringing):
            def order(self, *, shuffle, seed):
                return None

        usual = Loader.from_dataset(Usual(), batch_size=20, shuffle=True, seed=3)
        assert batches(usual) == batches(Loader.from_dataset(range(20), batch_size=20, shuffle=True, seed=3))
        assert batches(Loader.from_dataset(Usual(), batch_size=3, sampler=[5, 6, 7]), 1) == [[5, 6, 7]]


class Attribute(Bringing):
    order = "C"


class OfAnIndex(Bringing):
    def order(self, index):
        return index


class Property(Bringing):
    @property
    def order(self):
        raise AssertionError("nobody looks at it")


@pytest.mark.parametrize("kind", [Attribute, OfAnIndex, Property])
def test_an_order_that_is_something_else_is_the_users_own(kind):
    assert batches(Loader.from_dataset(kind(), batch_size=20), 1) == [list(range(20))]
