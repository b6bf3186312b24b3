"""The order of a mix that has a source of unknown length: each lane mixes independently."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Mapping
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from penstock._arguments import shortened, whole_number
from penstock._random.endless_order import EndlessOrder
from penstock._random.mix_order import MixOrder, checksum_of, data_of, over_passes
from penstock._random.order import ContinuingOrder
from penstock._random.orders import LONGEST, PlainOrder, SequentialOrder, checked_seed
from penstock._random.permutation import by_group
from penstock._random.splitmix import GAMMA, mixed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from fractions import Fraction

    from penstock._random.mix_stages import Weights
    from penstock._random.order import Order
    from penstock._random.permutation import Int64s

MOST_SOURCES: Final = 64
_BITS: Final = 56
"""In the mix of a lane, the items of a source are numbered from ``source << 56`` on."""


@final
class InterleavedMixOrder(EndlessOrder):
    """Mix orders by weight, some of which never end.

    As in an `InterleavedOrder`, item k is item ``k div lanes`` of lane ``k mod lanes``.

    Each lane is a `MixOrder` with its own seed and exact shares: at the end of each block, the number of items from
    every source is within 1 of its exact share. Item r of a source in lane v is item ``r * lanes + v`` of the source.
    So a stream is read only by the ranks that read its lanes anyway.

    The index of a sample is ``(at * sources + source) * lanes + lane``, where ``at`` is r for a stream, and the index
    in its dataset for any other source.

    Args:
        orders: The order of each source, by name: at most 64.
        weights: See `MixOrder`. In each lane a stage begins at its share of the start, rounded up.
        epoch_size: Items in an epoch.
        seed: From 0 to 2**63 - 1.
        data: See `MixOrder`.

    Raises:
        ValueError: The lanes of a source do not divide the largest number of lanes; there are too many sources; or see
            `MixOrder`.
    """

    __module__ = "penstock._random.lane_mix_order"

    def __init__(
        self,
        orders: Mapping[str, Order],
        weights: Weights | Sequence[tuple[int, Weights]],
        epoch_size: int,
        seed: int = 0,
        data: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.names = sorted(orders)
        if len(self.names) > MOST_SOURCES:
            raise ValueError(f"a mix with streams has at most {MOST_SOURCES} sources, but got {len(self.names)}.")
        self._n = whole_number("epoch_size", epoch_size, 1, LONGEST + 1)
        self._orders = [orders[name] for name in self.names]
        lanes = {name: order.round for name, order in orders.items() if isinstance(order, ContinuingOrder)}
        self.round = self.lanes = self.grain = max(lanes.values())
        for name, number in lanes.items():
            if self.lanes % number:
                raise ValueError(
                    f"the source {name!r} has {number} lanes, which do not divide {self.lanes}, the largest number of "
                    f"lanes in this mix. Give each source a number of lanes= that divides {self.lanes}: {number} "
                    f"shards or more allow {max(d for d in range(1, number + 1) if self.lanes % d == 0)}."
                )
        self._seed = checked_seed(seed)
        of_a_lane = weights if isinstance(weights, Mapping) else self._of_each_lane(weights)
        endless = {name: SequentialOrder(1 << _BITS) for name in self.names}
        self._of_a_lane = endless, of_a_lane
        self.added: list[tuple[int, Weights]] = []
        self._mixes: dict[int, MixOrder] = {}  # created on demand, because a rank needs only those of its lanes
        self.stages = self._mix(0).stages
        self.read_ahead = 2**16  # one call to the mix of each lane costs 0.3 ms, so it should serve many items
        self._sources = [(name, order.settings()) for name, order in zip(self.names, self._orders, strict=True)]
        self._held = {
            name: settings.pop("held") for name, settings in self._sources if "held" in settings
        }  # kept apart, to be named in an error if they differ
        self._data = data or {}
        self._said = {"order": "mixed lanes", "length": self._n, "lanes": self.lanes, "seed": self._seed}
        marks = [order.marks for order in self._orders if isinstance(order, PlainOrder) and order.marks is not None]
        self.marks = partial(_all_of, marks) if marks else None

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """See `ContinuingOrder`: ``positions`` count from the beginning of training."""
        out = np.empty(len(positions), np.int64)
        for lane, chosen in by_group(positions % self.lanes):
            found = self._mix(lane).indices(0, positions[chosen] // self.lanes)
            out[chosen] = self._placed(lane, found >> _BITS, found & ((1 << _BITS) - 1))
        return out

    def take(self) -> None:
        """See `PlainOrder.take`."""
        for order in self._orders:
            if isinstance(order, PlainOrder):
                order.take()

    def details(self) -> dict[str, Any]:
        return {
            "sources": self.names,
            "stages": len(self.stages),
            "epoch_size": self._n,
            "lanes": self.lanes,
            "seed": self._seed,
        }

    def settings(self) -> dict[str, Any]:
        """See `Order.settings`."""
        return {**self._said, **self._begun(self._mix(0).settings()["stages"], len(self.stages))}

    def settings_at(self, epoch: int, position: int) -> dict[str, Any]:
        """See `ScheduledOrder.settings_at`; as in `indices`, ``position`` counts from the beginning of training."""
        run = -(-position // self.lanes)
        begun = bisect_left(self.stages, run, key=lambda stage: stage.start)
        return self.settings_of(epoch) | self._begun(self._mix(0).settings_at(0, run)["stages"], begun)

    def _begun(self, stages: str, begun: int) -> dict[str, Any]:
        """The settings that the first ``begun`` stages depend on."""
        used = {self.names[source] for source in self._mix(0).used(begun)}
        held = {name: held for name, held in self._held.items() if name in used}
        sources = checksum_of([pair for pair in self._sources if pair[0] in used])
        data = data_of(self._data, sorted(used))
        return {
            "stages": stages,
            "orders": sources,
            **data,
            **({"held": shortened(held) if held else None} if self._held else {}),
        }

    def choices(self) -> dict[str, Any]:
        """See `Changing.choices`."""
        return {"stages from": [stage.start * self.lanes for stage in self.stages], **super().choices()}

    def changes(self) -> dict[str, Any]:
        """See `Changing.changes`."""
        return {**({"stages": self.added} if self.added else {}), **super().changes()}

    def adopt(self, changes: dict[str, Any]) -> None:
        """See `Changing.adopt`."""
        added = [(start, weights) for start, weights in changes.get("stages", ())]
        of_a_lane = self._of_each_lane(added)
        was = self._eras
        super().adopt({name: value for name, value in changes.items() if name != "stages"})
        try:
            self._mix(0).restage(of_a_lane)
        except BaseException:
            self._eras = was
            raise
        mixes, self._mixes = self._mixes, {0: self._mixes[0]}  # those are made anew after an interrupt
        self.added, self.stages = added, self._mixes[0].stages
        for mix in mixes.values():
            mix.restage(of_a_lane)
        self._mixes = mixes

    def expected(self, begin: int, end: int) -> dict[str, Fraction]:
        """The exact shares of the sources in the items from ``begin`` to ``end - 1``, if both are multiples of the
        number of lanes.
        """
        of_a_lane = self._mix(0).expected(begin // self.lanes, -(-end // self.lanes))
        return {name: share * self.lanes for name, share in of_a_lane.items()}

    def _mix(self, lane: int) -> MixOrder:
        if lane not in self._mixes:
            mix = MixOrder(*self._of_a_lane, LONGEST, mixed((mixed(self._seed + GAMMA) ^ lane) + GAMMA) >> 1)
            mix.restage(self._of_each_lane(self.added))
            self._mixes[lane] = mix
        return self._mixes[lane]

    def _of_each_lane(self, stages: Any) -> list[tuple[int, Weights]]:
        return [(-(-start // self.lanes), of) for start, of in stages]

    def _placed(self, lane: int, sources: Int64s, numbers: Int64s) -> Int64s:
        """The indices of the items ``numbers`` of ``sources`` in one lane."""
        at = numbers.copy()
        for source, order in enumerate(self._orders):
            if not isinstance(order, ContinuingOrder) and (chosen := np.flatnonzero(sources == source)).size:
                at[chosen] = over_passes(order, len(order), 0, numbers[chosen] * self.lanes + lane)
        return (at * len(self.names) + sources) * self.lanes + lane


def _all_of(marks: list[Callable[..., tuple[int, ...]]], **again: bool) -> tuple[int, ...]:
    """One mark for each choice of one from each source, so that two ranks have one in common if they have one of every
    source.
    """
    choices = product(*(of_source(**again) for of_source in marks))
    return tuple(zlib.crc32(repr(choice).encode()) for choice in islice(choices, _MOST_MARKS))


_MOST_MARKS = 1024
