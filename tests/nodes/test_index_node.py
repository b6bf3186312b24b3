"""An `IndexNode` that adds something to the place of its source: the contract of `index_node`, in a node like a
user's."""

from __future__ import annotations

import pickle
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

from penstock import GraphError, Loader, StateError
from penstock._fetch.indices import Nothing
from penstock._nodes.index_node import Facts, FirstNode, check_positions, index_of, items_in, left_at, source_of
from penstock.nodes import (
    Batcher,
    Cycler,
    EndOfEpoch,
    Fetch,
    IndexNode,
    Indices,
    Node,
    ParallelMapper,
    Sampler,
    Sharder,
)
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
        return [
            self.copied(items[k // self.times], k % self.times) for k in range(given + first, end, every)
        ], place_of(behind, rest)

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


# Each method by value.


def said(name: str) -> Any:
    return lambda self, *args, **words: (name, *args, words)


ASKED = ("start", "read", "peek", "at", "skip", "over", "seek", "restart")
Echo: Any = type("Echo", (FirstNode,), {name: said(name) for name in ASKED} | {"left": lambda self, place: place})
OF_ECHO = {"settings": {"a": 1}, "rank_settings": {"b": 2}, "in_rounds": True}


class Doubled(IndexNode[Any]):
    def counted(self, items: int) -> int:
        return 2 * items


def test_each_method_asks_the_source_the_same() -> None:
    """Seen to fail: with each argument left out."""
    node = Doubled(first := Echo(Facts(**OF_ECHO)))
    assert node.start(3, {"x": 1}) == node.start_of(3, {"x": 1}) == ("start", 3, {"x": 1}, {})
    assert node.start(3) == node.start_of(3) == ("start", 3, None, {})
    assert node.read("p", 4, 2, 1) == ("read", "p", 4, 2, 1, {})
    assert node.read("p", 4) == ("read", "p", 4, 1, 0, {})
    assert node.peek("p", "q") == ("peek", "p", "q", {})
    assert node.at(2, "q", wraps=True) == ("at", 2, "q", {"wraps": True})
    assert node.at(2, "q") == ("at", 2, "q", {"wraps": False})
    assert [getattr(node, name)("p") for name in ("skip", "over", "seek", "restart")] == [
        (name, "p", {}) for name in ("skip", "over", "seek", "restart")
    ]
    assert (node.left(7), node.left(0), node.left(None)) == (14, 0, None)
    assert node.first is first
    assert node.upstream is first


def test_facts_are_those_of_the_source_and_what_is_added() -> None:
    first = Echo(Facts(**OF_ECHO))
    assert IndexNode(first).facts == first.facts
    node = IndexNode(first, settings={"c": 3}, rank_settings={"d": 4}, infinite=True)
    assert node.facts == Facts({"a": 1, "c": 3}, {"b": 2, "d": 4}, infinite=True, in_rounds=True)


class Least(FirstNode[Any]):
    """Epoch e has ``5 + e`` items, or an unknown number: item i is ``1000 * e + i``. Notes how it is asked."""

    def __init__(self, *, unknown: bool = False, **facts: Any) -> None:
        super().__init__(Facts({}, **facts))
        self.unknown = unknown
        self.asked: list[Any] = []

    def start(self, epoch: int, after: Any = None) -> Any:
        self.asked.append(("start", epoch, after))
        return {"epoch": epoch, "position": 0}

    def left(self, place: Any) -> int | None:
        return None if self.unknown else 5 + place["epoch"] - place["position"]

    def read(self, place: Any, n: int, every: int = 1, first: int = 0) -> Any:
        self.asked.append(("read", n, every, first))
        end = min(place["position"] + n * every, 5 + place["epoch"])
        positions = np.arange(place["position"] + first, end, every)
        return Indices(place["epoch"], positions, positions + 1000 * place["epoch"]), {**place, "position": end}

    def peek(self, place: Any, positions: Any) -> Any:
        self.asked.append(("peek", positions.tolist()))
        return Indices(place["epoch"], positions, positions % 5 + 1000 * place["epoch"])

    def check(self, state: Any) -> None:
        self.asked.append(("check", state))


def test_what_a_first_node_says_by_default() -> None:
    node = Least()
    assert (node.first, node.settings_at(0, None), node.changing, node.choices(), node.note({})) == (
        node,
        {},
        None,
        {},
        (),
    )
    assert (node.has_notes, node.state_is_per_rank(), node.looks_back, node.sized()) == (False, False, False, True)
    assert node.asked == [("start", 0, None)]
    assert type("Noted", (Least,), {"note": lambda self, place: (1,)})().has_notes is True
    assert (node.claimed(3), Least(unknown=True).claimed(3), Least(unknown=True).sized()) == (8, None, False)
    assert Least(carries_over_epochs=True).looks_back is True
    place = {"epoch": 1, "position": 2}
    assert node.seek(place) is place
    with pytest.raises(GraphError, match="^Least has no empty items$"):
        node.absent(Nothing(0, 0))
    with pytest.raises(GraphError, match="^Least does not count the samples since the start of training$"):
        node.passed(place)
    node.facts.settings["order"] = "mine"
    with pytest.raises(GraphError, match="^mine does not count"):
        node.passed(place)
    with pytest.raises(StopIteration):
        node.over(place)


def test_a_first_node_skips_by_reading_nothing() -> None:
    """Seen to fail: with an item that is read."""
    node = Least()
    assert node.skip({"epoch": 1, "position": 2}) == {"epoch": 1, "position": 6}
    assert node.asked == [("read", 1, 4, 4)]
    end = {"epoch": 1, "position": 6}
    assert node.skip(end) is end
    assert Least(unknown=True).skip(end) is end


def test_a_first_node_is_read_by_address() -> None:
    """First it says why that cannot be. Seen to fail: with a position read before all are checked."""
    node = Least()
    assert node.at(2, np.array([6, 0])) == Indices(2, np.array([6, 0]), np.array([2001, 2000]))
    assert node.asked == [("start", 2, None), ("peek", []), ("peek", [6, 0])]
    assert len(node.at(2, np.arange(0))) == 0
    assert node.asked[-1] == ("peek", [])
    with pytest.raises(IndexError, match="^position 7 is not in epoch 2, which has 7 items.$"):
        node.at(2, np.array([7]))
    assert node.at(2, np.array([7]), wraps=True).positions.tolist() == [7]


@pytest.mark.parametrize("back", [False, True])
def test_a_reset_begins_the_next_epoch_if_part_of_one_was_read(back: bool) -> None:
    """Seen to fail: epoch 1 at first; the same epoch again; the start asked without the place."""
    node = Least(carries_over_epochs=back)
    assert node.restart(None) == {"epoch": 0, "position": 0}
    assert node.restart({"epoch": 3, "position": 0}) == {"epoch": 3, "position": 0}
    place = {"epoch": 3, "position": 1}
    node.asked.clear()
    assert node.restart(place) == {"epoch": 4, "position": 0}
    assert node.asked == [("start", 3, place), ("start", 4, place)]


def test_a_node_reads_one_item_after_another() -> None:
    """And keeps the place: an interrupted read has moved nothing. Seen to fail: with the place moved first; without the
    last item's address."""
    node = IndexNode(first := Least())
    assert node.get_state() == {"epoch": 0, "position": 0}
    assert (node.next().values, node.address()) == (0, Indices(0, 0, 0))  # also without a reset
    node = IndexNode(first := Least())
    assert (next(node).values, node.get_state()) == (0, {"epoch": 0, "position": 1})
    with mock.patch.object(first, "read", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        next(node)
    assert (next(node).values, node.address(), node.get_state()) == (1, Indices(0, 1, 1), {"epoch": 0, "position": 2})
    node.reset()
    assert next(node).values == 1000
    first.asked.clear()
    node.reset({"epoch": 2, "position": 6})
    assert first.asked == [("check", {"epoch": 2, "position": 6})]
    assert next(node).values == 2006
    with pytest.raises(StopIteration):
        next(node)
    for one in (node, first):
        with pytest.raises(TypeError, match="that was started cannot be pickled"):
            pickle.dumps(one)
    cycled = IndexNode(Cycler(Least()))
    assert [item if isinstance(item, EndOfEpoch) else item.values for item in islice(cycled, 7)] == [
        *range(5),
        EndOfEpoch(0),
        1000,
    ]
    cycled.reset()
    assert [item if isinstance(item, EndOfEpoch) else item.values for item in islice(cycled, 6)] == [
        *range(5),
        EndOfEpoch(0),
    ]
    assert cycled.address() is None


class Plus(Node[Any]):
    def transform(self, item: Any) -> Any:
        return item + 10_000


def test_a_users_node_is_read_in_the_same_way() -> None:
    """Seen to fail: with each argument left out."""
    first = Least()
    node = index_of(Plus(first))
    start = {"epoch": 1, "position": 0}
    items, place = node.read(start, 2, 3, 1)
    assert ([(item.positions, item.values) for item in items], place) == (
        [(1, 11_001), (4, 11_004)],
        {"epoch": 1, "position": 6},
    )
    assert [item.values for item in node.read(start, 2)[0]] == [11_000, 11_001]
    assert [item.values for item in node.peek(start, np.array([3, 7]))] == [11_003, 11_002]
    assert [item.values for item in node.at(1, np.array([3, 6]), wraps=True)] == [11_003, 11_001]
    with pytest.raises(IndexError):
        node.at(1, np.array([3, 6]))
    assert index_of(first) is first
    assert node.first is first


class Count(Node[Any]):
    """Three items an epoch, at a position of its own: item i of epoch e is ``1000 * e + i``."""

    def __init__(self, source: Any = None) -> None:
        super().__init__(source)
        self.moved: list[Any] = []
        self.started: list[Any] = []
        self.checked: list[Any] = []

    def reset(self, initial_state: Any = None) -> None:
        Node.reset(self, None)
        self.moved.append(initial_state)
        self.at = {"epoch": 0, "item": 0} if initial_state is None else dict(initial_state)

    def next(self) -> Any:
        if self.at["item"] == 3:
            raise StopIteration
        self.at["item"] += 1
        return 1000 * self.at["epoch"] + self.at["item"] - 1

    def get_state(self) -> Any:
        return dict(self.at)

    def start_of(self, epoch: int, *after: Any) -> Any:
        self.started.append((epoch, *after))
        return {"epoch": epoch, "item": 0}

    def check(self, state: Any) -> None:
        self.checked.append(state)


def test_a_node_with_a_position_of_its_own_is_moved_only_where_it_is_not() -> None:
    """Seen to fail: moved at each read; a place that is equal and not the same taken for its own; the marker kept."""
    node = index_of(own := Count())
    assert (node.first, node.facts, node.left({"epoch": 0, "item": 0})) == (node, Facts({}), None)
    start = node.start(1)
    assert node.read(start, 0) == ([], start)
    assert own.moved == []
    items, place = node.read(start, 1)
    assert (items, place, own.moved) == ([1000], {"epoch": 1, "item": 1}, [start])
    items, place = node.read(place, 5)
    assert (items, place, len(own.moved)) == ([1001, 1002], {"epoch": 1, "item": 3}, 1)
    with pytest.raises(StopIteration):
        node.over(place)
    assert node.read(dict(start), 1, 3, 1) == ([1001], {"epoch": 1, "item": 3})
    assert node.read(dict(start), 2, 2, 0) == ([1000, 1002], {"epoch": 1, "item": 3})
    assert node.read(dict(start), 3) == ([1000, 1001, 1002], {"epoch": 1, "item": 3})
    assert len(own.moved) == 4
    with mock.patch.object(own, "next", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        node.read(place, 1)
    assert node.read(start, 1)[0] == [1000]
    at = node.seek({"epoch": 2, "item": 1})
    assert (at, node.read(at, 1)[0], own.moved[-1]) == ({"epoch": 2, "item": 1}, [2001], {"epoch": 2, "item": 1})
    at = node.restart(at)
    assert (at, own.moved[-1], node.read(at, 1)[0]) == ({"epoch": 0, "item": 0}, None, [0])
    many = len(own.moved)
    node.read(node.restart(at), 1)
    assert len(own.moved) == many + 1
    own.started.clear()
    node.start(4, {"x": 1})
    node.start(4)
    assert own.started == [(4, {"x": 1}), (4,)]
    node.check("s")
    assert own.checked == ["s"]
    for asked in (lambda: node.peek(start, np.arange(0)), lambda: node.at(0, np.arange(1))):
        with pytest.raises(GraphError, match="^Count keeps its own position, so it cannot be read by position$"):
            asked()
    over = index_of(Count(first := Least(in_rounds=True)))
    assert over.first is first
    assert over.facts == first.facts


class Kept(Count):
    """Hands on what its source yields, and counts it."""

    def reset(self, initial_state: Any = None) -> None:
        state = initial_state or {"kept": 0, "source": None}
        Node.reset(self, state["source"])
        self.moved.append(initial_state)
        self.kept = state["kept"]

    def next(self) -> Any:
        item = self.source.next()
        self.kept += 1
        return item

    def get_state(self) -> Any:
        return {"kept": self.kept, "source": self.source.get_state()}

    def start_of(self, epoch: int, *after: Any) -> Any:
        return {"kept": 0, "source": self.source.start_of(epoch)}

    def check(self, state: Any) -> None:
        pass


def test_a_marker_waits_until_it_is_requested() -> None:
    """Seen to fail: read twice; lost where the last read ended before it."""
    node = index_of(own := Kept(Cycler(Least())))
    items, place = node.read(node.start(0), 9)
    assert ([item.values for item in items], place["kept"]) == ([*range(5)], 5)
    assert node.read(place, 2) == ([], place)
    assert node.left(place) == 0
    marker, behind = node.over(place)
    assert (marker, behind["kept"], behind["source"]["epoch"]) == (EndOfEpoch(0), 6, 1)
    assert node.read(behind, 1)[0][0].values == 1000
    assert len(own.moved) == 1
    items, place = node.read(node.start(0), 5)
    marker, behind = node.over(place)  # it was not seen yet
    assert (marker, behind["kept"], len(own.moved)) == (EndOfEpoch(0), 6, 2)
    with pytest.raises(StateError, match="^Kept has another item where its epoch should end: the state is damaged.$"):
        node.over(node.start(0))
    items, place = node.read(node.start(0), 2, 3, 1)
    assert [item.values for item in items] == [1, 4]
    assert node.read(node.seek(node.start(1)), 1)[0][0].values == 1000
    items, place = node.read(node.start(0), 9)
    node.restart(place)
    assert [item.values for item in node.read(place, 1)[0]] == []
    assert node.over(place)[0] == EndOfEpoch(0)


@pytest.mark.parametrize(
    ("positions", "items", "wraps", "wrong"),
    [
        ([], 0, False, None),
        ([0, 4], 5, False, None),
        ([4, 5], 5, False, 5),
        ([-1, 9], 5, False, -1),
        ([2, -1], None, True, -1),
        ([10**9], None, False, None),
        ([5 + 2**16 - 1], 5, True, None),
        ([5 + 2**16], 5, True, 5 + 2**16),
        ([0], 0, True, 0),
        ([0], 1, True, None),
    ],
)
def test_positions_that_no_rank_gets_are_refused(positions: Any, items: Any, wraps: bool, wrong: Any) -> None:
    """Seen to fail: one off at each end."""
    if wrong is None:
        return check_positions(3, np.array(positions, np.int64), items, wraps=wraps)
    with pytest.raises(IndexError, match=f"^position {wrong} is not in epoch 3, which has {items} items.$"):
        check_positions(3, np.array(positions, np.int64), items, wraps=wraps)


class Half(Node[Any]):
    """Delivers half as many; of none, nobody knows how many."""

    def counted(self, items: int) -> int | None:
        return items // 2 or None


def test_what_is_left_is_counted_through_the_nodes() -> None:
    """Seen to fail: what is in flight not taken off; counted in another order; a user's state taken for its
    source's."""
    at = {"epoch": 1, "position": 1}
    first = Least()
    assert left_at(first, at) == left_at(Plus(first), at) == 5
    assert left_at(Half(Repeat(first, 3)), {"source": at, "given": 1}) == 7
    assert left_at(Half(first), {"delivered": [1, 2], "source": at}) == 1
    assert left_at(Half(Half(first)), {"delivered": [], "source": {"delivered": [7], "source": at}}) == 1
    assert left_at(Plus(Plus(first)), {"delivered": [1, 2], "source": {"delivered": [7], "source": at}}) == 2
    assert left_at(Half(Half(first)), {"epoch": 1, "position": 4}) is None
    assert left_at(Kept(Plus(first)), {"kept": 3, "source": at}) == 5
    assert left_at(Kept(Cycler(first)), {"epoch": 1, "source": at}) == 5
    assert left_at(Plus(Least(unknown=True)), at) is None
    assert left_at(Plus(Count()), {"epoch": 0, "item": 0}) is None


def test_the_items_of_an_epoch_are_counted_through_the_nodes() -> None:
    first = Least()
    assert (items_in(first, 2), items_in(Plus(first), 2), items_in(Half(first), 3), items_in(Half(Half(first)), 3)) == (
        7,
        7,
        4,
        2,
    )
    assert (items_in(Half(Repeat(first, 3)), 2), items_in(Repeat(Half(first), 3), 2)) == (10, 9)
    assert items_in(Plus(Half(Half(Plus(Half(first))))), 0) is None
    assert items_in(Plus(Least(unknown=True)), 0) is None
    assert items_in(Plus(Count()), 0) is None


def test_the_source_of_a_first_node_is_the_users() -> None:
    both = SimpleNamespace(sampler=1, iterable=2)
    assert [source_of(one) for one in (both, SimpleNamespace(iterable=2), 3)] == [1, 2, 3]
