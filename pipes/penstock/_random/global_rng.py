"""The global generators of ``random``, ``numpy.random`` and torch: seeded for a sample, watched, and put back."""

from __future__ import annotations

import ctypes
import random
import sys
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, final

import numpy as np
import torch

from penstock._random.sample_rng import sample_word
from penstock._random.splitmix import GAMMA, mixed


def seed_globals(seed: int, epoch: int, position: int) -> None:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator, in 7 us; see `global_rngs_kept` for taking it back.

    NumPy and torch seed the same Mersenne Twister by 32 bits, so each gets its own half of a word. ``torch.manual_seed`` would
    also seed every accelerator, which takes 100 us.
    """
    word = sample_word(seed, epoch, position)
    other = mixed(word + GAMMA)
    random.seed(word)
    np.random.seed(other >> 32)
    torch.default_generator.manual_seed(other & 0xFFFFFFFF)


_kept: ContextVar[tuple[Any, ...] | None] = ContextVar("penstock_global_rngs", default=None)
"""Where this thread found the global generators when it entered the outermost `global_rngs_kept`."""


@final
class global_rngs_kept:
    """Leave the three global generators as they were found, to the bit, even after an exception; 80 us.

    They belong to the process, not to a thread, so whatever another thread draws meanwhile is taken back too. If an interrupt comes while they
    are put back, `put_back_interrupted` finishes the job.
    """

    __slots__ = ("_outermost", "_states")

    def __enter__(self) -> None:
        self._states = global_states()
        self._outermost = _kept.get() is None
        if self._outermost:
            _kept.set(self._states)

    def __exit__(self, *exc: object) -> None:
        put_globals(self._states)
        if self._outermost:
            _kept.set(None)


def forget_interrupted() -> None:
    """Leave nothing to `put_back_interrupted`; for the beginning of a call that it would mend."""
    _kept.set(None)


def put_back_interrupted() -> None:
    """Put the global generators back if an interrupt kept `global_rngs_kept` from it; for whoever mends an interrupted call."""
    states = _kept.get()
    if states is not None:
        put_globals(states)
        _kept.set(None)


def global_states() -> tuple[Any, ...]:
    """The states of the three global generators, for `put_globals`."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def put_globals(states: tuple[Any, ...]) -> None:
    """Set the three global generators to ``states``."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


class States(NamedTuple):
    """The states of the three global generators.

    Python's is the memory of its Mersenne Twister (a position and 624 words) and the deviate it keeps, or what ``random.getstate`` returns.
    NumPy's is the memory of its own (624 words and a position).
    """

    python: tuple[Any, ...]
    numpy: bytes
    torch: bytes


@final
class GlobalRngSnapshot:
    """Tells cheaply whether anything was drawn from the three global generators: 4 us a look, against 80 for `global_rngs_kept`.

    ``numpy.random.get_state`` takes 30 us and ``random.getstate`` 8, so these two generators are compared as raw memory: NumPy's at the address
    it publishes, Python's behind the object's header, where CPython keeps it, and only after checking that it is there. NumPy may keep
    a normal deviate for the next call outside that memory; if there may be one, `look` gives no answer.
    """

    _BYTES = 4 * 624 + 4

    def __init__(self) -> None:
        self._without_deviate: bytes | None = None  # NumPy's memory when it was last known to keep none

    def look(self) -> States | None:
        """Their states; None if they cannot be told."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(generator, np.random.MT19937):
            return None
        memory = ctypes.string_at(generator.ctypes.state_address, self._BYTES)
        if memory != self._without_deviate:
            state: Any = np.random.get_state()
            if state[3] or _numpy_state(memory)[1].tobytes() != state[1].tobytes() or _numpy_state(memory)[2] != state[2]:
                return None
            self._without_deviate = memory
        found = _python_twister()
        python = random.getstate() if found is None else (ctypes.string_at(found[1], _PYTHON_BYTES), found[0].gauss_next)
        return States(python, memory, torch.default_generator.get_state().numpy().tobytes())

    @staticmethod
    def put_back(states: States) -> None:
        """Set them to ``states``."""
        random.setstate((3, _python_words(states.python[0]), states.python[1]) if len(states.python) == 2 else states.python)
        np.random.set_state(_numpy_state(states.numpy))
        torch.default_generator.set_state(torch.frombuffer(bytearray(states.torch), dtype=torch.uint8))


_PYTHON_BYTES = 4 * 625


@cache
def _python_twister() -> tuple[Any, int] | None:
    """Python's global generator and the address of its memory; None if the memory is not where we expect it."""
    generator = getattr(random.getstate, "__self__", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    head = object.__basicsize__
    address = id(generator) + head
    if (
        random.Random.__basicsize__ < head + _PYTHON_BYTES
        or _python_words(ctypes.string_at(address, _PYTHON_BYTES)) != generator.getstate()[1]
    ):
        return None
    return generator, address


def _python_words(memory: bytes) -> tuple[int, ...]:
    """624 words and a position, as ``random.getstate`` returns them."""
    place, *words = np.frombuffer(memory, np.uint32).tolist()
    return (*words, place)


def _numpy_state(memory: bytes) -> tuple[str, np.ndarray, int, int, float]:
    words = np.frombuffer(memory, np.uint32)
    return "MT19937", words[:624], int(words[624]), 0, 0.0
