"""penstock: a PyTorch data loader that never runs dry.

::

    index level (cheap, pure, in the consumer's process)     data level (parallel)              your loop
    Sampler ─► Cycler ─► Sharder ─► Batcher ─►               ParallelMapper ─► PinMemory ─►     Loader
    order      epochs    ranks      batches of indices       dataset + collate  Prefetcher      epochs, state, len

Everything random is a pure function of (seed, epoch, position), so a checkpoint is a position and resuming is a jump.

Each package is one room. A room imports only from the rooms listed below it::

    __main__       python -m penstock bench, state, index, cache
    _command       the commands behind it: measure loaders, show saved states and caches, index files
    testing        the laws, as tests that users run on their own graphs
    formats        data in files of common formats: one file per format
    nodes, orders, statistics  the public names of _nodes, _random and _observe, and nothing else
    integrations   one file per trainer
    _datasets      our own datasets: Cached and Resident are read once, Mix mixes several; what one pass over a dataset
                   finds
    _loader        Loader: where an iterator starts, the saved state, the graph of from_dataset
    _changing      what a run changes while it runs: data that grow, weights, ranges to skip, sizes of batches
    _observe       how long everything takes, seen from the loop: statistics, the report, a trace, plots
    _nodes         the node contract, and one file per node
    _streams       data in shards: which are open, and where each record is; independent of formats
    _fetch         one task: indices in, batch out; independent of threads and processes
    _workers       threads and processes that run the tasks; independent of the data
    _random        pure functions of (seed, epoch, position)
    _memory        where batches live: trees of tensors, buffers, slots, shared memory
    _files         files, local or remote: paths, versions, copies, compression; knows no shards and no formats
    _errors, _statistics, _arguments

A batch passes through ``_loader > _nodes > _workers > _fetch (> _random, _memory)`` on the way in, and back out in
reverse.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock import formats as formats
    from penstock import nodes as nodes
    from penstock import orders as orders
    from penstock import statistics as statistics
    from penstock import testing as testing
    from penstock._changing.ramp import Ramp
    from penstock._datasets.cached import Cached
    from penstock._datasets.filtered import filtered
    from penstock._datasets.lengths import lengths
    from penstock._datasets.mix import Mix
    from penstock._datasets.resident import Resident
    from penstock._errors import (
        ClosedError,
        GraphError,
        PenstockError,
        SampleError,
        SourceError,
        StateError,
        StateMismatch,
        WorkerDied,
    )
    from penstock._fetch.error_policy import SKIP
    from penstock._fetch.padding import pad
    from penstock._fetch.sample import Sample, sample
    from penstock._loader.address import Address
    from penstock._loader.check_ranks import check_ranks
    from penstock._loader.ledger import Ledger
    from penstock._loader.loader import Loader
    from penstock._random.batch_rng import BatchRng
    from penstock._random.buckets import Buckets
    from penstock._random.grouping import Packs
    from penstock._random.rng_state import get_rng_state, set_rng_state
    from penstock._streams.pack_step import Pack
    from penstock._streams.shards import Shards
    from penstock._streams.steps import Filter, Shuffle
    from penstock._streams.stream import Stream

__version__ = "0.1.0"

__all__ = [
    "Address",
    "BatchRng",
    "Buckets",
    "Cached",
    "check_ranks",
    "ClosedError",
    "Filter",
    "filtered",
    "get_rng_state",
    "GraphError",
    "Ledger",
    "lengths",
    "Loader",
    "Mix",
    "Pack",
    "Packs",
    "pad",
    "PenstockError",
    "Ramp",
    "Resident",
    "Sample",
    "sample",
    "SampleError",
    "set_rng_state",
    "Shards",
    "Shuffle",
    "SKIP",
    "SourceError",
    "StateError",
    "StateMismatch",
    "Stream",
    "WorkerDied",
]

_HOMES = {
    "_datasets.cached": ("Cached",),
    "_datasets.filtered": ("filtered",),
    "_datasets.lengths": ("lengths",),
    "_datasets.mix": ("Mix",),
    "_datasets.resident": ("Resident",),
    "_errors": (
        "ClosedError",
        "GraphError",
        "PenstockError",
        "SampleError",
        "SourceError",
        "StateError",
        "StateMismatch",
        "WorkerDied",
    ),
    "_fetch.error_policy": ("SKIP",),
    "_fetch.padding": ("pad",),
    "_fetch.sample": ("Sample", "sample"),
    "_loader.address": ("Address",),
    "_loader.check_ranks": ("check_ranks",),
    "_loader.ledger": ("Ledger",),
    "_loader.loader": ("Loader",),
    "_random.batch_rng": ("BatchRng",),
    "_random.buckets": ("Buckets",),
    "_random.grouping": ("Packs",),
    "_changing.ramp": ("Ramp",),
    "_random.rng_state": ("get_rng_state", "set_rng_state"),
    "_streams.pack_step": ("Pack",),
    "_streams.shards": ("Shards",),
    "_streams.steps": ("Filter", "Shuffle"),
    "_streams.stream": ("Stream",),
}
_DOORS = ("formats", "nodes", "orders", "statistics", "testing")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would accept any name because of it
    import _thread
    import os as _os

    def __getattr__(name: str) -> object:
        """Import ``name`` on first use (PEP 562), so that a program loads only the packages that it uses."""
        import importlib
        import sys

        if name in _DOORS:  # so that `import penstock` is enough for penstock.formats.tar(…)
            return importlib.import_module(f"{__name__}.{name}")
        if name in _HOME_OF:
            return _loaded(globals(), name, _HOME_OF[name])
        hint = ": write penstock.Loader.from_dataset" if name in ("DataLoader", "from_dataset") else ""
        for door in ("formats", "nodes", "orders", "statistics") if not name.startswith("_") else ():
            if name in importlib.import_module(f"{__name__}.{door}").__all__:
                hint = f": write penstock.{door}.{name}"
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__]
        )

    def _loaded(door: dict[str, object], name: str, home: str) -> object:
        """Import ``name`` from its ``home``, and add it to ``door``, the names of a public module."""
        import importlib

        with _importing:
            value = door[name] = getattr(importlib.import_module(f"penstock.{home}"), name)
        return value

    # Our packages, and torch even more, may fail or crash if several threads import them at once. None of them asks
    # this module for a name during its own import, so the thread that holds the lock never waits for one that waits for
    # the lock.
    _importing = _thread.RLock()

    def _unlock_after_fork() -> None:
        global _importing
        _importing = _thread.RLock()

    if hasattr(_os, "register_at_fork"):
        _os.register_at_fork(after_in_child=_unlock_after_fork)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING"})
