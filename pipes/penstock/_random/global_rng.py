"""The global generators of ``random``, ``numpy.random`` and torch: seeding them for a sample, watching them, and
restoring them.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from penstock._random.sample_rng import sample_word
from penstock._random.splitmix import GAMMA, mixed

if TYPE_CHECKING:
    from collections.abc import Callable


def seed_share(seed: int, item: int | None) -> None:
    """Seed them for a share, or for one of its items; ``seed``, of the share, is ``torch.initial_seed()`` either way.

    Torch keeps that number in the generator's state, for nothing but to return it.
    """
    seed_globals(seed, item is not None, item or 0)
    state = torch.default_generator.get_state()
    state.numpy()[:8] = np.frombuffer(seed.to_bytes(8, sys.byteorder), np.uint8)
    torch.default_generator.set_state(state)


def seed_globals(seed: int, epoch: int, position: int) -> None:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator, in 7 us; to undo it, see `global_rngs_kept`.

    NumPy and torch seed the same Mersenne Twister with 32 bits, so each gets a different half of a word.
    ``torch.manual_seed`` would also seed every accelerator, which takes 100 us.
    """
    word = sample_word(seed, epoch, position)
    other = mixed(word + GAMMA)
    random.seed(word)
    np.random.seed(other >> 32)
    torch.default_generator.manual_seed(other & 0xFFFFFFFF)


_kept: ContextVar[tuple[Any, ...] | None] = ContextVar("penstock_global_rngs", default=None)
"""The states of the global generators when this thread entered the outermost `global_rngs_kept`, or began to watch
them.
"""


also_kept: ContextVar[Callable[[], None] | None] = ContextVar("penstock_held_rngs", default=None)
"""Restores generators that are not global, while this thread uses them; for `put_back_interrupted`."""


@final
class global_rngs_kept:
    """Restore the three global generators bit for bit, even after an exception; 80 us.

    They belong to the process, not to a thread, so draws that another thread makes meanwhile are undone too. If an
    interrupt arrives during the restore, `put_back_interrupted` completes it.
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


def note_watched(states: tuple[Any, ...]) -> bool:
    """Leave ``states`` to `put_back_interrupted`, until `forget_interrupted`; False if an outer call has already done
    so.
    """
    if _kept.get() is not None:
        return False
    _kept.set(states)
    return True


def forget_interrupted() -> None:
    """Leave nothing to `put_back_interrupted`; also at the beginning of a call whose interruption it would repair."""
    if _kept.get() is not None:
        _kept.set(None)
    if also_kept.get() is not None:
        also_kept.set(None)


def put_back_interrupted() -> None:
    """Restore the generators if an interrupt prevented that; for code that repairs an interrupted call."""
    states = _kept.get()
    if states is not None:
        _put(states)
        _kept.set(None)
    if (restore := also_kept.get()) is not None:
        restore()
        also_kept.set(None)


def global_states() -> tuple[Any, ...]:
    """The states of the three global generators, for `put_globals`. Contains no tensor.

    An asyncio thread, such as fsspec's, keeps copies of the context. If one held the last reference to a tensor when
    the program ends, torch would release the GIL and could not reacquire it: "terminate called without an active
    exception".
    """
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state().numpy().tobytes()


def put_globals(states: tuple[Any, ...]) -> None:
    """Set the three global generators to ``states``."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(torch.frombuffer(bytearray(states[2]), dtype=torch.uint8))


def _put(states: tuple[Any, ...]) -> None:
    if isinstance(states, States):
        GlobalRngSnapshot.put_back(states)
    else:
        put_globals(states)


class States(NamedTuple):
    """The states of the three global generators.

    Python's is the memory of its Mersenne Twister (a position and 624 words) and the deviate it keeps, or the result of
    ``random.getstate``. NumPy's is the memory of its own (624 words and a position), and whether it keeps a deviate,
    and which. Torch's is the result of `TorchMemory.read` or ``get_state``.
    """

    python: tuple[Any, ...]
    numpy: tuple[bytes, int, float]
    torch: tuple[Any, ...]


@final
class GlobalRngSnapshot:
    """Cheaply detects whether anything was drawn from the three global generators: 0.5 us per look, compared to 80 for
    `global_rngs_kept`.

    ``numpy.random.get_state`` takes 30 us, ``random.getstate`` 8 and torch's ``get_state`` 4, so the generators are
    compared as raw memory: NumPy's at the address that it publishes, those of Python and torch behind the object
    header, and only after checking that they are there. Here that memory is only read. NumPy may keep a normal deviate
    for the next call outside that memory; as long as there is one, a look asks NumPy.

    Their 8 KB are read only if one of a few words changed, their *marks*. A draw moves the position; a seed, a loaded
    state and a refill change all words.
    """

    _without_deviate: bytes | None = None  # NumPy's memory when it was last known to keep no deviate
    # when it was last known to keep one, which may have been used, or put back, since
    _with_deviate: bytes | None = None
    _marked: Any = None  # NumPy's generator, for which `_parts` were found
    _parts: list[memoryview]  # none: they are not where we expect them
    _marks: tuple[bytes, Any]
    _states: States | None  # at these marks

    def __reduce__(self) -> Any:
        return GlobalRngSnapshot, ()  # the addresses are those of this process

    def look(self) -> States | None:
        """Their states, the same object if nothing was drawn since the last look; None if they cannot be determined."""
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._marked:
            self._marked, self._parts, self._states = generator, _marks_of(generator), None
        marks = b"".join(self._parts), _python.gauss_next
        if self._states is None or marks != self._marks or not self._parts:
            self._states, self._marks = self._read(generator), marks
        elif self._states.numpy[0] == self._with_deviate and (states := self._read(generator)) != self._states:
            self._states = states
        return self._states

    @property
    def marks(self) -> Any:
        """What every draw changes, unless NumPy keeps a deviate."""
        same = np.random.get_bit_generator() is self._marked  # type: ignore[attr-defined]
        return (b"".join(self._parts), _python.gauss_next) if same and self._parts else self.look()

    def _read(self, generator: Any) -> States | None:
        twister = numpy_twister(generator)
        if twister is None:
            return None
        memory, deviate = twister.tobytes(), (0, 0.0)
        if memory != self._without_deviate or memory == self._with_deviate:
            state: Any = np.random.get_state()
            deviate = state[3:]
            if _numpy_state(memory)[1].tobytes() != state[1].tobytes() or _numpy_state(memory)[2] != state[2]:
                return None
            if deviate[0]:
                self._with_deviate = memory
            else:
                self._without_deviate = memory
        found, of_torch = python_twister(), torch_twister()
        return States(
            random.getstate() if found is None else (found[1].tobytes(), found[0].gauss_next),
            (memory, *deviate),
            (torch.default_generator.get_state().numpy().tobytes(),) if of_torch is None else of_torch.read(),
        )

    @staticmethod
    def put_back(states: States) -> None:
        """Set the generators to ``states``."""
        random.setstate(
            (3, _python_words(states.python[0]), states.python[1]) if len(states.python) == 2 else states.python
        )
        np.random.set_state(_numpy_state(*states.numpy))
        state = states.torch[0] if len(states.torch) == 1 else _torch_state(states.torch)
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


@final
class RngImage:
    """The three global generators as they are now, to be set again in 1 us, compared to 40 for `put_globals`.

    The Mersenne Twisters of Python and NumPy are written as raw memory, where ``watch`` has found them, unless NumPy
    keeps a deviate.

    Attributes:
        states: Their states.
        is_plain: Whether NumPy is known to keep no deviate.
        marks: Those of ``watch``, now and whenever this image was set.
    """

    def __init__(self, watch: GlobalRngSnapshot) -> None:
        states, python = watch.look(), python_twister()
        self.states = global_states() if states is None else states
        self.marks = watch.marks
        self.is_plain = states is not None and python is not None and not states.numpy[1]
        if self.is_plain and python is not None:
            self._memory = python[1].data, numpy_twister(np.random.get_bit_generator()).data  # type: ignore
            self._torch = torch.default_generator.get_state()

    def put(self, *, drawn: bool) -> None:
        """Set the generators to this. Without ``drawn``, NumPy is known to keep no deviate now."""
        if not self.is_plain:
            _put(self.states)
            return
        if drawn:
            np.random.seed(0)  # drops the deviate
        python, numpy = self._memory
        python[:], _python.gauss_next = self.states[0]
        numpy[:] = self.states[1][0]
        torch.default_generator.set_state(self._torch)


_WORDS = 624


def _memory(address: int, n: int) -> np.ndarray:
    """The ``n`` bytes at ``address``, as they are whenever the array is read.

    Copying them takes 0.1 us, compared to 1.4 with ``ctypes.string_at``.
    """
    memory: Any = (ctypes.c_uint8 * n).from_address(address)
    return np.frombuffer(memory, np.uint8)


@lru_cache(maxsize=1)
def numpy_twister(generator: Any) -> np.ndarray | None:
    """The memory of NumPy's global generator: 624 words and a position; None if it is another kind of generator."""
    return _memory(generator.ctypes.state_address, 4 * _WORDS + 4) if isinstance(generator, np.random.MT19937) else None


@cache
def python_twister() -> tuple[Any, np.ndarray] | None:
    """Python's global generator and its memory, a position and 624 words; None if the memory is not where we expect
    it.
    """
    generator = getattr(random.getstate, "__self__", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    head, size = object.__basicsize__, 4 + 4 * _WORDS
    if random.Random.__basicsize__ < head + size:
        return None
    memory = _memory(id(generator) + head, size)
    return (generator, memory) if _python_words(memory.tobytes()) == generator.getstate()[1] else None


_python: Any = getattr(random.getstate, "__self__", None)
"""Python's generator. With it, the deviate that it keeps is no part of its memory that we read."""


def _marks_of(generator: Any) -> list[memoryview]:
    """A part of each generator that changes whenever the generator does; ``generator`` is NumPy's.

    Empty if one is not where we expect it.
    """
    numpys, pythons, torchs = numpy_twister(generator), python_twister(), torch_twister()
    if numpys is None or pythons is None or torchs is None:
        return []
    # The first words, because `seed` sets some of them to constants, the position, and the deviates kept for the next
    # call.
    return [part.data for part in (numpys[:40], numpys[-4:], pythons[1][:40], *torchs.marks)]


@final
class TorchMemory:
    """The memory of a torch CPU generator, without the padding that the compiler inserted.

    Raises:
        ValueError: The memory is not where we expect it.
    """

    # the seed, the number of words left, and the place of the next one; the words
    _HEAD, _WORDS = slice(0, 13), slice(16, 20 + 4 * _WORDS)
    _KEPT = (slice(2520, 2524), 2524), (slice(2528, 2536), 2536)  # the normal deviates, and whether they exist

    def __init__(self, generator: torch.Generator) -> None:
        address, state = getattr(generator, "_cdata", None), generator.get_state().numpy()
        if not isinstance(address, int):
            raise ValueError
        words = state[24 : 24 + 8 * _WORDS].view(np.uint64).astype(np.uint32).tobytes()
        # if the first words are in there, the object contains all of them
        place = ctypes.string_at(address, 256).find(words[:16])
        if place < 20 or ctypes.string_at(address + place, len(words)) != words:
            raise ValueError
        self._memory = _memory(address + place - 20, 20 + len(words) + 28)

    @property
    def place(self) -> np.ndarray:
        """The 8 bytes with the place of the next word, and the first word."""
        return self._memory[16:24]

    @property
    def marks(self) -> tuple[np.ndarray, ...]:
        """The seed, the places and the first words; and whether there are deviates, which are left there when used."""
        return self._memory[self._HEAD], self._memory[16:40], *(self._memory[has : has + 1] for _, has in self._KEPT)

    def read(self) -> tuple[Any, ...]:
        """The equivalent of ``generator.get_state``."""
        memory = self._memory.tobytes()
        (single, has_single), (double, has_double) = self._KEPT
        return (
            memory[self._WORDS],
            memory[self._HEAD],
            memory[has_single] and memory[single],
            memory[has_double] and memory[double],
        )


def _torch_state(read: tuple[Any, ...]) -> bytes:
    """What ``get_state`` returns in the state described by the result of `TorchMemory.read`."""
    words, head, single, double = read
    place, *twister = np.frombuffer(words, np.uint32).tolist()
    seed, left, seeded = struct.unpack("<QiB", head)
    state = struct.pack(f"<QiiQ{_WORDS}Q", seed, left, seeded, place, *twister)
    state += struct.pack("<8x8s8xi4x", double or b"", bool(double))  # a double-precision deviate, and whether it exists
    return state + struct.pack("<4s?3x", single or b"", bool(single))  # the same in single precision


@cache
def torch_twister() -> TorchMemory | None:
    """The memory of torch's global generator; None if it is not where we expect it, or if a test with a separate
    generator shows that it is incomplete.
    """
    probe = torch.Generator(device="cpu").manual_seed(1)
    try:
        memory, found = TorchMemory(probe), TorchMemory(torch.default_generator)
    except ValueError:
        return None
    seen, told = [memory.read()], [probe.get_state()]
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):  # every other draw uses a kept deviate
        torch.randn(1, generator=probe, dtype=dtype, device="cpu")
        seen.append(memory.read())
        told.append(probe.get_state())
    return (
        found
        if all(_torch_state(state) == true.numpy().tobytes() for state, true in zip(seen, told, strict=True))
        else None
    )


def _python_words(memory: bytes) -> tuple[int, ...]:
    """624 words and a position, as ``random.getstate`` returns them."""
    place, *words = np.frombuffer(memory, np.uint32).tolist()
    return (*words, place)


def _numpy_state(memory: bytes, has_deviate: int = 0, deviate: float = 0.0) -> tuple[str, np.ndarray, int, int, float]:
    words = np.frombuffer(memory, np.uint32)
    return "MT19937", words[:_WORDS], int(words[_WORDS]), has_deviate, deviate
