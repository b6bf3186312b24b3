"""Packs: how the items of an order are grouped by length. A description, and pure functions of a block.

A block is a stretch of an order. All ranks plan the same blocks, so they agree on every group without communication,
and a jump plans only one block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np

from penstock._arguments import Shown, checksum, whole_number
from penstock._random.groups import Groups, Pieces, packed, packed_within, pieces_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock._random.permutation import Int64s

    ByIndex = npt.ArrayLike | Mapping[str, npt.ArrayLike]

Oversize = Literal["split", "truncate", "error"]
Lengths = np.ndarray[tuple[int], np.dtype[Any]]


@final
class Packs(Shown):
    """Sequences packed into samples of one length: pass it to `Loader.from_dataset` as ``groups=``.

    Each pack is one sample, so ``batch_size`` counts packs. It holds whole sequences (or pieces of sequences longer
    than ``capacity``), one after another, and padding: a dict of the sequences' fields, with ``position_ids``, which
    start at 0 in each sequence and are 0 in the padding, and ``segment_ids``, which number the sequences from 1 and are
    0 in the padding. Sequences are 1-D arrays, tensors or lists, whose field is then called ``tokens``, or dicts of
    them. Empty sequences are skipped. If sequences have ``position_ids``, those are kept: shape ``(length,)``, or
    ``(k, length)`` for k rows of them, which are ``(k, capacity)`` in a pack.

    *Media.* Fields named in ``along`` are not one per token. Those of a pack are concatenated in the order of its
    sequences; those of sequence j are at ``<field>_offsets[j]`` to ``[j + 1]`` of the axis (int64). A sequence that has
    some is never cut. With ``along`` or ``cu_seqlens`` a pack also says which sequences it holds: ``documents``, their
    indices in the dataset. In a batch, these fields have no dimension for the packs: they continue from one pack to the
    next, and offsets and ``cu_seqlens`` count through the whole batch.

    Packs are made block by block, by best-fit decreasing. They are 99.6 % full with a block of 1024, documents of 645
    tokens on average and packs of
    4096. They change from epoch to epoch along with the order. An epoch has no length unless you set ``count``.

    Args:
        lengths: The length of every sequence of the dataset, by index: integers, shape ``(n,)``. They must be exact.
            For a `Mix` a dict of them, by source.
        capacity: Length of a pack.
        block: Number of sequences that are packed together. A jump to a position plans one block, at 4 us per sequence.
        oversize: What to do with a sequence longer than ``capacity``: ``"split"`` it into pieces, ``"truncate"`` it, or
            raise an ``"error"``.
        pad: The padding value, or a dict of one per field; fields without one get 0.
        count: Count the packs of an epoch, so that ``len(loader)`` works. This plans the whole epoch, at 4 us per
            sequence.
        along: The axis of each field that is concatenated, such as ``{"pixel_values": 0, "image_grid_thw": 0}``. Every
            sequence must have the field. To leave it out of some, pass an example that is empty along the axis, such as
            ``torch.empty(0, 1176)``.
        also: Further budgets, by name: what each sequence takes, by index (integers, shape ``(n,)``), and how much a
            pack may hold. A sequence that takes some of one is never cut. If the name is that of a field in ``along``,
            the counts must be the field's sizes.
        cu_seqlens: Add ``cu_seqlens``, where each sequence begins and, at last, the capacity, and ``max_seqlen``, an
            ``int``, for attention of variable length: int32, from 0. Padding counts as one more sequence, so every
            place belongs to one.

    Raises:
        ValueError: A length or a count is negative or not an integer; there is not one for each index; or a sequence is
            too long for ``oversize="error"`` or because it cannot be cut, or exceeds a budget. The message names its
            index.
    """

    __module__ = "penstock"

    def __init__(
        self,
        lengths: ByIndex,
        capacity: int,
        *,
        block: int = 1024,
        oversize: Oversize = "split",
        pad: float | Mapping[str, float] = 0,
        count: bool = False,
        along: Mapping[str, Any] | None = None,
        also: Mapping[str, tuple[ByIndex, int]] | None = None,
        cu_seqlens: bool = False,
    ) -> None:
        given, self.sources = by_source("lengths", lengths, whole=True)
        self.lengths: Lengths = checked_lengths(given, whole=True)
        self.capacity: int = whole_number("capacity", capacity, 1)
        self.block: int = whole_number("block", block, 1, 2**24 + 1)
        if oversize not in ("split", "truncate", "error"):
            raise ValueError(f"oversize={oversize!r:.80} must be 'split', 'truncate' or 'error'.")
        self.oversize: Oversize = oversize
        self.pad: float | Mapping[str, float] = pad
        self.count: bool = count
        self.along = along
        self.cu_seqlens = cu_seqlens
        self.also = {name: self._budget(f"also[{name!r}]", given) for name, given in (also or {}).items()}
        if oversize == "error":
            pieces_of(self.lengths, self.capacity, "error")
        # at most
        self.groups_per_item = (
            max(1, -(-int(self.lengths.max(initial=0)) // self.capacity)) if oversize == "split" else 1
        )
        self._checksum = _checksum(self.lengths)

    def plan(self, indices: Int64s) -> Groups:
        """The packs of a block that consists of these ``indices`` of the dataset."""
        pieces = pieces_of(self.lengths[indices], self.capacity, self.oversize)
        if self.also:
            takes = [pieces.lengths, *(counts[indices[pieces.items]] for counts, _ in self.also.values())]
            groups = packed_within(
                np.stack(takes, 1), np.array([self.capacity, *(limit for _, limit in self.also.values())])
            )
        else:
            groups = packed(pieces.lengths, self.capacity)
        return Groups(pieces.items[groups.members], groups.splits, Pieces(*(field[groups.members] for field in pieces)))

    def details(self) -> dict[str, Any]:
        also = {"also": {name: limit for name, (_, limit) in self.also.items()}} if self.also else {}
        return {"lengths": len(self.lengths), "capacity": self.capacity, "oversize": self.oversize, **also}

    def settings(self) -> dict[str, Any]:
        """What must match when a state is loaded."""
        words: dict[str, Any] = {"capacity": self.capacity, "oversize": self.oversize, "block": self.block}
        if self.also:
            words["also"] = [[name, limit, _checksum(counts)] for name, (counts, limit) in self.also.items()]
        return {"groups": "packs", **words, "lengths": self._checksum}

    def _budget(self, what: str, given: tuple[ByIndex, int]) -> tuple[Lengths, int]:
        """A budget in ``also``, checked: what each sequence takes, and the limit."""
        if not isinstance(given, tuple) or len(given) != 2:
            raise ValueError(f"{what}={given!r:.80} must be a tuple of the counts by index and the limit of a pack.")
        numbers, sources = by_source(what, given[0], whole=True)
        counts, limit = (
            checked_lengths(numbers, whole=True, name=what),
            whole_number(f"the limit of {what}", given[1], 1),
        )
        if len(counts) != len(self.lengths) or sources not in (None, self.sources):
            raise ValueError(
                f"{what} has {sources or len(counts)} counts, but there are {self.sources or len(self.lengths)} "
                f"lengths. Pass one count for each length, both by source or neither."
            )
        never = (
            f"a sequence that takes some of a budget is never cut, and the length there is above the capacity of "
            f"{self.capacity}"
        )
        for wrong, why in (
            (counts > limit, f"a pack is limited to {limit}. Raise the limit"),
            ((counts > 0) & (self.lengths > self.capacity), f"{never}. Raise the capacity"),
            (
                (counts > 0) & (self.lengths == 0),
                "the length there is 0, and such a sequence is left out. Correct the length",
            ),
        ):
            if wrong.any():
                said = f"{what} counts {counts[wrong][0]} at index {int(wrong.argmax())}, but {why}"
                raise ValueError(f"{said}, or drop that sample ({int(wrong.sum())} are of that kind).")
        return counts, limit


def by_source(what: str, given: ByIndex, *, whole: bool) -> tuple[npt.ArrayLike, dict[str, int] | None]:
    """Numbers by index; and how many each source of a mix has, if they were given by its name."""
    if not isinstance(given, Mapping):
        return given, None
    parts = {
        name: checked_lengths(given[name], whole=whole, name=f"{what}[{name!r}]") for name in sorted(given, key=str)
    }
    return np.concatenate([np.zeros(0, np.int64), *parts.values()]), {name: len(part) for name, part in parts.items()}


def checked_lengths(lengths: npt.ArrayLike, *, whole: bool, name: str = "lengths") -> Lengths:
    """``lengths`` as int64, or as float64 unless they must be ``whole``. Not copied if they already have that type."""
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iuf"):
        raise ValueError(
            f"{name} have shape {given.shape} and dtype {given.dtype}, but there must be one number for each index of "
            f"the dataset: shape (n,)."
        )
    wrong = ~((given >= 0) & (given < 2**48)) if given.size else np.zeros(0, bool)
    if given.dtype.kind == "f" and whole and given.size:
        wrong |= np.floor(given) != given
    if wrong.any():
        first = int(wrong.argmax())
        kind = "a whole number" if whole else "a number"
        raise ValueError(
            f"{name}[{first}] is {given[first]}, but a length must be {kind} from 0 to 2**48 ({int(wrong.sum())} are "
            f"not). Correct it, or drop that item from the dataset."
        )
    return given.astype(np.float64 if given.dtype.kind == "f" and not whole else np.int64, copy=False)


def _checksum(lengths: Lengths) -> str:
    """A hash of the lengths; takes 1 s for 10^8 of them."""
    return checksum(np.ascontiguousarray(lengths, lengths.dtype.newbyteorder("<")).data)
