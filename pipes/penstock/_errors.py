"""The error classes. Imports nothing from penstock.

PenstockError
├── StateError           a state_dict that this graph cannot load
│   └── StateMismatch    saved under other settings (dataset length, order, seed, sharding)
├── GraphError           the nodes do not fit together, or a marker was lost on its way through the graph
├── SourceError          a source raised earlier, so its position is unknown: load a state first
├── SampleError          a sample could not be loaded: the message names its index, epoch, position and worker
├── WorkerDied           workers died more often than max_restarts allows
└── ClosedError          used after close()
"""

from __future__ import annotations

import contextlib
import signal


class WorkerTraceback(Exception):
    """The `__cause__` of an error that came from a worker process: the traceback inside the worker."""

    def __str__(self) -> str:
        return f"\nTraceback in {self.args[0]}:\n{self.args[1]}"


def hide_internal_frames(exc: BaseException) -> None:
    """Start the traceback of an error in user code at the user's own frame; our frames above it are noise."""
    entry = exc.__traceback__
    while entry is not None and entry.tb_frame.f_globals.get("__name__", "").startswith(
        ("penstock.", "torchdata.nodes.")
    ):
        entry = entry.tb_next
    if entry is not None or isinstance(exc.__cause__, WorkerTraceback):
        with contextlib.suppress(Exception):  # a frozen exception keeps its traceback
            exc.__traceback__ = entry


def is_own_error(exc: BaseException) -> bool:
    """Whether ``exc`` was raised by the code itself, and not by Ctrl-C or a signal handler, which may run between any
    two lines.

    An exception comes from a handler if its traceback has a frame of an installed handler. A handler that is not a
    Python function leaves no frame.
    """
    if not isinstance(exc, Exception | SystemExit | GeneratorExit):
        return False
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    entry = exc.__traceback__
    while entry is not None and entry.tb_frame.f_code not in codes:
        entry = entry.tb_next
    return entry is None


class suppress_own:
    """Suppress what the body raises, but not what a signal handler raises meanwhile: for probes of a user's objects."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> bool:
        return isinstance(exc, Exception) and is_own_error(exc)


def _code(handler: object) -> object:
    handler = getattr(handler, "func", handler)  # of a functools.partial
    if not callable(handler):
        return None  # SIG_DFL, SIG_IGN, or None for a native one
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


class Once:
    """Tells the first call with some arguments from later ones, for messages that are said once: by an object that has
    one, or by this process.
    """

    def __init__(self) -> None:
        self.said: set[tuple[object, ...]] = set()

    def __call__(self, *what: object) -> bool:
        """Whether this is the first call with these arguments."""
        new = what not in self.said
        self.said.add(what)
        return new


first_time = Once()
"""In this process."""

ANEW = (
    "Build a new loader, and pass it this one's state_dict(), or call its set_epoch: otherwise it begins with epoch 0, "
    "with the same order and random numbers again."
)
"""The remedy if a loader cannot be used any more."""


class PenstockError(Exception):
    """Base class of every exception type that penstock defines."""

    __module__ = "penstock"


class StateError(PenstockError, ValueError):
    """This graph cannot load the state, because it is foreign, damaged or out of bounds."""

    __module__ = "penstock"


class StateMismatch(StateError):
    """The state is valid, but was saved under settings that differ from this graph's."""

    __module__ = "penstock"


class GraphError(PenstockError, TypeError):
    """Nodes do not fit together, or a marker was lost on its way through the graph."""

    __module__ = "penstock"


class SourceError(PenstockError, RuntimeError):
    """A source raised, so its position is unknown, and its next item might go to the wrong rank."""

    __module__ = "penstock"

    @classmethod
    def after(cls, error: BaseException) -> SourceError:
        """The refusal to continue after ``error``."""
        refusal = cls(
            f"a source of this graph raised {type(error).__name__} earlier, so its position is unknown: continuing "
            f"might lose samples or deal them to the wrong ranks. Load a state (the loader's own is enough: "
            f"loader.load_state_dict(loader.state_dict())), or choose an epoch with set_epoch."
        )
        refusal.__cause__ = error
        return refusal


class SampleError(PenstockError, RuntimeError):
    """A sample could not be loaded."""

    __module__ = "penstock"


class WorkerDied(PenstockError, RuntimeError):
    """Worker processes died more often than ``max_restarts`` allows."""

    __module__ = "penstock"


class ClosedError(PenstockError, RuntimeError):
    """The loader or one of its nodes was used after ``close()``."""

    __module__ = "penstock"
