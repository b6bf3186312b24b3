"""penstock: a PyTorch data loader that never runs dry.

::

    index level (cheap, pure, in the consumer's process)     data level (parallel)              roof
    Sampler ─► Cycler ─► Sharder ─► Batcher ─►               ParallelMapper ─► PinMemory ─►     Loader
    order      epochs    ranks      batches of indices       dataset + collate  Prefetcher      epochs, state, len

Everything random is a pure function of (seed, epoch, position), so a checkpoint is a position and resuming is a jump.

Each package is one room. A room imports only from the rooms listed below it::

    __main__       python -m penstock bench, state, index
    _command       what that runs: measure loaders, compare them, explain what they have saved
    testing        the laws, as tests that users run on their own graphs
    formats        data in files of common formats: the public door of _streams
    integrations   one file per trainer
    _datasets      our own datasets: Cached and Resident are read once, Mix mixes several
    _loader        the roof: Loader, where an iterator starts, the saved state, the graph of from_dataset
    _observe       how long everything takes, seen from the loop: statistics, the report, a trace, pictures
    _nodes         the node contract, and one file per node
    _streams       data in shards: which are open, which record is where, the formats
    _fetch         one task: indices in, batch out; knows no threads and no processes
    _workers       what runs the tasks: threads and processes; knows nothing of the data
    _random        pure functions of (seed, epoch, position)
    _memory        where batches live: trees of tensors, buffers, slots, shared memory
    _errors, _statistics, _arguments

A batch passes through ``_loader > _nodes > _workers > _fetch (> _random, _memory)`` on the way in, and back out in reverse.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock import formats as formats
    from penstock import testing as testing
    from penstock._datasets.cached import Cached
    from penstock._datasets.keep import keep
    from penstock._datasets.mix import Mix
    from penstock._datasets.resident import Resident
    from penstock._errors import ClosedError, GraphError, PenstockError, SampleError, SourceError, StateError, StateMismatch, WorkerDied
    from penstock._fetch.error_policy import SKIP, OnError
    from penstock._fetch.fetch import Fetch
    from penstock._fetch.indices import Indices
    from penstock._fetch.padding import pad
    from penstock._fetch.sample import Sample, sample
    from penstock._loader.check_ranks import check_ranks
    from penstock._loader.loader import Loader
    from penstock._nodes.batcher import Batcher
    from penstock._nodes.cycler import Cycler
    from penstock._nodes.grouper import Grouper
    from penstock._nodes.iterable_source import IterableSource
    from penstock._nodes.mapper import Mapper
    from penstock._nodes.node import EndOfEpoch, Node
    from penstock._nodes.parallel_mapper import ParallelMapper
    from penstock._nodes.pin_memory import PinMemory
    from penstock._nodes.prefetcher import Prefetcher
    from penstock._nodes.sampler import Sampler
    from penstock._nodes.sampler_wrapper import SamplerWrapper
    from penstock._nodes.sharder import Sharder
    from penstock._nodes.tails import Tail
    from penstock._nodes.to_device import ToDevice
    from penstock._observe.trace import trace
    from penstock._random.batch_rng import BatchRng
    from penstock._random.grouping import Buckets, Packs
    from penstock._random.lane_mix_order import LaneMixOrder
    from penstock._random.lane_order import LaneOrder
    from penstock._random.mix_order import MixOrder
    from penstock._random.order import Order
    from penstock._random.orders import SequentialOrder, ShuffledOrder, TorchOrder, WeightedOrder
    from penstock._random.rng_state import get_rng_state, set_rng_state
    from penstock._random.shard_order import ShardOrder
    from penstock._random.sliding_order import SlidingOrder
    from penstock._statistics import (
        Durations,
        FailureStatistics,
        LoaderStatistics,
        NodeStatistics,
        PinStatistics,
        WorkerChoice,
        WorkerStatistics,
    )
    from penstock._streams.pack_step import Pack
    from penstock._streams.shards import Shards
    from penstock._streams.steps import Filter, Shuffle

__version__ = "0.1.0"

__all__ = [
    "Batcher",
    "BatchRng",
    "Buckets",
    "Cached",
    "check_ranks",
    "ClosedError",
    "Cycler",
    "Durations",
    "EndOfEpoch",
    "FailureStatistics",
    "Fetch",
    "Filter",
    "get_rng_state",
    "GraphError",
    "Grouper",
    "Indices",
    "IterableSource",
    "keep",
    "LaneMixOrder",
    "LaneOrder",
    "Loader",
    "LoaderStatistics",
    "Mapper",
    "Mix",
    "MixOrder",
    "Node",
    "NodeStatistics",
    "OnError",
    "Order",
    "Pack",
    "Packs",
    "pad",
    "ParallelMapper",
    "PenstockError",
    "PinMemory",
    "PinStatistics",
    "Prefetcher",
    "Resident",
    "Sample",
    "sample",
    "SampleError",
    "Sampler",
    "SamplerWrapper",
    "SequentialOrder",
    "set_rng_state",
    "Sharder",
    "ShardOrder",
    "Shards",
    "Shuffle",
    "ShuffledOrder",
    "SKIP",
    "SlidingOrder",
    "SourceError",
    "StateError",
    "StateMismatch",
    "Tail",
    "ToDevice",
    "TorchOrder",
    "trace",
    "WeightedOrder",
    "WorkerChoice",
    "WorkerDied",
    "WorkerStatistics",
]

_HOMES = {
    "_datasets.cached": ("Cached",),
    "_datasets.keep": ("keep",),
    "_datasets.mix": ("Mix",),
    "_datasets.resident": ("Resident",),
    "_errors": ("ClosedError", "GraphError", "PenstockError", "SampleError", "SourceError", "StateError", "StateMismatch", "WorkerDied"),
    "_fetch.error_policy": ("OnError", "SKIP"),
    "_fetch.fetch": ("Fetch",),
    "_fetch.indices": ("Indices",),
    "_fetch.padding": ("pad",),
    "_fetch.sample": ("Sample", "sample"),
    "_loader.check_ranks": ("check_ranks",),
    "_loader.loader": ("Loader",),
    "_nodes.batcher": ("Batcher",),
    "_nodes.cycler": ("Cycler",),
    "_nodes.grouper": ("Grouper",),
    "_nodes.iterable_source": ("IterableSource",),
    "_nodes.mapper": ("Mapper",),
    "_nodes.node": ("EndOfEpoch", "Node"),
    "_nodes.parallel_mapper": ("ParallelMapper",),
    "_nodes.pin_memory": ("PinMemory",),
    "_nodes.prefetcher": ("Prefetcher",),
    "_nodes.sampler": ("Sampler",),
    "_nodes.sampler_wrapper": ("SamplerWrapper",),
    "_nodes.sharder": ("Sharder",),
    "_nodes.tails": ("Tail",),
    "_nodes.to_device": ("ToDevice",),
    "_observe.trace": ("trace",),
    "_random.batch_rng": ("BatchRng",),
    "_random.grouping": ("Buckets", "Packs"),
    "_random.lane_mix_order": ("LaneMixOrder",),
    "_random.lane_order": ("LaneOrder",),
    "_random.mix_order": ("MixOrder",),
    "_random.order": ("Order",),
    "_random.orders": ("SequentialOrder", "ShuffledOrder", "TorchOrder", "WeightedOrder"),
    "_random.rng_state": ("get_rng_state", "set_rng_state"),
    "_random.shard_order": ("ShardOrder",),
    "_random.sliding_order": ("SlidingOrder",),
    "_statistics": (
        "Durations",
        "FailureStatistics",
        "LoaderStatistics",
        "NodeStatistics",
        "PinStatistics",
        "WorkerChoice",
        "WorkerStatistics",
    ),
    "_streams.pack_step": ("Pack",),
    "_streams.shards": ("Shards",),
    "_streams.steps": ("Filter", "Shuffle"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would believe that it returns any name
    import _thread
    import os as _os

    def __getattr__(name: str) -> object:
        """Import ``name`` when it is first asked for (PEP 562), so that a program loads only the rooms that it uses."""
        import importlib
        import sys

        if name in ("formats", "testing"):  # so that `import penstock` is enough for penstock.formats.tar(…)
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _HOME_OF:
            hint = ": write penstock.Loader.from_dataset" if name in ("DataLoader", "from_dataset") else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__])
        with _importing:
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        return value

    # Rooms, and torch even more, may fail or crash if threads import several of them at once. No room asks this module for a name while it is imported,
    # so whoever holds the lock waits for nobody who waits for it.
    _importing = _thread.RLock()

    def _unlock_after_fork() -> None:
        global _importing
        _importing = _thread.RLock()

    if hasattr(_os, "register_at_fork"):
        _os.register_at_fork(after_in_child=_unlock_after_fork)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING"})
