"""EpochCursor: a loader's position, and where its next iterator starts. Pure: no threads, no access to the graph.

Its methods record events: a batch was delivered, a marker was read, a state was loaded, an epoch was requested. At the
first ``next`` of an iterator, `EpochCursor.start` returns what the graph must do before the first batch: stay, pass one
marker, or jump to a state. Nothing moves before that, because trainers call ``iter``, ``load_state_dict`` and
``set_epoch`` in every possible order.

The end of an epoch is *seen* once its marker is consumed: by the ``StopIteration`` of the loop, by
`EpochCursor.end_epoch`, or because the next epoch began. From then on the state is the start of the next epoch. A state
taken on the last batch of an epoch has not seen the end: when loaded, it first yields the empty remainder of that
epoch, so that the code after the loop (a scheduler step, validation) runs.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from penstock._errors import StateError
from penstock._nodes.node import epoch_of

if TYPE_CHECKING:
    from penstock._fetch.indices import Indices
    from penstock._nodes.node import State


class Epochs(Protocol):
    """What the cursor needs to know about a graph. None of these methods starts anything."""

    def remaining(self, state: State) -> int | None:
        """Items left in the epoch of ``state``; None if unknown."""

    def start_of(self, epoch: int, after: State | None = None) -> State:
        """The state before the first item of ``epoch``. It may depend on ``after``, the run's current position."""
        ...

    def end_of(self, epoch: int) -> State:
        """The state in which only the marker of ``epoch`` is left."""
        ...

    def sized(self) -> bool:
        """Whether the source knows how many items an epoch has."""
        ...


@final
class Stay(NamedTuple):
    """The graph is where it should be."""


@final
class PassMarker(NamedTuple):
    """The graph must read the marker that ends ``epoch``; nothing it has loaded ahead is lost."""

    epoch: int


@final
class Jump(NamedTuple):
    """The graph must be reset to ``state``.

    With ``over_marker``, a marker that comes first is passed without ending an epoch.
    """

    state: State
    over_marker: bool = False


Move = Stay | PassMarker | Jump


class GraphPosition(Enum):
    """Where the graph is, relative to the cursor's state."""

    AWAY = "anywhere: only a jump leads to the state"
    HERE = "at the state"
    BEFORE_MARKER = "at the end of the epoch before the state's, with the marker still unread"
    BEHIND_MARKER = "at the start of the epoch after the state's, with the marker already read"


@final
class EpochCursor:
    """The position of a loader.

    Args:
        epochs: Facts about the graph.
        infinite: Pass markers without ending an epoch.
        restart: Whether a state of a finished epoch continues with the next epoch (True) or with the empty remainder
            (False). None: with the next epoch if the end was seen.

    Attributes:
        epochs: Facts about the graph.
        state: The position after the last delivered item, or of the next item.
        last: The last delivered item, as indices; None before the first one, and if nobody knows.
        stands: Where the graph is.
        fresh: Nothing was delivered since a jump to this state, a load of it, or the start of its epoch.
        pending: The state was loaded, and no batch was delivered yet.
        over_marker: The next marker does not end an epoch.
        begun: The state is not at the start of its epoch.
    """

    def __init__(self, epochs: Epochs, *, infinite: bool, restart: bool | None) -> None:
        self.epochs = epochs
        self._infinite = infinite
        self._restart = restart
        self.last: Indices | None = None
        self._stand(epochs.start_of(0), GraphPosition.AWAY)
        self.request(None)
        # determined before anything is read, because the graph may know more once a plan is in memory
        self._sized: bool | None = None
        self._offset = 0  # added to the epoch numbers of a trainer that counts differently; only without a length

    # Where it stands.

    @property
    def here(self) -> State:
        """The state; or the start of the next epoch, if the state's epoch is finished and ``restart`` is True."""
        if self.pending and self._restart and self._complete:
            return self._start(epoch_of(self.state) + 1)
        return self.state

    @property
    def remaining(self) -> int | None:
        """Items left in the epoch."""
        return 0 if self.stands is GraphPosition.BEHIND_MARKER else self.epochs.remaining(self.here)

    # What happened.

    def request(self, epoch: int | None, *, by_sampler: bool = False) -> None:
        """Request ``epoch`` for the next start; None withdraws a request."""
        self._requested = epoch
        self._by_sampler = by_sampler  # the request came through `Loader.sampler`

    def load(self, state: State) -> None:
        """``state`` was loaded, and the next run continues from it."""
        self._look()
        self.last = None
        epoch = epoch_of(state)
        if self._restart is False and epoch and self._at_start(state):
            state = self.epochs.end_of(epoch - 1)  # restart=False: the loop sees the end of the previous epoch again
        self._stand(state, GraphPosition.AWAY)
        self.pending, self.begun, self._offset = True, not self._at_start(state), 0

    def delivered(self, state: State, last: Indices | None = None) -> None:
        """An item was delivered; ``state`` is the position after it, and ``last`` its indices."""
        self.last = last
        self.state = state
        self.fresh = self.over_marker = self.pending = self._resumed = self._again = False
        self.begun = True

    def raised(self, state: State) -> None:
        """Reading an item raised; ``state`` is the graph's.

        If the run has delivered nothing, the next run begins at the same place.
        """
        if epoch_of(state) == epoch_of(self.state):
            self.state = state
        if self.fresh:
            self._again, self.pending = True, self._resumed

    def marker_read(self, behind: State) -> bool:
        """A marker was read, and the graph's state is now ``behind`` it. Returns whether the loop's epoch ends here."""
        ends = not (self._infinite or self.over_marker)
        if ends and self._restart is False:
            self.stands = GraphPosition.BEHIND_MARKER
        else:
            self._stand(behind, GraphPosition.HERE)
        return ends

    def end_epoch(self) -> bool:
        """Skip the rest of an epoch that has begun, and count its end as seen. Returns whether there was one."""
        if not self.begun:
            return False
        before = self.stands
        at_end = before is GraphPosition.HERE and self._complete
        self._stand(
            self._start(epoch_of(self.state) + 1),
            GraphPosition.HERE
            if before is GraphPosition.BEHIND_MARKER
            else GraphPosition.BEFORE_MARKER
            if at_end
            else GraphPosition.AWAY,
        )
        return True

    def lost(self) -> None:
        """The position of the graph is unknown; the state is still valid."""
        if self.stands is GraphPosition.BEHIND_MARKER:
            self._again = True
        else:
            self.stands = GraphPosition.AWAY

    def saved(self) -> dict[str, Any]:
        """A copy of all fields, for `restore`."""
        return vars(self).copy()

    def restore(self, saved: dict[str, Any]) -> None:
        """Undo everything since `saved`."""
        vars(self).update(saved)

    def graph_was_reset(self) -> None:
        """The graph was reset to `graph_state`, and the run continues."""
        if self.stands is not GraphPosition.BEHIND_MARKER:
            self.stands = GraphPosition.HERE

    @property
    def graph_state(self) -> State:
        """The state that the graph should have in the middle of a run."""
        return self._start(epoch_of(self.state) + 1) if self.stands is GraphPosition.BEHIND_MARKER else self.state

    # Where the next iterator starts.

    @property
    def is_told(self) -> bool:
        """Whether a loaded state or a requested epoch decides the next start."""
        return self.pending or self._requested is not None

    def following(self, epoch: int) -> int:
        """The epoch that a loop begins after the end of ``epoch``."""
        return epoch_of(self.bound_for(None)) if self.is_told else epoch + 1

    def bound_for(self, asked: int | None) -> State:
        """Where the next `start` leads, if an epoch is requested, or ``asked`` of an object of the user's.

        Otherwise, and if that start will raise, `here`. Changes nothing.
        """
        requested, by_sampler = (self._requested, self._by_sampler) if asked is None else (asked, False)
        if requested is None:
            return self.here
        if not self.pending:
            return self._start(self._absolute(requested))
        ahead, stream = requested - epoch_of(self.state), by_sampler and not self._sized
        if ahead == 1 and (stream or self._complete):
            return self._start(requested)
        return self.state if ahead == 0 and (stream or not by_sampler) else self.here

    def start(self) -> Move:
        """Return what the graph must do. Nothing changes until `arrived` reports that it is done."""
        self._look()
        requested = self._requested
        if self.pending:
            if (
                self._by_sampler
                and not self._sized
                and requested is not None
                and requested - epoch_of(self.state) in (0, 1)
            ):
                # Only another read would show whether a stream is at its end. A trainer that requests the next epoch
                # has counted the batches.
                return Jump(self.state if requested == epoch_of(self.state) else self._start(requested))
            return self._from_loaded(None if self._by_sampler and not self._completes(requested) else requested)
        return self._from_stream(None if requested is None else self._absolute(requested))

    def arrived(self, move: Move, state: State | None = None) -> None:
        """The graph has made ``move``. After a `PassMarker`, ``state`` is the state of the graph."""
        resumed, requested = self.pending, self._requested
        if isinstance(move, Jump):
            begun = not self._at_start(move.state)
            self._stand(move.state, GraphPosition.HERE)
            self.over_marker, self.begun = move.over_marker, begun
            if resumed and requested is not None and move.over_marker:
                self._offset = epoch_of(move.state) - requested
        elif isinstance(move, PassMarker):
            assert state is not None
            self._stand(state, GraphPosition.HERE)
        elif self.stands is GraphPosition.BEHIND_MARKER:
            self._stand(self._start(epoch_of(self.state) + 1), GraphPosition.HERE)
        if not resumed and requested == epoch_of(self.state):
            self._offset = 0
        self._resumed, self._requested = resumed, None

    def _from_loaded(self, requested: int | None) -> Move:
        epoch = epoch_of(self.state)
        # Also if the remainder is empty, so that the code at the end of the user's epoch runs.
        if requested == epoch:
            return Jump(self.state, over_marker=self._infinite)
        if self._completes(requested):
            return Jump(self._start(epoch + 1))
        if requested is None:
            return Jump(self.state, over_marker=self._infinite or (self._restart is True and self.begun))
        if self._infinite or not self._sized:
            return Jump(self.state, over_marker=True)
        self._requested = None
        raise StateError(
            f"set_epoch({requested}) was called, but the loaded state is in epoch {epoch_of(self.here)}. Start your "
            f"loop at loader.epoch, or do not load the state."
        )

    def _from_stream(self, requested: int | None) -> Move:
        epoch, finished = epoch_of(self.state), self.stands is GraphPosition.BEHIND_MARKER
        if self.stands is GraphPosition.AWAY or (self._again and not finished):
            if requested is None and (self.fresh or self._infinite):
                return Jump(self.state)
            return Jump(self._start(epoch + 1 if requested is None else requested))
        if self.fresh and not finished and requested in (None, epoch):
            return PassMarker(epoch - 1) if self.stands is GraphPosition.BEFORE_MARKER else Stay()
        if finished and requested in (None, epoch + 1):
            return Jump(self._start(epoch + 1)) if self._again else Stay()
        if not self.fresh and self._complete and requested in (None, epoch + 1):
            return PassMarker(epoch)
        if requested is None and self._infinite:
            return Stay()
        return Jump(self._start(epoch + 1 if requested is None else requested))

    def _start(self, epoch: int) -> State:
        return self.epochs.start_of(epoch, self.state)

    def _at_start(self, state: State) -> bool:
        return state == self.epochs.start_of(epoch_of(state), state)

    def _absolute(self, requested: int) -> int:
        """The epoch that the caller means. A trainer may count from its own start, or use the loader's numbers."""
        now = epoch_of(self.state)
        absolute = requested + self._offset
        return requested if absolute not in (now, now + 1) and requested in (now, now + 1) else max(0, absolute)

    def _look(self) -> None:
        if self._sized is None:
            self._sized = self.epochs.sized()

    @property
    def _complete(self) -> bool:
        return self.epochs.remaining(self.state) == 0

    def _completes(self, requested: int | None) -> bool:
        """Whether the state has completed the epoch before ``requested``."""
        return requested == epoch_of(self.state) + 1 and self._complete

    def _stand(self, state: State, stands: GraphPosition) -> None:
        """Move to ``state`` with every flag cleared; callers set those that differ."""
        self.state, self.stands = state, stands
        self.fresh = True
        self.pending = self.over_marker = self.begun = False
        self._resumed = False  # the run began at a loaded state, which counts as unused until a batch is delivered
        self._again = False  # the first item of this run raised: the next run begins at the same place
