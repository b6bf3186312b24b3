"""The contract that every box of the graph keeps, and the two things that travel through it besides data.

A graph is a chain of nodes, each with one ``source``. At the index level items are `Indices`; behind the mapper they are
batches. `EndOfEpoch` travels in the stream, through every node, in order. This is the only file that imports torchdata.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast, final

import numpy as np
from torchdata.nodes import BaseNode as BaseNode  # type: ignore[import-untyped]

from penstock._errors import GraphError, StateError

T = TypeVar("T", covariant=True)
State = dict[str, Any]


@final
@dataclass(frozen=True, slots=True)
class EndOfEpoch:
    """The mark that a `Cycler` puts behind the last item of ``epoch``."""

    epoch: int


@final
class Indices(Sequence[Any]):
    """What to load, with its address: one item, or a batch of them.

    Attributes:
        epoch: The epoch that the items belong to, from 0.
        positions: The items' places in the global sequence of the epoch, before sharding: an ``int`` for one item, an int64
            array of shape ``(batch,)`` for a batch. Padding runs on past the end of the epoch.
        values: The dataset indices themselves: an ``int`` (or whatever a sampler yields) for one item, an int64 array of
            shape ``(batch,)``, or a list where they are not all integers, for a batch.
    """

    __slots__ = ("epoch", "positions", "values")

    def __init__(self, epoch: int, positions: Any, values: Any) -> None:
        self.epoch = epoch
        self.positions = positions
        self.values = values

    @property
    def is_batch(self) -> bool:
        """Whether this is a batch (of any size) rather than one item."""
        return isinstance(self.positions, np.ndarray)

    def with_values(self, values: Any) -> Indices:
        """Other values at the same address."""
        return Indices(self.epoch, self.positions, values)

    def plain(self) -> Any:
        """The values alone, as a user's function takes them: one value, or a list."""
        return self.values.tolist() if isinstance(self.values, np.ndarray) else self.values

    def __len__(self) -> int:
        if not self.is_batch:
            raise TypeError("one item of the index level has no length")
        return len(self.positions)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Indices(self.epoch, self.positions[place], self.values[place])
        value = self.values[place]
        return Indices(self.epoch, int(self.positions[place]), int(value) if isinstance(value, np.integer) else value)

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Indices)
            and self.epoch == other.epoch
            and self.is_batch == other.is_batch
            and np.array_equal(self.positions, other.positions)
            and self.plain() == other.plain()
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        if self.is_batch and isinstance(self.values, np.ndarray):  # NumPy's own way takes three times as long
            return _unpickled, (self.epoch, self.positions.tobytes(), self.values.tobytes())
        return Indices, (self.epoch, self.positions, self.values)

    def __repr__(self) -> str:
        positions = self.positions.tolist() if self.is_batch else self.positions
        return f"Indices(epoch={self.epoch}, positions={positions}, values={self.plain()})"


def _unpickled(epoch: int, positions: bytes, values: bytes) -> Indices:
    return Indices(epoch, np.frombuffer(positions, np.int64).copy(), np.frombuffer(values, np.int64).copy())


def is_mark(item: object) -> bool:
    """Whether ``item`` is an `EndOfEpoch`."""
    return isinstance(item, EndOfEpoch)


def pack(items: Sequence[Any]) -> Any:
    """Single `Indices` made into one batch of them; anything else into a list."""
    if isinstance(items, Indices):
        return items
    if not items or not all(isinstance(item, Indices) and not item.is_batch for item in items):
        return list(items)
    values = [item.values for item in items]
    integers = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    return Indices(
        items[0].epoch,
        np.array([item.positions for item in items], dtype=np.int64),
        np.array(values, dtype=np.int64) if integers else values,
    )


class Node(BaseNode[T], Generic[T]):  # type: ignore[misc]  # torchdata has no types
    """A box of the graph. To write one that changes items, override `transform`; nothing else is needed.

    ``transform`` sees values, never a mark and never an address, and the state of such a node is that of its source. A node
    with a state of its own overrides `reset`, `get_state`, `start_of` and `next` together, and nests its source's state under
    ``"source"``.

    Args:
        source: The upstream node: one of ours, or, below the `Cycler` only, any ``torchdata.nodes.BaseNode``. None for a node
            that has none.

    Raises:
        GraphError: ``source`` is not a node, or a foreign node that stands above a `Cycler`.
    """

    def __init__(self, source: BaseNode[Any] | None = None) -> None:
        super().__init__()
        self._source = source if source is None or isinstance(source, Node) else Foreign(source)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "get_state" in vars(cls) and not {"reset", "start_of"} <= vars(cls).keys() and cls.__module__.partition(".")[0] != "penstock":
            raise GraphError(f"{cls.__name__} has a get_state of its own, so it also needs its own reset and start_of: they must agree.")

    @property
    def source(self) -> Node[Any]:
        """The upstream node."""
        if self._source is None:
            raise GraphError(f"{type(self).__name__} has no source; it must override what the contract asks of it.")
        return self._source

    def transform(self, item: Any) -> Any:
        """One value in, one value out. Called for items only, never for a mark."""
        return item

    # The torchdata contract: reset, next, get_state.

    def reset(self, initial_state: State | None = None) -> None:
        """Stand at ``initial_state``, or at the very beginning. May start workers, reads nothing yet."""
        super().reset(initial_state)
        if self._source is not None:
            self._source.reset(initial_state)

    def next(self) -> T:
        """The next item, or an `EndOfEpoch`; ``StopIteration`` only from a finite graph."""
        item: T = self._transformed(next(self.source))
        return item

    def get_state(self) -> State:
        """Where this node stands, after the item it handed out last; a new dict, of JSON types."""
        return self.source.get_state()

    # What the contract adds to it.

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Sequence[T]:
        """Advance by ``n * every`` items and return those at ``first``, ``first + every``, …; for a node that was reset.

        A short answer means that the epoch ends here; the mark itself is left for `next`.
        """
        if type(self).next is not Node.next:
            if self.endless:
                raise GraphError(f"{type(self).__name__} has a next of its own above a Cycler, so it also needs its own take.")
            return take_by_next(self, n, every=every, first=first)
        block = self.source.take(n, every=every, first=first)
        if type(self).transform is Node.transform:
            return cast("Sequence[T]", block)
        return [self._transformed(item) for item in block]

    def at(self, positions: np.ndarray) -> Sequence[T]:
        """The items of the current epoch at ``positions`` (int64, shape ``(n,)``), going nowhere; past the end they wrap around.

        Raises:
            GraphError: The source is not indexed, or this node reads by a ``next`` of its own.
        """
        if type(self).next is not Node.next and type(self).at is Node.at and type(self).__module__.partition(".")[0] != "penstock":
            raise GraphError(f"{type(self).__name__} has a next of its own, so tail='pad' also needs its own at.")
        block = self.source.at(positions)
        return [self._transformed(item) for item in block] if type(self).transform is not Node.transform else block

    def remaining(self, state: State | None = None) -> int | None:
        """Items still to come in the epoch of ``state`` (default: now); None where that is unknown. Pure, starts nothing."""
        return self.source.remaining(state)

    def batches_per_epoch(self) -> int | None:
        """Items that a whole epoch has here; None where that is unknown."""
        return self.source.batches_per_epoch()

    def settings(self) -> dict[str, Any]:
        """What must be the same when a state is loaded: names and JSON values."""
        return self.source.settings() if self._source is not None else {}

    def start_of(self, epoch: int) -> State | None:
        """The state in which ``epoch`` has not begun."""
        return self.source.start_of(epoch)

    def end_of(self, epoch: int) -> State | None:
        """The state in which only the mark of ``epoch`` is left."""
        return self.source.end_of(epoch)

    def check(self, state: Any) -> None:
        """Refuse a state that `reset` could not stand at. Pure, starts nothing: states come from files.

        Raises:
            StateError: What is wrong with it, and where.
        """
        self.source.check(state)

    def ranks(self) -> tuple[int, int]:
        """Which rank this graph loads for, of how many: (0, 1) where nothing is sharded."""
        return self.source.ranks() if self._source is not None else (0, 1)

    @property
    def endless(self) -> bool:
        """Whether a `Cycler` stands below, so that epochs end by a mark and never by ``StopIteration``."""
        return self._source is not None and self._source.endless

    def interrupt(self) -> None:
        """Make a `next` that waits in another thread raise `ClosedError`; for whoever resets or shuts down."""
        if self._source is not None:
            self._source.interrupt()

    def shutdown(self) -> None:
        """End every thread and process of this node and of those below it."""
        if self._source is not None:
            self._source.shutdown()

    def statistics(self) -> tuple[Any, ...]:
        """One frozen object for each node that does work, from the source to here."""
        return self._source.statistics() if self._source is not None else ()

    def _transformed(self, item: Any) -> Any:
        if isinstance(item, EndOfEpoch):
            return item
        if isinstance(item, Indices):
            return item.with_values(self.transform(item.values))
        return self.transform(item)


def take_by_next(node: BaseNode[T], n: int, *, every: int, first: int) -> list[T]:
    """`Node.take` for a finite node that can only be read one by one."""
    taken: list[T] = []
    for k in range(n * every):
        try:
            item = next(node)
        except StopIteration:
            break
        if k % every == first:
            taken.append(item)
    return taken


def fields(state: Any, **kinds: type) -> dict[str, Any]:
    """``state``, once it is known to be a dict with just these keys, of these types; an ``int`` must not be negative.

    Raises:
        StateError: What came instead.
    """
    if not isinstance(state, dict) or state.keys() != kinds.keys():
        came = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise StateError(f"a state with the keys {sorted(kinds)} was expected here, and {came} came: it is damaged, or of another graph.")
    for key, kind in kinds.items():
        value: Any = state[key]
        in_bounds = kind is not int or (not isinstance(value, bool) and isinstance(value, int) and 0 <= value < 2**63)
        if not isinstance(value, kind) or not in_bounds:
            raise StateError(
                f"{key!r} of a state must be {'a whole number from 0' if kind is int else kind.__name__}, and {value!r:.80} came."
            )
    return state


def epoch_of(state: State) -> int:
    """The epoch that a state stands in: the Cycler's, which every other node nests under ``"source"``."""
    while "epoch" not in state:
        state = state["source"]
    return cast("int", state["epoch"])


@final
class Foreign(Node[Indices]):
    """Any ``torchdata.nodes.BaseNode`` that ends by ``StopIteration``, with the addresses that it does not have.

    Its states are copied, because torchdata's nodes hand out dicts that they go on changing; and it is not asked again after
    its end, because not all of them then say the same.
    """

    def __init__(self, node: BaseNode[Any]) -> None:
        super().__init__()
        if not isinstance(node, BaseNode):
            raise GraphError(
                f"a source must be a torchdata.nodes.BaseNode, not {type(node).__name__}; wrap an iterable in torchdata.nodes.IterableWrapper."
            )
        below: Any = node
        while (below := getattr(below, "source", None)) is not None:
            if isinstance(below, Node) and below.endless:
                raise GraphError(
                    f"{type(node).__module__}.{type(node).__name__} stands above a Cycler and would be handed EndOfEpoch marks, which it does not know. "
                    f"Put it below the Cycler, or write a penstock.Node."
                )
        self.node = node
        self._epoch = 0
        self._position = 0
        self._ended = False

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        if initial_state is None:
            initial_state = self.start_of(0)
        self._epoch = initial_state["epoch"]
        self._position = initial_state["position"]
        self._ended = initial_state["ended"]
        self.node.reset(copy.deepcopy(initial_state["node"]))
        if self._ended:
            with contextlib.suppress(StopIteration):
                next(self.node)  # A node that counts its epochs must see the end of this one again.

    def next(self) -> Indices:
        if self._ended:
            raise StopIteration
        try:
            item = next(self.node)
        except StopIteration:
            self._ended = True
            raise
        if isinstance(item, EndOfEpoch):
            raise GraphError(
                f"{type(self.node).__name__} handed on {item}: it stands above a Cycler. Put it below, or write a penstock.Node."
            )
        self._position += 1
        return Indices(self._epoch, self._position - 1, item)

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Sequence[Indices]:
        return take_by_next(self, n, every=every, first=first)

    def at(self, positions: np.ndarray) -> Sequence[Indices]:
        raise GraphError(f"{type(self.node).__name__} cannot be read by position, which tail='pad' needs. Use tail='drop' or tail='exact'.")

    def remaining(self, state: State | None = None) -> int | None:
        return 0 if (self._ended if state is None else state["ended"]) else None

    def batches_per_epoch(self) -> int | None:
        return None

    def settings(self) -> dict[str, Any]:
        return {"source": type(self.node).__name__}

    def get_state(self) -> State:
        return {"epoch": self._epoch, "position": self._position, "ended": self._ended, "node": copy.deepcopy(self.node.state_dict())}

    def start_of(self, epoch: int) -> State:
        return {"epoch": epoch, "position": 0, "ended": False, "node": None}

    def check(self, state: Any) -> None:
        counts = fields(state, epoch=int, position=int, ended=bool, node=object)
        if counts["node"] is not None and not isinstance(counts["node"], dict):
            raise StateError(f"the state of {type(self.node).__name__} must be a dict or null, not {counts['node']!r}.")

    def shutdown(self) -> None:
        shutdown = getattr(self.node, "shutdown", None)
        if callable(shutdown):
            shutdown()
