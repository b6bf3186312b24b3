"""How far long work of our own is: a bar where a person watches, and a line now and then where none does."""

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
"""Seconds between two lines, at least; work that ends sooner says none."""
_DRAW_S: Final = 0.1
_CLEAR: Final = "\r\x1b[K"
_BAR: Final = 20

log = logging.getLogger("penstock")


@final
class Progress:
    """Tells how far work is. Use it in a ``with``, whose end takes the bar away.

    A bar is drawn if the stream is a terminal, and only by the main thread of the main process: bars of workers would write over each other.

    Args:
        what: What is being done, such as ``"indexing"``.
        total: How many there are to do; None if unknown.
        unit: What is counted.
        stream: Where a person may watch; None: stderr.
        say: Gets the lines where nobody watches; default: the log, as information.
        clock: Seconds.
        first_s: When the first line is said, in seconds from now on; default: `LINE_S`.
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
        """``done`` of them are done. Cheap: most calls only look at the clock."""
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
        """Take the bar away, so that something else can be printed; the next `at` draws it again."""
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
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone, which must not end the work
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
