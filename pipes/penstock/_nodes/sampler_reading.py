"""Read one epoch of a sampler: tell it the epoch, seed it, and leave the caller's random numbers unchanged."""

from __future__ import annotations

import operator
from array import array
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from penstock._errors import suppress_own
from penstock._fetch.dataset_facts import length
from penstock._memory.modes import neutral_modes
from penstock._nodes.epoch_plan import Plan
from penstock._nodes.sampler_traits import copied, owns_its_randomness, tell, wrapped
from penstock._random.draws import looker
from penstock._random.global_rng import global_rngs_kept, global_states, put_globals, seed_globals
from penstock._random.sample_rng import torch_generator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock._nodes.plan_source import Place, PlanRequest


PLANNING = 2**63 - 1
"""The position whose key seeds a sampler; generators of wrapped samplers use the positions below."""
CHUNK = 2**16
"""Items read at once. A block of a sampler without a length has as many items, or `LARGE` samples."""
LARGE = 2**20
BATCHES = 256
"""Batches read at once."""
_REPLAYED: Final = 2**8
"""Blocks read of each endless epoch when earlier epochs are replayed, so that the result does not depend on how far an
earlier run went.
"""
_KEPT: Final = 2**22
"""Samples of the blocks that are kept, to go back to when what is in flight is dropped."""


@final
class SamplerReader:
    """Reads any epoch of a sampler.

    Args:
        sampler: Yields indices, or batches of them; for a call, a copy whose order depends on nothing but its
            ``set_epoch``.
        seed: Together with the epoch, seeds everything that the sampler draws from.
        batches: Whether it yields batches. None: it does not, but the user has not said so, and a list is refused.
        infinite: It may go on past its length.

    Attributes:
        tells: Whether its ``set_epoch`` is called.
        place: Where a copy reads the next epoch. Nothing can be seeded in a thread, so one that is not torch's own is
            first read where the loop waits, and goes on there if it draws from the global generators.
    """

    def __init__(self, sampler: Any, seed: int, batches: bool | None, *, infinite: bool = False) -> None:
        self.sampler, self.seed, self.batches, self.infinite = sampler, seed, batches, infinite
        self.name = type(sampler).__name__
        self.tells = True
        self.place: Place = "thread" if owns_its_randomness(sampler) else "here"

    def __call__(self, request: PlanRequest) -> SamplerEpoch:
        """The epoch of ``request``, at its start, from a copy."""
        found = SamplerEpoch(self, request.epoch)
        if found.whole and not found.drew:
            self.place = "thread"
        return found

    def copied(self) -> SamplerReader | None:
        """The same for a copy of what the sampler is now; None if it cannot be copied."""
        with neutral_modes():
            other = copied(self.sampler)
        return None if other is None else SamplerReader(other, self.seed, self.batches, infinite=self.infinite)


@final
class SamplerEpoch:
    """What a sampler yields in one epoch: read at once if the sampler has a length, otherwise block by block, as far as
    it is asked for. Errors of the sampler name it.

    Every generator that the sampler draws from is seeded once and belongs to this epoch until it ends. Generators that
    were lent stay lent between two blocks. The global ones cannot, because the caller draws from them in between. So
    each block restores the state in which the previous block left them, and saves it again at its end.

    Args:
        reader: Of the sampler.
        epoch: From 0.

    Attributes:
        epoch: The epoch.
        said: The length that the sampler had when the epoch began; None if it had none.
        blocks: What was read and is kept, one at least.
        whole: The epoch is one block, which is all of it.
        drew: Whether the sampler was seen to draw from a global generator.
    """

    def __init__(self, reader: SamplerReader, epoch: int) -> None:
        self.epoch, self._reader, self._sampler = epoch, reader, reader.sampler
        self.said: int | None = None
        self.blocks: list[Plan] = []
        self._draws = reader.place == "here"  # else nothing may be seeded
        self._globals: tuple[Any, ...] | None = None
        self._items: Iterator[Any] | None = None  # None: it has ended, or failed
        self._lent: list[Any] = []
        self.drew = reader.tells and tell(self._sampler, epoch, seeded=self._draws)
        self._read()
        self.whole = not self.blocks[0].more

    def kept(self, position: int) -> Plan | None:
        """The block with the item at ``position``, or the last one; None if it is not in memory. Thread-safe."""
        blocks = self.blocks
        if blocks[-1].more and position >= blocks[-1].end:
            return None
        return next((block for block in reversed(blocks) if block.begin <= position), None)

    def at(self, position: int) -> Plan | None:
        """The same, read on to ``position`` if necessary."""
        while self.blocks[-1].more and position >= self.blocks[-1].end and self._items is not None:
            self._read()
        return self.kept(position)

    def replay(self) -> None:
        """Read it to its end, or `_REPLAYED` blocks of it, for the sampler to be where that leaves it."""
        for _ in range(_REPLAYED):
            if self.blocks[-1].more:
                self._read()
        self.close()

    def close(self) -> None:
        """Take back the generators that were lent to the sampler, and read no more. Idempotent."""
        self._items = None
        for one in self._lent:
            with suppress(Exception):
                one.generator = None
        self._lent = []

    def _read(self) -> None:
        """Read the next block, or the whole epoch. The last block, or an error, also calls `close`."""
        more = False
        try:
            with neutral_modes():
                block = self._drawing() if self._draws else self._block()
            more = block.more
        except BaseException as exc:
            name, where = self._reader.name, f"epoch {self.epoch}"
            if isinstance(exc, StopIteration):  # it would be mistaken for the end of the epoch
                raise RuntimeError(f"{name} raised StopIteration outside of its iterator, in {where}.") from exc
            with suppress_own():  # a frozen exception takes no note
                exc.add_note(f"while reading the indices of {where} from {name}")
            raise
        finally:
            if not more:
                self.close()
        blocks = [*self.blocks, block]
        while len(blocks) > 2 and sum(len(each.values) for each in blocks) > _KEPT:
            del blocks[0]
        self.blocks = blocks  # a new list, because other threads look at it

    def _drawing(self) -> Plan:
        with global_rngs_kept():
            if self._globals is None:
                seed_globals(self._reader.seed, self.epoch, PLANNING)
            else:
                put_globals(self._globals)
            before = (look := looker())()
            block = self._block()
            self._globals = global_states()
            self.drew |= look() != before
            return block

    def _begin(self) -> Iterator[Any]:
        for depth, one in enumerate(wrapped(self._sampler)):
            if _lent(one, torch_generator(self._reader.seed, self.epoch, PLANNING - depth)):
                self._lent.append(one)
        self.said = length(self._sampler)
        return islice(self._sampler, None)  # one iterator, because a sampler that is its own begins anew with each

    def _block(self) -> Plan:
        last = self.blocks[-1] if self.blocks else _NOTHING
        items = self._items = self._begin() if self._items is None else self._items
        values: Any = array("q")
        lengths: list[int] = []
        read, more = 0, False
        while not more and (chunk := self._some(items, lengths)) is not None:
            try:
                values += array("q", chunk)
            except Exception:  # not whole numbers, or too large
                values = values.tolist() if isinstance(values, array) else values
                values += map(_unwrapped, chunk)
            read = len(lengths) if self._reader.batches else len(values)
            if self.said is None or last.more:
                more = read >= CHUNK or len(values) >= LARGE
            elif read > 2 * self.said + CHUNK:
                more = True  # it has a length and no end
                if not self._reader.infinite:
                    raise ValueError(
                        f"{self._reader.name} has a length of {self.said}, but did not end after {read} items. An "
                        f"epoch must end, so stop after that length. If the sampler never ends, pass infinite=True to "
                        f"from_dataset or to SamplerWrapper."
                    )
        return Plan(
            values if isinstance(values, list) else np.frombuffer(values, np.int64),
            np.cumsum([0, *lengths], dtype=np.int64) if self._reader.batches else None,
            last.end,
            last.samples + len(last.values),
            last.checksum(last.begin, last.end, last.before),
            more,
        )

    def _some(self, items: Iterator[Any], lengths: list[int]) -> list[Any] | None:
        """The next samples, with the lengths of their batches appended to ``lengths``; None if there are no more."""
        if not self._reader.batches:
            values = list(islice(items, CHUNK))
            if self._reader.batches is None and any(issubclass(kind, list) for kind in set(map(type, values))):
                raise ValueError(
                    f"{self._reader.name} yields lists, and it is unclear whether a list is a batch of "
                    f"indices or one index. Write SamplerWrapper(..., batches=True) for batches, or batches=False "
                    f"where dataset[[0, 1]] is one sample."
                )
            return values or None
        # Each batch is read before the next is asked for: it may be an iterator over the same items that the sampler
        # reads from.
        batches = [_batch(self._sampler, item) for item in islice(items, BATCHES)]
        lengths += map(len, batches)
        return [value for batch in batches for value in batch] if batches else None


def _lent(one: Any, ours: torch.Generator) -> bool:
    """Seed the ``generator`` of ``one`` like ``ours``. If it is None, lend ``ours``, so that ``one`` does not draw from
    a global one; returns whether that was done.
    """
    generator = getattr(one, "generator", one)
    if generator is None:
        with suppress(Exception):  # its class forbids it
            one.generator = ours
            return True
    elif isinstance(generator, torch.Generator) and generator is not torch.default_generator:
        generator.manual_seed(ours.initial_seed())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(ours.initial_seed()).state
    return False  # one of another kind is a memory


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


def _unwrapped(value: Any) -> Any:
    """The integer in a tensor of one element; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        with suppress(Exception):
            return operator.index(value)
    return value


_NOTHING: Final = Plan(np.empty(0, np.int64), None)
"""What comes before the first block."""
