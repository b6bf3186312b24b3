"""The random generators that the user's objects hold: found, seeded for each sample, and watched.

A worker process has copies of them, so without seeding its draws would repeat those of another worker, and depend on
what it has loaded before. Each generator is seeded from the sample and from its path, such as
``dataset.transforms[0].rng``, so that two of them never draw alike.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import random
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

import numpy as np
import torch

from penstock._arguments import checksum
from penstock._errors import Once, suppress_own
from penstock._fetch.held import held
from penstock._random.global_rng import also_kept
from penstock._random.sample_rng import sample_word
from penstock._random.splitmix import GAMMA, mixed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from penstock._fetch.held import Held

    Ways = tuple[Any, Callable[[int], Any], Callable[[], Any], Callable[[Any], Any]]

T = TypeVar("T")

_logger = logging.getLogger("penstock")

NEW_EPOCH = -(2**63)
"""The position that seeds ``set_epoch``. No sample has it, and no batch: the ``~position`` of its ``collate_fn`` is
greater.
"""


class Found(NamedTuple):
    """A generator, where it is, what its path adds to the seed, and how to use it. Two with one ``source`` are one."""

    where: Held
    key: int
    source: Any
    seed: Callable[[int], Any]
    get: Callable[[], Any]
    put: Callable[[Any], Any]


@final
class HeldGenerators:
    """Finds the generators that some objects hold, and seeds them for each sample.

    They are looked for before and after the first sample in a process, and after each ``set_epoch``; one that replaces
    another at its path is seeded too. One thread at a time.

    Args:
        seed: Seed of the samples' random numbers.
        roots: The user's objects, by the first word of their paths.
        on: False seeds nothing; `states` works nevertheless.

    Attributes:
        roots: The user's objects.
        seeds: Whether it seeds any.
        checks: Whether the first sample of each process is compared; see `Task`.
        is_first: That sample is still to come.
        found: Those that are seeded.
    """

    def __init__(self, seed: int, roots: Mapping[str, Any], on: bool) -> None:
        self._seed = seed
        self.roots = roots
        self.seeds = self.checks = on
        self._alone: set[str] = set()  # paths, which a worker's copies share
        self._once = Once()
        self.forget()

    def forget(self) -> None:
        """Begin anew, for new workers."""
        self.found: tuple[Found, ...] = ()
        self._watched: tuple[Found, ...] = ()  # the same for `states`
        self._stale, self.is_first = self.seeds, self.checks
        self._looks = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "found": (), "_watched": ()}  # looked for anew, among the copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.forget()

    @property
    def quiet(self) -> bool:
        """Whether nothing needs to call `run`."""
        return not (self._stale or self.found)

    def leave(self, **others: Any) -> None:
        """Never touch what ``others`` hold too. A sampler usually holds its dataset, which does not count."""
        theirs = {
            id(one.source)
            for one in _generators(
                held(others, enters=lambda one: type(one).__module__ == "builtins" or not hasattr(one, "__getitem__"))
            )
        }
        if theirs:
            self._alone |= {one.where.path for one in self._look() if id(one.source) in theirs}

    def seed(self, epoch: int, position: int) -> None:
        """Seed them for one sample; see `GlobalSeeding.seed`."""
        word = sample_word(self._seed, epoch, position)
        for one in self.found:
            one.seed(mixed(word ^ one.key))

    def run(self, load: Callable[[], T], *, kept: bool) -> T:
        """Return ``load()``, which seeds; with ``kept``, restore the generators afterwards."""
        self.refresh()
        with self.kept(kept):
            value = load()
        if self.is_first:  # nothing was compared
            self.is_first = False
            self.expire()
        return value

    def refresh(self) -> None:
        """Make sure that `found` is what there is in this process."""
        if self._stale:
            self.look_again()
        else:
            self.found = tuple(map(_as_now, self.found))

    def expire(self) -> None:
        """User code has run that may have made generators anew."""
        self._stale = self.seeds

    def kept(self, kept: bool = True) -> AbstractContextManager[None]:
        """With ``kept``, restore them after the body.

        Otherwise nothing is between an exception and its way out, because a frozen one would not pass.
        """
        return self._restored() if kept and self.found else nullcontext()

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        states = [(one.put, one.get()) for one in self.found]

        def restore() -> None:
            for put, state in states:
                put(state)

        try:
            also_kept.set(restore)
            yield
        finally:
            restore()
            also_kept.set(None)

    def look_again(self) -> list[Found]:
        """Look for them; return those that were not seeded before."""
        known, self._stale = {id(one.source) for one in self.found}, False
        self.found = self._look()
        return [one for one in self.found if id(one.source) not in known]

    def states(self) -> dict[str, Any]:
        """Their states, by path, for comparison. Looks for them at calls 1, 2, 4, 8, …."""
        self._looks += 1
        if not self._looks & (self._looks - 1):
            self._watched = self._look()
        return {one.where.path: pickle.dumps(one.get()) for one in self._watched}

    def _look(self) -> tuple[Found, ...]:
        return tuple(
            one
            for one in _generators(held(self.roots))
            if one.where.path not in self._alone and (not self.seeds or self._can_seed(one))
        )

    def _can_seed(self, generator: Found) -> bool:
        with suppress_own():
            state = generator.get()
            generator.seed(0)
            generator.put(state)
            return True
        if self._once(generator.where.path):
            _logger.warning(
                f"{generator.where.path}, a {type(generator.where.value).__name__}, cannot be seeded for each sample, "
                f"because its methods raise errors. Draw from penstock.sample().rng."
            )
        return False


def _generators(things: Iterable[Held]) -> list[Found]:
    found: dict[int, Found] = {}
    for one in things:
        if (ways := ways_of(one.value)) is not None and id(ways[0]) not in found:
            found[id(ways[0])] = Found(one, int(checksum(one.path.encode()), 16), *ways)
    return list(found.values())


def _as_now(generator: Found) -> Found:
    """``generator``, or what has replaced it at its path."""
    with suppress_own():
        value = generator.where.again() if generator.where.again else generator.where.value
        if value is not generator.where.value and (ways := ways_of(value)) is not None:
            return Found(generator.where._replace(value=value), generator.key, *ways)
    return generator


def ways_of(one: Any) -> Ways | None:
    """The source of ``one``, and how to seed, to get and to set it; None if it is no generator, or a global one."""
    ways: Ways
    if isinstance(one, random.Random) and not isinstance(one, random.SystemRandom):
        ways = (one, one.seed, one.getstate, one.setstate)
    elif isinstance(one, torch.Generator) and one.device.type == "cpu":
        ways = (
            one,
            lambda word: one.manual_seed(word >> 1),
            lambda: one.get_state().numpy().tobytes(),
            partial(_put_torch, one),
        )
    elif isinstance(one, np.random.RandomState):
        ways = (one._bit_generator, partial(_seed_legacy, one), partial(one.get_state, legacy=False), one.set_state)
    elif isinstance(one, np.random.Generator | np.random.BitGenerator):
        bits = one.bit_generator if isinstance(one, np.random.Generator) else one
        ways = (bits, partial(_seed_bits, bits), partial(getattr, bits, "state"), partial(setattr, bits, "state"))
    else:
        return None
    of_numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
    global_ones = getattr(random.random, "__self__", None), of_numpy, torch.default_generator
    return None if any(ways[0] is known for known in global_ones) else ways


def _seed_bits(bits: Any, word: int) -> None:
    """Seed NumPy's generators by their states, which takes 1 to 3 us instead of 10."""
    kind = type(bits)
    if kind is np.random.MT19937:
        np.random.RandomState(bits).seed([word >> 32, word & 0xFFFFFFFF])
    elif kind in (np.random.PCG64, np.random.PCG64DXSM):
        other = mixed(word + GAMMA)
        state = {"state": word << 64 | other, "inc": (other << 64 | word) | 1}
        bits.state = {"bit_generator": kind.__name__, "state": state, "has_uint32": 0, "uinteger": 0}
    else:
        bits.state = kind(word).state


def _seed_legacy(one: np.random.RandomState, word: int) -> None:
    bits = one._bit_generator
    if type(bits) is np.random.MT19937:
        one.seed([word >> 32, word & 0xFFFFFFFF])
    else:
        _seed_bits(bits, word)
        one.set_state({**one.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


def _put_torch(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
