"""Gives a forked process its own position in each file that it has inherited open."""

from __future__ import annotations

import contextlib
import os
import stat


def own_offsets() -> None:
    """Open again every regular file that this process may read, under the same descriptor and at the same position.

    A fork shares an open file with its parent and with its siblings, and the position in it, too. Where two workers of a dataset that has opened a
    file in ``__init__`` seek and read, each may read the other's rows: 10 to 30 of 600, and `DataLoader` up to 7. Once each has opened the file
    itself, both are right. A file that cannot be opened again, or where the system does not show which are open, stays shared. So do files that
    are only written, such as logs, where each process must continue behind what the others have written, and those behind standard output and error,
    which pytest has open to read and write, too.
    """
    import fcntl

    kept = os.O_ACCMODE | os.O_APPEND | getattr(os, "O_DIRECT", 0)
    streams: list[os.stat_result] = []
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            streams.append(os.fstat(fd))
    with contextlib.suppress(OSError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                file = os.fstat(fd)
                if fd == 0 or flags & os.O_ACCMODE == os.O_WRONLY or not stat.S_ISREG(file.st_mode):
                    continue
                if any(os.path.samestat(file, stream) for stream in streams):
                    continue
                position, inheritable = os.lseek(fd, 0, os.SEEK_CUR), os.get_inheritable(fd)
                own = os.open(f"/proc/self/fd/{fd}", flags & kept)
                try:
                    os.lseek(own, position, os.SEEK_SET)
                    os.dup2(own, fd, inheritable)
                finally:
                    os.close(own)
