"""Token files: sequences of equal length, cut from the concatenated files."""

from __future__ import annotations

import io
import os
import weakref
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Unpack, cast, final

import numpy as np
import torch

from penstock._arguments import whole_number
from penstock._fetch.array_dataset import RowDataset
from penstock._files.files import IN_USE, check_unchanged, open_file, opened_copy, read_range, stamp, stamp_of
from penstock._files.first_look import ENOUGH, kind_of
from penstock._files.paths import Reach, compression, expanded, is_remote, kept_in
from penstock._streams.shard_names import names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._fetch.array_dataset import Places
    from penstock._files.files import Stamp
    from penstock._files.paths import CopyOptions, Paths


def tokens(
    paths: Paths,
    sequence_length: int,
    *,
    dtype: str = "uint16",
    overlap: int = 0,
    end_of_document: int | None = None,
    documents: Sequence[int] | np.ndarray | None = None,
    header_bytes: int | None = None,
    **files: Unpack[CopyOptions],
) -> Tokens:
    """A map-style dataset of token sequences. Pass it to `Loader.from_dataset`, or mix several with `Mix`.

    The files are treated as one long array, in the order given. Sequence i starts at token ``i * sequence_length`` and
    may span files; the remainder at the end is not used. Nothing is read or counted beforehand, so resuming takes the
    same time anywhere, whatever the size of the files.

    A sample is a dict of int64 tensors of shape ``(sequence_length + overlap,)``: ``"tokens"``; with
    ``end_of_document`` or ``documents`` also ``"position_ids"``, which count from 0 at the start of each document, and
    ``"segment_ids"``, which number the documents of the sequence from 1. If a sequence starts in the middle of a
    document, both start there.

    Args:
        paths: A file, a pattern such as ``"/data/web/*.bin"`` or ``"/data/{000..127}.bin"``, or a list of them. Files
            hold raw little-endian integers (``.bin``) or one array (``.npy``).
        sequence_length: Tokens from the start of a sequence to the start of the next.
        dtype: Type of the tokens in the files: an integer type of up to 8 bytes, except uint64.
        overlap: How many tokens of the next sequence to append. With 1, split a batch into ``tokens[:, :-1]`` and
            ``tokens[:, 1:]``.
        end_of_document: The token that ends each document.
        documents: Where each document starts, in tokens from the start of the first file, in ascending order.
        header_bytes: Bytes before the first token of each file. None: the header of an ``.npy`` file, or the 1024 bytes
            of llm.c and modded-nanogpt, if there is one.
        **files: ``storage_options``, ``cache_dir``, ``max_cache_size``: see `penstock.Shards`. Remote paths need a
            ``cache_dir``. A file is copied when it is first read; a remote file that does not fit is read with one
            request per sequence, plus one that checks whether the file has changed.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A file does not hold a whole number of ``dtype``; the files hold less than one sequence; or an
            argument is invalid. On reading: the size of a file has changed.
    """
    length = whole_number("sequence_length", sequence_length, 1, 2**31)
    span = length + whole_number("overlap", overlap, 0, 2**31)
    kind = _checked_dtype(dtype)
    if end_of_document is not None and documents is not None:
        raise ValueError(
            "end_of_document and documents exclude each other, because both define where documents start. Drop one of "
            "them."
        )
    if end_of_document is not None:
        end_of_document = whole_number(
            "end_of_document", end_of_document, 0, int(np.iinfo(kind).max) + 1, f"The files hold {kind.name}."
        )
    header = None if header_bytes is None else whole_number("header_bytes", header_bytes, 0, 2**31)
    found: list[TokenFile] = []
    count = 0
    reach = Reach(ahead=0, **files)
    for path in reach.of(expanded(paths, reach.storage_options)):
        found.append(_inspected(path, kind, count, header))
        count += found[-1].tokens
    if not found:
        raise FileNotFoundError(f"paths={paths!r:.80} matches no file.")
    starts = None if documents is None else _checked_starts(documents, count)
    return Tokens(TokenFiles(found, kind), length, span, end_of_document, starts)


@final
class Tokens(RowDataset):
    """The dataset that `tokens` makes. It can be read from any thread.

    Raises:
        ValueError: The files hold less than one sequence.
    """

    def __init__(
        self,
        files: TokenFiles,
        sequence_length: int,
        span: int,
        end_of_document: int | None,
        documents: np.ndarray | None,
    ) -> None:
        names = (
            ["tokens"] if end_of_document is None and documents is None else ["tokens", "position_ids", "segment_ids"]
        )
        if files.count < span:
            raise ValueError(
                f"{files} {files.count} tokens of {files.dtype.name}, but one sequence takes {span} "
                f"(sequence_length={sequence_length}, overlap={span - sequence_length}). Reduce sequence_length, or "
                f"check dtype."
            )
        super().__init__(dict.fromkeys(names, ((span,), torch.int64)), (files.count - span) // sequence_length + 1)
        self._files = files
        self._sequence_length = sequence_length
        self._span = span
        self._end_of_document = end_of_document
        self._document_starts = documents

    @property
    def shard_names(self) -> str:
        """A checksum of the files' names, in the order given; see `Fetch`."""
        return self._files.names

    def read(self, rows: np.ndarray, out: Sequence[torch.Tensor], places: Places) -> None:
        starts = rows * self._sequence_length
        raw = np.empty((len(rows), self._span), self._files.dtype)
        for row, start in zip(raw, starts.tolist(), strict=True):
            self._files.read(row, start)
        out[0].numpy()[places] = raw
        if len(out) > 1:
            for field, numbers in zip(out[1:], self._documents(starts, raw), strict=True):
                field.numpy()[places] = numbers

    def close(self) -> None:
        """Close the files. Reading opens them again."""
        self._files.close()

    def _documents(self, starts: np.ndarray, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Position and segment of each token."""
        rows, span = raw.shape
        begins = np.zeros(raw.shape, bool)
        if self._document_starts is None:
            begins[:, 1:] = raw[:, :-1] == self._end_of_document
        else:
            bounds = np.searchsorted(self._document_starts, (starts, starts + span))
            for row, start, low, high in zip(begins, starts, *bounds, strict=True):
                row[self._document_starts[low:high] - start] = True
        begins[:, 0] = True
        borders = np.flatnonzero(begins)
        lengths = np.diff(borders, append=rows * span)
        first = np.searchsorted(borders, borders // span * span)  # the first border of the row
        positions = np.arange(rows * span) - np.repeat(borders, lengths)
        segments = np.repeat(np.arange(1, len(borders) + 1) - first, lengths)
        return positions.reshape(raw.shape), segments.reshape(raw.shape)


@final
class TokenFiles:
    """The tokens of several files as one long array.

    It can be read from any thread. Copies in other processes open the files themselves.

    It reads with ``pread`` rather than mapping the files. If a file is truncated, that raises an error, whereas a
    mapped file would kill the process. It also reads only the bytes of the sequence from disk, whereas a mapped file
    reads ahead (8 KB instead of 500 KB for 4096 tokens; 6 times as fast).
    """

    def __init__(self, files: list[TokenFile], dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.count = files[-1].first + files[-1].tokens
        self._files = files
        self._ends = [file.first + file.tokens for file in files]
        self._open: dict[int, _Descriptor] = {}

    def __str__(self) -> str:
        first, more = self._files[0].path, len(self._files) - 1
        return f"{first} and {more} more hold" if more else f"{first} holds"

    @property
    def names(self) -> str:
        """A checksum of the files' names, in the order given."""
        return names_of([file.path for file in self._files])

    def read(self, row: np.ndarray, start: int) -> None:
        """Fill ``row``, which has at least one element, with the tokens from ``start`` on."""
        number = bisect_right(self._ends, start)
        while True:
            file = self._files[number]
            offset = file.header + (start - file.first) * row.itemsize
            here = row[: file.first + file.tokens - start]
            # keeps the file open while it is read, because another thread may evict it
            descriptor = self._descriptor(number)
            done = descriptor.read(here, offset) // row.itemsize
            if done == len(row):
                return
            if not done and len(here):
                raise file.changed("is shorter now")
            row, start, number = row[done:], start + done, number + (done == len(here))

    def close(self) -> None:
        """Close the files. Reading opens them again."""
        self._open.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}

    def _descriptor(self, number: int) -> _Descriptor:
        found = self._open.get(number)
        if found is None:
            found = self._open[number] = _Descriptor(self._files[number])
            _opened.append((weakref.ref(self), number))
            while len(_opened) > MOST_OPEN:
                dataset, oldest = _opened.popleft()
                if (other := dataset()) is not None:
                    other._open.pop(oldest, None)  # a thread that is still reading it keeps it open
        return found


MOST_OPEN = 128
"""Files that a process keeps open across all datasets."""

_opened: deque[tuple[weakref.ref[TokenFiles], int]] = deque()
"""The open files, oldest first. Needs no lock: nothing here waits for a thread, so a fork is safe at any time."""


class TokenFile(NamedTuple):
    """A file as it was when the dataset was built.

    Attributes:
        path: Path of the file.
        nbytes: Its size.
        header: Bytes before its first token.
        tokens: How many tokens it holds.
        first: How many tokens the files before it hold.
        stamp: Its version, if that is known, which is the case if copies are kept.
    """

    path: str
    nbytes: int
    header: int
    tokens: int
    first: int
    stamp: Stamp | None = None

    def changed(self, how: str) -> ValueError:
        return ValueError(
            f"{self.path} {how} than the {self.nbytes} bytes it had when the dataset was built. Build the dataset once "
            f"its files are complete."
        )


@final
class _Descriptor:
    """An open file or its open copy, closed once nothing reads it any more; or nothing, for a file that is read
    remotely.
    """

    def __init__(self, file: TokenFile) -> None:
        self.fd, self._of = -1, file
        self._copy: BinaryIO | None = None
        self._copy = None if file.stamp is None else opened_copy(file.path, file.stamp)
        if self._copy is None and not is_remote(file.path):
            self.fd = os.open(file.path, os.O_RDONLY)
            nbytes = os.fstat(self.fd).st_size
            if nbytes != file.nbytes:
                raise file.changed("is longer now" if nbytes > file.nbytes else "is shorter now")
            if file.stamp is not None:
                check_unchanged(file.path, file.stamp, stamp_of(file.path, os.fstat(self.fd)), *IN_USE)

    def read(self, into: np.ndarray, offset: int) -> int:
        """Read from ``offset`` on; the number of bytes read."""
        fd = self.fd if self._copy is None else self._copy.fileno()
        if fd >= 0:
            return os.preadv(fd, [cast("Any", into)], offset)
        assert self._of.stamp is not None
        into[:] = np.frombuffer(read_range(self._of.path, self._of.stamp, offset, offset + into.nbytes), into.dtype)
        return into.nbytes

    # at interpreter exit the module `os` may already be gone
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)
        if self._copy is not None:
            self._copy.close()


def check_in_place(path: str) -> None:
    """Raise a `ValueError` unless any range of the file can be read directly."""
    if compression(path) or (is_remote(path) and kept_in(path) is None):
        how = (
            "compressed. Decompress it."
            if compression(path)
            else "remote. Download it, or pass cache_dir= and max_cache_size=."
        )
        raise ValueError(f"{path} cannot be read in place, because it is {how}")


def _inspected(path: str, dtype: np.dtype[Any], first: int, header_bytes: int | None = None) -> TokenFile:
    check_in_place(path)
    seen = None
    if is_remote(path):
        seen = stamp(path)
        nbytes = seen.size
        head = read_range(path, seen, 0, min(nbytes, _MOST_HEADER))
    else:
        with open(path, "rb", opener=open_file) as file:
            nbytes = os.fstat(file.fileno()).st_size
            head = file.read(_MOST_HEADER)
        if kept_in(path) is not None:
            seen = stamp(path)
    header, length = _header_in(head, path, dtype) if header_bytes is None else (header_bytes, None)
    tokens, rest = divmod(nbytes - header, dtype.itemsize)
    if rest or nbytes < header or length not in (None, tokens):
        raise ValueError(
            f"{path} has {nbytes - header} bytes of tokens, which is not a multiple of the size of {dtype.name} or not "
            f"the length that its header states. Check dtype, and whether the file is complete."
        )
    _check_first(
        np.frombuffer(head[header:], dtype, (len(head) - header) // dtype.itemsize if len(head) > header else 0), path
    )
    return TokenFile(path, nbytes, header, tokens, first, seen)


_MOST_HEADER: Final = 2**12
_LLM_C: Final = {20240520: 2, 20240801: 4}
"""Bytes of a token by the number that the files of llm.c and modded-nanogpt begin with; then come a version, the number
of tokens, and zeros up to byte 1024.
"""
_MOST_TOKENS: Final = 2**24
_NO_TOKENS: Final = (".index", ".idx", ".metadata", ".loss", ".json")
"""What lies beside token files of datatrove, Megatron and others."""


def _header_in(head: bytes, path: str, dtype: np.dtype[Any]) -> tuple[int, int | None]:
    """Bytes of a file's header, and the length of its array; 0 and None if it has no header."""
    if path.endswith(_NO_TOKENS):
        raise ValueError(
            f"{path} lies beside a file of tokens, and holds none. Pass a pattern that matches the files of tokens "
            f"only."
        )
    if head.startswith(b"\x93NUMPY"):
        return _header(io.BytesIO(head), path, dtype)
    magic, _, length = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    if (itemsize := _LLM_C.get(magic)) and len(head) >= 1024:
        if itemsize != dtype.itemsize:
            raise ValueError(
                f"{path} has the header of llm.c, by which its tokens take {itemsize} bytes, but dtype={dtype.name!r}. "
                f"Pass dtype='uint{8 * itemsize}'."
            )
        return 1024, length
    if (other := kind_of(head)) and len(head) >= ENOUGH:
        raise ValueError(f"{path} does not hold raw integers{other}. If it does, pass header_bytes=0.")
    return 0, None


def _check_first(tokens: np.ndarray, path: str) -> None:
    """Refuse what no vocabulary has: the tokens of a file read as a narrower or a wider type."""
    if len(tokens) < 64:
        return
    if tokens.dtype.itemsize == 2 and not tokens[1::2].any() and tokens.any():
        raise ValueError(
            f"{path}: every second token is 0, so they take 4 bytes or more. Pass dtype='uint32', or 'int64'."
        )
    if tokens.dtype.itemsize > 2 and np.median(tokens) >= _MOST_TOKENS:
        raise ValueError(
            f"{path}: most of the first tokens are above {_MOST_TOKENS:,}, so they take fewer bytes than "
            f"{tokens.dtype.name}. Pass dtype='uint16', or 'int32'."
        )


def _header(file: BinaryIO, path: str, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Bytes of the header of an ``.npy`` file, and the length of its array."""
    layout: Any = np.lib.format
    try:
        read = layout.read_array_header_1_0 if layout.read_magic(file) == (1, 0) else layout.read_array_header_2_0
        shape, _, found = read(file)
    except Exception as error:  # NumPy also lets errors of its parser through, and names no file
        raise ValueError(
            f"{path} has a header that NumPy cannot read ({error!s:.200}). Write it again with np.save."
        ) from error
    if len(shape) != 1 or found != dtype:
        raise ValueError(
            f"{path} holds an array of {found} of shape {shape} instead of a 1-D array of {dtype.name}. Pass its "
            f"dtype, or flatten it with array.reshape(-1)."
        )
    return file.tell(), shape[0]


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "iu" or kind == np.uint64 or kind.byteorder == ">":
        raise ValueError(
            f"dtype={dtype!r} is not a little-endian integer type that fits into int64. Token files hold, for example, "
            f"uint16, uint32 or int32. Convert others: array.astype('<u2').tofile(…)."
        )
    return kind.newbyteorder("<")


def _checked_starts(documents: Any, tokens: int) -> np.ndarray:
    starts = np.asarray(documents)
    if starts.ndim != 1 or starts.dtype.kind not in "iu":
        raise ValueError(
            f"documents must be a 1-D array of integers, not an array of {starts.dtype} of shape {starts.shape}."
        )
    if len(starts) and (starts[0] < 0 or starts[-1] > tokens or (starts[1:] < starts[:-1]).any()):
        raise ValueError(
            f"documents must ascend from 0 to {tokens}, the number of tokens in all files, but they begin with "
            f"{starts[:3].tolist()} and end with {starts[-3:].tolist()}. Pass the document starts, not their lengths."
        )
    return starts.astype(np.int64, copy=False)
