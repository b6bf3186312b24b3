r"""Token files with an index of their documents, as written by ``IndexedDataset`` of megatron.core: ``<prefix>.bin``
and ``<prefix>.idx``.

Layout of the index, from ``megatron/core/datasets/indexed_dataset.py`` of megatron-core 0.16.1; everything is
little-endian:

========================  ======================  ======================================================================
``MMIDIDX\0\0``             9 bytes
version                   uint64                  1
token type                uint8                   see `_TYPES`
number of sequences       uint64
entries of document part  uint64                  one more than the number of documents
length of each sequence   int32                   in tokens
offset of each sequence   int64                   in bytes, in ``<prefix>.bin``
document boundaries       int64                   counted in sequences: 0, the start of each further document, and the
                                                  number of sequences
mode of each sequence     int8                    in multimodal files only
========================  ======================  ======================================================================
"""

from __future__ import annotations

import operator
import os
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Unpack, final

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock._arguments import whole_number
from penstock._files.files import stamp, whole
from penstock._files.paths import Reach, bare, beside, expanded
from penstock._streams.tables import looked_at
from penstock.formats._tokens import TokenFile, TokenFiles, Tokens, check_in_place

if TYPE_CHECKING:
    from penstock._files.files import Stamp
    from penstock._files.paths import CopyOptions, Paths


def megatron(prefixes: Paths, sequence_length: int, *, overlap: int = 0, **files: Unpack[CopyOptions]) -> Tokens:
    """A map-style dataset of token sequences from Megatron's ``.bin`` and ``.idx``: like `tokens` over the ``.bin``,
    with the documents of the ``.idx``.

    A sample is a dict of int64 tensors of shape ``(sequence_length + overlap,)``: ``"tokens"``, ``"position_ids"`` and
    ``"segment_ids"``. Only the indices are read beforehand, 20 bytes per document, of which 8 bytes are kept.

    The files are those of megatron.core's ``IndexedDataset``. The samples differ from those of its ``GPTDataset``,
    which has its own order, splits and blends; here `Loader` shuffles and `Mix` blends.

    Args:
        prefixes: The path of a ``.bin`` and its ``.idx`` without the suffix (or with one of them), a pattern such as
            ``"/data/web_*"`` or ``"/data/{000..127}"``, or a list of them.
        sequence_length: Tokens from the start of a sequence to the start of the next.
        overlap: How many tokens of the next sequence to append. With 1, split a batch into ``tokens[:, :-1]`` and
            ``tokens[:, 1:]``.
        **files: See `tokens`. The indices are copied as well.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: An index is damaged, multimodal, in the legacy format, or does not match its ``.bin``; the files
            hold something other than integers, have different types, or hold less than one sequence. On reading: a file
            has changed.
    """
    length = whole_number("sequence_length", sequence_length, 1, 2**31)
    span = length + whole_number("overlap", overlap, 0, 2**31)
    found, starts = _found(prefixes, Reach(ahead=0, **files))
    return Tokens(found, length, span, None, starts)


def megatron_documents(prefixes: Paths, **files: Unpack[CopyOptions]) -> Documents:
    """A map-style dataset of the documents in Megatron's ``.bin`` and ``.idx``, one file after another.

    A sample is a dict with ``"tokens"``, int64, shape ``(length,)``: all sequences of the document. ``lengths``, int64,
    shape ``(documents,)``, holds the document lengths, for ``groups=Packs(data.lengths, 4096)`` or
    ``groups=Buckets(data.lengths, …)``. Takes 16 bytes of memory per document.

    Args:
        prefixes: See `megatron`.
        **files: See `megatron`.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: See `megatron`.
    """
    return Documents(*_found(prefixes, Reach(ahead=0, **files)))


@final
class Documents(Dataset[dict[str, torch.Tensor]]):
    """The dataset that `megatron_documents` makes. It can be read from any thread.

    Args:
        files: The tokens of all documents.
        starts: int64, shape ``(documents + 1,)``: where each document begins in ``files``, and where the last one ends.

    Attributes:
        lengths: int64, shape ``(documents,)``: the number of tokens in each document.
    """

    def __init__(self, files: TokenFiles, starts: np.ndarray) -> None:
        self.lengths = np.diff(starts)
        self._files = files
        self._starts = starts

    @property
    def shard_names(self) -> str:
        """A checksum of the files' names, in the order given; see `Fetch`."""
        return self._files.names

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"index {index} is out of bounds for {len(self)} documents")
        raw = np.empty(self.lengths[number], self._files.dtype)
        if len(raw):
            self._files.read(raw, int(self._starts[number % len(self)]))
        return {"tokens": torch.from_numpy(raw.astype(np.int64, copy=False))}

    def close(self) -> None:
        """Close the files. Reading opens them again."""
        self._files.close()


class _Index(NamedTuple):
    """What the index says about a ``.bin``.

    Attributes:
        path: Path of the index.
        dtype: Type of the tokens.
        starts: int64, shape ``(documents + 1,)``: where each document begins, in tokens, and where the last one ends.
        stamp: Stamp of the ``.bin``.
    """

    path: str
    dtype: np.dtype[Any]
    starts: np.ndarray
    stamp: Stamp


def _found(prefixes: Paths, reach: Reach) -> tuple[TokenFiles, np.ndarray]:
    """The tokens of all files, where each document begins in them, and where the last one ends."""
    many = [prefixes] if isinstance(prefixes, str | os.PathLike) else list(prefixes)
    paths = reach.of(expanded(map(_to_bin, many), reach.storage_options))
    if not paths:
        raise FileNotFoundError(f"prefixes={prefixes!r:.80} matches no file.")
    indices = looked_at(_look, paths)
    dtype = indices[0].dtype
    if (other := next((index for index in indices if index.dtype != dtype), None)) is not None:
        raise ValueError(
            f"{indices[0].path} holds {dtype.name} and {other.path} holds {other.dtype.name}, so their tokens may come "
            f"from different vocabularies. If they do not, read each type separately and combine the datasets with "
            f"ConcatDataset or Mix."
        )
    firsts = np.cumsum([0, *(index.starts[-1] for index in indices)])
    files = [
        TokenFile(path, index.stamp.size, 0, int(index.starts[-1]), first, index.stamp)
        for path, index, first in zip(paths, indices, firsts.tolist(), strict=False)
    ]
    starts = [index.starts[:-1] + first for index, first in zip(indices, firsts, strict=False)]
    return TokenFiles(files, dtype), np.concatenate([*starts, firsts[-1:]])


def _to_bin(prefix: Any) -> Any:
    """The path of the ``.bin``, from a prefix or the path of either file."""
    return _renamed(os.fspath(prefix), ".bin") if isinstance(prefix, str | os.PathLike) else prefix


def _renamed(path: str, ending: str) -> str:
    name = bare(path)
    stem = name[:-4] if name.endswith((".bin", ".idx")) else name
    return path.replace(name, stem + ending, 1)


def _look(path: str) -> _Index:
    """Read the index of a ``.bin``, and check that the two match."""
    check_in_place(path)
    index_path = beside(path, _renamed(path, ".idx"))
    dtype, starts = _read(index_path)
    seen, nbytes = stamp(path), int(starts[-1]) * dtype.itemsize
    if seen.size != nbytes:
        raise ValueError(
            f"{path} has {seen.size} bytes, but according to {index_path} it should have {nbytes}: {starts[-1]} tokens "
            f"of {dtype.name}. One of them is another version or incomplete: copy both again, or write them again."
        )
    return _Index(index_path, dtype, starts, seen)


def _read(path: str) -> tuple[np.dtype[Any], np.ndarray]:
    """The type of the tokens, and the document boundaries, from an index.

    It is read into memory rather than mapped, because truncating a mapped file would kill the process. All redundant
    values are checked against each other.
    """
    with whole(path) as file:
        head = file.read(_HEAD.size)
        if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
            raise ValueError(
                f"{path} is not an index of an IndexedDataset, because it begins with {head[:9]!r} instead of "
                f"{_MAGIC!r}. (TNTIDX is the legacy format of fairseq. Write its documents again with "
                f"IndexedDatasetBuilder of megatron.core.)"
            )
        if len(head) < _HEAD.size:
            raise _damaged(path, f"it has {len(head)} bytes, but its header alone takes {_HEAD.size}")
        _, version, code, sequences, borders = _HEAD.unpack(head)
        name = _TYPES.get(code, f"the unknown token type {code}")
        if version != 1 or "int" not in name:
            raise ValueError(
                f"{path} has version {version} and {name}, but must have version 1 and integers. Write it again, for "
                f"example as numpy.int32."
            )
        nbytes = file.seek(0, os.SEEK_END)  # checked before allocating memory, because these numbers come from the file
        needed = _HEAD.size + 12 * sequences + 8 * borders
        if sequences and nbytes == needed + sequences:
            raise ValueError(
                f"{path} is multimodal: it has a mode for each sequence, so the sequences may not share one "
                f"vocabulary, and penstock cannot separate them. Read it with IndexedDataset(prefix, multimodal=True) "
                f"of megatron.core as a map-style dataset, or write the sequences of one mode without modes."
            )
        if nbytes != needed:
            raise _damaged(
                path,
                f"{sequences} sequences and {borders} document boundaries take {needed} bytes, but it has {nbytes}",
            )
        file.seek(_HEAD.size)
        dtype = np.dtype(name).newbyteorder("<")
        lengths = np.frombuffer(file.read(4 * sequences), "<i4")
        if (at := _first(lengths < 0)) is not None:
            raise _damaged(path, f"sequence {at} has {lengths[at]} tokens")
        ends = np.zeros(sequences + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        for begin in range(0, sequences, _BLOCK):  # they are only compared, so not all of them need to be in memory
            pointers = np.frombuffer(file.read(8 * min(_BLOCK, sequences - begin)), "<i8")
            expected = ends[begin : begin + len(pointers)] * dtype.itemsize
            if (at := _first(pointers != expected)) is not None:
                raise _damaged(
                    path,
                    f"sequence {begin + at} begins at byte {pointers[at]}, but those before it take {expected[at]} "
                    f"bytes without a gap",
                )
        documents = np.frombuffer(file.read(8 * borders), "<i8")
    if not borders or documents[0] or documents[-1] != sequences or (documents[1:] < documents[:-1]).any():
        raise _damaged(
            path,
            f"its document boundaries should ascend from 0 to {sequences}, the number of its sequences, but they begin "
            f"with {documents[:3].tolist()} and end with {documents[-3:].tolist()}; did its writer call end_document?",
        )
    return dtype, ends[documents]


def _first(wrong: np.ndarray) -> int | None:
    """The first index that is true."""
    return int(wrong.argmax()) if wrong.any() else None


def _damaged(path: str, why: str) -> ValueError:
    return ValueError(
        f"{path} is damaged or incomplete: {why}. Copy it again, or write it again with IndexedDatasetBuilder of "
        f"megatron.core."
    )


_MAGIC: Final = b"MMIDIDX\0\0"
_BLOCK: Final = 2**17
_HEAD: Final = struct.Struct("<9sQBQQ")
_TYPES: Final = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
