"""Writes the files of an ``IndexedDataset``, by the layout that `penstock.formats._megatron` describes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def index(lengths: Any, documents: Any, dtype: str = "uint16", *, modes: Any = (), **other: Any) -> bytes:
    """An index of sequences of these ``lengths``, with ``documents`` as their borders; ``other`` replaces what its
    header or pointers say."""
    lengths = np.asarray(lengths, np.int64)
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    said = {
        "magic": b"MMIDIDX\0\0",
        "version": 1,
        "code": CODES[dtype],
        "sequences": len(lengths),
        "borders": len(documents),
        **other,
    }
    return b"".join(
        [
            struct.pack("<9sQBQQ", *(said[name] for name in ("magic", "version", "code", "sequences", "borders"))),
            lengths.astype("<i4").tobytes(),
            np.asarray(other.get("pointers", pointers), "<i8").tobytes(),
            np.asarray(documents, "<i8").tobytes(),
            np.asarray(modes, np.int8).tobytes(),
        ]
    )


def write(prefix: Path, documents: Sequence[Sequence[Any]], dtype: str = "uint16") -> None:
    """Documents, each a list of sequences."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    borders = np.cumsum([0, *map(len, documents)])
    prefix.with_name(f"{prefix.name}.bin").write_bytes(
        b"".join(one.astype(one.dtype.newbyteorder("<")).tobytes() for one in sequences)
    )
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index([len(one) for one in sequences], borders, dtype))
