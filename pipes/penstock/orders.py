"""Orders decide which sample is at which position of an epoch: for ``order=`` of `penstock.Loader.from_dataset`, and to
write your own.
"""

from __future__ import annotations

from penstock._random.order import Order as Order
from penstock._random.orders import SequentialOrder as SequentialOrder
from penstock._random.orders import ShuffledOrder as ShuffledOrder
from penstock._random.orders import TorchOrder as TorchOrder
from penstock._random.shard_order import ShardOrder as ShardOrder
from penstock._random.sliding_order import SlidingOrder as SlidingOrder
from penstock._random.weighted_order import WeightedOrder as WeightedOrder

__all__ = ["Order", "SequentialOrder", "ShardOrder", "ShuffledOrder", "SlidingOrder", "TorchOrder", "WeightedOrder"]
