"""What an epoch's plan is, and how one is made of a sampler: seeded, read, and the caller's random numbers left as they were."""

from __future__ import annotations

import copy
import operator
import pickle
import random
import zlib
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from penstock._random.global_rng import global_rngs_kept, seed_globals
from penstock._random.sample_rng import torch_generator

if TYPE_CHECKING:
    from collections.abc import Iterator


PLANNING = 2**63 - 1  # the position whose key seeds a sampler; generators of what it wraps count down from it
CHUNK = 2**16  # items that are read at once; a block of a sampler without a length has as many, or LARGE samples
LARGE = 2**20
BATCHES = 256  # batches that are read at once
REPLAYED = 2**8  # blocks


class PlanRequest(NamedTuple):
    """What to plan: ``epoch``; and, where it does not follow the epoch planned before, what is known of it from a state.

    Or, with ``begin``, the block of that epoch that goes on there, behind the block planned before.
    """

    epoch: int
    position: int = 0
    checksum: int = 0
    jumps: bool = False
    begin: int = 0


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What a sampler gave in one epoch; or in a block of it, where the sampler has no length and did not end soon.

    Attributes:
        values: Its samples in order: int64, shape ``(samples,)``, or a list where they are not all integers.
        starts: Where each batch begins in them, and the end: int64, shape ``(batches + 1,)``; None where items are samples.
        drew: Whether a global generator was drawn from.
        begin: The position in the epoch of the first item.
        samples: How many samples the epoch has before it.
        before: The checksum of those.
        more: Whether another block follows, which may be empty.
    """

    values: npt.NDArray[np.int64] | list[Any]
    starts: npt.NDArray[np.int64] | None
    drew: bool
    begin: int = 0
    samples: int = 0
    before: int = 0
    more: bool = False

    def __len__(self) -> int:
        return len(self.values) if self.starts is None else len(self.starts) - 1

    @property
    def end(self) -> int:
        """The position in the epoch behind the last item."""
        return self.begin + len(self)

    @property
    def is_block(self) -> bool:
        """Whether this is a part of an epoch, so that nobody knows how many items the epoch has."""
        return self.more or self.begin > 0

    def checksum(self, begin: int, end: int, checksum: int = 0) -> int:
        """CRC-32 (ISO 3309) of the samples in the items at positions ``begin`` to ``end``, going on from ``checksum``."""
        begin, end = begin - self.begin, end - self.begin
        if self.starts is not None:
            begin, end = int(self.starts[begin]), int(self.starts[end])
        if isinstance(self.values, list):
            for value in self.values[begin:end]:
                checksum = zlib.crc32(repr(value).encode(), checksum)
            return checksum
        return zlib.crc32(self.values[begin:end].astype("<i8", copy=False).tobytes(), checksum)

    def fits(self, position: int, checksum: int) -> bool:
        """Whether ``position`` lies in this plan, and ``checksum`` is that of the samples before it."""
        return self.begin <= position <= self.end and self.checksum(self.begin, position, self.before) == checksum

    def same_as(self, other: Plan) -> bool:
        """Whether both name the same samples in the same batches."""
        bounds, others = (plan.starts if plan.starts is not None else np.array(len(plan)) for plan in (self, other))
        return np.array_equal(bounds, others) and self.checksum(0, len(self)) == other.checksum(0, len(other))


_DEEPEST = 16
"""Samplers in samplers, at most: a proxy that answers to every name would have another one for ever."""


def wrapped(sampler: Any) -> list[Any]:
    """``sampler`` and all that it wraps as ``.batch_sampler`` or ``.sampler``, each once, from the outside in."""
    found: list[Any] = []
    left = [sampler]
    while left and len(found) < _DEEPEST:
        one = left.pop(0)
        if one is not None and all(one is not other for other in found):
            found.append(one)
            left += [getattr(one, name, None) for name in ("batch_sampler", "sampler")]
    return found


def owns_its_randomness(sampler: Any) -> bool:
    """Whether ``sampler`` is known to draw from its own generator or from none, and to remember nothing between epochs.

    So torch's own samplers, over torch's own samplers and plain sequences: those that lack a generator are lent one.
    """
    torchs = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
    plain = (list, tuple, range, np.ndarray, torch.Tensor)
    return all(type(one) in torchs + plain and getattr(one, "generator", None) is not torch.default_generator for one in wrapped(sampler))


def can_be_pickled(thing: Any) -> bool:
    """Whether ``thing`` can go to another process; nothing of it is kept."""

    class Sink:
        def write(self, data: Any) -> int:
            return len(data)

    try:
        pickle.Pickler(Sink(), protocol=5).dump(thing)
    except Exception:
        return False
    return True


@final
class EpochPlanner:
    """Makes the plans of one sampler. Used by one thread at a time; pickled where it goes to a helper process.

    Args:
        sampler: Whatever yields indices, or batches of them.
        seed: With the epoch, it seeds all that the sampler draws from.
        batches: Whether it yields batches. None: it does not, but nobody said so, and a list is refused.
        draws: Whether the sampler may draw from the global generators, which are then seeded and afterwards left as they were.
        remembers: Whether it may give something else when asked for the same epoch again.
        private: Whether nobody else holds this sampler, so that a copy may take its place.
    """

    def __init__(self, sampler: Any, seed: int, *, batches: bool | None, draws: bool, remembers: bool, private: bool = False) -> None:
        self.draws = draws
        self._sampler = sampler
        self._seed = seed
        self._batches = batches
        self._remembers = remembers
        self._private = private
        self._pristine: Any = None
        self._made = False
        self._reading: _Reading | None = None  # that gave the plan made last

    def __call__(self, task: PlanRequest) -> Plan:
        """The plan of ``task.epoch``; errors of the sampler name the epoch."""
        try:
            if not task.begin:
                self.close()
                self._prepare(task)
                self._reading = self._open(self._sampler, task.epoch)
            assert self._reading is not None
            return self._reading.block()
        except StopIteration as exc:  # It would pass for the end of the epoch.
            raise RuntimeError(
                f"{type(self._sampler).__name__} raised StopIteration outside of its iterator, in epoch {task.epoch}."
            ) from exc
        except Exception as exc:
            exc.add_note(f"while {type(self._sampler).__name__} was asked for the indices of epoch {task.epoch}")
            raise

    def close(self) -> None:
        """Give up the rest of the epoch that is being read, and take back what was lent for it."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _prepare(self, task: PlanRequest) -> None:
        if self._remembers:
            if self._private and not self._made:
                self._pristine = _copied(self._sampler)
            if task.jumps:
                self._catch_up(task)
        self._made = True

    def _catch_up(self, task: PlanRequest) -> None:
        """Read the epochs before, if the sampler has a memory: indices only, and nothing of them is kept.

        Whether it has one is tried on a copy: it then fails to give the plan of the state, or to give the same plan twice. Of an
        epoch without an end `REPLAYED` blocks are read, so that what follows does not depend on how far somebody went.
        """
        if self._made and self._pristine is None:
            return  # Where the sampler stands now cannot be undone; the checksum will tell.
        if self._made:
            self._sampler = _copied(self._pristine)
        trial = _copied(self._sampler)
        if trial is not None:
            plan = self._first_block(trial, task.epoch)
            fits = plan.fits(task.position, task.checksum) or (plan.more and task.position > plan.end)
            known = task.position > 0 or _is_told(self._sampler)  # at an epoch's start any plan fits, and a memory may show late
            if known and fits and plan.same_as(self._first_block(trial, task.epoch)):
                return
        for epoch in range(task.epoch):
            with closing(self._open(self._sampler, epoch)) as reading:
                any(not reading.block().more for _ in range(REPLAYED))

    def _first_block(self, sampler: Any, epoch: int) -> Plan:
        with closing(self._open(sampler, epoch)) as reading:
            return reading.block()

    def _open(self, sampler: Any, epoch: int) -> _Reading:
        one = sampler if self._remembers else _twin(sampler)  # somebody else may read it at the same time, and draw from its generator
        return _Reading(one, self._seed, epoch, batches=self._batches, draws=self.draws)


@final
class _Reading:
    """One epoch of a sampler, which is being read: as a whole where the sampler has a length, else block by block.

    What it draws from is seeded once, and is its own for as long as the epoch is read: generators stay lent between two blocks, and
    the global ones stand where the block before left them, but only while a block is read.
    """

    def __init__(self, sampler: Any, seed: int, epoch: int, *, batches: bool | None, draws: bool) -> None:
        self._sampler = sampler
        self._key = seed, epoch, PLANNING
        self._batches = batches
        self._draws = draws
        self._globals: tuple[Any, ...] | None = None
        self._items: Iterator[Any] | None = None
        self._length: int | None = None
        self._begin = self._samples = self._checksum = 0
        tell(sampler, epoch)
        self._lent = ExitStack()
        for depth, one in enumerate(wrapped(sampler)):
            self._lent.enter_context(_seeded(one, seed, epoch, PLANNING - depth))

    def block(self) -> Plan:
        """The next block, or the whole epoch."""
        try:
            plan = self._drawing() if self._draws else self._read()
        except BaseException:
            self.close()
            raise
        if plan.more:
            self._begin, self._samples = plan.end, plan.samples + len(plan.values)
            self._checksum = plan.checksum(plan.begin, plan.end, plan.before)
        else:
            self.close()
        return plan

    def close(self) -> None:
        """Take back what was lent; idempotent."""
        self._items = None
        self._lent.close()

    def _drawing(self) -> Plan:
        with global_rngs_kept():
            if self._globals is None:
                seed_globals(*self._key)
            else:
                _put_globals(self._globals)
            before = _global_states()
            plan = self._read()
            self._globals = _global_states()
            return replace(plan, drew=_comparable(self._globals) != _comparable(before))

    def _read(self) -> Plan:
        if self._items is None:
            self._length = length(self._sampler)
            self._items = iter(self._sampler)
        parts: list[npt.NDArray[np.int64] | list[Any]] = []
        lengths: list[int] = []
        read = samples = 0
        more = False
        while not more and (values := self._some(self._items, lengths)) is not None:
            parts.append(_as_integers(values))
            samples += len(values)
            read = len(lengths) if self._batches else samples
            if self._length is None:
                more = read >= CHUNK or samples >= LARGE
            elif read > 2 * self._length + CHUNK:
                raise ValueError(
                    f"{type(self._sampler).__name__} has a length of {self._length}, and did not end after {read} items. "
                    f"An epoch must end: stop after its length."
                )
        starts = np.cumsum([0, *lengths], dtype=np.int64) if self._batches else None
        return Plan(_joined(parts), starts, False, self._begin, self._samples, self._checksum, more)

    def _some(self, items: Iterator[Any], lengths: list[int]) -> list[Any] | None:
        """The next samples, and the lengths of their batches added to ``lengths``; None where there are no more."""
        if not self._batches:
            values = list(islice(items, CHUNK))
            if self._batches is None and any(issubclass(kind, list) for kind in set(map(type, values))):
                raise ValueError(
                    f"{type(self._sampler).__name__} yields lists, and nobody said whether a list is a batch of indices or one index. "
                    f"Write SamplerWrapper(..., batches=True) for batches, or batches=False where dataset[[0, 1]] is one sample."
                )
            return values or None
        before, values = len(lengths), []
        for item in islice(items, BATCHES):  # Each at once: a batch may be an iterator over what the sampler goes on with.
            batch = _batch(self._sampler, item)
            lengths.append(len(batch))
            values += batch
        return values if len(lengths) > before else None


def _twin(sampler: Any) -> Any:
    """One of torch's samplers once more, over the same data, without a generator."""
    if not isinstance(sampler, Sampler):
        return sampler
    twin = copy.copy(sampler)
    for name in ("batch_sampler", "sampler"):
        if hasattr(twin, name):
            setattr(twin, name, _twin(getattr(twin, name)))
    if hasattr(twin, "generator"):
        twin.generator = None
    return twin


def _is_told(sampler: Any) -> bool:
    """Whether anything in ``sampler`` is told the epoch, which is to say that it depends on that and not on the epochs before."""
    return any(callable(getattr(one, "set_epoch", None)) for one in wrapped(sampler))


@contextmanager
def _seeded(one: Any, seed: int, epoch: int, position: int) -> Iterator[None]:
    """Seed the ``generator`` of ``one``; where that is None, lend it one meanwhile, so that it needs no global one."""
    generator = getattr(one, "generator", _MISSING)
    ours = torch_generator(seed, epoch, position)
    if generator is None:
        try:
            one.generator = ours
        except AttributeError:
            yield
            return
        try:
            yield
        finally:
            one.generator = None
        return
    if isinstance(generator, torch.Generator) and generator is not torch.default_generator:
        generator.manual_seed(ours.initial_seed())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(ours.initial_seed()).state
    yield


_MISSING = object()


def _batch(sampler: Any, item: Any) -> list[Any]:
    """The samples of a batch, in a list of their own."""
    if isinstance(item, np.ndarray | torch.Tensor) and item.ndim == 1:
        values: list[Any] = item.tolist()
        return values
    try:
        samples = iter(item)
    except TypeError as exc:
        raise TypeError(
            f"{type(sampler).__name__} yields {item!r:.80}, which is not a batch: a batch sampler yields lists of indices. "
            f"Give it as sampler=, or in a hand-built graph say batches=False."
        ) from exc
    return list(samples)


def _as_integers(values: list[Any]) -> npt.NDArray[np.int64] | list[Any]:
    try:
        return np.array(values if set(map(type, values)) <= {int} else list(map(operator.index, values)), dtype=np.int64)
    except (TypeError, OverflowError):
        return [_unwrapped(value) for value in values]


def _unwrapped(value: Any) -> Any:
    """The integer in a tensor of one element; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        with suppress(TypeError):
            return operator.index(value)
    return value


def _joined(parts: list[npt.NDArray[np.int64] | list[Any]]) -> npt.NDArray[np.int64] | list[Any]:
    if any(isinstance(part, list) for part in parts):
        return [value for part in parts for value in (part if isinstance(part, list) else part.tolist())]
    return np.concatenate([np.empty(0, np.int64), *parts])


def length(sampler: Any) -> int | None:
    """``len(sampler)`` where it has one."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def length_in(sampler: Any, epoch: int) -> int | None:
    """What ``len(sampler)`` would be in ``epoch``, by a copy that is told so; by the sampler as it is where it cannot be copied."""
    other = _copied(sampler)
    if other is None:
        return length(sampler)
    tell(other, epoch)
    return length(other)


def tell(sampler: Any, epoch: int) -> None:
    """``set_epoch(epoch)`` on ``sampler`` and on all that it wraps."""
    for one in wrapped(sampler):
        if callable(set_epoch := getattr(one, "set_epoch", None)):
            set_epoch(epoch)


def _copied(sampler: Any) -> Any:
    """A copy of ``sampler`` that shares its dataset; None where it cannot be copied."""
    shared = [getattr(one, name, None) for one in wrapped(sampler) for name in ("data_source", "dataset")]
    try:
        return copy.deepcopy(sampler, {id(one): one for one in shared})
    except Exception:
        return None


def _global_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _put_globals(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def _comparable(states: tuple[Any, ...]) -> tuple[Any, ...]:
    name, keys, *rest = states[1]
    return states[0], name, bytes(keys), rest, bytes(states[2].numpy())
