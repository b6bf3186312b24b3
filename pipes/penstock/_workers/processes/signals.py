"""Signals in the processes that we start: the main process decides, and they end with it.

A terminal, a job scheduler and ``kill -TERM -PGID`` send a signal to a whole group of processes, but the program means one answer to it:
that of its main process, which may save a checkpoint first and needs batches up to then. So a child begins without the program's
handlers, and what is sent to ask a program for something passes it by. It ends with the main process, whatever ends that.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def _these(*names: str) -> set[signal.Signals]:
    """Those of them that the platform has."""
    return {number for name in names if (number := getattr(signal, f"SIG{name}", None)) is not None}


_ASKED = _these("INT", "QUIT", "HUP", "USR1", "USR2")
"""What people and job schedulers send, besides SIGTERM."""
_OWN = _these("CHLD", "ALRM", "VTALRM", "PROF")
_FAULTS = _these("SEGV", "BUS", "FPE", "ILL", "ABRT", "TRAP", "SYS")
"""What is about the process that gets it: its children, its timers, its faults."""


def set_signals() -> None:
    """In a child, as the first thing that it does: no handler of the main program, and nothing held back any more.

    Signals that ask for something are ignored, be they in the list or such that the main program has a handler for. SIGTERM is not ignored
    but handled, by nothing: programs that user code starts here inherit what is ignored, and could not be terminated.
    """
    native = _caught()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if number == signal.SIGTERM:
            signal.signal(number, _pass_by)
            if hasattr(signal, "siginterrupt"):
                signal.siginterrupt(number, False)
        elif number in _OWN | _FAULTS:
            if callable(handler) or handler is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        elif callable(handler) or (number in _ASKED and number not in native):
            signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def let_forks_be_terminated() -> None:
    """Give processes that user code forks from this one the ordinary SIGTERM, with which `multiprocessing` ends them, from their first moment."""
    if not hasattr(os, "register_at_fork"):
        return
    masks: list[Any] = []

    def hold() -> None:
        masks[:] = [signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])]

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def be_ordinary() -> None:
        if signal.getsignal(signal.SIGTERM) is _pass_by:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=be_ordinary)


@contextlib.contextmanager
def signals_held(*only: int) -> Iterator[None]:
    """Hold signals back (all, or ``only`` some) in this thread, and in processes that it starts meanwhile until these have called `set_signals`.

    A fork has the program's handlers; a new interpreter has those of the system, and most of them end it.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows, which sends none of them
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, only or signal.valid_signals() - _FAULTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_by(number: int, frame: Any) -> None:
    pass


def _caught() -> set[int]:
    """Signals with a handler of native code, which Python knows nothing of: those of ``faulthandler.register`` are as useful here."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return set()
    bits = int(status.partition("SigCgt:")[2].split()[0], 16)
    return {number for number in signal.valid_signals() if bits >> (number - 1) & 1 and signal.getsignal(number) in (signal.SIG_DFL, None)}
