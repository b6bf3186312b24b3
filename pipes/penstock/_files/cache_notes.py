"""Shared notes of a host's processes about one data set in a folder of copies. They affect only speed."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from typing import Final, NamedTuple, final

import numpy as np

from penstock._files.own_files import open_own

_COUNTS: Final = struct.Struct("<8q")
_TRIES: Final = 200


class Counts(NamedTuple):
    """Totals over all processes, since the beginning or since they were cleared.

    Attributes:
        hits: Files opened from an existing copy.
        fetches: Copies made.
        fetched_bytes: Bytes of those copies.
        misses: Files read from their source because there was no room for a copy.
        wait_ns: Time that readers waited for copies.
    """

    hits: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    misses: int = 0
    wait_ns: int = 0


@final
class Notes:
    """A file with the counts and the last known position of each lane.

    It is read and written rather than mapped, because a full disk must raise an error, not a signal.

    Args:
        path: Path of the file; it is created if missing.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: dict[int, float] = {}  # by this process

    def add(self, **more: int) -> None:
        """Add to the counts."""
        try:
            with open(self._path, "r+b", buffering=0, opener=_made) as file:
                for _ in range(_TRIES):  # not for ever: its holder may be stopped
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(0.001)
                counts = _counts_in(file.read(_COUNTS.size))._asdict()
                os.pwrite(
                    file.fileno(), _COUNTS.pack(*(counts[name] + more.get(name, 0) for name in counts), 0, 0, 0), 0
                )
        except OSError:
            pass

    def counts(self) -> Counts:
        """The counts so far."""
        try:
            with open(self._path, "rb", buffering=0, opener=open_own) as file:
                return _counts_in(file.read(_COUNTS.size))
        except OSError:
            return Counts()

    def saw(self, lane: int, time: float) -> None:
        """Record that a reader has reached ``time`` in a lane; see `Opens`."""
        self._seen[lane] = time
        try:
            with open(self._path, "r+b", buffering=0, opener=_made) as file:
                # 0 means that no reader was there
                os.pwrite(file.fileno(), np.float64(1 + time).tobytes(), _COUNTS.size + 8 * lane)
        except OSError:
            pass

    def seen(self, lanes: int) -> np.ndarray:
        """The position of each lane that is read on this host, NaN for the others: float64, shape ``(lanes,)``."""
        found = np.full(lanes, np.nan)
        try:
            with open(self._path, "rb", buffering=0, opener=open_own) as file:
                noted = os.pread(file.fileno(), 8 * lanes, _COUNTS.size)
        except OSError:
            noted = b""
        times = np.frombuffer(noted[: len(noted) // 8 * 8])
        found[: len(times)] = np.where(times > 0, times - 1, np.nan)
        for lane, at in list(self._seen.items()):
            found[lane] = at
        return found


def _made(path: str, flags: int) -> int:
    return open_own(path, flags | os.O_CREAT)


def _counts_in(data: bytes) -> Counts:
    return Counts(*_COUNTS.unpack(data)[: len(Counts._fields)]) if len(data) == _COUNTS.size else Counts()
