"""KeyGrouper: an order, in rounds of batches with one key, as the source of an epoch's batches."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from penstock._errors import ANEW, ClosedError, GraphError, Once, StateError
from penstock._fetch.indices import Indices
from penstock._nodes.balance import dealt, together
from penstock._nodes.index_node import MOST_RANKS, Facts, FirstNode
from penstock._nodes.node import State, fields, is_count
from penstock._nodes.plan_source import Place, PlanRequest, PlanSource
from penstock._nodes.sampler import Sampler
from penstock._random.buckets import Buckets
from penstock._random.changing import begins_block
from penstock._random.keyed import KeyBlock, KeyRounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.balance import Costs
    from penstock._random.keyed import Keys
    from penstock._random.order import Order
    from penstock._random.permutation import Int64s

log = logging.getLogger("penstock")
_PART: Final = 2**16
"""Indices that are computed at a time; `shutdown` waits for no more."""


@final
class KeyGrouper(FirstNode[Indices]):
    """Walk through ``order`` in rounds of one key: one epoch of batches, then ``StopIteration``.

    The `Sharder` downstream tells it the number of ranks, and what samples cost: a round has one batch for each rank.
    Its state is the block, and the rounds that were taken of it, with the number of ranks that took them: a pair for
    each number of ranks since the block began. Moving to a state plans one block.

    Args:
        order: Which index is at which position; see `Sampler`.
        groups: `Buckets` with ``keys``.

    Raises:
        GraphError: ``order`` is not an order, or ``groups`` is something else. While reading: the order has an index
            without a key.
    """

    __module__ = "penstock.nodes"

    def __init__(self, order: Order, groups: Buckets) -> None:
        if not isinstance(groups, Buckets) or (keys := groups.keys) is None:
            raise GraphError(
                "a KeyGrouper needs Buckets with keys. For Packs, and for Buckets by length, use a Grouper."
            )
        self.order = order
        self.groups = groups
        self._keys = keys
        self._indices = Sampler(order)
        self._planned_by = None if (changing := self._indices.changing) is None else changing.state
        self._blocks = -(-len(order) // groups.block)
        # in a thread, and an order may cache what it computes
        self._planner = _Planner(copy.deepcopy(order), groups.block, keys)
        self._plans: PlanSource[KeyBlock] = PlanSource()
        self._reading: PlanRequest | None = None
        self._once = Once()
        facts = self._indices.facts
        super().__init__(Facts(facts.settings | groups.settings(), facts.rank_settings, in_rounds=True))

    def details(self) -> dict[str, Any]:
        return {"order": self.order, "groups": self.groups}

    def start(self, epoch: int, after: State | None = None) -> State:
        return {"epoch": epoch, "block": 0, "rounds": []}

    def left(self, place: State) -> int | None:
        if place["block"] == self._blocks:
            return 0
        if self._blocks > 1:
            return None  # only a plan of the whole epoch would tell
        ranks = 1 if self.dealt_to is None else self.dealt_to.ranks.now()[1]
        past, taken = _split(place["rounds"], ranks)
        rounds = self._planner(PlanRequest(place["epoch"], place["block"])).rounds(past, ranks)
        return ranks * max(0, len(rounds or ()) - taken)

    def sized(self) -> bool:
        return self._blocks <= 1

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Indices], State]:
        """The batches of rank ``first`` in ``n`` rounds of ``every`` ranks."""
        epoch, number = place["epoch"], place["block"]
        past, taken = _split(place["rounds"], every)
        items: list[Indices] = []
        costs = None if self.dealt_to is None else self.dealt_to.costs
        deal = None if costs is None else partial(_share_of, costs, first, every)
        while len(items) < n and number < self._blocks:
            block = self._block(epoch, number)
            rounds = block.rounds(past, every)
            if rounds is None or taken > len(rounds):
                raise StateError(
                    f"a state after the rounds {place['rounds']!r:.80} is out of bounds: block {number} has fewer. It "
                    f"is damaged."
                )
            if first == 0 and self._once(every):
                self._tell(rounds, every)
            end = min(taken + n - len(items), len(rounds))
            for row in range(taken, end):
                offsets, before = block.hand(rounds, row, first, every, deal)
                positions = number * self.groups.block + offsets.astype(np.int64) + before * len(self.order)
                items.append(Indices(epoch, positions, block.indices[offsets].astype(np.int64)))
            number, past, taken = (number, past, end) if end < len(rounds) else (number + 1, [], 0)
        return items, {"epoch": epoch, "block": number, "rounds": [*past, [every, taken]] if taken else past}

    def peek(self, place: State, positions: Int64s) -> Sequence[Indices]:
        raise GraphError("groups cannot be read by position")

    def at(self, epoch: int, positions: np.ndarray, *, wraps: bool = False) -> Sequence[Indices]:
        """Samples, in the order. The q-th repetition of a sample is ``q * len(order)`` behind it."""
        length = len(self.order)
        repeated = (
            self._keys.short != "drop" and len(positions) and positions.min() >= 0 and positions.max() < 2**31 * length
        )
        found: Any = self._indices.at(epoch, positions % length if repeated else positions)
        return Indices(epoch, positions, found.values)

    def skip(self, place: State) -> State:
        return {"epoch": place["epoch"], "block": self._blocks, "rounds": []}

    def check(self, state: Any) -> None:
        fields(state, epoch=int, block=int, rounds=list)
        block, rounds = state["block"], state["rounds"]
        pairs = [
            pair
            for pair in rounds
            if isinstance(pair, list)
            and len(pair) == 2
            and all(map(is_count, pair))
            and all(pair)
            and pair[0] <= MOST_RANKS
        ]
        # samples in the block: each round has one
        most = max(0, min(self.groups.block, len(self.order) - block * self.groups.block))
        if len(pairs) < len(rounds) or block > self._blocks or sum(many for _, many in pairs) > most:
            raise StateError(
                f"a state after the rounds {rounds!r:.80} of block {block} is out of bounds: an epoch has "
                f"{self._blocks} blocks. Was it saved with another dataset?"
            )

    def settings_at(self, epoch: int, place: Any) -> dict[str, Any]:
        if place is not None:
            block, rounds = place.get("block"), place.get("rounds")
            # A block is always planned as a whole.
            place = {"position": (block + bool(rounds)) * self.groups.block if is_count(block) else None}
        return self._indices.settings_at(epoch, place)

    def begin(self, place: State) -> bool:
        begins_block(self._indices.changing, self._planned_by, place["epoch"], place["block"] + bool(place["rounds"]))
        return True

    def choices(self) -> dict[str, Any]:
        return self._indices.choices()

    def seek(self, place: State) -> State:
        self._plans.resume()
        self._indices.seek(place)
        return place

    def interrupt(self) -> None:
        self._plans.interrupt()
        self._indices.interrupt()

    def shutdown(self) -> None:
        self._planner.closed = True
        self._plans.shutdown()
        self._indices.shutdown()

    def _block(self, epoch: int, number: int) -> KeyBlock:
        """The plan of a block. That of the next one is begun."""
        request = PlanRequest(epoch, number)
        found = self._planner.found(request)
        block = self._plans.get(self._planner, request) if found is None else found
        if self._reading != request:
            self._plans.order(
                self._planner, PlanRequest(epoch, number + 1) if number + 1 < self._blocks else PlanRequest(epoch + 1)
            )
            self._reading = request
        return block

    def _tell(self, rounds: KeyRounds, ranks: int) -> None:
        """Log, once for each number of ranks, what comes not at all or more than once."""
        of = "the epoch" if self._blocks == 1 else f"{self.groups.block:,} that are planned together"
        for counts, what in ((rounds.left_out, "left out"), (rounds.repeated, "repeated")):
            if counts.any():
                named = self._keys.named(counts, rounds.keys)
                short = self._keys.short
                log.warning(
                    f"Buckets with {short=}, world size {ranks}: of {of}, {counts.sum()} samples are {what}, by key: "
                    f"{named}."
                )


@final
class _Planner:
    """Plans blocks, in a thread; ``position`` of a request is the number of the block."""

    place: Place = "thread"

    def __init__(self, order: Order, block: int, keys: Keys) -> None:
        self._order = order
        self._block = block
        self._keys = keys
        # the last ones; assigned at once, because two threads may plan
        self._kept: tuple[tuple[PlanRequest, KeyBlock], ...] = ()
        self.closed = False

    def found(self, request: PlanRequest) -> KeyBlock | None:
        return next((block for known, block in self._kept if known == request), None)

    def __call__(self, request: PlanRequest) -> KeyBlock:
        block = self.found(request)
        if block is None:
            begin = request.position * self._block
            end = min(begin + self._block, len(self._order))
            parts = [self._part(request.epoch, at, min(at + _PART, end)) for at in range(begin, end, _PART)]
            block = KeyBlock(self._keys, np.concatenate(parts))
            # That of the loop, that of the workers, and the next one.
            self._kept = (request, block), *self._kept[:2]
        return block

    def _part(self, epoch: int, begin: int, end: int) -> Int64s:
        if self.closed:
            raise ClosedError(f"this loader was closed. {ANEW}")
        indices = self._order.indices(epoch, np.arange(begin, end))
        if int(indices.max()) >= len(self._keys):
            raise GraphError(
                f"the order has index {indices.max()}, but there are {len(self._keys)} keys. Pass one key for each "
                f"index of the dataset."
            )
        return indices


def _split(rounds: list[list[int]], ranks: int) -> tuple[list[list[int]], int]:
    """The rounds that others took, and how many ``ranks`` ranks took since."""
    return (rounds[:-1], rounds[-1][1]) if rounds and rounds[-1][0] == ranks else (rounds, 0)


def _share_of(costs: Costs, rank: int, ranks: int, indices: Int64s) -> Int64s:
    """The numbers of the samples of a round that ``rank`` gets."""
    few = together(ranks, len(indices) // ranks)
    apart = ranks // few
    group = np.arange(rank % apart, len(indices), apart)
    return group[dealt(costs.at(indices[group]), few, rank // apart)]
