"""SamplerWrapper: a torch sampler or batch sampler as the source of an epoch's indices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._errors import GraphError, StateError, StateMismatch
from penstock._fetch.indices import Indices
from penstock._nodes.distributed_sampler import refuse_sharded
from penstock._nodes.epoch_plan import EpochPlanner, Plan, PlanRequest, can_be_pickled, length, length_in, owns_its_randomness, wrapped
from penstock._nodes.node import Node, State, fields
from penstock._random.orders import checked_seed
from penstock._workers.ahead_thread import AheadThread
from penstock._workers.helper_process import HelperProcess

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
class SamplerWrapper(Node[Any]):
    """Walk through what a torch sampler or batch sampler yields, epoch by epoch: single `Indices`, or a batch of them for each batch.

    Before each epoch ``set_epoch(epoch)`` is called on the sampler and on all that it wraps (``.batch_sampler``, ``.sampler``); a
    user's own calls are overridden. Whatever it draws from is seeded from (seed, epoch): its ``generator``, and ``random``,
    ``numpy.random`` and torch's CPU generator, which are afterwards as they were.

    An epoch is read as a whole: its *plan*, of 8 bytes a sample. The next one is made while this one is used. A sampler of torch's
    own is read in a thread. Any other may draw from the global generators, beside the user's own draws, so a copy of it is read in
    a helper process; where it cannot be pickled, it is read here, between two epochs, with one warning (or, if it was seen not to
    draw from them, in a thread).

    Resuming loads no sample. The state has a checksum of the plan up to it; a sampler with a memory, which gives another plan than
    at first for the same epoch, is made to yield all the epochs before again.

    Args:
        sampler: A torch ``Sampler`` or ``BatchSampler``, or any iterable of indices or of lists of indices, which ends and can be
            read again.
        seed: From 0 to 2**63 - 1.
        plan_ahead: False reads the sampler here, between two epochs: for one that the training loop updates.

    Raises:
        GraphError: ``sampler`` shards by itself, or is none.
        StateMismatch: On reading, after a reset to a state: the sampler does not give again what it gave before the state.
    """

    def __init__(self, sampler: Any, seed: int = 0, plan_ahead: bool = True) -> None:
        super().__init__()
        refuse_sharded(sampler)
        if isinstance(sampler, Iterator) or not (hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")):
            raise GraphError(
                f"{type(sampler).__name__} cannot be read once for each epoch, as a sampler must. Give an object with __iter__, such as a list."
            )
        self.sampler = sampler
        self.seed = checked_seed(seed)
        self.plan_ahead = plan_ahead
        self._owns = owns_its_randomness(sampler)
        self._maker = EpochPlanner(sampler, seed, draws=not self._owns, remembers=not self._owns)
        self._planner: AheadThread[Plan] | None = None
        self._plans_here = not plan_ahead
        self._sized = True
        self._told = any(hasattr(one, "set_epoch") for one in wrapped(sampler))
        self._lengths: dict[int, int | None] = {}
        self._warned = False
        self._plan: Plan | None = None
        self._planned = 0  # the epoch of _plan
        self._follows = 0  # the epoch that the sampler has not been asked for yet
        self._epoch = 0
        self._position = 0
        self._checksum = 0

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        if self._planner is not None:
            self._planner.resume()
        if initial_state is None:
            initial_state = self.start_of(self._epoch + (self._position > 0))
        self.check(initial_state)
        self._epoch, self._position, self._checksum = (initial_state[key] for key in ("epoch", "position", "checksum"))
        if self._planned != self._epoch or (self._plan is not None and not self._fits(self._plan)):
            self._plan = None

    def next(self) -> Any:
        block = self.take(1)
        if not block:
            raise StopIteration
        return block[0]

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Sequence[Any]:
        plan = self._ready()
        start, end = self._position, min(self._position + n * every, len(plan))
        self._checksum = plan.checksum(start, end, self._checksum)
        self._position = end
        return self._items(plan, np.arange(start + first, end, every))

    def at(self, positions: np.ndarray) -> Sequence[Any]:
        return self._items(self._ready(), np.asarray(positions, np.int64))

    def remaining(self, state: State | None = None) -> int | None:
        epoch, position = (self._epoch, self._position) if state is None else (state["epoch"], state["position"])
        items = self._items_of(epoch)
        return None if items is None else max(items - position, 0)

    def items_per_epoch(self) -> int | None:
        return self._items_of(self._epoch)

    def settings(self) -> dict[str, Any]:
        return {"order": f"{type(self.sampler).__module__}.{type(self.sampler).__qualname__}", "seed": self.seed}

    def get_state(self) -> State:
        return {"epoch": self._epoch, "position": self._position, "checksum": self._checksum}

    def start_of(self, epoch: int) -> State:
        return {"epoch": epoch, "position": 0, "checksum": 0}

    def check(self, state: Any) -> None:
        position = fields(state, epoch=int, position=int, checksum=int)["position"]
        if state["epoch"] == self._planned and self._plan is not None and position > len(self._plan):
            raise StateError(f"a state at position {position} is out of bounds: epoch {state['epoch']} has {len(self._plan)} items.")

    def interrupt(self) -> None:
        if self._planner is not None:
            self._planner.interrupt()

    def shutdown(self) -> None:
        if self._planner is not None:
            self._planner.shutdown()

    def _ready(self) -> Plan:
        """The plan of this epoch, which the state fits; the next one is ordered."""
        if self._plan is not None:
            return self._plan
        # Ordered as the next epoch, it is in the making whatever the task says; else it follows, or is a jump.
        task = PlanRequest(self._epoch, self._position, self._checksum, jumps=self._epoch != self._follows)
        plan = self._made(task)
        if not self._fits(plan):
            came = f"{plan.checksum(0, self._position)}" if self._position <= len(plan) else f"only {len(plan)} items"
            raise StateMismatch(
                f"{type(self.sampler).__name__} does not give again what it gave in epoch {self._epoch} up to position {self._position}: the state has "
                f"the checksum {self._checksum}, and now there is {came}. Use the sampler, dataset and seed of the saved run, or begin a new epoch."
            )
        self._plan, self._planned, self._follows = plan, self._epoch, self._epoch + 1
        self._compare_length(plan)
        if self._planner is not None:
            self._planner.order(self._follows, PlanRequest(self._follows))
        return plan

    def _made(self, task: PlanRequest) -> Plan:
        if self._planner is None and not self._plans_here:
            self._plans_here = not self._owns and not can_be_pickled(self.sampler)
            if not self._plans_here:
                self._planner = AheadThread(self._maker) if self._owns else self._helped()
        if self._planner is not None:
            return self._planner.get(task.epoch, task)
        plan = self._maker(task)
        if self.plan_ahead and not plan.drew:
            self._maker.draws = False
            self._planner = AheadThread(self._maker)
        elif self.plan_ahead and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self.sampler).__name__} draws from the global random numbers and cannot be pickled, so that it is read between two epochs "
                f"and the workers wait for it. Give it a generator of its own, make it picklable, or say plan_ahead=False.",
                stacklevel=2,
            )
        return plan

    def _helped(self) -> AheadThread[Plan]:
        helper = HelperProcess(EpochPlanner(self.sampler, self.seed, draws=True, remembers=True, private=True))
        return AheadThread(helper, helper.end)

    def _fits(self, plan: Plan) -> bool:
        return self._position <= len(plan) and plan.checksum(0, self._position) == self._checksum

    def _items(self, plan: Plan, places: np.ndarray) -> Sequence[Any]:
        if plan.starts is not None:
            return [self._batch(plan, plan.starts, *divmod(place, len(plan))) for place in places.tolist()]
        within = places % len(plan) if places.size and places.max() >= len(plan) else places
        values = [plan.values[place] for place in within] if isinstance(plan.values, list) else plan.values[within]
        return Indices(self._epoch, places, values)

    def _batch(self, plan: Plan, starts: np.ndarray, lap: int, place: int) -> Indices:
        begin, end, samples = (int(starts[k]) for k in (place, place + 1, -1))
        return Indices(self._epoch, np.arange(begin, end) + lap * samples, plan.values[begin:end])

    def _items_of(self, epoch: int) -> int | None:
        if self._plan is not None and self._planned == epoch:
            return len(self._plan) if self._sized else None
        return self._said(epoch) if self._sized else None

    def _said(self, epoch: int) -> int | None:
        """What ``len(sampler)`` is in ``epoch``: asked of a copy, where the sampler is told its epochs, because its length may follow them."""
        if not self._told:
            return length(self.sampler)
        if epoch not in self._lengths:
            self._lengths = {**dict(list(self._lengths.items())[-3:]), epoch: length_in(self.sampler, epoch)}
        return self._lengths[epoch]

    def _compare_length(self, plan: Plan) -> None:
        said = self._said(self._epoch) if self._sized else None
        if said is not None and said != len(plan):
            self._sized = False
            warnings.warn(
                f"{type(self.sampler).__name__} has a length of {said}, and epoch {self._epoch} has {len(plan)} items. From now on the length counts as "
                f"unknown. Let __len__ say what __iter__ gives.",
                stacklevel=2,
            )
