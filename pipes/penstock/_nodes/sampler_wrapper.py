"""SamplerWrapper: a torch sampler or batch sampler as the source of an epoch's indices."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
from torch.utils.data import BatchSampler

from penstock._errors import GraphError, Once, StateMismatch
from penstock._fetch.dataset_facts import length
from penstock._fetch.first_items import reads_alike
from penstock._fetch.indices import Indices, pack
from penstock._memory.modes import neutral_modes
from penstock._nodes.distributed_sampler import refuse_sharded
from penstock._nodes.index_node import Facts, FirstNode, check_positions
from penstock._nodes.node import State, fields
from penstock._nodes.plan_source import PlanRequest, PlanSource
from penstock._nodes.sampler_reading import SamplerEpoch, SamplerReader
from penstock._nodes.sampler_traits import copied, owns_its_randomness, same_settings, tell, told_by
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
        self.batches = True if batches is None and isinstance(sampler, BatchSampler) else batches
        self._reader = SamplerReader(sampler, self.seed, self.batches, infinite=infinite)
        self._own = split == "own"
        self._name = type(sampler).__name__
        self._is_torchs = owns_its_randomness(sampler)
        self._is_planned = self._is_torchs or plan_ahead
        # else an epoch may depend on those that the sampler has yielded before
        self.begins_once = not (self._is_planned or told_by(sampler))
        self._is_sized = True  # false once an epoch had another length than the sampler says
        self._lengths: dict[int, int | None] = {}  # what it says for each epoch that was asked for
        self._once = Once()
        self._next = 0  # the epoch that comes next, if the sampler remembers what it has yielded
        self._current: SamplerEpoch | None = None  # what is read
        self._copy: SamplerReader | None = None  # where that comes from; None: the sampler itself
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
        epoch, ahead = place["epoch"], self._copy
        known = self._of(epoch)
        self._plans.resume()
        self._lengths, self._looked_up = {}, None
        self._reader.tells = False  # a loader reads it, which tells the sampler its epochs
        if ahead is not None and not self._is_torchs:
            return True
        self._copy = self._copied() if self._is_planned else None
        if self._copy is not None and ahead is not None and same_settings(self._copy.sampler, ahead.sampler):
            self._copy = ahead
            return True
        if ahead is not None and self._once("changed"):
            log.warning(
                f"{self._name} was changed before epoch {epoch} began. What was loaded from a copy of it is dropped, "
                f"and loaded again."
            )
        if self._copy is not None:
            self._current = None
            return ahead is None
        self._plan_at(place, anew=not place["position"])
        if self._current is not known and epoch and self.has_workers and self._once("gap"):
            log.info(
                f"{self._name} is read when an epoch begins, and nothing of that epoch is loaded before. If its order "
                f"depends on nothing but its set_epoch, pass plan_ahead=True; an order (order=) needs no declaration."
            )
        return known is None or known is self._current

    def start(self, epoch: int, after: State | None = None) -> State:
        return {"epoch": epoch, "position": 0, "checksum": 0}

    def left(self, place: State) -> int | None:
        if not self._is_sized:
            return None
        known = self._of(place["epoch"])
        items = self._length(place["epoch"]) if known is None else len(known.blocks[0]) if known.whole else None
        return None if items is None else max(items - place["position"], 0)

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Any], State]:
        epoch, position, checksum = place["epoch"], place["position"], place["checksum"]
        start, target = position, position + n * every
        parts = []
        while True:
            plan = self._plan_at(place)
            end = min(target, plan.end)
            checksum = 0 if self._own else plan.checksum(position, end, checksum)
            passed = max(0, -(-(position - start - first) // every))  # picks that lie in earlier blocks
            parts.append(_items(epoch, plan, np.arange(start + first + passed * every, end, every)))
            if position != end:
                place = {"epoch": epoch, "position": end, "checksum": checksum}
            position, self._follows = end, place
            if position == target or not plan.more:
                return parts[0] if len(parts) == 1 else pack([item for part in parts for item in part]), place

    def peek(self, place: State, positions: np.ndarray) -> Sequence[Any]:
        plan = self._plan_at(place)
        self._check_is_whole(self._of(place["epoch"]))
        return _items(place["epoch"], plan, np.asarray(positions, np.int64))

    def at(self, epoch: int, positions: np.ndarray, *, wraps: bool = False) -> Sequence[Indices]:
        known = self._of(epoch) or self._looked_up
        if known is None or known.epoch != epoch:
            copy = self._copied()
            known = self._looked_up = None if copy is None else copy(PlanRequest(epoch))
        if known is None:
            raise Forgotten(
                f"{self._name} cannot be copied, or has no set_epoch and may remember what it has yielded, so only the "
                f"epoch that it is in can be read by position"
            )
        self._check_is_whole(known)
        check_positions(epoch, positions, len(known.blocks[0].values), wraps=wraps)
        return Indices(epoch, positions, _values(known.blocks[0], positions))

    def check(self, state: Any) -> None:
        fields(state, epoch=int, position=int, checksum=int)

    def seek(self, place: State) -> State:
        self._plans.resume()
        return place

    def known(self, state: State) -> int | None:
        """A checksum of the block that will be read from ``state`` on, if it was read already. Thread-safe."""
        known = self._of(state["epoch"])
        block = None if known is None else known.kept(state["position"])
        return None if block is None else block.signature()

    def upcoming(self, state: State) -> int | None:
        """The same, read now, from a copy. None if a copy could be wrong; see `at`."""
        copy = self._copied()
        block = None if copy is None else copy(PlanRequest(state["epoch"])).at(state["position"])
        return None if block is None else block.signature()

    def note(self, place: State, *, again: bool = False) -> tuple[int, ...]:
        known, said = self._of(place["epoch"]), self.known(place)
        if known is None or said is None:
            return ()
        values = known.blocks[0].values
        return (said,) if all(map(reads_alike, values[:: 1 + len(values) // 256])) else ()

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

    def _check_is_whole(self, known: SamplerEpoch | None) -> None:
        if known is None or not known.whole:
            why = "has no __len__" if length(self.sampler) is None else "has no end"
            raise GraphError(f"{self._name}, which {why}, cannot be read by position")

    def _take(self, known: SamplerEpoch) -> None:
        """Read from ``known`` from now on. Warn, once, if it shows that the sampler's length is wrong, or unknown."""
        first, self._current = known.blocks[0], known
        if self._is_sized and known.said not in (None, len(first)):
            self._is_sized = False  # then all lengths are unknown
            if known.whole:  # else it may be infinite
                warnings.warn(
                    f"{self._name} has a length of {known.said}, but epoch {known.epoch} has {len(first)} items. From "
                    f"now on the length counts as unknown. Make __len__ agree with __iter__.",
                    stacklevel=2,
                )
        if not known.whole and self._once("has not ended"):
            log.warning(
                f"{self._name} has not ended after {first.end} items, so it is read in blocks while it is used. The "
                f"number of items in an epoch stays unknown, and a resume reads the indices again from the epoch's "
                f"start, but no sample."
            )

    def _copied(self) -> SamplerReader | None:
        """A copy of what the sampler is now; None if it cannot be copied, or if a copy could yield something else."""
        return None if self.begins_once else self._reader.copied()

    def _read(self, epoch: int) -> SamplerEpoch:
        """Read ``epoch`` of the user's own sampler, which a loader has told it."""
        if self._current is not None:
            self._current.close()
        if self.begins_once:
            if epoch < self._next:
                log.warning(
                    f"{self._name} may remember what it has yielded, and cannot be moved back, so epoch {epoch} is "
                    f"what it yields next. Give it a set_epoch, or load the state into a new loader over a new sampler."
                )
            for earlier in range(self._next, epoch):
                SamplerEpoch(self._reader, earlier).replay()
        found = SamplerEpoch(self._reader, epoch)
        self._next = epoch + 1
        return found

    def _length(self, epoch: int) -> int | None:
        """What the sampler says about its length, from a copy that is told ``epoch``, because the length may depend on
        it.
        """
        if not told_by(self.sampler):
            return length(self.sampler)
        lengths = self._lengths
        if epoch not in lengths:
            with neutral_modes():
                if (other := copied(self.sampler)) is not None:
                    tell(other, epoch, seeded=not reads_ahead())
                lengths[epoch] = length(self.sampler if other is None else other)
        return lengths[epoch]

    def _plan_at(self, place: State, *, anew: bool = False) -> Plan:
        """What was read of the epoch of ``place``, or the block with the item there. Orders the next epoch."""
        epoch, position, checksum = place["epoch"], place["position"], None if self._own else place["checksum"]
        known = self._of(epoch)
        plan = None if known is None else known.at(position)
        if anew or plan is None or (place is not self._follows and not plan.fits(position, checksum)):
            # not begun by a loader, of another run, or no longer in memory
            if self._copy is None and self._is_planned:
                self._copy = self._copied()
            known = self._read(epoch) if self._copy is None else self._plans.get(self._copy, PlanRequest(epoch))
            self._take(known)
            if self._copy is not None and known.whole:
                self._plans.order(self._copy, PlanRequest(epoch + 1))
            plan = known.at(position)
            if plan is None or not plan.fits(position, checksum):
                raise StateMismatch(self._misfit(epoch, position, checksum, known.blocks[-1]))
        return plan

    def _misfit(self, epoch: int, position: int, checksum: int | None, plan: Plan) -> str:
        if checksum is None:
            return (
                f"the state counts {position} items of epoch {epoch}, but the share that {self._name} yields on this "
                f"rank has {plan.end}. If the ranks have shares of different lengths, save the states of all ranks, "
                f"and load the one that this rank saved."
            )
        came = (
            f"it is {plan.checksum(plan.begin, position, plan.before)}"
            if position <= plan.end
            else f"there are only {plan.end} items"
        )
        return (
            f"{self._name} did not reproduce what it yielded in epoch {epoch} up to position {position}: the state has "
            f"the checksum {checksum}, and now {came}. Use the sampler, dataset and seed of the saved run, or begin a "
            f"new epoch. A sampler that remembers what it has yielded can only move forward: load the state into a new "
            f"loader over a new sampler."
        )


def _items(epoch: int, plan: Plan, places: np.ndarray) -> Sequence[Any]:
    if plan.starts is not None:
        return [_batch(epoch, plan, plan.starts, place) for place in (places - plan.begin).tolist()]
    return Indices(epoch, places, _values(plan, places - plan.begin))


def _batch(epoch: int, plan: Plan, starts: np.ndarray, place: int) -> Indices:
    lap, place = divmod(place, len(plan))
    begin, end, samples = (int(starts[k]) for k in (place, place + 1, -1))
    return Indices(epoch, np.arange(begin, end) + (plan.samples + lap * samples), plan.values[begin:end])


def _values(plan: Plan, samples: np.ndarray) -> Any:
    """Those of the samples with these numbers; the last one is followed by the first."""
    within = samples % max(1, len(plan.values))
    return [plan.values[k] for k in within] if isinstance(plan.values, list) else plan.values[within]
