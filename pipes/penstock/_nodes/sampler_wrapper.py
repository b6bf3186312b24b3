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
from penstock._nodes.index_node import Facts, FirstNode, check_positions
from penstock._nodes.node import State, fields
from penstock._nodes.plan_source import PlanRequest, PlanSource
from penstock._nodes.sampler_epochs import SamplerCopy, SamplerEpoch
from penstock._nodes.sampler_reading import Reading
from penstock._nodes.sampler_traits import copied, owns_its_randomness, same_settings, settings_of, tell, told_by
from penstock._random.orders import Forgotten, checked_seed
from penstock._workers.reader_thread import reads_ahead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._nodes.epoch_plan import Plan

log = logging.getLogger("penstock")


@final
class SamplerWrapper(FirstNode[Any]):
    """Read a torch sampler or batch sampler, epoch by epoch: single `Indices` from a sampler, batches of them from a
    batch sampler.

    **An epoch is what the sampler yields when the loop asks for its first batch**, as with a ``DataLoader``. At that
    moment it is read, in the loop's thread, and nothing of the epoch is loaded before, unless ``plan_ahead=True``. Its
    ``set_epoch``, and that of what it wraps (``.batch_sampler``, ``.sampler``), is called at the end of each epoch with
    the number of the next, so your own call afterwards is the last. Everything it draws from is seeded from (seed,
    epoch): its ``generator``, and ``random``, ``numpy.random`` and torch's CPU generator, which are restored
    afterwards.

    The indices of an epoch take 8 bytes per sample. torch's own samplers (``RandomSampler``, ``SequentialSampler``,
    ``SubsetRandomSampler``, ``WeightedRandomSampler``, and ``BatchSampler`` of them) are read ahead in a thread, from a
    copy. If their settings have changed when the epoch begins, what was loaded from the copy is dropped, and the log
    says so once.

    A sampler without a length may be endless. If it has not ended after 65,536 items (or, in batches, 2**20 samples),
    it is read in blocks of that size, and the number of items in the epoch stays unknown.

    Resuming loads no sample: the sampler is read again from the start of the epoch, and the state has a checksum of
    what it had yielded. A sampler without a ``set_epoch`` may remember what it has yielded, so it first has to yield
    all earlier epochs, and cannot be moved back in one process.

    Args:
        sampler: A torch ``Sampler`` or ``BatchSampler``, or any iterable of indices, or of batches of them, that can be
            read again.
        seed: From 0 to 2**63 - 1.
        plan_ahead: You declare that the order depends on nothing but the sampler's ``set_epoch``. Then the next epoch
            is read from a copy during this one, and not compared.
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
        plan_ahead: bool = False,
        batches: bool | None = None,
        *,
        split: Literal["items", "own"] = "items",
        infinite: bool = False,
    ) -> None:
        if split not in ("items", "own"):
            raise ValueError(f"split={split!r} must be 'items' or 'own'.")
        if split == "items":
            refuse_sharded(sampler)
        is_spent = isinstance(sampler, Iterator) and type(sampler).__module__ in ("builtins", "itertools")
        if is_spent or not (hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")):
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
        self._is_torchs = owns_its_randomness(sampler)
        # else an epoch may depend on those that the sampler has yielded before
        self.begins_once = not (self._is_torchs or plan_ahead or told_by(sampler))
        self._is_sized = True  # false once an epoch had another length than the sampler says
        self._lengths: dict[int, int | None] = {}  # what it says for each of the last epochs that were asked for
        self._once = Once()
        self._is_begun = False  # a loader reads it, which tells the sampler its epochs
        self._next = 0  # the epoch that comes next, if the sampler remembers what it has yielded
        self._current: SamplerEpoch | None = None  # what is read
        self._copy: SamplerCopy | None = None  # where that comes from; None: the sampler itself
        self._settings: list[Any] = []  # of torch's samplers, when they were copied
        self._plans: PlanSource[SamplerEpoch] = PlanSource()
        self._looked_up: SamplerEpoch | None = None  # for `at`
        self._follows: State | None = None  # the last returned place, which fits what was read
        settings = {"order": f"{type(sampler).__module__}.{type(sampler).__qualname__}", "seed": self.seed}
        super().__init__(Facts(settings, sharded_by=split))

    def details(self) -> dict[str, Any]:
        return {"sampler": self.sampler, "batches": self.batches is True, "seed": self.seed}

    @property
    def told(self) -> Sequence[Any]:
        return [self.sampler]

    @property
    def runs_ahead(self) -> bool:
        return self._copy is not None and not (self._copy.place == "here" and reads_ahead())

    def begin(self, place: State) -> bool:
        epoch, known, copy = place["epoch"], self._current, self._copy
        self._plans.resume()
        self._is_begun, self._lengths, self._looked_up = True, {}, None
        if copy is not None and (not self._is_torchs or same_settings(settings_of(self.sampler), self._settings)):
            return True
        if self._is_torchs or self.plan_ahead:
            self._current = None
            self._copy_sampler()
            if copy is not None and self._once("changed"):
                log.warning(
                    "%s was changed before epoch %d began. What was loaded from a copy of it is dropped, and loaded "
                    "again.",
                    *(type(self.sampler).__name__, epoch),
                )
            if self._copy is not None:
                return copy is None
        if known is None or known.epoch != epoch or not (place["position"] and self._fits(known, place)):
            self._take(self._read(epoch))
            if epoch and self.has_workers and self._once("gap"):
                log.info(
                    "%s is read when an epoch begins, and nothing of that epoch is loaded before. If its order depends "
                    "on nothing but its set_epoch, pass plan_ahead=True; an order (order=) needs no declaration.",
                    type(self.sampler).__name__,
                )
            return known is None or known.epoch != epoch
        return True

    def start(self, epoch: int, after: State | None = None) -> State:
        return {"epoch": epoch, "position": 0, "checksum": 0}

    def left(self, place: State) -> int | None:
        if not self._is_sized:
            return None
        known = self._of(place["epoch"])
        items = self._length(place["epoch"]) if known is None else len(known.blocks[0]) if known.whole else None
        return None if items is None else max(items - place["position"], 0)

    def claimed(self, epoch: int) -> int | None:
        return length(self.sampler) if self._is_sized and not told_by(self.sampler) else super().claimed(epoch)

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
        known = self._of(epoch) or self._looked_up
        if known is None or known.epoch != epoch:
            known = self._looked_up = self._copied(epoch)
        if known is None:
            raise Forgotten(
                f"{type(self.sampler).__name__} cannot be copied, or has no set_epoch and may remember what it has "
                f"yielded, so only the epoch that it is in can be read by position"
            )
        if not known.whole:
            raise GraphError(
                f"{type(self.sampler).__name__}, which has no end or no __len__, cannot be read by position"
            )
        values = known.blocks[0].values
        check_positions(epoch, positions, len(values), wraps=wraps)
        within = positions % max(1, len(values))
        return Indices(epoch, positions, [values[k] for k in within] if isinstance(values, list) else values[within])

    def check(self, state: Any) -> None:
        position = fields(state, epoch=int, position=int, checksum=int)["position"]
        known = None if self._own else self._of(state["epoch"])
        if known is not None and not known.blocks[-1].more and position > known.blocks[-1].end:
            raise StateError(
                f"a state at position {position} is out of bounds: epoch {state['epoch']} has {known.blocks[-1].end} "
                f"items. Was it saved with another sampler or dataset?"
            )

    def seek(self, place: State) -> State:
        self._plans.resume()
        known = self._of(place["epoch"])
        if known is not None and not self._fits(known, place):
            self._current = None  # of another run, or no longer in memory; it is read again, and compared
        return place

    def known(self, state: State) -> int | None:
        """A checksum of the block that will be read from ``state`` on, if it was read already. Thread-safe."""
        known = self._of(state["epoch"])
        block = None if known is None else known.kept(state["position"])
        return None if block is None else block.signature()

    def upcoming(self, state: State) -> int | None:
        """The same, read now, from a copy. None if a copy could be wrong; see `at`."""
        self.check(state)
        known = self._copied(state["epoch"])
        block = None if known is None else known.at(state["position"])
        return None if block is None else block.signature()

    def note(self, place: State, *, again: bool = False) -> tuple[int, ...]:
        known = self._of(place["epoch"])
        if known is None or not _read_alike(known.blocks[0].values):
            return ()
        said = self.known(place)
        return () if said is None else (said,)

    def interrupt(self) -> None:
        self._plans.interrupt()

    def shutdown(self) -> None:
        self._plans.shutdown()
        if self._current is not None:
            self._current.close()

    # Reading the sampler.

    def _of(self, epoch: int) -> SamplerEpoch | None:
        """What was read of ``epoch``."""
        return current if (current := self._current) is not None and current.epoch == epoch else None

    def _fits(self, known: SamplerEpoch, place: State) -> bool:
        """Whether ``place`` may be in what was read; what lies behind that is compared when it is read."""
        position: int = place["position"]
        block = known.kept(position)
        if block is None:
            return position >= known.blocks[-1].end
        return block.fits(position, None if self._own else place["checksum"])

    def _take(self, known: SamplerEpoch) -> None:
        """Read from ``known`` from now on. Warn, once, if it shows that the sampler's length is wrong, or unknown."""
        first, name = known.blocks[0], type(self.sampler).__name__
        self._current, said = known, self._length(known.epoch) if self._is_sized else None
        if said is not None and said != len(first):
            self._is_sized = False  # then all lengths are unknown
            if known.whole:  # else it may be infinite
                warnings.warn(
                    f"{name} has a length of {said}, but epoch {known.epoch} has {len(first)} items. From now on the "
                    f"length counts as unknown. Make __len__ agree with __iter__.",
                    stacklevel=2,
                )
        if not known.whole and self._once("has not ended"):
            log.warning(
                f"{name} has not ended after {first.end} items, so it is read in blocks while it is used. The number "
                f"of items in an epoch stays unknown, and a resume reads the indices again from the epoch's start, but "
                f"no sample."
            )

    def _copy_sampler(self) -> None:
        """From now on read a copy of what the sampler is now, if it can be copied."""
        with neutral_modes():
            other = copied(self.sampler)
        self._copy = None if other is None else self._reader_of(other)
        self._settings = settings_of(self.sampler) if self._is_torchs else []

    def _copied(self, epoch: int) -> SamplerEpoch | None:
        """``epoch`` from a copy; None if there is none, or if it could yield something else."""
        with neutral_modes():
            other = None if self.begins_once else copied(self.sampler)
        return None if other is None else self._reader_of(other)(PlanRequest(epoch))

    def _reader_of(self, copy: Any) -> SamplerCopy:
        return SamplerCopy(copy, self.seed, batches=self.batches, infinite=self._infinite)

    def _read(self, epoch: int) -> SamplerEpoch:
        """Read ``epoch`` of the user's own sampler, which was told it."""
        if self._current is not None:
            self._current.close()
        if self.begins_once and epoch < self._next:
            log.warning(
                "%s may remember what it has yielded, and cannot be moved back, so epoch %d is what it yields next. "
                "Give it a set_epoch, or load the state into a new loader over a new sampler.",
                *(type(self.sampler).__name__, epoch),
            )
        for earlier in range(self._next, epoch if self.begins_once else 0):
            self._open(earlier).replay()
        found = self._open(epoch)
        self._next = epoch + 1
        return found

    def _open(self, epoch: int) -> SamplerEpoch:
        with neutral_modes():
            reading = Reading(
                self.sampler,
                self.seed,
                epoch,
                batches=self.batches,
                infinite=self._infinite,
                draws=True,
                tells=not self._is_begun,
            )
        return SamplerEpoch(reading, type(self.sampler).__name__)

    def _length(self, epoch: int) -> int | None:
        """What the sampler says about its length, from a copy that is told ``epoch``, because the length may depend on
        it.
        """
        if not told_by(self.sampler):
            return length(self.sampler)
        if epoch not in self._lengths:
            with neutral_modes():
                if (other := copied(self.sampler)) is not None:
                    tell(other, epoch, seeded=not reads_ahead())
                said = length(self.sampler if other is None else other)
            self._lengths = {**dict(list(self._lengths.items())[-3:]), epoch: said}
        return self._lengths[epoch]

    def _plan_at(self, epoch: int, position: int, checksum: int, *, fits: bool) -> Plan:
        """What was read of ``epoch``, or the block with the item at ``position``. Orders the next epoch.

        Args:
            epoch: The epoch.
            position: The position of the reader.
            checksum: What samples before it must have, unless they are known to fit.
            fits: They are known to.
        """
        known = self._of(epoch)
        plan = None if known is None else known.at(position)
        if plan is None:  # not begun by a loader, or no longer in memory
            if self._copy is None and (self._is_torchs or self.plan_ahead):
                self._copy_sampler()
            known = self._read(epoch) if self._copy is None else self._plans.get(self._copy, PlanRequest(epoch))
            plan, fits = known.at(position), False
            assert plan is not None
            self._take(known)
            if self._copy is not None and known.whole:
                self._plans.order(self._copy, PlanRequest(epoch + 1))
        if not fits and not plan.fits(position, None if self._own else checksum):
            raise StateMismatch(self._misfit(epoch, position, checksum, plan))
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
            f"epoch. A sampler that remembers what it has yielded can only move forward: load the state into a new "
            f"loader over a new sampler."
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
