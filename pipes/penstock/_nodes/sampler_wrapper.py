"""SamplerWrapper: a torch sampler or batch sampler as the source of an epoch's indices."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch.utils.data import BatchSampler

from penstock._errors import GraphError, StateError, StateMismatch
from penstock._fetch.indices import Indices, pack
from penstock._memory.modes import neutral_modes
from penstock._nodes.distributed_sampler import refuse_sharded
from penstock._nodes.epoch_planner import EpochPlanner
from penstock._nodes.index_node import Facts, FirstNode
from penstock._nodes.length_book import LengthBook
from penstock._nodes.node import State, fields
from penstock._nodes.plan_source import PlanRequest, PlanSource
from penstock._random.orders import checked_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.epoch_plan import Plan

log = logging.getLogger("penstock")

_MADE = 64
"""Plans whose checksums are kept. If the graph runs further ahead of the loader, a plan must be made again to be compared."""


@final
class SamplerWrapper(FirstNode[Any]):
    """Read a torch sampler or batch sampler, epoch by epoch: single `Indices` from a sampler, batches of them from a batch sampler.

    Before each epoch ``set_epoch(epoch)`` is called on the sampler and on everything it wraps (``.batch_sampler``, ``.sampler``), which
    overrides a user's own calls. Everything it draws from is seeded from (seed, epoch): its ``generator``, and ``random``, ``numpy.random``
    and torch's CPU generator, which are restored afterwards.

    The indices of an epoch are its *plan*, with 8 bytes per sample. The next plan is made while this one is used. A sampler without a length
    may be endless. If it has not ended after 65,536 items (or, in batches, 2**20 samples), it is read in blocks of that size, one block ahead
    of the consumer, and the number of items in the epoch stays unknown.

    One of torch's own samplers is read in a thread. Any other may draw from the global generators while the user's code does, so a copy of it
    is read in a worker process. If it cannot be pickled, it is read here, between two epochs, with one warning (or in a thread, once it was
    seen not to draw from them).

    Resuming loads no sample: the sampler is read again from the start of the epoch, and the state has a checksum of the plan up to its
    position. A sampler with a memory, which yields a different plan when the same epoch is read again, first has to yield all earlier epochs.

    Args:
        sampler: A torch ``Sampler`` or ``BatchSampler``, or any iterable of indices, or of batches of them, that can be read again.
        seed: From 0 to 2**63 - 1.
        plan_ahead: False reads the sampler here, between two epochs, for a sampler that the training loop updates.
        batches: True: each item is a batch of indices of any kind (a list, a tuple, a ``range``, an array, an iterator, …). False: each
            item is one index of any kind; a list means ``dataset[[0, 1]]``. None: True for a ``BatchSampler``, otherwise False, and a list
            is refused.

    Raises:
        GraphError: ``sampler`` shards by itself, or cannot be read again. From `peek`: the epoch is read in blocks.
        TypeError: While reading: ``batches=True``, and an item holds no indices.
        ValueError: While reading: a list came with ``batches=None``; or an epoch runs far past the sampler's length.
        StateMismatch: While reading, after a reset to a state: the sampler did not reproduce what it yielded before the state.
    """

    __module__ = "penstock.nodes"

    def __init__(self, sampler: Any, seed: int = 0, plan_ahead: bool = True, batches: bool | None = None) -> None:
        refuse_sharded(sampler)
        if isinstance(sampler, Iterator) or not (hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")):
            raise GraphError(
                f"{type(sampler).__name__} cannot be read once for each epoch, as a sampler must. Pass an object with __iter__, such as a list."
            )
        self.sampler = sampler
        self.seed = checked_seed(seed)
        self.plan_ahead = plan_ahead
        self.batches = True if batches is None and isinstance(sampler, BatchSampler) else batches
        self._planner = EpochPlanner(sampler, seed, batches=self.batches, plan_ahead=plan_ahead)
        self._plans = PlanSource(self._planner)
        self._lengths = LengthBook(sampler)
        self._logged = False
        self._ready: tuple[PlanRequest, Plan] | None = None  # made for `upcoming`, and not used yet
        self._made: tuple[
            tuple[int, int, int, int], ...
        ] = ()  # of the last plans: epoch, first position, the position after the last, `Plan.said`
        self._held: tuple[int, Plan] | None = None  # an epoch, and its plan or the block in use
        self._follows: State | None = None  # the last returned place, which fits the current plan
        settings = {"order": f"{type(sampler).__module__}.{type(sampler).__qualname__}", "seed": self.seed}
        super().__init__(Facts(settings, may_run_ahead=plan_ahead))

    def details(self) -> dict[str, Any]:
        return {"sampler": self.sampler, "batches": self.batches is True, "seed": self.seed}

    def start(self, epoch: int, after: State | None = None) -> State:
        return {"epoch": epoch, "position": 0, "checksum": 0}

    def left(self, place: State) -> int | None:
        items = self._lengths.items(place["epoch"], self._plan_of(place["epoch"]))
        return None if items is None else max(items - place["position"], 0)

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Any], State]:
        epoch, position, checksum = place["epoch"], place["position"], place["checksum"]
        plan = self._plan_at(epoch, position, checksum, fits=place is self._follows)
        start, target = position, position + n * every
        parts = []
        while True:
            end = min(target, plan.end)
            checksum = plan.checksum(position, end, checksum)
            passed = max(0, -(-(position - start - first) // every))  # picks that lie in earlier blocks
            parts.append(_items(epoch, plan, np.arange(start + first + passed * every, end, every)))
            position = end
            if position == target or not plan.more:
                break
            plan = self._plan_at(epoch, position, checksum, fits=True)
        if position != start:
            place = {"epoch": epoch, "position": position, "checksum": checksum}
        self._follows = place
        return parts[0] if len(parts) == 1 else pack([item for part in parts for item in part]), place

    def peek(self, place: State, positions: np.ndarray) -> Sequence[Any]:
        plan = self._plan_at(place["epoch"], place["position"], place["checksum"], fits=place is self._follows)
        if plan.is_block:
            raise GraphError(f"{type(self.sampler).__name__}, which has no __len__, cannot be read by position")
        return _items(place["epoch"], plan, np.asarray(positions, np.int64))

    def check(self, state: Any) -> None:
        position = fields(state, epoch=int, position=int, checksum=int)["position"]
        plan = self._plan_of(state["epoch"])
        if plan is not None and not plan.more and position > plan.end:
            raise StateError(
                f"a state at position {position} is out of bounds: epoch {state['epoch']} has {plan.end} items. Was it saved with another sampler or dataset?"
            )

    def seek(self, place: State) -> State:
        self._plans.resume()
        # The current plan may be from another run, or an earlier block; then request it again, and compare.
        held = self._plan_of(place["epoch"])
        if held is None or not held.fits(place["position"], place["checksum"]):
            self._held = None
        return place

    def known(self, state: State) -> int | None:
        """`Plan.said` of the plan that will be read from ``state`` on, if it was made already. Thread-safe."""
        epoch, position = state["epoch"], state["position"]
        ready = self._ready
        if ready is not None and ready[0] == PlanRequest(**state):
            return ready[1].said
        # If the training loop updates the sampler, earlier plans are meaningless; only the one in use counts.
        made = self._made if self.plan_ahead else self._made[-1:] if self._plan_of(epoch) is not None else ()
        return next((said for known, begin, end, said in reversed(made) if known == epoch and begin <= position < end), None)

    def upcoming(self, state: State) -> int | None:
        """`Plan.said` of the plan that will be read from ``state`` on, which is made now. None if making the plan would change it.

        No other thread may be reading; see `ReaderNode.still`. The plan is kept for the next read from ``state``. A sampler that is read in
        this process is copied first, because the user may change it, or load a state to which it could not return.
        """
        self.check(state)
        request = PlanRequest(**state)
        self._plans.resume()
        if self._planner.place == "here":
            with neutral_modes():
                trial = self._planner.trial(request)
            return None if trial is None else trial.said
        plan = self._plans.get(request)
        self._ready = request, plan
        return plan.said

    def note(self, place: State) -> tuple[int, ...]:
        held = self._held
        if held is None or not _reads_alike(held[1].values):
            return ()
        said = self.known(place)
        return () if said is None else (said,)

    def interrupt(self) -> None:
        self._plans.interrupt()

    def shutdown(self) -> None:
        self._plans.shutdown()
        self._planner.close()

    def _plan_of(self, epoch: int) -> Plan | None:
        held = self._held
        return held[1] if held is not None and held[0] == epoch else None

    def _plan_at(self, epoch: int, position: int, checksum: int, *, fits: bool) -> Plan:
        """The plan of ``epoch``, or the block with the item at ``position``. Samples before it must have ``checksum``. Requests the next plan.

        Args:
            epoch: The epoch.
            position: The position of the reader.
            checksum: Checksum of the samples before it.
            fits: Those samples are known to be in the current plan.
        """
        plan = self._plan_of(epoch)
        if plan is not None and (position < plan.end or not plan.more) and (fits or plan.fits(position, checksum)):
            return plan
        request, ready = PlanRequest(epoch, position, checksum), self._ready
        self._ready = None
        plan = ready[1] if ready is not None and ready[0] == request else self._plans.get(request)
        if not plan.fits(position, checksum):
            here = position <= plan.end
            came = f"it is {plan.checksum(plan.begin, position, plan.before)}" if here else f"there are only {plan.end} items"
            raise StateMismatch(
                f"{type(self.sampler).__name__} did not reproduce what it yielded in epoch {epoch} up to position {position}: the state has "
                f"the checksum {checksum}, and now {came}. Use the sampler, dataset and seed of the saved run, or begin a new epoch. A sampler that "
                f"keeps state (such as its own generator) and can be neither pickled nor copied can only move forward: load the state into a new loader over a new sampler."
            )
        self._held = epoch, plan
        self._made = (*self._made[1 - _MADE :], (epoch, plan.begin, plan.end if plan.more else 2**63, plan.said))
        self._lengths.compare(epoch, plan)
        if plan.more and not self._logged:
            self._logged = True
            log.warning(
                f"{type(self.sampler).__name__} has no length and has not ended after {plan.end} items, so it is read in blocks while it is used. "
                f"The number of items in an epoch stays unknown, and a resume reads the indices again from the epoch's start, but no sample."
            )
        self._plans.order(plan.next_request(epoch))
        return plan


def _reads_alike(values: Any) -> bool:
    """Whether equal samples have the same checksum in every process. By default, the text of an object has its address in memory."""
    return not isinstance(values, list) or all(map(_is_plain, values[:: 1 + len(values) // 256]))


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | bytes | np.generic)


def _items(epoch: int, plan: Plan, places: np.ndarray) -> Sequence[Any]:
    within = places - plan.begin
    if plan.starts is not None:
        return [_batch(epoch, plan, plan.starts, *divmod(place, len(plan))) for place in within.tolist()]
    if within.size and within.max() >= len(plan):
        within %= len(plan)
    values = [plan.values[place] for place in within] if isinstance(plan.values, list) else plan.values[within]
    return Indices(epoch, places, values)


def _batch(epoch: int, plan: Plan, starts: np.ndarray, lap: int, place: int) -> Indices:
    begin, end, samples = (int(starts[k]) for k in (place, place + 1, -1))
    return Indices(epoch, np.arange(begin, end) + (plan.samples + lap * samples), plan.values[begin:end])
