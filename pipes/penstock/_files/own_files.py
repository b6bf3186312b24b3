"""How penstock writes its own files: caches, indexes and bookmarks.

Others may have put links into the folders; no link redirects a write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from typing import Any

_REFUSED = {errno.ELOOP, errno.EMLINK, errno.ENXIO}  # a link (by POSIX; on BSD), and a pipe without a reader


def open_own(path: str, flags: int) -> int:
    """Open one of penstock's own files without following a link or waiting for a pipe; returns its descriptor.

    Raises:
        OSError: It cannot be opened, or is not a regular file; the message names it.
    """
    wanted = [getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")]
    try:
        fd = os.open(path, flags | sum(wanted), 0o666)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise refusal(path) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise refusal(path)
    return fd


def write_own(path: str, *parts: Any, sync: bool = False) -> None:
    """Write one of penstock's own files, and create its folder: completely or not at all.

    A link at its path is replaced.

    Args:
        path: Path of the file.
        parts: Buffers, written one after another.
        sync: Whether to wait for the disk, so that a power failure cannot leave a truncated file.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:  # creates a new file, so it follows no link
            file.writelines(parts)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def refusal(path: str) -> OSError:
    """The error for a path that is not a regular file of penstock's."""
    return OSError(
        errno.ELOOP,
        "there is a link, a pipe or a device where penstock keeps one of its own files. Remove it (the folder itself "
        "may be a link)",
        path,
    )
