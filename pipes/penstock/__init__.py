"""penstock: a PyTorch data loader that never runs dry.

::

    index level (cheap, pure, in the consumer's process)     data level (parallel)              roof
    Sampler ─► Cycler ─► Sharder ─► Batcher ─►               ParallelMapper ─► PinMemory ─►     Loader
    order      epochs    ranks      batches of indices       dataset + collate  Prefetcher      epochs, state, len

Everything random is a pure function of (seed, epoch, position), so a checkpoint is a position and resuming is a jump.

The rooms of the house, in the order of the flow; each imports from those under it only::

    testing, integrations     the laws, for users; one file a trainer
    _datasets                 datasets that are loaded once: Cached, Resident
    _loader                   the roof: Loader, where an iterator starts, the saved state, from_dataset's graph
    _nodes                    the contract, and one file a node
    _fetch                    one task: indices in, batch out; knows no thread and no process
    _workers                  who does tasks: threads and processes; knows no data
    _random, _memory          pure functions of (seed, epoch, position); where batches lie
    _errors, _statistics
"""

from penstock._datasets.cached import Cached
from penstock._datasets.resident import Resident
from penstock._errors import ClosedError, GraphError, PenstockError, SampleError, SourceError, StateError, StateMismatch, WorkerDied
from penstock._fetch.error_policy import SKIP
from penstock._fetch.fetch import Fetch
from penstock._fetch.indices import Indices
from penstock._fetch.sample import sample
from penstock._loader.check_ranks import check_ranks
from penstock._loader.loader import Loader
from penstock._nodes.batcher import Batcher
from penstock._nodes.cycler import Cycler
from penstock._nodes.iterable_source import IterableSource
from penstock._nodes.mapper import Mapper
from penstock._nodes.node import EndOfEpoch, Node
from penstock._nodes.parallel_mapper import ParallelMapper
from penstock._nodes.pin_memory import PinMemory
from penstock._nodes.prefetcher import Prefetcher
from penstock._nodes.sampler import Sampler
from penstock._nodes.sampler_wrapper import SamplerWrapper
from penstock._nodes.sharder import Sharder
from penstock._nodes.to_device import ToDevice
from penstock._random.batch_rng import BatchRng
from penstock._random.orders import SequentialOrder, ShuffledOrder, TorchOrder, WeightedOrder

__version__ = "0.1.0"

__all__ = [
    "Batcher",
    "BatchRng",
    "Cached",
    "check_ranks",
    "ClosedError",
    "Cycler",
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
    "SourceError",
    "StateError",
    "StateMismatch",
    "ToDevice",
    "TorchOrder",
    "WeightedOrder",
    "WorkerDied",
]

for _name in __all__:
    if hasattr(globals()[_name], "__module__") and _name != "SKIP":
        globals()[_name].__module__ = __name__  # users see and search penstock.Loader; the room it lives in is ours to change
