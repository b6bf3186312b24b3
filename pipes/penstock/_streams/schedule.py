"""When the copied shards are needed next: shards needed soon are fetched ahead, and those needed last are evicted
first.

The order of the shards is a function of the position, so both are known. How long a shard takes to read is unknown, but
only the order of events matters.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from penstock._files.copies import hashes_of
from penstock._files.files import fetch
from penstock._files.paths import address_at_source, kept_in
from penstock._streams.tables import Pieces
from penstock._workers.errands import Errands

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._random.shard_order import Opens

PASSES: Final = 4
"""How far ahead to look for the next use of a shard. Shards not needed until then are treated alike."""
_AT_ONCE: Final = 4
"""Shards that a process fetches at the same time: if a store takes 50 ms to respond, fetching 2 MB shards one after
another gives a third of 40 MB/s.
"""
_APART: Final = 1.5
"""Maximum distance in passes between two lanes of a host: a lane last seen further away is now read by another host, or
was read in an earlier run.
"""


def schedule_of(shards: Sequence[Any], opens: Callable[[int], Opens], lanes: int) -> Schedule | None:
    """The `Schedule` of shards of which copies are kept; None if they are not such files.

    Args:
        shards: Those of `Shards`.
        opens: Which shards are opened in a pass.
        lanes: Number of lanes.
    """
    files, numbers = (
        (shards.files, shards.file_numbers) if isinstance(shards, Pieces) else (shards, np.arange(len(shards)))
    )
    if not len(files) or not isinstance(files[0], str) or kept_in(files[0]) is None:
        return None
    return Schedule(files, numbers, opens, lanes)


@final
class Schedule:
    """One process's view of when shards are needed, and its fetching thread. Any number of threads may call it.

    Args:
        files: The paths.
        numbers: The file that each shard is in.
        opens: See `schedule_of`.
        lanes: See `schedule_of`.
    """

    def __init__(self, files: Sequence[str], numbers: np.ndarray, opens: Callable[[int], Opens], lanes: int) -> None:
        cache = kept_in(files[0])
        assert cache is not None
        self._files = files
        self._numbers = numbers
        self._opens_in = opens
        self._opens = functools.lru_cache(2 * PASSES)(opens)
        self._lanes = lanes
        self._notes = cache.notes
        self._ahead = cache.ahead
        self._places = {
            name: number for number, path in enumerate(files) for name in hashes_of(address_at_source(path))
        }
        self._now = 0.0
        # the files requested last, so that a file is not checked again for each of its shards
        self._last: tuple[int, ...] = ()
        self._errands = Errands(self._fetch, "penstock-ahead", _AT_ONCE)
        cache.needed = self.needed

    def __reduce__(self) -> Any:
        return Schedule, (self._files, self._numbers, self._opens_in, self._lanes)

    def opening(self, pass_: int, shard: int) -> None:
        """Called when a reader is about to open a shard in a pass: starts fetching what its lane needs next."""
        opens = self._opens(pass_)
        rows = np.flatnonzero(opens.shards == shard)
        if not len(rows):
            return
        # of two lanes in the same shard, one is at its end and the other at its beginning
        row = rows[np.abs(opens.times[rows] - self._now).argmin()]
        lane, time = int(opens.lanes[row]), float(opens.times[row])
        self._now = time
        self._notes.saw(lane, time)
        if self._ahead:
            self._want(self._coming(lane, time, pass_), int(self._numbers[shard]))

    def needed(self) -> Callable[[str], float | None]:
        """A function from a `file_hash` to when that file is needed next on this host; infinity if not soon, None for a
        file of other data.
        """
        seen = self._notes.seen(self._lanes)
        seen[np.abs(seen - self._now) > _APART] = np.nan
        found = np.full(len(self._files), math.inf)
        first = max(0, int(self._now - _APART))
        for pass_ in range(first, first + PASSES + 2):
            opens = self._opens(pass_)
            is_coming = opens.times > seen[opens.lanes]  # False for NaN
            np.minimum.at(found, self._numbers[opens.shards[is_coming]], opens.times[is_coming])
        return lambda name: None if (number := self._places.get(name)) is None else float(found[number])

    def close(self) -> None:
        """Stop fetching, and abort transfers in progress. Idempotent; `opening` starts it again."""
        self._last = ()
        self._errands.close()

    def _coming(self, lane: int, time: float, pass_: int) -> dict[int, float]:
        """The files that a lane opens next, after ``time``."""
        found: dict[int, float] = {}
        for one in range(pass_, pass_ + PASSES):
            opens = self._opens(one)
            for row in np.flatnonzero((opens.lanes == lane) & (opens.times > time)).tolist():
                found.setdefault(int(self._numbers[opens.shards[row]]), float(opens.times[row]))
                if len(found) == self._ahead:
                    return found
        return found

    def _want(self, files: dict[int, float], opened: int) -> None:
        last = self._last
        files = {file: time for file, time in files.items() if file != opened and file not in last}
        self._last = (*last, opened, *files)[-(1 + self._ahead) * self._lanes :]
        self._errands.want(files, opened)

    def _fetch(self, file: int, is_over: Callable[[], bool]) -> None:
        fetch(self._files[file], is_over)
