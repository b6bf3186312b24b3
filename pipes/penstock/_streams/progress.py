"""Progress of penstock's own long work: tqdm's bar on a terminal, if tqdm is installed, or else an occasional log
line.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, final

from penstock._errors import first_time, is_own_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

LINE_S: Final = 10.0
"""Minimum number of seconds between two lines; shorter work logs none."""
_DRAW_S: Final = 0.1
_TIMES: Final = 8

log = logging.getLogger("penstock")


@final
class Interruptions:
    """Says so if one place is interrupted again and again, because what is read forward starts over each time."""

    def __init__(self) -> None:
        self._place: object = None
        self._times = 0

    def add(self, exc: BaseException, at: object, what: str) -> None:
        """Reading ``what`` raised ``exc`` on the way to ``at``."""
        self._place, self._times = at, 1 + (self._times if at == self._place else 0)
        if self._times == _TIMES and not is_own_error(exc) and first_time("interrupted", what):
            log.warning(
                f"{what} was interrupted {_TIMES} times in a row before the same item. It is read from its beginning, "
                f"and starts over each time, so it stands still if interrupts come faster than it gets here. Let the "
                f"handler set a flag instead of raising, or read in worker processes."
            )


@final
class Progress:
    """Shows the progress of some work. Use it as a context manager; leaving it removes the bar.

    Args:
        what: The work in progress, such as ``"indexing"``.
        total: How many items there are.
        unit: What is counted.
        say: Receives the lines if there is no bar; default: the log, at level INFO.
        clock: Seconds.
        first_s: When to write the first line, in seconds from now; default: `LINE_S`.
    """

    def __init__(
        self,
        what: str,
        total: int,
        unit: str,
        *,
        say: Callable[[str], None] = log.info,
        clock: Callable[[], float] = time.monotonic,
        first_s: float | None = None,
    ) -> None:
        self._text = f"{what}: {{:,}} of {total:,} {unit} in {{:.0f}} s"
        self._bar = _bar(what, total, unit)
        self._say = say
        self._clock = clock
        self._begun = clock()
        self._due = self._begun + (LINE_S if first_s is None else first_s)

    def at(self, done: int) -> None:
        """Report that ``done`` items are done. Cheap: most calls only read the clock."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif (now := self._clock()) >= self._due:
            self._due = now + LINE_S
            self._say(self._text.format(done, now - self._begun))

    def clear(self) -> None:
        """Remove the bar, so that something else can be printed; a later `at` draws it again."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """The work has ended: remove the bar. May be called twice."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bar(what: str, total: int, unit: str) -> Any:
    """A bar of tqdm's, drawn only by the main thread of the main process: bars of several workers would overwrite each
    other. None without a terminal.
    """
    if threading.current_thread() is not threading.main_thread() or multiprocessing.parent_process() is not None:
        return None
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]

        class Bar(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # no thread of its own

        words = {
            "desc": what,
            "total": total,
            "unit": f" {unit}",
            "leave": False,
            "miniters": 1,
            "mininterval": _DRAW_S,
            "delay": _DRAW_S,
        }
        return Bar(**words) if sys.stderr.isatty() else None
    except (ImportError, AttributeError, ValueError):
        return None
