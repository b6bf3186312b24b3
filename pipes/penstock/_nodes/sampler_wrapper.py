"""SamplerWrapper: a torch sampler or batch sampler as the source of an epoch's indices."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch.utils.data import BatchSampler

from penstock._errors import GraphError, StateError, StateMismatch
from penstock._fetch.indices import Indices, pack
from penstock._memory.modes import neutral_modes
from penstock._nodes.distributed_sampler import refuse_sharded
from penstock._nodes.epoch_plan import EpochPlanner, Plan, PlanRequest, can_be_pickled, length, length_in, owns_its_randomness, wrapped
from penstock._nodes.node import Node, State, fields
from penstock._random.orders import checked_seed
from penstock._workers.ahead_thread import AheadThread
from penstock._workers.helper_process import HelperProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("penstock")


@final
class SamplerWrapper(Node[Any]):
    """Walk through what a torch sampler or batch sampler yields, epoch by epoch: single `Indices`, or a batch of them for each batch.

    Before each epoch ``set_epoch(epoch)`` is called on the sampler and on all that it wraps (``.batch_sampler``, ``.sampler``); a
    user's own calls are overridden. Whatever it draws from is seeded from (seed, epoch): its ``generator``, and ``random``,
    ``numpy.random`` and torch's CPU generator, which are afterwards as they were.

    An epoch is read as a whole: its *plan*, of 8 bytes a sample. The next one is made while this one is used. A sampler without a
    length may have no end: where it has not ended after 65,536 items (or, in batches, 2**20 samples), it is read on in blocks of that
    size, one ahead of the consumer, and how many items the epoch has stays unknown.

    A sampler of torch's own is read in a thread. Any other may draw from the global generators, beside the user's own draws, so a copy
    of it is read in a helper process; where it cannot be pickled, it is read here, between two epochs, with one warning (or, if it was
    seen not to draw from them, in a thread).

    Resuming loads no sample: the sampler is read again from the epoch's start. The state has a checksum of the plan up to it; a sampler
    with a memory, which gives another plan than at first for the same epoch, is made to yield all the epochs before again.

    Args:
        sampler: A torch ``Sampler`` or ``BatchSampler``, or any iterable of indices, or of batches of them, that can be read again.
        seed: From 0 to 2**63 - 1.
        plan_ahead: False reads the sampler here, between two epochs: for one that the training loop updates.
        batches: True: each item is a batch, whatever holds its indices (a list, a tuple, a ``range``, an array, an iterator, …). False:
            each item is one index, whatever it is; ``dataset[[0, 1]]`` where it is a list. None: True for a ``BatchSampler``, else
            False, and a list is refused.

    Raises:
        GraphError: ``sampler`` shards by itself, or is none; by `at`: the epoch is read in blocks.
        TypeError: On reading: ``batches=True``, and an item holds no indices.
        ValueError: On reading: nobody said what a list is; or an epoch goes on far behind the sampler's length.
        StateMismatch: On reading, after a reset to a state: the sampler does not give again what it gave before the state.
    """

    def __init__(self, sampler: Any, seed: int = 0, plan_ahead: bool = True, batches: bool | None = None) -> None:
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
        self.batches = True if batches is None and isinstance(sampler, BatchSampler) else batches
        self._maker = EpochPlanner(sampler, seed, batches=self.batches, draws=not self._owns, remembers=not self._owns)
        self._planner: AheadThread[Plan] | None = None
        self._plans_here = not plan_ahead
        self._sized = True
        self._told = any(hasattr(one, "set_epoch") for one in wrapped(sampler))
        self._lengths: dict[int, int | None] = {}
        self._warned = False
        self._blocks = False  # whether it was said that an epoch is read in blocks
        self._plan: Plan | None = None
        self._planned = 0  # the epoch of _plan
        self._midway = False  # the plan made last has more blocks
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
        if self._planned != self._epoch or (self._plan is not None and not self._plan.fits(self._position, self._checksum)):
            self._plan = None

    def next(self) -> Any:
        block = self.take(1)
        if not block:
            raise StopIteration
        return block[0]

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Sequence[Any]:
        plan = self._ready()
        start, target = self._position, self._position + n * every
        position, checksum = start, self._checksum
        parts = []
        while True:
            end = min(target, plan.end)
            checksum = plan.checksum(position, end, checksum)
            passed = max(0, -(-(position - start - first) // every))
            parts.append(self._items(plan, np.arange(start + first + passed * every, end, every)))
            position = end
            if position == target or not plan.more:
                break
            plan = self._block_after(plan)
        self._position, self._checksum = position, checksum
        return parts[0] if len(parts) == 1 else pack([item for part in parts for item in part])

    def at(self, positions: np.ndarray) -> Sequence[Any]:
        plan = self._ready()
        if plan.is_block:
            raise GraphError(
                f"{type(self.sampler).__name__} cannot be read by position, which tail='pad' needs. Use tail='drop' or tail='exact', "
                f"or give the sampler a __len__ if it has an end."
            )
        return self._items(plan, np.asarray(positions, np.int64))

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
        plan = self._plan if state["epoch"] == self._planned else None
        if plan is not None and not plan.more and position > plan.end:
            raise StateError(f"a state at position {position} is out of bounds: epoch {state['epoch']} has {plan.end} items.")

    @property
    def may_run_ahead(self) -> bool:
        return self.plan_ahead

    def interrupt(self) -> None:
        if self._planner is not None:
            self._planner.interrupt()

    def shutdown(self) -> None:
        if self._planner is not None:
            self._planner.shutdown()
        self._maker.close()
        if self._midway:
            self._plan = None  # Nobody reads on behind it.

    def _ready(self) -> Plan:
        """The plan of this epoch, which the state fits; the next one is ordered."""
        if self._plan is not None:
            return self._plan
        # Ordered as the next epoch, it is in the making whatever the task says; else it follows, or is a jump. An epoch that was not
        # read to its end has no follower: how far it was read ahead is chance.
        jumps = self._epoch != self._follows or self._midway
        plan = self._made(PlanRequest(self._epoch, self._position, self._checksum, jumps))
        self._midway = plan.more
        while plan.more and plan.end < self._position:
            plan = self._made(PlanRequest(self._epoch, begin=plan.end))
        if not plan.fits(self._position, self._checksum):
            here = self._position <= plan.end
            came = f"{plan.checksum(plan.begin, self._position, plan.before)}" if here else f"only {plan.end} items"
            raise StateMismatch(
                f"{type(self.sampler).__name__} does not give again what it gave in epoch {self._epoch} up to position {self._position}: the state has "
                f"the checksum {self._checksum}, and now there is {came}. Use the sampler, dataset and seed of the saved run, or begin a new epoch. A sampler that "
                f"remembers what it gave, by a generator of its own, say, and cannot be pickled, can only go forward: load the state into a new loader over a new sampler."
            )
        self._planned, self._follows = self._epoch, self._epoch + 1
        self._compare_length(plan)
        self._keep(plan)
        return plan

    def _block_after(self, plan: Plan) -> Plan:
        self._plan = None  # After an error this epoch is read from its start again, up to the position.
        plan = self._made(PlanRequest(self._epoch, begin=plan.end))
        self._keep(plan)
        return plan

    def _keep(self, plan: Plan) -> None:
        """Use ``plan``, and have the one made that will be asked for next."""
        self._plan, self._midway = plan, plan.more
        if plan.more and not self._blocks:
            self._blocks = True
            log.warning(
                f"{type(self.sampler).__name__} has no length, and has not ended after {plan.end} items: it is read in blocks while it is used. "
                f"How many items an epoch has stays unknown, and a resume reads the indices again from the epoch's start, but no sample."
            )
        if self._planner is not None:
            task = PlanRequest(self._epoch, begin=plan.end) if plan.more else PlanRequest(self._follows)
            self._planner.order((task.epoch, task.begin), task)

    def _made(self, task: PlanRequest) -> Plan:
        if self._planner is None and not self._plans_here:
            self._plans_here = not self._owns and not can_be_pickled(self.sampler)
            if not self._plans_here:
                self._planner = AheadThread(self._maker) if self._owns else self._helped()
        if self._planner is not None:
            return self._planner.get((task.epoch, task.begin), task)
        with neutral_modes():
            plan = self._maker(task)
        if self.plan_ahead and not plan.drew and not plan.is_block:
            self._maker.draws = False
            self._planner = AheadThread(self._maker)
        elif self.plan_ahead and plan.drew and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self.sampler).__name__} draws from the global random numbers and cannot be pickled, so that it is read between two epochs "
                f"and the workers wait for it. Give it a generator of its own, make it picklable, or say plan_ahead=False.",
                stacklevel=2,
            )
        return plan

    def _helped(self) -> AheadThread[Plan]:
        helper = HelperProcess(EpochPlanner(self.sampler, self.seed, batches=self.batches, draws=True, remembers=True, private=True))
        return AheadThread(helper, helper.end)

    def _items(self, plan: Plan, places: np.ndarray) -> Sequence[Any]:
        within = places - plan.begin
        if plan.starts is not None:
            return [self._batch(plan, plan.starts, *divmod(place, len(plan))) for place in within.tolist()]
        if within.size and within.max() >= len(plan):
            within %= len(plan)
        values = [plan.values[place] for place in within] if isinstance(plan.values, list) else plan.values[within]
        return Indices(self._epoch, places, values)

    def _batch(self, plan: Plan, starts: np.ndarray, lap: int, place: int) -> Indices:
        begin, end, samples = (int(starts[k]) for k in (place, place + 1, -1))
        return Indices(self._epoch, np.arange(begin, end) + (plan.samples + lap * samples), plan.values[begin:end])

    def _items_of(self, epoch: int) -> int | None:
        if self._plan is not None and self._planned == epoch:
            return len(self._plan) if self._sized and not self._plan.is_block else None
        return self._said(epoch) if self._sized else None

    def _said(self, epoch: int) -> int | None:
        """What ``len(sampler)`` is in ``epoch``: asked of a copy, where the sampler is told its epochs, because its length may follow them."""
        if not self._told:
            return length(self.sampler)
        if epoch not in self._lengths:
            with neutral_modes():
                said = length_in(self.sampler, epoch)
            self._lengths = {**dict(list(self._lengths.items())[-3:]), epoch: said}
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
