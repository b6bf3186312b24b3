"""The sample that is being loaded: what its ``__getitem__`` may ask about itself."""

from __future__ import annotations

from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from penstock._random.sample_rng import numpy_generator, torch_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch


@final
class Sample:
    """The address of the sample that is being loaded, and random numbers of its own.

    The same (seed, epoch, position) gives the same numbers in any thread, any process, on any rank.

    Attributes:
        seed: The seed of the loader.
        epoch: From 0.
        position: The sample's place in the global sequence of the epoch, before sharding.
        index: Its index in the dataset.
    """

    def __init__(self, seed: int, epoch: int, position: int, index: Any) -> None:
        self.seed = seed
        self.epoch = epoch
        self.position = position
        self.index = index

    @cached_property
    def rng(self) -> np.random.Generator:
        """A NumPy generator of this sample's own."""
        return numpy_generator(self.seed, self.epoch, self.position)

    @cached_property
    def torch_generator(self) -> torch.Generator:
        """A torch generator of this sample's own, on the CPU."""
        return torch_generator(self.seed, self.epoch, self.position)


@final
class SampleCursor:
    """The samples of a batch, one after another. A `Sample` is made of one only if it is asked for, because few are.

    Args:
        seed: Of the loader.
        epoch: Of all of them.
        positions: By row.
        indices: By row.
        cell: The row that is being loaded; where there are no rows, the first.
    """

    __slots__ = ("_cell", "_indices", "_made", "_made_for", "_positions", "epoch", "seed")

    def __init__(self, seed: int, epoch: int, positions: Sequence[int], indices: Sequence[Any], cell: Sequence[int]) -> None:
        self.seed = seed
        self.epoch = epoch
        self._positions = positions
        self._indices = indices
        self._cell = cell
        self._made: Sample | None = None
        self._made_for = 0

    def sample(self) -> Sample:
        """The one being loaded; the same object until the next one is."""
        row = max(0, self._cell[0])
        if self._made is None or self._made_for != row:
            self._made, self._made_for = Sample(self.seed, self.epoch, self._positions[row], self._indices[row]), row
        return self._made

    def again(self) -> None:
        """Let the sample begin anew, with its random numbers."""
        self._made = None


current: ContextVar[SampleCursor | None] = ContextVar("penstock_sample", default=None)


def sample() -> Sample:
    """The sample that is being loaded; for ``__getitem__`` and the transforms it calls.

    Raises:
        RuntimeError: Called where no sample is being loaded.
    """
    loading = current.get()
    if loading is None:
        raise RuntimeError("penstock.sample() is known only while a sample is being loaded: call it in __getitem__, or in what that calls.")
    return loading.sample()
