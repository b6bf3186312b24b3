"""An exception at each line of the library that a call runs, one line after another: a trace function is a signal that
comes when it is told to."""

from __future__ import annotations

import dis
import gc
import linecache
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

T = TypeVar("T")
POP_EXCEPT = dis.opmap["POP_EXCEPT"]
PACKAGE = str(Path(penstock.__file__).parent)


class Stop(BaseException):
    """What a handler raises."""


def stop() -> None:
    raise Stop


class Alarm(ValueError):
    """An ordinary exception of a handler, as of one that limits the time of a step."""


def alarm() -> None:
    raise Alarm


@contextmanager
def answering(handler: Callable[[], Any]) -> Iterator[Callable[[], None]]:
    """Gives a function that sends this process a real signal, which ``handler`` answers: only an installed handler's
    exception is known as one."""
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield lambda: signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def only_locks_of_c() -> Iterator[None]:
    """Fails if this thread enters a `threading.Condition`, as of an Event or of a Future, in the body.

    An exception of a handler may come when its lock is held and its ``with`` has not begun, and leave it held for good.
    """
    me, found, before = threading.get_ident(), [], threading.Condition.__enter__

    def enter(self: threading.Condition) -> bool:
        if threading.get_ident() == me:
            found.append("".join(traceback.format_stack(limit=8)))
        return before(self)

    threading.Condition.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Condition.__enter__ = before  # type: ignore[method-assign]
    assert not found, found[0]


class Strikes:
    """Each call strikes an act at the first line, as called from one place, that this object has not struck yet.

    Args:
        handler: Called at that line; most raise something.
        passed: Lines of ``__next__`` with one of these texts are not struck.
        within: Beginnings of the files whose lines are struck.
        each_time: A line that an act runs several times is struck at each of them.
    """

    def __init__(
        self,
        handler: Callable[[], Any] = stop,
        *,
        passed: Sequence[str] = (),
        within: str | tuple[str, ...] = PACKAGE,
        each_time: bool = False,
    ) -> None:
        self.handler, self.passed, self.within, self.each_time = handler, passed, within, each_time
        self.at: set[tuple[str, int, int, int]] = set()
        self.last = ""

    def __call__(self, act: Callable[[], Any], every: int = 1) -> tuple[Any, bool]:
        """What ``act`` returns (None if the handler raised `Stop`), and whether it was struck: at the ``every``-th new
        line; those before it count as struck.

        Nothing is collected meanwhile: nothing comes out of a generator that an earlier test has left in a cycle,
        whatever is raised in it.
        """
        new, struck, me = 0, False, os.getpid()
        times = Counter[Any]()

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal new, struck
            if os.getpid() != me:
                return None  # a fork
            code = frame.f_code
            if not code.co_filename.startswith(self.within) or {code.co_name, frame.f_back.f_code.co_name} & {
                "_abandoned",
                "_retire_all",
            }:
                return None  # nothing comes out of a finalizer, nor out of what is called at a fork
            place = (code.co_filename, frame.f_lineno, frame.f_back.f_lineno or 0, 0)
            if self.each_time and event == "line":
                times[place] += 1
                place = (*place[:3], times[place])
            if event == "line" and place not in self.at and not self._never_struck(frame):
                self.at.add(place)
                new += 1
                if new == every:
                    self.last, struck = f"struck at {code.co_filename}:{frame.f_lineno}", True
                    sys.settrace(None)
                    self.handler()
            return trace

        gc.disable()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return act(), struck
        except Stop:
            return None, True
        finally:
            sys.settrace(before)
            gc.enable()

    def _never_struck(self, frame: Any) -> bool:
        """Before the clean-up of a with or a try statement, and between an assignment and a return, Python looks at no
        signal; but it calls a trace function.

        One that raises where an except block ends leaves the exception handled for good: it becomes the context of all
        that are raised later.
        """
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return (
            frame.f_code.co_code[frame.f_lasti] == POP_EXCEPT
            or text.startswith(
                ("with ", "signal.pthread_sigmask(signal.SIG_SETMASK", "torch_worker._worker_info = before")
            )
            or text == "return item"
            or (frame.f_code.co_name == "__next__" and text in self.passed)
        )


def in_turn(cases: Iterable[T], strike: Callable[[T], bool]) -> None:
    """Strike the cases in turn, each until it was not struck: lines that several of them run are struck in one of
    them."""
    left = list(cases)
    while left:
        left = [case for case in left if strike(case)]
