"""An `IndexNode` that adds something to the place of its source: the contract of `index_node`, in a node like a user's."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Loader, StateError
from penstock.nodes import Batcher, Cycler, Fetch, IndexNode, Indices, Node, ParallelMapper, Sampler, Sharder
from penstock.orders import SequentialOrder, ShuffledOrder
from penstock.testing import Tagged, assert_resumes_everywhere

if TYPE_CHECKING:
    from collections.abc import Callable

N = 7


class Repeat(IndexNode[Any]):
    """Yields each item ``times`` times in a row. Each copy has a distinct position, so it draws its own random numbers.

    A place is ``{"source": s, "given": g}``: that of the source before an item, of which ``g`` copies were read.
    """

    def __init__(self, source: Node[Any], times: int) -> None:
        super().__init__(source, settings={"times": times})
        self.times = times

    def counted(self, items: int) -> int:
        return items * self.times

    def start(self, epoch: int, after: Any = None) -> Any:
        return place_of(self.upstream.start(epoch, after))

    def left(self, place: Any) -> int | None:
        left = super().left(place["source"])
        return None if left is None else left - place["given"]

    def read(self, place: Any, n: int, every: int = 1, first: int = 0) -> Any:
        given = place["given"]
        whole, rest = divmod(given + n * every, self.times)
        items, behind = self.upstream.read(place["source"], whole)
        items = list(items)
        if rest and len(items) == whole:
            last, after = self.upstream.read(behind, 1)  # part of its copies
            items += last
            rest, behind = (rest, behind) if len(last) else (0, after)
        rest *= len(items) >= whole
        end = min(given + n * every, len(items) * self.times)
        return [self.copied(items[k // self.times], k % self.times) for k in range(given + first, end, every)], place_of(behind, rest)

    def peek(self, place: Any, positions: Any) -> Any:
        items = self.upstream.peek(place["source"], positions // self.times)
        return [self.copied(item, int(position % self.times)) for item, position in zip(items, positions, strict=True)]

    def skip(self, place: Any) -> Any:
        return place_of(self.upstream.skip(place["source"]))

    def over(self, place: Any) -> Any:
        marker, behind = self.upstream.over(place["source"])
        return marker, place_of(behind)

    def check(self, state: Any) -> None:
        if state.keys() != {"source", "given"} or not 0 <= state["given"] < self.times:
            raise StateError(f"{state} is no place of a Repeat.")
        self.upstream.check(state["source"])

    def seek(self, place: Any) -> Any:
        return place_of(self.upstream.seek(place["source"]), place["given"])

    def restart(self, place: Any) -> Any:
        return place_of(self.upstream.restart(None if place is None else place["source"]))

    def copied(self, item: Indices, number: int) -> Indices:
        return Indices(item.epoch, item.positions * self.times + number, item.values)


def place_of(source: Any, given: int = 0) -> Any:
    return {"source": source, "given": given}


def indices(order: type = ShuffledOrder) -> Node[Any]:
    return Sampler(order(N))


UPSTREAM = pytest.param(lambda: Cycler(Repeat(indices(), 2)), id="upstream of the Cycler")
DOWNSTREAM = pytest.param(lambda: Repeat(Cycler(indices()), 2), id="downstream of it")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
@pytest.mark.parametrize("build", [UPSTREAM, DOWNSTREAM])
def test_it_is_dealt_and_resumes_everywhere(build: Callable[[], Node[Any]], tail: Any, world_size: int) -> None:
    for rank in range(world_size):
        assert_resumes_everywhere(lambda rank=rank: Sharder(build(), rank, world_size, tail=tail), steps=36)


def test_every_rank_gets_its_copies() -> None:
    ranks = [Sharder(Cycler(Repeat(indices(SequentialOrder), 2)), rank, 3) for rank in range(3)]
    items = [item for node in ranks for item in islice(node, 5)]
    assert sorted((item.positions, item.values) for item in items) == [(k, k // 2 % N) for k in range(15)]


@pytest.mark.parametrize("build", [UPSTREAM, DOWNSTREAM])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_loader_counts_what_is_left(build: Callable[[], Node[Any]], in_order: bool) -> None:
    """Seen to fail: the node was given the innermost place, and raised a `KeyError`."""
    mapper = ParallelMapper(Batcher(build(), 4), Fetch(Tagged(N)), 1, in_order)
    with Loader(mapper) as loader:
        for _ in loader:
            assert loader.position + loader.remaining == len(loader) == 4


def test_a_finite_graph_knows_how_many_are_left() -> None:
    """Seen to fail as above."""
    with Loader(ParallelMapper(Repeat(indices(), 2), Fetch(Tagged(N)), 0)) as loader:
        for _ in loader:
            assert loader.position + loader.remaining == len(loader) == 14
