"""Copies of files in a folder of bounded size, which all processes of a host share.

A copy is named after its file and the version of that, so none is ever stale. There is no daemon and no shared memory, only files and `flock`, which the kernel
gives back when its owner dies, at any point:

- who fetches holds a lock, writes a part, and renames it when all bytes have come. Each part has a name of its own, because a store's library may go on writing after
  an interrupt. A part without an owner is removed by whoever sees it;
- who reads a copy holds a shared lock on it, and only a copy that nobody reads is removed;
- what is added up, and what is removed for it, is decided under one lock for the folder.

Only files that this module has named are ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import math
import os
import re
import secrets
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, BinaryIO, Final, final

from penstock._statistics import CopyStatistics
from penstock._streams.cache_notes import Counts, Notes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

log = logging.getLogger("penstock")

COPY: Final = re.compile(r"penstock-1-(?P<file>[0-9a-f]{16})-[0-9a-f]{16}-.*", re.DOTALL)
_LEFT: Final = re.compile(r"(?P<key>penstock-1-[0-9a-f]{16}-[0-9a-f]{16})\.(lock|(?P<size>\d+)\.[0-9a-f]{8}\.part)")
"""What copies are called, and what locks and parts of them are: whatever a file is called, no name is both."""
_NOTES: Final = re.compile(r"penstock-1-[0-9a-f]{16}\.notes")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_WRITING: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_FLAGS: Final = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


@final
class CacheFolder:
    """A folder of copies.

    Attributes:
        needed: Asked for a function that says of the hash of a file when it is needed next, or None if it is none of this data set. Whoever knows the order sets it.
        notes: What the processes of this host note about this data set.
        stamps: What this process was told of its files lately, and when; see `stamp_lately`.

    Args:
        folder: It is made if need be; on a disk of this host.
        most_bytes: All copies together take no more.
        own: The hashes of the files of this data set.
        ahead: How many shards of each lane are fetched before they are read.

    Raises:
        ValueError: Its file system has no locks.
        OSError: It cannot be made or read.
    """

    def __init__(self, folder: str, most_bytes: int, own: Iterable[str] = (), ahead: int = 0) -> None:
        self.folder = os.path.abspath(folder)
        self.most_bytes = most_bytes
        self.ahead = ahead
        self._own = frozenset(own)
        self.notes = Notes(os.path.join(self.folder, f"penstock-1-{file_hash(' '.join(sorted(self._own)))}.notes"))
        self._before = self.notes.counts()
        self.needed = self._not_known
        self.stamps: dict[str, tuple[float, Any]] = {}
        self._said: set[str] = set()
        os.makedirs(self.folder, exist_ok=True)
        with self._alone():
            pass

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_said": set(), "stamps": {}, "needed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, needed=self._not_known)
        os.makedirs(self.folder, exist_ok=True)  # a worker may be on another machine

    def _not_known(self) -> Callable[[str], float | None]:
        """Where nobody knows the order, no copy is given up for another of the same data: that keeps as many of them as any rule for an order that is drawn anew."""
        return lambda name: math.inf if name in self._own else None

    def statistics(self) -> CopyStatistics:
        """What was done with the files of this data set, by all processes of this host, since the folder was first looked at for it."""
        hits, fetches, fetched_bytes, misses, wait_ns = (now - then for now, then in zip(self.notes.counts(), self._before, strict=True))
        return CopyStatistics(hits, fetches, fetched_bytes, misses, wait_ns / 1e9)

    def opened(self, address: str, size: int, version: str, copy: Callable[[str], None]) -> BinaryIO | None:
        """The copy of a version of a file, which is made if need be; None if there is no room for it.

        Args:
            address: Of the file.
            size: Its bytes.
            version: What tells this version from any other of that size.
            copy: Writes the bytes into the file of a path.

        Raises:
            OSError: Other bytes came than ``size``; or what ``copy`` raises. Nothing of it stays.
        """
        key, name = _names(address, size, version)
        begun = time.monotonic_ns()
        hit = True
        while (found := self._reading(name, size)) is None:
            hit = False
            if not self._made(key, name, size, copy):
                self.notes.add(misses=1)
                return None
        self.notes.add(hits=hit, wait_ns=0 if hit else time.monotonic_ns() - begun)
        return found

    def make(self, address: str, size: int, version: str, copy: Callable[[str], None]) -> None:
        """Have that copy made, as by `opened`, for whoever will open it."""
        key, name = _names(address, size, version)
        while not self._is_there(name, size) and self._made(key, name, size, copy):
            pass

    def contents(self) -> tuple[dict[str, int], int, Counts]:
        """The names of all copies and their bytes; how many parts of others; and the counts of all data sets together."""
        copies, parts, counts = {}, 0, Counts()
        for entry in os.scandir(self.folder):
            if _NOTES.fullmatch(entry.name):
                counts = Counts(*map(sum, zip(counts, Notes(entry.path).counts(), strict=True)))
            elif COPY.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    copies[entry.name] = entry.stat(follow_symlinks=False).st_size
            elif (left := _LEFT.fullmatch(entry.name)) and left["size"]:
                parts += 1
        return copies, parts, counts

    def clear(self) -> int:
        """Remove all copies that nobody reads, what is left of fetches, and the notes; how many copies those were."""
        removed = 0
        with self._alone():
            for entry in list(os.scandir(self.folder)):
                if _NOTES.fullmatch(entry.name):
                    self._remove(entry.name)
                elif left := _LEFT.fullmatch(entry.name):
                    self._removed_if_abandoned(left["key"], entry.name)
                elif COPY.fullmatch(entry.name):
                    removed += self._removed_unread(entry.name)
        return removed

    # One copy.

    def _made(self, key: str, name: str, size: int, copy: Callable[[str], None]) -> bool:
        """Make the copy, unless it is there or its lock was removed before this one had it; whether there was room."""
        try:
            with self._locked(f"{key}.lock") as is_linked:
                try:
                    return not is_linked or self._is_there(name, size) or self._fetched(key, name, size, copy)
                finally:
                    if is_linked:
                        self._remove(f"{key}.lock")
        except OSError as exc:
            if exc.errno not in (*_NO_WRITING, *_FULL):
                raise
            full = exc.errno in _FULL
            self._say(
                "is on a disk that is full, so what does not fit is read from afar"
                if full
                else "cannot be written to, so what is not in it is read from afar"
            )
            return False

    def _reading(self, name: str, size: int) -> BinaryIO | None:
        """The copy, open and locked for reading until it is closed; None if there is none."""
        path = os.path.join(self.folder, name)
        try:
            fd = os.open(path, os.O_RDONLY | _FLAGS)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)  # who removes it holds the other lock for a moment
            status = os.fstat(fd)
            if not status.st_nlink:  # it was removed before its lock was held: whoever opens it once more by its name would not find it
                os.close(fd)
                return None
            if status.st_size == size:
                with contextlib.suppress(OSError):
                    os.utime(fd)  # used now
                return io.BufferedReader(_Copy(path, opener=lambda *_: fd), 2**16)  # so that it has its name
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        self._remove(name)  # a disk has lost some of it
        return None

    def _is_there(self, name: str, size: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(os.path.join(self.folder, name), follow_symlinks=False).st_size == size
        return False

    def _fetched(self, key: str, name: str, size: int, copy: Callable[[str], None]) -> bool:
        """Make the copy; whether there was room."""
        part = os.path.join(self.folder, f"{key}.{size}.{secrets.token_hex(4)}.part")  # counts with that size from now on
        try:
            with self._alone():
                if not self._made_room(name, size):
                    self._say(f"has no room for more than {self.most_bytes:,} bytes, so what does not fit is read from afar")
                    return False
                os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o644))
            copy(part)
            with open(part, "rb") as file:
                if (came := os.fstat(file.fileno()).st_size) != size:
                    raise OSError(f"{came} bytes came of {name} in place of {size}, so the server broke off, or the file has changed")
                os.fsync(file.fileno())
            os.replace(part, os.path.join(self.folder, name))
            self.notes.add(fetches=1, fetched_bytes=size)
        except BaseException as exc:
            self._remove(os.path.basename(part))
            if isinstance(exc, OSError) and exc.errno in _FULL:
                self._say("is on a disk that is full, so what does not fit is read from afar")
                return False
            raise
        return True

    # The folder.

    def _made_room(self, name: str, size: int) -> bool:
        """Whether a copy fits, once those are removed that are of less use. Under `_alone`.

        Copies of other data go first, those used last long ago before the others. Then those of this data that are needed later than the new one, the last first.
        """
        sizes: dict[str, int] = {}
        copies: dict[str, tuple[str, float]] = {}  # their files, and when they were used last
        for entry in os.scandir(self.folder):
            if left := _LEFT.fullmatch(entry.name):
                if name.startswith(f"{left['key']}-"):  # whose lock is held here
                    if left["size"]:
                        self._remove(entry.name)
                elif not self._removed_if_abandoned(left["key"], entry.name):
                    sizes[entry.name] = int(left["size"] or 0)
            elif named := COPY.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    sizes[entry.name] = status.st_size
                    copies[entry.name] = named["file"], status.st_mtime
        over = sum(sizes.values()) + size - self.most_bytes
        if over <= 0:
            return True
        needed = self.needed()
        before = needed(name.split("-")[2])
        use = {copy: (needed(file), -used) for copy, (file, used) in copies.items()}
        least = sorted(
            (copy for copy, (time, _) in use.items() if time is None or (before is not None and time > before)),
            key=lambda copy: (use[copy][0] is None, use[copy]),
            reverse=True,
        )
        if over > sum(sizes[copy] for copy in least):
            return False  # without removing any
        for copy in least:
            if over <= 0:
                break
            if self._removed_unread(copy):
                over -= sizes[copy]
        return over <= 0

    def _removed_if_abandoned(self, key: str, left: str) -> bool:
        """Remove what is ``left`` of a fetch that has no owner any more; whether that is so. Under `_alone`."""
        try:
            fd = os.open(os.path.join(self.folder, f"{key}.lock"), os.O_RDWR | _FLAGS)
        except FileNotFoundError:
            self._remove(left)
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(fd).st_nlink:  # its owner has ended meanwhile, and there may be a new one
                return False
            # While it is held: else whoever waits for it would have it, and lose its file a moment later.
            self._remove(left)
            self._remove(f"{key}.lock")
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def _removed_unread(self, name: str) -> bool:
        """Remove a copy, unless somebody reads it."""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(os.path.join(self.folder, name), os.O_RDONLY | _FLAGS)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._remove(name)
            except BlockingIOError:
                return False
            finally:
                os.close(fd)
        return True

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, name))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process adds up or removes meanwhile."""
        with self._locked("penstock.lock"):
            yield

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[bool]:
        """Hold a lock, which waits for who holds it; whether its file is still there by then."""
        path = os.path.join(self.folder, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
        except PermissionError:
            fd = os.open(path, os.O_RDONLY | _FLAGS)  # it is another user's
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as exc:
                if exc.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                raise ValueError(
                    f"cache_dir={self.folder!r} is on a file system without locks (flock: {exc.strerror}), and several processes would write over one another. "
                    f"Use a folder on a local disk."
                ) from exc
            yield bool(os.fstat(fd).st_nlink)
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # closing would not do: a process that was forked meanwhile has the same lock
            os.close(fd)

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("cache_dir=%r %s.", self.folder, what)


def file_hash(address: str) -> str:
    """What the names of all copies of a file have in common."""
    return blake2b(address.encode(), digest_size=8).hexdigest()


def hashes_of(address: str) -> tuple[str, str]:
    """Of a file and of the index beside it, which is needed whenever the file is."""
    return file_hash(address), file_hash(f"{address}.index")


def _names(address: str, size: int, version: str) -> tuple[str, str]:
    """What the copy of a version of a file and all that belongs to it begin with, and the name of the copy, which ends as that of the file."""
    version_hash = blake2b(f"{size} {version}".encode(), digest_size=8).hexdigest()
    key = f"penstock-1-{file_hash(address)}-{version_hash}"
    return key, f"{key}-{re.sub(r'[^a-zA-Z0-9_.]', '_', address.rpartition('/')[2])[-60:]}"


@final
class _Copy(io.FileIO):
    """A copy that is open. Closing it gives its lock back, also if a process was forked meanwhile, which has the same."""

    def __init__(self, path: str, *, opener: Callable[[str, int], int]) -> None:
        super().__init__(path, "rb", opener=opener)
        self._owner = os.getpid()

    def close(
        self, getpid: Any = os.getpid, flock: Any = fcntl.flock, unlock: int = fcntl.LOCK_UN, suppress: Any = contextlib.suppress
    ) -> None:
        if not self.closed and self._owner == getpid():  # when the interpreter ends, the modules may be gone already
            with suppress(OSError):
                flock(self.fileno(), unlock)
        super().close()
