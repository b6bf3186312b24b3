"""The sample being loaded: what ``__getitem__`` can find out about it."""

from __future__ import annotations

from contextvars import ContextVar
from functools import cached_property
from operator import length_hint
from typing import TYPE_CHECKING, Any, final

from penstock._arguments import Shown
from penstock._random.sample_rng import numpy_generator, torch_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import torch


@final
class Sample(Shown):
    """The address of the sample being loaded, and its own random numbers.

    The same (seed, epoch, position) gives the same numbers in any thread, in any process and on any rank.

    Attributes:
        seed: The seed of the loader.
        epoch: Counted from 0.
        position: The sample's position in the epoch's global sequence, before sharding.
        index: Its index in the dataset.
        source: In a `Mix`, the name of the source of the sample (``"outer/inner"`` in a mix of mixes), also in the
            ``transform`` of the loader. None elsewhere, and in the ``steps`` of a stream, which run before the mix
            draws the record.
        shard: In a step of a stream, the shard that the record is from, as you gave it, such as a path; None elsewhere.
            In a step, ``epoch`` is the pass over the shards, and ``position`` and ``index`` are the record's number in
            the shard.
    """

    __module__ = "penstock"

    def __init__(self, seed: int, epoch: int, position: int, index: Any, source: str | None = None) -> None:
        self.seed = seed
        self.epoch = epoch
        self.position = position
        self.index = index
        self.source = source
        self.shard: Any = None

    def details(self) -> dict[str, Any]:
        shard = {} if self.shard is None else {"shard": self.shard}
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "index": self.index,
            "source": self.source,
            **shard,
        }

    @cached_property
    def rng(self) -> np.random.Generator:
        """A NumPy generator that belongs to this sample."""
        return numpy_generator(self.seed, self.epoch, self.position)

    @cached_property
    def torch_generator(self) -> torch.Generator:
        """A torch generator that belongs to this sample, on the CPU."""
        return torch_generator(self.seed, self.epoch, self.position)


class Cursor:
    """Points to what is being loaded. It builds a `Sample` only on request, because few datasets need one.

    Attributes:
        epoch: The epoch of the sample, or the pass over the shards.
    """

    __slots__ = ("_source", "epoch")

    epoch: int
    _source: str | None

    def sample(self) -> Sample:
        """The sample being loaded; the same object until the next one."""
        raise NotImplementedError

    def made(self) -> Sample | None:
        """The same, if it was already built."""
        raise NotImplementedError

    def enter_source(self, name: str) -> str | None:
        """Record that the sample is now being loaded from the source ``name``.

        Returns the argument for `leave_source`.
        """
        outer = self._source
        self._source = name if outer is None else f"{outer}/{name}"
        if (sample := self.made()) is not None:
            sample.source = self._source
        return outer

    def leave_source(self, outer: str | None) -> None:
        """The source has returned the sample, or failed.

        The rest of the code that makes the sample, such as a transform, still sees it.
        """
        self._source = outer


@final
class SampleCursor(Cursor):
    """Points to the sample being loaded, row by row.

    Args:
        seed: The loader's seed.
        epoch: The epoch of the batch.
        positions: The position of each row; a list or an array.
        indices: The dataset index of each row.
        current_row: Holds the row being loaded; `IDLE` counts as the first row. Or an iterator over the list
            ``indices``, from which the row was taken last, so that nothing has to be written.
    """

    _source = None
    _left = -1, ""  # the row whose source has returned, and its name
    _made: Sample | None = None
    _made_for = 0
    # seeds the global generators for (epoch, position), if requested
    reseed: Callable[[int, int], None] | None = None

    def __init__(
        self,
        seed: int,
        epoch: int,
        positions: Sequence[int] | np.ndarray,
        indices: Sequence[Any],
        current_row: Sequence[int] | Iterator[Any],
    ) -> None:
        self.epoch = epoch
        self.seed = seed
        self._positions = positions
        self._indices = indices
        self._current_row = current_row

    @property
    def row(self) -> int:
        """The row being loaded, from 0."""
        at: Any = self._current_row
        return len(self._indices) - 1 - length_hint(at) if type(at) is _OF_A_LIST else max(0, at[0])

    def sample(self) -> Sample:
        row = self.row
        if self._made is None or self._made_for != row:
            source = self._left[1] if self._source is None and self._left[0] == row else self._source
            self._made, self._made_for = (
                Sample(self.seed, self.epoch, int(self._positions[row]), self._indices[row], source),
                row,
            )
        return self._made

    def made(self) -> Sample | None:
        return self._made if self._made_for == self.row else None

    def leave_source(self, outer: str | None) -> None:
        row, inner = self.row, self._source
        said_more = self._left[0] == row and self._left[1].startswith(f"{inner}/")  # a mix inside this source
        if inner is not None and not said_more:
            self._left = row, inner
        super().leave_source(outer)

    def enter_member(self, position: int, index: Any) -> None:
        """Until `restart`, the sample being loaded is ``index``, at its own ``position``: one of the parts of the
        row.
        """
        self._made, self._made_for = (
            Sample(self.seed, self.epoch, position, index, self._source),
            self.row,
        )
        if self.reseed is not None:
            self.reseed(self.epoch, position)

    def restart(self) -> None:
        """Reset the random numbers of the current sample."""
        self._made = None

    def begin_again(self) -> None:
        """The current sample is loaded once more."""
        self._made, self._left = None, SampleCursor._left


_OF_A_LIST: type = type(iter([]))

current: ContextVar[Cursor | None] = ContextVar("penstock_sample", default=None)


def sample() -> Sample:
    """The sample being loaded; call it in ``__getitem__`` or in a transform.

    Raises:
        RuntimeError: No sample is being loaded in this context.
    """
    loading = current.get()
    if loading is None:
        raise RuntimeError(
            "penstock.sample() works only while a sample is being loaded: call it in __getitem__, in transform=, or in "
            "the function of the first Mapper or ParallelMapper downstream of the sampler."
        )
    return loading.sample()


sample.__module__ = "penstock"
