"""Signals in the processes that we start: the main process decides, and they end when it does.

A terminal, a job scheduler and ``kill -TERM -PGID`` send a signal to a whole process group, but only the main process
should respond: it may save a checkpoint first, and needs batches until then. So a child starts without the program's
handlers and ignores signals that are requests to the program. The child ends with the main process, regardless of how
that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_ASKED = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Sent by people and job schedulers, as SIGTERM is."""
_OWN = {signal.SIGCHLD, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}
FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
"""These and `_OWN` are about the process that gets them: its faults, its children, its timers."""


def set_signals() -> None:
    """Drop the main program's handlers and unblock signals. The first call in a child.

    Signals that ask for something are ignored: those in `_ASKED`, and any that the main program has a handler for.
    SIGTERM gets a handler that does nothing instead, because programs started by user code here inherit ignored
    signals, and could not be terminated.
    """
    native = _caught()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if number == signal.SIGTERM:
            signal.signal(number, _pass_by)
            # or a slow read in native code, which knows no PEP 475, would fail with EINTR
            signal.siginterrupt(number, False)
        elif number in _OWN | FAULTS:
            if callable(handler) or handler is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        elif callable(handler) or (number in _ASKED and number not in native):
            signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def let_forks_be_terminated() -> None:
    """Let SIGTERM end the processes that user code forks from this one, from the start, because `multiprocessing` ends
    them that way.
    """
    # The handler is inherited. If SIGTERM came to the new process before `be_ordinary` has replaced it, it would be
    # lost, and whoever sent it would wait forever. So it is held from before the fork, and delivered once it is fatal
    # again.
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
def signals_held() -> Iterator[None]:
    """Block signals in this thread, and in the processes that it starts meanwhile, until they call `set_signals`.

    Until then a forked process still has the program's handlers, and a new interpreter has the default ones, most of
    which end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    # before any is blocked, because this thread handles the signals that other threads receive, and a handler may raise
    # at once
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - FAULTS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_by(number: int, frame: Any) -> None:
    pass


def _caught() -> set[int]:
    """Signals with a native handler that Python does not know, such as those of ``faulthandler.register``, which are
    useful here too.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return set()
    bits = int(status.partition("SigCgt:")[2].split()[0], 16)
    return {
        number
        for number in signal.valid_signals()
        if bits >> (number - 1) & 1 and signal.getsignal(number) in (signal.SIG_DFL, None)
    }
