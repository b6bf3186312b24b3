"""IndexNode: a node of the index level. What it delivers is a function of a place.

A *place* is the JSON of a position, such as a state of a `Cycler`. It is never changed once it is made. `IndexNode.read` takes one and returns the one
behind what it read, and whoever reads keeps it: a `ParallelMapper` in its window, a `Prefetcher` with each item. So a read that fails or is interrupted
has moved nothing, and a node upstream of the one that is read has no position at all.

A node may remember things for speed: indices computed ahead, the plan of a sampler's epoch, or how far a stream was read. A place other than the one
that it returned last costs it time, and nothing else.

To write a node of the index level, override `start`, `left`, `read` and `check` of a `FirstNode`, or `read`, and perhaps `counted`, of an `IndexNode`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

from penstock._errors import GraphError, StateError
from penstock._nodes.node import BaseNode, EndOfEpoch, Node, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

T = TypeVar("T", covariant=True)


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """What never changes about a node of the index level: asked once, when the graph is built.

    Attributes:
        settings: What must be the same when a state is loaded: names and JSON values.
        rank_settings: What must be the same on every rank, although no state holds it: names and JSON values.
        infinite: There is a `Cycler`, so that epochs end with a marker and never with ``StopIteration``.
        carries_over_epochs: An epoch begins where the one before it was left, even if that was left early.
        sharded_by: Who deals the items to the ranks: the `Sharder` (``"items"``), or the source itself (``"own"``); None if the user has not said.
        may_run_ahead: The next epoch may be read early. Not if the training loop may change the items that the source will yield.
    """

    settings: dict[str, Any]
    rank_settings: dict[str, Any] = field(default_factory=dict)
    infinite: bool = False
    carries_over_epochs: bool = False
    sharded_by: Literal["items", "own"] | None = "items"
    may_run_ahead: bool = True


Facts.__module__ = "penstock.nodes"  # not in the class: a dataclass looks for its module while it is made


class IndexNode(Node[T]):
    """A node whose items are a function of a place. Each method asks the source, unless it is overridden.

    Args:
        source: The upstream node.
        settings: What this node adds to the settings of its source.
        rank_settings: What it adds to those that must be the same on every rank.
        changed: Other `Facts` in which it differs from its source.
    """

    __module__ = "penstock.nodes"

    facts: Facts
    upstream: IndexNode[Any]  # the source, as this node reads it
    _place: State | None = None  # after the item that `next` returned last; None before the first `reset`

    def __init__(
        self,
        source: BaseNode[Any] | None,
        *,
        settings: dict[str, Any] | None = None,
        rank_settings: dict[str, Any] | None = None,
        **changed: Any,
    ) -> None:
        super().__init__(source)
        if self._source is not None:
            self.upstream = index_of(self._source)
            facts = self.upstream.facts
            self.facts = replace(
                facts, settings=facts.settings | (settings or {}), rank_settings=facts.rank_settings | (rank_settings or {}), **changed
            )

    @property
    def first(self) -> FirstNode[Any]:
        """Where the items come from."""
        return self.upstream.first

    def start(self, epoch: int, after: State | None = None) -> State:
        """The place before the first item of ``epoch``.

        Args:
            epoch: From 0.
            after: Given only to a source that `looks_back`: the place of the first node where the run is now, in this epoch or an earlier one. None: the run
                left no epoch early.
        """
        return self.upstream.start(epoch, after)

    def left(self, place: State) -> int | None:
        """Items from ``place`` to the end of its epoch; None if unknown. Starts nothing; any thread may ask."""
        left = self.upstream.left(place)
        return None if left is None else self.counted(left)

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[T], State]:
        """Pass over ``n * every`` items from ``place`` on. Returns those at ``first``, ``first + every``, …, and the place behind them all.

        Fewer than ``n`` items mean that the epoch ends there. ``n`` may be 0: a source that plans its epoch does so then. Whoever reads on begins at the
        place that this has returned, also after an empty read.
        """
        return self.upstream.read(place, n, every, first)

    def peek(self, place: State, positions: np.ndarray) -> Sequence[T]:
        """The items of the epoch of ``place`` at ``positions`` (int64, shape ``(n,)``) among those that this node yields.

        Positions past the last of them wrap around: a node that yields fewer items than its source has must map them.

        Raises:
            GraphError: It cannot be read by position. The `Sharder`, who knows the user's word for why it asks, adds that and the remedy.
        """
        return self.upstream.peek(place, positions)

    def skip(self, place: State) -> State:
        """The place at the end of the epoch of ``place``. No rank gets the items between, of which `left` knows the number."""
        return self.upstream.skip(place)

    def over(self, place: State) -> tuple[EndOfEpoch, State]:
        """The marker at ``place``, where no item is left, and the place behind the marker. ``StopIteration`` of a finite graph."""
        return self.upstream.over(place)

    def check(self, state: Any) -> None:
        self.upstream.check(state)

    def seek(self, place: State) -> State:
        """A reader was moved to ``place``: what can only be read forward goes there now. Returns where the reader is to read on."""
        return self.upstream.seek(place)

    def restart(self, place: State | None) -> State:
        """Where a `reset` without a state leads, of a reader at ``place``, or of one that was never reset."""
        return self.upstream.restart(place)

    # The torchdata contract: a reader of this node, who keeps the place.

    def reset(self, initial_state: State | None = None) -> None:
        """Move to ``initial_state``. Without one: a finite node begins its next epoch if part of this one was read, an infinite one begins again."""
        place = self.restart(self._place) if initial_state is None else initial_state
        self.check(place)
        for node in self.chain():
            super(Node, node).reset()  # from now on it cannot be pickled; see `Node.__getstate__`
        self._place = self.seek(place)

    def next(self) -> T | EndOfEpoch:  # type: ignore[override]
        items, place = self.read(self._place or self.start(0), 1)
        item: T | EndOfEpoch
        item, place = (items[0], place) if len(items) else self.over(place)
        self._place = place  # the last step, so that a read that is interrupted has moved nothing
        return item

    def get_state(self) -> State:
        return self.start(0) if self._place is None else self._place

    def start_of(self, epoch: int, after: State | None = None) -> State:
        return self.start(epoch, after)


class FirstNode(IndexNode[T]):
    """Where indices come from: one epoch after another."""

    __module__ = "penstock.nodes"

    def __init__(self, facts: Facts) -> None:
        super().__init__(None)
        self.facts = facts

    @property
    def first(self) -> FirstNode[T]:
        return self

    @property
    def looks_back(self) -> bool:
        """Whether the start of an epoch depends on where the run was before it, so that `start` must know."""
        return self.facts.carries_over_epochs

    def sized(self) -> bool:
        """Whether the number of items in an epoch is known beforehand."""
        return self.left(self.start(0)) is not None

    def claimed(self, epoch: int) -> int | None:
        """Items in ``epoch``, as far as anybody says so: for ``len(loader)`` only."""
        return self.left(self.start(epoch))

    def settings_at(self, epoch: int, place: Any) -> dict[str, Any]:
        """Entries of the settings that depend on how far ``place`` is: those of a `ScheduledOrder`. None is the end of ``epoch``. Takes unchecked places."""
        return {}

    def state_is_per_rank(self) -> bool:
        """Whether a place is valid on one rank only."""
        return False

    def seek(self, place: State) -> State:
        return place

    def skip(self, place: State) -> State:
        left = self.left(place)
        return place if not left else self.read(place, 1, left, left)[1]

    def over(self, place: State) -> tuple[EndOfEpoch, State]:
        raise StopIteration

    def restart(self, place: State | None) -> State:
        if place is None:
            return self.start(0)
        start = self.start(place["epoch"], place)
        return start if place == start else self.start(place["epoch"] + 1, place)


@final
class _Transformed(IndexNode[Any]):
    """A user's node that changes items, or a `Mapper`, below a node of the index level. If ``transform`` raises, its item was not read."""

    def __init__(self, node: Node[Any]) -> None:
        super().__init__(node.source)
        self._node = node

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Any], State]:
        items, place = self.upstream.read(place, n, every, first)
        return [self._node._transformed(item) for item in items], place

    def peek(self, place: State, positions: np.ndarray) -> Sequence[Any]:
        return [self._node._transformed(item) for item in self.upstream.peek(place, positions)]


@final
class _Positioned(FirstNode[Any]):
    """A node that keeps a position of its own, below a node of the index level: a user's, or one of ours that has items under way."""

    def __init__(self, node: Node[Any]) -> None:
        self._below = None if node._source is None else index_of(node._source)
        super().__init__(Facts({}) if self._below is None else self._below.facts)
        self._node = node
        self._stands: State | None = None  # the place where the node is, known by its identity
        self._marker: tuple[State, EndOfEpoch, State] | None = None  # read, and not asked for yet: the place before it, and behind it

    @property
    def first(self) -> FirstNode[Any]:
        return self if self._below is None else self._below.first

    def start(self, epoch: int, after: State | None = None) -> State:
        return self._node.start_of(epoch, after) if after else self._node.start_of(epoch)

    def left(self, place: State) -> int | None:
        return left_at(self._node, place)

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Any], State]:
        if self._marker is not None and self._marker[0] is place:
            return [], place
        taken: list[Any] = []
        if n == 0:
            return taken, place
        node = self._moved(place)
        for k in range(n * every):
            before = node.get_state() if self.facts.infinite else place
            try:
                item = next(node)
            except StopIteration:
                break
            if isinstance(item, EndOfEpoch):
                self._marker = before, item, node.get_state()
                return taken, before
            if k % every == first:
                taken.append(item)
        self._stands = node.get_state()
        return taken, self._stands

    def over(self, place: State) -> tuple[EndOfEpoch, State]:
        if not self.facts.infinite:
            raise StopIteration
        if self._marker is None or self._marker[0] is not place:
            items, place = self.read(place, 1)
            if items or self._marker is None:
                raise StateError(f"{type(self._node).__name__} has another item where its epoch was to end: the state is damaged.")
        _, marker, self._stands = self._marker
        self._marker = None
        return marker, self._stands

    def peek(self, place: State, positions: Any) -> Sequence[Any]:
        raise GraphError(f"{type(self._node).__name__} keeps a position of its own, so it cannot be read by position")

    def check(self, state: Any) -> None:
        self._node.check(state)

    def seek(self, place: State) -> State:
        node = self._moved(place)
        self._stands = place = node.get_state()
        return place

    def restart(self, place: State | None) -> State:
        self._node.reset()
        self._marker, self._stands = None, self._node.get_state()
        return self._stands

    def _moved(self, place: State) -> Node[Any]:
        """The node, at ``place``. Until its new place is known, nobody knows where it is: an exception may come out of it."""
        stands, self._stands, self._marker = self._stands, None, None
        if stands is not place:
            self._node.reset(place)
        return self._node


def index_of(node: Node[Any]) -> IndexNode[Any]:
    """``node`` as a node of the index level downstream reads it."""
    if isinstance(node, IndexNode):
        return node
    kind = type(node)
    if node._source is not None and kind.next is Node.next and kind.get_state is Node.get_state and kind.reset is Node.reset:
        return _Transformed(node)
    return _Positioned(node)


def left_at(root: Node[Any], state: State) -> int | None:
    """Items that ``root`` has still to deliver in the epoch of ``state``; None if unknown."""
    above = []
    for node in root.chain():
        if isinstance(node, IndexNode):
            break
        above.append(node)
    else:
        return None
    delivered = 0
    while "epoch" not in state:
        delivered += len(state.get("delivered", ()))
        state = state["source"]
    left = node.left(state)
    return None if left is None else _counted(left - delivered, above)


def items_in(root: Node[Any], epoch: int) -> int | None:
    """Items in the whole of ``epoch`` at ``root``, as far as anybody says so."""
    nodes = list(root.chain())
    first = nodes[-1]
    items = first.claimed(epoch) if isinstance(first, FirstNode) else None
    return None if items is None else _counted(items, nodes[:-1])


def _counted(items: int, nodes: list[Node[Any]]) -> int | None:
    counted: int | None = items
    for node in reversed(nodes):
        counted = None if counted is None else node.counted(counted)
    return counted
