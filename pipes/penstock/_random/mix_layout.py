"""Where the items of a mix go within their block: spread evenly, with jitter, and without resonance.

Pure, and vectorised over blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock._random.mix_stages import MOST
from penstock._random.permutation import Int64s, UInt64s, splitmix64_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._random.mix_stages import Stage

_RUN = 64
"""Number of adjacent places in a block that are permuted among themselves at the end; see `_unaligned`."""


class Blocks(NamedTuple):
    """Some blocks of a stage, laid out.

    Attributes:
        sources: The source at each place, shape ``(blocks, block)``.
        numbers: The number of the item in its source, counted from the start of its block, shape ``(blocks, block)``.
    """

    sources: npt.NDArray[np.uint16]
    numbers: Int64s


def laid_out(stage: Stage, blocks: Sequence[int], keys: UInt64s, used: Sequence[bool]) -> Blocks:
    """Lay out these blocks of ``stage``, using six random words.

    ``used``: whether each source has a share in this stage or an earlier one.
    """
    size, count, n = stage.block, len(stage.shares), len(blocks)
    # numbers that do not depend on sources of later stages
    known = np.maximum(np.cumsum(used) - 1, 0).astype(np.uint64)
    quotas = np.array(
        [[end - begin for begin, end in zip(stage.before(k), stage.before(k + 1), strict=True)] for k in blocks]
    )

    def spread(of_sources: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A per-block, per-source value, repeated for each item: at this point the items of a block are ordered by
        source.
        """
        return np.repeat(of_sources.ravel(), quotas.ravel()).reshape(n, size)

    slots = np.arange(size)
    items = slots - spread(np.cumsum(quotas, axis=1) - quotas)
    counter = np.array([[k % 2**64] for k in blocks], np.uint64) * np.uint64(size) + slots.astype(np.uint64)
    of_sources = counter[:, :1] * np.uint64(MOST) + known
    times = _uniform(splitmix64_stream(counter, keys[0], keys[1]))
    times += items
    times *= spread(1 / np.maximum(quotas, 1))
    times += spread(_uniform(splitmix64_stream(of_sources, keys[2], keys[3])))
    # Sort by the fraction of the time (the shift drops whole ones), then by slot: no two keys are equal, so all sorting
    # algorithms agree.
    keyed = ((times * 2.0**44).astype(np.uint64) << np.uint64(20)) | slots.astype(np.uint64)
    keyed.sort(axis=1)
    sources = spread(np.tile(np.arange(count, dtype=np.uint16), n))
    placed = np.take_along_axis(sources, (keyed & np.uint64(MOST - 1)).astype(np.intp), axis=1)
    placed = _unaligned(placed, splitmix64_stream(counter, keys[4], keys[5]))
    # Each source now has its places, and fills them in order.
    numbers = np.empty((n, size), np.int64)
    np.put_along_axis(numbers, np.argsort(placed, axis=1, kind="stable"), items, axis=1)
    return Blocks(placed, numbers)


def _unaligned(placed: npt.NDArray[np.uint16], words: UInt64s) -> npt.NDArray[np.uint16]:
    """Permute each `_RUN` neighbours by ``words``.

    The phases of two sources keep their distance throughout a block, so two equal sources would nearly alternate, and a
    rank's share would be off by 18 standard deviations.
    """
    shape = (len(placed), -1, _RUN)
    keyed = ((words & ~np.uint64(_RUN - 1)).reshape(shape)) | np.arange(_RUN, dtype=np.uint64)
    keyed.sort(axis=2)
    permuted = np.take_along_axis(placed.reshape(shape), (keyed & np.uint64(_RUN - 1)).astype(np.intp), axis=2)
    return permuted.reshape(placed.shape)


def _uniform(words: UInt64s) -> npt.NDArray[np.float64]:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # the upper 53 bits, which a double holds exactly
