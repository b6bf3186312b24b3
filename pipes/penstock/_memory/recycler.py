"""Recycled memory within one process, for batches of any kind."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np

from penstock._memory.buffers import carved, carved_bytes
from penstock._memory.slots import NO_SLOT, KeptBatches, SlotTable, SlotView

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from penstock._memory.allocation import Spec

LARGE = 2**20
"""Batches of this many bytes or more are recycled. Smaller ones are made faster where the C library puts them."""


@final
class Recycler:
    """Memory for the batches of one graph, shared by any number of threads; `Recycler.allocate` is an `Allocate`.

    Args:
        in_work: How many batches may be in the making, or ready and not yet delivered, at once.
    """

    def __init__(self, in_work: int = 0) -> None:
        self._slots = SlotTable(KeptBatches(in_work))
        self._made = 0
        self._lock = threading.Lock()  # a finalizer never takes it: it only appends to a deque

    def allocate(self, specs: Sequence[Spec]) -> list[torch.Tensor] | None:
        """Tensors in a slot that nothing views any more; None for a small batch."""
        nbytes = carved_bytes(specs)
        if nbytes < LARGE:
            return None
        with self._lock:
            memory = self._view(nbytes)
        return carved(memory, specs)

    def _view(self, nbytes: int) -> SlotView:
        while (number := self._slots.lend()) != NO_SLOT:
            if self._slots.size(number) >= nbytes:
                return self._slots.view(number)
            self._slots.give_back(number, useful=False)
        self._slots.dropped()
        number, self._made = self._made, self._made + 1
        self._slots.add(number, memoryview(cast("Any", np.empty(nbytes + nbytes // 8, np.uint8))))
        return self._slots.view(number)
