"""What distinguishes an uncounted shard from any other, and its versions from each other."""

from __future__ import annotations

import contextlib
import os
import secrets
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, ClassVar, final

from penstock._files.files import IN_USE, check_unchanged, stamp, stamp_lately
from penstock._files.paths import address, checksum, is_remote, telling
from penstock._memory.shared_memory import attach, create
from penstock._streams.tables import Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._files.files import Stamp


@final
class ShardKeys:
    """What the bookmarks of each shard are bound to: its name and, if it is a file, its `stamp`.

    Looks at a file only once, and only when necessary, because there may be very many, and they may be remote. Later
    reads must find that version, also in other processes of the loader, such as the replacement of a killed worker.
    """

    instances: ClassVar[weakref.WeakSet[ShardKeys]] = weakref.WeakSet()
    """Those of every dataset in this process."""

    def __init__(self, shards: Sequence[Any], by_fsspec: bool, sent: Any = None) -> None:
        self.instances.add(self)
        self._shards = shards
        self.by_fsspec = by_fsspec
        paths = (self._path(number) for number in range(0 if isinstance(shards, range) else len(shards)))
        self._telling = telling(path for path in paths if path is not None)
        self._found: dict[int, Stamp | None] = {}
        self._unknown = secrets.token_hex(4)
        # A checksum of each stamp, or 0, in memory shared by the processes, wherever that is possible.
        self._nbytes = 8 if isinstance(shards, range) else 8 * len(shards)
        self._seen = memoryview(bytearray(self._nbytes)).cast("Q")
        with contextlib.suppress(OSError):
            fd = create(self._nbytes) if sent is None else sent.detach()
            try:
                self._seen = attach(fd, self._nbytes).cast("Q")
            finally:
                os.close(fd)

    def __reduce__(self) -> Any:
        sent = []
        if get_spawning_popen() is not None:  # any other copy is a separate dataset
            with contextlib.suppress(OSError):
                fd = create(self._nbytes)
                weakref.finalize(self, os.close, fd)
                shared = attach(fd, self._nbytes).cast("Q")
                shared[:] = self._seen
                self._seen, sent = shared, [DupFd(fd)]
        return ShardKeys, (self._shards, self.by_fsspec, *sent)

    def __getitem__(self, number: int) -> str:
        if self._path(number) is None:
            return self.name(number)
        # No other process can tell whether it has read the version that this process could not see.
        return f"{self.name(number)} {self.stamp(number) or self._unknown}"

    def stamp(self, number: int) -> Stamp | None:
        """The version of a file as it was first seen; None if it is not a file, or cannot be seen now."""
        path = self._path(number)
        if path is not None and number not in self._found:
            shard = self._shards[number]
            try:
                found = self._found[number] = shard.stamp if isinstance(shard, Piece) else stamp_lately(path)
            except Exception:  # a server may fail in its own way; opening the shard will report it, or retry
                return None
            self._seen[number] = self._seen[number] or int(checksum(found), 16)
        return self._found.get(number)

    def check(self, number: int) -> None:
        """Refuse a file whose version differs from what another process has seen, or from what is now on disk; remote
        files are compared by their readers.
        """
        path, then = self._path(number), self.stamp(number)
        if path is None or then is None:
            return
        if self._seen[number] != int(checksum(then), 16):
            raise ValueError(f"{path} has changed {IN_USE[0]} by another process of this loader. {IN_USE[1]}")
        if not is_remote(path):
            check_unchanged(path, then, stamp(path), *IN_USE)

    def _path(self, number: int) -> str | None:
        """The path of a file whose version can be determined; only a user's ``open`` knows what a URL means to it."""
        shard = self._shards[number]
        if isinstance(shard, Piece):
            return shard.path
        path = os.fspath(shard) if isinstance(shard, str | os.PathLike) else None
        return None if path is None or (is_remote(path) and not self.by_fsspec) else path

    def name(self, number: int) -> str:
        """The name of a shard, independent of its version."""
        shard, path = self._shards[number], self._path(number)
        if path is None:
            return shard if isinstance(shard, str) else repr(shard)
        where = address(path, self._telling)
        return f"{shard.number} of {where}" if isinstance(shard, Piece) else where
