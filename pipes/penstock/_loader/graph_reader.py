"""GraphReader: moves a graph to the cursor's position, reads it item by item, and reports each item to the cursor.

An exception may leave it at any line. The state then does not count an item that was never returned. If the position of
the graph is unknown, `EpochCursor.lost` records that, and the next read begins with a reset.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import numpy as np

from penstock._errors import ANEW, ClosedError, GraphError, SourceError, StateError, StateMismatch, is_own_error
from penstock._fetch.indices import Indices, pack
from penstock._loader.address import Address, as_lists
from penstock._loader.checks import checks_of
from penstock._loader.cursor import EpochCursor, GraphPosition, Jump, PassMarker
from penstock._loader.state_dict import CommitLedger
from penstock._nodes.index_node import IndexNode
from penstock._nodes.node import EndOfEpoch, epoch_of, origin, place_of
from penstock._nodes.parallel_mapper import ParallelMapper
from penstock._nodes.rank_checks import refuse_uneven_ranks
from penstock._nodes.reader_node import ReaderNode
from penstock._nodes.sharder import Sharder
from penstock._nodes.told_epochs import ToldEpochs
from penstock._random.orders import Forgotten
from penstock._workers.lifetime import process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock._loader.positions import Positions
    from penstock._nodes.node import Node, State
    from penstock._observe.loop_clock import LoopClock

T = TypeVar("T", covariant=True)
log = logging.getLogger("penstock")

_EMPTY = (
    "epoch %d has no batch on this rank, so the loop over it ended at once. If you did not expect that, check whether "
    "the dataset or its sampler is empty, whether drop_last=True or tail='drop' leaves nothing, and whether this is an "
    "iterable that can be read only once."
)

_readers: dict[int, object] = {}
"""The reader of each graph, by the id of the graph's first node. Two loaders over branches of one graph would take each
other's items.
"""

_HINTS = {
    "EndOfEpoch": (
        "EndOfEpoch ends an epoch. A node's own next must pass it on: if isinstance(item, EndOfEpoch): return item"
    ),
    "Indices": (
        "Upstream of the ParallelMapper a node's own next gets Indices: its values are in .values. Or override "
        "transform, which gets the plain index; to leave samples out, use penstock.filtered."
    ),
}
"""What to write, for an error in a user's node that names one of these types."""


@final
class GraphReader(Generic[T]):
    """Reads the graph of ``root``.

    Args:
        root: The last node.
        positions: Of the graph.
        clock: Notified when a marker is passed.
        infinite: Markers do not end an epoch.
        restart: See `EpochCursor`.

    Attributes:
        root: The last node.
        positions: Of the graph.
        cursor: Where the loader stands.
        commits: Which of the delivered batches were trained on.
        closed: Reading is refused from now on.
        owner: The process in which reading began; None before that.
        checks: Those that watch this graph.
    """

    def __init__(
        self, root: Node[T], positions: Positions, clock: LoopClock, *, infinite: bool, restart: bool | None
    ) -> None:
        self.root = root
        self.positions = positions
        self.cursor = EpochCursor(positions, infinite=infinite, restart=restart)
        self.commits = CommitLedger()
        self.closed = False
        self.owner: int | None = None
        self._clock = clock
        self._infinite = infinite
        self._origin = origin(root)
        # identifies this reader; `_readers` lives longer, and must not keep the reader itself alive
        self._me = object()
        self._nodes = list(root.chain())
        self._told = ToldEpochs(self._nodes)
        self._asked_for: State | None = None  # of which nothing was delivered yet
        self._is_answered = True  # False: a run has begun, but not delivered, so an interrupt takes its begin back
        self._index_level = next(number for number, node in enumerate(self._nodes) if isinstance(node, IndexNode))
        self._ahead: dict[Address, Indices] = {}  # looked up by `begin_again`
        self._sharder = next((node for node in self._nodes if isinstance(node, Sharder)), None)
        self.checks = checks_of(positions, self._nodes, infinite=infinite)
        self._jumped = True  # nothing was begun yet, or since a state was loaded

    def check_open(self) -> None:
        """Raise `ClosedError` after `closed` is set, or in a fork."""
        if self.closed:
            raise ClosedError(f"this loader was closed. {ANEW}")
        if self.owner is not None and os.getpid() != self.owner:
            raise ClosedError(
                f"this loader was started in process {self.owner}, and this process is a fork of it. {ANEW}"
            )

    def start(self) -> None:
        """Move to where a new iterator starts."""
        self.owner = os.getpid()
        cursor, failure = self.cursor, self.positions.failure()
        # A ClosedError is not a failure of the source: it comes from an interrupted jump, which stops a reader in the
        # source.
        if (
            failure is not None
            and is_own_error(failure)
            and not isinstance(failure, ClosedError)
            and not cursor.is_told
        ):
            raise SourceError.after(failure)
        if (asked := self.asked()) is not None:
            cursor.request(asked)
        try:
            move, state = cursor.start(), None
        except StateError:  # what was asked for contradicts the state, and is dropped
            self._demand(epoch_of(cursor.here))
            raise
        if isinstance(move, Jump):
            self._begin(move.state)
            self._jump(move.state)
        elif isinstance(move, PassMarker):
            state = self._pass_marker(move.epoch)
        cursor.arrived(move, state)
        if not isinstance(move, Jump) and not cursor.begun:
            self._begin_where_it_stands()
        self._is_answered = False
        self.commits.forget(cursor.state)

    def asked(self) -> int | None:
        """The epoch that the user has set on an object of the graph since one was asked of the loader, if any."""
        return self._told.asked()

    def request(self, epoch: int, *, by_sampler: bool = False) -> None:
        """See `Loader.set_epoch`, and `EpochView`."""
        self.cursor.request(epoch, by_sampler=by_sampler)
        if not (by_sampler and self.cursor.pending):
            self._demand(epoch)

    def end_epoch(self) -> bool:
        """See `EpochCursor.end_epoch`."""
        if ended := self.cursor.end_epoch():
            self._asked_for = None
            self._told.tell(self.cursor.following(epoch_of(self.cursor.state) - 1))
        return ended

    def _answer(self) -> None:
        """A run has got what its begin was for: an epoch that the user has set before is answered."""
        self._told.answer()
        self._is_answered, self._asked_for = True, None

    def _demand(self, epoch: int) -> None:
        """Whatever was said before, ``epoch`` comes next."""
        self._asked_for = None
        self._told.demand(epoch, is_read=self.cursor.begun and self.cursor.remaining is None)

    def load(self, state: State) -> None:
        """Make the next iterator start at ``state``, which was checked, with the rank that this process has then."""
        if self._sharder is not None:
            self._sharder.look_up_again()
        self._ahead, self._jumped = {}, True
        self.cursor.load(state)
        self._demand(epoch_of(self.cursor.here))
        self.commits.forget(state)

    def refresh(self) -> None:
        """Give the workers new copies of the dataset and its functions. Batches in flight are loaded again."""
        self.renew_workers()
        if (stood := self.cursor.stands) is not GraphPosition.AWAY:
            self._check_graph()
            self.cursor.lost()  # until the reset is done, because an exception may interrupt it
            # between two epochs the next start does it, because a reader thread would read an epoch that has not begun
            if self.cursor.begun and stood is GraphPosition.HERE:
                self.root.reset(self.cursor.state)
                self.cursor.graph_was_reset()

    def renew_workers(self) -> None:
        """Give the workers new copies when they start next, after a reset."""
        for node in self.root.chain():
            if isinstance(node, ParallelMapper):
                node.executor.refresh()

    def advance(self) -> T:
        """The next item of this epoch; ``StopIteration`` at its end."""
        if self.closed or self.owner != process.id:
            self.check_open()
        if _readers.get(id(self._origin)) is not self._me:
            self._check_graph()
        root, cursor = self.root, self.cursor
        if cursor.stands is GraphPosition.AWAY:  # an interrupt left the graph somewhere else
            self._jump(cursor.state)
            cursor.graph_was_reset()
        if self._sharder is not None:
            self._sharder.check_group()
        while True:
            try:
                item: T | EndOfEpoch = root.next()
            except BaseException as exc:
                if isinstance(exc, Exception):
                    self.check_open()  # if it was closed meanwhile, the graph may raise anything
                    if isinstance(exc, TypeError | AttributeError):
                        for name, hint in _HINTS.items():
                            if name in str(exc):
                                exc.add_note(hint)
                self._raised(exc)
                raise
            if self.closed:  # by a signal handler or by another thread; the graph's state then does not count this item
                self.check_open()
            epoch = epoch_of(cursor.state)
            if not isinstance(item, EndOfEpoch):
                state = root.get_state()
                if epoch_of(state) != epoch:
                    raise GraphError(
                        f"a batch of epoch {epoch_of(state)} came, but EndOfEpoch({epoch}) did not: a node downstream "
                        f"of the Cycler lost it. A custom node must pass markers on, as penstock.nodes.Node does."
                    )
                last: Any = item if type(item) is Indices else root.address()
                if last is not None and not self.positions.first.has_indices:  # data must not be kept alive
                    last = Indices(last.epoch, last.positions, None)
                for check in self.checks:
                    check.delivered(state, last)
                cursor.delivered(state, last)
                if not self._is_answered:
                    self._answer()
                if self.commits.committed is not None:
                    self.commits.delivered(state)
                return item.plain() if type(item) is Indices else item  # type: ignore[attr-defined]
            if item.epoch != epoch:
                raise GraphError(
                    f"{item} came in epoch {epoch}: a node downstream of the Cycler lost or mangled the marker before "
                    f"it."
                )
            empty = cursor.fresh and not cursor.over_marker
            if self._infinite and empty and not self.positions.skipped(cursor.state, root.get_state()):
                raise ValueError(
                    f"epoch {item.epoch} has no batch on this rank, so an infinite loader would loop without yielding "
                    f"one. {self.positions.remedy(epoch)}"
                )
            if empty and cursor.state == self.positions.start_of(epoch, cursor.state):
                log.warning(_EMPTY, epoch)
            for check in self.checks:
                check.ended()
            ended = cursor.marker_read(root.get_state())
            if not self._is_answered:
                self._answer()
            self._asked_for = None
            self._told.tell(cursor.following(epoch) if ended else epoch + 1)
            if ended:
                raise StopIteration
            self._begin_where_it_stands()
            self._clock.mark()

    def at(self, addresses: Sequence[Address]) -> list[Indices]:
        """The items of the index level at ``addresses``. Moves nothing.

        Raises:
            GraphError: The source cannot be read by position.
            IndexError: A position is not in its epoch.
            StateMismatch: An address has other indices.
        """
        node: Any = self._nodes[self._index_level]
        of_epoch: dict[int, list[Address]] = {}
        for address in addresses:
            of_epoch.setdefault(address.epoch, []).append(address)
        found: dict[Address, Indices] = {}
        for epoch, those in of_epoch.items():
            try:  # together, because an order computes many positions in the time of a few
                items = node.at(epoch, np.concatenate([address.positions for address in those]))
            except Forgotten:
                if any(address.indices is None for address in those):
                    raise
                items = [item for address in those for item in address.items()]
            begin = 0
            for address in those:
                many = len(address.positions)
                own, begin = items[begin : begin + many], begin + many
                item: Any = pack(own) if many else Indices(epoch, address.positions, [])
                if isinstance(address.position, int):
                    item = own[0]
                here = None if address.indices is None else Address.of(item, with_indices=True).indices
                if here is not None and here != address.indices and as_lists(here) != as_lists(address.indices):
                    raise StateMismatch(
                        f"{address} has other indices than this loader at that position, {here!r:.80}: it is of "
                        f"another loader, or the dataset, its sampler or the seed has changed."
                    )
                found[address] = item
        return [found[address] for address in addresses]

    def again(self, address: Address) -> Any:
        """The batch or sample at ``address`` once more. Moves nothing."""
        self.owner = os.getpid()
        if (asked := self.asked()) is not None:  # its data may be told other epochs now
            self.cursor.request(asked)
            self._told.answer()
        with self.still():
            item = self._ahead.get(address)
            if item is None or address.indices not in (None, item.plain()):
                item = self.at([address])[0]  # which refuses other indices
            made: Any = item
            for node in reversed(self._nodes[: self._index_level]):
                made = node.again(made)
        return made.plain() if made is item else made

    def begin_again(self, addresses: Sequence[Address]) -> None:
        """Look up ``addresses``, and begin to make them in the workers."""
        self.owner = os.getpid()
        with self.still():
            new = [address for address in addresses if address not in self._ahead]
            known = self._ahead | dict(zip(new, self.at(new), strict=True))
            self._ahead = {address: known[address] for address in addresses}
            if self._index_level and isinstance(mapper := self._nodes[self._index_level - 1], ParallelMapper):
                mapper.begin_again(list(self._ahead.values()))

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """In this context no other thread reads the graph."""
        with contextlib.ExitStack() as stack:
            for node in self._nodes:
                if isinstance(node, ReaderNode):
                    stack.enter_context(node.still())
            yield

    def lost_if_moved(self) -> None:
        """After an exception, check the position: a signal handler may have raised after the graph returned an item,
        before the cursor knew.
        """
        with contextlib.suppress(Exception):
            if self.cursor.stands is GraphPosition.HERE and self.root.get_state() != self.cursor.state:
                self.cursor.lost()

    def _raised(self, exc: BaseException) -> None:
        """Record that the graph raised. The state must not count an item that was never returned."""
        if is_own_error(exc):
            self.cursor.raised(self.root.get_state())
        else:
            self.cursor.lost()  # Ctrl-C or a signal handler, in the middle of the graph
        if isinstance(exc, StopIteration):
            raise GraphError(
                "the graph raised StopIteration: a node downstream of the Cycler ended, or a function in one raised it."
            ) from exc

    def _pass_marker(self, epoch: int) -> State:
        """Read the marker that ends ``epoch``; returns the graph's state after it."""
        self._check_graph()
        item: Any = self.root.next()
        if item != EndOfEpoch(epoch):
            raise GraphError(
                f"expected EndOfEpoch({epoch}), but something else came: a node downstream of the Cycler lost the "
                f"marker, or len() is wrong."
            )
        return self.root.get_state()

    def _begin(self, state: State) -> bool:
        """The loop asks for the first item after ``state``.

        Returns whether what was read ahead from there still holds.
        """
        place = place_of(state)
        if place is None or place[1] is None:  # only the marker is left
            return True
        if state == self._asked_for and self.positions.first.begins_once:  # the next that asked for it was interrupted
            return True
        with self.still():
            holds = [check.began(state, jumped=self._jumped) for check in self.checks]
            holds += [self._told.begin(place[0]), *(node.begin(place[1]) for node in reversed(self._nodes))]
        self._asked_for, self._jumped = state, False
        return all(holds)

    def _begin_where_it_stands(self) -> None:
        if not self._begin(self.cursor.state):
            self._jump(self.cursor.state)
            self.cursor.graph_was_reset()

    def _jump(self, state: State) -> None:
        """Reset the graph to ``state``. Whatever is in flight is dropped; the workers stay."""
        if self._sharder is not None:
            refuse_uneven_ranks(self.root, self._sharder)  # at each reset, because the ranks may be others now
        self.cursor.lost()
        if id(self._origin) not in _readers:
            weakref.finalize(self._origin, _readers.pop, id(self._origin), None).atexit = False
        _readers[id(self._origin)] = self._me
        self.root.reset(state)

    def _check_graph(self) -> None:
        if _readers.get(id(self._origin)) is not self._me:
            raise GraphError(
                "another Loader has begun to read this graph, so this one has lost its position. Build a separate "
                "graph for each Loader."
            )
