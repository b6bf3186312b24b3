"""IndexNode: a node of the index level. Its items are a function of a place.

A *place* is the JSON of a position, such as a state of a `Cycler`, and is immutable. `IndexNode.read` takes a place and
returns the place after the items that it read. The reader keeps it: a `ParallelMapper` in its window, a `Prefetcher`
with each item. So a read that fails or is interrupted has moved nothing, and nodes upstream of the one that is read
have no position at all.

A node may cache things for speed: indices computed ahead, the plan of a sampler's epoch, or how far a stream was read.
A place other than the last one it returned costs time, and nothing else.

To write a node of the index level, override `start`, `left`, `read` and `check` of a `FirstNode`, or `read` (and
`counted`, if needed) of an `IndexNode`. An `IndexNode` that adds something to the place of its source overrides every
method with a place, and nests the source's place under ``"source"``; `Cycler` is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, final

from penstock._errors import GraphError, StateError
from penstock._fetch.indices import Indices
from penstock._nodes.node import BaseNode, EndOfEpoch, Node, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from penstock._fetch.indices import Nothing
    from penstock._nodes.balance import DealtTo
    from penstock._random.changing import Changing

T = TypeVar("T", covariant=True)


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """The constant properties of a node of the index level, read once when the graph is built.

    Attributes:
        settings: Names and JSON values that must match when a state is loaded.
        rank_settings: Names and JSON values that must match on every rank, but are not part of a state.
        infinite: There is a `Cycler`, so epochs end with a marker and never with ``StopIteration``.
        carries_over_epochs: An epoch begins where the previous one was left, even if it was left early.
        in_rounds: Items are made for the number of ranks that they are dealt to: those of a read with ``every=r`` are
            whole rounds of r ranks.
        sharded_by: How items are split among ranks: by the `Sharder` (``"items"``) or by the source itself (``"own"``);
            None if undecided.
    """

    settings: dict[str, Any]
    rank_settings: dict[str, Any] = field(default_factory=dict)
    infinite: bool = False
    carries_over_epochs: bool = False
    in_rounds: bool = False
    sharded_by: Literal["items", "own"] | None = "items"


Facts.__module__ = "penstock.nodes"  # not in the class: a dataclass looks for its module while it is made


class IndexNode(Node[T]):
    """A node whose items are a function of a place. Each method delegates to the source unless overridden.

    Args:
        source: The upstream node.
        settings: Added to the settings of the source.
        rank_settings: Added to the settings that must match on every rank.
        changed: Other `Facts` in which the node differs from its source.
    """

    __module__ = "penstock.nodes"

    facts: Facts
    upstream: IndexNode[Any]  # the source, as this node reads it
    _returned: Any = None  # what `next` returned last
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
                facts,
                settings=facts.settings | (settings or {}),
                rank_settings=facts.rank_settings | (rank_settings or {}),
                **changed,
            )

    @property
    def first(self) -> FirstNode[Any]:
        """The first node of the graph, where items come from."""
        return self.upstream.first

    def start(self, epoch: int, after: State | None = None) -> State:
        """The place before the first item of ``epoch``.

        Args:
            epoch: From 0.
            after: Passed only to a source that `looks_back`: the first node's place where the run is now, in this epoch
                or an earlier one. None: the run has left no epoch early.
        """
        return self.upstream.start(epoch, after)

    def left(self, place: State) -> int | None:
        """Items from ``place`` to the end of its epoch; None if unknown. Starts nothing. Thread-safe."""
        left = self.upstream.left(place)
        return None if left is None else self.counted(left)

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[T], State]:
        """Advance by ``n * every`` items from ``place``.

        Returns those at ``first``, ``first + every``, …, and the place after them all.

        Fewer than ``n`` items mean that the epoch ends there. ``n`` may be 0, which makes a source that plans its epoch
        do so. The next read begins at the returned place, even after an empty read.
        """
        return self.upstream.read(place, n, every, first)

    def peek(self, place: State, positions: np.ndarray) -> Sequence[T]:
        """The items at ``positions`` (int64, shape ``(n,)``) of this node's epoch that contains ``place``.

        Positions past the end wrap around; a node that yields fewer items than its source must map them.

        Raises:
            GraphError: The node cannot be read by position. The `Sharder` adds the argument that needs it, and the
                remedy.
        """
        return self.upstream.peek(place, positions)

    def at(self, epoch: int, positions: np.ndarray, *, wraps: bool = False) -> Sequence[Indices]:
        """The items with these addresses: ``positions`` (int64, shape ``(n,)``) in the global sequence of ``epoch``, as
        an `Indices` has them.

        Moves nothing. With ``wraps``, positions past the end are those of items that are dealt again.

        Raises:
            GraphError: The source cannot be read by position.
            IndexError: A position is not in the epoch.
        """
        return self.upstream.at(epoch, positions, wraps=wraps)

    def skip(self, place: State) -> State:
        """The place at the end of the epoch of ``place``.

        No rank gets the items in between, whose number `left` knows.
        """
        return self.upstream.skip(place)

    def over(self, place: State) -> tuple[EndOfEpoch, State]:
        """The marker at ``place``, where no item is left, and the place after it.

        A finite graph raises ``StopIteration``.
        """
        return self.upstream.over(place)

    def check(self, state: Any) -> None:
        self.upstream.check(state)

    def seek(self, place: State) -> State:
        """Called when a reader moves to ``place``: a forward-only source goes there now.

        Returns where the reader continues.
        """
        return self.upstream.seek(place)

    def restart(self, place: State | None) -> State:
        """Where a `reset` without a state leads a reader at ``place``; None for one that was never reset."""
        return self.upstream.restart(place)

    # The torchdata contract: a reader of this node, which keeps the place.

    def reset(self, initial_state: State | None = None) -> None:
        """Move to ``initial_state``.

        Without one, a finite node begins its next epoch if part of this one was read; an infinite one restarts.
        """
        place = self.restart(self._place) if initial_state is None else initial_state
        self.check(place)
        for node in self.chain():
            super(Node, node).reset()  # from now on it cannot be pickled; see `Node.__getstate__`
        self._place = self.seek(place)

    def next(self) -> T | EndOfEpoch:  # type: ignore[override]
        items, place = self.read(self._place or self.start(0), 1)
        item: T | EndOfEpoch
        item, place = (items[0], place) if len(items) else self.over(place)
        self._returned = item
        self._place = place  # the last step, so that an interrupted read moves nothing
        return item

    def address(self) -> Indices | None:
        return self._returned if type(self._returned) is Indices else None

    def get_state(self) -> State:
        return self.start(0) if self._place is None else self._place

    def start_of(self, epoch: int, after: State | None = None) -> State:
        return self.start(epoch, after)


class Around(Protocol):
    """Reads around samples of training that no rank gets. Their positions count all the same."""

    skips: Any

    def left(self, place: State) -> int:
        """See `IndexNode.left`."""

    def touches(self, place: State, many: int) -> bool:
        """Whether one of the next ``many`` positions is skipped."""

    def following(self, place: State, many: int) -> tuple[np.ndarray, State]:
        """The positions of the next ``many`` samples, and the place behind them."""

    def positions(self, place: State, numbers: Any) -> Any:
        """The positions of the samples ``numbers`` of the epoch of ``place``; those past its end stay past it."""

    def wrapped(self, epoch: int, positions: Any) -> Any:
        """The same positions in ``epoch``, and those past its end dealt once more from its start."""

    def settings_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The settings of a state; see `ScheduledOrder`."""


class FirstNode(IndexNode[T]):
    """The source of indices, one epoch after another."""

    __module__ = "penstock.nodes"

    compared: State | None = None  # the place that `note` will be asked about; set before anything is read
    has_indices = True  # whether its values are dataset indices, and not the data or the number of a batch
    dealt_to: DealtTo | None = None  # set by a `Sharder` that deals the items
    run: int | None = None  # consecutive samples that stay together; None: `passed` is unknown, or of whole plans only
    changing: Changing | None = None  # what a run may change
    skipping: Around | None = None  # set if samples are skipped
    why_ranks_differ: str | None = None  # see `PlainOrder`
    begins_once = False  # whether an epoch that is begun twice may come as another one
    has_workers = False  # whether worker threads or processes are downstream

    def __init__(self, facts: Facts) -> None:
        super().__init__(None)
        self.facts = facts

    @property
    def first(self) -> FirstNode[T]:
        return self

    @property
    def looks_back(self) -> bool:
        """Whether the start of an epoch depends on the run's position before it, which `start` then needs."""
        return self.facts.carries_over_epochs

    def sized(self) -> bool:
        """Whether the number of items in an epoch is known in advance."""
        return self.left(self.start(0)) is not None

    def claimed(self, epoch: int) -> int | None:
        """Items in ``epoch``, if known or claimed by the source; for ``len(loader)`` only."""
        return self.left(self.start(epoch))

    def note(self, place: State, *, again: bool = False) -> tuple[int, ...]:
        """Checksums of what is read from ``place`` on.

        Two ranks read the same if they share one. Empty if there is nothing to compare, or not yet. With ``again``,
        data that may be another one each time is begun once more.

        Asked only about a place where reading began, after something was read. Thread-safe; see `RankNotes`.
        """
        return ()

    who_deals = (
        "{source} can only be read from its beginning, so {world_size} ranks need to know who splits it. With "
        "split='items', every rank reads all of it and keeps its share. With split='own', it gives each rank its own "
        "share, and the loader splits nothing. Pass split to from_dataset, or to the source: IterableSource(..., "
        "split=...). An IterableDataset that splits itself by worker can also be read in parallel, on any number of "
        "ranks: penstock.Stream(dataset, lanes=..., epoch_size=...)."
    )
    """What to say to several ranks if ``sharded_by`` is None."""

    def absent(self, found: Nothing) -> None:
        """A worker found nothing at an item of this source, which so far could not know that.

        Called before a later item is delivered.
        """
        raise GraphError(f"{type(self).__name__} has no empty items")

    @property
    def has_notes(self) -> bool:
        """Whether only other ranks can tell that this source is right, so that `note` is worth asking."""
        return type(self).note is not FirstNode.note

    def settings_at(self, epoch: int, place: Any) -> dict[str, Any]:
        """Settings that depend on ``place``, as for a `ScheduledOrder`.

        None is the end of ``epoch``. Accepts unchecked places.
        """
        return {}

    def recompute(self) -> None:
        """What was computed ahead is no longer valid: a run has changed what comes."""

    def passed(self, place: State) -> int:
        """The samples of training before ``place``, on all ranks together; more, if later ones are planned together
        with those.

        Raises:
            GraphError: They are not counted.
        """
        raise GraphError(
            f"{self.facts.settings.get('order', type(self).__name__)} does not count the samples since the start of "
            f"training"
        )

    def choices(self) -> dict[str, Any]:
        """Settings that must match on every rank, and that a run may change; as in ``rank_settings``."""
        return {} if self.changing is None else self.changing.choices()

    def state_is_per_rank(self) -> bool:
        """Whether a place is valid on one rank only."""
        return False

    def seek(self, place: State) -> State:
        return place

    def at(self, epoch: int, positions: np.ndarray, *, wraps: bool = False) -> Sequence[Indices]:
        start = self.start(epoch)
        found: Any = self.peek(start, positions[:0])  # first, because it says best why not
        check_positions(epoch, positions, self.left(start), wraps=wraps)
        return self.peek(start, positions) if len(positions) else found  # type: ignore[return-value]

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
    """A user's node that changes items, or a mapper without workers, upstream of a node of the index level.

    If ``transform`` raises, its item was not read.
    """

    def __init__(self, node: Node[Any]) -> None:
        super().__init__(node.source)
        self._node = node

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Any], State]:
        items, place = self.upstream.read(place, n, every, first)
        return [self._node._transformed(item) for item in items], place

    def peek(self, place: State, positions: np.ndarray) -> Sequence[Any]:
        return [self._node._transformed(item) for item in self.upstream.peek(place, positions)]

    def at(self, epoch: int, positions: np.ndarray, *, wraps: bool = False) -> Sequence[Any]:
        return [self._node._transformed(item) for item in self.upstream.at(epoch, positions, wraps=wraps)]


@final
class _Positioned(FirstNode[Any]):
    """A node with its own position upstream of a node of the index level: a user's, or one of ours that has items in
    flight.
    """

    def __init__(self, node: Node[Any]) -> None:
        self._below = None if node._source is None else index_of(node._source)
        super().__init__(Facts({}) if self._below is None else self._below.facts)
        self._node = node
        self._stands: State | None = None  # the place where the node is, compared by identity
        # read but not requested yet, between the places before and after it
        self._marker: tuple[State, EndOfEpoch, State] | None = None

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
                raise StateError(
                    f"{type(self._node).__name__} has another item where its epoch should end: the state is damaged."
                )
        _, marker, self._stands = self._marker
        self._marker = None
        return marker, self._stands

    def peek(self, place: State, positions: Any) -> Sequence[Any]:
        raise GraphError(f"{type(self._node).__name__} keeps its own position, so it cannot be read by position")

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
        """The node, moved to ``place``. Its position is unknown until its new place is set, because it may raise."""
        stands, self._stands, self._marker = self._stands, None, None
        if stands is not place:
            self._node.reset(place)
        return self._node


def index_of(node: Node[Any]) -> IndexNode[Any]:
    """``node`` in the form that a downstream node of the index level reads."""
    if isinstance(node, IndexNode):
        return node
    kind = type(node)
    keeps_none = node._keeps_none or (
        kind.next is Node.next and kind.get_state is Node.get_state and kind.reset is Node.reset
    )
    if node._source is not None and keeps_none:
        return _Transformed(node)
    return _Positioned(node)


def check_positions(epoch: int, positions: np.ndarray, items: int | None, *, wraps: bool) -> None:
    """Refuse positions that no rank gets. Padding adds one item less than there are ranks."""
    least, most = (int(positions.min()), int(positions.max())) if len(positions) else (0, 0)
    if least < 0 or (items is not None and len(positions) and most >= items + MOST_RANKS * (wraps and items > 0)):
        raise IndexError(f"position {least if least < 0 else most} is not in epoch {epoch}, which has {items} items.")


MOST_RANKS = 2**16


def left_at(root: Node[Any], state: State) -> int | None:
    """Items that ``root`` has left to deliver in the epoch of ``state``; None if unknown."""
    delivered = 0
    above: list[Node[Any]] = []
    for node in root.chain():
        if isinstance(node, IndexNode):
            left = node.left(state)
            return None if left is None else _counted(left - delivered, above)
        users = not type(node).get_state.__module__.startswith("penstock.")
        # a state of its own, with its source's in it
        if "delivered" in state or (users and "epoch" not in state and "source" in state):
            delivered += len(state.get("delivered", ()))
            state = state["source"]
        above.append(node)
    return None


def source_of(first: Any) -> Any:
    """The user's sampler or iterable that a first node reads; the node itself if there is none."""
    return getattr(first, "sampler", getattr(first, "iterable", first))


def items_in(root: Node[Any], epoch: int) -> int | None:
    """Items in the whole of ``epoch`` at ``root``, if known or claimed by the source."""
    nodes = list(root.chain())
    first = nodes[-1]
    items = first.claimed(epoch) if isinstance(first, FirstNode) else None
    return None if items is None else _counted(items, nodes[:-1])


def _counted(items: int, nodes: list[Node[Any]]) -> int | None:
    counted: int | None = items
    for node in reversed(nodes):
        counted = None if counted is None else node.counted(counted)
    return counted
