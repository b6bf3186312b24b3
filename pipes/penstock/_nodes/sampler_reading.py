"""Read one epoch of a sampler: set its epoch, seed it, and leave the caller's random numbers unchanged."""

from __future__ import annotations

import operator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from penstock._fetch.dataset_facts import length
from penstock._nodes.epoch_plan import Plan
from penstock._nodes.sampler_traits import seedable, tell, wrapped
from penstock._random.draws import looker
from penstock._random.global_rng import global_rngs_kept, global_states, put_globals, seed_globals
from penstock._random.sample_rng import torch_generator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock._nodes.epoch_plan import Values


PLANNING = 2**63 - 1
"""The position whose key seeds a sampler; generators of wrapped samplers use the positions below."""
CHUNK = 2**16
"""Items read at once. A block of a sampler without a length has as many items, or `LARGE` samples."""
LARGE = 2**20
BATCHES = 256
"""Batches read at once."""


@final
class Reading:
    """One epoch of a sampler being read: all at once if the sampler has a length, otherwise block by block.

    Every generator that the sampler draws from is seeded once and belongs to this reading until the epoch ends.
    Generators that were lent stay lent between two blocks. The global ones cannot, because the caller draws from them
    in between. So each block restores the state in which the previous block left them, and saves it again at its end.

    Args:
        sampler: Yields indices, or batches of them.
        seed: Together with ``epoch``, seeds everything that the sampler draws from.
        epoch: The epoch.
        batches: Whether it yields batches. None: it does not, but the user has not said so, and a list is refused.
        infinite: It may go on past its length.
        draws: It may draw from the global generators, which are seeded for it.
        tells: Call its ``set_epoch``.

    Attributes:
        epoch: The epoch.
        begin: The position of the next block; samples before it, and their checksum, go into its `Plan`.
    """

    def __init__(
        self,
        sampler: Any,
        seed: int,
        epoch: int,
        *,
        batches: bool | None,
        infinite: bool = False,
        draws: bool,
        tells: bool = True,
    ) -> None:
        self.epoch = epoch
        self.begin = 0
        self._sampler = sampler
        self._key = seed, epoch, PLANNING
        self._batches = batches
        self._infinite = infinite
        self._draws = draws
        self._globals: tuple[Any, ...] | None = None
        self._items: Iterator[Any] | None = None
        self._length: int | None = None
        self._samples = self._checksum = 0
        self._drew = tells and tell(sampler, epoch, seeded=draws)
        self._lent = ExitStack()
        for depth, one in enumerate(wrapped(sampler)):
            self._lent.enter_context(_seeded(one, seed, epoch, PLANNING - depth))

    def block(self) -> Plan:
        """The next block, or the whole epoch. The last block, or an error, also calls `close`."""
        more = False
        try:
            plan = self._drawing() if self._draws else self._read()
            more = plan.more
        finally:
            if not more:
                self.close()
        self.begin, self._samples = plan.end, plan.samples + len(plan.values)
        self._checksum = plan.checksum(plan.begin, plan.end, plan.before) if more else 0
        return plan

    def close(self) -> None:
        """Take back what was lent. Idempotent."""
        self._items = None
        self._lent.close()

    def _drawing(self) -> Plan:
        with global_rngs_kept():
            if self._globals is None:
                seed_globals(*self._key)
            else:
                put_globals(self._globals)
            before = (look := looker())()
            plan = self._read()
            self._globals = global_states()
            return replace(plan, drew=self._drew or look() != before)

    def _read(self) -> Plan:
        if self._items is None:
            self._length = length(self._sampler)
            items = iter(self._sampler)
            # one that is its own iterator is restarted by whoever asks it for an iterator, as islice does
            self._items = items if items is not self._sampler else _by_next(items)
        parts: list[Values] = []
        lengths: list[int] = []
        read = samples = 0
        more = False
        while not more and (values := self._some(self._items, lengths)) is not None:
            parts.append(_as_integers(values))
            samples += len(values)
            read = len(lengths) if self._batches else samples
            if self._length is None:
                more = read >= CHUNK or samples >= LARGE
            elif read > 2 * self._length + CHUNK and self._infinite:
                self._length, more = None, True  # it has a length and no end
            elif read > 2 * self._length + CHUNK:
                raise ValueError(
                    f"{type(self._sampler).__name__} has a length of {self._length}, but did not end after {read} "
                    f"items. An epoch must end, so stop after that length. If the sampler never ends, pass "
                    f"infinite=True to from_dataset or to SamplerWrapper."
                )
        starts = np.cumsum([0, *lengths], dtype=np.int64) if self._batches else None
        return Plan(_joined(parts), starts, False, self.begin, self._samples, self._checksum, more)

    def _some(self, items: Iterator[Any], lengths: list[int]) -> list[Any] | None:
        """The next samples, with the lengths of their batches appended to ``lengths``; None if there are no more."""
        if not self._batches:
            values = list(islice(items, CHUNK))
            if self._batches is None and any(issubclass(kind, list) for kind in set(map(type, values))):
                raise ValueError(
                    f"{type(self._sampler).__name__} yields lists, and it is unclear whether a list is a batch of "
                    f"indices or one index. Write SamplerWrapper(..., batches=True) for batches, or batches=False "
                    f"where dataset[[0, 1]] is one sample."
                )
            return values or None
        # Each batch is read before the next is asked for: it may be an iterator over the same items that the sampler
        # reads from.
        batches = [_batch(self._sampler, item) for item in islice(items, BATCHES)]
        lengths += map(len, batches)
        return [value for batch in batches for value in batch] if batches else None


@contextmanager
def _seeded(one: Any, seed: int, epoch: int, position: int) -> Iterator[None]:
    """Seed the ``generator`` of ``one``; if it is None, lend it one, so that it does not draw from a global one."""
    ours, generator = torch_generator(seed, epoch, position), seedable(one)
    is_lent = getattr(one, "generator", one) is None
    if is_lent:
        with suppress(Exception):  # its class forbids it
            one.generator = ours
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(ours.initial_seed())
    elif generator is not None:
        generator.bit_generator.state = type(generator.bit_generator)(ours.initial_seed()).state
    try:
        yield
    finally:
        if is_lent:
            with suppress(Exception):
                one.generator = None


def _by_next(items: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        yield item


def _batch(sampler: Any, item: Any) -> list[Any]:
    """The samples of a batch, in a new list."""
    if isinstance(item, np.ndarray | torch.Tensor) and item.ndim == 1:
        values: list[Any] = item.tolist()
        return values
    try:
        samples = iter(item)
    except TypeError as exc:
        raise TypeError(
            f"{type(sampler).__name__} yields {item!r:.80}, which is not a batch: a batch sampler yields lists of "
            f"indices. Pass it as sampler=, or in a hand-built graph pass batches=False."
        ) from exc
    return list(samples)


def _as_integers(values: list[Any]) -> Values:
    try:
        return np.array(
            values if set(map(type, values)) <= {int} else list(map(operator.index, values)), dtype=np.int64
        )
    except Exception:  # not whole numbers, or too large
        return [_unwrapped(value) for value in values]


def _unwrapped(value: Any) -> Any:
    """The integer in a tensor of one element; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        with suppress(Exception):
            return operator.index(value)
    return value


def _joined(parts: list[Values]) -> Values:
    if any(isinstance(part, list) for part in parts):
        return [value for part in parts for value in (part if isinstance(part, list) else part.tolist())]
    return np.concatenate([np.empty(0, np.int64), *parts])
