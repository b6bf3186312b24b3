"""The contract that every box of the graph keeps, and the two things that travel through it besides data.

A graph is a chain of nodes, each with one ``source``. At the index level items are `Indices`; downstream of the mapper they are
batches. `EndOfEpoch` travels in the stream, through every node, in order. This is the only file that imports torchdata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast, final

from torchdata.nodes import BaseNode as BaseNode  # type: ignore[import-untyped]

from penstock._errors import GraphError, StateError
from penstock._fetch.indices import Indices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

T = TypeVar("T", covariant=True)
State = dict[str, Any]


@final
@dataclass(frozen=True, slots=True)
class EndOfEpoch:
    """The mark that a `Cycler` puts behind the last item of ``epoch``."""

    epoch: int


def is_mark(item: object) -> bool:
    """Whether ``item`` is an `EndOfEpoch`."""
    return isinstance(item, EndOfEpoch)


class Node(BaseNode[T], Generic[T]):  # type: ignore[misc]  # torchdata has no types
    """A box of the graph. To write one that changes items, override `transform`; nothing else is needed.

    ``transform`` sees values, never a mark and never an address, and the state of such a node is that of its source. A node
    with a state of its own overrides `reset`, `get_state`, `start_of` and `next` together, and nests its source's state under
    ``"source"``.

    Args:
        source: The upstream node: one of ours, or, upstream of the `Cycler` only, any ``torchdata.nodes.BaseNode``. None for a node
            that has none.

    Raises:
        GraphError: ``source`` is not a node, or a foreign node that stands downstream of a `Cycler`.
    """

    _adapter: ClassVar[Callable[[BaseNode[Any]], Node[Any]]]
    """Makes one of ours of a foreign node: `IterableSource`, which sets it, because it imports this file."""

    def __init__(self, source: BaseNode[Any] | None = None) -> None:
        super().__init__()
        if source is not None and not isinstance(source, BaseNode):
            raise GraphError(
                f"a source must be a torchdata.nodes.BaseNode, not {type(source).__name__}; wrap an iterable in penstock.IterableSource."
            )
        self._source = source if source is None or isinstance(source, Node) else Node._adapter(source)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "get_state" in vars(cls) and not {"reset", "start_of"} <= vars(cls).keys():
            raise GraphError(f"{cls.__name__} has a get_state of its own, so it also needs its own reset and start_of: they must agree.")

    def __getstate__(self) -> dict[str, Any]:
        """A graph that was never started is a description, and can go anywhere; one that was has threads, processes and a place of its own."""
        state: dict[str, Any] = self.__dict__
        if state.get("_BaseNode__initialized"):  # torchdata's own word for it
            raise TypeError(
                f"a {type(self).__name__} that was started cannot be pickled or copied: its workers and what they are at would stay behind. Pickle or copy the "
                f"graph before its first item is asked for; or build another one there, and load the state that this one saves."
            )
        return state

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
                raise GraphError(f"{type(self).__name__} has a next of its own downstream of a Cycler, so it also needs its own take.")
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
        if type(self).next is not Node.next and type(self).at is Node.at:
            raise GraphError(f"{type(self).__name__} has a next of its own, so tail='pad' also needs its own at.")
        block = self.source.at(positions)
        return [self._transformed(item) for item in block] if type(self).transform is not Node.transform else block

    def remaining(self, state: State | None = None) -> int | None:
        """Items still to come in the epoch of ``state`` (default: now); None where that is unknown. Pure, starts nothing."""
        return self.source.remaining(state)

    def items_per_epoch(self) -> int | None:
        """Items that a whole epoch has here; None where that is unknown."""
        return self.source.items_per_epoch()

    def settings(self) -> dict[str, Any]:
        """What must be the same when a state is loaded: names and JSON values."""
        return self.source.settings() if self._source is not None else {}

    def choices(self) -> dict[str, Any]:
        """What every rank must have been told alike, although a state does not hold it: names and JSON values."""
        return self.source.choices() if self._source is not None else {}

    def split_word(self) -> Literal["items", "own"] | None:
        """Who deals the source's items to several ranks: the `Sharder` (``"items"``), or the source itself (``"own"``); None: nobody has said."""
        return self._source.split_word() if self._source is not None else "items"

    def rank_bound(self) -> bool:
        """Whether the source's states are of one rank only."""
        return self._source is not None and self._source.rank_bound()

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
        """Whether a `Cycler` stands upstream, so that epochs end by a mark and never by ``StopIteration``."""
        return self._source is not None and self._source.endless

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next epoch may be read before it is asked for: not where the training loop changes what the source will give."""
        return self._source is None or self._source.may_run_ahead

    def failure(self) -> BaseException | None:
        """What a source raised, if nobody knows where it stands since; None again after `reset`."""
        return None if self._source is None else self._source.failure()

    def interrupt(self) -> None:
        """Make a `next` that waits in another thread raise `ClosedError`; for whoever resets or shuts down."""
        if self._source is not None:
            self._source.interrupt()

    def shutdown(self) -> None:
        """End every thread and process of this node and of those upstream of it."""
        if self._source is not None:
            self._source.shutdown()

    def refresh(self) -> None:
        """Have workers that hold a copy of user objects (a dataset) take a new one at the next `reset`. Starts nothing by itself."""
        if self._source is not None:
            self._source.refresh()

    def statistics(self) -> tuple[Any, ...]:
        """One frozen object for each node that does work, from the source to here."""
        return self._source.statistics() if self._source is not None else ()

    def origin(self) -> BaseNode[Any]:
        """The first node of the graph; torchdata's own where the graph begins with those."""
        return self if self._source is None else self._source.origin()

    def chain(self) -> Iterator[Node[Any]]:
        """The nodes of the graph, from this one up to the first source."""
        node: Node[Any] | None = self
        while node is not None:
            yield node
            node = node._source

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
