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

from penstock._errors import suppress_own
from penstock._memory.tree import leaves, mapped

FIRST: Final = 4
"""Items that are looked at. So one buffer less may take turns."""


@final
class OwnMemory:
    """Gives each item its own memory, if the iterable does not.

    The arrays and tensors of the first items are copied and remembered. Where a later one is in the memory of an
    earlier one, all that follow are copied; if none is, nothing is looked at any more.

    Attributes:
        watches: Whether items have to be passed through this.
    """

    def __init__(self) -> None:
        self.watches = True
        self._looks = FIRST
        self._first: list[Any] = []  # the originals, or their memory could be that of a later one by chance
        self._seen: set[int] = set()
        self._reused: set[int] = set()  # numbers of the leaves in memory that was seen before; 0: the item itself

    def __call__(self, item: Any) -> Any:
        """``item``, or a copy."""
        number, looks = count(1), self._looks
        with suppress_own():  # a container that cannot be copied
            if looks:
                self._look(item)
            return mapped(item, lambda leaf: _copy(leaf) if next(number) in self._reused or looks else leaf)
        return item

    def _look(self, item: Any) -> None:
        self._looks -= 1
        self._first.append(item)
        at = list(map(_address, [item, *leaves(item)]))
        self._reused.update(number for number, address in enumerate(at) if address in self._seen)
        self._seen.update({*at} - {0})
        if not self._looks:
            self._first.clear()
            self.watches = bool(self._reused)


def _address(part: Any) -> int:
    """Of memory that may be filled again; 0 if there is none."""
    if type(part) is np.ndarray:
        return int(part.ctypes.data) if part.nbytes and part.flags.writeable else 0
    if type(part) is torch.Tensor and part.layout is torch.strided and not part.requires_grad and not part.__dict__:
        return part.data_ptr()
    return id(part) if isinstance(part, bytearray | list | MutableMapping) else 0


def _copy(leaf: Any) -> Any:
    return leaf if not _address(leaf) else leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
