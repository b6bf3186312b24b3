"""Packs: several sequences laid one after another into one sample of a fixed length. Knows nothing of how they were chosen."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch

from penstock._fetch.error_policy import annotate
from penstock._fetch.fetch import View, has_getitems
from penstock._fetch.padding import check_fits
from penstock._fetch.sample import current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@final
class Pack(NamedTuple):
    """What a pack is made of; as an index, it stands for the pack. One entry for each member.

    Attributes:
        indices: Which sequence of the dataset.
        positions: Its position in the order, which keys its random numbers; None: they are the pack's.
        wholes: Its length.
        starts: Where the member starts in it.
        lengths: The length of the member.
    """

    indices: list[int]
    positions: list[int] | None
    wholes: list[int]
    starts: list[int]
    lengths: list[int]

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.indices[:8]))
        return f"[{shown}{', …' if len(self.indices) > 8 else ''}] packed"


@final
class PackView(View):
    """A dataset of sequences, seen as one of packs; its indices are `Pack`.

    Args:
        dataset: Of sequences: 1-D arrays, tensors or lists of numbers, or dicts of them. More dimensions may follow the first.
        capacity: Length of a pack.
        pad: The value of the padding, or one for each field, by name; fields without one get 0.
        transform: Applied to each sequence as it was loaded, before it is cut. It must keep the length.

    Raises:
        ValueError: ``pad`` is no number. On loading: a sequence has another length than the pack says, or a field does not fit; names the index.
    """

    def __init__(
        self, dataset: Any, capacity: int, pad: float | Mapping[str, float] = 0, transform: Callable[[Any], Any] | None = None
    ) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of one sample, and {transform!r:.80} cannot be called.")
        for value in pad.values() if isinstance(pad, Mapping) else [pad]:
            if not isinstance(value, int | float | np.number):
                raise ValueError(f"pad={pad!r:.80} must be a number, or a dict of a number for each field.")
        self.dataset = dataset
        self.capacity = capacity
        self.pad = dict(pad) if isinstance(pad, Mapping) else pad
        self.transform = transform
        self._has_getitems = has_getitems(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, pack: Pack) -> dict[str, Any]:
        """The sample of ``pack``."""
        return self._packed(pack, None)

    @property
    def __getitems__(self) -> Callable[[list[Pack]], list[dict[str, Any]]]:
        """The samples of a list of packs; present only if the dataset has a ``__getitems__`` worth calling."""
        if not self._has_getitems:
            raise AttributeError("__getitems__")
        return self._gather

    def _gather(self, packs: list[Pack]) -> list[dict[str, Any]]:
        wanted = [index for pack in packs for index in pack.indices]
        fetched = self.dataset.__getitems__(wanted)
        if type(fetched) not in (list, tuple) or len(fetched) != len(wanted):
            came = f"{len(fetched)} samples" if type(fetched) in (list, tuple) else f"a whole batch, a {type(fetched).__name__},"
            raise ValueError(
                f"{type(self.dataset).__name__}.__getitems__ returned {came} for {len(wanted)} indices. To be packed, it must return a list with a sample for each."
            )
        loaded = iter(fetched)
        return [self._packed(pack, list(islice(loaded, len(pack.indices)))) for pack in packs]

    def _packed(self, pack: Pack, loaded: Sequence[Any] | None) -> dict[str, Any]:
        """The sample of ``pack``; ``loaded`` are its sequences, if they are there already."""
        rows = _Rows(self.capacity, self.pad)
        loading = current.get()
        try:
            for member, index in enumerate(pack.indices):
                if loading is not None and pack.positions is not None:
                    loading.enter_member(pack.positions[member], index)
                try:
                    sequence = self.dataset[index] if loaded is None else loaded[member]
                    if self.transform is not None:
                        sequence = self.transform(sequence)
                    rows.add(sequence, index, *(numbers[member] for numbers in pack[2:]))
                except Exception as exc:
                    annotate(exc, f"in a pack, at dataset index {index}")
                    raise
        finally:
            if loading is not None and pack.positions is not None:
                loading.restart()
        return rows.finish()


class _Rows:
    """The fields of one pack in the making."""

    def __init__(self, capacity: int, pad: Any) -> None:
        self._capacity = capacity
        self._pad = pad
        self._fields: dict[str, Any] | None = None  # None: only empty members so far
        self._names: set[str] | None = None
        self._at = 0
        self._lengths: list[int] = []

    def add(self, sequence: Any, index: int, whole: int, start: int, length: int) -> None:
        """Lay ``sequence[start : start + length]`` behind the others."""
        fields = sequence if isinstance(sequence, Mapping) else {"tokens": sequence}
        values = {name: _checked(name, value, whole, index) for name, value in fields.items()}
        self._check_names(values)
        if not length:
            return
        if self._fields is None:
            self._fields = {name: self._empty(name, value) for name, value in values.items()}
        end = self._at + length
        for name, value in values.items():
            into = self._fields[name]
            if value.dtype != into.dtype or value.shape[1:] != into.shape[1:] or type(value) is not type(into):
                was, came = (f"{one.dtype} of shape (…, {', '.join(map(str, one.shape[1:]))})" for one in (into, value))
                raise ValueError(
                    f"the field {name!r} is {came} here, and {was} in the sequences before it in the pack. Convert it in transform."
                )
            into[self._at : end] = value[start : start + length]
        self._lengths.append(length)
        self._at = end

    def finish(self) -> dict[str, Any]:
        if self._fields is None:
            raise ValueError(
                "all sequences of this pack are empty, so nothing says what its padding is of. Leave empty sequences out of the dataset."
            )
        position_ids, segment_ids = np.zeros((2, self._capacity), np.int64)
        starts = np.cumsum(self._lengths) - self._lengths
        position_ids[: self._at] = np.arange(self._at) - np.repeat(starts, self._lengths)
        segment_ids[: self._at] = np.repeat(np.arange(1, len(starts) + 1), self._lengths)
        numbers: list[Any] = [position_ids, segment_ids]
        if any(isinstance(value, torch.Tensor) for value in self._fields.values()):
            numbers = [torch.from_numpy(array) for array in numbers]
        return {**self._fields, "position_ids": numbers[0], "segment_ids": numbers[1]}

    def _check_names(self, values: dict[str, Any]) -> None:
        if self._names is None:
            self._names = set(values)
            wrong = sorted(self._names & {"position_ids", "segment_ids"})
            if wrong or not values:
                raise ValueError(
                    f"a sequence has the field {wrong[0]!r}, which packing makes itself. Drop it in transform."
                    if wrong
                    else "a sequence has no fields."
                )
            if isinstance(self._pad, dict) and (unknown := sorted(self._pad.keys() - self._names)):
                raise ValueError(f"pad has a value for {unknown[0]!r}, but the sequences have the fields {sorted(self._names)}.")
        elif values.keys() != self._names:
            raise ValueError(f"a sequence has the fields {sorted(values)}, and those before it in the pack have {sorted(self._names)}.")

    def _empty(self, name: str, value: Any) -> Any:
        pad = self._pad.get(name, 0) if isinstance(self._pad, dict) else self._pad
        shape = (self._capacity, *value.shape[1:])
        check_fits(pad, value.dtype, f"the field {name!r}")
        return torch.full(shape, pad, dtype=value.dtype) if isinstance(value, torch.Tensor) else np.full(shape, pad, value.dtype)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or value.dtype.kind in "biufc"


def _checked(name: str, value: Any, whole: int, index: int) -> Any:
    """``value`` as an array or a tensor of the length ``whole``."""
    if isinstance(value, list):
        value = np.asarray(value) if value else np.empty(0, np.int64)
    if not isinstance(value, np.ndarray | torch.Tensor) or not value.ndim or not _is_numbers(value):
        raise ValueError(
            f"the field {name!r} of a packed sequence must be an array, a tensor or a list of numbers, one for each place, but {value!r:.80} came. Drop it in transform."
        )
    if len(value) != whole:
        raise ValueError(
            f"lengths[{index}] is {whole}, but the field {name!r} of sequence {index} has {len(value)} places. Correct the lengths; or, if the field does not "
            f"go along the sequence, drop it in transform."
        )
    return value
