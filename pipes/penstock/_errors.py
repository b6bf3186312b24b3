"""The error family; imports nothing.

PenstockError
├── StateError           a state_dict that this graph cannot load
│   └── StateMismatch    saved under other settings (dataset length, order, seed, sharding)
├── GraphError           the graph is put together wrongly, or a mark was lost on its way through it
├── SourceError          a source raised before, so nobody knows where it stands: a state has to be loaded
├── SampleError          a sample could not be loaded: names its index, epoch, position and worker
├── WorkerDied           workers died more often than max_restarts allows
└── ClosedError          used after close()
"""

from __future__ import annotations

import contextlib


class WorkerTraceback(Exception):
    """The cause of an error that came from a worker process: shows where in the worker it was raised."""

    def __str__(self) -> str:
        return f"\nTraceback in {self.args[0]}:\n{self.args[1]}"


def hide_internal_frames(exc: BaseException) -> None:
    """Have the traceback of an error of user code begin where that does: what lies on the way there helps nobody."""
    entry = exc.__traceback__
    while entry is not None and entry.tb_frame.f_globals.get("__name__", "").startswith(("penstock.", "torchdata.nodes.")):
        entry = entry.tb_next
    if entry is not None or isinstance(exc.__cause__, WorkerTraceback):
        with contextlib.suppress(Exception):  # an exception that is frozen keeps the one it has
            exc.__traceback__ = entry


class PenstockError(Exception):
    """Base of every error that penstock raises by a name of its own."""


class StateError(PenstockError, ValueError):
    """A state that this graph cannot load: not one of ours, damaged, or out of bounds."""


class StateMismatch(StateError):
    """A sound state, saved under settings that this graph does not have."""


class GraphError(PenstockError, TypeError):
    """Nodes that do not fit together, or a mark that did not come through."""


class SourceError(PenstockError, RuntimeError):
    """A source raised, so nobody knows where it stands; what it would give next might be dealt to the wrong rank."""

    @classmethod
    def after(cls, error: BaseException) -> SourceError:
        """Refuse to go on after ``error``."""
        refusal = cls(
            f"a source of this graph raised {type(error).__name__} before, and where it stands is not known any more: going on might lose "
            f"samples, or deal them to other ranks. Load a state, for instance its own: loader.load_state_dict(loader.state_dict()); or ask for an epoch with set_epoch."
        )
        refusal.__cause__ = error
        return refusal


class SampleError(PenstockError, RuntimeError):
    """A sample could not be loaded."""


class WorkerDied(PenstockError, RuntimeError):
    """Worker processes died more often than ``max_restarts`` allows."""


class ClosedError(PenstockError, RuntimeError):
    """The loader, or a node of it, was used after ``close()``."""
