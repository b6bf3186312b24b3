"""Cycler: epochs without end."""

from __future__ import annotations

from itertools import islice

import pytest
import torchdata.nodes

from penstock import Batcher, Cycler, EndOfEpoch, IterableSource, Loader, Node, Sampler, SequentialOrder, Sharder, StateError


def test_a_mark_after_each_epoch_and_take_leaves_it():
    node = Cycler(Sampler(SequentialOrder(3)))
    node.reset()
    assert node.take(2).plain() == [0, 1]
    assert node.take(2).plain() == [2]
    assert list(node.take(2)) == []
    assert next(node) == EndOfEpoch(0)
    assert node.take(9).plain() == [0, 1, 2]
    assert next(node) == EndOfEpoch(1)


@pytest.mark.parametrize(
    "source", [lambda: torchdata.nodes.IterableWrapper([]), lambda: IterableSource([]), lambda: Sampler(SequentialOrder(0))]
)
def test_an_empty_epoch_is_a_mark_and_an_endless_loader_does_not_spin(source):
    """Seen to loop forever without the loader's check."""
    for node in (Cycler(source()), Batcher(Cycler(source()), 2)):
        assert list(islice(node, 3)) == [EndOfEpoch(0), EndOfEpoch(1), EndOfEpoch(2)]
    with pytest.raises(ValueError, match="epoch 0 has no batch on this rank, so an infinite loader would spin"):
        next(iter(Loader(source(), infinite=True)))


def test_an_iterator_is_refused_at_once():
    with pytest.raises(TypeError, match="can be read only once"):
        IterableSource(iter(range(3)))


def test_the_epoch_reaches_an_iterable_with_set_epoch():
    class Told:
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(1000 * self.epoch, 1000 * self.epoch + 2))

    with Loader(IterableSource(Told())) as loader:
        assert [list(loader) for _ in range(3)] == [[0, 1], [1000, 1001], [2000, 2001]]


class Named(Node):
    """A user's node with a state of its own, between the source and the Cycler."""

    def reset(self, initial_state=None):
        super().reset(initial_state["source"] if initial_state else None)

    def get_state(self):
        return {"name": "n", "source": self.source.get_state()}

    def start_of(self, epoch):
        return {"name": "n", "source": self.source.start_of(epoch)}

    def check(self, state):
        self.source.check(state["source"])


@pytest.mark.parametrize("wrap", [lambda node: node, Named, lambda node: Named(Named(node))])
def test_a_state_whose_source_is_in_another_epoch_is_refused_at_any_depth(wrap):
    """It would deliver one epoch under the name of the other. Seen to fail: only the source's own state was compared."""
    node = Cycler(wrap(Sampler(SequentialOrder(5))))
    state = node.start_of(3)
    node.check(state)
    node.reset(state)
    next(node)
    state = inner = node.get_state()
    while "source" in inner["source"]:
        inner = inner["source"]
    inner["source"]["epoch"] = 5
    with pytest.raises(StateError, match="it is of epoch 3, but its source is in epoch 5"):
        node.check(state)


def test_at_the_end_of_an_epoch_nothing_is_asked_of_the_source():
    """A reset to the end leaves the source alone. Seen to fail: a Sharder that looked whether it can pad asked for a plan of the epoch that had ended."""
    asked = []

    class Order(SequentialOrder):
        def indices(self, epoch, positions):
            asked.append(epoch)
            return super().indices(epoch, positions)

    node = Sharder(Cycler(Sampler(Order(4))), 0, 2, tail="pad")
    node.reset(node.end_of(0))
    assert next(node) == EndOfEpoch(0)
    assert set(asked) <= {1}
