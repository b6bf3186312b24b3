"""The files of a cache: how they are written and read, and which dataset they belong to.

A cache is two files: named files in a folder, or unnamed ones in memory. In a folder, ``penstock.json`` says which
dataset they belong to::

    penstock.data    record record record …     append-only
    penstock.index   u64 u64 u64 …              for each sample: where its record ends in the data; 0: not cached
    a record         arrays, one after another | their structure, JSON | sample, bytes of arrays, bytes of JSON, CRC-32

A hit reads two mappings: no lock, no system call. A miss is safe even if its process is killed at any point:

- One ``write`` with ``O_APPEND`` appends the record, so the kernel assigns it a place that no other process writes to.
  The 8 bytes of the index are written afterwards, and only they make the sample part of the cache. Nothing ever points
  to a truncated record.
- A thread that loads sample *i* locks byte *i* of the data. The lock belongs to a file opened for this one miss
  (Linux's "open file description lock"), so it excludes other threads as well as other processes, and the kernel
  releases it if its holder dies.
- A process checks the CRC of a record the first time it reads it. A sample that fails the check counts as not cached.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import struct
import sys
from typing import TYPE_CHECKING, Any

from penstock._datasets.cache_record import FOOTER, is_record, module_of, value_at
from penstock._fetch.dataset_facts import SHARD_NAMES, DatasetFacts
from penstock._files.own_files import open_own
from penstock._memory.shared_memory import create

if TYPE_CHECKING:
    from collections.abc import Callable


try:
    import fcntl
except ImportError:  # Windows
    _HAS_LOCKS = False
else:
    _HAS_LOCKS = sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")  # macOS has the name, and another structure

_logger = logging.getLogger("penstock")
_FORMAT = f"1, {sys.byteorder}-endian"
_HEAD, _INDEX, _DATA = "penstock.json", "penstock.index", "penstock.data"
_ENTRY = struct.Struct("=Q")
_CREATION = 2**62  # the byte of the data to lock while the files are created; no sample has this number
AT_MOST = 0x7FFFF000  # the most bytes that one `write` on Linux accepts
_OPEN = "/proc/self/fd"  # opening a name in here opens the file again, even a file without any other name
ABSENT = object()


# The two files, as seen by one process.


class Files:
    """The open index and data files. Owns their descriptors, and closes them when no thread refers to it any longer."""

    def __init__(self, index: int, data: int, length: int, folder: str | None = None) -> None:
        self.fds = (index, data)
        self._folder = folder
        self.entries = memoryview(mmap.mmap(index, _ENTRY.size * length, access=mmap.ACCESS_READ)).cast("Q")
        self._memory = memoryview(b"")  # the data, as long as it was when last mapped
        self._checked = bytearray(length)  # samples whose CRC this process has verified

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for fd in self.fds:
            close(fd)

    def opened(self, which: int, flags: int) -> int:
        """Reopen the index (0) or the data (1), with its own position and locks; never a newer file of the same name,
        where /proc exists.
        """
        if os.path.isdir(_OPEN):
            return os.open(f"{_OPEN}/{self.fds[which]}", flags)
        return open_own(os.path.join(self._folder or "", (_INDEX, _DATA)[which]), flags)

    def read(self, number: int) -> Any:
        """A copy of sample ``number``, or `ABSENT`."""
        end = self.entries[number]
        if not end:
            return ABSENT
        memory = self._memory
        if end > len(memory):  # the file has grown
            size = os.fstat(self.fds[1]).st_size
            memory = self._memory = memoryview(mmap.mmap(self.fds[1], size, access=mmap.ACCESS_READ) if size else b"")
        if not FOOTER.size <= end <= len(memory):
            return ABSENT
        if not self._checked[number] and not is_record(memory, end, number):
            return ABSENT
        self._checked[number] = 1
        try:
            return value_at(memory, end)
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"sample {number} in the cache {self._folder} cannot be decoded, although its checksum is correct "
                f"({error}). If the cause is not clear, delete the folder."
            ) from error


class Claim:
    """An exclusive claim on samples, held by one thread of one process; the kernel releases it if the holder dies."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._data = files.opened(1, os.O_WRONLY | os.O_APPEND)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        _release(self._data)

    def take(self, number: int, *, wait: bool) -> bool:
        """Claim sample ``number``; False if someone else holds it and ``wait`` is False."""
        return _lock(self._data, number, wait=wait)

    def write(self, number: int, record: bytes) -> None:
        """Append ``record``, of at most `AT_MOST` bytes, to the data, then make the index point to it."""
        if (written := os.write(self._data, record)) < len(record):
            os.write(self._data, record[written:])  # to get the error that explains the short write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        end = os.lseek(self._data, 0, os.SEEK_CUR)
        index = self.files.opened(0, os.O_WRONLY)
        try:
            os.lseek(index, _ENTRY.size * number, os.SEEK_SET)
            os.write(index, _ENTRY.pack(end))
        finally:
            os.close(index)


def _lock(fd: int, number: int, *, wait: bool) -> bool:
    """Lock one byte for this open file; whether it succeeded. Always True on systems without such locks."""
    if _HAS_LOCKS:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, number, 1))
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _release(fd: int) -> None:
    """Close the file and unlock it explicitly: a child forked in the meantime shares the open file and would keep its
    locks.
    """
    if _HAS_LOCKS:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, 0))
    os.close(fd)


def _flock(kind: int, start: int, nbytes: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, nbytes, 0)


def in_memory(length: int) -> Files:
    if not os.path.isdir(_OPEN):
        raise ValueError(
            "a cache without a path needs anonymous memory, which only Linux has (and shows in /proc). Give a path."
        )
    index = create(_ENTRY.size * length)
    try:
        data = create(0)
    except OSError:
        os.close(index)
        raise
    return Files(index, data, length)


def for_child(fd: int) -> Any:
    """Wrap a file descriptor so that it can be pickled for a process being started, and for nothing else."""
    from multiprocessing import context, reduction

    if context.get_spawning_popen() is None:  # type: ignore[attr-defined,unused-ignore]
        raise TypeError(
            "a cache without a path belongs to this process and its children, so it cannot be pickled. Give a path."
        )
    return reduction.DupFd(fd)


# A folder, and the dataset it belongs to.


def in_folder(folder: str, identity: dict[str, Any]) -> Files:
    """Open and check the files in ``folder``; create them if they do not exist.

    Raises:
        ValueError: The folder is damaged, or belongs to another dataset.
    """
    if not os.path.exists(os.path.join(folder, _HEAD)):
        _make(folder, identity)
    _compare(folder, identity)
    with contextlib.ExitStack() as opened:
        fds = []
        for name in (_INDEX, _DATA):
            try:
                fds.append(open_own(os.path.join(folder, name), os.O_RDONLY))
            except FileNotFoundError:
                raise _damaged(folder, f"{name} is missing") from None
            opened.callback(os.close, fds[-1])
        if (nbytes := os.fstat(fds[0]).st_size) != _ENTRY.size * identity["length"]:
            raise _damaged(folder, f"{_INDEX} has {nbytes} bytes instead of {_ENTRY.size * identity['length']}")
        opened.pop_all()
    return Files(fds[0], fds[1], identity["length"], folder)


def _make(folder: str, identity: dict[str, Any]) -> None:
    """Create the files, unless another process did. The JSON comes last, by renaming, and marks them as complete."""
    os.makedirs(folder, exist_ok=True)
    head, index, data = (os.path.join(folder, name) for name in (_HEAD, _INDEX, _DATA))
    fd = open_own(data, os.O_RDWR | os.O_CREAT)
    try:
        _lock(fd, _CREATION, wait=True)
        if os.path.exists(head):
            return
        if os.fstat(fd).st_size:
            raise _damaged(folder, f"{_HEAD} is missing")
        new_file = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        for name in (index, f"{head}.new"):  # left behind by another process, or a link to a file that is not ours
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        with open(open_own(index, new_file), "wb") as empty:
            empty.truncate(_ENTRY.size * identity["length"])
        with open(open_own(f"{head}.new", new_file), "w", encoding="utf-8") as text:
            json.dump(identity, text, indent=1)
            text.flush()
            os.fsync(text.fileno())
        os.replace(f"{head}.new", head)
    finally:
        _release(fd)


def _compare(folder: str, identity: dict[str, Any]) -> None:
    try:
        with open(open_own(os.path.join(folder, _HEAD), os.O_RDONLY), encoding="utf-8") as text:
            # anything longer is another file, or endless
            found = json.loads(text.read(8 * len(json.dumps(identity, indent=1)) + 2**20))
        theirs = {key: found[key] for key in identity}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(folder, f"{_HEAD} cannot be read ({type(error).__name__}: {error})") from error
    if json.dumps(theirs) != json.dumps(identity):
        raise ValueError(
            f"{folder} is the cache of {_in_words(theirs)}, but this is {_in_words(identity)}. Give each dataset, and "
            f"each version of its transform, its own folder, or delete this one."
        )


def identity_of(dataset: Any, fingerprint: Any) -> dict[str, Any]:
    try:
        fingerprint = json.loads(json.dumps(fingerprint, sort_keys=True))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"fingerprint={fingerprint!r:.80} is not JSON ({error}). Use strings, numbers, lists and dicts."
        ) from error
    name = f"{module_of(type(dataset))}.{type(dataset).__qualname__}"
    names = DatasetFacts.of(dataset).names.get(SHARD_NAMES)
    said = {"format": _FORMAT, "dataset": name, "length": len(dataset), "fingerprint": fingerprint}
    return said if names is None else {**said, SHARD_NAMES: names}


def _in_words(identity: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {json.dumps(value)}" for key, value in identity.items() if key != "format" or value != _FORMAT
    )


def _damaged(folder: str, why: str) -> ValueError:
    return ValueError(f"the cache in {folder} is damaged: {why}. Delete the folder; the next run fills it again.")
