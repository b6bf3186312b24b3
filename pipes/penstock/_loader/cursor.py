"""EpochCursor: where a loader stands, and where its next iterator starts. Pure: no thread, and nothing of the graph is touched.

The cursor is told what happened: a batch was delivered, a mark was read, a state was loaded, an epoch was asked for. At the first ``next`` of an
iterator it says what the graph has to do before the first batch: stay, pass one mark, or jump to a state. Trainers call ``iter``,
``load_state_dict`` and ``set_epoch`` in every order there is, and none of them moves anything before that.

The end of an epoch is *seen* once its mark was consumed: by the ``StopIteration`` of its loop, by `EpochCursor.end_epoch`, or because the next epoch
was begun. The state behind a seen end is the start of the next epoch. A state taken on the epoch's last batch has not seen the end: loaded, it
gives the empty remainder of that epoch first, so that the work behind the loop (a scheduler's step, validation) is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, final

from penstock._errors import StateError
from penstock._nodes.node import epoch_of

if TYPE_CHECKING:
    from penstock._nodes.node import State


class Epochs(Protocol):
    """What the cursor asks of a graph: questions that start nothing."""

    def remaining(self, state: State) -> int | None:
        """Items still to come in the epoch of ``state``; None where that is unknown."""

    def start_of(self, epoch: int) -> State:
        """The state in which ``epoch`` has not begun."""
        ...

    def end_of(self, epoch: int) -> State:
        """The state in which only the mark of ``epoch`` is left."""
        ...

    def sized(self) -> bool:
        """Whether the source knows how many items an epoch has."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Stay:
    """The graph stands where it should."""


@final
@dataclass(frozen=True, slots=True)
class PassMark:
    """The graph has to read the mark behind ``epoch``; nothing that it has loaded ahead is lost."""

    epoch: int


@final
@dataclass(frozen=True, slots=True)
class Jump:
    """The graph has to be reset to ``state``; if a mark comes first there, it is passed (``over_mark``) and ends nothing."""

    state: State
    over_mark: bool = False


Move = Stay | PassMark | Jump


class Stands(Enum):
    """Where the graph is, relative to the cursor's state."""

    AWAY = "anywhere: only a jump leads to the state"
    HERE = "at the state"
    BEFORE_MARK = "at the end of the epoch before the state's, whose mark it has not read"
    BEHIND_MARK = "at the start of the epoch behind the state's, whose mark it has read"


@final
class EpochCursor:
    """Where a loader stands.

    Args:
        epochs: The graph's answers.
        endless: Epochs end nothing: marks are passed.
        restart: Whether a state of a finished epoch goes on with the next one (True) or with the empty remainder (False); None: with the next
            one if the end was seen.

    Attributes:
        epochs: The graph's answers.
        state: Behind the last item delivered, or where the next one comes from.
        stands: Where the graph is.
        fresh: Nothing was delivered since the state was jumped to, loaded or begun.
        pending: The state was loaded, and no batch of it was asked for yet.
        over_mark: The next mark ends nothing.
        begun: Batches of the state's epoch lie before the state.
    """

    def __init__(self, epochs: Epochs, *, endless: bool, restart: bool | None) -> None:
        self.epochs = epochs
        self._endless = endless
        self._restart = restart
        self.state = epochs.start_of(0)
        self.stands = Stands.AWAY
        self.fresh = True
        self.pending = False
        self.over_mark = False
        self.begun = False
        self._resumed = False  # the run began at a loaded state, which counts as unused until a batch of it is delivered
        self._again = False  # the first item of a run raised: the next run begins where this one did
        self._requested: int | None = None
        self._by_view = False  # it was asked for through `Loader.sampler`
        self._sized: bool | None = None  # of the graph, as it was before anything was read: a plan in memory may know more
        self._offset = 0  # what a trainer calls an epoch of a loader without a length, plus this, is the epoch

    # Where it stands.

    @property
    def here(self) -> State:
        """The state; the start of the next epoch, where that is what a finished one was said to mean."""
        if self.pending and self._restart and self._complete:
            return self.epochs.start_of(epoch_of(self.state) + 1)
        return self.state

    @property
    def remaining(self) -> int | None:
        """Items still to come in the epoch."""
        return 0 if self.stands is Stands.BEHIND_MARK else self.epochs.remaining(self.here)

    # What happened.

    def request(self, epoch: int | None, *, by_view: bool = False) -> None:
        """``epoch`` was asked for, or after all none; the next start decides."""
        self._requested, self._by_view = epoch, by_view

    def load(self, state: State) -> None:
        """``state`` was loaded, to go on from."""
        self._look()
        epoch = epoch_of(state)
        if self._restart is False and epoch and state == self.epochs.start_of(epoch):
            state = self.epochs.end_of(epoch - 1)  # whether the end before it was seen or not, it is seen now
        self._stand(state, Stands.AWAY)
        self.pending, self.begun, self._offset = True, state != self.epochs.start_of(epoch_of(state)), 0

    def delivered(self, state: State) -> None:
        """An item was handed out; the graph is behind it."""
        self.state = state
        self.fresh = self.over_mark = self._resumed = self._again = False
        self.begun = True

    def raised(self, state: State) -> None:
        """Asking for an item raised: ``state`` is the graph's. Where nothing came of a start, the next one begins there again."""
        if epoch_of(state) == epoch_of(self.state):
            self.state = state
        if self.fresh:
            self._again, self.pending = True, self._resumed

    def mark(self, behind: State) -> bool:
        """A mark was read, and the graph is ``behind`` it; whether an epoch ends here for the loop."""
        ends = not (self._endless or self.over_mark)
        if ends and self._restart is False:
            self.stands, self.fresh = Stands.BEHIND_MARK, True
        else:
            self._stand(behind, Stands.HERE)
        return ends

    def end_epoch(self) -> bool:
        """Give up what is left of an epoch that has begun, and see its end; whether there was any."""
        if not self.begun:
            return False
        before = self.stands
        at_end = before is Stands.HERE and self._complete
        self._stand(
            self.epochs.start_of(epoch_of(self.state) + 1),
            Stands.HERE if before is Stands.BEHIND_MARK else Stands.BEFORE_MARK if at_end else Stands.AWAY,
        )
        return True

    def lost(self) -> None:
        """Nobody knows where the graph is; the state is right."""
        if self.stands is Stands.BEHIND_MARK:
            self._again = True
        else:
            self.stands = Stands.AWAY

    def saved(self) -> dict[str, Any]:
        """All that the cursor knows, for `restore`."""
        return vars(self).copy()

    def restore(self, saved: dict[str, Any]) -> None:
        """Let nothing have happened since `saved`."""
        vars(self).update(saved)

    def returned(self) -> None:
        """The graph was reset to `graph_state`, and the run goes on."""
        if self.stands is not Stands.BEHIND_MARK:
            self.stands = Stands.HERE

    @property
    def graph_state(self) -> State:
        """Where the graph should be while a run goes on."""
        return self.epochs.start_of(epoch_of(self.state) + 1) if self.stands is Stands.BEHIND_MARK else self.state

    # Where the next iterator starts.

    @property
    def is_told(self) -> bool:
        """Whether the next start is at a loaded state, or at an epoch that was asked for."""
        return self.pending or self._requested is not None

    def start(self) -> Move:
        """What the graph has to do. Nothing changes before `arrived` says that it has done so."""
        self._look()
        requested = self._requested
        if self.pending:
            if self._by_view and not self._sized and requested is not None and requested - epoch_of(self.state) in (0, 1):
                # Whether a stream has come to its end shows by reading on only. Who asks for the next epoch by the view has counted the batches.
                return Jump(self.state if requested == epoch_of(self.state) else self.epochs.start_of(requested))
            return self._from_loaded(None if self._by_view and not self._completes(requested) else requested)
        return self._from_stream(None if requested is None else self._absolute(requested))

    def arrived(self, move: Move, state: State | None = None) -> None:
        """The graph has made ``move``; ``state`` is its own behind a mark that it has passed."""
        resumed, requested = self.pending, self._requested
        if isinstance(move, Jump):
            begun = move.state != self.epochs.start_of(epoch_of(move.state))
            self._stand(move.state, Stands.HERE)
            self.over_mark, self.begun = move.over_mark, begun
            if resumed and requested is not None and move.over_mark:
                self._offset = epoch_of(move.state) - requested
        elif isinstance(move, PassMark):
            assert state is not None
            self._stand(state, Stands.HERE)
        elif self.stands is Stands.BEHIND_MARK:
            self._stand(self.epochs.start_of(epoch_of(self.state) + 1), Stands.HERE)
        self._resumed, self._requested = resumed, None

    def _from_loaded(self, requested: int | None) -> Move:
        epoch = epoch_of(self.state)
        if requested == epoch:
            return Jump(self.state, over_mark=self._endless)  # Also into an empty remainder, so that the end of the user's epoch runs.
        if self._completes(requested):
            return Jump(self.epochs.start_of(epoch + 1))
        if requested is None:
            return Jump(self.state, over_mark=self._endless or (self._restart is True and self.begun))
        if self._endless or not self._sized:
            return Jump(self.state, over_mark=True)
        self._requested = None
        raise StateError(
            f"set_epoch({requested}) was called, and the loaded state stands in epoch {epoch_of(self.here)}. Start your loop at loader.epoch, "
            f"or do not load the state."
        )

    def _from_stream(self, requested: int | None) -> Move:
        epoch, finished = epoch_of(self.state), self.stands is Stands.BEHIND_MARK
        if self.stands is Stands.AWAY or (self._again and not finished):
            if requested is None and (self.fresh or self._endless):
                return Jump(self.state)
            return Jump(self.epochs.start_of(epoch + 1 if requested is None else requested))
        if self.fresh and not finished and requested in (None, epoch):
            return PassMark(epoch - 1) if self.stands is Stands.BEFORE_MARK else Stay()
        if finished and requested in (None, epoch + 1):
            return Jump(self.epochs.start_of(epoch + 1)) if self._again else Stay()
        if not self.fresh and self._complete and requested in (None, epoch + 1):
            return PassMark(epoch)
        if requested is None and self._endless:
            return Stay()
        return Jump(self.epochs.start_of(epoch + 1 if requested is None else requested))

    def _absolute(self, requested: int) -> int:
        """The epoch that is meant: by a trainer that counts on from its own number, or by somebody who goes by ours."""
        now = epoch_of(self.state)
        if requested + self._offset not in (now, now + 1) and requested in (now, now + 1):
            self._offset = 0
        return max(0, requested + self._offset)

    def _look(self) -> None:
        if self._sized is None:
            self._sized = self.epochs.sized()

    @property
    def _complete(self) -> bool:
        return self.epochs.remaining(self.state) == 0

    def _completes(self, requested: int | None) -> bool:
        """Whether the state has completed the epoch before ``requested``."""
        return requested == epoch_of(self.state) + 1 and self._complete

    def _stand(self, state: State, stands: Stands) -> None:
        """At the start of an epoch, unless it is said otherwise."""
        self.state, self.stands = state, stands
        self.fresh = True
        self.pending = self.over_mark = self.begun = self._resumed = self._again = False
