"""Progress of penstock's own long work: a bar on a terminal, or else an occasional log line."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, TextIO, final

from penstock._arguments import cut

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

LINE_S: Final = 10.0
"""Minimum number of seconds between two lines; shorter work logs none."""
_DRAW_S: Final = 0.1
_CLEAR: Final = "\r\x1b[K"
_BAR: Final = 20

log = logging.getLogger("penstock")


@final
class Progress:
    """Shows the progress of some work. Use it as a context manager; leaving it removes the bar.

    A bar is drawn if the stream is a terminal, and only by the main thread of the main process: bars of several workers would overwrite each other.

    Args:
        what: The work in progress, such as ``"indexing"``.
        total: How many items there are; None if unknown.
        unit: What is counted.
        stream: The stream that may be a terminal; None: stderr.
        say: Receives the lines if there is no terminal; default: the log, at level INFO.
        clock: Seconds.
        first_s: When to write the first line, in seconds from now; default: `LINE_S`.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str,
        *,
        stream: TextIO | None = None,
        say: Callable[[str], None] = log.info,
        clock: Callable[[], float] = time.monotonic,
        first_s: float | None = None,
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._say = say
        self._clock = clock
        self._draws = _is_watched(self._stream)
        self._drawn = False
        self._begun = clock()
        self._due = self._begun + (_DRAW_S if self._draws else LINE_S if first_s is None else first_s)

    def at(self, done: int) -> None:
        """Report that ``done`` items are done. Cheap: most calls only read the clock."""
        now = self._clock()
        if now < self._due:
            return
        text = self._text(done, now - self._begun)
        if self._draws:
            self._due = now + _DRAW_S
            self._write(f"{_CLEAR}{cut(text, _columns(self._stream) - 1)}")
            self._drawn = True
        else:
            self._due = now + LINE_S
            self._say(text)

    def clear(self) -> None:
        """Remove the bar, so that something else can be printed; the next `at` draws it again."""
        if self._drawn:
            self._drawn = False
            self._write(_CLEAR)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def _text(self, done: int, seconds: float) -> str:
        rate = done / max(seconds, 1e-9)
        speed = f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
        if not self._total:
            return f"{self._what}: {done:,} {self._unit}, {speed}"
        share = min(1.0, done / self._total)
        bar = f" [{'#' * round(_BAR * share):.<{_BAR}}]" if self._draws else ""
        left = f", {_duration((self._total - done) / rate)} left" if done else ""
        return f"{self._what}: {done:,} of {self._total:,} {self._unit}{bar} {share:.0%}, {speed}{left}"

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a lost terminal must not end the work
            self._stream.write(text)
            self._stream.flush()


def _is_watched(stream: TextIO) -> bool:
    if threading.current_thread() is not threading.main_thread() or multiprocessing.parent_process() is not None:
        return False
    try:
        return stream.isatty()
    except (ValueError, AttributeError):
        return False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
