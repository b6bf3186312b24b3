"""Gives a forked process its own position in each file that it has inherited open."""

from __future__ import annotations

import contextlib
import functools
import os
import stat


def own_offsets(*, anew: bool = False) -> None:
    """Open again every regular file that this process may read, under the same descriptor and at the same position.

    A fork shares an open file with its parent and with its siblings, and the position in it, too. Where two workers of
    a dataset that has opened a file in ``__init__`` seek and read, each may read the other's rows: 10 to 30 of 600, and
    with `DataLoader` up to 18. Once each has opened the file itself, both are right. A file that cannot be opened
    again, or where the system does not show which are open, stays shared. So do files that are only written, such as
    logs, where each process must continue behind what the others have written, and those behind standard output and
    error, which pytest has open to read and write, too.

    Args:
        anew: This process has not inherited which files there are.
    """
    if anew:
        _inherited.cache_clear()
    for flags, fds in _inherited():
        with contextlib.suppress(OSError):
            position = os.lseek(fds[0], 0, os.SEEK_CUR)
            # By the link in /proc, which works for a file without a name, too. `dup2` replaces the shared file under
            # each of its descriptors.
            own = os.open(f"/proc/self/fd/{fds[0]}", flags)
            try:
                os.lseek(own, position, os.SEEK_SET)
                for fd in fds:
                    os.dup2(own, fd, os.get_inheritable(fd))
            finally:
                os.close(own)


@functools.cache  # by the process that forks the workers, which inherit the answer
def _inherited() -> list[tuple[int, list[int]]]:
    """The files to open again: how, and their descriptors.

    Duplicates of one descriptor belong together, because they share a position.
    """
    import fcntl

    kept = os.O_ACCMODE | os.O_APPEND | os.O_SYNC | getattr(os, "O_DIRECT", 0)
    found: dict[tuple[int, ...], list[list[int]]] = {}
    streams = []
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            streams.append(os.fstat(fd))
    with contextlib.suppress(OSError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                flags, file = fcntl.fcntl(fd, fcntl.F_GETFL), os.fstat(fd)
                if fd == 0 or flags & os.O_ACCMODE == os.O_WRONLY or not stat.S_ISREG(file.st_mode):
                    continue
                if any(os.path.samestat(file, stream) for stream in streams):
                    continue
                alike = found.setdefault((flags & kept, file.st_dev, file.st_ino), [])
                for fds in alike:
                    if _share(fds[0], fd):
                        fds.append(fd)
                        break
                else:
                    alike.append([fd])
    return [(flags, fds) for (flags, *_), alike in found.items() for fds in alike]


def _share(one: int, other: int) -> bool:
    """Whether two descriptors of a file are duplicates: they share its flags, of which ``O_NONBLOCK`` means nothing for
    a regular file.
    """
    import fcntl

    # Flags belong to the open file, as the position does. For a moment, other processes that have it see another flag,
    # which means nothing here.
    flags, before = fcntl.fcntl(one, fcntl.F_GETFL), fcntl.fcntl(other, fcntl.F_GETFL)
    fcntl.fcntl(one, fcntl.F_SETFL, flags ^ os.O_NONBLOCK)
    try:
        return fcntl.fcntl(other, fcntl.F_GETFL) != before
    finally:
        fcntl.fcntl(one, fcntl.F_SETFL, flags)
