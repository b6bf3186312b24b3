"""OwnMemory: items of an iterable that fills the same memory for each of them.

File readers, simulators and decoders often yield one buffer again and again. An item may be read before the item before
it is used: in threads, in a batch, in the window of a `Shuffle`. So such items are copied.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import count
from typing import Any, Final, final

import numpy as np
import torch

from penstock._errors import is_own_error
from penstock._memory.tree import leaves, mapped

FIRST: Final = 4
"""Items of a pass that are looked at. So one buffer less may take turns."""


@final
class OwnMemory:
    """Gives each item of a pass its own memory, if the iterable does not.

    The arrays and tensors of the first items are copied and remembered. Where a later one is in the memory of an
    earlier one, all that follow are copied; if none is, nothing is looked at any more.

    Attributes:
        watches: Whether items have to be passed through this.
    """

    def __init__(self) -> None:
        self.watches = True
        self._first: list[Any] = []  # the originals, or their memory could be that of a later one by chance
        self._seen: set[int] = set()
        self._reused: set[int] = set()  # numbers of the leaves in memory that was seen before; -1: the container

    def __call__(self, item: Any) -> Any:
        """``item``, or a copy."""
        try:
            if len(self._first) < FIRST:
                self._look(item)
            if not self._reused and len(self._first) == FIRST:
                self.watches, self._first = False, []
                return item
            number, looks = count(), len(self._first) < FIRST
            return mapped(item, lambda leaf: _copy(leaf) if (next(number) in self._reused) or looks else leaf)
        except Exception as exc:
            if not is_own_error(exc):
                raise
            self.watches, self._first = False, []  # a container that cannot be copied
            return item

    def _look(self, item: Any) -> None:
        at = {number: _address(leaf) for number, leaf in enumerate(leaves(item))}
        at[-1] = id(item) if isinstance(item, list | MutableMapping) else 0
        self._reused.update(number for number, address in at.items() if address in self._seen)
        self._seen.update({*at.values()} - {0})
        self._first.append(item)


def _address(leaf: Any) -> int:
    """Of memory that may be filled again; 0 if there is none."""
    if type(leaf) is np.ndarray:
        return int(leaf.ctypes.data) if leaf.nbytes and leaf.flags.writeable else 0
    if type(leaf) is torch.Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu":
        return 0 if leaf.requires_grad or leaf.__dict__ or leaf.is_nested else leaf.data_ptr()
    return id(leaf) if type(leaf) is bytearray else 0


def _copy(leaf: Any) -> Any:
    if not _address(leaf):
        return leaf
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
