"""Packs: how the items of an order are grouped by length. A description, and pure functions of a block.

A block is a stretch of an order. All ranks plan the same blocks, so they agree on every group without communication, and a jump plans only one block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np

from penstock._arguments import Shown, checksum, whole_number
from penstock._random.groups import Groups, Pieces, packed, pieces_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock._random.permutation import Int64s

Oversize = Literal["split", "truncate", "error"]
Lengths = np.ndarray[tuple[int], np.dtype[Any]]


@final
class Packs(Shown):
    """Sequences packed into samples of one length: pass it to `Loader.from_dataset` as ``groups=``.

    Each pack is one sample, so ``batch_size`` counts packs. It holds whole sequences (or pieces of sequences longer than ``capacity``), one after
    another, and padding: a dict of the sequences' fields, with ``position_ids``, which start at 0 in each sequence and are 0 in the padding, and
    ``segment_ids``, which number the sequences from 1 and are 0 in the padding. Sequences are 1-D arrays, tensors or lists, whose field is then called
    ``tokens``, or dicts of them. Empty sequences are skipped.

    Packs are made block by block, by best-fit decreasing. They are 99.6 % full with a block of 1024, documents of 645 tokens on average and packs of
    4096. They change from epoch to epoch along with the order. An epoch has no length unless you set ``count``.

    Args:
        lengths: The length of every sequence of the dataset, by index: integers, shape ``(n,)``. They must be exact.
        capacity: Length of a pack.
        block: Number of sequences that are packed together. A jump to a position plans one block, at 4 us per sequence.
        oversize: What to do with a sequence longer than ``capacity``: ``"split"`` it into pieces, ``"truncate"`` it, or raise an ``"error"``.
        pad: The padding value, or a dict of one per field; fields without one get 0.
        count: Count the packs of an epoch, so that ``len(loader)`` works. This plans the whole epoch, at 4 us per sequence.

    Raises:
        ValueError: A length is negative or not an integer, or a sequence is too long for ``oversize="error"``; the message names its index.
    """

    __module__ = "penstock"

    def __init__(
        self,
        lengths: npt.ArrayLike,
        capacity: int,
        *,
        block: int = 1024,
        oversize: Oversize = "split",
        pad: float | Mapping[str, float] = 0,
        count: bool = False,
    ) -> None:
        self.lengths: Lengths = checked_lengths(lengths, whole=True)
        self.capacity: int = whole_number("capacity", capacity, 1)
        self.block: int = whole_number("block", block, 1, 2**24 + 1)
        if oversize not in ("split", "truncate", "error"):
            raise ValueError(f"oversize={oversize!r:.80} must be 'split', 'truncate' or 'error'.")
        self.oversize: Oversize = oversize
        self.pad: float | Mapping[str, float] = pad
        self.count: bool = count
        if oversize == "error":
            pieces_of(self.lengths, self.capacity, "error")
        self.groups_per_item = max(1, -(-int(self.lengths.max(initial=0)) // self.capacity)) if oversize == "split" else 1  # at most
        self._checksum = _checksum(self.lengths)

    def plan(self, indices: Int64s) -> Groups:
        """The packs of a block that consists of these ``indices`` of the dataset."""
        pieces = pieces_of(self.lengths[indices], self.capacity, self.oversize)
        groups = packed(pieces.lengths, self.capacity)
        return Groups(pieces.items[groups.members], groups.splits, Pieces(*(field[groups.members] for field in pieces)))

    def details(self) -> dict[str, Any]:
        return {"lengths": len(self.lengths), "capacity": self.capacity, "oversize": self.oversize}

    def settings(self) -> dict[str, Any]:
        """What must match when a state is loaded."""
        words = {"capacity": self.capacity, "oversize": self.oversize, "block": self.block}
        return {"groups": "packs", **words, "lengths": self._checksum}


def checked_lengths(lengths: npt.ArrayLike, *, whole: bool) -> Lengths:
    """``lengths`` as int64, or as float64 unless they must be ``whole``. Not copied if they already have that type."""
    if isinstance(lengths, Mapping):
        raise ValueError(
            "lengths is a dict, but a mix numbers its sources' samples in the order of their names: pass np.concatenate([lengths[name] for name in sorted(lengths)])."
        )
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iuf"):
        raise ValueError(
            f"lengths have shape {given.shape} and dtype {given.dtype}, but there must be one number for each index of the dataset: shape (n,)."
        )
    wrong = ~((given >= 0) & (given < 2**48)) if given.size else np.zeros(0, bool)
    if given.dtype.kind == "f" and whole and given.size:
        wrong |= np.floor(given) != given
    if wrong.any():
        first = int(wrong.argmax())
        kind = "a whole number" if whole else "a number"
        raise ValueError(
            f"lengths[{first}] is {given[first]}, but a length must be {kind} from 0 to 2**48 ({int(wrong.sum())} are not). Correct it, or drop that item from the dataset."
        )
    return given.astype(np.float64 if given.dtype.kind == "f" and not whole else np.int64, copy=False)


def _checksum(lengths: Lengths) -> str:
    """A hash of the lengths; takes 1 s for 10^8 of them."""
    return checksum(np.ascontiguousarray(lengths, lengths.dtype.newbyteorder("<")).data)
