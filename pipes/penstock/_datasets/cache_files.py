"""The files of a cache: who may write them, who reads them, and whose they are.

A cache is two files, with names in a folder or without any in memory. Beside those in a folder, ``penstock.json`` says whose they are::

    penstock.data    record record record …     only ever appended to
    penstock.index   u64 u64 u64 …              of each sample: where in the data its record ends; 0: not there
    a record         arrays, one behind the other | their structure, JSON | sample, bytes of arrays, bytes of JSON, CRC-32

A hit reads two mappings: no lock, no system call. What makes a miss safe, whoever dies at whatever instant:

- A record is appended by one ``write`` with ``O_APPEND``: the kernel gives it a place of its own. Only then are the 8 bytes of the
  index written, and that is what makes the sample be there. To a record that was cut short nothing ever points.
- Whoever loads sample *i* holds a lock on byte *i* of the data. The lock belongs to a file that was opened for this miss (an "open
  file description lock" of Linux), so threads exclude each other as processes do, and the kernel ends it with its holder.
- The CRC of a record is checked when a process first reads it. A sample that fails, for whatever reason, is not there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import sys
from typing import TYPE_CHECKING, Any

from penstock._datasets.cache_record import FOOTER, is_record, module_of, value_at
from penstock._memory.shared_memory import create

if TYPE_CHECKING:
    from collections.abc import Callable


try:
    import fcntl
except ImportError:  # Windows
    _HAS_LOCKS = False
else:
    _HAS_LOCKS = hasattr(fcntl, "F_OFD_SETLK")  # Linux

_FORMAT = f"1, {sys.byteorder}-endian"
_HEAD, _INDEX, _DATA = "penstock.json", "penstock.index", "penstock.data"
_ENTRY = struct.Struct("=Q")
_CREATION = 2**62  # the byte of the data that is locked while the files are made: no sample has that number
_AT_MOST = 0x7FFFF000  # bytes that Linux writes at once
_OPEN = "/proc/self/fd"  # a name there opens a file anew, whether or not it has a name elsewhere
_BINARY = getattr(os, "O_BINARY", 0)
ABSENT = object()


# The two files, as one process sees them.


class Files:
    """Index and data, open; closed when the last thread that reads or writes has let go of them. Owns its descriptors."""

    def __init__(self, index: int, data: int, length: int, folder: str | None = None) -> None:
        self.fds = (index, data)
        self._folder = folder
        self.entries = memoryview(mmap.mmap(index, _ENTRY.size * length, access=mmap.ACCESS_READ)).cast("Q")
        self._memory = memoryview(b"")  # as much of the data as was there when it was last mapped
        self._checked = bytearray(length)  # samples whose CRC this process has seen to be right

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for fd in self.fds:
            close(fd)

    def opened(self, which: int, flags: int) -> int:
        """Index (0) or data (1) once more, with a position and locks of its own; never a new file of the same name."""
        name = f"{_OPEN}/{self.fds[which]}" if os.path.isdir(_OPEN) else os.path.join(self._folder or "", (_INDEX, _DATA)[which])
        return os.open(name, flags | _BINARY)

    def read(self, place: int) -> Any:
        """A copy of sample ``place``, or `ABSENT`."""
        end = self.entries[place]
        if not end:
            return ABSENT
        memory = self._memory
        if end > len(memory):  # the file has grown
            size = os.fstat(self.fds[1]).st_size
            memory = self._memory = memoryview(mmap.mmap(self.fds[1], size, access=mmap.ACCESS_READ) if size else b"")
        if not FOOTER.size <= end <= len(memory):
            return ABSENT
        if not self._checked[place] and not is_record(memory, end, place):
            return ABSENT
        self._checked[place] = 1
        return value_at(memory, end)


class Claim:
    """The right to load samples, of one thread of one process; it ends with its holder at the latest."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.taken: list[int] = []
        self._data = files.opened(1, os.O_WRONLY | os.O_APPEND)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        _release(self._data)

    def take(self, place: int, *, wait: bool) -> bool:
        """Whether sample ``place`` is now this one's to load."""
        taken = _lock(self._data, place, wait=wait)
        if taken:
            self.taken.append(place)
        return taken

    def write(self, place: int, record: bytes) -> None:
        """Append ``record``, and only then point to it."""
        if len(record) > _AT_MOST:
            raise OSError(errno.EFBIG, f"a sample has at most {_AT_MOST} bytes")
        if (written := os.write(self._data, record)) < len(record):
            os.write(self._data, record[written:])  # to hear why
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        end = os.lseek(self._data, 0, os.SEEK_CUR)
        index = self.files.opened(0, os.O_WRONLY)
        try:
            os.lseek(index, _ENTRY.size * place, os.SEEK_SET)
            os.write(index, _ENTRY.pack(end))
        finally:
            os.close(index)


def _lock(fd: int, place: int, *, wait: bool) -> bool:
    """Lock a byte for this opening of a file; where there are no such locks, everybody gets it."""
    if _HAS_LOCKS:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, place, 1))
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _release(fd: int) -> None:
    """Close a file, and end its locks by name: a process that was forked meanwhile has it open too, and would keep them."""
    if _HAS_LOCKS:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, 0))
    os.close(fd)


def _flock(kind: int, start: int, nbytes: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, nbytes, 0)


def in_memory(length: int) -> Files:
    if not os.path.isdir(_OPEN):
        raise ValueError("a cache without a path is memory that only Linux has (and shows in /proc). Give a path.")
    index = create(_ENTRY.size * length)
    try:
        data = create(0)
    except OSError:
        os.close(index)
        raise
    return Files(index, data, length)


def passed(fd: int) -> Any:
    """What brings a file descriptor to a process that is being started, and nowhere else."""
    from multiprocessing import context, reduction

    if context.get_spawning_popen() is None:  # type: ignore[attr-defined,unused-ignore]
        raise TypeError("a cache without a path is memory of this process and of those that it starts: it cannot be pickled. Give a path.")
    return reduction.DupFd(fd)


# A folder, and whose cache it is.


def in_folder(folder: str, identity: dict[str, Any]) -> Files:
    """The files of ``folder``, checked; made where there are none."""
    if not os.path.exists(os.path.join(folder, _HEAD)):
        _make(folder, identity)
    _compare(folder, identity)
    with contextlib.ExitStack() as opened:
        fds = []
        for name in (_INDEX, _DATA):
            try:
                fds.append(os.open(os.path.join(folder, name), os.O_RDONLY | _BINARY))
            except FileNotFoundError:
                raise _damaged(folder, f"{name} is missing") from None
            opened.callback(os.close, fds[-1])
        if (nbytes := os.fstat(fds[0]).st_size) != _ENTRY.size * identity["length"]:
            raise _damaged(folder, f"{_INDEX} has {nbytes} bytes, not {_ENTRY.size * identity['length']}")
        opened.pop_all()
    return Files(fds[0], fds[1], identity["length"], folder)


def _make(folder: str, identity: dict[str, Any]) -> None:
    """Make the files, unless another one has. The head comes last, by renaming, and says that all are there."""
    os.makedirs(folder, exist_ok=True)
    head, index, data = (os.path.join(folder, name) for name in (_HEAD, _INDEX, _DATA))
    fd = os.open(data, os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
    try:
        _lock(fd, _CREATION, wait=True)
        if os.path.exists(head):
            return
        if os.fstat(fd).st_size:
            raise _damaged(folder, f"{_HEAD} is missing")
        with open(index, "wb") as empty:
            empty.truncate(_ENTRY.size * identity["length"])
        with open(f"{head}.new", "w", encoding="utf-8") as text:
            json.dump(identity, text, indent=1)
            text.flush()
            os.fsync(text.fileno())
        os.replace(f"{head}.new", head)
    finally:
        _release(fd)


def _compare(folder: str, identity: dict[str, Any]) -> None:
    try:
        with open(os.path.join(folder, _HEAD), encoding="utf-8") as text:
            found = json.load(text)
        theirs = {key: found[key] for key in identity}
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"{_HEAD} cannot be read ({type(error).__name__}: {error})") from error
    if json.dumps(theirs) != json.dumps(identity):
        raise ValueError(
            f"{folder} is the cache of {_in_words(theirs)}; asked for was {_in_words(identity)}. Give each dataset, and each version of its "
            f"transform, a folder of its own, or delete that one."
        )


def identity_of(dataset: Any, fingerprint: Any) -> dict[str, Any]:
    try:
        fingerprint = json.loads(json.dumps(fingerprint, sort_keys=True))
    except (TypeError, ValueError) as error:
        raise TypeError(f"fingerprint={fingerprint!r:.80} is not JSON ({error}). Use strings, numbers, lists and dicts.") from error
    name = f"{module_of(type(dataset))}.{type(dataset).__qualname__}"
    return {"format": _FORMAT, "dataset": name, "length": len(dataset), "fingerprint": fingerprint}


def _in_words(identity: dict[str, Any]) -> str:
    return ", ".join(f"{key} {json.dumps(value)}" for key, value in identity.items() if key != "format" or value != _FORMAT)


def _damaged(folder: str, why: str) -> ValueError:
    return ValueError(f"the cache in {folder} is damaged: {why}. Delete the folder, and the cache is filled anew.")
