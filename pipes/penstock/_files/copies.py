"""Copies of files in a folder of bounded size, shared by all processes of a host.

A copy is named after its file and the file's version, so it is never stale. There is no daemon and no shared memory,
only files and `flock`, which the kernel releases when its owner dies, at any point:

- a fetcher holds a lock, writes a part file, and renames it once all bytes have arrived. Each part has a unique name,
  because a storage library may keep writing after an interrupt. A part without an owner is removed by the next process
  that sees it;
- a reader holds a shared lock on its copy, and only copies without readers are removed;
- sizes are summed, and copies are removed to make room, under one lock for the folder.

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
import platform
import re
import secrets
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, BinaryIO, Final, final

from penstock._files.cache_notes import Counts, Notes
from penstock._files.own_files import open_own
from penstock._statistics import CopyStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

log = logging.getLogger("penstock")

COPY: Final = re.compile(r"penstock-1-(?P<file>[0-9a-f]{16})-[0-9a-f]{16}-.*", re.DOTALL)
_LEFT: Final = re.compile(r"(?P<key>penstock-1-[0-9a-f]{16}-[0-9a-f]{16})\.(lock|(?P<size>\d+)\.[0-9a-f]{8}\.part)")
"""The name patterns of copies and of their locks and parts. No name matches both, whatever the original file is
called.
"""
_NOTES: Final = re.compile(r"penstock-1-[0-9a-f]{16}\.notes")
PATIENCE_S: Final = 30.0
_NOT_AGAIN_S: Final = 300.0
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_WRITING: Final = (errno.EROFS, errno.EACCES, errno.EPERM)


class _OfTheSource(Exception):
    """An error that was raised by the source of a copy, and has nothing to do with the folder."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@final
class CacheFolder:
    """A folder of copies.

    Attributes:
        needed: Returns a function from a file's hash to the time when the file is needed next, or None if the file is
            not part of this data set. Set by the owner of the order.
        notes: Shared notes of this host's processes about this data set.
        stamps: Recent stamps of its files as seen by this process, with the time; see `stamp_lately`.

    Args:
        folder: On a local disk; created if missing.
        most_bytes: Limit for all copies together.
        own: The hashes of the files in this data set.
        ahead: How many shards per lane to fetch before they are read.

    Raises:
        ValueError: It cannot be created or read, or its file system does not support locks.
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
        self._stuck: dict[str, float] = {}  # locks that were waited for in vain, and until when not to wait again
        try:
            os.makedirs(self.folder, exist_ok=True)
            with self._alone():
                os.listdir(self.folder)
        except OSError as exc:
            if exc.errno == errno.EROFS and os.path.isdir(self.folder):
                self._say("is on a read-only file system, so only the copies that it already has are used")
                return
            if exc.errno in _NO_LOCKS:
                why = (
                    f"is on a file system without locks (flock: {exc.strerror}), so several processes would overwrite "
                    f"each other's files"
                )
            else:
                why = f"cannot be used: {exc.strerror or exc}"
            raise ValueError(
                f"cache_dir={folder!r} {why}. Use a folder on a local disk in which this user may write."
            ) from exc

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_said": set(), "_stuck": {}, "stamps": {}, "needed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(
            state, needed=self._not_known
        )  # the folder is made when it is first needed, because a worker may run on another machine

    def _not_known(self) -> Callable[[str], float | None]:
        """If the order is unknown, no copy is evicted for another one of the same data.

        For an order that is redrawn each time, that keeps as many useful copies as any other rule.
        """
        return lambda name: math.inf if name in self._own else None

    def statistics(self) -> CopyStatistics:
        """Statistics about the files of this data set, over all processes of this host since the folder was first used
        for it.
        """
        hits, fetches, fetched_bytes, misses, wait_ns = (
            now - then for now, then in zip(self.notes.counts(), self._before, strict=True)
        )
        return CopyStatistics(hits, fetches, fetched_bytes, misses, wait_ns / 1e9)

    def opened(self, address: str, size: int, version: str, copy: Callable[[str], None]) -> BinaryIO | None:
        """The copy of a version of a file, made if necessary; None if there is no room for it, or the folder is in
        trouble, which is said once.

        Args:
            address: Address of the file.
            size: Its size in bytes.
            version: Distinguishes this version from any other of the same size.
            copy: Writes the bytes to a path.

        Raises:
            Exception: That of ``copy``. Nothing is left behind.
        """
        key, name = _names(address, size, version)
        begun = time.monotonic_ns()
        found, hit = None, True
        with self._trouble_is_said():
            while (found := self._reading(name, size)) is None:
                hit = False
                if not self._made(key, name, size, copy):
                    break
        if found is None:
            self.notes.add(misses=1)
        else:
            self.notes.add(hits=hit, wait_ns=0 if hit else time.monotonic_ns() - begun)
        return found

    def make(self, address: str, size: int, version: str, copy: Callable[[str], None]) -> None:
        """Make that copy, as `opened` does, for a later reader."""
        key, name = _names(address, size, version)
        with self._trouble_is_said():
            while not self._is_there(name, size) and self._made(key, name, size, copy):
                pass

    def contents(self) -> tuple[dict[str, int], int, Counts]:
        """The names and sizes of all copies; the number of unfinished copies; and the counts of all data sets
        together.
        """
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
        """Remove all copies that are not being read, leftovers of fetches, and the notes; the number of copies
        removed.
        """
        removed = 0
        with self._alone():
            for entry in list(os.scandir(self.folder)):
                if _NOTES.fullmatch(entry.name):
                    self._remove(entry.name)
                elif left := _LEFT.fullmatch(entry.name):
                    self._removed_if_free(f"{left['key']}.lock", entry.name, f"{left['key']}.lock")
                elif COPY.fullmatch(entry.name):
                    removed += self._removed_if_free(entry.name, entry.name)
        return removed

    # One copy.

    def _made(self, key: str, name: str, size: int, copy: Callable[[str], None]) -> bool:
        """Make the copy, unless it exists by now; whether there was room."""
        with self._locked(f"{key}.lock"):
            try:
                return self._is_there(name, size) or self._fetched(key, name, size, copy)
            finally:
                self._remove(f"{key}.lock")

    def _reading(self, name: str, size: int) -> BinaryIO | None:
        """The copy, open and locked for reading until it is closed; None if it does not exist."""
        path = os.path.join(self.folder, name)
        try:
            fd = open_own(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            self._acquire(fd, name, fcntl.LOCK_SH)  # a process that removes it holds the other lock only briefly
            status = os.fstat(fd)
            if not status.st_nlink:  # removed before the lock was acquired: opening it again by name would fail
                os.close(fd)
                return None
            if status.st_size == size:
                with contextlib.suppress(OSError):
                    os.utime(fd)  # records this use
                # opened by path so that the file object has a name
                return io.BufferedReader(_Copy(path, opener=lambda *_: fd), 2**16)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        self._remove(name)  # the disk has lost part of it
        return None

    def _is_there(self, name: str, size: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(os.path.join(self.folder, name), follow_symlinks=False).st_size == size
        return False

    def _fetched(self, key: str, name: str, size: int, copy: Callable[[str], None]) -> bool:
        """Make the copy; whether there was room."""
        # counted at this size from now on
        part = os.path.join(self.folder, f"{key}.{size}.{secrets.token_hex(4)}.part")
        try:
            with self._alone():
                if not self._made_room(name, size):
                    self._say(
                        f"has no room for more than {self.most_bytes:,} bytes, so files that do not fit are read from "
                        f"their source"
                    )
                    return False
                os.close(open_own(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            try:
                copy(part)
            except Exception as exc:
                if isinstance(exc, OSError) and (
                    part in (exc.filename, exc.filename2) or exc.errno in _FULL or not os.path.exists(part)
                ):
                    raise
                raise _OfTheSource(exc) from exc  # otherwise it would count as trouble with the folder
            with open(part, "rb") as file:
                if (came := os.fstat(file.fileno()).st_size) != size:
                    raise _OfTheSource(
                        OSError(
                            f"received {came} bytes of {name} instead of {size}: the connection broke off, or the file "
                            f"has changed"
                        )
                    )
                os.fsync(file.fileno())
            # a process that sums sizes could miss a file that is renamed while it lists the folder, under both names
            with self._alone():
                os.replace(part, os.path.join(self.folder, name))
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove(os.path.basename(part))
            raise
        self.notes.add(fetches=1, fetched_bytes=size)
        return True

    # The folder.

    def _made_room(self, name: str, size: int) -> bool:
        """Make room for a copy by removing less useful ones; whether it fits. Requires `_alone`.

        Copies of other data go first, least recently used first. Then copies of this data that are needed later than
        the new one, the latest first.
        """
        sizes: dict[str, int] = {}
        copies: dict[str, tuple[str, float]] = {}  # their files, and when they were last used
        for entry in list(os.scandir(self.folder)):
            if left := _LEFT.fullmatch(entry.name):
                if name.startswith(f"{left['key']}-"):  # this process holds its lock
                    if left["size"]:
                        self._remove(entry.name)
                elif not self._removed_if_free(f"{left['key']}.lock", entry.name, f"{left['key']}.lock"):
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
            if self._removed_if_free(copy, copy):
                over -= sizes[copy]
        return over <= 0

    def _removed_if_free(self, lock: str, *names: str) -> bool:
        """Remove files unless another process holds their ``lock``; whether they are gone. Requires `_alone`."""
        try:
            fd = open_own(os.path.join(self.folder, lock), os.O_RDONLY)
        except FileNotFoundError:
            fd = -1
        try:
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._is_at(fd, lock):  # its owner ended in the meantime, and there may be a new one
                    return False
            # while the lock is held: otherwise a waiting process would acquire it and lose its file a moment later
            for name in names:
                # one that was not there may be there now, and held; then its holder would lose its part to the next one
                # who looks
                if fd >= 0 or name != lock:
                    self._remove(name)
        except BlockingIOError:
            return False
        finally:
            if fd >= 0:
                os.close(fd)
        return True

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, name))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other processes from summing sizes and removing copies."""
        with self._locked("penstock.lock"):
            yield

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Acquire a lock, waiting for its holder.

        Its file is then the one of that name, so no other process can hold it, too.
        """
        path = os.path.join(self.folder, name)
        while True:
            try:
                fd = open_own(path, os.O_RDWR | os.O_CREAT)
            except PermissionError:
                fd = open_own(path, os.O_RDONLY)  # it belongs to another user
            except FileNotFoundError:
                self._say("had been deleted, and was made again")
                os.makedirs(self.folder, exist_ok=True)
                continue
            try:
                self._acquire(fd, name, fcntl.LOCK_EX)
                if self._is_at(fd, name):
                    with contextlib.suppress(OSError):  # one's that belongs to another user
                        # for who waits for it in vain
                        os.pwrite(fd, f"{os.getpid()} on {platform.node()}".ljust(80).encode(), 0)
                    yield
                    return
            finally:
                with contextlib.suppress(OSError):
                    # closing is not enough: a process forked in the meantime shares the lock
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)

    def _acquire(self, fd: int, name: str, kind: int) -> None:
        """Acquire a lock on an open file.

        Raises:
            TimeoutError: Its holder has made no progress for `PATIENCE_S`: it was stopped, or hangs. That is not tried
                again for `_NOT_AGAIN_S`.
            OSError: The file system has no locks.
        """
        pause, seen, since = 0.001, -1, time.monotonic()
        while True:
            try:
                return fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                now, before, seen = time.monotonic(), seen, self._progress(name)
                since = now if seen != before else since
                if now - since > PATIENCE_S:
                    self._stuck[name] = now + _NOT_AGAIN_S
                if now < self._stuck.get(name, 0.0):
                    holder = (
                        os.pread(fd, 80, 0).decode(errors="replace").strip()
                        if name.endswith(".lock")
                        else "another one"
                    )
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"process {holder} holds {name} and has made no progress for {PATIENCE_S:g} s; was it stopped?",
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _progress(self, name: str) -> int:
        """The bytes that have arrived of the file that a lock is about."""
        found = 0
        key = name.removesuffix("lock")
        for entry in os.scandir(self.folder):
            if entry.name.startswith(key) and entry.name.endswith(".part"):
                with contextlib.suppress(FileNotFoundError):
                    found += entry.stat(follow_symlinks=False).st_size
        return found

    def _is_at(self, fd: int, name: str) -> bool:
        """Whether an open file is the one of that name in this folder."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), os.lstat(os.path.join(self.folder, name)))
        return False

    @contextlib.contextmanager
    def _trouble_is_said(self) -> Iterator[None]:
        """A fault of the folder is no fault of the data, which are then read from their source."""
        try:
            yield
        except _OfTheSource as exc:
            raise exc.error from exc.error.__cause__
        except OSError as exc:
            known = dict.fromkeys(_FULL, "is on a full disk") | dict.fromkeys(_NO_WRITING, "is not writable")
            why = known.get(exc.errno or 0, f"is in trouble: {exc.strerror or exc}")
            at = f": {exc.filename}" if why.startswith("is in trouble") and exc.filename else ""
            self._say(f"{why}, so files without a copy are read from their source", at)

    def _say(self, what: str, at: str = "") -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("cache_dir=%r %s%s.", self.folder, what, at)


def file_hash(address: str) -> str:
    """The common prefix of the names of all copies of a file."""
    return blake2b(os.fsencode(address), digest_size=8).hexdigest()


def hashes_of(address: str) -> tuple[str, str]:
    """The hashes of a file and of its index, which is needed whenever the file is."""
    return file_hash(address), file_hash(f"{address}.index")


def _names(address: str, size: int, version: str) -> tuple[str, str]:
    """The common prefix of the copy of a version of a file and everything that belongs to it, and the name of the copy,
    which ends like the file's name.
    """
    version_hash = blake2b(f"{size} {version}".encode(), digest_size=8).hexdigest()
    key = f"penstock-1-{file_hash(address)}-{version_hash}"
    return key, f"{key}-{re.sub(r'[^a-zA-Z0-9_.]', '_', address.rpartition('/')[2])[-60:]}"


@final
class _Copy(io.FileIO):
    """An open copy. Closing it releases its lock, even if a process forked in the meantime shares the lock."""

    def __init__(self, path: str, *, opener: Callable[[str, int], int]) -> None:
        super().__init__(path, "rb", opener=opener)
        self._owner = os.getpid()

    def close(
        self,
        getpid: Any = os.getpid,
        flock: Any = fcntl.flock,
        unlock: int = fcntl.LOCK_UN,
        suppress: Any = contextlib.suppress,
    ) -> None:
        if not self.closed and self._owner == getpid():  # at interpreter exit the modules may already be gone
            with suppress(OSError):
                flock(self.fileno(), unlock)
        super().close()
