"""What an epoch's plan is, and how one is made of a sampler: seeded, read, and the caller's random numbers left as they were."""

from __future__ import annotations

import copy
import operator
import pickle
import random
import zlib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from penstock._random.global_rng import global_rngs_kept, seed_globals
from penstock._random.sample_rng import torch_generator

if TYPE_CHECKING:
    from collections.abc import Iterator


PLANNING = 2**63 - 1  # the position whose key seeds a sampler; generators of what it wraps count down from it
CHUNK = 2**16


class PlanRequest(NamedTuple):
    """What to plan: ``epoch``; and, where it does not follow the epoch planned before, what is known of it from a state."""

    epoch: int
    position: int = 0
    checksum: int = 0
    jumps: bool = False


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What a sampler gave in one epoch.

    Attributes:
        values: Its samples in order: int64, shape ``(samples,)``, or a list where they are not all integers.
        starts: Where each batch begins in them, and the end: int64, shape ``(batches + 1,)``; None where items are samples.
        drew: Whether a global generator was drawn from.
    """

    values: npt.NDArray[np.int64] | list[Any]
    starts: npt.NDArray[np.int64] | None
    drew: bool

    def __len__(self) -> int:
        return len(self.values) if self.starts is None else len(self.starts) - 1

    def checksum(self, begin: int, end: int, checksum: int = 0) -> int:
        """CRC-32 (ISO 3309) of the samples in items ``begin`` to ``end``, going on from ``checksum``."""
        if self.starts is not None:
            begin, end = int(self.starts[begin]), int(self.starts[end])
        if isinstance(self.values, list):
            for value in self.values[begin:end]:
                checksum = zlib.crc32(repr(value).encode(), checksum)
            return checksum
        return zlib.crc32(self.values[begin:end].astype("<i8", copy=False).tobytes(), checksum)

    def same_as(self, other: Plan) -> bool:
        """Whether both name the same samples in the same batches."""
        bounds, others = (plan.starts if plan.starts is not None else np.array(len(plan)) for plan in (self, other))
        return np.array_equal(bounds, others) and self.checksum(0, len(self)) == other.checksum(0, len(other))


def wrapped(sampler: Any) -> list[Any]:
    """``sampler`` and all that it wraps as ``.batch_sampler`` or ``.sampler``, each once, from the outside in."""
    found: list[Any] = []
    left = [sampler]
    while left:
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
        sampler: Whatever yields indices, or batches of them, and ends.
        seed: With the epoch, it seeds all that the sampler draws from.
        draws: Whether the sampler may draw from the global generators, which are then seeded and afterwards left as they were.
        remembers: Whether it may give something else when asked for the same epoch again.
        private: Whether nobody else holds this sampler, so that a copy may take its place.
    """

    def __init__(self, sampler: Any, seed: int, *, draws: bool, remembers: bool, private: bool = False) -> None:
        self.draws = draws
        self._sampler = sampler
        self._seed = seed
        self._remembers = remembers
        self._private = private
        self._pristine: Any = None
        self._made = False

    def __call__(self, task: PlanRequest) -> Plan:
        """The plan of ``task.epoch``; errors of the sampler name the epoch."""
        try:
            if self._remembers:
                if self._private and not self._made:
                    self._pristine = _copied(self._sampler)
                if task.jumps:
                    self._catch_up(task)
            self._made = True
            return self._plan(self._sampler, task.epoch)
        except StopIteration as exc:  # It would pass for the end of the epoch.
            raise RuntimeError(
                f"{type(self._sampler).__name__} raised StopIteration outside of its iterator, in epoch {task.epoch}."
            ) from exc
        except Exception as exc:
            exc.add_note(f"while {type(self._sampler).__name__} was asked for the indices of epoch {task.epoch}")
            raise

    def _catch_up(self, task: PlanRequest) -> None:
        """Read the epochs before, if the sampler has a memory: indices only, and nothing of them is kept.

        Whether it has one is tried on a copy: it then fails to give the plan of the state, or to give the same plan twice.
        """
        if self._made and self._pristine is None:
            return  # Where the sampler stands now cannot be undone; the checksum will tell.
        if self._made:
            self._sampler = _copied(self._pristine)
        trial = _copied(self._sampler)
        if trial is not None:
            plan = self._plan(trial, task.epoch)
            fits = task.position <= len(plan) and plan.checksum(0, task.position) == task.checksum
            if fits and plan.same_as(self._plan(trial, task.epoch)):
                return
        for epoch in range(task.epoch):
            self._plan(self._sampler, epoch)

    def _plan(self, sampler: Any, epoch: int) -> Plan:
        tell(sampler, epoch)
        with ExitStack() as stack:
            for depth, one in enumerate(wrapped(sampler)):
                stack.enter_context(_seeded(one, self._seed, epoch, PLANNING - depth))
            if not self.draws:
                return Plan(*_read(sampler), drew=False)
            stack.enter_context(global_rngs_kept())
            seed_globals(self._seed, epoch, PLANNING)
            before = _global_states()
            values, starts = _read(sampler)
            return Plan(values, starts, drew=_global_states() != before)


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


def _read(sampler: Any) -> tuple[npt.NDArray[np.int64] | list[Any], npt.NDArray[np.int64] | None]:
    """All that ``sampler`` yields: `Plan.values` and `Plan.starts`."""
    parts: list[npt.NDArray[np.int64] | list[Any]] = []
    lengths: list[int] = []
    in_batches: bool | None = None
    expected = len(sampler) if hasattr(sampler, "__len__") else None
    read = 0
    items = iter(sampler)
    while chunk := list(islice(items, CHUNK)):
        kinds = {isinstance(item, list | tuple | np.ndarray | torch.Tensor) and getattr(item, "ndim", 1) > 0 for item in chunk}
        if in_batches is None:
            in_batches = next(iter(kinds))
        if kinds != {in_batches}:
            raise ValueError(f"{type(sampler).__name__} yields single indices and batches of them in one epoch. Let it yield one kind.")
        read += len(chunk)
        if expected is not None and read > 2 * expected + CHUNK:
            raise ValueError(
                f"{type(sampler).__name__} has a length of {expected}, and did not end after {read} items. An epoch must end: stop after its length."
            )
        if in_batches:
            batches = [item if isinstance(item, list | tuple) else item.tolist() for item in chunk]
            lengths += map(len, batches)
            chunk = [value for batch in batches for value in batch]
        parts.append(_as_integers(chunk))
    starts = np.cumsum([0, *lengths], dtype=np.int64) if in_batches else None
    if any(isinstance(part, list) for part in parts):
        return [value for part in parts for value in (part if isinstance(part, list) else part.tolist())], starts
    return np.concatenate([np.empty(0, np.int64), *parts]), starts


def _as_integers(values: list[Any]) -> npt.NDArray[np.int64] | list[Any]:
    try:
        return np.array(values if set(map(type, values)) <= {int} else list(map(operator.index, values)), dtype=np.int64)
    except (TypeError, OverflowError):
        return values


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
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, bytes(keys), rest, bytes(torch.default_generator.get_state().numpy())  # type: ignore[arg-type]
