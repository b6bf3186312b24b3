"""The fields of a pack that have no place for each token: media, and the borders of its documents.

And batches of such packs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, final

import numpy as np
import torch

from penstock._arguments import whole_number
from penstock._fetch.torch_collate import collated_field

if TYPE_CHECKING:
    from collections.abc import Sequence

ADDED: Final = ("segment_ids", "documents", "cu_seqlens", "max_seqlen")
"""The fields that packing may add, besides ``position_ids`` and the offsets."""

Rule = int | Literal["offsets", "max"]
"""How a field of several rows becomes one of a batch: concatenated along an axis; concatenated, each row counting on
from the one before; or the largest.
"""


@final
class Along(NamedTuple):
    """A field that is concatenated along ``axis``.

    ``empty`` stands for it in sequences that lack it; None: none may.
    """

    axis: int
    empty: Any


@final
class Ragged(NamedTuple):
    """The fields of a row whose sizes differ from row to row.

    Attributes:
        along: See `Packs`.
        cu_seqlens: Whether to add the borders of the documents.
    """

    along: dict[str, Along]
    cu_seqlens: bool

    @classmethod
    def of(cls, along: Any, cu_seqlens: bool) -> Self | None:
        """These arguments of `Packs`, checked; None if they ask for nothing.

        Raises:
            ValueError: ``along`` is not as described there.
        """
        if not isinstance(along, Mapping | None):
            raise ValueError(
                f"along={along!r:.80} must be a dict of one axis per field, such as {{'pixel_values': 0}}."
            )
        fields = {name: _along(name, given) for name, given in (along or {}).items()}
        ragged = cls(fields, bool(cu_seqlens))
        if wrong := sorted(fields.keys() & {*ragged.added(), "position_ids"}):
            raise ValueError(f"along names {wrong[0]!r}, which packing adds itself. Rename that field.")
        return ragged if fields or cu_seqlens else None

    def added(self) -> set[str]:
        """The names of the fields that it may add."""
        return {*ADDED, *(f"{name}_offsets" for name in self.along)}

    def settings(self) -> dict[str, Any]:
        """As JSON, for a step."""
        along = [[name, axis, empty is not None and kind_of(empty, axis)] for name, (axis, empty) in self.along.items()]
        return {"along": along, "cu_seqlens": self.cu_seqlens}

    def row(
        self, row: dict[str, Any], documents: Sequence[tuple[int, Mapping[str, Any]]], lengths: Sequence[int]
    ) -> PackedRow:
        """A row, with the other fields of its documents: each is a number and its parts."""
        capacity = len(row["segment_ids"])
        found: dict[str, Any] = {}
        numbers = {"documents": np.array([number for number, _ in documents], np.int64)}
        rules: dict[str, Rule] = {"documents": 0}
        for name, (axis, _) in self.along.items():
            parts = [part[name] for _, part in documents]
            found[name] = torch.cat(parts, axis) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts, axis)
            numbers[f"{name}_offsets"] = np.cumsum([0, *(part.shape[axis] for part in parts)])
            rules |= {name: axis, f"{name}_offsets": "offsets"}
        if self.cu_seqlens:
            each = [*lengths, capacity - sum(lengths)] if sum(lengths) < capacity else lengths
            numbers["cu_seqlens"] = np.cumsum([0, *each], dtype=np.int32)
            found["max_seqlen"] = max(each)
            rules |= {"cu_seqlens": "offsets", "max_seqlen": "max"}
        if isinstance(row["segment_ids"], torch.Tensor):
            found |= {name: torch.from_numpy(array) for name, array in numbers.items()}
        else:
            found |= numbers
        return PackedRow({**row, **found}, rules)


def kind_of(value: Any, axis: int) -> str:
    """The type of an array or a tensor, its dtype, and its shape, in which the size along ``axis`` is left out."""
    shape = [str(size) if at != axis else "…" for at, size in enumerate(value.shape)]
    return f"{type(value).__name__} of {value.dtype}, shape ({', '.join(shape)})"


def _along(name: Any, given: Any) -> Along:
    if not isinstance(given, torch.Tensor | np.ndarray):
        remedy = (
            "It is the axis along which the field is concatenated, or an example of the field that is empty along it."
        )
        return Along(whole_number(f"along[{name!r}]", given, 0, remedy=remedy), None)
    axes = [axis for axis, size in enumerate(given.shape) if size == 0]
    if len(axes) != 1:
        raise ValueError(
            f"along[{name!r}] has the shape {tuple(given.shape)}, but as an example of a sequence without that field "
            f"it must be empty along one axis, such as torch.empty(0, 1176)."
        )
    return Along(axes[0], given)


@final
class PackedRow(dict[str, Any]):
    """A pack with fields whose sizes differ from pack to pack. A batch of such rows is made by `batch_of`.

    Attributes:
        rules: How to do that; a field without a rule is stacked. None for the copies that trainers make of a batch, by
            its type.
    """

    def __init__(self, fields: Mapping[str, Any], rules: Mapping[str, Rule] | None = None) -> None:
        super().__init__(fields)
        self.rules = rules

    def __or__(self, other: Any) -> PackedRow:  # type: ignore[override]  # that of a dict returns a dict
        return PackedRow({**self, **other}, self.rules)


def batch_of(rows: Sequence[Any]) -> dict[str, Any]:
    """A batch of packs; offsets count through all of them."""
    rules = [one.rules if type(one) is PackedRow else None for one in rows]
    if rules[0] is None or any(one != rules[0] for one in rules) or any(one.keys() != rows[0].keys() for one in rows):
        raise ValueError(
            "packs with along= or cu_seqlens= make no batch with other samples, or with packs of other fields. Give "
            "all sources the same along and cu_seqlens; and let a step or a transform that adds a field keep the row: "
            "row['name'] = …."
        )
    batch: dict[str, Any] = {}
    for name in rows[0]:
        column, rule = [row[name] for row in rows], rules[0].get(name)
        if rule is None:
            batch[name] = collated_field(column, f"[{name!r}]")
        elif rule == "max":
            batch[name] = max(column)
        else:
            if rule == "offsets":
                bases = accumulate((int(one[-1]) for one in column), initial=0)
                column = [
                    one[number > 0 :] + base for number, (one, base) in enumerate(zip(column, bases, strict=False))
                ]
            tensors = list(map(torch.as_tensor, column))
            batch[name] = torch.cat(tensors, 0 if rule == "offsets" else rule) if len(tensors) > 1 else tensors[0]
    return batch
