"""Cycler: epochs without end."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest
import torchdata.nodes

from penstock import Loader, StateError
from penstock.nodes import Batcher, Cycler, EndOfEpoch, IterableSource, Node, Sampler, Sharder
from penstock.orders import SequentialOrder, ShuffledOrder


@pytest.mark.parametrize("block", [3, 4096])
def test_a_read_depends_on_nothing_but_its_place_and_stride(monkeypatch, block):
    """Whatever was computed ahead. Seen to fail: computed indices of which the epoch, the position, the stride or the
    number was not compared."""
    monkeypatch.setattr("penstock._nodes.sampler.BLOCK", block)
    rng, right = random.Random(0), ShuffledOrder(11, 0)
    node = Sampler(ShuffledOrder(11, 0))
    epoch, every, first, n, place = 0, 1, 0, 2, node.start(0)
    for _ in range(3000):
        if place["position"] == 11 and rng.random() < 0.8:
            epoch += 1
            place = node.start(epoch)
        elif rng.random() < 0.15:  # a jump, an interrupt, another number of ranks
            epoch, every, n = rng.randrange(3), rng.choice([1, 1, 2, 3]), rng.choice([0, 1, 2, 2, 5])
            first, place = rng.randrange(every), {"epoch": epoch, "position": rng.choice([0, 0, rng.randrange(12)])}
        before = place
        items, place = node.read(before, n, every, first)
        positions = np.arange(before["position"] + first, min(before["position"] + n * every, 11), every)
        assert (items.epoch, items.positions.tolist()) == (epoch, positions.tolist())
        assert items.values.tolist() == right.indices(epoch, positions).tolist()
        assert place == {"epoch": epoch, "position": min(before["position"] + n * every, 11)}


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 3)])
@pytest.mark.parametrize("samples", [30, 9001], ids=["sorted", "enciphered, in blocks"])
def test_an_epoch_is_begun_with_indices_that_were_computed_before(monkeypatch, samples, rank, world_size):
    """Also where ranks skip what lies between their items. Once the next epoch is begun, nothing is asked of the old
    one: orders keep one.

    Seen to fail: the block ahead dropped when an epoch begins; no index at all asked of an epoch that ends.
    """
    order = ShuffledOrder(samples, 1)
    right, computed, asked = ShuffledOrder(samples, 1), [], []

    def indices(epoch, positions):
        computed.append(epoch)
        asked.append(epoch)
        return right.indices(epoch, positions)

    monkeypatch.setattr(order, "indices", indices)
    loader = Loader(Batcher(Sharder(Cycler(Sampler(order)), rank, world_size, tail="drop"), 4))
    for epoch in range(4):
        given = []
        for k, batch in enumerate(loader):
            assert k or not epoch or epoch not in computed
            computed.clear()
            given += batch
        expected = ShuffledOrder(samples, 1).indices(
            epoch, np.arange(rank, samples // world_size * world_size, world_size)
        )
        assert given == expected.tolist()
    assert asked == sorted(asked)


@pytest.mark.parametrize(
    "source",
    [lambda: torchdata.nodes.IterableWrapper([]), lambda: IterableSource([]), lambda: Sampler(SequentialOrder(0))],
)
def test_an_empty_epoch_is_a_mark_and_an_endless_loader_does_not_spin(source):
    """Seen to loop forever without the loader's check."""
    for node in (Cycler(source()), Batcher(Cycler(source()), 2)):
        assert list(islice(node, 3)) == [EndOfEpoch(0), EndOfEpoch(1), EndOfEpoch(2)]
    with pytest.raises(ValueError, match="epoch 0 has no batch on this rank, so an infinite loader would loop"):
        next(iter(Loader(source(), infinite=True)))


def test_an_iterator_is_refused_at_once():
    with pytest.raises(TypeError, match="can be read only once"):
        IterableSource(iter(range(3)))


class Named(Node):
    """A user's node with a state of its own, between the source and the Cycler."""

    def reset(self, initial_state=None):
        super().reset(initial_state["source"] if initial_state else None)

    def get_state(self):
        return {"name": "n", "source": self.source.get_state()}

    def start_of(self, epoch, after=None):
        return {"name": "n", "source": self.source.start_of(epoch, after)}

    def check(self, state):
        self.source.check(state["source"])


@pytest.mark.parametrize("wrap", [lambda node: node, Named, lambda node: Named(Named(node))])
def test_a_state_whose_source_is_in_another_epoch_is_refused_at_any_depth(wrap):
    """It would deliver one epoch under the name of the other. Seen to fail: only the source's own state was
    compared."""
    node = Cycler(wrap(Sampler(SequentialOrder(5))))
    state = node.start_of(3)
    node.check(state)
    node.reset(state)
    next(node)
    state = inner = node.get_state()
    while "source" in inner["source"]:
        inner = inner["source"]
    inner["source"]["epoch"] = 5
    with pytest.raises(StateError, match="it is in epoch 3, but its source is in epoch 5"):
        node.check(state)


def test_at_the_end_of_an_epoch_nothing_is_asked_of_the_source():
    """A reset to the end leaves the source alone. Seen to fail: a Sharder that looked whether it can pad asked for a
    plan of the epoch that had ended."""
    asked = []

    class Order(SequentialOrder):
        def indices(self, epoch, positions):
            asked.append(epoch)
            return super().indices(epoch, positions)

    node = Sharder(Cycler(Sampler(Order(4))), 0, 2, tail="pad")
    node.reset({"epoch": 0, "source": None})
    assert next(node) == EndOfEpoch(0)
    assert set(asked) <= {1}
