"""The plan of an epoch: the indices that a sampler yielded, in order, and a checksum by which a resumed run recognizes
them.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.int64] | list[Any]
"""The samples of a plan: a list if they are not all integers."""


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The output of a sampler for one epoch, or for a block of the epoch if the sampler has no length and did not end
    soon.

    Attributes:
        values: The samples in order: int64, shape ``(samples,)``, or a list.
        starts: Where each batch begins in ``values``, and the end: int64, shape ``(batches + 1,)``; None if items are
            single samples.
        begin: The position of the first item in the epoch.
        samples: Number of samples before it in the epoch.
        before: The checksum of those samples.
        more: Whether another block follows, which may be empty.
    """

    values: Values
    starts: npt.NDArray[np.int64] | None
    begin: int = 0
    samples: int = 0
    before: int = 0
    more: bool = False

    def __len__(self) -> int:
        return len(self.values) if self.starts is None else len(self.starts) - 1

    @property
    def end(self) -> int:
        """The position in the epoch after the last item."""
        return self.begin + len(self)

    def checksum(self, begin: int, end: int, checksum: int = 0) -> int:
        """CRC-32 (ISO 3309) of the samples in the items at positions ``begin`` to ``end``, continuing from
        ``checksum``.
        """
        begin, end = begin - self.begin, end - self.begin
        if self.starts is not None:
            begin, end = int(self.starts[begin]), int(self.starts[end])
        if isinstance(self.values, list):
            for value in self.values[begin:end]:
                checksum = zlib.crc32(_text(value).encode(), checksum)
            return checksum
        return zlib.crc32(self.values[begin:end].astype("<i8", copy=False).tobytes(), checksum)

    def signature(self, checksum: int = 0) -> int:
        """CRC-32 of all its samples, and of where its batches begin, continuing from ``checksum``."""
        checksum = self.checksum(self.begin, self.end, checksum)
        return checksum if self.starts is None else zlib.crc32(self.starts.tobytes(), checksum)

    def fits(self, position: int, checksum: int | None) -> bool:
        """Whether ``position`` is in this plan and ``checksum``, if there is one, matches the samples before it."""
        return self.begin <= position <= self.end and checksum in (
            None,
            self.checksum(self.begin, position, self.before),
        )


def _text(value: Any) -> str:
    """What tells a sample from others, alike in every process: its ids, or what it holds, and never an address."""
    for name in ("ids", "id"):
        if (found := getattr(value, name, None)) is not None and not callable(found):
            return repr(found if isinstance(found, str | int) else [*found])
    text = repr(value)
    if _ADDRESS.search(text) is None:
        return text
    return _ADDRESS.sub("", f"{type(value).__qualname__} {getattr(value, '__dict__', text)}")


_ADDRESS = re.compile(" at 0x[0-9a-f]+")
