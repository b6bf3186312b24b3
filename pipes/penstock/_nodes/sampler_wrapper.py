"""SamplerWrapper: a torch sampler or batch sampler as the source of an epoch's indices."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
from torch.utils.data import BatchSampler

from penstock._errors import GraphError, Once, StateError, StateMismatch
from penstock._fetch.dataset_facts import length
from penstock._fetch.first_items import reads_alike
from penstock._fetch.indices import Indices, pack
from penstock._memory.modes import neutral_modes
from penstock._nodes.distributed_sampler import refuse_sharded
from penstock._nodes.epoch_planner import EpochPlanner
from penstock._nodes.index_node import Facts, FirstNode, check_positions
from penstock._nodes.node import State, fields
from penstock._nodes.plan_source import PlanRequest, PlanSource
from penstock._nodes.sampler_traits import copied, tell, told_by
from penstock._random.orders import checked_seed
from penstock._workers.reader_thread import reads_ahead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.epoch_plan import Plan

log = logging.getLogger("penstock")

_MADE = 64
"""Plans whose checksums are kept. If the graph runs further ahead of the loader, a plan must be made again to be
compared.
"""


@final
class SamplerWrapper(FirstNode[Any]):
    """Read a torch sampler or batch sampler, epoch by epoch: single `Indices` from a sampler, batches of them from a
    batch sampler.

    **An epoch is what the sampler holds when the loop asks for its first batch**, as with a ``DataLoader``. At that
    moment ``set_epoch(epoch)`` is called on the sampler and on everything it wraps (``.batch_sampler``, ``.sampler``).
    Everything it draws from is seeded from (seed, epoch): its ``generator``, and ``random``, ``numpy.random`` and
    torch's CPU generator, which are restored afterwards.

    The indices of an epoch are its *plan*, with 8 bytes per sample. The next plan is made from a copy of the sampler
    while this one is used. When the next epoch begins, the copy is compared with the sampler. If they differ, the plan
    and the batches loaded from it are dropped, and the log says so once. A sampler that cannot be compared whole (it
    holds an open file, a lock, a large dataset) is read when its epoch begins, and nothing of that epoch is loaded
    before. The same applies to the epoch after one for which the sampler was changed.

    Plans are made ahead in a thread. If the sampler draws from the global generators, they are made in the thread that
    reads the node.

    A sampler without a length may be endless. If it has not ended after 65,536 items (or, in batches, 2**20 samples),
    it is read in blocks of that size, one block ahead of the consumer, and the number of items in the epoch stays
    unknown.

    Resuming loads no sample: the sampler is read again from the start of the epoch, and the state has a checksum of the
    plan up to its position. A sampler with a memory, which yields a different plan when the same epoch is read again,
    first has to yield all earlier epochs.

    Args:
        sampler: A torch ``Sampler`` or ``BatchSampler``, or any iterable of indices, or of batches of them, that can be
            read again.
        seed: From 0 to 2**63 - 1.
        plan_ahead: False reads the sampler itself, and only when its epoch begins.
        batches: True: each item is a batch of indices of any kind (a list, a tuple, a ``range``, an array, an iterator,
            …). False: each item is one index of any kind; a list means ``dataset[[0, 1]]``. None: True for a
            ``BatchSampler``, otherwise False, and a list is refused.
        split: ``"items"``: the sampler yields the indices of all ranks. ``"own"``: it yields those of this rank, and a
            `Sharder` passes them on unchanged. States then have no checksum, and load at the same world size.
        infinite: The sampler may never end, although it has a length.

    Raises:
        GraphError: ``sampler`` shards by itself although ``split="items"``, or cannot be read again. From `peek`: the
            epoch is read in blocks.
        TypeError: While reading: ``batches=True``, and an item holds no indices.
        ValueError: While reading: a list came with ``batches=None``; or an epoch runs far past the sampler's length.
        StateMismatch: While reading, after a reset to a state: the sampler did not reproduce what it yielded before the
            state.
    """

    __module__ = "penstock.nodes"

    def __init__(
        self,
        sampler: Any,
        seed: int = 0,
        plan_ahead: bool = True,
        batches: bool | None = None,
        *,
        split: Literal["items", "own"] = "items",
        infinite: bool = False,
    ) -> None:
        if split not in ("items", "own"):
            raise ValueError(f"split={split!r} must be 'items' or 'own'.")
        if split == "items":
            refuse_sharded(sampler)
        if isinstance(sampler, Iterator) or not (hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")):
            raise GraphError(
                f"{type(sampler).__name__} cannot be read once for each epoch, as a sampler must. Pass an object with "
                f"__iter__, such as a list."
            )
        self.sampler = sampler
        self.seed = checked_seed(seed)
        self.plan_ahead = plan_ahead
        self.batches = True if batches is None and isinstance(sampler, BatchSampler) else batches
        self._own = split == "own"
        self._infinite = infinite
        # of what the sampler was when an epoch began; made when it is first needed
        self._planner: EpochPlanner | None = None
        self._plans: PlanSource[Plan] = PlanSource()
        self._is_sized = True  # false once an epoch had another length than the sampler says
        self._lengths: dict[int, int | None] = {}  # what it says for each of the last epochs that were asked for
        self._once = Once()
        self._begun = -1  # the epoch that the loop has asked for
        self._changed = False  # the sampler was changed for that epoch
        # plans that are to be checked when the loop waits; see `EpochPlanner.is_certain`
        self._unsure: list[tuple[int, Plan]] = []
        # of the last plans: epoch, first position, the position after the last, `Plan.said`
        self._made: tuple[tuple[int, int, int, int], ...] = ()
        # an epoch, its plan or the block in use, and where that came from
        self._held: tuple[int, Plan, EpochPlanner] | None = None
        self._looked_up: tuple[int, Plan] | None = None  # an epoch and its plan, for `at`
        self._follows: State | None = None  # the last returned place, which fits the current plan
        settings = {"order": f"{type(sampler).__module__}.{type(sampler).__qualname__}", "seed": self.seed}
        super().__init__(Facts(settings, sharded_by=split))

    def details(self) -> dict[str, Any]:
        return {"sampler": self.sampler, "batches": self.batches is True, "seed": self.seed}

    @property
    def told(self) -> Sequence[Any]:
        return [self.sampler]

    @property
    def runs_ahead(self) -> bool:
        planner = self._planned()
        return planner.pristine is not None and not self._changed and not (planner.place == "here" and reads_ahead())

    def begin(self, place: State) -> bool:
        planner, epoch, held = self._planner, place["epoch"], self._held
        self._begun, self._changed = epoch, False
        if planner is None:
            return True
        if planner.pristine is None:  # the sampler itself is read, and was not read ahead
            if not place["position"]:
                self._held = None
            return True
        unsure, self._unsure = self._unsure, []
        self._changed = not planner.holds(self.sampler, epoch)
        if not self._changed and all(planner.is_certain(at, plan) for at, plan in unsure):
            return True
        self._planner, self._made, self._lengths = None, (), {}
        if self._changed and held is not None and held[2] is planner and held[0] >= epoch and self._once("changed"):
            log.warning(
                "%s was changed after batches of epoch %d had been loaded from a copy of it. They were dropped, and "
                "are loaded again. To load nothing ahead of such an epoch, pass plan_ahead=False.",
                *(type(self.sampler).__name__, epoch),
            )
        return False

    def start(self, epoch: int, after: State | None = None) -> State:
        return {"epoch": epoch, "position": 0, "checksum": 0}

    def left(self, place: State) -> int | None:
        if not self._is_sized:
            return None
        plan = self._plan_of(place["epoch"])
        items = self._length(place["epoch"]) if plan is None else None if plan.is_block else len(plan)
        return None if items is None else max(items - place["position"], 0)

    def claimed(self, epoch: int) -> int | None:
        if epoch > self._begun and self._is_sized and not told_by(self.sampler):
            return length(self.sampler)  # what it holds now, and not what was planned ahead
        return super().claimed(epoch)

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Any], State]:
        epoch, position, checksum = place["epoch"], place["position"], place["checksum"]
        plan = self._plan_at(epoch, position, checksum, fits=place is self._follows)
        start, target = position, position + n * every
        parts = []
        while True:
            end = min(target, plan.end)
            checksum = 0 if self._own else plan.checksum(position, end, checksum)
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
            why = "has no __len__" if length(self.sampler) is None else "has no end"
            raise GraphError(f"{type(self.sampler).__name__}, which {why}, cannot be read by position")
        return _items(place["epoch"], plan, np.asarray(positions, np.int64))

    def at(self, epoch: int, positions: np.ndarray, *, wraps: bool = False) -> Sequence[Indices]:
        plan = self._plan_of(epoch)
        if plan is None or plan.is_block:
            if self._looked_up is None or self._looked_up[0] != epoch:
                planner = self._another()
                if planner is None:
                    raise GraphError(
                        f"{type(self.sampler).__name__} cannot be copied or may change (plan_ahead=False), so only the "
                        f"epoch that it is in can be read by position"
                    )
                with neutral_modes():
                    self._looked_up = epoch, planner(PlanRequest(epoch))
            plan = self._looked_up[1]
        if plan.is_block:
            raise GraphError(
                f"{type(self.sampler).__name__}, which has no end or no __len__, cannot be read by position"
            )
        items = len(plan.values)
        check_positions(epoch, positions, items, wraps=wraps)
        within = positions % max(1, items)
        return Indices(
            epoch, positions, [plan.values[k] for k in within] if isinstance(plan.values, list) else plan.values[within]
        )

    def check(self, state: Any) -> None:
        position = fields(state, epoch=int, position=int, checksum=int)["position"]
        plan = self._plan_of(state["epoch"])
        if plan is not None and not plan.more and position > plan.end:
            raise StateError(
                f"a state at position {position} is out of bounds: epoch {state['epoch']} has {plan.end} items. Was it "
                f"saved with another sampler or dataset?"
            )

    def seek(self, place: State) -> State:
        self._plans.resume()
        # The current plan may be from another run, or an earlier block; then request it again, and compare.
        held = self._plan_of(place["epoch"])
        if held is None or not held.fits(place["position"], self._request(place).checksum):
            self._held = None
        return place

    def known(self, state: State) -> int | None:
        """`Plan.said` of the plan that will be read from ``state`` on, if it was made already. Thread-safe."""
        epoch, position, planner = state["epoch"], state["position"], self._planner
        # If the sampler itself is read, the loop may change it: earlier plans are meaningless, and only the one in use
        # counts.
        is_copy = planner is not None and planner.pristine is not None
        made = self._made if is_copy else self._made[-1:] if self._plan_of(epoch) is not None else ()
        return next(
            (said for known, begin, end, said in reversed(made) if known == epoch and begin <= position < end), None
        )

    def upcoming(self, state: State) -> int | None:
        """The same, of a plan that is made now, from another copy of the sampler. None if it cannot be copied."""
        self.check(state)
        planner = self._another()
        with neutral_modes():
            return None if planner is None else planner(self._request(state)).said

    def note(self, place: State, *, again: bool = False) -> tuple[int, ...]:
        held = self._held
        if held is None or not _read_alike(held[1].values):
            return ()
        said = self.known(place)
        return () if said is None else (said,)

    def interrupt(self) -> None:
        self._plans.interrupt()

    def shutdown(self) -> None:
        self._plans.shutdown()
        if self._planner is not None:
            self._planner.close()

    def _planned(self) -> EpochPlanner:
        if (planner := self._planner) is None:
            planner = EpochPlanner(
                self.sampler, self.seed, batches=self.batches, infinite=self._infinite, plan_ahead=self.plan_ahead
            )
            self._planner, self._lengths, self._looked_up = planner, {}, None
        return planner

    def _another(self) -> EpochPlanner | None:
        """A planner beside the one that is in use, over another copy; see `EpochPlanner.anew`."""
        return self._planned().anew()

    def _length(self, epoch: int) -> int | None:
        """What the sampler says about its length, from a copy that is told ``epoch``, because the length may depend on
        it.
        """
        planner = self._planner
        sampler = self.sampler if planner is None or planner.pristine is None else planner.pristine
        if not told_by(sampler):
            return length(sampler)
        if epoch not in self._lengths:
            with neutral_modes():
                if (other := copied(sampler, shares_data=True)) is not None:
                    tell(other, epoch, seeded=not reads_ahead())
                said = length(sampler if other is None else other)
            self._lengths = {**dict(list(self._lengths.items())[-3:]), epoch: said}
        return self._lengths[epoch]

    def _compare_length(self, epoch: int, plan: Plan) -> None:
        """Warn, once, if ``plan`` shows that the sampler's length is wrong; then all lengths are unknown."""
        said = self._length(epoch) if self._is_sized else None
        if said is None or said == len(plan):
            return
        self._is_sized = False
        if not plan.is_block:  # such a one may be infinite
            warnings.warn(
                f"{type(self.sampler).__name__} has a length of {said}, but epoch {epoch} has {len(plan)} items. From "
                f"now on the length counts as unknown. Make __len__ agree with __iter__.",
                stacklevel=2,
            )

    def _request(self, place: State) -> PlanRequest:
        return PlanRequest(place["epoch"], place["position"], None if self._own else place["checksum"])

    def _plan_of(self, epoch: int) -> Plan | None:
        held = self._held
        return held[1] if held is not None and held[0] == epoch and held[2] is self._planner else None

    def _plan_at(self, epoch: int, position: int, checksum: int, *, fits: bool) -> Plan:
        """The plan of ``epoch``, or the block with the item at ``position``.

        Samples before it must have ``checksum``. Requests the next plan.

        Args:
            epoch: The epoch.
            position: The position of the reader.
            checksum: Checksum of the samples before it.
            fits: Those samples are known to be in the current plan.
        """
        plan, request = (
            self._plan_of(epoch),
            self._request({"epoch": epoch, "position": position, "checksum": checksum}),
        )
        if (
            plan is not None
            and (position < plan.end or not plan.more)
            and (fits or plan.fits(position, request.checksum))
        ):
            return plan
        planner = self._planned()
        plan = self._plans.get(planner, request)
        if not plan.fits(position, request.checksum):
            raise StateMismatch(self._misfit(epoch, position, checksum, plan))
        if plan.drew and epoch > self._begun:
            self._unsure.append((epoch, plan))  # until the loop asks for it
        elif not planner.is_certain(epoch, plan):
            self._planner = None
            return self._plan_at(epoch, position, checksum, fits=fits)
        self._held = epoch, plan, planner
        self._made = (*self._made[1 - _MADE :], (epoch, plan.begin, plan.end if plan.more else 2**63, plan.said))
        self._compare_length(epoch, plan)
        if plan.more and self._once("has not ended"):
            log.warning(
                f"{type(self.sampler).__name__} has not ended after {plan.end} items, so it is read in blocks while it "
                f"is used. The number of items in an epoch stays unknown, and a resume reads the indices again from "
                f"the epoch's start, but no sample."
            )
        if planner.pristine is not None and (plan.more or not self._changed):
            following = plan.next_request(epoch)
            self._plans.order(planner, following._replace(checksum=None) if self._own and plan.more else following)
        return plan

    def _misfit(self, epoch: int, position: int, checksum: int, plan: Plan) -> str:
        name = type(self.sampler).__name__
        if self._own:
            return (
                f"the state counts {position} items of epoch {epoch}, but the share that {name} yields on this rank "
                f"has {plan.end}. If the ranks have shares of different lengths, save the states of all ranks, and "
                f"load the one that this rank saved."
            )
        came = (
            f"it is {plan.checksum(plan.begin, position, plan.before)}"
            if position <= plan.end
            else f"there are only {plan.end} items"
        )
        return (
            f"{name} did not reproduce what it yielded in epoch {epoch} up to position {position}: the state has the "
            f"checksum {checksum}, and now {came}. Use the sampler, dataset and seed of the saved run, or begin a new "
            f"epoch. A sampler that keeps state (such as its own generator) and can be neither copied nor compared can "
            f"only move forward: load the state into a new loader over a new sampler."
        )


def _read_alike(values: Any) -> bool:
    """Whether equal samples have the same checksum in every process."""
    return not isinstance(values, list) or all(map(reads_alike, values[:: 1 + len(values) // 256]))


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
