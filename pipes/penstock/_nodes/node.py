"""The contract of every node in the graph, and the end-of-epoch marker.

A graph is a chain of nodes, each with one ``source``. At the index level items are `Indices`; downstream of the mapper
they are batches. `EndOfEpoch` travels in the stream, through every node, in order. This is the only file that imports
torchdata.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeGuard, TypeVar, cast, final, runtime_checkable

from penstock._arguments import Shown
from penstock._errors import GraphError, StateError
from penstock._fetch.indices import Indices
from penstock._workers.meter import now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock._statistics import NodeStatistics

T = TypeVar("T", covariant=True)
State = dict[str, Any]

if TYPE_CHECKING:  # torchdata has no types, and a class with an untyped base would be compatible with anything

    @runtime_checkable
    class BaseNode(Protocol[T]):
        """The interface of torchdata's nodes, which ours inherit."""

        def __iter__(self) -> Iterator[T]:
            raise AssertionError

        def __next__(self) -> T:
            raise AssertionError

        def reset(self, initial_state: State | None = None) -> None:
            raise AssertionError

        def next(self) -> T:
            raise AssertionError

        def get_state(self) -> State:
            raise AssertionError

        def state_dict(self) -> State:
            raise AssertionError

else:
    from torchdata.nodes import BaseNode


@final
@dataclass(frozen=True, slots=True)
class EndOfEpoch:
    """The end-of-epoch marker, which a `Cycler` emits after the last item of ``epoch``."""

    epoch: int


EndOfEpoch.__module__ = "penstock.nodes"  # not in the class: a dataclass looks for its module while it is made


def is_marker(item: object) -> bool:
    """Whether ``item`` is an `EndOfEpoch`."""
    return isinstance(item, EndOfEpoch)


class Node(Shown, BaseNode[T], Generic[T]):
    """A node of the graph. To write one that changes items, override `transform`; nothing else is needed.

    ``transform`` receives values only, never a marker or an address, and the state of such a node is its source's. A
    node with its own state overrides `reset`, `get_state`, `start_of`, `check` and `next` together, and nests its
    source's state under ``"source"``. A node that does not deliver one item for each item it gets overrides `counted`.

    Args:
        source: The upstream node: a penstock node or, upstream of the `Cycler` only, any ``torchdata.nodes.BaseNode``.
            None for the first node.

    Raises:
        GraphError: ``source`` is not a node, or it is a foreign node downstream of a `Cycler`.
    """

    __module__ = "penstock.nodes"

    _adapter: ClassVar[Callable[[BaseNode[Any]], Node[Any]]]
    """Wraps a foreign node in an `IterableSource`. That file imports this one, so the package sets this attribute."""

    _read_ns = _own_ns = 0  # see `_was_read`
    _keeps_none = False  # whether it has no item in flight, although it has a `next` of its own
    _source: Node[Any] | None = None  # here too, for nodes that do not call `super().__init__`

    def __init__(self, source: BaseNode[Any] | None = None) -> None:
        super().__init__()
        self._source = None if source is None else as_node(source)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "get_state" in vars(cls) and (missing := {"reset", "start_of", "check"} - vars(cls).keys()):
            raise GraphError(
                f"{cls.__name__} overrides get_state, so it must also override {', '.join(sorted(missing))}: reset, "
                f"start_of and check have to agree with get_state about what a state holds."
            )
        if "start_of" in vars(cls):
            try:
                inspect.signature(cls.start_of).bind(None, 0, None)
            except TypeError:
                raise GraphError(
                    f"{cls.__name__}.start_of must take a second argument, after=None, and pass it on, as in "
                    f"self.source.start_of(epoch, after): where an epoch of an endless stream begins depends on where "
                    f"the run is."
                ) from None

    def __getstate__(self) -> dict[str, Any]:
        """Let a graph be pickled or copied only before it starts; a started graph has threads, processes and a
        position.
        """
        state: dict[str, Any] = self.__dict__
        if state.get("_BaseNode__initialized"):  # torchdata sets this at the first reset
            raise TypeError(
                f"a {type(self).__name__} that was started cannot be pickled or copied, because its workers and their "
                f"tasks cannot. Pickle or copy the graph before you request its first item, or build a new graph and "
                f"load the state of this one."
            )
        return state

    @property
    def source(self) -> Node[Any]:
        """The upstream node."""
        if self._source is None:
            raise GraphError(
                f"{type(self).__name__} has no source. If it has an __init__ of its own, write "
                f"super().__init__(source) there. If it is the first node of a graph, override reset, next, get_state, "
                f"start_of and check, which ask the source by default."
            )
        return self._source

    def _seeds(self) -> dict[str, Any]:
        """The seeds of the random numbers that it provides, by their names in a state."""
        return {}

    def transform(self, item: Any) -> Any:
        """Return the new value of ``item``. Never called for a marker."""
        return item

    # The torchdata contract: reset, next, get_state.

    def reset(self, initial_state: State | None = None) -> None:
        """Move to ``initial_state``, or to the very beginning. May start workers, but reads nothing yet."""
        super().reset(initial_state)
        if self._source is not None:
            self._source.reset(initial_state)

    def next(self) -> T:
        """The next item, or an `EndOfEpoch`. Only a finite graph raises ``StopIteration``."""
        item: T = self._transformed(next(self.source))
        return item

    def get_state(self) -> State:
        """The position after the last delivered item, as a new dict of JSON types."""
        return self.source.get_state()

    # Our additions to the contract.

    def address(self) -> Indices | None:
        """What `next` returned last, as indices with their address.

        None if nobody knows, as downstream of a user's own ``next``.
        """
        return None if self._source is None or type(self).next is not Node.next else self._source.address()

    def again(self, item: Any) -> Any:
        """What `next` made of ``item``, an item of the source. Moves nothing, and counts nothing.

        Raises:
            GraphError: The node overrides ``next``.
        """
        if type(self).next is not Node.next:
            raise GraphError(
                f"{type(self).__name__} overrides next, so nobody else knows what it makes of one item of its source."
            )
        return self._transformed(item)

    def start_of(self, epoch: int, after: State | None = None) -> State:
        """The state before the first item of ``epoch``; see `IndexNode.start`.

        A node with its own state overrides it.
        """
        return self.source.start_of(epoch) if after is None else self.source.start_of(epoch, after)

    def check(self, state: Any) -> None:
        """Refuse a state that `reset` cannot load, because states come from files.

        Pure; starts nothing. A node with its own state overrides it.

        Raises:
            StateError: The state is wrong; the message says what, and where.
        """
        self.source.check(state)

    def counted(self, items: int) -> int | None:
        """The number of items that the node makes from ``items`` of its source; None if unknown.

        A node that changes the number overrides it.
        """
        return items

    @property
    def ahead(self) -> int | None:
        """The most items that it may have taken from its source and not delivered, alike on all ranks; None if that may
        differ.
        """
        return 0

    @property
    def told(self) -> Sequence[Any]:
        """The user's own samplers that are told which epoch the loop begins."""
        return ()

    @property
    def watched(self) -> Sequence[Any]:
        """Data with a ``set_epoch``, which is told where it is read. If the user sets its epoch, that is a request."""
        return ()

    def tell(self, epoch: int) -> None:
        """An epoch is over: tell what the data holds, in this process, that ``epoch`` comes next."""

    def settle(self, epoch: int) -> bool:
        """``epoch`` begins. Whether what was loaded ahead holds; not if the loop has told a part of the data another
        number.
        """
        return True

    @property
    def runs_ahead(self) -> bool:
        """Whether the next epoch may be read before the loop asks for it. Called in the thread that reads the node."""
        return self._source is None or self._source.runs_ahead

    def begin(self, place: State) -> bool:
        """Called when the loop asks for the first item after ``place``, a place of the first node, where an epoch or a
        resumed run begins.

        Returns whether what this node has read ahead from there still holds. If not, the graph is reset to that place.
        In the consumer's thread, while no other thread reads the node.
        """
        return True

    def interrupt(self) -> None:
        """Make a `next` that waits in another thread raise `ClosedError`. Called before a reset or a shutdown."""
        if self._source is not None:
            self._source.interrupt()

    def shutdown(self) -> None:
        """End all threads and processes of this node and of the nodes upstream."""
        if self._source is not None:
            self._source.shutdown()

    def statistics(self, elapsed_s: float = 0.0, items: int = 0) -> tuple[NodeStatistics, ...]:
        """What the nodes have done, from the first to this one.

        Args:
            elapsed_s: How long the graph has been read; 0 gives no rates and no waits for a consumer.
            items: How many items of this node were read.
        """
        upstream = () if self._source is None else self._source.statistics(elapsed_s, self._items_read(items))
        return (*upstream, self._counted(elapsed_s, items))

    def _was_read(self, ns: int) -> None:
        """Record the total time spent reading this node, from another thread or into a window.

        Time that is not its own work is its source's.
        """
        self._read_ns = ns
        if self._source is not None:
            self._source._was_read(max(0, ns - self._own_ns))

    def _items_read(self, items: int) -> int:
        """How many items of the source were read to deliver ``items``."""
        return items

    def _counted(self, elapsed_s: float, items: int) -> NodeStatistics:
        from penstock._statistics import NodeStatistics

        source_s = 0.0 if self._source is None else self._source._read_ns / 1e9
        read_s = self._read_ns / 1e9
        return NodeStatistics(
            type(self).__name__,
            items=items,
            items_per_s=items / elapsed_s if elapsed_s else 0.0,
            source_wait_s=source_s,
            consumer_wait_s=max(0.0, elapsed_s - read_s),
            work_s=max(0.0, read_s - source_s),
        )

    def _stages(self) -> dict[str, Any]:
        """The node's contribution to the `LoaderStatistics`, by field name."""
        return {}

    def chain(self) -> Iterator[Node[Any]]:
        """The nodes of the graph, from this one upstream to the first."""
        node: Node[Any] | None = self
        while node is not None:
            yield node
            node = node._source

    def _transformed(self, item: Any) -> Any:
        if isinstance(item, EndOfEpoch):
            return item
        began = now()
        value = item.with_values(self.transform(item.values)) if isinstance(item, Indices) else self.transform(item)
        self._own_ns += now() - began
        return value


def as_node(source: Any) -> Node[Any]:
    """``source`` as a `Node`. It may be one of torchdata's."""
    if not isinstance(source, BaseNode):
        raise GraphError(
            f"a source must be a torchdata.nodes.BaseNode, not {type(source).__name__}. Wrap an iterable in "
            f"penstock.nodes.IterableSource."
        )
    return source if isinstance(source, Node) else Node._adapter(source)


def origin(root: Node[Any]) -> BaseNode[Any]:
    """The first node of a graph. It may be one of torchdata's, and even have one of ours upstream."""
    *_, first = root.chain()
    found: Any = first
    upstream = getattr(first, "iterable", None)
    while isinstance(upstream, BaseNode):
        if isinstance(upstream, Node):
            return origin(upstream)
        found, upstream = upstream, getattr(upstream, "source", None)
    return cast("BaseNode[Any]", found)


def fields(state: Any, **kinds: type) -> dict[str, Any]:
    """Return ``state`` if it is a dict with exactly these keys and types. An ``int`` must not be negative.

    Raises:
        StateError: It is not; the message says what came instead.
    """
    if not isinstance(state, dict) or state.keys() != kinds.keys():
        came = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise StateError(
            f"expected a state with the keys {sorted(kinds)}, but got {came}: the state is damaged, or belongs to "
            f"another graph."
        )
    for key, kind in kinds.items():
        value: Any = state[key]
        in_bounds = kind is not int or (not isinstance(value, bool) and isinstance(value, int) and 0 <= value < 2**63)
        if not isinstance(value, kind) or not in_bounds:
            raise StateError(
                f"{key!r} in a state must be {'a whole number of at least 0' if kind is int else kind.__name__}, not "
                f"{value!r:.80}."
            )
    return state


def epoch_of(state: State) -> int:
    """The epoch of a state, as saved by the Cycler. Other nodes with a state nest the Cycler's under ``"source"``."""
    while "epoch" not in state:
        state = state["source"]
    epoch: int = state["epoch"]
    return epoch


def seeds_of(root: Node[Any]) -> dict[str, Any]:
    """The seeds of the graph that ends with ``root``. Of several mappers, only the first has positions to seed by."""
    seeds: dict[str, Any] = {}
    for node in root.chain():
        seeds |= node._seeds()
    return seeds


def place_of(state: Any) -> tuple[int, Any] | None:
    """The epoch, and the state of the graph's first node (None at the end of an epoch). Accepts unchecked states."""
    epoch = None
    while isinstance(state, dict):
        epoch = state.get("epoch", epoch)
        if "source" not in state:
            break
        state = state["source"]
    return (epoch, state) if is_count(epoch) and (state is None or isinstance(state, dict)) else None


def is_count(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is a whole number that a state may hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
