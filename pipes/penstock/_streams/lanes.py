"""Reads lanes: shards of unknown lengths, one after another, from the front.

An item of a lane is found by counting: first the outputs of the earlier shards, which are known from bookmarks or found
by reading, then those of its own shard. A lane only moves forward. Recently skipped items are kept, because threads
overtake each other; going further back means reading a shard again, which is correct but slower. While a `Shuffle`
drains its window at the end of a shard, the records of the next shard are read, one per item. Otherwise the first items
of a shard would wait until the window is full, in all lanes at the same time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, final

from penstock._errors import GraphError, is_own_error
from penstock._fetch.error_policy import annotate
from penstock._fetch.held import EndOfWalk
from penstock._random.lane_order import PASSES
from penstock._streams.open_shards import most_files
from penstock._streams.progress import LINE_S, Interruptions, Progress
from penstock._workers.lifetime import Closing, held_in_time, process

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._random.growth import GrowingDeal
    from penstock._random.lane_order import Deal
    from penstock._streams.bookmarks import Bookmarks
    from penstock._streams.steps import ShardRun


log = logging.getLogger("penstock")

SLOW_S: Final = 1.0
"""After this many seconds, a search for a position in a lane is logged. From then on, a bar or occasional log lines
show its progress.
"""
LEAST_KEPT: Final = 16
MOST_KEPT: Final = 4096
"""Bounds on the skipped items that a lane buffers. The number is what was needed so far, rounded up to a power of
two.
"""


@final
class Lanes(EndOfWalk):
    """The lanes that one process reads.

    Guarantees: Any number of threads may read, and two of them wait for each other only at the same lane. A process
    uses only what it opened itself: after a fork it starts with nothing open.

    Args:
        deal: Which shards make up a lane.
        run: Opens a shard and runs the steps over its records: called with the shard, the pass, and the event that
            interrupts retries.
        known: Consulted about where to begin, and updated with what was found.
        skips: The rest of a shard after an error is skipped, with a warning. Otherwise the error is raised.
        label: The name of a shard, for messages.
    """

    def __init__(
        self,
        deal: Deal | GrowingDeal,
        run: Callable[[int, int, Closing], ShardRun],
        known: Bookmarks,
        *,
        skips: bool = False,
        label: Callable[[int], str] = str,
    ) -> None:
        self.deal = deal
        self.run = run
        self.known = known
        self.skips = skips
        self.label = label
        self._start()

    def _start(self) -> None:
        self._pid = process.id
        self._lanes: dict[int, _Lane] = {}  # entries are added by `setdefault` and never removed, so this needs no lock
        self.closing = Closing()
        self._spoke = float("-inf")

    def read(self, item: int) -> Any:
        """The item with this number, counted from the beginning of training."""
        if self._pid != process.id:
            # Another thread may have been reading at the moment of the fork, so neither its locks nor its readers can
            # be used.
            self._start()
        number, place = divmod(item, self.deal.lanes)
        lane = self._lanes.get(place) or self._lanes.setdefault(place, self._new(place))
        with lane.lock:
            return lane.item(number)

    def _new(self, lane: int) -> _Lane:
        if len(self._lanes) >= (most := most_files()):
            raise ValueError(
                f"this process reads more than {most} of the {self.deal.lanes} lanes, and each keeps a file open, but "
                f"it may open only {2 * most} in total. Use fewer lanes, more ranks or worker processes, or raise the "
                f"limit (ulimit -n)."
            )
        return _Lane(lane, self)

    def may_speak(self) -> bool:
        """Whether no lane has logged a slow search recently: lanes search one after another, and one line is enough."""
        now, last = time.monotonic(), self._spoke
        self._spoke = now if now - last > LINE_S else last
        return self._spoke == now

    def close(self) -> None:
        """Close every shard that this process has open. Idempotent; reading opens them again."""
        if self._pid != process.id:
            return  # everything open was opened by the parent, and its locks may be held here forever
        # This comes first, because a reader that waits to retry a server holds its lane for up to a minute.
        self.closing.set()
        for lane in list(self._lanes.values()):
            with held_in_time(lane.lock) as got:
                if got:
                    lane.close()
        self.closing.clear()


class _Lane:
    """One lane. ``lock`` is held while the lane is read."""

    # Invariant, whenever the lock is free: `_run` yields output `_next` next, and `_first` is the first of its shard;
    # or `_run` is None, and `_next` is `_first`. An interrupt leaves the latter, and the next read searches the shard
    # again. A wrong position would silently lose or repeat records for the rest of the training.

    def __init__(self, lane: int, lanes: Lanes) -> None:
        self.lock = threading.Lock()
        self._lane = lane
        self._lanes = lanes
        # items skipped and not requested yet, by number, in ascending order
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._most_kept = LEAST_KEPT
        self._run: ShardRun | None = None
        self._ahead: ShardRun | None = None  # of the next shard, whose records wait for the steps
        self._interruptions = Interruptions()
        self._rewind()

    def item(self, number: int) -> Any:
        """The output ``number`` of this lane."""
        if number in self._kept:
            return self._kept.pop(number)
        if number < self._next:  # otherwise it is nearly always the next one
            back = self._next - number
            # From now on exactly as many are kept as were needed, not twice as many as before: an epoch that is left
            # early discards what was read ahead, which looks like this, and after ten of them 4096 items were kept.
            if back <= MOST_KEPT:
                self._most_kept = max(self._most_kept, 1 << (back - 1).bit_length())
            self.close()
            if number < self._first:
                self._rewind()
        try:
            if number == self._next and self._run is not None:
                if (value := self._output()) is not _END:
                    self._next += 1
                    if self._run.owes:  # it came out of a window without a record being read, so read one in its place
                        self._read_ahead()
                    return value
                self._end()
            with _Search(self._lanes, self._lane, number, self._next) as search:
                return self._searched(number, search)
        except BaseException as exc:
            self._interruptions.add(exc, number, self._label)
            self._drop()  # after an error, or Ctrl-C, the position in the shard is unknown
            raise

    def close(self) -> None:
        """Close the open shard, and discard the kept items."""
        self._kept.clear()
        self._drop()

    def _rewind(self) -> None:
        # The shard that is read, or comes next, by its number in the endless deal; and the numbers, in this lane, of
        # its first output and of the next output.
        self._deal, self._first, self._next = self._lane, 0, 0
        self._empty: set[int] = set()  # the shards that had no output, since one had

    def _drop(self) -> None:
        # In one line, and before anything is closed, which may take long and be interrupted.
        run, self._run, self._next = self._run, None, self._first
        for one in (run, self._ahead):
            if one is not None:
                with contextlib.suppress(Exception):
                    one.close()
        self._ahead = None

    def _read_ahead(self) -> None:
        """Read a record of the open shard, or of the next one if there are none left."""
        assert self._run is not None
        if self._run.read_ahead():
            return
        if self._ahead is None:
            pass_, shard = self._lanes.deal[self._lanes.deal.after(self._deal, self._first)]
            self._lanes.known.outputs(shard, pass_, rely=False)  # looks at the version of the file before it is opened
            self._ahead = self._lanes.run(shard, pass_, self._lanes.closing)
        self._ahead.read_ahead()

    def _searched(self, number: int, search: _Search) -> Any:
        while True:
            if self._run is None:
                self._skip_to(number, search)
                self._open(number)
            while (value := self._output()) is not _END:
                self._next += 1
                if self._next > number:
                    return value
                # A thread that was overtaken will request it; anything far behind was skipped by a jump.
                if self._next > number - self._most_kept:
                    self._kept[self._next - 1] = value
                    if len(self._kept) > self._most_kept:
                        self._kept.popitem(last=False)
                if not self._next % 64:
                    search.at(self._next)
            self._end()

    def _skip_to(self, number: int, search: _Search) -> None:
        """Skip shards, without opening them, whose outputs all come before ``number``."""
        if number - self._first > MOST_KEPT:  # a jump, possibly over items that other workers have read
            self._lanes.known.refresh()
        while True:
            # Only a count that is used to skip a shard is relied on, so that a later contradiction is an error: a
            # shard that is read anyway shows its own count.
            outputs = self._outputs(rely=False)
            if outputs is None or self._first + outputs > number:
                return
            self._outputs()
            # discards what was read ahead of this shard, if anything; it would be attributed to a later one
            self._drop()
            self._next = self._first + outputs
            self._go_on()
            search.at(self._next)

    def _outputs(self, *, rely: bool = True) -> int | None:
        pass_, shard = self._lanes.deal[self._deal]
        return self._lanes.known.outputs(shard, pass_, rely=rely)

    def _open(self, number: int) -> None:
        pass_, shard = self._lanes.deal[self._deal]
        run, self._ahead = self._ahead or self._lanes.run(shard, pass_, self._lanes.closing), None
        self._run, self._next = run, self._first + run.begin_near(number - self._first)
        self._cut = False
        # A shard that an error cut short stays so, even if the error has passed, because every later number depends on
        # it.
        self._most = self._outputs() if self._lanes.skips else None

    def _output(self) -> Any:
        assert self._run is not None
        if self._most is not None and self._next == self._first + self._most:
            return _END
        try:
            return next(self._run, _END)
        except Exception as exc:
            annotate(exc, f"in {self._label}")
            # An error in the steps themselves would skip all shards, one after another. And closing ends a pause with
            # an error, which a bookmark would record as the end of the shard, for all future runs. So would a signal
            # handler's.
            if (
                isinstance(exc, GraphError)
                or not (self._lanes.skips and is_own_error(exc))
                or self._lanes.closing.is_set()
            ):
                raise
            self._cut = True
            log.warning('on_error="skip" skips the rest of %s: %s: %s', self._label, type(exc).__name__, exc)
            return _END

    def _end(self) -> None:
        """Handle the end of the open shard."""
        run = self._run
        assert run is not None
        pass_, shard = self._lanes.deal[self._deal]
        outputs = self._next - self._first
        if outputs != self._most:  # otherwise it was known; a shard that was cut short before was not read further now
            self._lanes.known.add(shard, pass_, outputs, every_pass=not run.depends_on_pass, cut=self._cut)
        self._run = None
        run.close()
        self._go_on()

    def _go_on(self) -> None:
        """Move to the lane's next shard."""
        deal = self._lanes.deal
        # without this check, a lane whose steps drop everything would read pass after pass, forever
        if self._next == self._first:
            self._empty.add(deal[self._deal][1])
        elif self._empty:
            self._empty = set()
        here, after = self._deal, deal.after(self._deal, self._first)
        self._deal, self._first = after, self._next  # in one line, because Ctrl-C may come between two lines
        if len(self._empty) == (shards := deal.shards_with(here)):
            self._rewind()
            raise ValueError(
                f"none of the {shards} shards, which lane {self._lane} has read one after another, yielded any output. "
                f"Check what the steps drop, and whether the shards have records."
            )

    @property
    def _label(self) -> str:
        pass_, shard = self._lanes.deal[self._deal]
        return f"{self._lanes.label(shard)}, pass {pass_ % PASSES}"


class _Search:
    """A search for the item ``number`` of a lane, from item ``begin`` on. Reports progress once it takes long."""

    def __init__(self, lanes: Lanes, lane: int, number: int, begin: int) -> None:
        self._lanes = lanes
        self._lane = lane
        self._number = number
        self._begin = begin
        self._begun = time.monotonic()
        self._progress: Progress | None = None

    def at(self, output: int) -> None:
        """Report that the lane is at ``output``."""
        seconds = time.monotonic() - self._begun
        if self._progress is not None:
            self._progress.at(output - self._begin)
        elif seconds > SLOW_S:
            self._progress = Progress(
                f"lane {self._lane}: finding item {self._number:,}", self._number - self._begin, "items"
            )
            if self._lanes.may_speak():
                log.warning(_SLOW, self._lane, seconds, self._number, output)

    def __enter__(self) -> _Search:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.close()


_END: Final = object()
_SLOW: Final = (
    "lane %d: it has taken %.0f s so far to find item %d; now at item %d. With bookmarks it takes less than reading "
    "one shard: keep their folder (bookmarks=) from run to run."
)
