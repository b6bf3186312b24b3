"""Lanes: how shards of unknown lengths are dealt, so that the position of every lane determines what each rank
reads.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from penstock._arguments import whole_number
from penstock._random.endless_order import EndlessOrder
from penstock._random.orders import LONGEST, SequentialOrder, ShuffledOrder
from penstock._random.shard_order import Opens, usual_lanes

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._random.permutation import Int64s

MOST_LANES: Final = 2**16
PASSES: Final = 2**32
"""More passes than there ever are over one list of shards; see `GrowingDeal`."""


@final
class Deal:
    """The endless deal of shards to lanes: shard after shard, pass after pass, to each lane in turn.

    Deal m is shard ``m mod shards`` in the order of pass ``m div shards``, and goes to lane ``m mod lanes``. So every
    shard comes once per pass, in one lane, and the next shard of a lane is known without knowing the length of any
    shard.

    Args:
        shards: Number of shards; at least 1.
        lanes: From 1 to ``shards``; default: the largest of 1, 2, 4, 8, 24, 48 and 96 that leaves at least 4 shards to
            each lane.
        shuffle: Draw a new order of the shards in every pass. False: the order given, where pass e begins with shard e.
            (If all passes began with shard 0, and the number of lanes divided that of the shards, a lane would read the
            same shards forever, and those of the faster lanes would come more often than the others.)
        seed: Seed of the shuffle; from 0 to 2**63 - 1.

    Raises:
        ValueError: A number is out of bounds.
    """

    def __init__(self, shards: int, lanes: int | None = None, *, shuffle: bool = False, seed: int = 0) -> None:
        self.shards = whole_number("shards", shards, 1)
        self.lanes = usual_lanes(shards) if lanes is None else whole_number("lanes", lanes, 1, MOST_LANES + 1)
        if self.lanes > shards:
            raise ValueError(
                f"lanes={lanes} exceeds the number of shards, {shards}, but each lane reads whole shards. Use at most "
                f"{shards}, or cut the data into more shards."
            )
        self.shuffle = shuffle
        self.seed = seed
        self._order = ShuffledOrder(shards, seed) if shuffle else SequentialOrder(shards)
        self._passes: OrderedDict[int, list[int]] = OrderedDict()

    def __getitem__(self, deal: int) -> tuple[int, int]:
        """The pass and the shard of a deal. Can be called from any thread."""
        pass_, place = divmod(deal, self.shards)
        return pass_, self._order_of(pass_)[place]

    def after(self, deal: int, first: int) -> int:
        """The deal that a lane gets after ``deal``, whose first item is number ``first`` of that lane."""
        return deal + self.lanes

    def shards_with(self, deal: int) -> int:
        """How many shards are dealt in the pass of ``deal``."""
        return self.shards

    def opens(self, pass_: int) -> Opens:
        """The shards of a pass."""
        places = np.arange(self.shards)
        return Opens(
            np.array(self._order_of(pass_)), (pass_ * self.shards + places) % self.lanes, pass_ + places / self.shards
        )

    def _order_of(self, pass_: int) -> list[int]:
        order = self._passes.get(pass_)
        if order is None:
            places = np.arange(self.shards)
            order = self._order.indices(
                pass_, places if self.shuffle else (places + pass_ % self.shards) % self.shards
            ).tolist()
            self._passes[pass_] = order
            while len(self._passes) > _PASSES:
                try:
                    self._passes.popitem(last=False)
                except KeyError:  # another thread was faster
                    break
        return order

    def __reduce__(self) -> Any:
        return functools.partial(Deal, shuffle=self.shuffle, seed=self.seed), (self.shards, self.lanes)


_PASSES = 4
"""How many orders of passes to keep: lanes drift apart, so two or three passes are read at the same time."""


class InterleavedOrder(EndlessOrder):
    """The order of data whose shards have unknown lengths: item k since the beginning of training is item
    ``k div lanes`` of lane ``k mod lanes``.

    Each lane yields every lanes-th item, so the stream position determines every lane's position, on any number of
    ranks. An epoch is a fixed number of items, and begins with the item after the last one that any rank received in
    the previous epoch; see `ContinuingOrder`. Its indices are the items since the beginning.

    Args:
        lanes: See `Stream`.
        epoch_size: Items in an epoch, from 1 to 2**56.
        settings: JSON that identifies the data.
        take: Called by `take`: the data is then read in this order, and can be read in no other.
        marks: See `PlainOrder`.
    """

    __module__ = "penstock._random.lane_order"

    def __init__(
        self,
        lanes: int,
        epoch_size: int,
        settings: dict[str, Any] | None = None,
        take: Callable[[], None] | None = None,
        marks: Callable[..., tuple[int, ...]] | None = None,
    ) -> None:
        self.round = self.lanes = whole_number("lanes", lanes, 1, MOST_LANES + 1)
        self._n = whole_number("epoch_size", epoch_size, 1, LONGEST + 1)
        self._said = {"order": "lanes", "length": self._n, "lanes": self.lanes, **(settings or {})}
        self._take = take
        self.marks = marks

    def take(self) -> None:
        """See `PlainOrder.take`."""
        if self._take is not None:
            self._take()

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """The positions since the beginning of training, which are also the item numbers."""
        return positions.copy()

    def settings_at(self, epoch: int, position: int) -> dict[str, Any]:
        """See `ScheduledOrder.settings_at`."""
        return self.settings_of(epoch)

    def details(self) -> dict[str, Any]:
        return {"lanes": self.lanes, "epoch_size": self._n}
