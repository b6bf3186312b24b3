"""GraphReader: moves a graph to where the cursor says, reads it item by item, and tells the cursor what came.

An exception may leave it at any line. Then the state does not count an item that was never returned, and if nobody can tell where the graph is, the cursor
hears that it is lost: the next read begins with a reset.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from penstock._errors import ClosedError, GraphError, SourceError, is_own_error
from penstock._fetch.indices import Indices
from penstock._loader.cursor import EpochCursor, GraphPosition, Jump, PassMarker
from penstock._loader.state_dict import CommitLedger
from penstock._nodes.node import EndOfEpoch, epoch_of, origin
from penstock._nodes.parallel_mapper import ParallelMapper
from penstock._nodes.sharder import Sharder

if TYPE_CHECKING:
    from penstock._loader.positions import Positions
    from penstock._nodes.node import Node, State
    from penstock._observe.loop_clock import LoopClock

T = TypeVar("T", covariant=True)
log = logging.getLogger("penstock")

_EMPTY = (
    "epoch %d has no batch on this rank, so the loop over it ended at once. If you did not expect that: is the dataset or its sampler empty, does "
    "drop_last=True or tail='drop' leave nothing, or is this an iterable that can be read only once?"
)

_readers: dict[int, object] = {}
"""Who reads a graph, by the id of the graph's first node. Two loaders over branches of one graph would take each other's items."""


@final
class GraphReader(Generic[T]):
    """Reads the graph of ``root``.

    Args:
        root: The last node.
        positions: Of the graph.
        clock: Is told when a marker was passed.
        infinite: Markers end nothing.
        restart: See `EpochCursor`.

    Attributes:
        root: The last node.
        positions: Of the graph.
        cursor: Where the loader stands.
        commits: Which of the delivered batches were trained on.
        closed: Nothing may be read any more.
        owner: The process in which reading began; None before that.
    """

    def __init__(self, root: Node[T], positions: Positions, clock: LoopClock, *, infinite: bool, restart: bool | None) -> None:
        self.root = root
        self.positions = positions
        self.cursor = EpochCursor(positions, infinite=infinite, restart=restart)
        self.commits = CommitLedger()
        self.closed = False
        self.owner: int | None = None
        self._clock = clock
        self._infinite = infinite
        self._origin = origin(root)
        self._me = object()  # stands for this reader; what lives as long as the graph must not keep it alive
        self._sharder = next((node for node in root.chain() if isinstance(node, Sharder)), None)

    def check_open(self) -> None:
        """Refuse to go on after `closed`, or in a fork."""
        if self.closed:
            raise ClosedError("this loader was closed; build a new one.")
        if self.owner is not None and os.getpid() != self.owner:
            raise ClosedError(f"this loader was started in process {self.owner}, of which this one is a fork. Build a new loader here.")

    def start(self) -> None:
        """Move to where a new iterator starts."""
        self.owner = os.getpid()
        cursor, failure = self.cursor, self.positions.failure()
        # A ClosedError is no failure of the source: an interrupted jump had begun to take a reader out of it.
        if failure is not None and is_own_error(failure) and not isinstance(failure, ClosedError) and not cursor.is_told:
            raise SourceError.after(failure)
        move, state = cursor.start(), None
        if isinstance(move, Jump):
            self._jump(move.state)
        elif isinstance(move, PassMarker):
            state = self._pass_marker(move.epoch)
        cursor.arrived(move, state)
        self.commits.forget(cursor.state)

    def load(self, state: State) -> None:
        """Have the next start be at ``state``, which was checked, under the rank that this process has then."""
        if self._sharder is not None:
            self._sharder.look_up_again()
        self.cursor.load(state)
        self.commits.forget(state)

    def refresh(self) -> None:
        """Give the workers new copies of what they work with. Batches in flight are loaded again."""
        for node in self.root.chain():
            if isinstance(node, ParallelMapper):
                node.executor.refresh()
        if self.cursor.stands is not GraphPosition.AWAY:
            self._check_graph()
            self.cursor.lost()  # until the reset is done: an exception may come out of the middle
            self.root.reset(self.cursor.graph_state)
            self.cursor.graph_was_reset()

    def advance(self) -> T:
        """The next item of this epoch; ``StopIteration`` at its end."""
        if self.closed or self.owner != os.getpid():
            self.check_open()
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
                    self.check_open()  # closed in the middle, the graph may raise anything
                self._raised(exc)
                raise
            if self.closed:  # by a signal handler or by another thread; the graph's state then does not count this item
                self.check_open()
            epoch = epoch_of(cursor.state)
            if not isinstance(item, EndOfEpoch):
                state = root.get_state()
                if epoch_of(state) != epoch:
                    raise GraphError(
                        f"a batch of epoch {epoch_of(state)} came, but EndOfEpoch({epoch}) did not: a node downstream of the Cycler lost it. "
                        f"A node of your own must hand on markers; penstock.nodes.Node does."
                    )
                cursor.delivered(state)
                self.commits.delivered(state)
                return item.plain() if isinstance(item, Indices) else item
            if item.epoch != epoch:
                raise GraphError(f"{item} came in epoch {epoch}: a node downstream of the Cycler lost or mangled the marker before it.")
            if self._infinite and cursor.fresh and not cursor.over_marker:
                raise ValueError(
                    f"epoch {item.epoch} has no batch on this rank, so an infinite loader would spin. Use a larger dataset, or tail='pad'."
                )
            if not cursor.over_marker and cursor.state == self.positions.start_of(epoch, cursor.state):
                log.warning(_EMPTY, epoch)
            if cursor.marker_read(root.get_state()):
                raise StopIteration
            self._clock.mark()

    def lost_if_moved(self) -> None:
        """After an exception: a signal handler may have raised between the graph giving an item and the cursor learning of it."""
        with contextlib.suppress(Exception):
            if self.cursor.stands is GraphPosition.HERE and self.root.get_state() != self.cursor.state:
                self.cursor.lost()

    def _raised(self, exc: BaseException) -> None:
        """The graph raised instead. The state must not count an item that was never returned."""
        if is_own_error(exc):
            self.cursor.raised(self.root.get_state())
        else:
            self.cursor.lost()  # Ctrl-C or a signal handler, in the middle of the graph
        if isinstance(exc, StopIteration):
            raise GraphError(
                "StopIteration came out of the graph: a node downstream of the Cycler ended, or a function in one raised it."
            ) from exc

    def _pass_marker(self, epoch: int) -> State:
        """Read the marker that ends ``epoch``; returns the graph's state after it."""
        self._check_graph()
        item: Any = self.root.next()
        if item != EndOfEpoch(epoch):
            raise GraphError(
                f"EndOfEpoch({epoch}) was due, but something else came: a node downstream of the Cycler lost the marker, or len() is wrong."
            )
        return self.root.get_state()

    def _jump(self, state: State) -> None:
        """Reset the graph to ``state``. Whatever is in flight is dropped; the workers stay."""
        self.cursor.lost()
        if id(self._origin) not in _readers:
            weakref.finalize(self._origin, _readers.pop, id(self._origin), None).atexit = False
        _readers[id(self._origin)] = self._me
        self.root.reset(state)

    def _check_graph(self) -> None:
        if _readers.get(id(self._origin)) is not self._me:
            raise GraphError(
                "another Loader has begun to read this graph, so this one no longer knows where it stands. Build a graph for each Loader."
            )
