"""Mapper: turns items into data in the caller's thread.

It differs from a `ParallelMapper` without workers in that its items can be batched and sharded: a `Batcher` or a `Sharder` downstream may
take several at once. A `ParallelMapper` has items in flight, and refuses that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

from penstock._memory.recycler import Recycler
from penstock._nodes.index_node import index_of
from penstock._nodes.inline_work import InlineWork
from penstock._nodes.node import Node, is_marker
from penstock._random.orders import checked_seed
from penstock._workers.meter import now

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._nodes.node import BaseNode

T = TypeVar("T", covariant=True)


@final
class Mapper(Node[T]):
    """Apply ``map_fn`` to each item of ``source`` in the caller's thread. A `Batcher` or a `Sharder` may be downstream.

    If Ctrl-C interrupts an item, that item is lost; a `ParallelMapper` without workers makes it again.

    Args:
        source: Yields the items.
        map_fn: A `Fetch`, or any callable of one value. Never called for a marker.
        seed: Seeds the samples' random numbers; default: the seed of the order.
        seed_global_rngs: Seed the global generators of ``random``, ``numpy.random`` and torch for each sample, and restore the caller's
            afterwards; likewise the generators that ``map_fn`` holds. Items from another mapper have no position to seed by: a warning names a function that draws there. See `ParallelMapper`.
    """

    __module__ = "penstock.nodes"

    def __init__(
        self,
        source: BaseNode[Any],
        map_fn: Callable[[Any], T],
        *,
        seed: int | None = None,
        seed_global_rngs: bool | Literal["always"] = True,
    ) -> None:
        super().__init__(source)
        self.map_fn = map_fn
        self._seed = index_of(self.source).facts.settings.get("seed", 0) if seed is None else checked_seed(seed)
        self._work = InlineWork(map_fn, self._seed, seed_global_rngs)
        self._work.seeded.generators.leave(sampler=getattr(index_of(self.source).first, "sampler", None))
        self._memory: Recycler | None = None

    def _seeds(self) -> dict[str, Any]:
        return {"sample_seed": self._seed}

    def details(self) -> dict[str, Any]:
        return {"map_fn": self.map_fn}

    def transform(self, item: Any) -> Any:
        if self._memory is None:  # created here, so that a graph can be copied until it starts
            self._memory = Recycler()
        return self._work(item, self._memory.allocate)

    @property
    def in_step(self) -> bool:
        """See `InlineWork.in_step`."""
        return self._work.in_step

    def _transformed(self, item: Any) -> Any:
        if is_marker(item):
            return item
        began = now()
        value = self.transform(item)
        self._own_ns += now() - began
        return value
