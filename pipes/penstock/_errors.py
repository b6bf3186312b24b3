"""The error family; imports nothing.

PenstockError
├── StateError           a state_dict that this graph cannot load
│   └── StateMismatch    saved under other settings (dataset length, order, seed, sharding)
├── GraphError           the graph is put together wrongly, or a mark was lost on its way through it
├── SampleError          a sample could not be loaded: names its index, epoch, position and worker
├── WorkerDied           workers died more often than max_restarts allows
└── ClosedError          used after close()
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of every error that penstock raises by a name of its own."""


class StateError(PenstockError, ValueError):
    """A state that this graph cannot load: not one of ours, damaged, or out of bounds."""


class StateMismatch(StateError):
    """A sound state, saved under settings that this graph does not have."""


class GraphError(PenstockError, TypeError):
    """Nodes that do not fit together, or a mark that did not come through."""


class SampleError(PenstockError, RuntimeError):
    """A sample could not be loaded."""


class WorkerDied(PenstockError, RuntimeError):
    """Worker processes died more often than ``max_restarts`` allows."""


class ClosedError(PenstockError, RuntimeError):
    """The loader, or a node of it, was used after ``close()``."""
