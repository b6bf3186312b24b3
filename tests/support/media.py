"""Documents with pictures that carry their own address, and what every pack of them must be: an oracle that knows
nothing of how packs are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EPOCH, DOCUMENT = 1_000_000, 1000
"""Token p of document i in epoch e is ``EPOCH * e + DOCUMENT * i + p``."""
WIDTH = 3
DECLARED: dict[str, Any] = {
    "pixel_values": np.empty((0, WIDTH), np.float32),
    "image_grid_thw": np.empty((0, 3), np.int64),
    "audio": np.empty((2, 0), np.int16),
}
AXES = {"pixel_values": 0, "image_grid_thw": 0, "audio": 1}


class Documents:
    """Documents of given lengths, with pictures of given numbers of patches, and sounds of given numbers of frames.

    Args:
        lengths: Tokens of each document.
        pictures: The number of patches of each of its pictures.
        frames: Frames of its sound.
        rows: Of its own ``position_ids``: None: it has none; 0: shape ``(length,)``.
        tensors: Whether fields are tensors.
        leaves_out: Whether media are left out where there are none.
        media: The names of the media that it has.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        pictures: Sequence[Sequence[int]],
        frames: Sequence[int],
        *,
        rows: int | None = None,
        tensors: bool = False,
        leaves_out: bool = False,
        media: Sequence[str] = (*AXES,),
    ) -> None:
        self.lengths = [*lengths]
        self.pictures = [[*patches] for patches in pictures]
        self.frames = [*frames]
        self.rows = rows
        self.tensors = tensors
        self.leaves_out = leaves_out
        self.names = media

    @property
    def counts(self) -> dict[str, list[int]]:
        """What each document takes of some budgets; two are named after fields."""
        return {
            "images": [len(patches) for patches in self.pictures],
            "pixel_values": [sum(patches) for patches in self.pictures],
            "audio": self.frames,
        }

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.made(index, penstock.sample().epoch)

    def made(self, index: int, epoch: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = {"tokens": self.tokens(index, epoch), **self.media(index, epoch)}
        if self.rows is not None:
            found["position_ids"] = self.position_ids(index)
        if self.leaves_out:
            found = {name: value for name, value in found.items() if name not in AXES or value.shape[AXES[name]]}
        return {name: torch.from_numpy(value) for name, value in found.items()} if self.tensors else found

    def tokens(self, index: int, epoch: int) -> np.ndarray:
        return EPOCH * epoch + DOCUMENT * index + np.arange(self.lengths[index])

    def media(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        """All that it has of pictures and sounds, by name."""
        patches = sum(self.pictures[index])
        grid = [[1, number, size] for number, size in enumerate(self.pictures[index])]
        found = {
            "pixel_values": (1000 * epoch + 100 * index + np.arange(patches * WIDTH).reshape(patches, WIDTH)).astype(
                np.float32
            ),
            "image_grid_thw": np.array(grid, np.int64).reshape(-1, 3) + index,
            "audio": (np.arange(2 * self.frames[index]).reshape(2, -1) + index).astype(np.int16),
        }
        return {name: value for name, value in found.items() if name in self.names}

    def position_ids(self, index: int) -> np.ndarray:
        places = 7 * index + 2 * np.arange(self.lengths[index])
        return places if not self.rows else np.stack([places + row for row in range(self.rows)])


Piece = tuple[int, int, int]


def pieces_of(
    batch: dict[str, Any], data: Documents, capacity: int, epoch: int, numbers: Callable[[int], int] = int
) -> list[list[Piece]]:
    """The documents in each row of a batch, as (index, start, length); and that everything else in the batch is theirs,
    and in their order.

    Args:
        batch: Made by the loader's own collate function.
        data: The documents.
        capacity: Of a row.
        epoch: In which they were loaded.
        numbers: From the index of a document to its number in ``documents``.
    """
    found: list[list[Piece]] = []
    borders, place, offsets = [0], 0, dict.fromkeys(data.names, 0)
    positions = batch["position_ids"]
    for row, segments in enumerate(batch["segment_ids"].numpy()):
        found.append([])
        begin = 0
        for number in range(1, segments.max() + 1):
            length = int((segments == number).sum())
            end = begin + length
            assert length > 0
            assert (segments[begin:end] == number).all(), "a document is in one stretch, in the order of its number"
            tokens = batch["tokens"][row, begin:end].numpy()
            index, start = int(tokens[0]) % EPOCH // DOCUMENT, int(tokens[0]) % DOCUMENT
            assert np.array_equal(tokens, data.tokens(index, epoch)[start : start + length])
            assert int(batch["documents"][place]) == numbers(index)
            own = data.position_ids(index)[..., start : start + length] if data.rows is not None else np.arange(length)
            assert np.array_equal(positions[row, ..., begin:end].numpy(), own)
            for name, part in data.media(index, epoch).items():
                first, last = map(int, batch[f"{name}_offsets"][place : place + 2])
                assert first == offsets[name], "nothing lies between the parts of two documents"
                assert np.array_equal(batch[name].numpy().take(range(first, last), AXES[name]), part)
                offsets[name] = last
                assert part.shape[AXES[name]] == 0 or length == data.lengths[index], "what has media is whole"
            found[-1].append((index, start, length))
            borders.append(row * capacity + end)
            begin, place = end, place + 1
        assert begin <= capacity == len(segments)
        assert not segments[begin:].any()
        assert (batch["tokens"][row, begin:] == -1).all()
        assert not positions[row, ..., begin:].any()
        if begin < capacity:
            borders.append((row + 1) * capacity)
    for name in data.names:
        assert batch[f"{name}_offsets"].dtype == torch.int64
        assert len(batch[f"{name}_offsets"]) == place + 1
        assert batch[name].shape[AXES[name]] == offsets[name]
        assert str(batch[name].dtype).endswith(str(DECLARED[name].dtype))
    if "cu_seqlens" in batch:
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["cu_seqlens"].tolist() == borders
        assert type(batch["max_seqlen"]) is int
        assert batch["max_seqlen"] == max(np.diff(borders))
    assert (batch["documents"].shape, batch["documents"].dtype) == ((place,), torch.int64)
    return found


def drawn(rng: np.random.Generator, n: int, capacity: int, **words: Any) -> Documents:
    """Documents of which those with media fit into a pack."""
    lengths = rng.integers(0, rng.choice([capacity, 2 * capacity + 2]) + 1, n)
    has = (lengths <= capacity) & (lengths > 0) & (rng.random(n) < rng.random())
    pictures = [rng.integers(1, 5, rng.integers(0, 4)) if one else [] for one in has]
    frames = np.where(has & (rng.random(n) < 0.4), rng.integers(1, 6, n), 0)
    return Documents(lengths.tolist(), [list(map(int, one)) for one in pictures], frames.tolist(), **words)
