"""Work that applies a user's function to each item."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

from torch.utils.data import get_worker_info

from penstock._arguments import brief
from penstock._fetch.fetch import Fetch
from penstock._fetch.indices import Indices
from penstock._fetch.sample import SampleCursor
from penstock._fetch.task import Task
from penstock._random.draws import GENERATORS, drawn, looker
from penstock._workers.pool import IDLE

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence

    from penstock._memory.allocation import Allocate
    from penstock._workers.meter import Meter

_logger = logging.getLogger("penstock")


@final
class FunctionTask(Task):
    """`Work` that applies a user's function to each item; the function receives plain values, without their address.

    Args:
        function: Any callable of one value.
        seed: See `Task`.
        seed_global_rngs: See `Task`.
    """

    def __init__(self, function: Callable[[Any], Any], seed: int, seed_global_rngs: bool | Literal["always"]) -> None:
        super().__init__(seed, seed_global_rngs, {"function": function})
        self.function: Callable[..., Any] = function
        self._collates = getattr(function, "__func__", None) is Fetch.collate  # ours, which can use recycled memory
        self._watches = bool(seed_global_rngs)  # until it has said something

    def _done(
        self, task: Any, current_row: MutableSequence[int], allocate: Allocate, inline: bool, meter: Meter | None
    ) -> Any:
        function = partial(self.function, allocate=allocate) if self._collates else self.function
        function = function if meter is None else meter.timed(function, meter.load)
        if isinstance(task, Indices):
            return self._run(lambda: self._applied(function, task), of_many=False, kept=inline)
        # Not by `_run`: nothing seeds its draws, so if the generators were restored, each item would draw the same
        # numbers. In threads other code may draw meanwhile; a `DrawWatch` is there for them.
        if self._watches and self._seeding.active and (inline or get_worker_info() is not None):
            return self._without_address(function, task)
        return function(task)

    def _applied(self, function: Callable[[Any], Any], indices: Indices) -> Any:
        value = indices.plain()
        if indices.is_batch and not len(indices):  # it has no position
            return function(value)
        position = int(indices.positions[0]) if indices.is_batch else indices.positions
        loading = SampleCursor(self.seed, indices.epoch, [position], [value], [IDLE])
        begin = partial(self._begin, loading, position)
        begin()
        return self._compared(function, begin, value)

    def _without_address(self, function: Callable[[Any], Any], value: Any) -> Any:
        """Call ``function`` of what another node has made. Its draws cannot be seeded, so say so if there are any."""
        before = (look := looker(self.generators.states))()
        result = function(value)
        if names := drawn(before, look()):
            self._watches = False
            said = {"the global random numbers" if one in GENERATORS else one for one in names}
            _logger.warning(
                "%s seems to draw from %s: they moved while it ran, unless another thread moved them. Its items come "
                "from another mapper, so they have no position by which to seed those: unless the function seeds them "
                "by the item, the draws differ in every run, and after a resume. Draw in the first mapper downstream "
                "of the sampler, in the dataset or in transform=.",
                brief(self.function),
                " and ".join(sorted(said, reverse=True)),
            )
        return result

    @property
    def parts_that_may_draw(self) -> str:
        return brief(self.function)
