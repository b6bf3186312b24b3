"""Compressed files, decompressed as they are read."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, BinaryIO, Final, final

from penstock._arguments import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

STEP: Final = 2**11
"""Bytes decompressed at a time. By RFC 8878 four of them may stand for a block of 128 KiB, so this produces at most 64
MiB.
"""

NO_BYTES: Final = (
    "{} is empty, but even compressed data without records has some bytes, so it was cut short or not written yet."
)


@final
class Unpacked(io.RawIOBase):
    """Decompresses all frames of a file, up to its last byte.

    The libraries' own streams mistake a frame that is truncated or has a damaged header for the end.

    Args:
        file: Closed together with this object.
        path: For error messages.
        new: Makes a decompressor for a frame.
        bound: The maximum number of bytes at a time, if the decompressor accepts one.
    """

    def __init__(self, file: BinaryIO, path: str, new: Callable[[], Any], *bound: int) -> None:
        self._new = new
        self._bound = bound
        self._file = file
        self._path = path
        self._frame: Any = None
        self._rest = b""  # read from beyond the end of a frame
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            frame, data = self._frame, b""
            if frame is None or frame.eof or getattr(frame, "needs_input", True):
                data, self._rest = self._rest or self._file.read(STEP), b""
                if not data and frame is None:
                    raise EOFError(NO_BYTES.format(self._path))
                if not data and not frame.eof:
                    raise EOFError(
                        f"{self._path} ends in the middle of its compressed data, so it was cut short. Copy it again."
                    )
                if not data:
                    return 0
                if frame is None or frame.eof:
                    if frame is not None and not (data := data.lstrip(b"\0")):  # a file may be padded with zeros
                        continue
                    frame = self._frame = self._new()
            try:
                self._left = memoryview(frame.decompress(data, *self._bound))
            except MemoryError:
                raise
            except Exception as exc:  # each library has its own exception types
                if "not enough memory" in str(exc):
                    raise MemoryError(f"{self._path}: {exc}.") from exc
                why = f"is damaged, or not compressed as its name says: {exc}."
                if "too much memory" in str(exc):
                    why = (
                        f"was compressed with a window of more than {_longest_window():,} bytes (zstd --long or "
                        f"--ultra). Reading takes that much memory for each open file. Set the environment variable "
                        f"{ZST_LONG}=31, or the number after --long, to allow it."
                    )
                raise ValueError(f"{self._path} {why}") from exc
            if frame.eof:
                self._rest = frame.unused_data
        view = memoryview(buffer).cast("B")
        n = min(len(view), len(self._left))
        view[:n] = self._left[:n]
        self._left = self._left[n:]
        return n

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


ZST_LONG: Final = "PENSTOCK_ZSTD_LONG"
"""An environment variable, because worker processes inherit it and the command ``index`` obeys it, too: the window, as
in ``zstd --long=31``.
"""


def _longest_window() -> int:
    text = os.environ.get(ZST_LONG, "27")
    return 1 << whole_number(ZST_LONG, int(text) if text.isdecimal() else text, 10, 32)


LIBRARIES: Final[dict[str, tuple[Any, ...]]] = {
    ".gz": ("zlib", lambda module: module.decompressobj(31)),
    ".zst": ("zstandard", lambda module: module.ZstdDecompressor(max_window_size=_longest_window()).decompressobj()),
    ".xz": ("lzma", lambda module: module.LZMADecompressor(), 2**18),
    ".bz2": ("bz2", lambda module: module.BZ2Decompressor(), 2**18),
}
"""The decompressor of a frame and, if the library supports a limit, the number of bytes at a time."""
