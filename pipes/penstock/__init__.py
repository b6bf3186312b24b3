"""penstock: a PyTorch data loader that never runs dry.

::

    index level (cheap, pure, in the consumer's process)     data level (parallel)              roof
    Sampler ─► Cycler ─► Sharder ─► Batcher ─►               ParallelMapper ─► PinMemory ─►     Loader
    order      epochs    ranks      batches of indices       dataset + collate  Prefetcher      epochs, state, len

Everything random is a pure function of (seed, epoch, position), so a checkpoint is a position and resuming is a jump.
"""

from penstock._batch import Batcher
from penstock._build import from_dataset as _from_dataset
from penstock._cached import Cached
from penstock._current import sample
from penstock._cycle import Cycler
from penstock._device import ToDevice
from penstock._draws import Draws
from penstock._errors import ClosedError, GraphError, PenstockError, SampleError, StateError, StateMismatch, WorkerDied
from penstock._fetch import Fetch
from penstock._iterate import IterableSource
from penstock._loader import Loader
from penstock._map import Mapper, ParallelMapper
from penstock._node import EndOfEpoch, Indices, Node
from penstock._orders import SequentialOrder, ShuffledOrder, TorchOrder, WeightedOrder
from penstock._pin import PinMemory
from penstock._prefetch import Prefetcher
from penstock._ranks import check_ranks
from penstock._resident import Resident
from penstock._sample import Sampler, SamplerWrapper
from penstock._shard import Sharder
from penstock._tolerance import SKIP

Loader.from_dataset = staticmethod(_from_dataset)

__all__ = [
    "Batcher",
    "Cached",
    "check_ranks",
    "ClosedError",
    "Cycler",
    "Draws",
    "EndOfEpoch",
    "Fetch",
    "GraphError",
    "Indices",
    "IterableSource",
    "Loader",
    "Mapper",
    "Node",
    "ParallelMapper",
    "PenstockError",
    "PinMemory",
    "Prefetcher",
    "Resident",
    "sample",
    "SampleError",
    "Sampler",
    "SamplerWrapper",
    "SequentialOrder",
    "Sharder",
    "ShuffledOrder",
    "SKIP",
    "StateError",
    "StateMismatch",
    "ToDevice",
    "TorchOrder",
    "WeightedOrder",
    "WorkerDied",
]
