"""EpochIterator, one ``for`` loop over a `Loader`, and Runs, which decides which of a loader's iterators may read.

An exception may leave ``next`` at any line (Ctrl-C, a signal handler that raises, the user's own code), and the user's
loop may catch it and continue. A ``next`` that raises has returned nothing, so it must leave no trace. So each ``next``
first saves the current state (`Runs.unfinished`). If it is interrupted, the next call restores that state, and resets
the graph (`Runs.roll_back`).
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from penstock._errors import hide_internal_frames, is_own_error
from penstock._nodes.node import epoch_of
from penstock._random.global_rng import forget_interrupted, put_back_interrupted
from penstock._workers.lifetime import OneThread
from penstock._workers.meter import now, traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._loader.graph_reader import GraphReader
    from penstock._nodes.node import State

T = TypeVar("T", covariant=True)
log = logging.getLogger("penstock")


def _nobody() -> None:
    """A loader that was not started has no iterator. Not a lambda, because such a loader can be pickled."""


@final
class Runs:
    """The runs of a loader.

    An iterator begins a run with its first ``next``, and reads until another run begins or a state is loaded.

    Args:
        reader: Reads the loader's graph.

    Attributes:
        number: Number of the current run; iterators of earlier runs have ended.
        iterator: Returns the iterator that began the last run; None if there was none, or nobody holds it any more.
        lengths: What ``len(loader)`` has answered.
        given_up: The run that began because `Loader.end_epoch` skipped the rest of the previous one.
        turn: Lets one thread at a time read.
        unfinished: The state before the ``next`` that is running or was interrupted: the iterator, its run, and what
            the cursor and the commit ledger returned from ``saved``. None between two calls.
    """

    def __init__(self, reader: GraphReader[Any]) -> None:
        self._reader = reader
        self.number = 0
        self.iterator: Callable[[], EpochIterator[Any] | None] = _nobody
        self.lengths: set[int] = set()
        self._told = False  # of batches left behind
        self.given_up = -1
        self.turn = OneThread()
        self.unfinished: Any = None

    def end(self) -> int:
        """End the current run; returns the number of the one that begins."""
        self.number += 1
        return self.number

    @property
    def is_inside(self) -> bool:
        """Whether somebody holds an iterator that is inside an epoch: between its first batch and its last one."""
        it = self.iterator()
        return it is not None and it._run == self.number and not it._ended and self._reader.cursor.remaining != 0

    def rest(self) -> tuple[int, int, int] | None:
        """The epoch that the loop is inside, its batches taken so far, and those left.

        None unless it has taken as many as ``len(loader)`` answered, so that it seems to count by another epoch.
        """
        cursor = self._reader.cursor
        if self._told or not self.lengths or not cursor.begun or not (left := cursor.remaining):
            return None
        epoch = epoch_of(cursor.state)
        taken = (self._reader.positions.items(epoch, cursor.state) or 0) - left
        return (epoch, taken, left) if taken in self.lengths else None

    def tell(self, rest: tuple[int, int, int] | None) -> None:
        """If the loop has left ``rest`` behind, and goes on with the next epoch, log that once."""
        if rest is not None and epoch_of(self._reader.cursor.state) == rest[0] + 1:
            self._told = True
            log.warning(
                "the loop took %d batches of epoch %d, as many as len(loader) gave for another epoch, and left %d "
                "behind, because epochs of this loader differ in length. Read until the loader ends, or ask for "
                "len(loader) in every epoch, after set_epoch. If it was meant, ignore this; it is not said again.",
                *(rest[1], rest[0], rest[2]),
            )

    @property
    def state(self) -> State:
        """The position after the last batch that ``next`` returned, or that was committed."""
        state = self._reader.commits.state_of(self._reader.cursor.state)
        unfinished = self.unfinished  # read once, and last: another thread may be in the middle of a `next`
        # a signal handler calls this in the middle of a `next`, or the last `next` was interrupted
        if unfinished is not None:
            _, _, cursor, commits = unfinished
            state = cursor["state"] if commits is None else commits[0]
        return state

    def roll_back(self) -> None:
        """Undo a ``next`` that Ctrl-C interrupted. It returned nothing, so it must have no effect.

        The graph is reset when the next item is requested, and the items it had taken are loaded again. If this method
        is itself interrupted, the next use of the loader repeats it from the beginning.
        """
        if self.unfinished is None:
            return
        iterator, run, cursor, commits = self.unfinished
        iterator._run, iterator._ended = run, False
        self._reader.cursor.restore(cursor)
        self._reader.commits.restore(commits)
        put_back_interrupted()
        self._reader.cursor.lost()
        self.unfinished = None  # last, because an interrupt before this line has all of it done again


class EpochIterator(Generic[T]):
    """One pass over an epoch of a `Loader`.

    Its first ``next`` begins a run of the loader, and the iterator ends with that run.
    """

    __slots__ = ("__weakref__", "_ended", "_loader", "_run")

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._run: int | None = None
        self._ended = False

    def __iter__(self) -> EpochIterator[T]:
        return self

    def __next__(self) -> T:
        # Three nested `try`s, from the inside out. The first reports the end of an epoch to the clock. The second
        # handles an Exception: the loader stays where the graph is, ready for the next call. The third handles Ctrl-C,
        # SystemExit, and whatever a signal handler raises: it rolls back, as if this call had never been made.
        loader = self._loader
        runs, reader, clock = loader._runs, loader._reader, loader._clock
        inside = False  # a second thread is refused, and must not touch what the first one is doing
        noted: Any = None
        own = False
        asked = 0
        try:
            try:
                with runs.turn:
                    inside = True
                    if runs.unfinished is not None:
                        runs.roll_back()
                    forget_interrupted()
                    noted = (
                        self,
                        self._run,
                        reader.cursor.saved(),
                        None if reader.commits.committed is None else reader.commits.saved(),
                    )
                    # assigned complete, because a signal handler may ask for the state at any line
                    runs.unfinished = noted
                    asked = now()
                    if self._run != runs.number or self._ended:
                        self._begin(loader)
                    try:
                        item: T = reader.advance()
                    except StopIteration as exc:
                        self._ended = True
                        clock.end(loader, asked, exc)
                        raise
                    at, moment = clock.at, now()
                    # `got`, inlined: the call would cost a tiny batch 2 %
                    if at < clock.until and moment < clock.report_ns and not traced:
                        clock.moments[at + 1], clock.moments[at + 2], clock.at = asked, moment, at + 2
                    else:
                        clock.got(loader, asked, moment)
                # After the `with`, and as the last step: an interrupt before this line returns no item, so it is rolled
                # back.
                runs.unfinished = None
                return item
            except Exception as exc:
                if not isinstance(exc, StopIteration):
                    if inside:
                        clock.end(loader, asked, exc)
                        reader.lost_if_moved()
                        put_back_interrupted()
                    hide_internal_frames(exc)
                own = isinstance(exc, StopIteration) or is_own_error(exc)  # no call after this one, so no interrupt
                if inside:
                    runs.unfinished = None
                raise
        except BaseException:
            # It may come from the handler above, which may already have dropped `unfinished`; hence `noted`.
            if inside and noted is not None and not own:
                runs.unfinished = noted
                runs.roll_back()
            raise

    def _begin(self, loader: Any) -> None:
        """Begin a run, unless this iterator has ended."""
        runs = loader._runs
        if self._ended:
            raise StopIteration
        if self._run is None:
            self._run = loader._start()
            runs.iterator = weakref.ref(self)
            loader._clock.begin()
        elif runs.given_up == runs.number and self._run == runs.number - 1:
            self._ended = True
            raise StopIteration
        else:
            loader._reader.check_open()
            raise RuntimeError(
                "this iterator has ended, because a newer one of the same loader was started, or a state was loaded. "
                "Iterate over the newer one."
            )
