"""The nodes of a graph, for building graphs by hand and for custom nodes.

`penstock.Loader.from_dataset` builds the usual graph.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock._changing.skipping import skip as skip
    from penstock._fetch.dataset_facts import DatasetLike as DatasetLike
    from penstock._fetch.error_policy import OnError as OnError
    from penstock._fetch.fetch import Fetch as Fetch
    from penstock._fetch.indices import Indices as Indices
    from penstock._nodes.batcher import Batcher as Batcher
    from penstock._nodes.cycler import Cycler as Cycler
    from penstock._nodes.grouper import Grouper as Grouper
    from penstock._nodes.index_node import Facts as Facts
    from penstock._nodes.index_node import FirstNode as FirstNode
    from penstock._nodes.index_node import IndexNode as IndexNode
    from penstock._nodes.iterable_source import IterableSource as IterableSource
    from penstock._nodes.key_grouper import KeyGrouper as KeyGrouper
    from penstock._nodes.node import EndOfEpoch as EndOfEpoch
    from penstock._nodes.node import Node as Node
    from penstock._nodes.parallel_mapper import Mapper as Mapper
    from penstock._nodes.parallel_mapper import ParallelMapper as ParallelMapper
    from penstock._nodes.pin_memory import PinMemory as PinMemory
    from penstock._nodes.prefetcher import Prefetcher as Prefetcher
    from penstock._nodes.sampler import Sampler as Sampler
    from penstock._nodes.sampler_wrapper import SamplerWrapper as SamplerWrapper
    from penstock._nodes.sharder import Sharder as Sharder
    from penstock._nodes.tails import Tail as Tail
    from penstock._nodes.to_device import ToDevice as ToDevice

_HOME_OF = {
    "Batcher": "_nodes.batcher",
    "Cycler": "_nodes.cycler",
    "DatasetLike": "_fetch.dataset_facts",
    "EndOfEpoch": "_nodes.node",
    "Facts": "_nodes.index_node",
    "Fetch": "_fetch.fetch",
    "FirstNode": "_nodes.index_node",
    "Grouper": "_nodes.grouper",
    "IndexNode": "_nodes.index_node",
    "Indices": "_fetch.indices",
    "IterableSource": "_nodes.iterable_source",
    "KeyGrouper": "_nodes.key_grouper",
    "Mapper": "_nodes.parallel_mapper",
    "Node": "_nodes.node",
    "OnError": "_fetch.error_policy",
    "ParallelMapper": "_nodes.parallel_mapper",
    "PinMemory": "_nodes.pin_memory",
    "Prefetcher": "_nodes.prefetcher",
    "Sampler": "_nodes.sampler",
    "SamplerWrapper": "_nodes.sampler_wrapper",
    "Sharder": "_nodes.sharder",
    "skip": "_changing.skipping",
    "Tail": "_nodes.tails",
    "ToDevice": "_nodes.to_device",
}
__all__ = [*_HOME_OF]

if not TYPE_CHECKING:  # a type checker would accept any name because of it

    def __getattr__(name: str) -> object:
        """Import ``name`` on first use, so that a worker process that receives a `Fetch` does not load every node."""
        if name in _HOME_OF:
            return sys.modules["penstock"]._loaded(
                globals(), name, _HOME_OF[name]
            )  # the package, which is imported already, and has the lock
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
