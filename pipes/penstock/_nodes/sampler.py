"""Sampler: an order as the source of an epoch's indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._errors import GraphError, StateError
from penstock._fetch.indices import Indices
from penstock._nodes.index_node import Facts, FirstNode, check_positions
from penstock._nodes.node import State, fields, is_count
from penstock._nodes.plan_source import Place, PlanRequest, PlanSource
from penstock._random.order import ContinuingOrder, Order, PlannedOrder, ScheduledOrder
from penstock._random.orders import PlainOrder, WeightedOrder
from penstock._random.schedules import Skips

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BLOCK = 4096
"""The most indices computed at once. An order may ask for more by an attribute ``read_ahead``."""
Block = tuple[int, int, int, int, Indices]
"""Indices computed ahead: epoch, origin, first position, stride, and the indices."""
_NOTHING = Indices(-1, np.empty(0, np.int64), np.empty(0, np.int64))
_NOT_READ: Block = (-1, 0, 0, 1, _NOTHING)


@final
class Sampler(FirstNode[Indices]):
    """Walk through ``order``: one epoch of single `Indices`, then ``StopIteration``.

    The state is only the position in the epoch, so moving to a state costs nothing. ``reset()`` without a state begins
    the next epoch if part of this one has been read, and otherwise this one. The state of a `ContinuingOrder` also
    holds where the epoch began (``origin``) and, at its end, how many of its items no rank got (``left``); the next
    epoch begins with those.

    Args:
        order: Which index is at which position: `SequentialOrder`, `ShuffledOrder`, `WeightedOrder`, `TorchOrder`, or
            your own `Order`.
        skip: Ranges of samples, counted from the start of training over all ranks, that no rank gets: pairs of the
            first one and the one after the last. They count as passed.

    Raises:
        GraphError: ``order`` is not an order.
        ValueError: A range is empty, or overlaps another one.
    """

    __module__ = "penstock.nodes"

    told: Sequence[Any] = ()
    skips: Skips

    def __init__(self, order: Order, skip: Iterable[Sequence[int]] = ()) -> None:
        if not isinstance(order, Order):
            raise GraphError(
                f"an order has __len__, indices and settings, but {type(order).__name__} does not. Wrap a torch "
                f"sampler in SamplerWrapper."
            )
        self.order = order
        self._n = len(order)
        self.skips = self._given = Skips(skip, order.run if isinstance(order, PlainOrder) else 1)
        self._adopted: list[Any] = []  # ranges to skip that a state has brought
        self.grain = order.grain if isinstance(order, PlainOrder) else 0
        self._block: int = getattr(order, "read_ahead", BLOCK)
        self._changed, self._read_as = False, order.state if isinstance(order, PlainOrder) else None
        self._ahead = _NOT_READ
        self._next: Block = self._ahead  # the first block of the epoch after that of `_ahead`
        # Not for a user's order, which may change between epochs, nor for one that begins where the epoch was left, or
        # is planned as a whole.
        self._marks = order.marks if isinstance(order, PlainOrder) else None
        self.why_ranks_differ = order.why_ranks_differ if isinstance(order, PlainOrder) else None
        # Each protocol is asked once, because Python 3.11 takes 10 us to answer.
        self._planned = order if isinstance(order, PlannedOrder) else None
        self._scheduled, continuing = (
            order if isinstance(order, ScheduledOrder) else None,
            isinstance(order, ContinuingOrder),
        )
        self._looks_ahead = isinstance(order, PlainOrder) and not (
            self.grain or continuing or self._planned is not None
        )
        self._plans, self._planner = PlanSource[Any](), _OrderPlanner(order)
        settings = order.settings()
        # Ranks with other weights are compared, so these are no part of what two loaders must have in common for that.
        settings = {
            name: value for name, value in settings.items() if name != "weights" or not isinstance(order, WeightedOrder)
        }
        super().__init__(
            Facts(
                settings,
                {"all stages": settings} if self._scheduled is not None else {},
                carries_over_epochs=continuing,
            )
        )

    def details(self) -> dict[str, Any]:
        return {"order": self.order}

    def start(self, epoch: int, after: State | None = None) -> State:
        if not self.facts.carries_over_epochs:
            return {"epoch": epoch, "position": 0}
        if after is None or epoch < after["epoch"]:
            origin = epoch * self._n
        elif epoch == after["epoch"]:
            origin = after["origin"]
        else:
            # an epoch that is skipped unread counts as a whole one
            delivered = after["position"] - after.get("left", 0) or self._n
            origin = after["origin"] + delivered + (epoch - after["epoch"] - 1) * self._n
        return {"epoch": epoch, "position": 0, "origin": origin}

    def left(self, place: State) -> int:
        left = self._n - int(place["position"])
        return self._kept(place, left) if self.skips.ranges else left

    def _kept(self, place: State, many: int) -> int:
        """How many of the next positions are not skipped."""
        at = self.passed(place)
        return self.skips.kept(at + many) - self.skips.kept(at)

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Indices, State]:
        epoch, position, origin = place["epoch"], place["position"], place.get("origin", 0)
        if self.skips.ranges and self.skips.touch(at := self.passed(place), at + min(n * every, self._n - position)):
            return self._read_around(place, n * every, every, first)
        start, end = position + first, min(position + n * every, self._n)
        behind = {**place, "position": end}
        count = max(0, -(-(end - start) // every))
        if not count and self._planned is None:  # orders keep one epoch, and may have begun the next one
            return Indices(epoch, _NOTHING.positions, _NOTHING.values), behind
        # An order computes 500 indices in the time of a few. So if reads continue with the same stride, we compute
        # ahead, twice as far each time. A block is one tuple, assigned at once, so an interrupt or another thread sees
        # either the old one or the new one.
        of_epoch, of_origin, begin, stride, ahead = self._ahead
        at, misfit = divmod(start - begin, every)
        there = len(ahead.positions)
        if misfit or every != stride or not 0 <= at <= there - count or of_epoch != epoch or of_origin != origin:
            more = max(count, min(self._block, 2 * there) if at == there and every == stride else 0)
            block = self._next
            if block[:4] != (epoch, origin, start, every) or len(block[4].positions) < count:
                block = self._computed(epoch, origin, start, more, every)
            self._ahead, at, ahead = block, 0, block[4]
            there = len(ahead.positions)
        if self._looks_ahead and at <= there // 2 < at + count and start + (there - at) * every >= self._n:
            # The middle of the epoch's last block. The next epoch would otherwise begin with a batch that takes several
            # times as long.
            self._next = self._computed(epoch + 1, origin, first, self._block, every)
        if count == there:
            return ahead, behind
        return Indices(epoch, ahead.positions[at : at + count], ahead.values[at : at + count]), behind

    def _read_around(self, place: State, many: int, every: int, first: int) -> tuple[Indices, State]:
        """`read`, where samples are skipped."""
        origin, left = self.passed(place) - place["position"], self.left(place)
        number = self.skips.kept(origin + place["position"])
        positions = self.skips.at(np.arange(min(many, left)) + number) - origin
        end = self._n if many > left else int(positions[-1]) + 1 if many else place["position"]
        return self._indices(place["epoch"], place.get("origin", 0), positions[first::every]), {
            **place,
            "position": end,
        }

    def skip(self, place: State) -> State:
        end = {**place, "position": self._n}
        return {**end, "left": self._n - place["position"]} if self.facts.carries_over_epochs else end

    def peek(self, place: State, positions: np.ndarray) -> Indices:
        if self.facts.carries_over_epochs:
            raise GraphError(f"{type(self.order).__name__} can only be read forward, so it cannot be read by position")
        numbers = np.asarray(positions, np.int64)
        begin = place["epoch"] * self._n
        if self.skips.touch(begin, begin + self._n):
            numbers = numbers.copy()
            kept = self._kept({**place, "position": 0}, self._n)
            past = numbers >= kept
            numbers[past] += self._n - kept
            numbers[~past] = self.skips.at(numbers[~past] + self.skips.kept(begin)) - begin
        return self._indices(place["epoch"], 0, numbers)

    def at(self, epoch: int, positions: np.ndarray, *, wraps: bool = False) -> Sequence[Indices]:
        if not self.skips.ranges or self.facts.carries_over_epochs:
            return super().at(epoch, positions, wraps=wraps)
        check_positions(epoch, positions, self._n, wraps=wraps)
        return self._indices(epoch, 0, positions)

    def changes(self) -> dict[str, Any]:
        ours = {"skip": self._adopted} if self._adopted else {}
        return {**ours, **(self.order.changes() if isinstance(self.order, PlainOrder) else {})}

    def adopt(self, changes: dict[str, Any]) -> None:
        ranges = [list(pair) for pair in changes.get("skip", ())]
        more = (pair for pair in ranges if pair not in self._given.ranges)
        skips = Skips([*self._given.ranges, *more], self._given.run)
        of_order = {name: value for name, value in changes.items() if name != "skip"}
        if isinstance(self.order, PlainOrder):
            self.order.adopt(of_order)
        else:
            super().adopt(of_order)
        self._adopted, self.skips, self._ahead, self._next = ranges, skips, _NOT_READ, _NOT_READ

    def presumed(self, settings: dict[str, Any]) -> dict[str, Any]:
        return self.order.presumed(settings) if isinstance(self.order, PlainOrder) else {}

    def resume_at(self, epoch: int, place: State | None) -> None:
        if isinstance(self.order, PlainOrder):
            self.order.resume_at(self.passed(self.start(epoch + 1) if place is None else place))

    @property
    def runs_ahead(self) -> bool:
        return not self._changed

    def begin(self, place: State) -> bool:
        """Whether the order has not been changed since this was read ahead; see `Node.begin`."""
        if not isinstance(order := self.order, PlainOrder):
            return True
        order.begin(place["epoch"], place["position"])
        self._changed, self._read_as = order.state is not self._read_as, order.state
        return not self._changed

    def begin_block(self, epoch: int, block: int) -> None:
        """`begin`, for who plans whole blocks of the order ahead, by what it was when that was built.

        Raises:
            GraphError: It was changed since.
        """
        if isinstance(order := self.order, PlainOrder):
            order.begin(epoch, block)
            if order.state is not self._read_as:
                raise GraphError(
                    "the order was updated, but groups are planned ahead by the weights that it was built with. Build "
                    "a new loader, and call its set_epoch."
                )

    def passed(self, place: State) -> int:
        begin = place["origin"] - place.get("left", 0) if self.facts.carries_over_epochs else place["epoch"] * self._n
        return int(begin + place["position"])

    def choices(self) -> dict[str, Any]:
        stages = {"all stages": self._scheduled.settings()} if self._scheduled is not None else {}
        return {
            "skip": self.skips.ranges,
            **stages,
            **(self.order.choices() if isinstance(self.order, PlainOrder) else {}),
        }

    def check(self, state: Any) -> None:
        continues = self.facts.carries_over_epochs
        left = {"left": int} if isinstance(state, dict) and "left" in state else {}
        position = fields(state, epoch=int, position=int, **({"origin": int, **left} if continues else {}))["position"]
        if isinstance(self.order, ContinuingOrder):
            if state["origin"] > state["epoch"] * self._n:
                raise StateError(
                    f"a state of epoch {state['epoch']} says that this epoch starts at item {state['origin']} of the "
                    f"stream, but an epoch has {self._n} items: the state is damaged. Load an older one."
                )
            if "left" in state and not 0 < state["left"] <= position == self._n:
                raise StateError(
                    f"a state with {state['left']} items left at position {position} of {self._n} is damaged. Load an "
                    f"older one."
                )
        if position > self._n:
            raise StateError(
                f"a state at position {position} is out of bounds: an epoch has {self._n} items. Was it saved with "
                f"another dataset?"
            )

    def settings_at(self, epoch: int, place: Any) -> dict[str, Any]:
        position = self._n if place is None else place.get("position")
        origin = place.get("origin") if self.facts.carries_over_epochs and place is not None else 0
        if not is_count(position) or not is_count(origin):
            return {}
        at = origin + min(position, self._n)
        begun = (
            self.skips.begun(at if self.facts.carries_over_epochs else epoch * self._n + at)
            if self.skips.ranges
            else []
        )
        stages = self._scheduled.settings_at(epoch, at) if self._scheduled is not None else {}
        return {**stages, **({"skip": begun} if begun else {})}

    @property
    def has_notes(self) -> bool:
        return self._marks is not None

    def note(self, place: State, *, again: bool = False) -> tuple[int, ...]:
        return () if self._marks is None else self._marks(again=True) if again else self._marks()

    def take(self) -> None:
        """See `PlainOrder.take`."""
        if isinstance(self.order, PlainOrder):
            self.order.take()

    def seek(self, place: State) -> State:
        self.take()
        self._ahead = self._next = _NOT_READ  # another thread may have computed them by what the order was
        self._plans.resume()
        return place

    def interrupt(self) -> None:
        self._plans.interrupt()

    def shutdown(self) -> None:
        self._plans.shutdown()

    def _computed(self, epoch: int, origin: int, start: int, count: int, every: int) -> Block:
        return (
            epoch,
            origin,
            start,
            every,
            self._indices(epoch, origin, np.arange(start, min(start + count * every, self._n), every)),
        )

    def _indices(self, epoch: int, origin: int, positions: np.ndarray) -> Indices:
        planned = self._planned
        if planned is not None and not planned.keeps(epoch):
            planned.keep(epoch, self._plans.get(self._planner, PlanRequest(epoch)))
            self._plans.order(self._planner, PlanRequest(epoch + 1))
        if self.facts.carries_over_epochs:
            return Indices(epoch, positions, self.order.indices(epoch, origin + positions))
        within = positions % self._n if positions.size and positions.max() >= self._n else positions
        if within is not positions and self.skips.touch(begin := epoch * self._n, begin + self._n):
            past = positions >= self._n  # dealt once more, from the epoch's start
            numbers = (positions[past] - self._n) % max(1, self._kept({"epoch": epoch, "position": 0}, self._n))
            within[past] = self.skips.at(numbers + self.skips.kept(begin)) - begin
        return Indices(epoch, positions, self.order.indices(epoch, within))


@final
class _OrderPlanner:
    """Plans the epochs of a `PlannedOrder`, in a thread, because it draws from its own generator."""

    place: Place = "thread"

    def __init__(self, order: Any) -> None:
        self._order = order

    def __call__(self, request: PlanRequest) -> Any:
        return self._order.plan(request.epoch)
